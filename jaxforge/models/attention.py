"""Multi-head self-attention with grouped queries, for decoder and encoders alike."""

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxforge.models.lora import project
from jaxforge.models.norm import RMSNorm
from jaxforge.models.parameters import projection, zeros
from jaxforge.models.rope import rotate
from jaxforge.ops.attention import RowSegments, attention
from jaxforge.ops.placement import Placement

RESIDUAL = (None, "residual_sequence", None)
WHOLE = (None, None, None)


class SelfAttention(nnx.Module):
    """out(attention(rotate(q), rotate(k), v)) of x_BSD, within segments.

    Args:
      qkv_bias, out_bias: whether the projections have biases.
      qk_norm_epsilon: RMSNorm of each query and key head before RoPE (Qwen3); None for none.
      causal: whether a token sees only what comes before it.
      backend: of `jaxforge.ops.attention`.
    """

    def __init__(
        self,
        width: int,
        num_heads: int,
        num_kv_heads: int,
        head_width: int,
        *,
        qkv_bias: bool,
        out_bias: bool,
        qk_norm_epsilon: float | None,
        causal: bool,
        std: float,
        backend: str,
        placement: Placement,
        rngs: nnx.Rngs,
    ):
        heads, kv_heads = ("embed", "heads", None), ("embed", "kv_heads", None)
        self.query_DHK = projection(rngs, (width, num_heads, head_width), heads, std)
        self.key_DGK = projection(rngs, (width, num_kv_heads, head_width), kv_heads, std)
        self.value_DGK = projection(rngs, (width, num_kv_heads, head_width), kv_heads, std)
        self.out_HKD = projection(rngs, (num_heads, head_width, width), ("heads", None, "embed"), std, num_inputs=2)
        if qkv_bias:
            self.query_bias_HK = zeros((num_heads, head_width), ("heads", None))
            self.key_bias_GK = zeros((num_kv_heads, head_width), ("kv_heads", None))
            self.value_bias_GK = zeros((num_kv_heads, head_width), ("kv_heads", None))
        if out_bias:
            self.out_bias_D = zeros((width,), ("embed",))
        if qk_norm_epsilon is not None:
            self.query_norm = RMSNorm(head_width, qk_norm_epsilon)
            self.key_norm = RMSNorm(head_width, qk_norm_epsilon)
        self.has_qkv_bias, self.has_out_bias = qkv_bias, out_bias
        self.has_qk_norm = qk_norm_epsilon is not None
        self.causal, self.backend, self.placement = causal, backend, placement

    def __call__(self, x_BSD: jax.Array, angles_BSR: jax.Array, segments: RowSegments) -> jax.Array:
        x_BSD = self.placement.reshard(x_BSD, RESIDUAL, WHOLE)
        q_BSHK, k_BSGK, v_BSGK = project(
            self, x_BSD, query_DHK="BSD,DHK->BSHK", key_DGK="BSD,DGK->BSGK", value_DGK="BSD,DGK->BSGK"
        )
        if self.has_qkv_bias:
            q_BSHK = q_BSHK + self.query_bias_HK[...]
            k_BSGK = k_BSGK + self.key_bias_GK[...]
            v_BSGK = v_BSGK + self.value_bias_GK[...]
        # what follows is cheap to compute again, the products before it aren't
        q_BSHK, k_BSGK, v_BSGK = map(checkpoint_name, (q_BSHK, k_BSGK, v_BSGK), ("query", "key", "value"))
        if self.has_qk_norm:
            q_BSHK, k_BSGK = self.query_norm(q_BSHK), self.key_norm(k_BSGK)
        q_BSHK, k_BSGK = rotate(q_BSHK, angles_BSR), rotate(k_BSGK, angles_BSR)
        mixed_BSHK = attention(
            q_BSHK, k_BSGK, v_BSGK, segments,
            causal=self.causal, backend=self.backend, placement=self.placement,
        )  # fmt: skip
        [y_BSD] = project(self, mixed_BSHK, out_HKD="BSHK,HKD->BSD")
        y_BSD = self.placement.reshard(y_BSD, WHOLE, RESIDUAL)
        return y_BSD + self.out_bias_D[...] if self.has_out_bias else y_BSD
