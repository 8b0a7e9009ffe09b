"""Pipelines, compiled for GPUs that aren't here: what they exchange, memory that doesn't grow, and compile times."""

import dataclasses
import functools
import time

import pytest
from tiny_runs import ACTIVATION_BYTES, MICROBATCHES, SEQ_LENGTH, WIDTH, language_model, silent_plan

from jaxforge.config import load_config, resolve
from jaxforge.config.schema import Config, DecoderConfig, ModelConfig, ParallelConfig, TrainConfig

pytestmark = pytest.mark.timeout(900)

# Parameters on each GPU over TP 2, as in test_train_step.py: a layer's projections and its two norms, on each GPU; the
# two tables and the last norm.
LAYER = (2 * WIDTH * 128 + 2 * WIDTH * 64 + 3 * WIDTH * 320) // 2 + 2 * WIDTH
ENDS = 2 * 512 * WIDTH // 2 + WIDTH


@functools.cache
def tiny():
    """Two layers on the first of two ranks and one on the second, TP 2, DP 2, five microbatches."""
    parallel = ParallelConfig(
        tensor_model_parallel_size=2, pipeline_model_parallel_size=2, pipeline_model_parallel_layout="Ett|tL"
    )
    return silent_plan(dataclasses.replace(language_model(2), parallel=parallel), "h100:1x8")


def test_the_schedule_is_in_the_report():
    # microbatch m goes forward in ticks m and m + 1, and back in m + 1 and m + 2
    assert tiny().to_json()["pipeline"] == {
        "ticks": 7, "bubble_fraction": pytest.approx(1 / 6), "max_chunks_in_flight": 3, "layers_by_rank": [[0, 1], [2]]
    }  # fmt: skip


def test_memory_is_that_of_a_stage_and_of_both_ends():
    # every rank has places for two layers, though the second uses one; every stage has both tables
    held = 2 * LAYER + ENDS
    parts = tiny().memory_parts
    assert parts.parameters == 4 * held
    assert parts.optimizer == 2 * 4 * held + 3 * 4
    assert parts.batch == MICROBATCHES * SEQ_LENGTH * 6 * 4
    # the sums, and what is found at once: of a layer, and of the tables and the last norm
    assert parts.gradients == 4 * held + 2 * (LAYER + ENDS)
    assert parts.compute_weights == 2 * held
    # a place that no layer uses is no parameter
    assert tiny().num_parameters == 3 * (2 * (LAYER - 2 * WIDTH) + 2 * WIDTH) + 2 * (ENDS - WIDTH) + WIDTH


def test_stages_exchange_one_activation_and_one_gradient_a_tick():
    permutes = [one for one in tiny().collectives if one.kind == "collective-permute"]
    assert {one.axes for one in permutes} == {("stage",)}
    # 6 ticks with forwards, 6 with backwards; those of one tick may be combined
    assert sum(one.bytes * one.count for one in permutes) == 12 * ACTIVATION_BYTES


def test_gradients_are_reduced_once_outside_of_every_loop():
    reduced: dict[tuple[str, ...], int] = {}
    for one in tiny().collectives:
        if one.kind != "collective-permute" and {"stage", "replica"} & set(one.axes):
            assert (one.kind, one.in_loop) == ("all-reduce", False)
            reduced[one.axes] = reduced.get(one.axes, 0) + one.bytes * one.count
    # gradients of layers over data parallel ranks, those of the ends over stages too: 4 bytes each; with the former go
    # the step's two counts, with the latter its two losses
    assert reduced.pop(("replica",)) == 4 * 2 * LAYER + 8
    assert reduced.pop(("stage", "replica")) == 4 * ENDS + 8
    # the norm of the gradients: a number for each array
    assert sum(reduced.values()) < 100


@functools.cache
def llama_temporary(microbatches: int, *, vocabulary_over_stages: bool | None = None) -> int:
    """Bytes of temporary memory of Llama 3.1 8B at PP 4, DP 2, full recompute, rows of 4096 tokens, the plain loss."""
    overrides = [
        "parallel.tensor_model_parallel_size=1", "parallel.sequence_parallel=false",
        "parallel.pipeline_model_parallel_size=4", "train.seq_length=4096",
        f"train.global_batch_size={2 * microbatches}", "parallel.data_parallel_sharding_strategy=no_shard",
        "loss.cross_entropy_loss_fusion=false",
        f"parallel.vocabulary_parallel_over_pipeline={vocabulary_over_stages}",
    ]  # fmt: skip
    config = resolve(load_config("configs/llama3_1_8b_pretrain.py", overrides))
    return silent_plan(config, "h100:1x8").device_bytes.temporary


def test_memory_does_not_grow_with_the_microbatches():
    few, more, many = (llama_temporary(microbatches) for microbatches in (8, 32, 64))
    assert more == pytest.approx(few, rel=0.01)
    assert many == pytest.approx(few, rel=0.01)
    # half of what MaxText 0.2.5's pipeline takes at 32 microbatches in the same layout (PP 4 x FSDP 2, full recompute)
    assert more < 38.7e9 / 2


def test_a_vocabulary_over_the_stages_takes_a_quarter_of_the_memory_on_each_of_four():
    # of embedding and head: fp32 sums of gradients, gradients just found, and compute weights
    saved = 3 / 4 * 2 * 128256 * 4096 * (4 + 2 + 2)
    assert llama_temporary(8, vocabulary_over_stages=False) - llama_temporary(8) > saved


def deep_model(num_devices: int) -> Config:
    """61 layers of width 7168 over 16 ranks with two chunks each, TP 8, 64 microbatches."""
    decoder = DecoderConfig(
        num_layers=61, hidden_size=7168, ffn_hidden_size=18432, num_attention_heads=56, num_query_groups=8,
        kv_channels=128, vocab_size=129280,
    )  # fmt: skip
    parallel = ParallelConfig(
        tensor_model_parallel_size=8,
        sequence_parallel=True,
        pipeline_model_parallel_size=16,
        pipeline_model_parallel_layout="Et*2|(tt|)*29,t|L",
    )
    return dataclasses.replace(
        language_model(8),
        model=ModelConfig(decoder=decoder),
        parallel=parallel,
        train=TrainConfig(seq_length=4096, global_batch_size=64 * num_devices // 128),
    )


@pytest.mark.parametrize("hosts", [pytest.param(16, id="128 GPUs"), pytest.param(128, id="1024 GPUs")])
def test_a_deep_pipeline_compiles_in_under_a_minute(hosts):
    began = time.process_time()  # of all threads; the machine may have other work
    report = silent_plan(deep_model(8 * hosts), f"h100:{hosts}x8")
    seconds = time.process_time() - began
    assert seconds < 60
    counts = [len(layers) for layers in report.pipeline.layers_by_rank]
    assert counts == [4] * 14 + [3, 2]
