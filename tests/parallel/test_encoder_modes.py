"""Every encoder mode, with and without a pipeline, has the loss and gradients of one device: to 1e-6 and 1e-5, in fp32.

Each program takes some seconds to compile, so by default six layouts run of those that `all_cases` gives: between
them they have every value of everything that changes.  JAXFORGE_ENCODER_MODES_TABLE=FILE runs all and writes the
deviations as a markdown table.
"""

import dataclasses
import functools
import itertools
import os

import jax
import numpy as np
import pytest
from encoder_cases import (
    ENCODER_HETERO_DP,
    FULL_HETERO_DP,
    HETERO_TP,
    MODES,
    Case,
    all_cases,
    rows_where,
    rows_with_images,
    vision_config,
)
from one_device import Deviation, deviation, deviation_table, loss_and_gradients, loss_of
from tiny_models import ENCODERS, random_parameters

TABLE_PATH = os.environ.get("JAXFORGE_ENCODER_MODES_TABLE")

# DeepStack's layers on two ranks: F35
STAGES_AND_TENSOR = Case("qwen3_vit", FULL_HETERO_DP, 2, uneven=True, tensor=2, data=2, sequence_parallel=True)
FEW = [
    Case("qwen2_5_vit", HETERO_TP, 2, tensor=2, encoder_tensor=1, data=2, sequence_parallel=True),
    Case("qwen3_vit", HETERO_TP, 4, 2, tensor=2, encoder_tensor=2, micro_batch=2),
    # F20: four encoders, two decoders
    Case("qwen2_5_vit", ENCODER_HETERO_DP, tensor=2, data=2, encoder_recompute=True),
    Case("qwen3_vit", ENCODER_HETERO_DP, 2, 2, uneven=True, tensor=2, vocabulary_over_stages=True),
    # 6 rows of each rank on 4 devices
    Case("qwen2_5_vit", FULL_HETERO_DP, 4, 2, data=2, vocabulary_over_stages=True),
    STAGES_AND_TENSOR,
]
FOUR_RANKS = Case("qwen2_5_vit", ENCODER_HETERO_DP, tensor=2, data=4)
LAYOUTS = all_cases() if TABLE_PATH else FEW


@pytest.fixture(scope="module")
def table():
    yield from deviation_table(TABLE_PATH, markdown)


@functools.cache
def parameters_of(encoder: str) -> dict:
    return random_parameters(vision_config(encoder))


@functools.cache
def problem(encoder: str):
    """Rows, and what one device computes from them."""
    config = vision_config(encoder)
    rows = rows_with_images(config)
    return rows, loss_and_gradients(config, parameters_of(encoder), rows)


# A compiled program takes 2,000 of the 65,530 memory maps that Linux gives a process.
@functools.lru_cache(maxsize=16)
def compiling(case: Case, compiler):
    """A case's config and program, a future of its gradients' function, and the parameters laid out for it."""
    config = case.config()
    program = case.program(config)
    parameters = case.parameters(program, config, parameters_of(case.encoder))
    lowered = program.gradients.lower(parameters, case.batch(program, config, problem(case.encoder)[0]))
    return config, program, compiler.submit(lowered.compile), parameters


def run(case: Case, compiler, rows: dict[str, np.ndarray]) -> tuple[float, dict, dict]:
    """Loss, gradients by layer, and sums."""
    config, program, executable, parameters = compiling(case, compiler)
    gradients, sums = executable.result()(parameters, case.batch(program, config, rows))
    return loss_of(config, sums), case.by_layer(config, gradients), sums


@pytest.mark.slow
@pytest.mark.timeout(7200 if TABLE_PATH else 900)
@pytest.mark.parametrize("encoder", ENCODERS)
@pytest.mark.parametrize("mode", MODES)
def test_any_mode_and_layout_gives_the_loss_and_gradients_of_one_device(table, compiler, encoder, mode):
    rows, expected = problem(encoder)
    cases = [case for case in LAYOUTS if (case.encoder, case.mode) == (encoder, mode)]
    for some in itertools.batched(cases, 8):
        for case in some:
            compiling(case, compiler)
        for case in some:
            loss, gradients, _ = run(case, compiler, rows)
            assert jax.tree.structure(gradients) == jax.tree.structure(expected[1])
            table[case] = deviation(loss, gradients, *expected)
    for case in cases:
        table[case].assert_small(case)


def test_the_few_layouts_have_every_value_of_everything_that_changes():
    for field in dataclasses.fields(Case):
        few, all_of_them = ({getattr(case, field.name) for case in cases} for cases in (FEW, all_cases()))
        assert few == all_of_them, field.name


ONE, TWO = ((8, 8),), ((8, 12), (4, 4))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "case, images_of, ranks, images",
    [
        # F21: of four data parallel ranks one has all images
        pytest.param(FOUR_RANKS, {1: ONE, 5: TWO, 9: ONE}, {1}, 4, id="on one rank of four"),
        # F40
        pytest.param(STAGES_AND_TENSOR, {3: TWO}, {1}, 2, id="two on one rank, none on the other"),
        pytest.param(STAGES_AND_TENSOR, {6: ONE}, {0}, 1, id="one in the whole step"),
    ],
)
def test_wherever_the_images_are_gradients_are_those_of_one_device(compiler, case, images_of, ranks, images):
    config = vision_config(case.encoder)
    rows = rows_where(config, images_of)
    assert {case.rank_of_row(number) for number in images_of} == ranks
    expected = loss_and_gradients(config, parameters_of(case.encoder), rows)
    loss, gradients, sums = run(case, compiler, rows)
    assert int(sums["images"]) == images
    deviation(loss, gradients, *expected).assert_small(case)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_step_without_any_image_ends_and_leaves_the_encoder_without_gradients(compiler):
    config = vision_config("qwen3_vit")
    rows = rows_where(config, {})
    expected_loss, expected = loss_and_gradients(config, parameters_of("qwen3_vit"), rows)
    loss, gradients, sums = run(STAGES_AND_TENSOR, compiler, rows)
    assert int(sums["images"]) == 0
    for module in ("encoder", "projector"):
        assert all(np.all(np.asarray(gradient) == 0) for gradient in jax.tree.leaves(gradients.pop(module)))
    deviation(loss, gradients, expected_loss, expected).assert_small(STAGES_AND_TENSOR)


def markdown(deviations: dict[Case, Deviation]) -> str:
    lines = [
        "| encoder | mode | encoder TP | TP | PP | stages | DP | microbatches | options | loss | gradient | of |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for case, found in deviations.items():
        stages = case.stages.replace("|", "\\|")
        lines.append(
            f"| {case.encoder} | {case.mode} | {case.encoder_tensor} | {case.tensor} | {case.ranks} x {case.chunks} |"
            f" {stages} | {case.data} | {case.num_microbatches} | {case.options} | {found.loss:.1e} |"
            f" {found.gradient:.1e} | `{found.worst}` |"
        )
    return "\n".join(lines) + "\n"
