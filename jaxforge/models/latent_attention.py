"""Multi-head latent attention, of DeepSeek-V2 and V3 (arXiv:2405.04434, 2.1; arXiv:2412.19437, 2.1.1).

Dimensions of one head beside the package's: K of a query or key, N of its K features that don't rotate, P of those that
do (their positions are all that RoPE tells), V of a value.  C is the width of a compressed token.

RoPE rotates the pairs (i, i + P / 2), as everywhere here.  DeepSeek's released weights have these pairs side by side:
their column 2 i is ours i, and their column 2 i + 1 is ours i + P / 2, in the last P columns of each head of `query_up`
(or `query`) and of `kv_down`.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxforge.config.schema import DecoderConfig
from jaxforge.models.attention import RESIDUAL, WHOLE
from jaxforge.models.lora import project
from jaxforge.models.norm import RMSNorm
from jaxforge.models.parameters import projection
from jaxforge.models.rope import rotate, rotation_scale, score_scale
from jaxforge.ops.attention import RowSegments, attention
from jaxforge.ops.placement import Placement


class LatentAttention(nnx.Module):
    """out(attention(q, k, v)) of x_BSD, causal and within segments, where

        q = [q_nope | rotate(q_rope)]                up(norm(down(x))), or a projection of x if q_lora_rank is None
        k = [k_nope | rotate(k_rope) of all heads]   k_nope, v = up(norm(latent)); latent, k_rope = down(x)

    Under tensor parallelism heads are sharded and the down projections are whole on each device.  They are applied to
    the tokens that the device holds of the residual stream, so that with sequence parallelism no token is compressed
    twice, and what is gathered is C wide and not D: for DeepSeek-V3 2112 numbers of a token instead of 7168.  The
    cotangents of compressed tokens are sums over heads, so they are reduced and scattered at the same width; the
    gradients of the down projections are sums over tokens, reduced once.
    """

    def __init__(self, config: DecoderConfig, *, backend: str, placement: Placement, rngs: nnx.Rngs):
        width, num_heads, std = config.hidden_size, config.num_attention_heads, config.init_method_std
        nope, rope, value = config.qk_head_dim, config.qk_pos_emb_head_dim, config.v_head_dim
        latent, by_head = config.kv_lora_rank, (None, "heads", None)
        self.has_query_down = config.q_lora_rank is not None
        if config.q_lora_rank is None:
            self.query_DHK = projection(rngs, (width, num_heads, nope + rope), ("embed", "heads", None), std)
        else:
            self.query_down_DR = projection(rngs, (width, config.q_lora_rank), ("embed", None), std)
            self.query_norm = RMSNorm(config.q_lora_rank, config.norm_epsilon)
            self.query_up_RHK = projection(rngs, (config.q_lora_rank, num_heads, nope + rope), by_head, std)
        self.kv_down_DR = projection(rngs, (width, latent + rope), ("embed", None), std)
        self.kv_norm = RMSNorm(latent, config.norm_epsilon)
        self.kv_up_RHK = projection(rngs, (latent, num_heads, nope + value), by_head, std)
        self.out_HVD = projection(rngs, (num_heads, value, width), ("heads", None, "embed"), std, num_inputs=2)
        self.nope, self.latent, self.rotation_scale = nope, latent, rotation_scale(config)
        self.score_scale = score_scale(config) * (nope + rope) ** -0.5
        self.backend, self.placement = backend, placement

    def __call__(self, x_BSD: jax.Array, angles_BSR: jax.Array, segments: RowSegments) -> jax.Array:
        # both fixed, for the device's own keys and for all queries: else cosines of the own ones are gathered
        own_angles_BSR = self.placement.constrain(angles_BSR, RESIDUAL)
        angles_BSR = self.placement.constrain(angles_BSR, WHOLE)
        q_BSHK, latent_BSC, k_rope_BSP = self._queries_and_latent(x_BSD, own_angles_BSR)
        [kv_BSHK] = project(self, latent_BSC, kv_up_RHK="BSC,CHK->BSHK")
        k_nope_BSHN, v_BSHV = jnp.split(kv_BSHK, [self.nope], axis=-1)
        # what follows is cheap to compute again, the products before it aren't
        q_BSHK, k_nope_BSHN, v_BSHV = map(checkpoint_name, (q_BSHK, k_nope_BSHN, v_BSHV), ("query", "key", "value"))
        q_nope_BSHN, q_rope_BSHP = jnp.split(q_BSHK, [self.nope], axis=-1)
        q_rope_BSHP = rotate(q_rope_BSHP, angles_BSR, self.rotation_scale)
        k_rope_BSHP = jnp.broadcast_to(k_rope_BSP[:, :, None], q_rope_BSHP.shape)
        mixed_BSHV = attention(
            jnp.concatenate([q_nope_BSHN, q_rope_BSHP], axis=-1),
            jnp.concatenate([k_nope_BSHN, k_rope_BSHP], axis=-1),
            v_BSHV,
            segments,
            causal=True,
            backend=self.backend,
            placement=self.placement,
            scale=self.score_scale,
        )
        [y_BSD] = project(self, mixed_BSHV, out_HVD="BSHV,HVD->BSD")
        return self.placement.reshard(y_BSD, WHOLE, RESIDUAL)

    def _queries_and_latent(self, x_BSD: jax.Array, angles_BSR: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries before RoPE; and of the whole sequence the normed latent and the rotated part of keys."""
        # in the equations C and not R, which is the adapters' rank there
        if self.has_query_down:
            q_BSC, kv_BSC = project(self, x_BSD, query_down_DR="BSD,DC->BSC", kv_down_DR="BSD,DC->BSC")
            q_BSC = self.query_norm(self._named(q_BSC, "query_compressed"))
            [q_BSHK] = project(self, self._gathered(q_BSC), query_up_RHK="BSC,CHK->BSHK")
        else:
            [kv_BSC] = project(self, x_BSD, kv_down_DR="BSD,DC->BSC")
            [q_BSHK] = project(self, self._gathered(x_BSD), query_DHK="BSD,DHK->BSHK")
        latent_BSC, k_rope_BSP = jnp.split(self._named(kv_BSC, "kv_compressed"), [self.latent], axis=-1)
        k_rope_BSP = rotate(k_rope_BSP[:, :, None], angles_BSR, self.rotation_scale)[:, :, 0]
        return q_BSHK, self._gathered(self.kv_norm(latent_BSC)), self._gathered(k_rope_BSP)

    def _named(self, x_BSC: jax.Array, name: str) -> jax.Array:
        # the layout of what was kept, and is read again: else what gathers it would have it kept whole
        return self.placement.constrain(checkpoint_name(x_BSC, name), RESIDUAL)

    def _gathered(self, x_BSC: jax.Array) -> jax.Array:
        return self.placement.reshard(x_BSC, RESIDUAL, WHOLE)
