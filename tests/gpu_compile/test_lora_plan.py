"""The train step of adapters, compiled for GPUs that aren't here: what they save, and what they exchange."""

import dataclasses
import functools

import pytest
from tiny_runs import ACTIVATION_BYTES, LAYERS, MICROBATCHES, language_model, silent_plan

from jaxforge.config.schema import AdapterConfig, LoraConfig

RANK = 8

pytestmark = pytest.mark.timeout(900)


@functools.cache
def report():
    lora = LoraConfig(decoder=AdapterConfig(rank=RANK))
    return silent_plan(dataclasses.replace(language_model(4, sequence_parallel=True), lora=lora), "h100:1x8")


def test_a_frozen_base_takes_two_bytes_a_parameter_and_adapters_sixteen():
    parts = report().memory_parts
    # as in test_train_step.py: embedding, head and projections over 4 GPUs, norm scales on each
    base = (2 * 512 * 192 + LAYERS * (2 * 192 * 128 + 2 * 192 * 64 + 3 * 192 * 320)) // 4 + 7 * 192
    # the side of an adapter that is 192 wide is on each GPU, the other one is shared: 128 heads, 64 of keys and of
    # values, 320 of the feed-forward
    adapters = LAYERS * RANK * (7 * 192 + (2 * 128 + 2 * 64 + 3 * 320) // 4)
    assert parts.parameters == 2 * base + 4 * adapters
    assert parts.optimizer == 2 * 4 * adapters + 3 * 4
    assert parts.gradients == (4 + 2) * adapters
    assert parts.compute_weights == 2 * adapters


def test_only_gradients_of_adapters_are_reduced_over_data_parallel_ranks():
    reduced = sum(one.bytes * one.count for one in report().collectives if "replica" in one.axes)
    gradients = report().memory_parts.gradients * 4 // 6
    # besides, the step's sums: two of fp32 and two of int32
    assert reduced == gradients + 16


def test_sequence_parallel_still_scatters_activations_instead_of_reducing_them():
    whole = sum(one.bytes * one.count for one in report().collectives if one.kind == "reduce-scatter")
    # what the base scatters (see test_train_step.py), and [tokens, rank] of each adapter: where the inputs are shared,
    # its forward pass and recomputation; where the outputs are, its backward pass
    base = MICROBATCHES * ACTIVATION_BYTES * (LAYERS * (2 + 1 + 2) + 2)
    adapters = MICROBATCHES * ACTIVATION_BYTES * RANK / 192 * LAYERS * (2 + 1 + 5)
    assert whole == base + adapters
    reduced = [one for one in report().collectives if one.kind == "all-reduce" and one.in_loop]
    assert max(one.bytes for one in reduced) < ACTIVATION_BYTES
