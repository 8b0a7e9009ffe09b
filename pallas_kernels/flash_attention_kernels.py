"""The kernels of flash attention, for one block of queries, or of keys, of one head of one row each.

Dimensions: Q queries and C keys of a block; a block of heads is a tuple of pieces, see `head_blocks`.  Scores are in
powers of two: log2(e) is part of their scale.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.attention_blocks import TILE
from pallas_kernels.head_blocks import add_product, inside, load, load_tokens, product, store, zeros

MASKED = -1e30  # log-sum-exp of a query that sees nothing: finite, so that the difference of two is a number
LOG2_E = math.log2(math.e)


class Blocks(NamedTuple):
    """Queries and keys of a block, and how Triton runs it."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of q [B, S, H, K], k [B, T, G, K] and v [B, T, G, W], and what else a kernel is compiled for."""

    B: int
    S: int
    T: int
    H: int
    G: int
    K: int
    W: int
    dtype: jnp.dtype
    scale: float
    window: int | None

    @property
    def R(self) -> int:
        """Query heads of a key head."""
        return self.H // self.G

    @property
    def log2_scale(self) -> float:
        return self.scale * LOG2_E


class Tokens(NamedTuple):
    """Segments and positions of a row: arrays, or references in a kernel.  Positions are None where not causal."""

    q_segments: Any
    k_segments: Any
    q_positions: Any
    k_positions: Any


def flash_attention_forward(tokens, table, q_ref, k_ref, v_ref, out_ref, lse_ref, *, shape: Shape, blocks: Blocks):
    Q, C = blocks.queries, blocks.keys
    start = _last_block_first(shape, Q)
    q = load(q_ref, shape.K, start, Q)
    queries = _own_tokens(tokens.q_segments, tokens.q_positions, start, Q)

    def step(k_start, _, is_full, carry):
        max_Q, sum_Q, out = carry
        k = load(k_ref, shape.K, k_start, C, is_inside=is_full)
        s_QC = product(q, k)
        if not is_full:
            keys = _other_tokens(tokens.k_segments, tokens.k_positions, k_start, C)
            s_QC = jnp.where(_is_visible(queries, keys, shape.window), s_QC, -jnp.inf)
        new_max_Q = jnp.maximum(max_Q, jnp.max(s_QC, axis=1) * shape.log2_scale)
        p_QC = jnp.exp2(s_QC * shape.log2_scale - new_max_Q[:, None])
        shrink_Q = jnp.exp2(max_Q - new_max_Q)
        v = load(v_ref, shape.W, k_start, C, is_inside=is_full)
        out = add_product([piece * shrink_Q[:, None] for piece in out], p_QC, v)
        return new_max_Q, sum_Q * shrink_Q + jnp.sum(p_QC, axis=1), out

    nothing = jnp.full((Q,), MASKED, jnp.float32), jnp.zeros((Q,), jnp.float32), zeros(Q, shape.W)
    max_Q, sum_Q, out = _walk(table, start, C, None, step, nothing)
    sees_nothing_Q = sum_Q == 0
    sum_Q = jnp.where(sees_nothing_Q, 1.0, sum_Q)
    store(out_ref, shape.W, start, Q, [piece / sum_Q[:, None] for piece in out])
    lse_Q = jnp.where(sees_nothing_Q, MASKED, (max_Q + jnp.log2(sum_Q)) / LOG2_E)
    plgpu.store(lse_ref.at[pl.ds(start, Q)], lse_Q, mask=inside(shape.S, start, Q))


def flash_attention_backward_q(
    tokens, table, q_ref, k_ref, v_ref, dout_ref, lse_ref, delta_ref, dq_ref, *, shape: Shape, blocks: Blocks
):
    Q, C = blocks.queries, blocks.keys
    start = _last_block_first(shape, Q)
    q = load(q_ref, shape.K, start, Q)
    dout = load(dout_ref, shape.W, start, Q)
    lse_Q1 = load_tokens(lse_ref, start, Q)[:, None] * LOG2_E
    delta_Q1 = load_tokens(delta_ref, start, Q)[:, None]
    queries = _own_tokens(tokens.q_segments, tokens.q_positions, start, Q)

    def step(k_start, _, is_full, dq):
        k = load(k_ref, shape.K, k_start, C, is_inside=is_full)
        v = load(v_ref, shape.W, k_start, C, is_inside=is_full)
        p_QC = jnp.exp2(product(q, k) * shape.log2_scale - lse_Q1)
        if not is_full:
            keys = _other_tokens(tokens.k_segments, tokens.k_positions, k_start, C)
            p_QC = jnp.where(_is_visible(queries, keys, shape.window), p_QC, 0.0)
        ds_QC = p_QC * (product(dout, v) - delta_Q1)
        return add_product(dq, ds_QC, k)

    dq = _walk(table, start, C, None, step, zeros(Q, shape.K))
    store(dq_ref, shape.K, start, Q, [piece * shape.scale for piece in dq])


