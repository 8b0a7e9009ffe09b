"""Which (token, choice) pair takes which row of a buffer: the arithmetic of expert parallelism, in int32.

A pair is number n K + k for choice k of token n.  M pairs or keys, G groups, R rows of a buffer, P devices, X experts
of each, E = P X experts in all.  Nothing is larger than the pairs or the rows, and only pairs are sorted.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxforge.ops.moe_permute import Permutation


class Groups(NamedTuple):
    """Pairs sorted by key.

    Attributes:
      key_M: in [0, G); G for a pair that is in no group.
      order_M: pairs by key, those of no group last.
      rank_M: how many pairs of its group come before each pair.
      sizes_G: pairs of each group.
    """

    key_M: jax.Array
    order_M: jax.Array
    rank_M: jax.Array
    sizes_G: jax.Array


def group(key_M: jax.Array, num_groups: int, weight_M: jax.Array | None = None) -> Groups:
    """Sorts by key, in a group by falling weight where weights are given, else by number."""
    number_M = jnp.arange(key_M.size, dtype=jnp.int32)
    keys = (key_M,) if weight_M is None else (key_M, -weight_M)
    sorted_M, *_, order_M = lax.sort((*keys, number_M), num_keys=len(keys))
    edges = jnp.arange(num_groups + 1, dtype=jnp.int32)
    start_G1 = jnp.searchsorted(sorted_M, edges, method="scan_unrolled").astype(jnp.int32)
    place_M = jnp.zeros_like(number_M).at[order_M].set(number_M, unique_indices=True)
    return Groups(key_M, order_M, place_M - start_G1[key_M], jnp.diff(start_G1))


def packed(groups: Groups, kept_G: jax.Array, num_rows: int, num_choices: int) -> Permutation:
    """The first `kept` pairs of each group, group after group; they must not be more than `num_rows`."""
    num_pairs = groups.key_M.size
    segment_R, index_R = _segments(kept_G, num_rows)
    pair_R = groups.order_M.at[starts(groups.sizes_G).at[segment_R].get(mode="clip") + index_R].get(mode="clip")
    choice_R = jnp.where(segment_R < kept_G.size, pair_R, num_pairs)
    # a pair of no group has key G, where nothing is kept
    kept_M = groups.rank_M < kept_G.at[groups.key_M].get(mode="fill", fill_value=0)
    row_M = starts(kept_G).at[groups.key_M].get(mode="clip") + groups.rank_M
    return Permutation(choice_R, jnp.where(kept_M, row_M, num_rows).reshape(-1, num_choices))


def permutation(
    experts_NK: jax.Array, num_experts: int, *, num_rows: int | None = None
) -> tuple[Permutation, jax.Array]:
    """Rows sorted by expert, those of one expert in the order of tokens, the empty ones last.

    Args:
      experts_NK: int32, in [0, num_experts), or num_experts for a pair that isn't routed.
      num_rows: of the buffer, by default N K; pairs that would lie beyond it have no row.

    Returns:
      The permutation, and the rows of each expert in the buffer [E] int32.
    """
    num_pairs = experts_NK.size
    num_rows = num_pairs if num_rows is None else num_rows
    groups = group(experts_NK.reshape(-1), num_experts)
    kept_E = fitting(groups.sizes_G, num_rows)
    # rows are the sorted pairs themselves, and known without the sizes of groups, which `packed` searches by: where
    # rows wait for these, XLA holds one array of all rows more at a time
    # (measured in tests/gpu_compile/test_moe_kernels.py; taking places from `group` costs the same array)
    number_M = jnp.arange(num_pairs, dtype=jnp.int32)
    is_row_M = (groups.key_M[groups.order_M] < num_experts) & (number_M < num_rows)
    choice_M = jnp.where(is_row_M, groups.order_M, num_pairs)
    choice_R = jnp.pad(choice_M[:num_rows], (0, max(0, num_rows - num_pairs)), constant_values=num_pairs)
    row_M = jnp.where(is_row_M, number_M, num_rows)
    place_M = jnp.zeros_like(number_M).at[groups.order_M].set(row_M, unique_indices=True)
    return Permutation(choice_R, place_M.reshape(experts_NK.shape)), kept_E


def regrouped(sizes_PX: jax.Array, num_rows: int) -> Permutation:
    """From rows by source and in each by expert, to rows by expert and in each by source.  One choice a row."""
    num_sources, num_experts = sizes_PX.shape
    segment_R, index_R = _segments(sizes_PX.T.reshape(-1), num_rows)
    expert_R, source_R = segment_R // num_sources, segment_R % num_sources
    begin_PX = starts(sizes_PX.reshape(-1)).reshape(sizes_PX.shape)
    begin_R = begin_PX.at[source_R, expert_R].get(mode="clip")
    choice_R = jnp.where(segment_R < sizes_PX.size, begin_R + index_R, num_rows)

    segment_R, index_R = _segments(sizes_PX.reshape(-1), num_rows)
    source_R, expert_R = segment_R // num_experts, segment_R % num_experts
    begin_XP = starts(sizes_PX.T.reshape(-1)).reshape(num_experts, num_sources)
    begin_R = begin_XP.at[expert_R, source_R].get(mode="clip")
    place_R = jnp.where(segment_R < sizes_PX.size, begin_R + index_R, num_rows)
    return Permutation(choice_R, place_R[:, None])


def inverse(permutation: Permutation) -> Permutation:
    """Of a permutation with one choice a row, whose two buffers have the same number of rows."""
    return Permutation(permutation.place_NK[:, 0], permutation.choice_R[:, None])


def fitting(sizes_G: jax.Array, num_rows: int) -> jax.Array:
    """How many of each group find a place in a buffer that is filled in order.  [..., G]"""
    return jnp.clip(num_rows - starts(sizes_G), 0, sizes_G)


def received(sizes_PE: jax.Array, num_rows: int) -> jax.Array:
    """Of the pairs from each device for each expert, those that its device's buffer has rows for.  [P, E]

    The buffer is filled in the order of the sources, and in each of the experts.
    """
    num_devices, num_experts = sizes_PE.shape
    sizes_dPX = sizes_PE.reshape(num_devices, num_devices, -1).swapaxes(0, 1)
    kept_dG = fitting(sizes_dPX.reshape(num_devices, -1), num_rows)
    return kept_dG.reshape(sizes_dPX.shape).swapaxes(0, 1).reshape(num_devices, num_experts)


def within_capacity(
    experts_NK: jax.Array, weights_NK: jax.Array, num_experts: int, capacity_factor: float, drop_policy: str
) -> jax.Array:
    """`experts_NK` with `num_experts`, which is no expert, in place of what exceeds an expert's capacity.

    That is ceil(factor x N K / E) pairs of this device.  Kept are those of the largest weights ("probs"), or the first
    ones ("position").
    """
    capacity = math.ceil(capacity_factor * experts_NK.size / num_experts)
    weight_M = lax.stop_gradient(weights_NK).reshape(-1) if drop_policy == "probs" else None
    groups = group(experts_NK.reshape(-1), num_experts, weight_M)
    return jnp.where(groups.rank_M.reshape(experts_NK.shape) < capacity, experts_NK, num_experts)


def starts(sizes_G: jax.Array) -> jax.Array:
    """Where each of consecutive groups begins, along the last dimension."""
    return jnp.cumsum(sizes_G, axis=-1, dtype=jnp.int32) - sizes_G


def _segments(sizes_G, num_rows):
    """For each row of consecutive groups its group, and its number in there.  Rows behind the last have group G."""
    row_R = jnp.arange(num_rows, dtype=jnp.int32)
    ends_G = jnp.cumsum(sizes_G, dtype=jnp.int32)
    segment_R = jnp.searchsorted(ends_G, row_R, side="right", method="scan_unrolled").astype(jnp.int32)
    return segment_R, row_R - starts(sizes_G).at[segment_R].get(mode="clip")
