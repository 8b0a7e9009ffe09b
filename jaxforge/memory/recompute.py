"""From Megatron's recompute words to the segments of `jaxforge.models.parameters.scan_layers`."""

from jaxforge.config.activations import FULL
from jaxforge.config.schema import EncoderConfig, MemoryConfig


def recomputes_mtp_layers(config: MemoryConfig) -> bool:
    """Whether layers for multi-token prediction are recomputed, one by one: block's first layers aren't these."""
    return config.recompute_granularity == FULL and config.recompute_method == "uniform"


def recompute_segments(config: MemoryConfig | EncoderConfig, num_layers: int) -> tuple[tuple[int, int], ...]:
    """(layers, unit) runs of a stack of `num_layers`.

    full + uniform n: groups of n layers, each keeping its input alone.  full + block n: the first n layers, one by one.
    Any other layer keeps activations, by name (`jaxforge.memory.policy`).
    """
    if config.recompute_granularity != FULL:
        return ((num_layers, 0),)
    count = config.recompute_num_layers
    assert count is not None  # validate asks for it
    if config.recompute_method == "uniform":
        return ((num_layers, count),)
    if count >= num_layers:
        return ((num_layers, 1),)
    return ((count, 1), (num_layers - count, 0))
