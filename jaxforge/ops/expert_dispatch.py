"""Tokens to the devices that hold their experts, and what the experts make of them back.

Three ways.  "allgather": every device sees all tokens, computes those of its experts, and the results are summed.
"alltoall": each (token, choice) pair goes to its expert's device and back.  "flex": a token crosses to another node
once, however many of its experts are there, is spread inside the node, and one sum a node comes back (the idea of
DeepSeek-V3's dispatch, arXiv:2412.19437, section 3.2.2, and of its library DeepEP).  Weights go with their rows, and
the experts apply them where that is cheapest: so no backward pass reads what comes back.

N tokens of this device, K choices of each, E experts, P devices that share them, X = E / P experts of each, R rows of
a buffer, D width.  Everything runs where the axes of the devices are manual, and is differentiated by JAX; with gathers
alone, in both directions.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxforge.ops.device_group import DeviceGroup, blocks
from jaxforge.ops.expert_rows import (
    fitting,
    group,
    inverse,
    packed,
    permutation,
    received,
    regrouped,
    within_capacity,
)
from jaxforge.ops.moe_permute import Permutation, permute, unpermute
from jaxforge.ops.row_exchange import exchange

KINDS = ("allgather", "alltoall", "flex")
DROP_POLICIES = ("probs", "position")
# (rows_RD sorted by local expert, weights_R, sizes_X) -> weighted rows_RD, which are 0 behind the first sum(sizes)
Compute = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class Dispatcher:
    """How tokens reach their experts: device r along `axes` holds experts r X to (r + 1) X - 1.

    Attributes:
      kind: one of KINDS; without `axes` all of them are the same.
      num_experts: E, a multiple of P.
      axes: mesh axes of more than one device that share the experts, outermost first; () for one device.
      num_nodes: nodes that these devices lie on, in equal blocks of consecutive ones; 1 where they lie otherwise.
        "flex" is "alltoall" where all are on one node, or each on its own.
      capacity_factor: an expert takes at most ceil(factor x N K / E) pairs from each device, N being the tokens of
        that device, padding among them; None for no limit.
      drop_policy: which pairs stay within the capacity: those of the largest weights ("probs") or the first
        ("position").
      buffer_factor: rows of the buffer in which a device gets its experts' tokens, as a multiple of N K, rounded up to
        a multiple of 8; None for as many as any routing needs, which is P N min(K, X).  What doesn't fit is dropped:
        the last sources' and of these the last experts' pairs.  In "flex" also a device that spreads its node's
        tokens has room for so many pairs, and drops the last experts'.
      uses_ragged_exchange: rows go by XLA's ragged all-to-all, which the CPU hasn't.
      overlap: tokens go in two halves, each with its own buffer, the larger first: one half may be exchanged while
        the other is computed.
      backend: of `moe_permute`.
    """

    kind: str
    num_experts: int
    axes: tuple[str, ...] = ()
    num_nodes: int = 1
    capacity_factor: float | None = None
    drop_policy: str = "probs"
    buffer_factor: float | None = None
    uses_ragged_exchange: bool = False
    overlap: bool = False
    backend: str = "xla"

    def __post_init__(self):
        if self.kind not in KINDS or self.drop_policy not in DROP_POLICIES:
            raise ValueError(f"kind={self.kind!r} drop_policy={self.drop_policy!r}: use {KINDS} and {DROP_POLICIES}")

    def __call__(
        self, x_ND: jax.Array, experts_NK: jax.Array, weights_NK: jax.Array, compute: Compute
    ) -> tuple[jax.Array, jax.Array]:
        """y_n = sum over k of weights[n, k] f_{experts[n, k]}(x_n); `compute` is f, weighted, of this device's experts.

        Args:
          x_ND: any float dtype, which is that of the result and of what is exchanged; sums are in fp32.
          experts_NK: int32, in [0, E), different ones for a token; E for a choice that isn't routed.
          weights_NK: fp32.
          compute: gets rows sorted by local expert, their fp32 weights, which it applies, and int32 sizes_X.  It is
            called once, with overlap twice.

        Returns:
          y_ND, and how many routed pairs of this device were not computed (int32).
        """
        routed = jnp.sum(experts_NK < self.num_experts, dtype=jnp.int32)
        if self.capacity_factor is not None:
            experts_NK = within_capacity(
                experts_NK, weights_NK, self.num_experts, self.capacity_factor, self.drop_policy
            )
        dropped = routed - jnp.sum(experts_NK < self.num_experts, dtype=jnp.int32)

        num_tokens = x_ND.shape[0]
        parts = [slice(0, num_tokens)]
        if self.overlap and self.axes and num_tokens > 1:
            middle = (num_tokens + 1) // 2
            parts = [slice(0, middle), slice(middle, num_tokens)]
        sent = [self._dispatch(x_ND[part], experts_NK[part], weights_NK[part]) for part in parts]
        # computed one after the other, combined one after the other; no exchange waits for the other half's computation
        rows = [compute(sent[0].rows_RD, sent[0].weights_R, sent[0].sizes_X)]
        for one in sent[1:]:
            rows_RD, rows[-1] = _in_order(one.rows_RD, rows[-1])
            rows.append(compute(rows_RD, one.weights_R, one.sizes_X))
        y_ND = [sent[0].combine(rows[0])]
        for one, rows_RD in zip(sent[1:], rows[1:], strict=True):
            rows_RD, y_ND[-1] = _in_order(rows_RD, y_ND[-1])
            y_ND.append(one.combine(rows_RD))
        return jnp.concatenate(y_ND), sum((jnp.sum(one.dropped_N) for one in sent), start=dropped)

    def _dispatch(self, x_ND, experts_NK, weights_NK) -> "_Dispatched":
        if not self.axes:
            return _on_one_device(x_ND, experts_NK, weights_NK, self.num_experts, self.backend)
        buffer = None
        if self.buffer_factor is not None:
            buffer = 8 * math.ceil(math.ceil(self.buffer_factor * experts_NK.size) / 8)
        tokens = (x_ND, experts_NK, weights_NK, self.num_experts, self.backend)
        if self.kind == "allgather":
            return _allgather(*tokens, self.axes, buffer)
        all_devices = DeviceGroup(self.axes)
        if self.kind == "flex" and 1 < self.num_nodes < all_devices.size:
            groups = blocks(self.axes, all_devices.size, self.num_nodes)
            return _over_nodes(*tokens, *groups, buffer, self.uses_ragged_exchange)
        return _alltoall(*tokens, all_devices, experts_NK.size, buffer, self.uses_ragged_exchange)


class _Dispatched(NamedTuple):
    """Tokens with their experts.

    Attributes:
      rows_RD, weights_R, sizes_X: what `compute` gets.
      combine: from what it returns to y_ND.
      dropped_N: int32, of each token the routed choices that aren't in the rows.  "allgather" has their sum alone.
    """

    rows_RD: jax.Array
    weights_R: jax.Array
    sizes_X: jax.Array
    combine: Callable[[jax.Array], jax.Array]
    dropped_N: jax.Array


def _on_one_device(x_ND, experts_NK, weights_NK, num_experts, backend):
    by_expert, sizes_X = _named(permutation(experts_NK, num_experts))
    return _Dispatched(
        permute(x_ND, by_expert, backend=backend),
        _weights_of_rows(weights_NK, by_expert)[:, 0],
        sizes_X,
        lambda rows_RD: unpermute(rows_RD, None, by_expert, backend=backend),
        jnp.zeros(1, jnp.int32),
    )


def _allgather(x_ND, experts_NK, weights_NK, num_experts, backend, axes, buffer):
    num_ranks, rank = lax.axis_size(axes), lax.axis_index(axes)
    local_experts = num_experts // num_ranks
    num_tokens, num_choices = experts_NK.shape
    num_rows = _at_most(num_ranks * num_tokens * min(num_choices, local_experts), buffer)

    # pairs of this device's experts, by expert and in each by source
    experts_PM = lax.all_gather(experts_NK.reshape(-1), axes)
    local_PM = experts_PM - rank * local_experts
    is_local_PM = (local_PM >= 0) & (local_PM < local_experts)
    source_PM = jnp.arange(num_ranks, dtype=jnp.int32)[:, None]
    key_PM = jnp.where(is_local_PM, local_PM * num_ranks + source_PM, local_experts * num_ranks)
    groups = group(key_PM.reshape(-1), local_experts * num_ranks)

    # every device counts all pairs, so that a source knows which of its own don't fit
    sizes_PE = jnp.zeros((num_ranks, num_experts), jnp.int32).at[source_PM, experts_PM].add(1, mode="drop")
    kept_PE = received(sizes_PE, num_rows)
    kept_PX = lax.dynamic_slice_in_dim(kept_PE, rank * local_experts, local_experts, axis=1)
    by_expert = packed(groups, kept_PX.T.reshape(-1), num_rows, num_choices)
    by_expert, sizes_X = _named((by_expert, jnp.sum(kept_PX, axis=0)))
    gathered_x, gathered_weights = (lax.all_gather(a, axes, tiled=True) for a in (x_ND, weights_NK))

    def combine(rows_RD):
        partial_TD = unpermute(rows_RD, None, by_expert, backend=backend)
        return lax.psum_scatter(partial_TD, axes, scatter_dimension=0, tiled=True)

    dropped = jnp.sum(sizes_PE[rank] - kept_PE[rank])[None]
    weights_R = _weights_of_rows(gathered_weights, by_expert)[:, 0]
    return _Dispatched(permute(gathered_x, by_expert, backend=backend), weights_R, sizes_X, combine, dropped)


def _alltoall(x_ND, experts_NK, weights_NK, num_experts, backend, devices, send_rows, buffer, ragged):
    num_ranks, rank = devices.size, devices.index()
    local_experts = num_experts // num_ranks
    num_tokens, num_choices = experts_NK.shape
    num_rows = _at_most(num_ranks * num_tokens * min(num_choices, local_experts), buffer)

    groups = group(experts_NK.reshape(-1), num_experts)
    sizes_PE = devices.all_gather(fitting(groups.sizes_G, send_rows))
    kept_PE = received(sizes_PE, num_rows)
    kept_PPX = kept_PE.reshape(num_ranks, num_ranks, local_experts)
    by_expert = packed(groups, kept_PE[rank], send_rows, num_choices)
    by_local_expert = regrouped(kept_PPX[:, rank], num_rows)
    sizes = jnp.sum(kept_PPX, axis=2), jnp.sum(kept_PPX[:, rank], axis=0)
    by_expert, by_local_expert, (sizes_PP, sizes_X) = _named((by_expert, by_local_expert, sizes))

    def sent(rows_SD):
        return exchange(rows_SD, sizes_PP, devices, num_rows, ragged=ragged)

    rows_RD = permute(sent(permute(x_ND, by_expert, backend=backend)), by_local_expert, backend=backend)
    weights_R1 = permute(sent(_weights_of_rows(weights_NK, by_expert)), by_local_expert, backend="xla")

    def combine(rows_RD):
        rows_RD = permute(rows_RD, inverse(by_local_expert), backend=backend)
        rows_SD = exchange(rows_RD, sizes_PP.T, devices, send_rows, ragged=ragged)
        return unpermute(rows_SD, None, by_expert, backend=backend)

    dropped_N = jnp.sum((experts_NK < num_experts) & (by_expert.place_NK == send_rows), axis=1, dtype=jnp.int32)
    return _Dispatched(rows_RD, weights_R1[:, 0], sizes_X, combine, dropped_N)


def _over_nodes(x_ND, experts_NK, weights_NK, num_experts, backend, nodes, inside_node, buffer, ragged):
    """One copy of a token goes to the device of each node that has this device's place in it, with all its choices."""
    num_nodes, node = nodes.size, nodes.index()
    node_experts = num_experts // num_nodes
    num_tokens, num_choices = experts_NK.shape
    send_rows, num_rows = num_tokens * min(num_choices, num_nodes), num_tokens * num_nodes

    # a token's first choice of each node stands for all
    node_NK = experts_NK // node_experts  # num_nodes where it isn't routed
    is_earlier_KK = jnp.tri(num_choices, k=-1, dtype=bool)
    is_repeated_NK = jnp.any((node_NK[:, :, None] == node_NK[:, None]) & is_earlier_KK, axis=2)
    groups = group(jnp.where(is_repeated_NK, num_nodes, node_NK).reshape(-1), num_nodes)
    by_node = packed(groups, groups.sizes_G, send_rows, num_choices)
    by_node, sizes_HH = _named((by_node, nodes.all_gather(groups.sizes_G)))

    def to_nodes(a, backend):
        return exchange(permute(a, by_node, backend=backend), sizes_HH, nodes, num_rows, ragged=ragged)

    def from_nodes(rows_TD):
        return exchange(rows_TD, sizes_HH.T, nodes, send_rows, ragged=ragged)

    # numbers of experts are exact in fp32 up to 2^24: one exchange for both
    choices = jnp.concatenate([experts_NK.astype(jnp.float32), weights_NK.astype(jnp.float32)], axis=1)
    x_TD, choices = to_nodes(x_ND, backend), to_nodes(choices, "xla")
    experts_TK = choices[:, :num_choices].astype(jnp.int32) - node * node_experts
    is_token_T = jnp.arange(num_rows) < jnp.sum(sizes_HH[:, node])
    is_here_TK = is_token_T[:, None] & (experts_TK >= 0) & (experts_TK < node_experts)
    experts_TK = jnp.where(is_here_TK, experts_TK, node_experts)
    weights_TK = choices[:, num_choices:].astype(weights_NK.dtype)
    spread_rows = _at_most(num_rows * min(num_choices, node_experts), buffer)
    tokens = (x_TD, experts_TK, weights_TK, node_experts, backend)
    inside = _alltoall(*tokens, inside_node, spread_rows, buffer, ragged)

    def combine(rows_RD):
        return unpermute(from_nodes(inside.combine(rows_RD)), None, by_node, backend=backend)

    dropped_N = jnp.zeros(1, jnp.int32)
    if buffer is not None:  # else everything fits
        dropped_N = from_nodes(inside.dropped_N[:, None])[:, 0]
    return inside._replace(combine=combine, dropped_N=dropped_N)


