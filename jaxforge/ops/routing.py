"""Which experts a token goes to, and with what weight; and what the router adds to the loss."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxforge.config.model_schema import DecoderConfig

# The rows of a layer's statistics, [5, E] fp32: sums over the tokens of a step, padding excluded.
CHOSEN, PROBABILITY, ENTROPY, Z, DROPPED = range(5)


@dataclasses.dataclass(frozen=True)
class RouterLosses:
    """What the routers of a decoder add to the loss, and to its gradients alone: they report it by statistics.

    Attributes:
      kind: none, aux_loss or seq_aux_loss.
      aux_coefficient: weight of E sum_e q_e P_e in each layer, with P_e the mean probability of expert e over the
        step's tokens, and q_e its share of the chosen: in the step before, or with seq_aux_loss in the token's row,
        over which P_e is then the mean, and the loss that over the rows, weighted by their tokens.
      z_coefficient: weight of the mean squared log-sum-exp of the logits in each layer.
    """

    kind: str = "none"
    aux_coefficient: float = 0.0
    z_coefficient: float = 0.0


class Routing(NamedTuple):
    """Of N tokens with K choices each.

    Attributes:
      experts_NK: int32, from the best on; the number of experts, which none has, for what is no token.
      weights_NK: fp32; 0 for what is no token.
      loss: the router's own, fp32: a sum over tokens, for `with_loss`.
      statistics_5E: as above; none are dropped yet.
    """

    experts_NK: jax.Array
    weights_NK: jax.Array
    loss: jax.Array
    statistics_5E: jax.Array


def route(
    config: DecoderConfig,
    losses: RouterLosses,
    logits_BSE: jax.Array,
    is_token_BS: jax.Array,
    bias_E: jax.Array | None,
    before_5E: jax.Array,
    axes: tuple[str, ...] = (),
) -> Routing:
    """Routes the tokens of B rows, N = B S.

    Softmax or sigmoid scores; chosen by score, with a bias and from the best groups where the config says so; weighed
    by score alone, which is normalised over the chosen unless moe_router_pre_softmax (DeepSeek-V3, arXiv:2412.19437,
    2.1.2; Qwen3, arXiv:2505.09388).

    Args:
      logits_BSE: fp32.
      bias_E: added to the scores that experts are chosen by, fp32.
      before_5E: statistics of the step before, whose load aux_loss goes by; zeros before the first one.
      axes: manual mesh axes over which the tokens of a row are divided.
    """
    num_experts, chosen = config.num_experts, config.moe_router_topk
    assert num_experts is not None
    mask_BS1 = is_token_BS[..., None]
    if config.moe_router_score_function == "softmax":
        scores_BSE = jax.nn.softmax(logits_BSE)
        probabilities_BSE = scores_BSE
    else:
        scores_BSE = jax.nn.sigmoid(logits_BSE)
        probabilities_BSE = scores_BSE / (jnp.sum(scores_BSE, axis=-1, keepdims=True) + _SMALL)
    ranked_BSE = lax.stop_gradient(scores_BSE if bias_E is None else scores_BSE + bias_E)
    if config.moe_router_num_groups is not None and config.moe_router_group_topk is not None:
        ranked_BSE = _in_best_groups(ranked_BSE, config.moe_router_num_groups, config.moe_router_group_topk)
    experts_BSK = lax.top_k(ranked_BSE, chosen)[1]
    weights_BSK = jnp.take_along_axis(scores_BSE, experts_BSK, axis=-1)
    if not config.moe_router_pre_softmax:
        weights_BSK = weights_BSK / (jnp.sum(weights_BSK, axis=-1, keepdims=True) + _SMALL)
    weights_BSK = jnp.where(mask_BS1, weights_BSK * config.moe_router_topk_scaling_factor, 0)

    experts_BSK = jnp.where(mask_BS1, experts_BSK, num_experts).astype(jnp.int32)
    counts_BE = jax.vmap(lambda experts_SK: _counts(experts_SK, num_experts))(experts_BSK)
    lse_BS = jax.nn.logsumexp(logits_BSE, axis=-1)
    z = jnp.sum(jnp.where(is_token_BS, lse_BS**2, 0))
    loss = losses.z_coefficient * z
    if losses.kind != "none":
        if losses.kind == "aux_loss":
            share_BE = _share(before_5E[CHOSEN])[None]
        else:
            share_BE = _share(lax.psum(counts_BE, axes) if axes else counts_BE)
        balance_BS = jnp.einsum("BSE,BE->BS", probabilities_BSE, jnp.broadcast_to(share_BE, counts_BE.shape))
        loss += losses.aux_coefficient * num_experts * jnp.sum(jnp.where(is_token_BS, balance_BS, 0))
    held_BSE = lax.stop_gradient(jnp.where(mask_BS1, probabilities_BSE, 0))
    entropy_E = -jnp.sum(jnp.where(held_BSE > 0, held_BSE * jnp.log(jnp.maximum(held_BSE, _SMALL)), 0), axis=(0, 1))
    # what isn't an expert's own is divided among all of them: a row is summed in any case
    z_E = jnp.full(num_experts, lax.stop_gradient(z) / num_experts)
    rows = (jnp.sum(counts_BE, axis=0), jnp.sum(held_BSE, axis=(0, 1)), entropy_E, z_E, jnp.zeros(num_experts))
    return Routing(
        experts_BSK.reshape(-1, chosen),
        weights_BSK.reshape(-1, chosen),
        loss,
        jnp.stack(rows).astype(jnp.float32),
    )


_SMALL = 1e-20


def _in_best_groups(scores_BSE: jax.Array, num_groups: int, best: int) -> jax.Array:
    """Minus infinity for experts outside of the groups whose two best scores have the largest sums."""
    grouped_BSGX = scores_BSE.reshape(*scores_BSE.shape[:-1], num_groups, -1)
    of_group_BSG = jnp.sum(lax.top_k(grouped_BSGX, 2)[0], axis=-1)
    chosen_BSb = lax.top_k(of_group_BSG, best)[1]
    is_chosen_BSG = jnp.any(chosen_BSb[..., None] == jnp.arange(num_groups), axis=-2)
    return jnp.where(is_chosen_BSG[..., None], grouped_BSGX, -jnp.inf).reshape(scores_BSE.shape)


def _counts(experts_SK: jax.Array, num_experts: int) -> jax.Array:
    """How often each expert was chosen, fp32."""
    return jnp.zeros(num_experts, jnp.float32).at[experts_SK.reshape(-1)].add(1.0, mode="drop")


def _share(counts: jax.Array) -> jax.Array:
    """Shares that sum to 1 along the last dimension; equal ones where nothing was counted."""
    total = jnp.sum(counts, axis=-1, keepdims=True)
    return jnp.where(total > 0, counts / jnp.maximum(total, 1), 1 / counts.shape[-1])


@jax.custom_vjp
def with_loss(x: jax.Array, loss: jax.Array, weight: jax.Array) -> jax.Array:
    """`x`, whose backward pass adds the gradients of weight x loss, a scalar that nothing else reads.

    So a loss of a layer needs no way out of it, through pipelines and recomputation.
    """
    return x


with_loss.defvjp(lambda x, loss, weight: (x, weight), lambda weight, dx: (dx, weight, None))


@jax.custom_vjp
def with_gradient(x: jax.Array, carrier: jax.Array, gradient: jax.Array) -> jax.Array:
    """`x`, whose backward pass gives `carrier` the gradient `gradient`.

    So statistics of a layer take the way of gradients: summed over microbatches, devices and stages like them.
    """
    return x


with_gradient.defvjp(lambda x, carrier, gradient: (x, gradient), lambda gradient, dx: (dx, gradient, None))
