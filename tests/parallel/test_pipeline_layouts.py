"""A text model in any pipeline has the loss and gradients of one device: to 1e-6 and 1e-5, in fp32.

There are 56 layouts, and some with options.  Each program takes some seconds to compile, so by default three layouts
run beside those with options: between them they have every pipeline, TP, DP, stages of equal and of different sizes,
and microbatches that the ranks divide and that they don't.  JAXFORGE_PIPELINE_TABLE=FILE runs all and writes the
largest deviations as a markdown table.
"""

import os

import jax
import pytest
from one_device import Deviation, deviation, deviation_table, loss_of
from pipeline_cases import Case, all_cases, problem, unplaced

TABLE_PATH = os.environ.get("JAXFORGE_PIPELINE_TABLE")

FEW = [
    Case(2, 2, data=2),  # 6 microbatches
    Case(4, 1, uneven=True, tensor=2, micro_batch=2),  # 6
    Case(4, 2, uneven=True, data=2, micro_batch=2),  # 3
]
WITH_OPTIONS = [
    Case(2, 2, uneven=True, tensor=2, data=2, sequence_parallel=True, recompute=("uniform", 1)),
    Case(2, 1, uneven=True, recompute=("uniform", 2)),  # groups of 2, 2 and 1 layers, and of 2 and 1
    Case(4, 1, uneven=True, recompute=("block", 1), vocabulary_over_stages=True),  # the last part is padding alone
    Case(4, 2, micro_batch=12),  # one microbatch
]
LAYOUTS = all_cases() if TABLE_PATH else FEW


@pytest.fixture(scope="module")
def table():
    yield from deviation_table(TABLE_PATH, markdown)


@pytest.mark.timeout(3600 if TABLE_PATH else 900)
@pytest.mark.parametrize("cases", [pytest.param(LAYOUTS, id="layouts"), pytest.param(WITH_OPTIONS, id="options")])
def test_any_pipeline_gives_the_loss_and_gradients_of_one_device(table, compiler, cases):
    parameters, rows, *expected = problem()
    pending = []
    for case in cases:
        config = case.config()
        program = case.program(config)
        arguments = case.arguments(program, config, parameters, rows)
        pending.append((case, config, compiler.submit(program.gradients.lower(*arguments).compile), arguments))
    for case, config, executable, arguments in pending:
        gradients, sums = executable.result()(*arguments)
        assert jax.tree.structure(gradients) == jax.tree.structure(expected[1])
        table[case] = deviation(loss_of(config, sums), unplaced(config, gradients), *expected)
    for case in cases:
        table[case].assert_small(case)


def markdown(deviations: dict[Case, Deviation]) -> str:
    """A line for each way to share the rows and each set of options, with the largest deviations over its layouts."""
    groups: dict[tuple, list[Deviation]] = {}
    for case, found in deviations.items():
        groups.setdefault((case.tensor, case.data, case.num_microbatches, case.options), []).append(found)
    lines = [
        "| TP | DP | microbatches | options | layouts | loss | gradient | of |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for group, found in groups.items():
        shared = " | ".join(str(value) for value in group)
        worst = max(found, key=lambda one: one.gradient)
        loss = max(one.loss for one in found)
        lines.append(f"| {shared} | {len(found)} | {loss:.1e} | {worst.gradient:.1e} | `{worst.worst}` |")
    return "\n".join(lines) + "\n"
