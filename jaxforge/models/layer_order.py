"""Where the decoder's layers lie in its stacks of parameters."""

from typing import NamedTuple

_LAYERS = "decoder/layers/"
# The parameters of a layer that only some layers may have, each with stacks of its own.
FEED_FORWARDS = ("mlp", "moe")


class LayerOrder(NamedTuple):
    """What lies in each place of the decoder's stacks in a pipeline, -1 in an unused one.

    Parameters that all layers have are stacks of all layers; those of dense feed-forwards, and those of experts, are
    stacks of the layers that have them, counted among these.

    Attributes:
      layers: of what all layers have.
      mlp: of dense feed-forwards.
      moe: of experts.
    """

    layers: tuple[int, ...]
    mlp: tuple[int, ...]
    moe: tuple[int, ...]

    def of(self, path: str) -> tuple[int, ...]:
        """That of a stack, by a parameter's path."""
        return getattr(self, stack_of(path))


def stack_of(path: str) -> str:
    """Which of the stacks a parameter of the decoder's layers, by its path, or its path in a state, belongs to."""
    part = f"/{path}".split(f"/{_LAYERS}", 1)[1].split("/", 1)[0]
    return part if part in FEED_FORWARDS else "layers"


def is_in_stacks(path: str) -> bool:
    """Whether an array, by its path as a parameter or in a state, belongs to the decoder's layers."""
    return f"/{_LAYERS}" in f"/{path}"

