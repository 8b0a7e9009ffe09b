"""The kernels of the fused linear cross-entropy, in Pallas's interpreter.

700 rows and 150 tokens: more than one block both ways, none of them full at the end.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.linear_cross_entropy import STATISTICS_ROWS, dlogits_in_place, token_statistics

ROWS, COUNTED, TOKENS = 700, 690, 150
SOFTCAPS = pytest.mark.parametrize("softcap", [None, 7.0])


def random_problem():
    """Logits whose padded rows must not be read, and targets of which some lie outside of these rows."""
    rng = np.random.default_rng(0)
    logits = (5 * rng.normal(size=(ROWS, TOKENS))).astype(np.float32)
    logits[COUNTED:] = np.nan
    targets = rng.integers(-100, ROWS + 100, TOKENS).astype(np.int32)
    targets[:3] = 0, COUNTED - 1, COUNTED
    return logits, targets


def capped(logits, softcap):
    logits = logits[:COUNTED].astype(float)
    return logits if softcap is None else softcap * np.tanh(logits / softcap)


def one_hot(targets):
    return np.arange(COUNTED)[:, None] == targets


@SOFTCAPS
def test_statistics_are_those_of_each_block(softcap):
    logits, targets = random_problem()
    found = token_statistics(logits, targets, jnp.int32(COUNTED), softcap=softcap, interpret=True)
    assert found.shape == (2, 3, TOKENS)
    x = capped(logits, softcap)
    for number, rows in enumerate((slice(0, STATISTICS_ROWS), slice(STATISTICS_ROWS, COUNTED))):
        largest = x[rows].max(0)
        np.testing.assert_allclose(found[number, 0], largest, rtol=1e-6)
        np.testing.assert_allclose(found[number, 1], np.exp(x[rows] - largest).sum(0), rtol=2e-6)
        np.testing.assert_allclose(found[number, 2], (x * one_hot(targets))[rows].sum(0), rtol=1e-6)


def test_a_block_of_padded_rows_weighs_nothing():
    logits, targets = random_problem()
    found = token_statistics(logits, targets, jnp.int32(STATISTICS_ROWS), softcap=None, interpret=True)
    # times exp(largest here - largest anywhere) its sum is 0
    assert np.all(found[1, 0] == np.float32(-1e30))
    assert np.all(np.isfinite(found[1])) and not np.any(found[1, 2])


@SOFTCAPS
def test_dlogits_are_those_of_the_formula(softcap):
    logits, targets = random_problem()
    x = capped(logits, softcap)
    rng = np.random.default_rng(1)
    # some tokens count for nothing
    weight = rng.uniform(0, 2, TOKENS) * (rng.random(TOKENS) < 0.8)
    lse, scale = np.log(np.exp(x).sum(0)), weight * rng.uniform(1, 2, TOKENS)
    right = np.exp(x - lse) * scale - weight * one_hot(targets)
    if softcap is not None:
        right *= 1 - (x / softcap) ** 2
    coefficients = np.stack([lse, scale, weight]).astype(np.float32)
    found = dlogits_in_place(logits, targets, jnp.int32(COUNTED), coefficients, softcap=softcap, interpret=True)
    # a logit of 20 is exact to 1e-6, and so is its exponential; entries are at most 2
    np.testing.assert_allclose(found[:COUNTED], right, atol=4e-6)
    assert not np.any(found[COUNTED:])
    assert not np.any(found[:, weight == 0])


def test_more_logits_than_int32_counts_are_refused():
    logits, tokens = jax.ShapeDtypeStruct((2**20, 2**11), jnp.float32), jax.ShapeDtypeStruct((2**11,), jnp.int32)
    count = jax.ShapeDtypeStruct((), jnp.int32)
    with pytest.raises(ValueError, match="fewer tokens"):
        jax.eval_shape(lambda *arguments: token_statistics(*arguments, softcap=None), logits, tokens, count)
