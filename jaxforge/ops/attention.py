"""Attention within segments of packed rows."""

import jax
import jax.numpy as jnp

from jaxforge.ops.placement import Placement

MASKED = -1e30  # finite: a row without any key must not become NaN


def attention(
    q_BSHK: jax.Array,
    k_BSGK: jax.Array,
    v_BSGK: jax.Array,
    segment_ids_BS: jax.Array,
    *,
    causal: bool,
    backend: str,
    placement: Placement,
) -> jax.Array:
    """softmax(q k^T / sqrt(K)) v among tokens of one segment; segment 0 is padding and gives 0.  Returns [B, S, H, K].

    `backend` is "xla" or "cudnn".  Heads may be sharded over tensor; G divides H, each key head serving H / G queries.
    """
    heads = (None, None, "heads", None)
    kv_heads = (None, None, "kv_heads", None)
    compute = _cudnn_attention if backend == "cudnn" else reference_attention
    island = placement.island(
        lambda q, k, v, segments: compute(q, k, v, segments, causal=causal),
        [heads, kv_heads, kv_heads, (None, None)],
        heads,
    )
    return island(q_BSHK, k_BSGK, v_BSGK, segment_ids_BS)


def segment_mask(segment_ids_BS: jax.Array, *, causal: bool) -> jax.Array:
    """True where query s may see key t: same segment, not padding, and t <= s if causal.  [B, S, S] bool."""
    mask_BST = (segment_ids_BS[:, :, None] == segment_ids_BS[:, None, :]) & (segment_ids_BS > 0)[:, :, None]
    if causal:
        length = segment_ids_BS.shape[1]
        mask_BST &= jnp.arange(length)[:, None] >= jnp.arange(length)[None, :]
    return mask_BST


def reference_attention(q_BSHK, k_BSGK, v_BSGK, segment_ids_BS, *, causal: bool) -> jax.Array:
    """The definition, with the whole [S, S] in fp32.  Dtype of the result is that of `v`."""
    B, S, H, K = q_BSHK.shape
    G = k_BSGK.shape[2]
    q_BSGRK = q_BSHK.reshape(B, S, G, H // G, K)
    scores_BGRST = jnp.einsum("BSGRK,BTGK->BGRST", q_BSGRK, k_BSGK, preferred_element_type=jnp.float32) * K**-0.5
    mask_B11ST = segment_mask(segment_ids_BS, causal=causal)[:, None, None]
    scores_BGRST = jnp.where(mask_B11ST, scores_BGRST, MASKED)
    # softmax of a fully masked query would be uniform: the second mask makes it 0
    weights_BGRST = jnp.where(mask_B11ST, jax.nn.softmax(scores_BGRST, axis=-1), 0).astype(v_BSGK.dtype)
    return jnp.einsum("BGRST,BTGK->BSGRK", weights_BGRST, v_BSGK).reshape(B, S, H, K)


def _cudnn_attention(q_BSHK, k_BSGK, v_BSGK, segment_ids_BS, *, causal: bool) -> jax.Array:
    """cuDNN's flash attention.  Its public entry knows no packing, so segments become an S x S bias shared by heads."""
    mask_B1ST = segment_mask(segment_ids_BS, causal=causal)[:, None]
    out_BSHK = jax.nn.dot_product_attention(q_BSHK, k_BSGK, v_BSGK, mask=mask_B1ST, implementation="cudnn")
    return jnp.where((segment_ids_BS > 0)[:, :, None, None], out_BSHK, 0)
