"""Norms, feed-forward and attention modules against NumPy."""

import jax.numpy as jnp
import numpy as np
import numpy_reference
import pytest
from flax import nnx

from jaxforge.models.attention import SelfAttention
from jaxforge.models.mlp import MLP
from jaxforge.models.norm import make_norm
from jaxforge.ops.placement import SINGLE_DEVICE

RNG = np.random.default_rng(0)


def randomised(module):
    """The module with random parameters, and these as a nested dict of float64 arrays."""
    graph, state = nnx.split(module)
    values = nnx.to_pure_dict(state)

    def draw(tree):
        if isinstance(tree, dict):
            return {name: draw(child) for name, child in tree.items()}
        return RNG.normal(size=tree.shape).astype(np.float32) * 0.5

    values = draw(values)
    return nnx.merge(graph, jnp_tree(values)), widened(values)


def jnp_tree(tree):
    return {k: jnp_tree(v) for k, v in tree.items()} if isinstance(tree, dict) else jnp.asarray(tree)


def widened(tree):
    return {k: widened(v) for k, v in tree.items()} if isinstance(tree, dict) else tree.astype(float)


@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("epsilon", [1e-6, 0.1])
def test_norms(kind, epsilon):
    module, p = randomised(make_norm(kind, 8, epsilon))
    x = RNG.normal(size=(2, 3, 8)).astype(np.float32) * 2 + 1
    np.testing.assert_allclose(module(x), numpy_reference.norm(x.astype(float), p, epsilon), atol=2e-6)


@pytest.mark.parametrize("kind, expected", [("RMSNorm", [0.6, 0.8]), ("LayerNorm", [-1, 1])])
def test_norms_of_a_vector_by_hand(kind, expected):
    # rms(3, 4) = 5 / sqrt(2); mean 3.5, standard deviation 0.5
    scale = np.sqrt(2) if kind == "RMSNorm" else 1
    out = make_norm(kind, 2, 0.0)(jnp.array([3.0, 4.0]))
    np.testing.assert_allclose(out, np.array(expected) * scale, rtol=1e-6)


@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm"])
def test_norms_of_half_precision_are_computed_in_fp32(kind):
    # bf16 has no number between 100 and 100.5, so a mean in bf16 would be off by a large part of the deviation
    x = (100 + RNG.normal(size=(3, 64))).astype(jnp.bfloat16)
    out = make_norm(kind, 64, 1e-6)(x)
    assert out.dtype == jnp.bfloat16
    p = {"scale": 1.0} | ({"bias": 0.0} if kind == "LayerNorm" else {})
    expected = numpy_reference.norm(np.asarray(x, float), p, 1e-6)
    np.testing.assert_allclose(np.asarray(out, float), expected, rtol=1e-2)  # rounding of the result: 2^-8


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_mlp(activation, gated, bias):
    module, p = randomised(
        MLP(
            6, 10, activation=activation, gated=gated, bias=bias, std=1.0, placement=SINGLE_DEVICE,
            rngs=nnx.Rngs(params=0), out_width=4,
        )
    )  # fmt: skip
    assert len(p) == (2 + gated) * (1 + bias)
    x = RNG.normal(size=(2, 3, 6)).astype(np.float32)
    out = module(x)
    expected = np.stack([numpy_reference.mlp(row.astype(float), p, activation) for row in x])
    np.testing.assert_allclose(out, expected, atol=1e-5)


def test_the_two_gelus_differ_as_their_formulas_do():
    def at_one(activation):
        one = MLP(
            1, 1, activation=activation, gated=False, bias=False, std=0.0, placement=SINGLE_DEVICE,
            rngs=nnx.Rngs(params=0),
        )  # fmt: skip
        one.up_DF[...] = jnp.ones((1, 1))
        one.down_FE[...] = jnp.ones((1, 1))
        return float(one(jnp.ones((1, 1, 1)))[0, 0, 0])

    assert at_one("gelu") == pytest.approx(0.841344746, abs=1e-6)  # the normal distribution's value at 1
    assert at_one("gelu_tanh") == pytest.approx(0.841191991, abs=1e-6)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("biases", [True, False])
@pytest.mark.parametrize("qk_norm_epsilon", [None, 1e-2])
def test_attention_with_grouped_queries(qk_norm_epsilon, biases, causal):
    module, p = randomised(
        SelfAttention(
            6, 6, 2, 8, qkv_bias=biases, out_bias=biases, qk_norm_epsilon=qk_norm_epsilon, causal=causal, std=1.0,
            backend="xla", placement=SINGLE_DEVICE, rngs=nnx.Rngs(params=0),
        )
    )  # fmt: skip
    assert len(p) == 4 + 4 * biases + 2 * (qk_norm_epsilon is not None)
    x = RNG.normal(size=(2, 7, 6)).astype(np.float32)
    angles = RNG.normal(size=(2, 7, 4)).astype(np.float32)
    segments = np.array([[1, 1, 1, 2, 2, 2, 0], [1, 1, 1, 1, 1, 1, 1]], np.int32)

    def sees(b):
        return lambda s, t: segments[b, s] == segments[b, t] != 0 and (t <= s or not causal)

    expected = [numpy_reference.attention(x[b].astype(float), p, angles[b], sees(b), qk_norm_epsilon) for b in range(2)]
    np.testing.assert_allclose(module(x, angles, segments), np.stack(expected), atol=2e-5)
