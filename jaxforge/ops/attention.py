"""Attention within segments of packed rows."""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxforge.ops.placement import Placement
from pallas_kernels.attention_blocks import PackedMask, packed_mask
from pallas_kernels.flash_attention import MASKED, flash_attention, flash_attention_gradients, output_delta

# What `attention` reads of the segments of rows: their ids [B, S], or tables made of them.
RowSegments = jax.Array | PackedMask
_HEADS = (None, None, "heads", None)
_KV_HEADS = (None, None, "kv_heads", None)
_LOG_SUM_EXP = (None, "heads", None)
_WHOLE = ()  # all arrays of a mask


def attention(
    q_BSHK: jax.Array,
    k_BSGK: jax.Array,
    v_BSGW: jax.Array,
    segments: RowSegments,
    *,
    causal: bool,
    backend: str,
    placement: Placement,
    scale: float | None = None,
) -> jax.Array:
    """softmax(scale q k^T) v among tokens of one segment; segment 0 is padding and gives 0.  Returns [B, S, H, W].

    Heads may be sharded over tensor; G divides H, each key head serving H / G queries.

    Args:
      segments: what `row_segments` gives of segment ids, once for many layers.
      backend: "xla" and "cudnn" hold [S, S] numbers, of each head or of all; "flash" doesn't.  With "cudnn" W is K.
      scale: 1 / sqrt(K) by default.
    """
    if isinstance(segments, PackedMask):
        assert (backend, segments.causal) == ("flash", causal), "the tables are for another attention"
        return _flash_attention(placement, scale, q_BSHK, k_BSGK, v_BSGW, segments)
    assert backend != "flash", "flash attention reads tables"
    compute = _cudnn_attention if backend == "cudnn" else _xla_attention
    compute = functools.partial(compute, causal=causal, scale=scale)
    island = placement.island(compute, [_HEADS, _KV_HEADS, _KV_HEADS, (None, None)], _HEADS)
    out_BSHW = island(q_BSHK, k_BSGK, v_BSGW, segments)
    # of cuDNN it is the kernel's own output that is kept: see jaxforge.memory.policy
    return out_BSHW if backend == "cudnn" else checkpoint_name(out_BSHW, "core_attn")


def row_segments(segment_ids_BS: jax.Array, *, causal: bool, backend: str) -> RowSegments:
    """What `attention` reads of segment ids [B, S]: themselves, or for flash the tables of blocks that it visits."""
    return packed_mask(segment_ids_BS, segment_ids_BS, causal=causal) if backend == "flash" else segment_ids_BS


def visible_keys(
    q_segments_BS: jax.Array,
    k_segments_BT: jax.Array,
    *,
    causal: bool,
    window: int | None = None,
    q_positions_BS: jax.Array | None = None,
    k_positions_BT: jax.Array | None = None,
) -> jax.Array:
    """True where query s may see key t, of the same segment and not padding.  [B, S, T] bool

    If causal, the key doesn't come after the query, nor lie more than `window` positions before it.  Positions are by
    default those in the row.
    """
    visible_BST = (q_segments_BS[:, :, None] == k_segments_BT[:, None, :]) & (q_segments_BS > 0)[:, :, None]
    if causal:
        q_BS = jnp.arange(q_segments_BS.shape[1])[None] if q_positions_BS is None else q_positions_BS
        k_BT = jnp.arange(k_segments_BT.shape[1])[None] if k_positions_BT is None else k_positions_BT
        back_BST = q_BS[:, :, None] - k_BT[:, None, :]
        visible_BST &= back_BST >= 0
        if window is not None:
            visible_BST &= back_BST <= window
    return visible_BST


