"""The train step, compiled for GPUs that aren't here.  Each run is compiled once, however many tests look at it."""

import functools

import pytest
from tiny_runs import ACTIVATION_BYTES, LAYERS, MICROBATCHES, language_model, silent_plan, vision_language_model

# (GPU, config); between them each GPU, each encoder, and each encoder tensor parallel size under a decoder's of 4
RUNS = {
    "language": ("h100:1x8", lambda: language_model(4, sequence_parallel=True)),
    "qwen2_5_vit TP 1": ("h200:2x4", lambda: vision_language_model("qwen2_5_vit", 4, 1, sequence_parallel=True)),
    "qwen2_5_vit TP 2": ("h100:1x8", lambda: vision_language_model("qwen2_5_vit", 4, 2, sequence_parallel=True)),
    "qwen3_vit TP 1": ("b200:1x8", lambda: vision_language_model("qwen3_vit", 4, 1, sequence_parallel=True)),
    "qwen3_vit TP 2": ("a100:1x8", lambda: vision_language_model("qwen3_vit", 4, 2, sequence_parallel=False)),
}
ENCODER_ACTIVATION_BYTES = 64 * 64 * 2  # patches x width in bfloat16

pytestmark = pytest.mark.timeout(900)  # a test may compile a run first: under a minute where the cores are free
every_run = pytest.mark.parametrize("name", RUNS)


@functools.cache
def report(name: str):
    topology, config = RUNS[name]
    return silent_plan(config(), topology)


def in_loops(name: str, kind: str, smallest: int = 0) -> dict[tuple[str, ...], int]:
    """Executions over each combination of axes, of at least so many bytes."""
    counts: dict[tuple[str, ...], int] = {}
    for one in report(name).collectives:
        if one.kind == kind and one.in_loop and one.bytes >= smallest:
            counts[one.axes] = counts.get(one.axes, 0) + one.count
    return counts


