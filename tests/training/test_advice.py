"""What would make a run smaller: the changes, and the bytes that they free, by hand."""

import dataclasses
import functools

import jax
import pytest

from jaxforge.cluster.mesh import MeshLayout, build_mesh
from jaxforge.config import load_config, resolve
from jaxforge.training.advice import changes_that_free_most
from jaxforge.training.program import build_program

ROW, WIDTH, LAYERS, FFN, KEYS, VOCABULARY = 2048, 4096, 32, 14336, 1024, 128256
LAYER = 2 * WIDTH * (WIDTH + KEYS) + 3 * WIDTH * FFN
TABLES = 2 * VOCABULARY * WIDTH
ALL = LAYERS * LAYER + TABLES


def config(*overrides):
    """Llama 3.1 8B over 8 data parallel ranks; nothing is recomputed or sharded, the loss isn't fused."""
    plain = [
        "parallel.tensor_model_parallel_size=1", "parallel.sequence_parallel=false", f"train.seq_length={ROW}",
        "train.global_batch_size=16", "memory.recompute_granularity=none", "memory.recompute_method=none",
        "memory.recompute_num_layers=none", "parallel.data_parallel_sharding_strategy=no_shard",
        "loss.cross_entropy_loss_fusion=false",
    ]  # fmt: skip
    return resolve(load_config("configs/llama3_1_8b_pretrain.py", [*plain, *overrides]))


def program_of(config):
    return build_program(config, build_mesh(MeshLayout.from_config(config, 8), jax.devices()), "gpu")


@functools.cache
def advice(*overrides):
    return changes_that_free_most(config(*overrides), 8, program_of)


def test_the_three_changes_that_free_most_come_with_their_bytes():
    sharding, offload, tensor = advice()
    assert sharding.settings == ("--config.parallel.data_parallel_sharding_strategy=optim_grads_params",)
    # 7 of 8 parts of masters, moments, sums of gradients; new gradients in fp32 parts for bfloat16; and of the weights
    # what isn't gathered
    weights = 2 * ALL - (2 * ALL / 8 + 2 * (TABLES + LAYER))
    assert sharding.frees == pytest.approx(16 * ALL * 7 / 8 + (2 * ALL - 4 * ALL / 8) + weights, rel=0.01)
    assert offload.settings == ("--config.memory.optimizer_cpu_offload=true",)
    assert offload.frees == pytest.approx(12 * ALL, rel=0.01)
    assert tensor.settings == (
        "--config.parallel.tensor_model_parallel_size=2", "--config.parallel.sequence_parallel=true",
    )  # fmt: skip


def test_what_is_advised_can_be_set_on_the_command_line():
    for change in advice():
        overrides = [setting.removeprefix("--config.") for setting in change.settings]
        changed = config(*overrides)
        for field in overrides:
            path, _, text = field.partition("=")
            assert str(functools.reduce(getattr, path.split("."), changed)).lower() == text


def test_recomputing_is_advised_where_activations_are_most():
    long = config("parallel.data_parallel_sharding_strategy=optim_grads_params")
    long = dataclasses.replace(long, train=dataclasses.replace(long.train, seq_length=65536))
    first = changes_that_free_most(long, 8, program_of)[0]
    assert first.settings == (
        "--config.memory.recompute_granularity=full", "--config.memory.recompute_method=uniform",
        "--config.memory.recompute_num_layers=1",
    )  # fmt: skip
