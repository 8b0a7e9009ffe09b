"""What is refused of the adapters' fields, with a message that names them."""

import pytest

from jaxforge.config import ConfigError, default_config, encoder_defaults, resolve, validate


def config_with(settings, with_encoder=False):
    config = default_config()
    if with_encoder:
        config.model.encoder = encoder_defaults("qwen2_5_vit")
        config.model.encoder.image_size = (56, 56)
        config.data.max_patches_per_row = 32
    for path, value in settings.items():
        *groups, name = path.split(".")
        node = config.lora
        for group in groups:
            node = node[group]
        node[name] = value
    return resolve(config)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"decoder.rank": 8},
        {"decoder.rank": 8, "decoder.use_rslora": True, "decoder.alpha": 1.0, "train_also": ("projector/**",)},
        {"projector.rank": 4, "encoder.rank": 4, "encoder.targets": ("**/mlp/*",)},
    ],
)
def test_adapters_on_any_component_are_accepted(settings):
    validate(config_with(settings, with_encoder=True), 8)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"decoder.rank": -1}, "lora.decoder.rank=-1 must be at least 0; 0 has no adapters"),
        ({"encoder.rank": 4}, "lora.encoder.rank=4 needs an encoder, but model.encoder is None; set the rank to 0"),
        ({"projector.rank": 4}, "lora.projector.rank=4 needs an encoder, but model.encoder is None; set the rank to 0"),
        (
            {"decoder.rank": 4, "decoder.alpha": 0.0},
            "lora.decoder.alpha=0.0 must be above 0; twice the rank is a common choice",
        ),
        (
            {"decoder.rank": 4, "decoder.targets": ()},
            "lora.decoder.targets is empty, so lora.decoder.rank=4 would have no effect; set the rank to 0",
        ),
        (
            {"decoder.alpha": 32.0},
            "lora.decoder.alpha=32.0 would have no effect with lora.decoder.rank=0; set a rank or leave alpha at 16.0",
        ),
        (
            {"decoder.rank": 4, "encoder.use_rslora": True},
            "lora.encoder.use_rslora=True would have no effect with lora.encoder.rank=0; set a rank or leave use_rslora"
            " at False",
        ),
        (
            {"decoder.targets": ("**/mlp/*",)},
            "lora.decoder.targets=('**/mlp/*',) would have no effect with lora.decoder.rank=0; set a rank or leave"
            " targets at ('**/attention/*', '**/mlp/*')",
        ),
        (
            {"train_also": ("decoder/head_VD",)},
            "lora.train_also=('decoder/head_VD',) would have no effect, because no component has adapters and all"
            " parameters train; set a rank such as lora.decoder.rank=16, or leave train_also empty and use"
            " optimizer.freeze",
        ),
    ],
)
def test_what_is_impossible_or_without_effect_is_refused(settings, message):
    with pytest.raises(ConfigError) as error:
        validate(config_with(settings), 8)
    assert str(error.value) == message
