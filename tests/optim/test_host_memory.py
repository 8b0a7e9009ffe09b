"""What goes to host memory, and how."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxforge.optim.host_memory import chosen_for_host_memory, in_host_memory, is_in_host_memory, moved

SIZES = {"decoder": {"embedding": 40, "head": 40, "layers": {"mlp": 100, "scale": 2}}, "projector": {"weight": 18}}


@pytest.mark.parametrize(
    "fraction, expected",
    [
        # of 200
        (0.01, {"decoder/layers/mlp"}),
        (0.5, {"decoder/layers/mlp"}),
        (0.51, {"decoder/layers/mlp", "decoder/embedding"}),
        (0.7, {"decoder/layers/mlp", "decoder/embedding"}),
        (0.8, {"decoder/layers/mlp", "decoder/embedding", "decoder/head"}),
        (0.99, {"decoder/layers/mlp", "decoder/embedding", "decoder/head", "projector/weight"}),
        (1.0, {"decoder/layers/mlp", "decoder/embedding", "decoder/head", "projector/weight", "decoder/layers/scale"}),
    ],
)
def test_the_largest_tensors_go_first_until_they_hold_the_fraction(fraction, expected):
    assert chosen_for_host_memory(SIZES, fraction) == expected


def test_an_array_moves_to_host_memory_and_back_where_its_parts_are():
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"))
    layout = NamedSharding(mesh, PartitionSpec(None, "b"))
    array = jax.device_put(jnp.arange(24.0).reshape(3, 8), layout)
    there = moved(array, in_host_memory(layout))
    assert is_in_host_memory(there) and not is_in_host_memory(array)
    assert there.sharding.spec == layout.spec
    assert [shard.index for shard in there.addressable_shards] == [shard.index for shard in array.addressable_shards]
    back = moved(there, layout)
    assert not is_in_host_memory(back)
    np.testing.assert_array_equal(back, np.arange(24.0).reshape(3, 8))
