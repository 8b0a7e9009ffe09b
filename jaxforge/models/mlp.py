"""Feed-forward layers."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from jaxforge.models.attention import RESIDUAL, WHOLE
from jaxforge.models.parameters import normal, zeros
from jaxforge.ops.placement import Placement

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
}


class MLP(nnx.Module):
    """down(act(up(x))), or gated: down(act(gate(x)) * up(x)) (SwiGLU; Shazeer 2020, arXiv:2002.05202).

    x_BSD -> y_BSE; E is `out_width`, by default the input's.
    """

    def __init__(
        self,
        width: int,
        ffn_width: int,
        *,
        activation: str,
        gated: bool,
        bias: bool,
        std: float,
        placement: Placement,
        rngs: nnx.Rngs,
        out_width: int | None = None,
    ):
        out_width = out_width or width
        if gated:
            self.gate_DF = normal(rngs, (width, ffn_width), ("embed", "ffn"), std)
        self.up_DF = normal(rngs, (width, ffn_width), ("embed", "ffn"), std)
        self.down_FE = normal(rngs, (ffn_width, out_width), ("ffn", "embed"), std)
        if bias:
            if gated:
                self.gate_bias_F = zeros((ffn_width,), ("ffn",))
            self.up_bias_F = zeros((ffn_width,), ("ffn",))
            self.down_bias_E = zeros((out_width,), ("embed",))
        self.activation, self.gated, self.has_bias, self.placement = activation, gated, bias, placement

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        x_BSD = self.placement.reshard(x_BSD, RESIDUAL, WHOLE)
        act = ACTIVATIONS[self.activation]
        up_BSF = jnp.einsum("BSD,DF->BSF", x_BSD, self.up_DF[...])
        if self.has_bias:
            up_BSF = up_BSF + self.up_bias_F[...]
        if self.gated:
            gate_BSF = jnp.einsum("BSD,DF->BSF", x_BSD, self.gate_DF[...])
            if self.has_bias:
                gate_BSF = gate_BSF + self.gate_bias_F[...]
            hidden_BSF = act(gate_BSF) * up_BSF
        else:
            hidden_BSF = act(up_BSF)
        hidden_BSF = self.placement.constrain(hidden_BSF, (None, None, "ffn"))
        y_BSE = jnp.einsum("BSF,FE->BSE", hidden_BSF, self.down_FE[...])
        y_BSE = self.placement.reshard(y_BSE, WHOLE, RESIDUAL)
        return y_BSE + self.down_bias_E[...] if self.has_bias else y_BSE
