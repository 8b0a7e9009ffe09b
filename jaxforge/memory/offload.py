"""What a program needs where activations lie in host memory between forward and backward.

XLA copies them asynchronously, a slice of a buffer in host memory at a time, and overlaps the copies with compute.
"""

from jaxforge.config.activations import OFFLOAD, layer_actions, model_parts
from jaxforge.config.schema import Config

# A layer has a dozen activations.  XLA lets two slices be copied at once unless told otherwise: then each waits for the
# one before the last, and most of them overlap with other copies alone.
_COPIES_AT_ONCE = 16


def offloads_activations(config: Config) -> bool:
    return any(OFFLOAD in layer_actions(config, part).values() for part in model_parts(config))


def compiler_options(config: Config, platform: str) -> dict[str, int]:
    """Options of `jax.jit` for the train step on "cpu" or "gpu"."""
    if platform == "cpu" or not offloads_activations(config):
        return {}
    return {"xla_gpu_experimental_parallel_async_compute_limit": _COPIES_AT_ONCE}
