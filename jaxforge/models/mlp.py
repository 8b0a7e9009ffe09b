"""Feed-forward layers."""

import functools
from collections.abc import Callable

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxforge.models.attention import RESIDUAL, WHOLE
from jaxforge.models.lora import project
from jaxforge.models.parameters import projection, zeros
from jaxforge.ops.placement import Placement

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
}


class MLP(nnx.Module):
    """down(act(up(x))), or gated: down(act(gate(x)) * up(x)) (SwiGLU; Shazeer 2020, arXiv:2002.05202).

    x_BSD -> y_BSE; E is `out_width`, by default the input's.  Activations are named `name`_gate, _up and _act.
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
        name: str = "mlp",
    ):
        out_width = out_width or width
        if gated:
            self.gate_DF = projection(rngs, (width, ffn_width), ("embed", "ffn"), std)
        self.up_DF = projection(rngs, (width, ffn_width), ("embed", "ffn"), std)
        self.down_FE = projection(rngs, (ffn_width, out_width), ("ffn", "embed"), std)
        if bias:
            if gated:
                self.gate_bias_F = zeros((ffn_width,), ("ffn",))
            self.up_bias_F = zeros((ffn_width,), ("ffn",))
            self.down_bias_E = zeros((out_width,), ("embed",))
        self.activation, self.gated, self.has_bias, self.placement = activation, gated, bias, placement
        self.name = name

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        x_BSD = self.placement.reshard(x_BSD, RESIDUAL, WHOLE)
        act = ACTIVATIONS[self.activation]
        if self.gated:
            up_BSF, gate_BSF = project(self, x_BSD, up_DF="BSD,DF->BSF", gate_DF="BSD,DF->BSF")
            if self.has_bias:
                up_BSF, gate_BSF = up_BSF + self.up_bias_F[...], gate_BSF + self.gate_bias_F[...]
            gate_BSF, up_BSF = self._named(gate_BSF, "gate"), self._named(up_BSF, "up")
            hidden_BSF = act(gate_BSF) * up_BSF
        else:
            [up_BSF] = project(self, x_BSD, up_DF="BSD,DF->BSF")
            up_BSF = up_BSF + self.up_bias_F[...] if self.has_bias else up_BSF
            hidden_BSF = act(self._named(up_BSF, "up"))
        hidden_BSF = self._named(self.placement.constrain(hidden_BSF, (None, None, "ffn")), "act")
        [y_BSE] = project(self, hidden_BSF, down_FE="BSF,FE->BSE")
        y_BSE = self.placement.reshard(y_BSE, WHOLE, RESIDUAL)
        return y_BSE + self.down_bias_E[...] if self.has_bias else y_BSE

    def _named(self, array: jax.Array, part: str) -> jax.Array:
        return checkpoint_name(array, f"{self.name}_{part}")
