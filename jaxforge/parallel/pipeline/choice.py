"""The layout that a config asks for, and the units of its stages."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxforge.config.derived import (
    BALANCED,
    pipeline_layers_are_uneven,
    stacked_layer_has_experts,
    vocabulary_is_over_stages,
)
from jaxforge.config.errors import ConfigError
from jaxforge.config.memory_rules import decisions_inside_of_recomputed_layers
from jaxforge.config.schema import Config
from jaxforge.memory.recompute import recompute_segments, recomputes_mtp_layers
from jaxforge.models.decoder import VOCABULARY_TABLES
from jaxforge.models.layer_order import LayerOrder, is_in_stacks
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
    parallel, decoder = config.parallel, config.model.decoder
    num_layers, num_mtp = decoder.num_layers, decoder.mtp_num_layers
    size = parallel.pipeline_model_parallel_size
    if size == 1:
        return None
    if parallel.pipeline_model_parallel_layout == BALANCED:
        costs = flop_costs(decoder, config.train.seq_length)
        if vocabulary_is_over_stages(config):  # all stages share the loss
            costs = dataclasses.replace(costs, loss=0.0)
        return balanced_layout(num_layers, size, parallel.virtual_pipeline_model_parallel_size or 1, costs, num_mtp)
    if parallel.pipeline_model_parallel_layout is not None:
        return parse_layout(parallel.pipeline_model_parallel_layout, num_layers, num_mtp, size)
    if pipeline_layers_are_uneven(config):
        outer = parallel.decoder_first_pipeline_num_layers, parallel.decoder_last_pipeline_num_layers
        return uneven_layout(num_layers, size, *outer, num_mtp)
    return uniform_layout(num_layers, size, parallel.num_layers_per_virtual_pipeline_stage, num_mtp)


def layer_order(config: Config) -> LayerOrder | None:
    """What lies in each place of the decoder's stacks, rank by rank, as "stage" cuts them; None without a pipeline.

    With the layers of one kind alone a rank's stack has as many places as that of the rank with the most of them.
    """
    layout = pipeline_layout(config)
    if layout is None:
        return None
    stacks = _layers_of_stacks(stacked_layer_has_experts(config.model.decoder))
    orders = (layout.places(has)[0] for has in stacks.values())
    return LayerOrder(*(tuple(order.reshape(-1).tolist()) for order in orders))


def first_places(layout: PipelineLayout, has_experts: Sequence[bool]) -> dict[str, np.ndarray]:
    """For each of the stacks of `LayerOrder`, the first place of each chunk of each rank, [ranks, chunks] int32."""
    return {name: layout.places(has)[1] for name, has in _layers_of_stacks(has_experts).items()}


def _layers_of_stacks(has_experts: Sequence[bool]) -> dict[str, list[bool]]:
    """Of each stack of `LayerOrder`, in its order, which layers it is of."""
    has = list(has_experts)
    return {"layers": [True] * len(has), "mlp": [not one for one in has], "moe": has}


def lies_over_stages(path: str, vocabulary_is_over_stages: bool) -> bool:
    """Whether a parameter's first dimension is sharded over stage: the decoder's stacks, perhaps its tables."""
    return is_in_stacks(path) or (vocabulary_is_over_stages and path in VOCABULARY_TABLES)


def num_parameters(parameters: Tree, order: LayerOrder | None) -> int:
    """Numbers in a nested dict of parameters; places that no layer uses don't count."""

    def count(path, leaf):
        if order is None or not is_in_stacks(path):
            return leaf.size
        places = order.of(path)
        return leaf.size // len(places) * sum(place >= 0 for place in places)

    return sum(jax.tree.leaves(jax.tree.map(count, parameter_paths(parameters), parameters)))


def stage_units(config: Config, layout: PipelineLayout) -> list[tuple[Unit, ...]]:
    """The units of every stage.  block recomputes the first layers of each stage, uniform groups within a stage.

    Raises:
      ConfigError: for groups, or a number of layers, that no stage has; or for activations that are decided on although
        every layer is recomputed.
    """
    encoder, number = config.model.encoder, config.memory.recompute_num_layers
    if number is not None and number > (largest := max(layout.num_layers_by_stage)):
        raise ConfigError(
            f"memory.recompute_num_layers={number} is of each stage, of which the largest has {largest} layers; use at"
            " most that"
        )
    num_features = len(encoder.deepstack_visual_indexes) if encoder else 0
    feed_forwards = tuple("moe" if has else "mlp" for has in stacked_layer_has_experts(config.model.decoder))
    units = [
        chunk_units(
            feed_forwards[stage.first_layer : stage.first_layer + stage.num_layers],
            stage.first_layer,
            recompute=recompute_segments(config.memory, stage.num_layers) if stage.num_layers else (),
            num_features=num_features,
        )
        + _units_ahead(config, stage.num_mtp_layers, feed_forwards[-1])
        for stage in layout.stages
    ]
    if all(unit.is_recomputed for of_stage in units for unit in of_stage):
        for message in decisions_inside_of_recomputed_layers(config, "decoder"):
            raise ConfigError(message)
    return units


def _units_ahead(config: Config, num_mtp_layers: int, feed_forward: str) -> tuple[Unit, ...]:
    """The unit of a stage that holds the MTP layers."""
    if not num_mtp_layers:
        return ()
    is_recomputed = recomputes_mtp_layers(config.memory)
    return (Unit(num_mtp_layers, is_recomputed, feed_forward=feed_forward, is_ahead=True),)
