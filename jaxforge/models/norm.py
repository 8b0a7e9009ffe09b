"""RMSNorm and LayerNorm, computed in fp32."""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxforge.models.parameters import Axes, ones, zeros


class RMSNorm(nnx.Module):
    """x / rms(x) * scale over the last dimension.  (Zhang and Sennrich 2019, arXiv:1910.07467)"""

    def __init__(self, width: int, epsilon: float, axes: Axes = (None,)):
        self.scale = ones((width,), axes)
        self.epsilon = epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        normed = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.epsilon)
        return normed.astype(x.dtype) * self.scale.astype(x.dtype)


class LayerNorm(nnx.Module):
    """(x - mean) / std * scale + bias over the last dimension.  (Ba et al. 2016, arXiv:1607.06450)"""

    def __init__(self, width: int, epsilon: float):
        self.scale = ones((width,), (None,))
        self.bias = zeros((width,), (None,))
        self.epsilon = epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
        normed = centred * jax.lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + self.epsilon)
        return normed.astype(x.dtype) * self.scale.astype(x.dtype) + self.bias.astype(x.dtype)


def make_norm(kind: str, width: int, epsilon: float) -> nnx.Module:
    """`kind` as in the config: RMSNorm or LayerNorm."""
    return {"RMSNorm": RMSNorm, "LayerNorm": LayerNorm}[kind](width, epsilon)
