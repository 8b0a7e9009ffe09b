"""Runs a function of single-device arrays on a tensor group, the way the train step runs it."""

from collections.abc import Callable

import jax
from jax.sharding import PartitionSpec

from jaxforge.cluster.mesh import MANUAL_AXES, build_mesh, mesh_layout


def on_tensor_group(f: Callable, tensor: int, encoder_tensor: int | None = None) -> Callable:
    """`f` in a shard_map that is manual over the axes that aren't tensor; inputs and outputs are whole arrays."""
    mesh = build_mesh(mesh_layout(tensor, tensor=tensor, encoder_tensor=encoder_tensor), jax.devices()[:tensor])
    whole = PartitionSpec()
    return jax.jit(
        jax.shard_map(f, mesh=mesh, in_specs=whole, out_specs=whole, axis_names=set(MANUAL_AXES), check_vma=False)
    )
