"""How models ask for shardings without knowing the mesh."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

Names = tuple[str | None, ...]


@dataclasses.dataclass(frozen=True)
class Placement:
    """Maps logical axis names to mesh axes.  The empty placement is a single device: it constrains nothing.

    Attributes:
      rules: (logical name, mesh axes) pairs; a name without a rule is replicated.
      manual_axes: the mesh axes over which an island is manual: every automatic axis of the mesh.
    """

    rules: tuple[tuple[str, tuple[str, ...]], ...] = ()
    manual_axes: tuple[str, ...] = ()

    def axes(self, name: str | None) -> tuple[str, ...]:
        """The mesh axes of a logical name; () where it isn't sharded."""
        return dict(self.rules).get(name, ()) if name is not None else ()

    def spec(self, names: Names) -> PartitionSpec:
        return PartitionSpec(*(self.axes(name) or None for name in names))

    def constrain(self, x: jax.Array, names: Names) -> jax.Array:
        """Fixes the sharding of `x`, one logical name (or None) per dimension."""
        if not self.manual_axes:
            return x
        return jax.lax.with_sharding_constraint(x, self.spec(names))

    def reshard(self, x: jax.Array, before: Names, after: Names) -> jax.Array:
        """Lays out `x` as `after`; its cotangent is laid out as `before`.

        A plain constraint would also bind the cotangent to `after`: where the cotangent is a partial sum, that is an
        all-reduce and a slice instead of a reduce-scatter.
        """
        if not self.manual_axes:
            return x
        return _reshard(self, before, after, x)

    def island(
        self, f: Callable, in_names: Sequence[Names], out_names: Any, *, check_vma: bool = True
    ) -> Callable:
        """`f` made manual over the tensor axes: it sees local shards, and reduces over `axes(name)` itself.

        On a single device `f` is called as it is, and collectives over `axes(name) == ()` do nothing.
        `out_names` is a tuple of names for one output, or a list of such tuples.  `check_vma` is JAX's: without it `f`
        isn't differentiated by JAX, and may call kernels and carry constants through loops as they are.
        """
        if not self.manual_axes:
            return f
        is_one = isinstance(out_names, tuple)
        return jax.shard_map(
            f,
            in_specs=tuple(self.spec(names) for names in in_names),
            out_specs=self.spec(out_names) if is_one else tuple(self.spec(names) for names in out_names),
            axis_names=set(self.manual_axes),
            # with it JAX knows what is equal along an axis, and reduces cotangents along no axis that it needn't: the
            # encoder's aren't summed over tensor_outer, along which all of them are equal
            check_vma=check_vma,
        )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _reshard(placement: Placement, before: Names, after: Names, x: jax.Array) -> jax.Array:
    return placement.constrain(x, after)


def _reshard_forward(placement, before, after, x):
    return placement.constrain(x, after), None


def _reshard_backward(placement, before, after, _, dy):
    return (placement.constrain(dy, before),)


_reshard.defvjp(_reshard_forward, _reshard_backward)

SINGLE_DEVICE = Placement()
