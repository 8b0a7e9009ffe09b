"""Multi-token prediction has the losses and gradients of one device in every layout, on whichever stage it lies."""

import dataclasses
import functools
import gc
import itertools

import jax
import numpy as np
import pytest
from encoder_cases import ENCODER_HETERO_DP, FULL_HETERO_DP, HETERO_TP, rows_with_images, vision_config
from encoder_cases import Case as VisionLayout
from expert_cases import KINDS
from one_device import deviation, loss_and_gradients, loss_of, num_targets
from pipeline_cases import Case as Layout
from pipeline_cases import text_config, twelve_rows, unplaced
from tiny_models import model_function, random_parameters

from jaxforge.config.schema import Config, LossConfig
from jaxforge.config.validate import validate
from jaxforge.models.moe import is_router_state
from jaxforge.models.multi_token import ahead
from jaxforge.ops.cross_entropy import IGNORE
from jaxforge.optim.paths import parameter_paths, split
from jaxforge.training.program import row_keys

DEPTHS, FACTOR = 2, 0.7


@dataclasses.dataclass(frozen=True)
class Case:
    """Layers for multi-token prediction in a layout, on its last stage unless a layout string says another."""

    layout: Layout
    stages: str | None = None
    experts: int = 0
    fused: bool = False

    def config(self) -> Config:
        config = self.layout.config(decoder_changes=changes(self.experts > 0))
        parallel = config.parallel
        if self.stages is not None:
            parallel = dataclasses.replace(
                parallel, pipeline_model_parallel_layout=self.stages, num_layers_per_virtual_pipeline_stage=None
            )
        if self.experts:
            parallel = dataclasses.replace(parallel, expert_model_parallel_size=self.experts)
        return dataclasses.replace(config, parallel=parallel, loss=loss_config(config, self.fused))


def changes(has_experts: bool) -> dict:
    return dict(mtp_num_layers=DEPTHS) | (KINDS["sigmoid"] if has_experts else {})


def loss_config(config: Config, fused: bool = False) -> LossConfig:
    return dataclasses.replace(config.loss, mtp_loss_scaling_factor=FACTOR, cross_entropy_loss_fusion=fused)


# Beside the loss where no decoder layer is, on a stage of their own, two stages before the loss, and one before it.
OWN_STAGE = Case(Layout(4, 2, data=2, recompute=("uniform", 1)), "Ett|t|t|tt|t|t|mm|L")
PIPELINES = [
    Case(Layout(2, 1, tensor=2, data=2, sharding="optim_grads_params"), "Et*8|mmL", fused=True),
    OWN_STAGE,
    Case(Layout(4, 2, tensor=2, vocabulary_over_stages=True), "Ett|t|t|tt|t|tmm||L"),
    Case(Layout(2, 2, data=2, vocabulary_over_stages=True), "Et|t*5|ttmm|L", experts=2, fused=True),
]
CASES = [
    Case(Layout(1, tensor=2, data=4, sharding="optim_grads_params", sequence_parallel=True), fused=True),
    Case(Layout(1, data=2, sharding="optim", recompute=("uniform", 2)), experts=2),
    *PIPELINES,
]


@functools.cache
def problem(has_experts: bool) -> tuple[dict, dict, float, dict]:
    """Parameters, rows, and what one device computes from all rows at once: loss and gradients."""
    config = Layout(1).config(decoder_changes=changes(has_experts))
    config = dataclasses.replace(config, loss=loss_config(config))
    parameters, rows = random_parameters(config), twelve_rows(config)
    loss, gradients = loss_and_gradients(config, parameters, with_ahead(rows))
    return parameters, rows, loss, split(gradients, is_router_state)[1]


def with_ahead(rows: dict) -> dict[str, np.ndarray]:
    """Rows as a batch that is all of a step."""
    weights = [FACTOR / DEPTHS * num_targets(rows) / count for count in targets_ahead(rows)]
    return rows | ahead(rows, DEPTHS) | {"mtp_weights": np.array(weights, np.float32)}


def targets_ahead(rows: dict) -> list[int]:
    """How many targets each depth has, by a loop over documents."""
    counts = [0] * DEPTHS
    for segments, targets in zip(rows["segment_ids"], rows["targets"], strict=True):
        for number in set(segments.tolist()) - {0}:
            counted = targets[segments == number] != IGNORE
            for depth in range(DEPTHS):
                counts[depth] += int(counted[depth + 1 :].sum())
    return counts


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_any_layout_gives_the_gradients_of_one_device(compiler):
    for few in itertools.batched(CASES, 3):
        pending = [(case, *compiled(compiler, case)) for case in few]
        for case, executable, arguments in pending:
            gradients, sums = executable.result()(*arguments)
            config = case.config()
            _, rows, loss, expected = problem(case.experts > 0)
            gradients = split(unplaced(config, gradients), is_router_state)[1]
            assert np.asarray(sums["mtp_targets_J"]).tolist() == targets_ahead(rows)
            deviation(loss_of(config, sums), gradients, loss, expected).assert_small(case)
        del pending, executable
        jax.clear_caches()
        gc.collect()


def compiled(compiler, case: Case):
    config, layout = case.config(), case.layout
    validate(config, layout.ranks * layout.tensor * layout.data)
    program = layout.program(config)
    parameters, rows, _, _ = problem(case.experts > 0)
    arguments = layout.arguments(program, config, parameters, rows)
    return compiler.submit(program.gradients.lower(*arguments).compile), arguments


# What goes with them

BEFORE_LOSS = Layout(2, 2, data=2, micro_batch=2, vocabulary_over_stages=True)


