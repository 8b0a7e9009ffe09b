"""What the backward pass of a piece of a model needs, as arrays that can lie in a buffer until then.

`jax.vjp` returns a function that is a pytree: its leaves are the residuals.  Those that are parameters, or other arrays
that the backward pass has anyway, are recognised by identity and not kept.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

Tree = Any


@dataclasses.dataclass
class Residuals:
    """How the residuals of one function are told apart.  Filled by `split`, used by `rebuild`.

    Attributes:
      tree: of the vjp function.
      places: for each leaf, its number among the known arrays, or -1 where it is kept.
    """

    tree: Any = None
    places: tuple[int, ...] = ()

    def split(self, vjp: Callable, known: Sequence[jax.Array]) -> list[jax.Array]:
        """The leaves of `vjp` that aren't among the `known` arrays."""
        leaves, self.tree = jax.tree.flatten(vjp)
        numbers = {id(array): number for number, array in enumerate(known)}
        self.places = tuple(numbers.get(id(leaf), -1) for leaf in leaves)
        return [leaf for leaf, place in zip(leaves, self.places, strict=True) if place < 0]

    def rebuild(self, kept: Sequence[jax.Array], known: Sequence[jax.Array]) -> Callable:
        """The vjp function, from what `split` returned and arrays equal to those that were known."""
        remaining = iter(kept)
        leaves = [known[place] if place >= 0 else next(remaining) for place in self.places]
        return jax.tree.unflatten(self.tree, leaves)
