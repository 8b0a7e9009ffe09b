"""A mixture of experts in the place of a feed-forward layer."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxforge.config.derived import expert_ffn_hidden_size
from jaxforge.config.schema import DecoderConfig
from jaxforge.models.attention import RESIDUAL
from jaxforge.models.mlp import MLP
from jaxforge.models.parameters import normal, zeros
from jaxforge.ops.expert_dispatch import Dispatcher
from jaxforge.ops.grouped_matmul import grouped_matmul, grouped_swiglu
from jaxforge.ops.placement import Placement
from jaxforge.ops.routing import DROPPED, RouterLosses, route, with_gradient, with_loss

# Tokens are divided over the tensor group also where the residual stream isn't.
TOKENS = (None, "expert_tokens", None)
# What a router keeps beside weights, fp32: no gradient updates it, and casts pass it by.
STATISTICS, BIAS = "statistics_5E", "expert_bias_E"


class StepTokens(NamedTuple):
    """What routers are told of the tokens of a microbatch.

    Attributes:
      is_token_BS: whether it is no padding.
      targets_per_token: target tokens of the step over all its tokens; the loss is later divided by the former, those
        of routers mean over the latter.  0 where no gradients are taken.
    """

    is_token_BS: jax.Array
    targets_per_token: jax.Array


@dataclasses.dataclass(frozen=True)
class ExpertsRun:
    """How experts are computed: what the run, and not the architecture, says of them.

    Attributes:
      dispatcher: how tokens get there.
      losses: what routers add to the loss.
      backend: of the grouped products.
      sliced_axes: mesh axes over which each expert's width is cut; its tokens are those of all of them.
      token_axes: mesh axes over which the tokens of a row are divided while experts are computed.  Of both, axes of
        more than one device alone.
    """

    dispatcher: Dispatcher
    losses: RouterLosses = RouterLosses()
    backend: str = "xla"
    sliced_axes: tuple[str, ...] = ()
    token_axes: tuple[str, ...] = ()


def on_one_device(config: DecoderConfig) -> ExpertsRun | None:
    """Without a router's losses; None for a decoder without experts."""
    return ExpertsRun(Dispatcher("alltoall", config.num_experts)) if config.num_experts is not None else None


class MoE(nnx.Module):
    """sum over the chosen experts of weight x down(silu(gate(x)) * up(x)), and the shared experts; x_BSD -> y_BSD.

    Everything of the experts happens in an island that is manual over the tensor axes too: tokens are local, and move
    by explicit collectives.
    """

    def __init__(self, config: DecoderConfig, *, run: ExpertsRun, placement: Placement, rngs: nnx.Rngs):
        assert config.num_experts is not None
        num_experts, width, inner = config.num_experts, config.hidden_size, expert_ffn_hidden_size(config)
        std, into, out = config.init_method_std, ("experts", "embed", "expert_ffn"), ("experts", "expert_ffn", "embed")
        self.router_DE = normal(rngs, (width, num_experts), ("embed", None), std)
        self.gate_EDF = normal(rngs, (num_experts, width, inner), into, std)
        self.up_EDF = normal(rngs, (num_experts, width, inner), into, std)
        self.down_EFD = normal(rngs, (num_experts, inner, width), out, std)
        self.statistics_5E = zeros((5, num_experts), (None, None))
        self.has_bias = config.moe_router_enable_expert_bias
        if self.has_bias:
            self.expert_bias_E = zeros((num_experts,), (None,))
        self.has_shared = config.moe_shared_expert_intermediate_size is not None
        if config.moe_shared_expert_intermediate_size is not None:
            self.shared = MLP(
                width, config.moe_shared_expert_intermediate_size, activation="silu", gated=True, bias=False, std=std,
                placement=placement, rngs=rngs, name="shared",
            )  # fmt: skip
        self.config, self.run, self.placement = config, run, placement

    def __call__(self, x_BSD: jax.Array, tokens: StepTokens) -> jax.Array:
        placement = self.placement
        bias_E = self.expert_bias_E[...] if self.has_bias else None
        weights = (self.gate_EDF[...], self.up_EDF[...], self.down_EFD[...])
        into, out = ("tensor_experts", None, "expert_ffn"), ("tensor_experts", "expert_ffn", None)
        names = (TOKENS, TOKENS[:2], (), (None, None), (None, None), (None,), into, into, out)
        if bias_E is None:
            bias_E = jnp.zeros(self.config.num_experts or 0, jnp.float32)
        routed = placement.island(self._routed, names, TOKENS, check_vma=False)
        inputs = (placement.reshard(x_BSD, RESIDUAL, TOKENS), tokens.is_token_BS, tokens.targets_per_token)
        y_BSD = routed(*inputs, self.router_DE[...], self.statistics_5E[...], bias_E, *weights)
        y_BSD = placement.reshard(y_BSD, TOKENS, RESIDUAL)
        return y_BSD + self.shared(x_BSD) if self.has_shared else y_BSD

    def _routed(
        self, x_BSD, is_token_BS, targets_per_token, router_DE, statistics_5E, bias_E, gate_XDF, up_XDF, down_XFD
    ):
        """The routed experts' part, of this device's tokens; weights are those of its own experts."""
        config, run, axes = self.config, self.run, self.run.sliced_axes
        if axes:
            x_BSD, is_token_BS = (lax.all_gather(a, axes, axis=1, tiled=True) for a in (x_BSD, is_token_BS))
        # each device of `axes` then finds the same router loss and statistics
        repeats = lax.axis_size(axes) if axes else 1
        num_rows, length, width = x_BSD.shape
        logits_BSE = checkpoint_name(
            jnp.einsum("BSD,DE->BSE", x_BSD, router_DE, preferred_element_type=jnp.float32), "router"
        )
        routing = route(
            config, run.losses, logits_BSE, is_token_BS, bias_E if self.has_bias else None,
            lax.stop_gradient(statistics_5E), run.token_axes,
        )  # fmt: skip

        def compute(rows_RD, weights_R, sizes_X):
            rows_RD = checkpoint_name(rows_RD, "dispatched_input")
            weights_R1 = checkpoint_name(weights_R, "router")[:, None]
            hidden_RF = grouped_swiglu(rows_RD, gate_XDF, up_XDF, sizes_X, backend=run.backend)
            hidden_RF = (weights_R1 * hidden_RF).astype(hidden_RF.dtype)
            return grouped_matmul(hidden_RF, down_XFD, sizes_X, backend=run.backend)

        y_ND, dropped = run.dispatcher(x_BSD.reshape(-1, width), routing.experts_NK, routing.weights_NK, compute)
        y_ND = with_loss(y_ND, routing.loss, targets_per_token / repeats)
        found_5E = routing.statistics_5E.at[DROPPED].add(dropped.astype(jnp.float32) / bias_E.size) / repeats
        y_BSD = with_gradient(y_ND, statistics_5E, found_5E).reshape(num_rows, length, width)
        return lax.psum_scatter(y_BSD, axes, scatter_dimension=1, tiled=True) if axes else y_BSD


def is_router_state(path: str) -> bool:
    """Whether a parameter, by its path, is what a router keeps beside weights."""
    return path.rsplit("/", 1)[-1] in (STATISTICS, BIAS)


def is_statistics(path: str) -> bool:
    return path.rsplit("/", 1)[-1] == STATISTICS
