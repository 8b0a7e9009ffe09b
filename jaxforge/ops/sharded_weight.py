"""Weights of which a data parallel rank holds or trains only a part, and which are whole while a layer computes.

A `ShardedWeight` takes a parameter's place in a nested dict of parameters, in a region that is manual over the data
parallel axes.  Loops over stacked layers slice it like an array; `whole` is called where a layer begins.

Gradients are those of a carrier: zeros in the place of the part, which nothing reads, in fp32.  So what comes back is
the sum over the ranks of this rank's part, at the precision of the sums that it is added to, and no gradient of the
whole weight lives longer than its layer.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

Tree = Any


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["weight", "carrier", "pending"],
    meta_fields=["axes", "dim", "is_part", "automatic"],
)
@dataclasses.dataclass(frozen=True)
class ShardedWeight:
    """A weight and this rank's part in it.

    Attributes:
      weight: this rank's part, or the whole where `is_part` is false.
      carrier: fp32 zeros of the part's shape, whose gradient is the part's; None for a weight that doesn't train.
      axes: the mesh axes over which the parts lie, all manual.
      dim: the dimension that is divided, counted from the last: -1, -2 and so on.
      automatic: how the last dimensions lie over the automatic axes.
      pending: fp32 gradients of the whole weight that are still to be summed over the ranks, and go with the next one.
    """

    weight: jax.Array
    carrier: jax.Array | None
    axes: tuple[str, ...]
    dim: int
    is_part: bool
    automatic: PartitionSpec = PartitionSpec()
    pending: jax.Array | None = None

    def whole(self) -> jax.Array:
        """The whole weight; its gradient goes to the carrier, reduced and scattered over the ranks."""
        if self.carrier is None:
            return self.gathered()
        return _with_carrier(self._division, self.is_part, self.carrier, self.weight, self.pending)

    def gathered(self) -> jax.Array:
        """The whole weight, without a way back for gradients."""
        return _gathered(self._division, self.is_part, self.weight)

    def reduced(self, gradient: jax.Array) -> jax.Array:
        """This rank's part of the sum over the ranks of a gradient of the whole weight, in fp32."""
        return _scattered(self._division, gradient)

    @property
    def _division(self) -> tuple:
        return self.axes, self.dim, self.automatic


def whole(tree: Tree) -> Tree:
    """The tree with whole weights in the place of sharded ones."""
    return _map(lambda leaf: leaf.whole() if isinstance(leaf, ShardedWeight) else leaf, tree)


def gathered(tree: Tree) -> Tree:
    """`whole`, of which no gradient is taken."""
    return _map(lambda leaf: leaf.gathered() if isinstance(leaf, ShardedWeight) else leaf, tree)


def differentiable(tree: Tree) -> Tree:
    """What to differentiate for the gradients of `tree`: carriers in the place of sharded weights."""
    return _map(lambda leaf: leaf.carrier if isinstance(leaf, ShardedWeight) else leaf, tree)


def with_differentiable(tree: Tree, variables: Tree) -> Tree:
    """`tree` as a function of what `differentiable` gives."""

    def one(leaf, variable):
        return dataclasses.replace(leaf, carrier=variable) if isinstance(leaf, ShardedWeight) else variable

    return jax.tree.map(one, tree, variables, is_leaf=_is_sharded)


def reduced(tree: Tree, gradients: Tree) -> Tree:
    """Gradients of `gathered(tree)` as those of `differentiable(tree)`."""

    def one(leaf, gradient):
        return leaf.reduced(gradient) if isinstance(leaf, ShardedWeight) else gradient

    return jax.tree.map(one, tree, gradients, is_leaf=_is_sharded)


def _is_sharded(node: Any) -> bool:
    return isinstance(node, ShardedWeight)


def _map(f, tree):
    return jax.tree.map(f, tree, is_leaf=_is_sharded)


def gather(x: jax.Array, axes: tuple[str, ...], dim: int, automatic: PartitionSpec) -> jax.Array:
    """All parts of `x` along `dim`, counted from the last; `automatic` as in `ShardedWeight`."""
    return _manually(lambda x: lax.all_gather(x, axes, axis=x.ndim + dim, tiled=True), x, automatic)


def scatter(x: jax.Array, axes: tuple[str, ...], dim: int, automatic: PartitionSpec) -> jax.Array:
    """This rank's part along `dim` of the sum of `x` over the ranks, likewise."""
    return _manually(lambda x: lax.psum_scatter(x, axes, scatter_dimension=x.ndim + dim, tiled=True), x, automatic)


def _manually(f, x, automatic):
    """XLA would gather `x` over the automatic axes before a gather or scatter over manual ones, and cut it again."""
    axes = {axis for entry in automatic for axis in ((entry,) if isinstance(entry, str) else entry or ())}
    if not axes:
        return f(x)
    spec = PartitionSpec(*(None,) * (x.ndim - len(automatic)), *automatic)
    return jax.shard_map(f, in_specs=spec, out_specs=spec, axis_names=axes, check_vma=False)(x)


def _gathered(division, is_part, weight):
    return gather(weight, *division) if is_part else weight


def _scattered(division, gradient):
    return scatter(gradient.astype(jnp.float32), *division)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _with_carrier(division, is_part, carrier, weight, pending):
    return _gathered(division, is_part, weight)


def _with_carrier_forward(division, is_part, carrier, weight, pending):
    return _gathered(division, is_part, weight), pending


def _with_carrier_backward(division, is_part, pending, gradient):
    if pending is not None:
        gradient = gradient.astype(jnp.float32) + pending
    return _scattered(division, gradient), None, None


_with_carrier.defvjp(_with_carrier_forward, _with_carrier_backward)
