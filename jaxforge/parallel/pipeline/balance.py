"""Layouts from numbers instead of a string: equal stages, smaller outer ones, or stages balanced by FLOPs.

In the lockstep schedule the stage that costs most sets the pace of a tick, so the balanced layout makes that stage as
cheap as it can be.
"""

import dataclasses
from collections.abc import Sequence

from jaxforge.config.errors import ConfigError
from jaxforge.config.model_rules import divisors, one_of
from jaxforge.config.model_schema import DecoderConfig
from jaxforge.config.part_flops import decoder_layers_flops, head_flops, mtp_projection_flops
from jaxforge.parallel.pipeline.layout import PipelineLayout
from jaxforge.parallel.pipeline.layout_string import FIELD


@dataclasses.dataclass(frozen=True)
class StageCosts:
    """What a stage costs beside its decoder layers, in units of one decoder layer.

    Attributes:
      embedding: on the first stage; with an encoder that runs there, the encoder's cost too.
      loss: head and loss of the next token and of each MTP layer, on the last stage.  0 where
        `vocabulary_parallel_over_pipeline` spreads them over all stages.
      mtp_layer: one MTP layer.
    """

    embedding: float = 0.0
    loss: float = 0.0
    mtp_layer: float = 1.0


def flop_costs(decoder: DecoderConfig, seq_length: int, first_stage_flops: float = 0.0) -> StageCosts:
    """Costs by the forward FLOPs of full rows; the backward pass has the same ratios.

    Matrix products only, 2 FLOPs per multiply-add, causal attention at half (Narayanan et al. 2021, arXiv:2104.04473,
    appendix).  The embedding is a lookup: none.  An MTP layer is a decoder layer and a projection from twice the width,
    and the head is used once more for it, where the loss is (DeepSeek-V3, arXiv:2412.19437, section 2.2).  Layers count
    as their mean, also where some are dense and others have experts: released models give both about the same work.

    Args:
      seq_length: tokens of a row.
      first_stage_flops: of one row, for what else the first stage computes: an encoder and its projector.
    """
    layer, head = decoder_layers_flops(decoder, seq_length) / decoder.num_layers, head_flops(decoder)
    return StageCosts(
        embedding=first_stage_flops / (seq_length * layer),
        loss=(1 + decoder.mtp_num_layers) * head / layer,
        mtp_layer=1 + mtp_projection_flops(decoder) / layer,
    )


