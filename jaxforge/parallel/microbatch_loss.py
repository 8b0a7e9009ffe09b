"""The loss of a microbatch and its gradients, added to the sums of a step, where no pipeline does it.

Sums are (gradients, Losses): the former of what `differentiable` gives of the trained weights, in fp32.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxforge.models.multi_token import targets_and_weights
from jaxforge.ops.cross_entropy import Losses
from jaxforge.ops.linear_cross_entropy import LinearCrossEntropy
from jaxforge.ops.sharded_weight import ShardedWeight, differentiable, with_differentiable
from jaxforge.parallel.pipeline.pieces import add

Tree = Any
# Targets [B, S], and their weight or None for 1.
Targets = tuple[jax.Array, jax.Array | None]


@dataclasses.dataclass(frozen=True)
class PlainLoss:
    """By automatic differentiation.

    Attributes:
      loss_of: (parameters, microbatch) -> its losses.
      z_loss_coefficient: weight of the squared log-sum-exp in the gradients.
    """

    loss_of: Callable[[Tree, Tree], Losses]
    z_loss_coefficient: float

    def add(self, sums: Tree, trained: Tree, parameters_of: Callable[[Tree], Tree], microbatch: Tree) -> Tree:
        """The sums with a microbatch's added; `parameters_of` gives all parameters, from the trained weights."""

        def objective(variables):
            losses = self.loss_of(parameters_of(with_differentiable(trained, variables)), microbatch)
            return losses.objective(self.z_loss_coefficient), losses

        (_, losses), gradients = jax.value_and_grad(objective, has_aux=True)(differentiable(trained))
        return add(sums, (gradients, losses))


@dataclasses.dataclass(frozen=True)
class FusedLoss:
    """Head and loss in one, whose gradients are found with the loss; the rest by automatic differentiation.

    The gradient of the head's table is added to its sum in place.

    Attributes:
      states_of: (parameters, microbatch) -> what the head reads, [B, S, D] each: to predict the next token, and at each
        depth of multi-token prediction.
      fused: the loss.
      head: the keys of the head's table, in the parameters as in what is trained.
    """

    states_of: Callable[[Tree, Tree], Sequence[jax.Array]]
    fused: LinearCrossEntropy
    head: tuple[str, ...]

    def add(self, sums: Tree, trained: Tree, parameters_of: Callable[[Tree], Tree], microbatch: Tree) -> Tree:
        """As of `PlainLoss`; the parameters hold the head's table whole."""

        def states_of(variables):
            return tuple(self.states_of(parameters_of(with_differentiable(trained, variables)), microbatch))

        states, vjp = jax.vjp(states_of, differentiable(trained))
        gradients, losses = sums
        table, total = _at(trained, self.head), _at(gradients, self.head)
        targets = targets_and_weights(microbatch, len(states) - 1)
        found, dstates, total = add_head_gradient(
            self.fused, states, _at(parameters_of(trained), self.head), targets, table, total
        )
        if total is not None:
            gradients = _with(gradients, self.head, total)
        return add(gradients, vjp(dstates)[0]), add(losses, found)


def step_sums(
    loss: PlainLoss | FusedLoss,
    trained: Tree,
    parameters_of: Callable[[Tree], Tree],
    batch: Tree,
    zeros: tuple[Tree, Losses],
    with_pending: Callable[[Tree, Tree], tuple[Tree, Tree]] | None = None,
) -> Tree:
    """The sums over all microbatches of a batch [M, B, ...]; `zeros` are those to begin with.

    Args:
      with_pending: (trained, gradients before the last microbatch) -> those with which the last one is computed; None
        where it is like the others.
    """

    def accumulate(sums, microbatch):
        return loss.add(sums, trained, parameters_of, microbatch), None

    if with_pending is None:
        return jax.lax.scan(accumulate, zeros, batch)[0]
    before, last = jax.tree.map(lambda a: a[:-1], batch), jax.tree.map(lambda a: a[-1], batch)
    (gradients, losses), _ = jax.lax.scan(accumulate, zeros, before)
    trained, gradients = with_pending(trained, gradients)
    return loss.add((gradients, losses), trained, parameters_of, last)


def add_head_gradient(
    fused: LinearCrossEntropy,
    states: Sequence[jax.Array],
    head_VD: jax.Array,
    targets: Sequence[Targets],
    table: Any,
    total: Any,
) -> tuple[Losses, tuple[jax.Array, ...], Any]:
    """(losses, gradients of the states, the sum with the head's gradient).

    Args:
      states: [B, S, D] each, to predict the next token and at each depth of multi-token prediction, with the `targets`
        of each.  Only the former have a z-loss.
      head_VD: the table, whole.
      table: the table as it is trained, perhaps a `ShardedWeight`; None where it isn't.
      total: the fp32 sum so far of what `differentiable(table)` is; None likewise.
    """
    is_sharded = isinstance(table, ShardedWeight)
    sum_VD = total if table is not None else None
    if is_sharded:
        sum_VD = jnp.zeros(head_VD.shape, jnp.float32) if table.pending is None else table.pending
    losses, dstates = [], []
    for states_BSD, (targets_BS, weight) in zip(states, targets, strict=True):
        weights_BS = None if weight is None else jnp.broadcast_to(weight, targets_BS.shape)
        one = fused if weight is None else dataclasses.replace(fused, z_loss_coefficient=0.0)
        found = one.gradients(states_BSD, head_VD, targets_BS, sum_VD, weights_BS)
        sum_VD = found.dhead_sum_VD
        losses.append((found.loss, found.z))
        dstates.append(found.dhidden_BSD)
    if is_sharded:
        assert sum_VD is not None  # as given
        sum_VD = total + table.reduced(sum_VD)
    return Losses.joined(losses), tuple(dstates), sum_VD


def _at(tree: Tree, keys: tuple[str, ...]) -> Any:
    """What lies at a path of nested dicts, or None."""
    for key in keys:
        tree = tree.get(key) if isinstance(tree, Mapping) else None
    return tree


def _with(tree: Tree, keys: tuple[str, ...], value: Any) -> Tree:
    return tree | {keys[0]: _with(tree[keys[0]], keys[1:], value)} if keys else value
