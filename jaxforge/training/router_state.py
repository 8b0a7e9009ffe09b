"""What routers keep beside weights: statistics of the last step, and the biases that follow the load."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxforge.config.schema import MoeConfig
from jaxforge.models.moe import BIAS, STATISTICS
from jaxforge.ops.routing import CHOSEN, DROPPED, ENTROPY, PROBABILITY, Z
from jaxforge.optim.paths import parameter_paths

Tree = Any


def next_router(config: MoeConfig, router: Tree, statistics: Tree, trainable: Tree, is_finite: jax.Array) -> Tree:
    """The router state after a step.

    A bias goes up by moe_router_bias_update_rate where its expert had less than the mean load of its layer, and down
    where it had more (Wang et al. 2024, arXiv:2408.15664); not where the router's weights don't train.

    Args:
      router: before the step.
      statistics: what the step found, laid out like those of `router`.
      is_finite: where it is false nothing changes.
    """
    found = _by_layer(statistics, STATISTICS)
    trained = {path.rsplit("/", 1)[0] for path in jax.tree.leaves(parameter_paths(trainable)) if "router_DE" in path}

    def one(path, old):
        folder, name = path.rsplit("/", 1)
        new = found[folder]
        if name == BIAS:
            chosen_LE = new[:, CHOSEN]
            more_LE = jnp.sign(jnp.mean(chosen_LE, axis=-1, keepdims=True) - chosen_LE)
            new = old + config.moe_router_bias_update_rate * more_LE if folder in trained else old
        return jnp.where(is_finite, new, old)

    return jax.tree.map(one, parameter_paths(router), router)


def router_metrics(router: Tree) -> dict[str, jax.Array]:
    """Of the state after a step, over all layers with experts.

    moe/load_max_mean: the largest over the mean load, of the layer in which that is most; moe/load_p10, _p50 and _p90:
    percentiles of the load over its layer's mean, over all experts.  moe/entropy: of the router's probabilities, in
    nats.  moe/aux_loss: E sum_e q_e P_e, which is 1 where load and probabilities are even; moe/z_loss: mean squared
    log-sum-exp; neither is multiplied with its coefficient.  moe/dropped_tokens: (token, expert) pairs.
    """
    statistics = jnp.concatenate([layers.swapaxes(0, 1) for layers in _by_layer(router, STATISTICS).values()], axis=1)
    num_experts = statistics.shape[-1]
    chosen_LE, probability_LE = statistics[CHOSEN], statistics[PROBABILITY]
    # places of a stack that no layer uses have no tokens
    tokens_L = jnp.sum(probability_LE, axis=-1)
    is_used_L = tokens_L > 0
    tokens_L, layers = jnp.maximum(tokens_L, 1), jnp.maximum(jnp.sum(is_used_L), 1)
    load_LE = chosen_LE / jnp.maximum(jnp.mean(chosen_LE, axis=-1, keepdims=True), 1e-9)
    share_LE = load_LE / num_experts

    def mean(sums_L):
        return jnp.sum(jnp.where(is_used_L, sums_L / tokens_L, 0)) / layers

    loads = jnp.where(is_used_L[:, None], load_LE, jnp.nan)
    metrics = {
        "moe/load_max_mean": jnp.max(jnp.where(is_used_L[:, None], load_LE, 0)),
        **{f"moe/load_p{p}": jnp.nanpercentile(loads, p) for p in (10, 50, 90)},
        "moe/entropy": mean(jnp.sum(statistics[ENTROPY], axis=-1)),
        "moe/aux_loss": num_experts * mean(jnp.sum(share_LE * probability_LE, axis=-1)),
        "moe/z_loss": mean(jnp.sum(statistics[Z], axis=-1)),
        "moe/dropped_tokens": jnp.sum(statistics[DROPPED]),
    }
    biases = list(_by_layer(router, BIAS).values())
    if biases:
        metrics["moe/bias_min"] = jnp.min(jnp.stack([jnp.min(bias) for bias in biases]))
        metrics["moe/bias_max"] = jnp.max(jnp.stack([jnp.max(bias) for bias in biases]))
    return metrics


def _by_layer(tree: Tree, name: str) -> dict[str, jax.Array]:
    """The arrays of a name, by the path of their folder."""
    pairs = zip(jax.tree.leaves(parameter_paths(tree)), jax.tree.leaves(tree), strict=True)
    return {path.rsplit("/", 1)[0]: array for path, array in pairs if path.endswith("/" + name)}