def reference_attention(q_BSHK, k_BTGK, v_BTGW, visible_BST, scale=None) -> tuple[jax.Array, jax.Array]:
    """The definition, with all scores in fp32: out_BSHW in the dtype of `v`, and the log-sum-exp of the scores.

    The scale is 1 / sqrt(K) by default.  A query that sees nothing gives 0 and `MASKED`.  lse_BHS is float32.
    """
    B, S, H, K = q_BSHK.shape
    G, W = v_BTGW.shape[2:]
    q_BSGRK = q_BSHK.reshape(B, S, G, H // G, K)
    scores_BGRST = jnp.einsum("BSGRK,BTGK->BGRST", q_BSGRK, k_BTGK, preferred_element_type=jnp.float32)
    scores_BGRST = scores_BGRST * (K**-0.5 if scale is None else scale)
    visible_B11ST = visible_BST[:, None, None]
    scores_BGRST = jnp.where(visible_B11ST, scores_BGRST, MASKED)
    # softmax of a fully masked query would be uniform: the second mask makes it 0
    weights_BGRST = jnp.where(visible_B11ST, _softmax(scores_BGRST), 0).astype(v_BTGW.dtype)
    out_BSHW = jnp.einsum("BGRST,BTGW->BSGRW", weights_BGRST, v_BTGW).reshape(B, S, H, W)
    lse_BGRS = jnp.where(visible_B11ST.any(-1), jax.nn.logsumexp(scores_BGRST, axis=-1), MASKED)
    return out_BSHW, lse_BGRS.reshape(B, H, S)


@jax.custom_jvp
def _softmax(scores: jax.Array) -> jax.Array:
    """Over the last dimension; what its derivative reads has a name, and so may be kept."""
    return checkpoint_name(jax.nn.softmax(scores, axis=-1), "core_attn")


@_softmax.defjvp
def _softmax_jvp(primals, tangents):
    [scores], [dscores] = primals, tangents
    weights = checkpoint_name(jax.nn.softmax(scores, axis=-1), "core_attn")
    return weights, weights * (dscores - jnp.sum(weights * dscores, axis=-1, keepdims=True))


def _xla_attention(q_BSHK, k_BSGK, v_BSGW, segment_ids_BS, *, causal: bool, scale: float | None) -> jax.Array:
    visible_BSS = visible_keys(segment_ids_BS, segment_ids_BS, causal=causal)
    return reference_attention(q_BSHK, k_BSGK, v_BSGW, visible_BSS, scale)[0]


def _cudnn_attention(q_BSHK, k_BSGK, v_BSGK, segment_ids_BS, *, causal: bool, scale: float | None) -> jax.Array:
    """cuDNN's flash attention.  Its public entry knows no packing, so segments become an S x S bias shared by heads."""
    mask_B1SS = visible_keys(segment_ids_BS, segment_ids_BS, causal=causal)[:, None]
    out_BSHK = jax.nn.dot_product_attention(
        q_BSHK, k_BSGK, v_BSGK, mask=mask_B1SS, scale=scale, implementation="cudnn"
    )
    return jnp.where((segment_ids_BS > 0)[:, :, None, None], out_BSHK, 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _flash_attention(
    placement: Placement, scale: float | None, q_BSHK, k_BSGK, v_BSGW, mask: PackedMask
) -> jax.Array:
    return _flash_forward(placement, scale, q_BSHK, k_BSGK, v_BSGW, mask)[0]


def _flash_forward(placement, scale, q_BSHK, k_BSGK, v_BSGW, mask):
    # JAX doesn't differentiate the island, whose backward pass is one of its own: see below
    island = placement.island(
        functools.partial(flash_attention, scale=scale),
        [_HEADS, _KV_HEADS, _KV_HEADS, _WHOLE],
        [_HEADS, _LOG_SUM_EXP],
        check_vma=False,
    )
    out_BSHW, lse_BHS = island(q_BSHK, k_BSGK, v_BSGW, mask)
    # kept with the heads side by side: of [B, S, H, W] XLA keeps all layers in one order and then reorders all of them
    # for the backward pass, which sums over W with the heads apart
    rows = checkpoint_name(out_BSHW.reshape(*out_BSHW.shape[:2], -1), "core_attn")
    out_BSHW, lse_BHS = rows.reshape(out_BSHW.shape), checkpoint_name(lse_BHS, "core_attn")
    return out_BSHW, (q_BSHK, k_BSGK, v_BSGW, mask, out_BSHW, lse_BHS)


def _flash_backward(placement, scale, residuals, dout_BSHW):
    """Heads are apart, so nothing is exchanged.  Kernels can't be interpreted where JAX checks what varies."""

    def gradients(q_BSHK, k_BSGK, v_BSGW, mask, out_BSHW, lse_BHS, dout_BSHW):
        delta_BHS = output_delta(out_BSHW, dout_BSHW)
        return flash_attention_gradients(q_BSHK, k_BSGK, v_BSGW, mask, lse_BHS, dout_BSHW, delta_BHS, scale=scale)

    island = placement.island(
        gradients,
        [_HEADS, _KV_HEADS, _KV_HEADS, _WHOLE, _HEADS, _LOG_SUM_EXP, _HEADS],
        [_HEADS, _KV_HEADS, _KV_HEADS],
        check_vma=False,
    )
    return *island(*residuals, dout_BSHW), None


_flash_attention.defvjp(_flash_forward, _flash_backward)
