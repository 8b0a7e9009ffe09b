"""Models, parameters and batches as small as they can be while every part of them does something."""

import dataclasses

import jax
import numpy as np
from flax import nnx

from jaxforge.config.schema import (
    Config,
    DataConfig,
    DecoderConfig,
    EncoderConfig,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    ProjectorConfig,
    TrainConfig,
)
from jaxforge.data.packing import Document, pack_row
from jaxforge.data.patches import patchify
from jaxforge.data.rows import RowFormat
from jaxforge.training.program import make_model

SEQ_LENGTH, MAX_PATCHES = 16, 32
ENCODERS = ("qwen2_5_vit", "qwen3_vit")

_ENCODER = EncoderConfig(
    num_layers=2, hidden_size=16, ffn_hidden_size=12, num_attention_heads=4, kv_channels=8, in_channels=1, patch_size=2,
    temporal_patch_size=1, spatial_merge_size=2, image_size=(8, 16), window_size=8, fullatt_block_indexes=(1,),
)  # fmt: skip
_QWEN3_VIT = dict(
    model_type="qwen3_vit", window_size=EncoderConfig.window_size, fullatt_block_indexes=(), num_position_embeddings=9,
    deepstack_visual_indexes=(0,), swiglu=False, activation_func="gelu_tanh", normalization="LayerNorm",
)  # fmt: skip
# 21 tokens padded to 32: with tensor parallel 4, one device holds padding and tokens, and the last padding alone
_DECODER = DecoderConfig(
    num_layers=2, hidden_size=16, ffn_hidden_size=12, num_attention_heads=8, num_query_groups=4, kv_channels=8,
    vocab_size=21, make_vocab_size_divisible_by=32,
)  # fmt: skip


def decoder_of(encoder: str | None, **changes) -> DecoderConfig:
    """The decoder that goes with an encoder, as in the released models."""
    style = {
        None: dict(),
        "qwen2_5_vit": dict(add_qkv_bias=True, mrope_section=(1, 2, 1)),
        "qwen3_vit": dict(qk_layernorm=True, mrope_section=(2, 1, 1), mrope_interleaved=True),
    }[encoder]
    return dataclasses.replace(_DECODER, **style | changes)


def encoder_of(encoder: str, **changes) -> EncoderConfig:
    return dataclasses.replace(_ENCODER, **(_QWEN3_VIT if encoder == "qwen3_vit" else {}) | changes)


def tiny_config(encoder: str | None, *, encoder_changes=(), decoder_changes=(), **groups) -> Config:
    """A run; `groups` are other groups of the config, as dicts."""
    kinds = dict(parallel=ParallelConfig, optimizer=OptimizerConfig, train=TrainConfig, loss=LossConfig)
    projector = ProjectorConfig(normalization="LayerNorm" if encoder == "qwen3_vit" else "RMSNorm")
    model = ModelConfig(
        decoder=decoder_of(encoder, **dict(decoder_changes)),
        encoder=encoder_of(encoder, **dict(encoder_changes)) if encoder else None,
        projector=projector if encoder else None,
    )
    groups["train"] = dict(seq_length=SEQ_LENGTH) | groups.get("train", {})
    data = DataConfig(max_patches_per_row=MAX_PATCHES if encoder else None)
    return Config(model=model, data=data, **{name: kinds[name](**fields) for name, fields in groups.items()})


def random_parameters(config: Config, seed: int = 0) -> dict:
    """Nested dict of fp32 NumPy arrays, where biases aren't 0 and scales aren't 1."""
    rng = np.random.default_rng(seed)
    shapes = nnx.to_pure_dict(nnx.state(nnx.eval_shape(lambda: make_model(config, "xla", nnx.Rngs(params=0)))))

    def draw(path, shape):
        values = rng.normal(size=shape.shape) * 0.2
        return (values + (path[-1].key == "scale")).astype(np.float32)

    return jax.tree_util.tree_map_with_path(draw, shapes)


def model_function(config: Config, method: str):
    """(parameters, batch) -> what the model's method gives, compiled for one device."""
    graph = nnx.graphdef(nnx.eval_shape(lambda: make_model(config, "xla", nnx.Rngs(params=0))))
    return jax.jit(lambda parameters, batch: getattr(nnx.merge(graph, parameters), method)(batch))


def image(height: int, width: int, seed: int) -> np.ndarray:
    """Random pixels [height, width, 1]; 4 x 4 pixels make one visual token of 4 patches."""
    return np.random.default_rng(seed).normal(size=(height, width, 1)).astype(np.float32)


def document(config: Config, before: int, images=(), after: int = 3, seed: int = 0) -> Document:
    """`before` text tokens, the images, and `after` text tokens, which alone are targets."""
    rng = np.random.default_rng(seed)
    patches = tuple(patchify(pixels, config.model.encoder) for pixels in images)
    num_visual = sum(len(p.patches_PC) for p in patches) // 4
    length = before + num_visual + after
    tokens = rng.integers(1, config.model.decoder.vocab_size, length).astype(np.int32)
    is_visual = np.arange(length) >= before
    is_visual[before + num_visual :] = False
    return Document(tokens, np.arange(length) >= length - after, is_visual, patches)


def row(config: Config, *documents: Document) -> dict[str, np.ndarray]:
    """One packed row, without a batch dimension."""
    return pack_row(documents, RowFormat.from_config(config))


def rows_of_many_kinds(config: Config) -> dict[str, np.ndarray]:
    """Four rows [4, ...] with 6, 11, 3 and 6 targets; images of five sizes; the second row has none."""
    has_images = config.model.encoder is not None

    def images(*sizes):
        return [image(*size, seed=17 * i + sum(size)) for i, size in enumerate(sizes)] if has_images else []

    rows = [
        # 24 + 8 patches: no padding among the patches
        [document(config, 1, images((8, 12), (4, 8)), 4, seed=1), document(config, 1, after=2)],
        [document(config, 1, after=6, seed=2), document(config, 2, after=5, seed=3)],
        [document(config, 5, images((4, 4)), 3, seed=4)],
        [document(config, 1, images((8, 8)), 4, seed=5), document(config, 2, images((12, 4)), 2, seed=6)],
    ]
    packed = [row(config, *documents) for documents in rows]
    return {key: np.stack([one[key] for one in packed]) for key in packed[0]}


def microbatches(rows: dict[str, np.ndarray], number: int) -> dict[str, np.ndarray]:
    """Rows [R, ...] as a batch [number, R / number, ...]."""
    return {key: value.reshape(number, -1, *value.shape[1:]) for key, value in rows.items()}
