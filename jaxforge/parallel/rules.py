"""Logical axis names to mesh axes, for the decoder and for the encoder."""

from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxforge.cluster.mesh import TENSOR_AXES
from jaxforge.ops.placement import Placement

SHARDED_OVER_TENSOR = ("heads", "kv_heads", "ffn", "vocab", "width")


def decoder_placement(sequence_parallel: bool) -> Placement:
    """The decoder's view: everything that tensor parallelism shards lies over both tensor axes."""
    names = (*SHARDED_OVER_TENSOR, *(("residual_sequence",) if sequence_parallel else ()))
    return Placement(tuple((name, TENSOR_AXES) for name in names), TENSOR_AXES)


def parameter_shardings(axes: Any, mesh: Mesh, placements: dict[str, Placement]) -> Any:
    """NamedShardings of a parameter tree.

    Args:
      axes: nested dict of logical axis tuples, as `logical_axes` gives.
      placements: of each top-level module ("encoder", "projector", "decoder").
    """
    return {
        module: jax.tree.map(
            lambda names, module=module: NamedSharding(mesh, placements[module].spec(names)),
            tree,
            is_leaf=lambda node: isinstance(node, tuple),
        )
        for module, tree in axes.items()
    }


def logical_axes(state: nnx.State) -> Any:
    """The axis names of every parameter, as a nested dict of tuples like `nnx.to_pure_dict(state)`."""
    return nnx.to_pure_dict(
        jax.tree.map(
            lambda parameter: parameter.replace(parameter.get_metadata("axes")),
            state,
            is_leaf=lambda node: isinstance(node, nnx.Variable),
        )
    )


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())