def _at_most(num_rows: int, buffer: int | None) -> int:
    return num_rows if buffer is None else min(num_rows, buffer)


@jax.custom_vjp
def _in_order(rows_RD, before_RD):
    """Both as they are; what uses `rows` is computed after `before`, and in the backward pass the other way round.

    Nothing else keeps the compiler from making one product of two that share their weights, which would wait for both
    exchanges.
    """
    return lax.optimization_barrier((rows_RD, before_RD))[0], before_RD


def _in_order_forward(rows_RD, before_RD):
    return _in_order(rows_RD, before_RD), None


def _in_order_backward(_, gradients):
    drows_RD, dbefore_RD = gradients
    return drows_RD, lax.optimization_barrier((dbefore_RD, drows_RD))[0]


_in_order.defvjp(_in_order_forward, _in_order_backward)



def _weights_of_rows(weights_NK: jax.Array, order: Permutation) -> jax.Array:
    """The weight of each row's pair, 0 in an empty row.  [R, 1]"""
    pairs = Permutation(order.choice_R, order.place_NK.reshape(-1, 1))
    return permute(weights_NK.reshape(-1, 1), pairs, backend="xla")


def _named(arrays: Any) -> Any:
    """Small arrays that the backward pass reads, and that take a sort or an exchange to find again."""
    return jax.tree.map(lambda array: checkpoint_name(array, "router"), arrays)
