"""Routing against a loop over tokens, and the router's losses against their formulas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxforge.config.schema import DecoderConfig
from jaxforge.ops.routing import CHOSEN, ENTROPY, PROBABILITY, RouterLosses, Z, route, with_gradient, with_loss

ROWS, LENGTH, EXPERTS = 2, 5, 8
RULES = {
    "softmax": dict(),
    "softmax as it is": dict(moe_router_pre_softmax=True),
    "sigmoid, scaled": dict(moe_router_score_function="sigmoid", moe_router_topk_scaling_factor=2.5),
    "groups": dict(
        moe_router_score_function="sigmoid", moe_router_topk=3, moe_router_num_groups=4, moe_router_group_topk=2
    ),
}
IS_TOKEN = np.array([[1, 1, 1, 1, 0], [1, 1, 0, 0, 0]], bool)


def config_of(**fields) -> DecoderConfig:
    return DecoderConfig(**dict(num_experts=EXPERTS, moe_router_topk=2) | fields)


def logits_of(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(ROWS, LENGTH, EXPERTS)).astype(np.float32) * 2


def scores_of(config: DecoderConfig, logits_E: np.ndarray) -> np.ndarray:
    if config.moe_router_score_function == "sigmoid":
        return 1 / (1 + np.exp(-logits_E))
    return np.exp(logits_E) / np.exp(logits_E).sum()


def chosen_by_hand(config: DecoderConfig, logits_E: np.ndarray, bias_E: np.ndarray) -> tuple[list[int], np.ndarray]:
    """The experts of one token, the best first, and their weights."""
    scores = scores_of(config, logits_E)
    ranked = scores + bias_E
    allowed = set(range(EXPERTS))
    if config.moe_router_num_groups:
        size = EXPERTS // config.moe_router_num_groups
        groups = [ranked[i * size : (i + 1) * size] for i in range(config.moe_router_num_groups)]
        best = sorted(range(len(groups)), key=lambda g: -np.sort(groups[g])[-2:].sum())[: config.moe_router_group_topk]
        allowed = {g * size + i for g in best for i in range(size)}
    experts = sorted(allowed, key=lambda e: -ranked[e])[: config.moe_router_topk]
    weights = scores[experts]
    if not config.moe_router_pre_softmax:
        weights = weights / weights.sum()
    return experts, weights * config.moe_router_topk_scaling_factor


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_tokens_go_where_a_loop_sends_them(rule, has_bias):
    config, logits = config_of(**RULES[rule]), logits_of()
    # of a size that changes some choices
    bias = np.linspace(-0.4, 0.4, EXPERTS).astype(np.float32) if has_bias else np.zeros(EXPERTS, np.float32)
    before = jnp.zeros((5, EXPERTS))
    routing = route(config, RouterLosses(), logits, IS_TOKEN, bias if has_bias else None, before)
    counts = np.zeros(EXPERTS)
    for token, is_token in enumerate(IS_TOKEN.reshape(-1)):
        found, weights = routing.experts_NK[token].tolist(), routing.weights_NK[token]
        if is_token:
            experts, expected = chosen_by_hand(config, logits.reshape(-1, EXPERTS)[token], bias)
            assert found == experts
            np.testing.assert_allclose(weights, expected, rtol=1e-6)
            counts[experts] += 1
        else:  # F49
            assert found == [EXPERTS] * config.moe_router_topk and not weights.any()
    np.testing.assert_array_equal(routing.statistics_5E[CHOSEN], counts)


def test_statistics_are_sums_over_tokens_without_padding():
    config, logits = config_of(), logits_of()
    found = route(config, RouterLosses(), logits, IS_TOKEN, None, jnp.zeros((5, EXPERTS))).statistics_5E
    tokens = logits[IS_TOKEN].astype(float)
    p = np.exp(tokens) / np.exp(tokens).sum(-1, keepdims=True)
    np.testing.assert_allclose(found[PROBABILITY], p.sum(0), rtol=1e-5)
    np.testing.assert_allclose(found[ENTROPY].sum(), -(p * np.log(p)).sum(), rtol=1e-5)
    np.testing.assert_allclose(found[Z].sum(), (np.log(np.exp(tokens).sum(-1)) ** 2).sum(), rtol=1e-5)


def balance(config, logits_BSE, share_BE):
    """E sum_e q_e P_e over all tokens, P_e the mean probability, written out."""
    scores = jax.nn.softmax(logits_BSE)
    if config.moe_router_score_function == "sigmoid":
        scores = jax.nn.sigmoid(logits_BSE)
        scores = scores / scores.sum(-1, keepdims=True)
    total = sum(
        share_BE[b] @ scores[b, s] for b in range(ROWS) for s in range(LENGTH) if IS_TOKEN[b, s]
    )  # fmt: skip
    return EXPERTS * total / IS_TOKEN.sum()


@pytest.mark.parametrize("rule", ["softmax", "sigmoid, scaled"])
@pytest.mark.parametrize("kind", ["aux_loss", "seq_aux_loss"])
def test_the_gradient_of_the_load_balancing_loss_is_that_of_its_formula(rule, kind):
    config, logits, coefficient = config_of(**RULES[rule]), jnp.asarray(logits_of()), 0.7
    before = jnp.zeros((5, EXPERTS)).at[CHOSEN].set(jnp.arange(1, EXPERTS + 1))
    if kind == "aux_loss":
        share = np.broadcast_to(np.arange(1, EXPERTS + 1) / 36, (ROWS, EXPERTS))
    else:
        share = np.zeros((ROWS, EXPERTS))
        for b, s in np.argwhere(IS_TOKEN):
            share[b, chosen_by_hand(config, np.asarray(logits)[b, s], np.zeros(EXPERTS))[0]] += 1
        share /= share.sum(-1, keepdims=True)
    expected = jax.grad(lambda logits: coefficient * balance(config, logits, share))(logits)

    def attached(logits):
        # the loss of a step with as many target tokens as tokens, divided by them in the end
        routing = route(config, RouterLosses(kind, coefficient), logits, IS_TOKEN, None, before)
        return jnp.sum(with_loss(jnp.zeros(3), routing.loss, jnp.float32(1)))

    found = jax.grad(attached)(logits) / IS_TOKEN.sum()
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_the_gradient_of_the_z_loss_is_that_of_its_formula():
    logits = jnp.asarray(logits_of())

    def formula(logits):
        return 0.3 * jnp.mean(jax.nn.logsumexp(logits, axis=-1)[IS_TOKEN] ** 2)

    def attached(logits):
        routing = route(config_of(), RouterLosses("none", 0, 0.3), logits, IS_TOKEN, None, jnp.zeros((5, EXPERTS)))
        return jnp.sum(with_loss(jnp.zeros(3), routing.loss, jnp.float32(1) / IS_TOKEN.sum()))

    np.testing.assert_allclose(jax.grad(attached)(logits), jax.grad(formula)(logits), atol=1e-6)


def test_an_even_load_has_a_balance_of_one_and_no_first_step_has_a_gradient():
    config, logits = config_of(), jnp.asarray(logits_of())

    def loss(logits):
        return route(config, RouterLosses("aux_loss", 1.0), logits, IS_TOKEN, None, jnp.zeros((5, EXPERTS))).loss

    np.testing.assert_allclose(loss(logits), IS_TOKEN.sum(), rtol=1e-6)
    # probabilities sum to 1 whatever the logits are
    np.testing.assert_allclose(jax.grad(loss)(logits), 0, atol=1e-7)


def test_a_carrier_gets_the_gradient_that_it_was_given():
    def f(x, carrier):
        return jnp.sum(3 * with_gradient(x, carrier, jnp.arange(4.0)))

    dx, dcarrier = jax.grad(f, (0, 1))(jnp.ones(2), jnp.zeros(4))
    np.testing.assert_array_equal(dx, [3, 3])
    np.testing.assert_array_equal(dcarrier, [0, 1, 2, 3])