def uniform_layout(
    num_layers: int, pipeline_size: int, layers_per_virtual_stage: int | None = None, mtp_num_layers: int = 0
) -> PipelineLayout:
    """The same number of decoder layers in every stage; MTP layers are on the last.

    Args:
      layers_per_virtual_stage: `parallel.num_layers_per_virtual_pipeline_stage`; None gives each rank one stage.

    Raises:
      ConfigError: where the layers don't divide, with a layout that places them.
    """
    layers, ranks = f"model.decoder.num_layers={num_layers}", f"parallel.pipeline_model_parallel_size={pipeline_size}"
    per_rank, rest = divmod(num_layers, pipeline_size)
    if rest:
        raise ConfigError(f"{ranks} does not divide {layers}; {_way_out(num_layers, pipeline_size, mtp_num_layers)}")
    per_stage = per_rank if layers_per_virtual_stage is None else layers_per_virtual_stage
    field = f"parallel.num_layers_per_virtual_pipeline_stage={layers_per_virtual_stage}"
    if pipeline_size == 1 and layers_per_virtual_stage is not None:
        raise ConfigError(f"{field} would have no effect with {ranks}; leave it at None, or use more ranks")
    if per_stage < 1 or per_rank % per_stage:
        raise ConfigError(
            f"{field} does not divide the {per_rank} layers of each rank ({layers} over {ranks});"
            f" use {one_of(divisors(per_rank))}"
        )
    return _layout(pipeline_size, [per_stage] * (num_layers // per_stage), mtp_num_layers)


def uneven_layout(
    num_layers: int,
    pipeline_size: int,
    decoder_first_pipeline_num_layers: int | None = None,
    decoder_last_pipeline_num_layers: int | None = None,
    mtp_num_layers: int = 0,
) -> PipelineLayout:
    """One stage in each rank: the first and the last with so many layers, the others equal (Megatron's flags).

    A count that is None makes its stage one of the equal ones.

    Raises:
      ConfigError: where the layers don't come out, with a layout that places them.
    """
    outer = {
        "decoder_first_pipeline_num_layers": decoder_first_pipeline_num_layers,
        "decoder_last_pipeline_num_layers": decoder_last_pipeline_num_layers,
    }
    given = {f"parallel.{name}": count for name, count in outer.items() if count is not None}
    if not given:
        return uniform_layout(num_layers, pipeline_size, mtp_num_layers=mtp_num_layers)
    num_equal, left = pipeline_size - len(given), num_layers - sum(given.values())
    per_stage = left // num_equal if num_equal > 0 else 0
    if min(given.values()) < 0 or num_equal < 0 or left < num_equal or left != num_equal * per_stage:
        raise ConfigError(
            f"{' and '.join(f'{name}={count}' for name, count in given.items())} with"
            f" model.decoder.num_layers={num_layers} leave {left} layers for {max(num_equal, 0)} other stages of"
            f" parallel.pipeline_model_parallel_size={pipeline_size}, which must hold the same number, at least 1;"
            f" {_way_out(num_layers, pipeline_size, mtp_num_layers)}"
        )
    counts = [per_stage] * pipeline_size
    if decoder_first_pipeline_num_layers is not None:
        counts[0] = decoder_first_pipeline_num_layers
    if decoder_last_pipeline_num_layers is not None:
        counts[-1] = decoder_last_pipeline_num_layers
    return _layout(pipeline_size, counts, mtp_num_layers)


def balanced_layout(
    num_layers: int, pipeline_size: int, virtual_stages: int, costs: StageCosts, mtp_num_layers: int = 0
) -> PipelineLayout:
    """The layout whose most expensive stage is as cheap as it can be; among those, the most even one.

    MTP layers go to the last stage, or, where that is cheaper, to the one before, which leaves the loss alone.

    Raises:
      ConfigError: where there are more stages than layers to fill them.
    """
    num_stages = pipeline_size * virtual_stages
    last = num_stages - 1
    choices = []
    for mtp_stage in (last, last - 1) if mtp_num_layers and last else (last,):
        fixed = [0.0] * num_stages  # what a stage costs beside its decoder layers
        fixed[0] += costs.embedding
        fixed[mtp_stage] += mtp_num_layers * costs.mtp_layer
        fixed[last] += costs.loss
        # no decoder layer may follow an MTP layer
        counts = _spread(num_layers, fixed, mtp_stage + 1, pipeline_size)
        most = max(count + cost for count, cost in zip(counts, fixed, strict=True))
        choices.append((most, _layout(pipeline_size, counts, mtp_num_layers, mtp_stage)))
    layout = min(choices, key=lambda choice: choice[0])[1]
    if any(stage.is_empty for stage in layout.stages):
        raise ConfigError(
            f"model.decoder.num_layers={num_layers} is too few for {num_stages} stages"
            f" (parallel.pipeline_model_parallel_size={pipeline_size}, {virtual_stages} in each rank);"
            " use fewer, or a layout string that leaves stages empty"
        )
    return layout


def _spread(num_layers: int, fixed: Sequence[float], num_open: int, pipeline_size: int) -> list[int]:
    """Layers of each stage: every layer in turn goes to the one of the first `num_open` stages that costs least so far.

    Layers cost the same, so this is exact: one that makes a stage cost c + 1 found no stage that cost less than c.
    Among stages of equal cost an inner one comes first (the outer ones hold more than layers), then the one whose rank
    has the fewest layers (the fullest sets the memory of all), then a later one (fewer chunks in flight).
    """
    counts, by_rank = [0] * len(fixed), [0] * pipeline_size
    last = num_open - 1

    def rating(stage: int) -> tuple[float, bool, int, int]:
        return fixed[stage] + counts[stage], stage in (0, last), by_rank[stage % pipeline_size], -stage

    for _ in range(num_layers):
        stage = min(range(num_open), key=rating)
        counts[stage] += 1
        by_rank[stage % pipeline_size] += 1
    return counts


def _layout(
    pipeline_size: int, counts: Sequence[int], mtp_num_layers: int, mtp_stage: int | None = None
) -> PipelineLayout:
    """MTP layers lie on `mtp_stage`, by default the last."""
    mtp_counts = [0] * len(counts)
    mtp_counts[-1 if mtp_stage is None else mtp_stage] = mtp_num_layers
    return PipelineLayout(pipeline_size, tuple(counts), tuple(mtp_counts))


def _way_out(num_layers: int, pipeline_size: int, mtp_num_layers: int) -> str:
    """A layout string that places all layers as evenly as can be."""
    if num_layers < pipeline_size:
        return f"use at most {num_layers} ranks, or a layout string with stages without layers, such as E|tL"
    layout = balanced_layout(num_layers, pipeline_size, 1, StageCosts(mtp_layer=0.0), mtp_num_layers)
    return f'set {FIELD}="{layout.to_string()}"'