def flash_attention_backward_kv(
    tokens, table, q_ref, k_ref, v_ref, dout_ref, lse_ref, delta_ref, dk_ref, dv_ref, *, shape: Shape, blocks: Blocks
):
    Q, C = blocks.queries, blocks.keys
    start = pl.program_id(0) * C
    k = load(k_ref, shape.K, start, C)
    v = load(v_ref, shape.W, start, C)
    keys = _own_tokens(tokens.k_segments, tokens.k_positions, start, C)

    def step(q_start, head, is_full, carry):
        dk, dv = carry
        q = load(q_ref, shape.K, q_start, Q, head=head, is_inside=is_full)
        dout = load(dout_ref, shape.W, q_start, Q, head=head, is_inside=is_full)
        lse_1Q = load_tokens(lse_ref, q_start, Q, head=head, is_inside=is_full)[None, :] * LOG2_E
        delta_1Q = load_tokens(delta_ref, q_start, Q, head=head, is_inside=is_full)[None, :]
        # keys along the first axis: as the left factor of both sums, it needs no transposition in registers
        p_CQ = jnp.exp2(product(k, q) * shape.log2_scale - lse_1Q)
        if not is_full:
            queries = _other_tokens(tokens.q_segments, tokens.q_positions, q_start, Q)
            p_CQ = jnp.where(_is_visible(queries, keys, shape.window), p_CQ, 0.0)
        dv = add_product(dv, p_CQ, dout)
        ds_CQ = p_CQ * (product(v, dout) - delta_1Q)
        return add_product(dk, ds_CQ, q), dv

    dk, dv = _walk(table, start, Q, shape.R, step, (zeros(C, shape.K), zeros(C, shape.W)))
    store(dk_ref, shape.K, start, C, [piece * shape.scale for piece in dk])
    store(dv_ref, shape.W, start, C, dv)


def _last_block_first(shape: Shape, size: int):
    """The first query of the program's block: the last block, which sees most keys if causal, begins first."""
    return (pl.cdiv(shape.S, size) - 1 - pl.program_id(0)) * size


def _own_tokens(segments_ref, positions_ref, start, size: int):
    """(segments, positions or None) [size, 1] of the program's own block; padding gets a segment that no other has."""
    segments = load_tokens(segments_ref, start, size)
    positions = None if positions_ref is None else load_tokens(positions_ref, start, size)[:, None]
    return jnp.where(segments > 0, segments, -1)[:, None], positions


def _other_tokens(segments_ref, positions_ref, start, size: int):
    """(segments, positions or None) [1, size] of a block that is visited."""
    positions = None if positions_ref is None else load_tokens(positions_ref, start, size)[None, :]
    return load_tokens(segments_ref, start, size)[None, :], positions


def _is_visible(queries, keys, window: int | None) -> jax.Array:
    """Which keys the queries see, given the (segments, positions) of both, one of them transposed."""
    (q_segments, q_positions), (k_segments, k_positions) = queries, keys
    is_visible = q_segments == k_segments
    if q_positions is not None:
        is_visible &= q_positions >= k_positions
        if window is not None:
            is_visible &= q_positions - k_positions <= window
    return is_visible


def _walk(table, own_start, size: int, num_heads: int | None, step: Callable, carry):
    """step(start, head, is_full, carry) for each head and each block of `size` tokens of the visible tiles.

    Args:
      table: references (order, counts) of `PackedMask`.
      own_start: first token of the program's own block.
      num_heads: of the references that `step` reads; None where they have no head axis.
    """
    order_ref, counts_ref = table
    tile = lax.div(own_start, TILE)
    blocks_per_tile = TILE // size

    def start_of(block):
        entry = jnp.minimum(lax.div(block, blocks_per_tile), order_ref.shape[1] - 1)
        return order_ref[tile, entry] * TILE + lax.rem(block, blocks_per_tile) * size

    def visit(first, count, is_full, carry):
        def one(i, state):
            start, carry = state
            head, following = (None, i + 1) if num_heads is None else (lax.div(i, count), lax.rem(i + 1, count))
            # Read one step ahead, because Triton fetches a block steps before its use only if the address doesn't come
            # from a load in the block's own step.
            next_start = start_of(first + following)
            return next_start, step(start, head, is_full, carry)

        return lax.fori_loop(0, count * (num_heads or 1), one, (start_of(first), carry))[1]

    num_full, num_partial = (counts_ref[tile, kind] * blocks_per_tile for kind in (0, 1))
    carry = visit(0, num_full, True, carry)
    return visit(num_full, num_partial, False, carry)