def test_sequence_parallel_gathers_and_scatters_activations_instead_of_reducing_them():
    # A layer and its recomputation gather before each of their two halves and scatter after it (the recomputation needs
    # no second scatter); the backward pass does the opposite twice.  Embedding and head scatter and gather once each
    # way.  Equal collectives may be combined, so it is bytes that are compared.
    moved = {
        kind: sum(one.bytes * one.count for one in report("language").collectives if one.kind == kind)
        for kind in ("all-gather", "reduce-scatter")
    }
    whole_sequences = MICROBATCHES * ACTIVATION_BYTES
    assert moved["all-gather"] == whole_sequences * (LAYERS * (2 + 2 + 2) + 2)
    assert moved["reduce-scatter"] == whole_sequences * (LAYERS * (2 + 1 + 2) + 2)
    assert in_loops("language", "all-reduce", smallest=ACTIVATION_BYTES // 4) == {}


def test_without_sequence_parallel_activations_are_reduced():
    reduced = in_loops("qwen3_vit TP 2", "all-reduce", smallest=ACTIVATION_BYTES)
    # two in a layer's forward pass, one in its recomputation, two in its backward pass; one each at embedding and head
    assert reduced["tensor_outer", "tensor_inner"] >= MICROBATCHES * (LAYERS * (2 + 1 + 2) + 2)
    assert in_loops("qwen3_vit TP 2", "reduce-scatter") == {}


@every_run
def test_gradients_are_reduced_over_data_parallel_ranks_once_in_a_step_outside_of_every_loop(name):
    over_replicas = [one for one in report(name).collectives if "replica" in one.axes]
    assert {(one.kind, one.axes, one.in_loop) for one in over_replicas} == {("all-reduce", ("replica",), False)}
    reduced = sum(one.bytes * one.count for one in over_replicas)
    # parameters have 4 bytes each, as their gradients; besides, the step's sums: two of fp32, two or three of int32
    gradients = report(name).memory_parts.parameters
    assert gradients + 16 <= reduced <= gradients + 20


@pytest.mark.parametrize("name", [name for name in RUNS if name.endswith("TP 1")])
def test_an_encoder_of_tensor_parallel_size_1_exchanges_no_activations(name):
    # its layers and attention; the decoder's gathers and scatters are larger than this, its reductions smaller
    assert in_loops(name, "all-reduce", smallest=ENCODER_ACTIVATION_BYTES // 2) == {}


@pytest.mark.parametrize("name", [name for name in RUNS if name.endswith("TP 2")])
def test_an_encoder_of_tensor_parallel_size_2_reduces_over_the_inner_axis_alone(name):
    reduced = in_loops(name, "all-reduce", smallest=ENCODER_ACTIVATION_BYTES // 2)
    assert reduced["tensor_inner",] >= MICROBATCHES * 2 * (2 + 1 + 2)
    assert ("tensor_outer",) not in reduced


@every_run
def test_a_tiny_model_fits_any_gpu(name):
    plan = report(name)
    assert plan.fits
    assert plan.device_bytes.peak < 2**28
    assert plan.host_bytes == 0


def test_the_report_is_json_with_the_keys_that_others_rely_on():
    figures = report("language").to_json()
    assert figures.keys() >= {
        "device_bytes", "host_bytes", "fits", "collectives", "model_flops_per_step", "tokens_per_step",
        "compile_seconds", "pipeline",
    }  # fmt: skip
    assert figures["device_bytes"].keys() == {"arguments", "temporary", "output", "aliased", "peak", "capacity"}
    for one in figures["collectives"]:
        assert one.keys() == {"kind", "axes", "bytes", "count", "in_loop"}
    assert figures["pipeline"] == {
        "ticks": 5, "bubble_fraction": 0.0, "max_chunks_in_flight": 1, "layers_by_rank": [[0, 1, 2]]
    }  # fmt: skip


def test_memory_is_what_arithmetic_gives():
    figures = report("language").to_json()
    device, parts = figures["device_bytes"], figures["memory_parts"]
    # Embedding and head 512 x 192 (the vocabulary padded).  A layer: query and out 192 x 128, key and value 192 x 64,
    # three of 192 x 320.  All of it over 4 GPUs; norm scales, two in a layer and one at the end, on each.
    sharded = 2 * 512 * 192 + 3 * (2 * 192 * 128 + 2 * 192 * 64 + 3 * 192 * 320)
    weights = sharded // 4 + 7 * 192
    assert figures["num_parameters"] == sharded + 7 * 192
    assert parts["parameters"] == 4 * weights
    assert parts["optimizer"] == 2 * 4 * weights + 3 * 4  # two moments; counts of Adam, schedule and steps
    assert parts["batch"] == 5 * 96 * 6 * 4  # microbatches, tokens, six int32 each
    assert device["arguments"] == parts["parameters"] + parts["optimizer"] + parts["batch"]
    assert parts["gradients"] == (4 + 2) * weights
    assert parts["compute_weights"] == 2 * weights
    # the state is updated in place
    assert device["aliased"] == parts["parameters"] + parts["optimizer"]
    assert device["peak"] == device["arguments"] + device["temporary"] + device["output"] - device["aliased"]
    assert device["capacity"] == 84_942_979_072


def test_flops_and_tokens_are_those_of_the_step():
    figures = report("language").to_json()
    tokens = 5 * 2 * 96
    # without embedding, norms and the rows that pad the vocabulary
    weights = 500 * 192 + 3 * (2 * 192 * 128 + 2 * 192 * 64 + 3 * 192 * 320)
    attention = 3 * 3 * 2 * 2 * 128 * 96 / 2  # passes, layers, products, FLOPs per multiply-add, heads, half the row
    assert figures["tokens_per_step"] == tokens
    assert figures["model_flops_per_step"] == tokens * (6 * weights + attention)
