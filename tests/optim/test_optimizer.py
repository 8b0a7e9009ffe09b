"""AdamW against a loop over numbers, and which parameters it touches."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxforge.config.errors import ConfigError
from jaxforge.config.schema import OptimizerConfig
from jaxforge.optim import learning_rate_schedule, make_optimizer, split_trainable
from jaxforge.optim.optimizer import moments
from jaxforge.optim.paths import decays, join, matches, parameter_paths

PARAMETERS = {
    "encoder": {"layers": {"mlp": {"up_DF": jnp.array([[1.0, -2.0]]), "up_bias_F": jnp.array([0.5])}}},
    "decoder": {"final_norm": {"scale": jnp.array([1.5, 1.0])}, "head_VD": jnp.array([[0.3], [-0.1]])},
}
GRADIENTS = [jax.tree.map(lambda p, n=n: jnp.sin(5 * p + n), PARAMETERS) for n in range(3)]


def by_path(tree) -> dict:
    paths = jax.tree.leaves(parameter_paths(tree))
    return dict(zip(paths, jax.tree.leaves(tree), strict=True))


def after_updates(config, parameters=PARAMETERS, gradients=GRADIENTS, steps=100):
    optimizer = make_optimizer(config, steps, parameters)
    state = optimizer.init(parameters)
    for gradient in gradients:
        norm = optax.tree.norm(gradient)
        parameters, state = optimizer.update(gradient, state, parameters, norm, jnp.isfinite(norm))
    return by_path(parameters)


# tolerances below are fp32's rounding of values that pass from order 1 to their results
def adamw_by_hand(values, gradients, rates, *, beta1, beta2, epsilon, decay):
    """One number at a time: Loshchilov and Hutter 2017, algorithm 2, with the decay multiplied by the rate."""
    values = [float(v) for v in values]
    for i in range(len(values)):
        m = v = 0.0
        for step, (gradient, rate) in enumerate(zip(gradients, rates, strict=True), start=1):
            g = float(gradient[i])
            m = beta1 * m + (1 - beta1) * g
            v = beta2 * v + (1 - beta2) * g * g
            direction = (m / (1 - beta1**step)) / (math.sqrt(v / (1 - beta2**step)) + epsilon)
            values[i] -= rate * (direction + decay * values[i])
    return values


def expected_after(path, rates, decay, clip=lambda step: 1.0):
    gradients = [by_path(g)[path].ravel() * clip(step) for step, g in enumerate(GRADIENTS)]
    return adamw_by_hand(
        by_path(PARAMETERS)[path].ravel(), gradients, rates, beta1=0.8, beta2=0.9, epsilon=1e-3, decay=decay
    )


def config_of(**fields):
    given = dict(
        learning_rate=0.1, lr_decay_style="constant", adam_beta1=0.8, adam_beta2=0.9, adam_eps=1e-3,
        weight_decay=0.5, clip_grad=0.0,
    )  # fmt: skip
    return OptimizerConfig(**given | fields)


def test_three_updates_are_those_of_adamw_and_norms_and_biases_do_not_decay():
    found = after_updates(config_of())
    for path, values in found.items():
        decay = 0.0 if path in ("encoder/layers/mlp/up_bias_F", "decoder/final_norm/scale") else 0.5
        expected = expected_after(path, [0.1] * 3, decay)
        np.testing.assert_allclose(values.ravel(), expected, rtol=1e-6, atol=2e-7, err_msg=path)


def test_the_schedule_counts_updates_from_zero():
    found = after_updates(config_of(lr_warmup_iters=2))
    path = "decoder/head_VD"
    np.testing.assert_allclose(found[path].ravel(), expected_after(path, [0.05, 0.1, 0.1], 0.5), rtol=1e-6, atol=2e-7)


def test_gradients_are_clipped_by_the_norm_of_all_together():
    norms = [math.sqrt(sum(float(jnp.sum(g**2)) for g in by_path(gradient).values())) for gradient in GRADIENTS]
    limit = sorted(norms)[1]  # clips one of the three, leaves two alone
    assert sum(norm > limit for norm in norms) == 1
    found = after_updates(config_of(clip_grad=limit))
    for path in found:
        decay = 0.0 if path in ("encoder/layers/mlp/up_bias_F", "decoder/final_norm/scale") else 0.5
        expected = expected_after(path, [0.1] * 3, decay, clip=lambda step: min(1, limit / norms[step]))
        np.testing.assert_allclose(found[path].ravel(), expected, rtol=1e-6, atol=2e-7, err_msg=path)


def test_the_first_pattern_that_matches_scales_the_learning_rate_of_a_parameter():
    found = after_updates(config_of(lr_scale=(("*/final_norm/*", 3.0), ("decoder/**", 0.5))))
    scales = {"decoder/final_norm/scale": 0.3, "decoder/head_VD": 0.05}
    for path in found:
        decay = 0.0 if path in ("encoder/layers/mlp/up_bias_F", "decoder/final_norm/scale") else 0.5
        expected = expected_after(path, [scales.get(path, 0.1)] * 3, decay)
        np.testing.assert_allclose(found[path].ravel(), expected, rtol=1e-6, atol=2e-7, err_msg=path)


def test_updates_and_state_are_those_of_the_chain_of_optax():
    config = config_of(learning_rate=0.03, lr_warmup_iters=2, clip_grad=1.0, lr_scale=(("encoder/**", 3.0),))
    paths = parameter_paths(PARAMETERS)
    chain = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(0.8, 0.9, 1e-3),
        optax.add_decayed_weights(0.5, mask=jax.tree.map(decays, paths)),
        optax.stateless(lambda u, _: u | {"encoder": jax.tree.map(lambda u: 3 * u, u["encoder"])}),
        optax.scale_by_learning_rate(learning_rate_schedule(config, 100)),
    )
    expected, chain_state = PARAMETERS, chain.init(PARAMETERS)
    optimizer = make_optimizer(config, 100, PARAMETERS)
    parameters, state = PARAMETERS, optimizer.init(PARAMETERS)
    assert jax.tree.structure(state) == jax.tree.structure(chain_state)  # what checkpoints are made of
    for gradient in GRADIENTS:
        updates, chain_state = chain.update(gradient, chain_state, expected)
        expected = optax.apply_updates(expected, updates)
        norm = optax.tree.norm(gradient)
        parameters, state = optimizer.update(gradient, state, parameters, norm, jnp.isfinite(norm))
    for found, value in zip(
        jax.tree.leaves((parameters, state)), jax.tree.leaves((expected, chain_state)), strict=True
    ):
        np.testing.assert_allclose(found, value, rtol=1e-5, atol=1e-7)


def test_an_update_that_is_not_finite_leaves_everything_but_the_step_alone():
    optimizer = make_optimizer(config_of(), 100, PARAMETERS)
    norm = optax.tree.norm(GRADIENTS[0])
    before = optimizer.update(GRADIENTS[0], optimizer.init(PARAMETERS), PARAMETERS, norm, jnp.isfinite(norm))
    poisoned = jax.tree.map(lambda g: g * jnp.nan, GRADIENTS[1])
    after = optimizer.update(poisoned, before[1], before[0], jnp.float32(jnp.nan), jnp.array(False))
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(old, new)


def test_moments_stored_in_bfloat16_are_rounded_after_each_update_which_is_computed_in_fp32():
    config = config_of(exp_avg_dtype="bfloat16", exp_avg_sq_dtype="bfloat16")
    optimizer = make_optimizer(config, 100, PARAMETERS)
    parameters, state = PARAMETERS, optimizer.init(PARAMETERS)
    values = np.asarray(by_path(PARAMETERS)["decoder/head_VD"], np.float64)
    m = v = np.zeros_like(values)
    for step, gradient in enumerate(GRADIENTS, start=1):
        parameters, state = optimizer.update(gradient, state, parameters, jnp.ones(()), jnp.array(True))
        g = np.asarray(by_path(gradient)["decoder/head_VD"], np.float64)
        m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g * g
        direction = (m / (1 - 0.8**step)) / (np.sqrt(v / (1 - 0.9**step)) + 1e-3)
        values = values - 0.1 * (direction + 0.5 * values)
        m, v = (np.asarray(moment, jnp.bfloat16).astype(np.float64) for moment in (m, v))
    np.testing.assert_allclose(parameters["decoder"]["head_VD"], values, rtol=1e-6, atol=2e-7)
    mu, nu = moments(state)
    assert mu["decoder"]["head_VD"].dtype == nu["decoder"]["head_VD"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(mu["decoder"]["head_VD"], np.float64), m)
    np.testing.assert_array_equal(np.asarray(nu["decoder"]["head_VD"], np.float64), v)


def test_only_norms_and_biases_are_free_of_decay():
    paths = {
        "decoder/embedding_VD": True,
        "decoder/layers/attention/query_DHK": True,
        "encoder/position_ND": True,
        "decoder/layers/attention/query_DHK_lora_a": True,
        "decoder/layers/mlp/up_DF_lora_b": True,
        "decoder/layers/attention/query_bias_HK": False,
        "encoder/patch_bias_D": False,
        "encoder/layers/mlp_norm/bias": False,
        "decoder/layers/attention_norm/scale": False,
    }
    assert {path: decays(path) for path in paths} == paths


@pytest.mark.parametrize(
    "pattern, path, expected",
    [
        ("encoder/**", "encoder/layers/mlp/up_DF", True),
        ("encoder", "encoder/layers/mlp/up_DF", True),
        ("encoder/*", "encoder/layers/mlp/up_DF", True),
        ("encoder/layers/mlp/*", "encoder/layers/attention/out_HKD", False),
        ("*_norm/scale", "decoder/layers/mlp_norm/scale", True),
        ("encoder/**", "encoder_2/up_DF", False),
        ("encoder", "decoder/encoder/up_DF", False),
        ("Encoder/**", "encoder/up_DF", False),
    ],
)
def test_patterns_match_whole_paths(pattern, path, expected):
    assert matches(path, pattern) == expected


def test_frozen_parameters_are_taken_out_with_their_folders():
    trainable, frozen = split_trainable(PARAMETERS, ("encoder/**", "decoder/final_norm/*"))
    assert list(by_path(trainable)) == ["decoder/head_VD"]
    assert sorted(by_path(frozen)) == [
        "decoder/final_norm/scale", "encoder/layers/mlp/up_DF", "encoder/layers/mlp/up_bias_F",
    ]  # fmt: skip
    assert "encoder" not in trainable and "head_VD" not in frozen["decoder"]
    assert by_path(join(trainable, frozen)) == by_path(PARAMETERS)


def test_without_patterns_everything_trains():
    trainable, frozen = split_trainable(PARAMETERS, ())
    assert by_path(trainable) == by_path(PARAMETERS) and frozen == {}


def test_where_only_some_train_the_others_are_frozen_and_freezing_those_is_refused():
    only = ("decoder/final_norm/*", "encoder/**")
    trainable, frozen = split_trainable(PARAMETERS, ("*/up_DF",), only)
    assert sorted(by_path(trainable)) == ["decoder/final_norm/scale", "encoder/layers/mlp/up_bias_F"]
    assert sorted(by_path(frozen)) == ["decoder/head_VD", "encoder/layers/mlp/up_DF"]
    with pytest.raises(ConfigError, match=r"optimizer\.freeze.*'decoder/head_VD', which matches no .* that trains"):
        split_trainable(PARAMETERS, ("decoder/head_VD",), only)


def test_a_pattern_without_effect_is_refused():
    with pytest.raises(ConfigError, match=r"optimizer\.freeze.*'encodr/\*\*'.*decoder/final_norm"):
        split_trainable(PARAMETERS, ("decoder/**", "encodr/**"))
    with pytest.raises(ConfigError, match=r"optimizer\.lr_scale.*'vision/\*'"):
        make_optimizer(config_of(lr_scale=(("vision/*", 0.1),)), 10, PARAMETERS)


def test_a_learning_rate_for_frozen_parameters_alone_is_refused():
    trainable, _ = split_trainable(PARAMETERS, ("encoder/**",))
    with pytest.raises(ConfigError, match=r"optimizer\.lr_scale.*'encoder/\*\*'"):
        make_optimizer(config_of(lr_scale=(("encoder/**", 0.1),)), 10, trainable)


def test_freezing_everything_is_refused():
    with pytest.raises(ConfigError, match="nothing to train"):
        split_trainable(PARAMETERS, ("*",))
