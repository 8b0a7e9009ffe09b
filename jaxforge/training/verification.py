"""Whether an exported folder, read again, computes what the trained weights compute."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxforge.checkpoint.arrays import ArrayReader, abstract_parameters, exported_dtype, load
from jaxforge.checkpoint.hf import HFArrays
from jaxforge.config.derived import patches_per_full_image
from jaxforge.config.errors import ConfigError
from jaxforge.config.model_schema import ModelConfig
from jaxforge.config.schema import Config, DataConfig, TrainConfig
from jaxforge.data.synthetic import SyntheticSource
from jaxforge.models import VisionLanguageModel
from jaxforge.models.moe import is_statistics
from jaxforge.optim.paths import join, split

Tree = Any
# Visual tokens across the images of the comparison.
_IMAGE_SQUARES = 4


def compare_export(folder: str | Path, arrays: ArrayReader, model: ModelConfig, dtype: str) -> str:
    """Compares fp32 logits on a short random row, on one device.  Returns what was found, in words.

    Raises:
      ConfigError: where the folder is of another architecture, or its logits aren't those of the weights rounded to
        `dtype`.
    """
    graph, abstract = nnx.split(nnx.eval_shape(lambda: VisionLanguageModel(model, rngs=nnx.Rngs(params=0))))
    batch = {key: jnp.asarray(value)[None] for key, value in _row(model).items()}
    # of routers, which weights come without; logits don't depend on them
    statistics, _ = split(nnx.to_pure_dict(abstract), is_statistics)

    @jax.jit
    def logits(parameters):
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), statistics)
        return nnx.merge(graph, join(parameters, zeros)).all_logits(batch)

    def logits_of(reader: ArrayReader) -> np.ndarray:
        # one model at a time on the device
        return np.asarray(logits(load(reader, abstract_parameters(model))))

    again = HFArrays(folder, model)  # whose config.json must say the same architecture
    exported, rounded, trained = (logits_of(one) for one in (again, Rounded(arrays, dtype), arrays))
    error = np.abs(exported - rounded).max()
    # both are the same numbers in the same program
    if not error <= 1e-5 * np.abs(rounded).max():
        raise ConfigError(
            f"{folder} isn't what was trained: its logits differ by up to {error:.3g} from those of the weights in"
            f" {dtype}; please report this with the config.json"
        )
    return (
        f"verified: logits of {folder}, read again, equal those of the weights in {dtype} (largest difference"
        f" {error:.2g}); rounding to {dtype} moves them by up to {np.abs(exported - trained).max():.2g}, of"
        f" {np.abs(trained).max():.3g} at most"
    )


class Rounded:
    """Another reader's arrays, rounded to the dtype of an export."""

    def __init__(self, arrays: ArrayReader, dtype: str):
        self._arrays, self._dtype = arrays, dtype
        self.shapes: Mapping[str, tuple[int, ...]] = arrays.shapes

    def has(self, path: str, layer: int | None) -> bool:
        return self._arrays.has(path, layer)

    def read(self, path: str, layer: int | None) -> np.ndarray:
        return self._arrays.read(path, layer).astype(exported_dtype(path, self._dtype))


def _row(model: ModelConfig) -> dict[str, np.ndarray]:
    """A row of 64 tokens, with small images where the model reads them."""
    encoder, patches = model.encoder, None
    if encoder is not None:
        side = encoder.patch_size * encoder.spatial_merge_size * _IMAGE_SQUARES
        encoder = dataclasses.replace(encoder, image_size=(side, side))
        patches = 2 * patches_per_full_image(encoder)
    config = Config(
        model=dataclasses.replace(model, encoder=encoder),
        data=DataConfig(max_patches_per_row=patches),
        train=TrainConfig(seq_length=64),
    )
    return SyntheticSource(config).row(0)
