"""Which tokens of packed rows may see which, and which blocks of them have anything to compute.

Dimensions: B rows, S queries, T keys, I tiles of queries, J tiles of keys.
"""

import dataclasses

import jax
import jax.numpy as jnp

TILE = 128  # queries and keys of a tile of the table; the block sizes of the kernels divide it
_LARGEST = jnp.iinfo(jnp.int32).max
_NONE, _PARTIAL, _FULL = 0, 1, 2


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedMask:
    """The mask of attention within segments, and its tiles.  `packed_mask` makes it, once per batch for all layers.

    Attributes:
      q_segments_BS, k_segments_BT: int32, 0 is padding.
      q_positions_BS, k_positions_BT: int32; None where the mask isn't causal.
      k_order_BIJ: for each tile of queries the tiles of keys that it sees: first those of which every query sees every
        key, then those where only some do, then the others.  int32
      k_counts_BI2: how many there are of the first and of the second kind.  int32
      q_order_BJI, q_counts_BJ2: the same for each tile of keys.
      causal, window: as `packed_mask` was given them.
    """

    q_segments_BS: jax.Array
    k_segments_BT: jax.Array
    q_positions_BS: jax.Array | None
    k_positions_BT: jax.Array | None
    k_order_BIJ: jax.Array
    k_counts_BI2: jax.Array
    q_order_BJI: jax.Array
    q_counts_BJ2: jax.Array
    causal: bool = dataclasses.field(metadata={"static": True})
    window: int | None = dataclasses.field(metadata={"static": True})


def packed_mask(
    q_segments_BS: jax.Array,
    k_segments_BT: jax.Array,
    *,
    causal: bool,
    window: int | None = None,
    q_positions_BS: jax.Array | None = None,
    k_positions_BT: jax.Array | None = None,
) -> PackedMask:
    """The mask by which a query sees keys of its own segment and, if causal, none that come after it.

    Block windows (those of a vision encoder) are segments: a patch's window number is its segment.  Tiles are left out
    by the smallest and the largest segment and position in them, so ids that are sorted along the row leave out most.

    Args:
      q_segments_BS, k_segments_BT: segment numbers from 1; tokens of segment 0 see nothing and are seen by none.
      window: at most so many positions back does a query see (0: itself alone); None for no limit.
      q_positions_BS, k_positions_BT: where the tokens are in the row, by default in order from 0.  They may restart in
        each segment.  Rows whose keys are elsewhere (context parallelism) give both.

    Raises:
      ValueError: a window without `causal`, or positions without it.
    """
    if not causal and (window is not None or q_positions_BS is not None or k_positions_BT is not None):
        raise ValueError(f"{window=} and positions need causal=True; windows of a vision encoder are segments")
    if causal:
        q_positions_BS, k_positions_BT = (
            jnp.broadcast_to(jnp.arange(segments.shape[1], dtype=jnp.int32), segments.shape)
            if positions is None else positions
            for positions, segments in ((q_positions_BS, q_segments_BS), (k_positions_BT, k_segments_BT))
        )  # fmt: skip
    kind_BIJ = _kinds(q_segments_BS, k_segments_BT, q_positions_BS, k_positions_BT, window)
    k_order_BIJ, k_counts_BI2 = _order(kind_BIJ)
    q_order_BJI, q_counts_BJ2 = _order(kind_BIJ.swapaxes(1, 2))
    return PackedMask(
        q_segments_BS, k_segments_BT, q_positions_BS, k_positions_BT,
        k_order_BIJ, k_counts_BI2, q_order_BJI, q_counts_BJ2, causal, window,
    )  # fmt: skip


def _kinds(q_segments_BS, k_segments_BT, q_positions_BS, k_positions_BT, window) -> jax.Array:
    """Whether none, some (or none: it isn't sure) or all queries of a tile see all keys of another.  [B, I, J] int8"""
    (q_low_BI, q_high_BI), q_padded_BI = _segment_ranges(q_segments_BS)
    (k_low_BJ, k_high_BJ), k_padded_BJ = _segment_ranges(k_segments_BT)

    def pairs(q_BI, k_BJ):
        return q_BI[:, :, None], k_BJ[:, None, :]

    q_low, k_high = pairs(q_low_BI, k_high_BJ)
    q_high, k_low = pairs(q_high_BI, k_low_BJ)
    q_padded, k_padded = pairs(q_padded_BI, k_padded_BJ)
    some_BIJ = (q_low <= k_high) & (k_low <= q_high)
    all_BIJ = (q_low == k_high) & (q_high == k_low) & ~q_padded & ~k_padded
    if q_positions_BS is not None:
        q_first, k_last = pairs(_tiled(q_positions_BS, _LARGEST).min(-1), _tiled(k_positions_BT, -1).max(-1))
        q_last, k_first = pairs(_tiled(q_positions_BS, -1).max(-1), _tiled(k_positions_BT, _LARGEST).min(-1))
        some_BIJ &= q_last >= k_first
        all_BIJ &= q_first >= k_last
        if window is not None:
            some_BIJ &= q_first - k_last <= window
            all_BIJ &= q_last - k_first <= window
    return jnp.where(all_BIJ, _FULL, jnp.where(some_BIJ, _PARTIAL, _NONE)).astype(jnp.int8)


def _segment_ranges(segments_BS):
    """The smallest and the largest segment of each tile, an empty range where it is all padding; whether any is."""
    is_padding_BS = segments_BS == 0
    low_BI = _tiled(jnp.where(is_padding_BS, _LARGEST, segments_BS), _LARGEST).min(-1)
    return (low_BI, _tiled(segments_BS, 0).max(-1)), _tiled(is_padding_BS, True).any(-1)


def _tiled(x_BS: jax.Array, fill) -> jax.Array:
    """[B, I, TILE], the last tile filled up."""
    B, S = x_BS.shape
    padded = jnp.pad(x_BS, ((0, 0), (0, -S % TILE)), constant_values=fill)
    return padded.reshape(B, -1, TILE)


def _order(kind_BIJ: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Tile numbers along the last axis: full ones, partial ones, others, each in order; counts of the first two."""
    order_BIJ = jnp.argsort(-kind_BIJ, axis=-1, stable=True).astype(jnp.int32)
    counts = [jnp.sum(kind_BIJ == kind, axis=-1, dtype=jnp.int32) for kind in (_FULL, _PARTIAL)]
    return order_BIJ, jnp.stack(counts, axis=-1)
