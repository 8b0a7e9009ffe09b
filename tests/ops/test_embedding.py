"""Lookups by data, forward and backward, on one device and shared over several."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tensor_group import on_tensor_group

from jaxforge.ops.embedding import embed, gather_rows, weighted_rows
from jaxforge.ops.placement import SINGLE_DEVICE
from jaxforge.parallel.encoder import encoder_placement
from jaxforge.parallel.rules import decoder_placement

RNG = np.random.default_rng(0)
TABLE = RNG.normal(size=(12, 8)).astype(np.float32)
IDS = np.array([[3, 0, 11, 3], [7, 3, 6, 5]], np.int32)  # 3 three times; rows of every shard
COTANGENT = RNG.normal(size=(2, 4, 8)).astype(np.float32)

LAYOUTS = {
    "one device": (1, None, SINGLE_DEVICE),
    "decoder over 2": (2, None, decoder_placement(False)),
    "decoder over 4": (4, None, decoder_placement(False)),
    "sequence parallel over 4": (4, None, decoder_placement(True)),
    "encoder over 2 of 4": (4, 2, encoder_placement()),
    "encoder over 1 of 4": (4, 1, encoder_placement()),
}
layouts = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)


def with_gradients(f, layout, *arrays):
    """f(placement, *arrays), and the gradients of sum(f * COTANGENT)."""
    tensor, encoder_tensor, placement = layout

    def run(*arrays):
        out, pull = jax.vjp(lambda *arrays: f(placement, *arrays), *arrays)
        return out, pull(jnp.asarray(COTANGENT))

    return (run if placement == SINGLE_DEVICE else on_tensor_group(run, tensor, encoder_tensor))(*arrays)


@layouts
def test_embedding_looks_up_rows_and_adds_up_their_gradients(layout):
    out, (gradient,) = with_gradients(lambda placement, table: embed(table, IDS, placement), layout, TABLE)
    assert np.array_equal(out, TABLE[IDS])
    expected = np.zeros_like(TABLE)
    np.add.at(expected, IDS, COTANGENT)
    np.testing.assert_allclose(gradient, expected, atol=1e-6)


@layouts
def test_gathered_rows_are_zero_where_the_index_is_negative(layout):
    x = RNG.normal(size=(2, 6, 8)).astype(np.float32)
    index = np.array([[5, -1, 0, 5], [-1, -1, 2, 3]], np.int32)
    out, (gradient,) = with_gradients(lambda placement, x: gather_rows(x, index, placement), layout, x)
    expected, expected_gradient = np.zeros((2, 4, 8), np.float32), np.zeros_like(x)
    for b, s in zip(*np.where(index >= 0), strict=True):
        expected[b, s] = x[b, index[b, s]]
        expected_gradient[b, index[b, s]] += COTANGENT[b, s]
    assert np.array_equal(out, expected)
    np.testing.assert_allclose(gradient, expected_gradient, atol=1e-6)


@layouts
def test_weighted_rows_are_summed(layout):
    index = RNG.integers(0, 12, (2, 4, 3)).astype(np.int32)
    weight = RNG.random((2, 4, 3)).astype(np.float32)
    out, (gradient,) = with_gradients(
        lambda placement, table: weighted_rows(table, index, weight, placement), layout, TABLE
    )
    expected, expected_gradient = np.zeros((2, 4, 8)), np.zeros(TABLE.shape)
    for b, p, j in np.ndindex(2, 4, 3):
        expected[b, p] += weight[b, p, j] * TABLE[index[b, p, j]]
        expected_gradient[index[b, p, j]] += weight[b, p, j] * COTANGENT[b, p]
    np.testing.assert_allclose(out, expected, atol=1e-6)
    np.testing.assert_allclose(gradient, expected_gradient, atol=1e-6)
