"""The loss of a microbatch and its gradients, added to the sums of a step, where no pipeline does it.

Sums are (gradients, (loss, z)): of what `differentiable` gives of the trained weights, in fp32; of cross-entropy; and
of the squared log-sum-exp.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxforge.ops.linear_cross_entropy import LinearCrossEntropy
from jaxforge.ops.sharded_weight import ShardedWeight, differentiable, with_differentiable
from jaxforge.parallel.pipeline.pieces import add

Tree = Any


@dataclasses.dataclass(frozen=True)
class PlainLoss:
    """By automatic differentiation.

    Attributes:
      loss_of: (parameters, microbatch) -> sums of cross-entropy and squared log-sum-exp.
      z_loss_coefficient: weight of the latter in the gradients.
    """

    loss_of: Callable[[Tree, Tree], tuple[jax.Array, jax.Array]]
    z_loss_coefficient: float

    def add(self, sums: Tree, trained: Tree, parameters_of: Callable[[Tree], Tree], microbatch: Tree) -> Tree:
        """The sums with a microbatch's added; `parameters_of` gives all parameters, from the trained weights."""

        def objective(variables):
            loss, z = self.loss_of(parameters_of(with_differentiable(trained, variables)), microbatch)
            return loss + self.z_loss_coefficient * z, (loss, z)

        (_, losses), gradients = jax.value_and_grad(objective, has_aux=True)(differentiable(trained))
        return add(sums, (gradients, losses))


@dataclasses.dataclass(frozen=True)
class FusedLoss:
    """Head and loss in one, whose gradients are found with the loss; the rest by automatic differentiation.

    The gradient of the head's table is added to its sum in place.

    Attributes:
      hidden_of: (parameters, microbatch) -> what the head reads, [B, S, D].
      fused: the loss.
      head: the keys of the head's table, in the parameters as in what is trained.
    """

    hidden_of: Callable[[Tree, Tree], jax.Array]
    fused: LinearCrossEntropy
    head: tuple[str, ...]

    def add(self, sums: Tree, trained: Tree, parameters_of: Callable[[Tree], Tree], microbatch: Tree) -> Tree:
        """As of `PlainLoss`; the parameters hold the head's table whole."""

        def hidden_of(variables):
            return self.hidden_of(parameters_of(with_differentiable(trained, variables)), microbatch)

        hidden_BSD, vjp = jax.vjp(hidden_of, differentiable(trained))
        gradients, losses = sums
        table, total = _at(trained, self.head), _at(gradients, self.head)
        loss, z, dhidden_BSD, total = add_head_gradient(
            self.fused, hidden_BSD, _at(parameters_of(trained), self.head), microbatch["targets"], table, total
        )
        if total is not None:
            gradients = _with(gradients, self.head, total)
        return add(gradients, vjp(dhidden_BSD)[0]), add(losses, (loss, z))


def step_sums(
    loss: PlainLoss | FusedLoss,
    trained: Tree,
    parameters_of: Callable[[Tree], Tree],
    batch: Tree,
    zeros: Tree,
    with_pending: Callable[[Tree, Tree], tuple[Tree, Tree]] | None = None,
) -> Tree:
    """The sums over all microbatches of a batch [M, B, ...]; `zeros` are gradients to begin with.

    Args:
      with_pending: (trained, gradients before the last microbatch) -> those with which the last one is computed; None
        where it is like the others.
    """
    scalar = jnp.zeros((), jnp.float32)

    def accumulate(sums, microbatch):
        return loss.add(sums, trained, parameters_of, microbatch), None

    if with_pending is None:
        return jax.lax.scan(accumulate, (zeros, (scalar, scalar)), batch)[0]
    before, last = jax.tree.map(lambda a: a[:-1], batch), jax.tree.map(lambda a: a[-1], batch)
    (gradients, losses), _ = jax.lax.scan(accumulate, (zeros, (scalar, scalar)), before)
    trained, gradients = with_pending(trained, gradients)
    return loss.add((gradients, losses), trained, parameters_of, last)


def add_head_gradient(
    fused: LinearCrossEntropy, hidden_BSD: jax.Array, head_VD: jax.Array, targets_BS: jax.Array, table: Any, total: Any
) -> tuple[jax.Array, jax.Array, jax.Array, Any]:
    """(loss, z, dhidden, the sum with the head's gradient).

    Args:
      head_VD: the table, whole.
      table: the table as it is trained, perhaps a `ShardedWeight`; None where it isn't.
      total: the fp32 sum so far of what `differentiable(table)` is; None likewise.
    """
    if not isinstance(table, ShardedWeight):
        found = fused.gradients(hidden_BSD, head_VD, targets_BS, total if table is not None else None)
        return found.loss, found.z, found.dhidden_BSD, found.dhead_sum_VD
    before_VD = jnp.zeros(head_VD.shape, jnp.float32) if table.pending is None else table.pending
    found = fused.gradients(hidden_BSD, head_VD, targets_BS, before_VD)
    assert found.dhead_sum_VD is not None  # as given
    return found.loss, found.z, found.dhidden_BSD, total + table.reduced(found.dhead_sum_VD)


def _at(tree: Tree, keys: tuple[str, ...]) -> Any:
    """What lies at a path of nested dicts, or None."""
    for key in keys:
        tree = tree.get(key) if isinstance(tree, Mapping) else None
    return tree


def _with(tree: Tree, keys: tuple[str, ...], value: Any) -> Tree:
    return tree | {keys[0]: _with(tree[keys[0]], keys[1:], value)} if keys else value
