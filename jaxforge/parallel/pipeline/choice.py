"""The layout that a config asks for, and the units of its stages."""

import dataclasses
from typing import Any

import jax

from jaxforge.config.derived import BALANCED, pipeline_layers_are_uneven, vocabulary_is_over_stages
from jaxforge.config.errors import ConfigError
from jaxforge.config.memory_rules import decisions_inside_of_recomputed_layers
from jaxforge.config.schema import Config
from jaxforge.memory.recompute import recompute_segments
from jaxforge.models.decoder import VOCABULARY_TABLES
from jaxforge.optim.paths import parameter_paths
from jaxforge.parallel.pipeline.balance import balanced_layout, flop_costs, uneven_layout, uniform_layout
from jaxforge.parallel.pipeline.layout import PipelineLayout
from jaxforge.parallel.pipeline.layout_string import parse_layout
from jaxforge.parallel.pipeline.pieces import Unit, chunk_units

Tree = Any


def pipeline_layout(config: Config) -> PipelineLayout | None:
    """Which stage holds which layers; None without a pipeline.

    Raises:
      ConfigError: where the layers can't be placed as asked, with a layout that places them.
    """
    parallel, num_layers = config.parallel, config.model.decoder.num_layers
    size = parallel.pipeline_model_parallel_size
    if size == 1:
        return None
    if parallel.pipeline_model_parallel_layout == BALANCED:
        costs = flop_costs(config.model.decoder, config.train.seq_length)
        if vocabulary_is_over_stages(config):  # all stages share the loss
            costs = dataclasses.replace(costs, loss=0.0)
        return balanced_layout(num_layers, size, parallel.virtual_pipeline_model_parallel_size or 1, costs)
    if parallel.pipeline_model_parallel_layout is not None:
        return parse_layout(parallel.pipeline_model_parallel_layout, num_layers, 0, size)
    if pipeline_layers_are_uneven(config):
        return uneven_layout(
            num_layers, size, parallel.decoder_first_pipeline_num_layers, parallel.decoder_last_pipeline_num_layers
        )
    return uniform_layout(num_layers, size, parallel.num_layers_per_virtual_pipeline_stage)


def layer_order(layout: PipelineLayout | None) -> tuple[int, ...] | None:
    """The decoder layer in each place of its stacks, -1 in unused ones: rank by rank, as "stage" cuts them."""
    return None if layout is None else tuple(layout.layer_order.reshape(-1).tolist())


def is_over_stages(path: str) -> bool:
    """Whether an array is cut over the stages, by its path as a parameter or in a state: the decoder's layers alone.

    Such a stack is [places, ...] in the order of `layer_order` with a pipeline, and [num_layers, ...] without one.
    """
    return "/decoder/layers/" in f"/{path}"


def lies_over_stages(path: str, vocabulary_is_over_stages: bool) -> bool:
    """Whether a parameter's first dimension is sharded over stage: the decoder's stacks, perhaps its tables."""
    return is_over_stages(path) or (vocabulary_is_over_stages and path in VOCABULARY_TABLES)


def num_parameters(parameters: Tree, layout: PipelineLayout | None) -> int:
    """Numbers in a nested dict of parameters; places that no layer uses don't count."""
    places = layout.pipeline_size * layout.slots_per_rank if layout else 1
    used = layout.num_layers if layout else 1

    def count(path, leaf):
        return leaf.size // places * used if is_over_stages(path) else leaf.size

    return sum(jax.tree.leaves(jax.tree.map(count, parameter_paths(parameters), parameters)))


def stage_units(config: Config, layout: PipelineLayout) -> list[tuple[Unit, ...]]:
    """The units of every stage.  block recomputes the first layers of each stage, uniform groups within a stage.

    Raises:
      ConfigError: for activations that are decided on although every layer is recomputed.
    """
    encoder = config.model.encoder
    num_features = len(encoder.deepstack_visual_indexes) if encoder else 0
    units = [
        chunk_units(
            stage.num_layers,
            stage.first_layer,
            recompute=recompute_segments(config.memory, stage.num_layers) if stage.num_layers else (),
            num_features=num_features,
        )
        for stage in layout.stages
    ]
    if all(unit.is_recomputed for of_stage in units for unit in of_stage):
        for message in decisions_inside_of_recomputed_layers(config, "decoder"):
            raise ConfigError(message)
    return units