def gradients_before_the_loss(parameters: dict, rows: dict, stages: str = "Et|t*4|tttmm|L", **groups) -> tuple:
    """Loss, and gradients by layer, in a pipeline; `groups` as `tiny_config` takes them."""
    groups["decoder_changes"] = dict(mtp_num_layers=DEPTHS) | groups.get("decoder_changes", {})
    config = BEFORE_LOSS.config(**groups)
    parallel = dataclasses.replace(
        config.parallel, pipeline_model_parallel_layout=stages, num_layers_per_virtual_pipeline_stage=None
    )
    config = dataclasses.replace(config, parallel=parallel, loss=loss_config(config))
    program = BEFORE_LOSS.program(config)
    gradients, sums = program.gradients(*BEFORE_LOSS.arguments(program, config, parameters, rows))
    return loss_of(config, sums), unplaced(config, gradients)


@pytest.mark.slow
def test_tied_embeddings_and_dropout_are_those_of_one_device():
    both = dict(mtp_num_layers=DEPTHS, untie_embeddings_and_output_weights=False, hidden_dropout=0.3)
    config = text_config(decoder_changes=both)
    config = dataclasses.replace(config, loss=loss_config(config))
    parameters, rows = random_parameters(config), twelve_rows(config)
    rows = rows | {"dropout_keys": np.asarray(row_keys(0, 0, (1, len(rows["tokens"]))))[0]}
    found = gradients_before_the_loss(parameters, rows, decoder_changes=both)
    deviation(*found, *loss_and_gradients(config, parameters, with_ahead(rows))).assert_small(both)


@pytest.mark.slow
def test_what_is_frozen_has_no_gradient_and_the_rest_that_of_one_device():
    parameters, rows, *expected = problem(False)
    freeze = ("decoder/layers/**", "decoder/*_VD", "decoder/mtp/*_norm/*")
    loss, gradients = gradients_before_the_loss(parameters, rows, optimizer=dict(freeze=freeze))
    assert set(jax.tree.leaves(parameter_paths(gradients["decoder"]))) == {"final_norm/scale", "mtp/projection_2DE"}
    deviation(loss, gradients, *expected).assert_small(freeze)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout, stages",
    [
        (VisionLayout("qwen2_5_vit", ENCODER_HETERO_DP, tensor=2, data=2), None),
        (VisionLayout("qwen3_vit", FULL_HETERO_DP, 2, 2, data=2, vocabulary_over_stages=True), "Et|t*4|tttmm|L"),
        (VisionLayout("qwen3_vit", HETERO_TP, 2, tensor=2, uneven=True, sequence_parallel=True), "Et|t*7mmL"),
    ],
    ids=lambda value: getattr(value, "mode", value),
)
def test_visual_tokens_ahead_have_the_gradients_of_one_device(layout, stages):
    alone = with_depths(vision_config(layout.encoder))
    parameters, rows = random_parameters(alone), rows_with_images(alone)
    config = with_depths(layout.config())
    if stages is not None:
        parallel = dataclasses.replace(
            config.parallel, pipeline_model_parallel_layout=stages, num_layers_per_virtual_pipeline_stage=None
        )
        config = dataclasses.replace(config, parallel=parallel)
    program = layout.program(config)
    placed, batch = layout.parameters(program, config, parameters), layout.batch(program, config, rows)
    gradients, sums = program.gradients(placed, batch)
    expected = loss_and_gradients(alone, parameters, with_ahead(rows))
    deviation(loss_of(config, sums), unplaced(config, gradients), *expected).assert_small(layout)


def with_depths(config: Config) -> Config:
    decoder = dataclasses.replace(config.model.decoder, mtp_num_layers=DEPTHS)
    model = dataclasses.replace(config.model, decoder=decoder)
    return dataclasses.replace(config, model=model, loss=loss_config(config))


@pytest.mark.parametrize("sharding", ["optim_grads", "optim_grads_params"])
def test_depths_are_sharded_each_by_itself(sharding):
    # 4 depths on 4 data parallel ranks
    config = Layout(1, data=4, sharding=sharding).config(decoder_changes=dict(mtp_num_layers=4))
    cuts = Layout(1, data=4).program(config).sharding.cuts
    assert {path: cut.dim for path, cut in cuts.items() if "/mtp/" in path} == {"decoder/mtp/projection_2DE": 2}


@pytest.mark.slow
def test_scores_pass_over_them():
    parameters, rows, _, _ = problem(False)
    expected_loss, expected_RS = model_function(text_config(decoder_changes=changes(False)), "score")(parameters, rows)
    case = OWN_STAGE
    config = case.config()
    program = case.layout.program(config)
    placed, batch = case.layout.arguments(program, config, parameters, rows)
    loss, count, tokens_MBS = program.score({"trainable": placed, "frozen": {}}, batch)
    assert float(loss) == pytest.approx(float(expected_loss), rel=1e-6)
    assert int(count) == num_targets(rows)
    np.testing.assert_array_equal(np.asarray(tokens_MBS).reshape(expected_RS.shape), expected_RS)


@pytest.mark.parametrize("case", PIPELINES, ids=lambda case: case.stages)
def test_a_pipeline_in_bfloat16_has_places_for_all_that_is_kept(case):
    config = case.config()
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, compute_dtype="bfloat16"))
    program = case.layout.program(config)
    parameters = random_parameters(text_config(decoder_changes=changes(case.experts > 0)))
    arguments = case.layout.arguments(program, config, parameters, twelve_rows(config))
    gradients, _ = jax.eval_shape(program.gradients, *arguments)
    assert gradients["decoder"]["mtp"]["projection_2DE"].dtype == np.float32
