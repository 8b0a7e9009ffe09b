"""Rows between devices by a table of sizes, against a loop over pairs of devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from jaxforge.ops.device_group import DeviceGroup
from jaxforge.ops.row_exchange import exchange

S, R, D = 6, 9, 3
RNG = np.random.default_rng(0)
# rows from each (down) to each: one device sends nothing, one gets nothing, one sends all that it has to one
SIZES = {
    "2": np.array([[2, 3], [0, 6]], np.int32),
    "2x2": np.array([[1, 0, 2, 3], [0, 0, 0, 0], [6, 0, 0, 0], [2, 0, 1, 1]], np.int32),
}
layouts = pytest.mark.parametrize("layout", SIZES)


def expected(rows_PSD, sizes_PP, num_rows_out):
    """Each device's rows to each, one after the other."""
    arrived = [[np.zeros((0, rows_PSD.shape[2]), rows_PSD.dtype)] for _ in sizes_PP]
    for source, sizes_P in enumerate(sizes_PP):
        begin = 0
        for destination, size in enumerate(sizes_P):
            arrived[destination].append(rows_PSD[source, begin : begin + size])
            begin += size
    joined = [np.concatenate(blocks) for blocks in arrived]
    return np.stack([np.pad(rows, ((0, num_rows_out - len(rows)), (0, 0))) for rows in joined])


@functools.cache
def exchanged(layout, dtype=np.float32):
    shape = tuple(int(size) for size in layout.split("x"))
    axes = ("a", "b")[: len(shape)]
    mesh = Mesh(np.array(jax.devices()[: len(SIZES[layout])]).reshape(shape), axes)

    def local(rows_SD, cotangent_RD):
        def move(rows_SD):
            return exchange(rows_SD, jnp.asarray(SIZES[layout]), DeviceGroup(axes), R, ragged=False)

        if not np.issubdtype(dtype, np.floating):
            return move(rows_SD), rows_SD
        out_RD, pull = jax.vjp(move, rows_SD)
        return out_RD, *pull(cotangent_RD)

    by_device = PartitionSpec(axes)
    mapped = jax.shard_map(local, mesh=mesh, in_specs=by_device, out_specs=by_device, check_vma=False)
    rows_PSD = (10 * RNG.normal(size=(mesh.size, S, D))).astype(dtype)
    cotangent_PRD = (10 * RNG.normal(size=(mesh.size, R, D))).astype(dtype)
    out, gradient = jax.jit(mapped)(rows_PSD.reshape(-1, D), cotangent_PRD.reshape(-1, D))
    return rows_PSD, cotangent_PRD, np.asarray(out).reshape(-1, R, D), np.asarray(gradient).reshape(-1, S, D)


@layouts
def test_rows_arrive_in_the_order_of_their_sources_and_zeros_follow(layout):
    rows_PSD, _, out_PRD, _ = exchanged(layout)
    np.testing.assert_array_equal(out_PRD, expected(rows_PSD, SIZES[layout], R))


@layouts
def test_the_gradient_goes_the_other_way(layout):
    _, cotangent_PRD, _, gradient_PSD = exchanged(layout)
    np.testing.assert_array_equal(gradient_PSD, expected(cotangent_PRD, SIZES[layout].T, S))


def test_integers_are_exchanged_as_well():
    rows_PSD, _, out_PRD, _ = exchanged("2x2", np.int32)
    np.testing.assert_array_equal(out_PRD, expected(rows_PSD, SIZES["2x2"], R))
