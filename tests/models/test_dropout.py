"""Dropout: its rate and scale, and masks that don't depend on the layout."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxforge.cluster import build_mesh, mesh_layout
from jaxforge.models.dropout import dropout
from jaxforge.ops.placement import SINGLE_DEVICE
from jaxforge.parallel.rules import decoder_placement
from jaxforge.training.program import row_keys

KEYS_B2 = row_keys(0, jnp.int32(3), (1, 4))[0]


def test_about_the_rate_is_dropped_and_the_rest_scaled_up():
    y_BSD = np.asarray(dropout(jnp.ones((4, 64, 64)), KEYS_B2, 5, 0.25, SINGLE_DEVICE))
    assert set(np.unique(y_BSD)) == {0, np.float32(1 / 0.75)}
    # 16384 numbers: three standard deviations of the share are 3 * sqrt(0.25 * 0.75 / 16384) = 0.0101
    assert np.mean(y_BSD == 0) == pytest.approx(0.25, abs=0.0101)


def test_rows_steps_and_places_drop_differently():
    x_BSD = jnp.ones((4, 8, 8))
    masks = [dropout(x_BSD, KEYS_B2, site, 0.5, SINGLE_DEVICE) for site in (1, 2)]
    masks.append(dropout(x_BSD, row_keys(0, jnp.int32(4), (1, 4))[0], 1, 0.5, SINGLE_DEVICE))
    rows = np.concatenate([np.asarray(mask) for mask in masks])
    assert len(np.unique(rows.reshape(len(rows), -1), axis=0)) == 12


def test_nothing_is_dropped_in_evaluation():
    x_BSD = jnp.ones((4, 8, 8))
    assert dropout(x_BSD, None, 1, 0.5, SINGLE_DEVICE) is x_BSD


def test_the_same_numbers_are_dropped_under_sequence_parallelism():
    x_BSD = jnp.arange(4 * 8 * 8, dtype=jnp.float32).reshape(4, 8, 8)
    placement = decoder_placement(sequence_parallel=True)
    with jax.set_mesh(build_mesh(mesh_layout(4, tensor=4), jax.devices()[:4])):
        sharded = jax.jit(lambda x: dropout(x, KEYS_B2, 2, 0.5, placement))(x_BSD)
    np.testing.assert_array_equal(sharded, dropout(x_BSD, KEYS_B2, 2, 0.5, SINGLE_DEVICE))


def test_row_keys_count_rows_through_the_microbatches():
    whole, split = row_keys(7, jnp.int32(0), (1, 8)), row_keys(7, jnp.int32(0), (4, 2))
    np.testing.assert_array_equal(whole.reshape(8, 2), split.reshape(8, 2))
