"""Small configs that the data tests share."""

import dataclasses

from jaxforge.config.schema import (
    Config,
    DataConfig,
    DecoderConfig,
    EncoderConfig,
    ModelConfig,
    ProjectorConfig,
    TrainConfig,
)

ENCODER = EncoderConfig(
    patch_size=8, spatial_merge_size=2, temporal_patch_size=1, in_channels=1, window_size=32, image_size=(128, 256)
)


def vision_config(source="digits", *, encoder=None, decoder=None, data=None, train=None) -> Config:
    """A vision-language run; each argument changes fields of its group."""
    return Config(
        model=ModelConfig(
            decoder=DecoderConfig(**dict(vocab_size=261, mrope_section=(2, 3, 3)) | (decoder or {})),
            encoder=dataclasses.replace(ENCODER, **encoder or {}),
            projector=ProjectorConfig(),
        ),
        data=DataConfig(**{"source": source, "max_patches_per_row": 256, "eval_samples": 20} | (data or {})),
        train=TrainConfig(**dict(seq_length=128) | (train or {})),
    )


def text_config(**train) -> Config:
    """A language-model run."""
    return Config(train=TrainConfig(**dict(seq_length=32) | train))
