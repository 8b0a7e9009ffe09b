"""From a config to the phases of its step."""

import dataclasses
import functools

from flax import nnx
from jax.sharding import Mesh

from jaxforge.cluster.mesh import STAGE, TENSOR_AXES
from jaxforge.config.derived import vocabulary_is_over_stages
from jaxforge.config.schema import Config
from jaxforge.models import VisionLanguageModel
from jaxforge.parallel.data import DataSharding
from jaxforge.parallel.decoder_parts import decoder_parts
from jaxforge.parallel.encoder import ENCODER_MODULES, EncoderPhase
from jaxforge.parallel.phases import Phases
from jaxforge.parallel.pipeline.choice import lies_over_stages, pipeline_layout, stage_units
from jaxforge.parallel.pipeline.engine import Pipeline
from jaxforge.parallel.pipeline.schedule import make_schedule
from jaxforge.parallel.pipeline.vocabulary import Vocabulary
from jaxforge.parallel.stage_sums import is_cpu
from jaxforge.training.step import DepthLosses, count_tokens, per_target, with_counts


def divided_axes(config: Config) -> tuple[str, ...]:
    """The mesh axes whose devices encode different images: those of the hetero DP mode, else none."""
    if config.parallel.enable_full_hetero_dp:
        return (STAGE, *TENSOR_AXES)
    return TENSOR_AXES if config.parallel.enable_encoder_hetero_dp else ()


def is_summed_over_stages(config: Config, path: str) -> bool:
    """Whether each stage of a pipeline finds a part of a parameter's gradient.

    Of its own layers, and its own part of the vocabulary, it finds all; and of the encoder's weights the same as the
    others, unless they encode different images.
    """
    if path.split("/")[0] in ENCODER_MODULES:
        return STAGE in divided_axes(config)
    return not lies_over_stages(path, vocabulary_is_over_stages(config))


def make_phases(
    config: Config, model: VisionLanguageModel, mesh: Mesh, sharding: DataSharding
) -> Phases | None:
    """The phases of a config's step; None where it needs none.  `model` is abstract."""
    layout, divided = pipeline_layout(config), divided_axes(config)
    if layout is None and not divided:
        return None
    parts, z_loss_coefficient = decoder_parts(model.decoder), config.loss.z_loss_coefficient
    depths = DepthLosses.from_config(config)
    vocabulary = None
    if vocabulary_is_over_stages(config):
        fused = model.decoder.fused_loss
        if fused is not None:
            fused = dataclasses.replace(fused, outer_axes=(STAGE,))
        vocabulary = Vocabulary(config.model.decoder.vocab_size, model.decoder.placement, is_cpu(mesh), fused)

    units = stage_units(config, layout) if layout is not None else []

    def pipeline(num_microbatches: int) -> Pipeline:
        assert layout is not None
        schedule = make_schedule(layout.pipeline_size, layout.virtual_stages, num_microbatches)
        return Pipeline(
            parts,
            layout,
            schedule,
            units,
            has_experts=model.decoder.has_experts,
            policies=model.decoder.policies,
            z_loss_coefficient=z_loss_coefficient,
            vocabulary=vocabulary,
        )

    return Phases(
        mesh=mesh,
        sharding=sharding,
        parts=parts,
        pipeline=pipeline if layout is not None else None,
        encoder=_encoder_phase(config, model, mesh, divided) if model.has_encoder else None,
        count=functools.partial(count_tokens, depths=depths),
        with_counts=functools.partial(with_counts, depths=depths),
        per_target=per_target,
        z_loss_coefficient=z_loss_coefficient,
    )


def _encoder_phase(config: Config, model: VisionLanguageModel, mesh: Mesh, divided: tuple[str, ...]) -> EncoderPhase:
    assert config.model.encoder is not None
    alone = nnx.clone(model)
    del alone.decoder
    graph = nnx.graphdef(alone)

    def encode(parameters, patches):
        return nnx.merge(graph, {name: parameters[name] for name in ENCODER_MODULES}).encode(patches)

    return EncoderPhase(encode, mesh, config.model.encoder.spatial_merge_size**2, divided)
