"""Llama 3.1 8B over 8 data parallel ranks, compiled for H100: each strategy takes what its formula says."""

import functools
import math

import pytest
from tiny_runs import silent_plan

from jaxforge.config import load_config, resolve

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
RANKS, ROW, MICROBATCHES = 8, 2048, 2
WIDTH, LAYERS, FFN, KEYS, VOCABULARY = 4096, 32, 14336, 1024, 128256
LAYER = 2 * WIDTH * (WIDTH + KEYS) + 3 * WIDTH * FFN
TABLES = 2 * VOCABULARY * WIDTH
ALL = LAYERS * LAYER + TABLES  # matrices; norms are 0.003 % of it


@functools.cache
def report(strategy: str):
    overrides = [
        "parallel.tensor_model_parallel_size=1", "parallel.sequence_parallel=false", f"train.seq_length={ROW}",
        f"train.global_batch_size={RANKS * MICROBATCHES}", "loss.cross_entropy_loss_fusion=true",
        f"parallel.data_parallel_sharding_strategy={strategy}",
    ]  # fmt: skip
    return silent_plan(resolve(load_config("configs/llama3_1_8b_pretrain.py", overrides)), "h100:1x8")


@pytest.mark.parametrize("strategy, reductions", [("optim", 1), ("optim_grads", MICROBATCHES)])
def test_tensor_parallel_devices_move_their_own_parts_alone(strategy, reductions):
    # TP 4, DP 2: XLA would gather gradients over tensor before it scatters them over replica
    overrides = [
        f"train.seq_length={ROW}", f"train.global_batch_size={2 * MICROBATCHES}",
        f"parallel.data_parallel_sharding_strategy={strategy}",
    ]  # fmt: skip
    found = silent_plan(resolve(load_config("configs/llama3_1_8b_pretrain.py", overrides)), "h100:1x8").collectives
    scattered = sum(one.bytes * one.count for one in found if (one.kind, one.axes) == ("reduce-scatter", ("replica",)))
    assert scattered == pytest.approx(reductions * 4 * ALL / 4, rel=1e-3)
    # over tensor no more than a row of activations at a time, in fp32 at the most
    assert max(one.bytes for one in found if one.axes == ("tensor_inner",)) <= 4 * ROW * WIDTH


def formula(strategy: str) -> float:
    """Bytes: masters and moments; sums of gradients, and those just found; compute weights; and what is common.

    That is the inputs of all layers, and the logits of a row, of which the fused loss makes one chunk.
    """
    state, sums, found, weights = {
        "no_shard": (12 * ALL, 4 * ALL, 2 * ALL, 2 * ALL),
        "optim": (12 * ALL / RANKS, 4 * ALL, 2 * ALL, 2 * ALL),
        # gathering a stack along another dimension than its first, XLA transposes a copy of it
        "optim_grads": (12 * ALL / RANKS, 4 * ALL / RANKS, 4 * ALL / RANKS, 2 * (ALL + LAYERS * WIDTH * FFN)),
        # the tables are gathered for a microbatch, layers one by one
        "optim_grads_params": (
            12 * ALL / RANKS, 4 * ALL / RANKS, 4 * ALL / RANKS, 2 * ALL / RANKS + 2 * (TABLES + LAYER)
        ),
    }[strategy]  # fmt: skip
    return state + sums + found + weights + 2 * LAYERS * ROW * WIDTH + 4 * ROW * VOCABULARY


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_memory_is_what_the_formula_says(strategy):
    assert report(strategy).device_bytes.peak == pytest.approx(formula(strategy), rel=0.05)


def reduced(strategy: str, in_loop: bool) -> dict[str, int]:
    """Bytes by kind of collective, of those with more than norms and numbers."""
    found: dict[str, int] = {}
    for one in report(strategy).collectives:
        assert set(one.axes) == {"replica"}
        if one.in_loop == in_loop and one.bytes > 2**20:
            found[one.kind] = found.get(one.kind, 0) + one.bytes * one.count
    return found


@pytest.mark.parametrize("strategy", ["no_shard", "optim"])
def test_gradients_are_reduced_once_in_fp32_outside_of_every_loop(strategy):
    assert reduced(strategy, in_loop=True) == {}
    once = reduced(strategy, in_loop=False)
    assert once["all-reduce" if strategy == "no_shard" else "reduce-scatter"] == pytest.approx(4 * ALL, rel=1e-3)
    # and with optim weights are gathered once, in bfloat16
    assert once.get("all-gather", 0) == pytest.approx(2 * ALL if strategy == "optim" else 0, rel=1e-3)


def test_optim_grads_reduces_each_microbatch_and_gathers_once():
    assert reduced("optim_grads", in_loop=True) == {"reduce-scatter": pytest.approx(MICROBATCHES * 4 * ALL, rel=1e-3)}
    assert reduced("optim_grads", in_loop=False) == {"all-gather": pytest.approx(2 * ALL, rel=1e-3)}


def test_optim_grads_params_gathers_each_layer_forward_and_backward():
    in_loop = reduced("optim_grads_params", in_loop=True)
    assert reduced("optim_grads_params", in_loop=False) == {}
    assert in_loop["reduce-scatter"] == pytest.approx(MICROBATCHES * 4 * ALL, rel=1e-3)
    # the tables once a microbatch, layers twice
    least, most = 2 * ALL, 2 * (ALL + LAYERS * LAYER)
    assert least < in_loop["all-gather"] / MICROBATCHES <= most * 1.001
    assert math.isclose(in_loop["all-gather"] / MICROBATCHES, most, rel_tol=0.02)
