"""Masters and moments in host memory, compiled for GPUs that aren't here: bytes, and what moves beside what."""

import dataclasses
import functools
import re

import pytest
from tiny_runs import language_model

from jaxforge.cluster import MeshLayout, build_mesh, described_devices, parse_topology
from jaxforge.config.derived import num_microbatches
from jaxforge.data.batches import BatchLayout
from jaxforge.optim import streaming
from jaxforge.training.memory_parts import memory_parts
from jaxforge.training.program import build_program

pytestmark = pytest.mark.timeout(900)

# An eighth of it is on each GPU, but the norms, which stay whole: embedding and head 512 x 192 (the vocabulary padded);
# in each of 3 layers query and out 192 x 128, key and value 192 x 64, three of 192 x 320; scales of 7 norms.
MATRICES = 2 * 512 * 192 + 3 * (2 * 192 * 128 + 2 * 192 * 64 + 3 * 192 * 320)
WEIGHTS = MATRICES // 8 + 7 * 192
BATCH, COUNTS = 5 * 96 * 6 * 4, 3 * 4  # of five microbatches; of Adam, the schedule and the steps
SLICE = 8192


def described(strategy: str = "optim_grads_params", memory=(), optimizer=()):
    """A config and its program for 8 GPUs."""
    config = language_model(1, data_parallel=8)
    config = dataclasses.replace(
        config,
        parallel=dataclasses.replace(config.parallel, data_parallel_sharding_strategy=strategy),
        memory=dataclasses.replace(config.memory, **dict(memory)),
        optimizer=dataclasses.replace(config.optimizer, **dict(optimizer)),
    )
    mesh = build_mesh(MeshLayout.from_config(config, 8), described_devices(parse_topology("h100:1x8")))
    return config, build_program(config, mesh, "gpu")


@functools.cache
def compiled(optimizer_cpu_offload: bool):
    """(memory analysis, parts by formula, HLO)"""
    config, program = described(memory=dict(optimizer_cpu_offload=optimizer_cpu_offload))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streaming, "SLICE_BYTES", SLICE)
        batch = BatchLayout.from_config(config, program.mesh, num_microbatches(config, 8)).shapes()
        step = program.train_step.lower(program.abstract_state, batch).compile()
    analysis = step.memory_analysis()
    return analysis, memory_parts(config, program, [], batch, analysis.temp_size_in_bytes, None), step.as_text()


def test_masters_and_moments_leave_the_device_and_no_more_than_slices_come_back():
    plain, _, _ = compiled(False)
    offloaded, parts, _ = compiled(True)
    assert plain.argument_size_in_bytes == 12 * WEIGHTS + BATCH + COUNTS
    assert offloaded.argument_size_in_bytes == BATCH + COUNTS
    assert offloaded.host_argument_size_in_bytes == offloaded.host_alias_size_in_bytes == 12 * WEIGHTS
    # nothing besides: no array in host memory is copied whole
    assert offloaded.host_temp_size_in_bytes == 0
    assert (parts.parameters, parts.optimizer, parts.host_state) == (0, COUNTS, 12 * WEIGHTS)
    # of one parameter and the next, three arrays each: being read, computed, written
    assert offloaded.temp_size_in_bytes - plain.temp_size_in_bytes < 2 * 3 * 3 * SLICE


def test_the_largest_tensors_go_first():
    config, program = described("optim", memory=dict(optimizer_cpu_offload=True, optimizer_offload_fraction=0.5))
    parts = memory_parts(config, program, [], {}, 0, None)
    # of a device's 122 688 numbers three stacks of 3 x 192 x 320 / 8 hold 69 120, two of them less than half
    assert WEIGHTS == 122_688
    assert parts.host_state == 12 * 69_120
    assert parts.parameters == 4 * (WEIGHTS - 69_120)
    assert parts.optimizer == 8 * (WEIGHTS - 69_120) + COUNTS


def test_moments_in_bfloat16_take_half():
    halves = {"exp_avg_dtype": "bfloat16", "exp_avg_sq_dtype": "bfloat16"}
    config, program = described("no_shard", optimizer=halves)
    parts = memory_parts(config, program, [], {}, 0, None)
    assert (parts.parameters, parts.optimizer) == (4 * (MATRICES + 7 * 192), 4 * (MATRICES + 7 * 192) + COUNTS)


def test_copies_are_asynchronous_and_one_array_is_read_while_another_is_written():
    _, _, hlo = compiled(True)
    bodies = [body for body in re.split(r"\n}\n", hlo) if "dynamic-update-slice-start" in body and "ENTRY" not in body]
    # the loops of embedding, head, and seven stacks of matrices
    assert len(bodies) == 9
    for body in bodies:
        lines = body.splitlines()
        written = {}
        for number, line in enumerate(lines):
            name = line.partition(" = ")[0].strip(" %")
            if "dynamic-update-slice-start" in name:
                written[name] = number
        assert len(written) == 3  # the master and two moments
        overlapped = 0
        for name, start in written.items():
            end = next(n for n, line in enumerate(lines) if f"fusion-done(%{name})" in line)
            overlapped += any("dynamic-slice-start" in line.partition(" = ")[0] for line in lines[start:end])
        assert overlapped == 2  # the last has nothing left to be read
    # what lies in host memory is an operand of copies, loops and views alone
    kinds = set(re.findall(r" = [^=]*S\(5\)[^=]*? ([a-z\-]+)\(", hlo))
    assert kinds <= {
        "parameter", "get-tuple-element", "tuple", "while", "bitcast", "fusion-start", "fusion-done", "copy-start",
        "copy-done", "dynamic-slice", "dynamic-update-slice",
    }  # fmt: skip
