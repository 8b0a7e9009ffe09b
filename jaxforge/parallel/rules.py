"""Logical axis names to mesh axes, for the decoder and for the encoder."""

from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxforge.cluster.mesh import EXPERT, STAGE, TENSOR_AXES
from jaxforge.ops.placement import Placement

SHARDED_OVER_TENSOR = ("heads", "kv_heads", "ffn", "vocab", "width")


def decoder_placement(
    sequence_parallel: bool, visual_rows_are_divided: bool = False, experts_are_over_tensor: bool = False
) -> Placement:
    """The decoder's view: everything that tensor parallelism shards lies over both tensor axes.

    Args:
      visual_rows_are_divided: whether the table of visual tokens is, because its devices have made parts of it.
      experts_are_over_tensor: whether the tensor group shares the experts out, instead of cutting each by its width.
    """
    names = [*SHARDED_OVER_TENSOR, "expert_tokens", "tensor_experts" if experts_are_over_tensor else "expert_ffn"]
    names += ["residual_sequence"] * sequence_parallel + ["visual_rows"] * visual_rows_are_divided
    rules = (*((name, TENSOR_AXES) for name in names), ("layers", (STAGE,)))
    return Placement(rules, TENSOR_AXES)


def of_parameters(placement: Placement, vocabulary_is_over_stages: bool) -> Placement:
    """The decoder's view of its parameters, which lie over axes that are manual while a step computes, too.

    `vocabulary_is_over_stages`: whether embedding and head lie over stage as well as tensor.
    """
    rules = dict(placement.rules) | {"experts": (EXPERT, *placement.axes("tensor_experts"))}
    if vocabulary_is_over_stages:
        rules["vocab"] = (STAGE, *TENSOR_AXES)
    return Placement(tuple(rules.items()), placement.manual_axes)


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
