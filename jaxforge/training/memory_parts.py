"""What the memory of a step consists of, by formula: from shapes, shardings and the strategy that shards them."""

import dataclasses
import math
from collections import Counter
from typing import Any

import jax
import numpy as np

from jaxforge.config.derived import padded_vocab_size, vocabulary_is_over_stages
from jaxforge.config.schema import Config
from jaxforge.models.layer_order import FEED_FORWARDS, is_in_stacks, stack_of
from jaxforge.ops.linear_cross_entropy import CHUNK_BYTES
from jaxforge.optim.paths import parameter_paths, split
from jaxforge.parallel.pipeline.choice import pipeline_layout, stage_units
from jaxforge.parallel.pipeline.layout import PipelineLayout
from jaxforge.training.activation_costs import ActivationCost
from jaxforge.training.backends import compute_dtype
from jaxforge.training.program import Program, bytes_per_device

Tree = Any


@dataclasses.dataclass(frozen=True)
class MemoryParts:
    """What the arguments and the temporary memory of a GPU consist of, in bytes.

    Parameters, optimizer and batch are computed from shapes and shardings, and add up to the arguments.  Gradients,
    compute weights, the layers' activations and logits are computed too; `communication` is the largest buffer that
    one collective takes or gives, and `rest` what remains of the temporary memory at its peak: workspace.  Memory is
    used again within a step, so the parts may come to more than the whole: not all gradients exist yet while there
    are activations.  `host_state` is what lies in host memory of masters and moments, and is in none of the others.
    """

    parameters: int
    optimizer: int
    batch: int
    gradients: int
    compute_weights: int
    activations: int
    logits: int
    communication: int
    rest: int
    host_state: int


def memory_parts(
    config: Config,
    program: Program,
    costs: list[ActivationCost],
    batch: Tree,
    temporary: int,
    stages: PipelineLayout | None,
    communication: int = 0,
) -> MemoryParts:
    """Of a program compiled for GPUs.

    Args:
      costs: of the program's activations.
      batch: shapes with shardings.
      temporary: bytes, from the compiled program.
      stages: the layout of the pipeline, if there is one.
      communication: bytes of the largest buffer of a collective, from the compiled program.
    """
    state = program.abstract_state
    gradients = _gradient_bytes(config, program, stages)
    compute_weights = _compute_weight_bytes(config, program, stages)
    activations, logits = sum(cost.device_bytes for cost in costs), _logits_bytes(config)
    return MemoryParts(
        parameters=bytes_per_device((state["trainable"], state["frozen"], state.get("router"))),
        optimizer=bytes_per_device((state["optimizer"], state["step"])),
        batch=bytes_per_device(batch),
        gradients=gradients,
        compute_weights=compute_weights,
        activations=activations,
        logits=logits,
        communication=communication,
        rest=max(0, temporary - gradients - compute_weights - activations - logits - communication),
        host_state=bytes_per_device(state, in_host=True),
    )


def formula_bytes(config: Config, program: Program) -> int:
    """What a GPU needs of what can be computed without compiling; the batch and workspace aren't in it."""
    parts = memory_parts(config, program, program.activation_costs(), {}, 0, pipeline_layout(config))
    held = parts.parameters + parts.optimizer + parts.gradients + parts.compute_weights
    return held + parts.activations + parts.logits


def _logits_bytes(config: Config) -> int:
    """Logits of a microbatch and their gradients, in fp32; of the fused loss what a chunk of tokens takes."""
    decoder, parallel = config.model.decoder, config.parallel
    shards = parallel.tensor_model_parallel_size
    if vocabulary_is_over_stages(config):
        shards *= parallel.pipeline_model_parallel_size
    numbers = config.train.micro_batch_size * config.train.seq_length * (padded_vocab_size(decoder) // shards)
    return min(4 * numbers, CHUNK_BYTES) if config.loss.cross_entropy_loss_fusion else 8 * numbers


def _gradient_bytes(config: Config, program: Program, stages: PipelineLayout | None) -> int:
    """fp32 sums over microbatches, and beside them the gradients that the backward pass has just found.

    The latter are in the compute dtype and of the whole model; with a pipeline, which adds them layer by layer, of the
    largest unit and of what each stage holds beside layers.  Where they are scattered at once, the sums are parts, and
    so is, in fp32, what one microbatch of all layers gives without a pipeline.
    """
    trainable, sharding = program.abstract_state["trainable"], program.sharding
    itemsize = compute_dtype(config, "gpu").itemsize
    if not sharding.scatters_at_once:
        return 4 * _numbers(program, trainable) + itemsize * _found_at_once(config, program, stages)
    sums = 4 * _numbers(program, trainable, in_parts=True)
    return 2 * sums if stages is None else sums + itemsize * _found_at_once(config, program, stages)


def _compute_weight_bytes(config: Config, program: Program, stages: PipelineLayout | None) -> int:
    """The cast weights that train; frozen ones are kept in the compute dtype and used as they are.

    Where layers are gathered, parts of all, and whole a layer at a time and what lies beside layers.
    """
    trainable, frozen = program.abstract_state["trainable"], program.abstract_state["frozen"]
    dtype = compute_dtype(config, "gpu")
    if not program.sharding.gathers_layers:
        return dtype.itemsize * _numbers(program, trainable) if dtype != np.float32 else 0
    parts = dtype.itemsize * _numbers(program, trainable, in_parts=True) if dtype != np.float32 else 0
    return parts + dtype.itemsize * sum(_found_of(config, program, tree, stages) for tree in (trainable, frozen))


def _found_at_once(config: Config, program: Program, stages: PipelineLayout | None) -> int:
    trainable = program.abstract_state["trainable"]
    return _numbers(program, trainable) if stages is None else _found_of(config, program, trainable, stages)


def _found_of(config: Config, program: Program, tree: Tree, stages: PipelineLayout | None) -> int:
    """Numbers of the largest unit of layers, and of everything beside the decoder's layers."""
    layers, others = split(tree, is_in_stacks)
    unit = 1
    if stages is not None:
        unit = max(unit.num_layers for units in stage_units(config, stages) for unit in units)
    of_stacks: Counter[str] = Counter()
    for path, leaf in zip(jax.tree.leaves(parameter_paths(layers)), jax.tree.leaves(layers), strict=True):
        places, *layer = program.sharding.layouts[path].shard_shape(leaf.shape)
        of_stacks[stack_of(path)] += math.prod(layer) * min(unit, places)
    # a layer has one of its feed-forwards
    return of_stacks["layers"] + max(of_stacks[name] for name in FEED_FORWARDS) + _numbers(program, others)


def _numbers(program: Program, tree: Tree, *, in_parts: bool = False) -> int:
    """How many numbers a device holds of parameters while it computes: whole, or this data parallel rank's part."""

    def count(path, leaf):
        layout = program.sharding.loop_layout(path) if in_parts else program.sharding.layouts[path]
        return math.prod(layout.shard_shape(leaf.shape))

    return sum(jax.tree.leaves(jax.tree.map(count, parameter_paths(tree), tree)))
