"""Experts over devices have the loss, gradients and statistics of one device, in every layout: F48, F52.

By default a few layouts run, which between them have every value of everything that changes.
JAXFORGE_EXPERTS_TABLE=FILE runs all and writes the deviations as a markdown table.
"""

import dataclasses
import gc
import itertools
import os

import jax
import numpy as np
import pytest
from expert_cases import KINDS, Case, expert_problem
from one_device import Deviation, deviation, deviation_table, loss_of
from pipeline_cases import Case as Layout
from pipeline_cases import unplaced

from jaxforge.config.validate import validate
from jaxforge.ops.routing import CHOSEN, DROPPED

TABLE_PATH = os.environ.get("JAXFORGE_EXPERTS_TABLE")
FEW = [
    Case("softmax", Layout(1, tensor=2, data=2, micro_batch=3)),
    Case("softmax", Layout(1, data=4, sharding="optim"), experts=2, dispatcher="allgather"),
    Case("softmax", Layout(1, tensor=2, data=2), experts=4, over_tensor=True, overlap=True),
    Case("sigmoid", Layout(1, tensor=2, data=4, sharding="optim_grads_params"), experts=2),
    Case("sigmoid", Layout(1, tensor=2, data=2, sequence_parallel=True), 4, True, "flex", overlap=True),
    Case("sigmoid", Layout(2, 2, tensor=2, data=2, recompute=("uniform", 2)), experts=2, overlap=True),
    Case("softmax", Layout(4, 1, uneven=True, data=2, vocabulary_over_stages=False), experts=2),
]


def all_cases() -> list[Case]:
    """EP 1, 2 and 4, with experts shared out over tensor or not, by TP, pipelines, dispatchers and overlap."""
    cases, kinds = [], itertools.cycle(KINDS)
    layouts = itertools.product([(1, 1), (2, 1), (2, 2)], (1, 2), (1, 2, 4), (False, True))
    for (ranks, chunks), tensor, experts, over_tensor in layouts:
        axis = experts // tensor if over_tensor else experts
        if (over_tensor and (tensor == 1 or not axis or experts == 1)) or ranks * tensor * axis > 8:
            continue
        # 12 rows on 1, 2 or 4 data parallel ranks
        replicas = 2 if ranks * tensor * axis <= 4 and axis <= 2 else 1
        layout = Layout(ranks, chunks, tensor=tensor, data=axis * replicas, sequence_parallel=over_tensor)
        if experts == 1:
            cases += [Case(kind, layout) for kind in KINDS]
            continue
        dispatchers = ["alltoall", "allgather"] + ["flex"] * (over_tensor and axis > 1)
        for dispatcher in dispatchers:
            kind = next(kinds)
            cases += [Case(kind, layout, experts, over_tensor, dispatcher, overlap) for overlap in (False, True)]
    return cases


@pytest.fixture(scope="module")
def table():
    yield from deviation_table(TABLE_PATH, markdown)


@pytest.mark.slow
@pytest.mark.timeout(7200 if TABLE_PATH else 900)
def test_any_layout_gives_the_gradients_of_one_device(compiler, table):
    cases = all_cases() if TABLE_PATH else FEW
    for few in itertools.batched(cases, 4):  # a program takes hundreds of memory maps as long as it is alive
        pending = [(case, *_compiled(compiler, case)) for case in few]
        for case, executable, arguments in pending:
            table[case] = _deviation(case, *executable.result()(*arguments))
            table[case].assert_small(case)
        del pending, executable
        jax.clear_caches()
        gc.collect()


def _compiled(compiler, case: Case):
    config, layout = case.config(), case.layout
    validate(config, layout.ranks * layout.tensor * layout.data)
    program = layout.program(config)
    parameters, rows, _, _ = expert_problem(case.kind)
    arguments = layout.arguments(program, config, parameters, rows)
    return compiler.submit(program.gradients.lower(*arguments).compile), arguments


def _deviation(case: Case, gradients: dict, sums: dict) -> Deviation:
    config = case.config()
    _, _, loss, expected = expert_problem(case.kind)
    gradients = unplaced(config, gradients)
    found = np.asarray(gradients["decoder"]["layers"]["moe"]["statistics_5E"])
    statistics = expected["decoder"]["layers"]["moe"]["statistics_5E"]
    # tokens are counted exactly, padding never: F49; nothing is dropped
    np.testing.assert_array_equal(found[:, CHOSEN], statistics[:, CHOSEN])
    assert not found[:, DROPPED].any()
    np.testing.assert_allclose(found, statistics, rtol=1e-5, atol=1e-5)
    # all but the rows that are 0: of dropped tokens
    gradients["decoder"]["layers"]["moe"]["statistics_5E"] = found[:, :DROPPED]
    expected = expected | {"decoder": _with_statistics(expected["decoder"], statistics[:, :DROPPED])}
    return deviation(loss_of(config, sums), gradients, loss, expected)


def _with_statistics(decoder: dict, statistics: np.ndarray) -> dict:
    moe = decoder["layers"]["moe"] | {"statistics_5E": statistics}
    return decoder | {"layers": decoder["layers"] | {"moe": moe}}


def markdown(deviations: dict[Case, Deviation]) -> str:
    lines = [
        "| router | PP | VPP | TP | DP | EP | over tensor | dispatcher | overlap | loss | gradient | of |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for case, found in deviations.items():
        layout = case.layout
        lines.append(
            f"| {case.kind} | {layout.ranks} | {layout.chunks} | {layout.tensor} | {layout.data} | {case.experts} |"
            f" {'yes' if case.over_tensor else ''} | {case.dispatcher or ''} | {'yes' if case.overlap else ''} |"
            f" {found.loss:.1e} | {found.gradient:.1e} | {found.worst} |"
        )
    return "\n".join(lines) + "\n"


def test_the_full_table_has_every_combination():
    cases = all_cases()
    assert {case.experts for case in cases} == {1, 2, 4}
    assert {case.dispatcher for case in cases} == {None, "alltoall", "allgather", "flex"}
    assert len(set(cases)) == len(cases)
    assert {case.layout.data for case in cases} <= {1, 2, 4}
    assert all(dataclasses.replace(case, overlap=False) in cases for case in cases if case.overlap)
