"""Any two options that the config allows together give two steps of one device with neither.

A row has a value of each option, and a few dozen rows have each two values somewhere.  A row's program takes some
seconds to compile, so by default seven rows run, which have each value somewhere.  JAXFORGE_OPTION_PAIRS_TABLE=FILE
runs all and writes the deviations as a markdown table.
"""

import dataclasses
import functools
import itertools
import os
from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import pytest
from covering_array import Pair, Row, all_pairs, covering_array, one_of_each, pairs_of
from encoder_cases import ENCODER_HETERO_DP, FULL_HETERO_DP, HETERO_TP, rows_with_images, vision_config
from encoder_cases import Case as VisionCase
from one_device import Deviation, deviation, loss_and_gradients
from pipeline_cases import Z_LOSS, distinct_rows, placed, text_config, unplaced
from pipeline_cases import Case as TextCase
from tiny_models import microbatches, random_parameters

from jaxforge.config import ConfigError, validate
from jaxforge.config.schema import AdapterConfig, Config, LoraConfig, MemoryConfig, OptimizerConfig
from jaxforge.data.batches import BatchLayout
from jaxforge.memory.offload import offloads_activations
from jaxforge.optim import streaming
from jaxforge.optim.optimizer import moments
from jaxforge.optim.paths import join, parameter_paths, split

TABLE_PATH = os.environ.get("JAXFORGE_OPTION_PAIRS_TABLE")
NUM_DEVICES, NUM_ROWS = 8, 16

LAYOUTS = {
    "DP 8": TextCase(1, data=8),
    "TP 2, SP, DP 4": TextCase(1, tensor=2, data=4, sequence_parallel=True),
    "PP 2, DP 4": TextCase(2, uneven=True, data=4),
    "PP 2 x 2, TP 2, SP, DP 2": TextCase(
        2, 2, tensor=2, data=2, sequence_parallel=True, vocabulary_over_stages=True
    ),
    "hetero TP 2 of 4, DP 2": VisionCase("qwen2_5_vit", HETERO_TP, tensor=4, encoder_tensor=2, data=2),
    "encoder hetero DP, TP 2, SP, DP 4": VisionCase(
        "qwen2_5_vit", ENCODER_HETERO_DP, tensor=2, data=4, sequence_parallel=True
    ),
    "full hetero DP, PP 2, TP 2, DP 2": VisionCase("qwen3_vit", FULL_HETERO_DP, 2, uneven=True, tensor=2, data=2),
}
RECOMPUTE = {
    "none": {},
    "selective": dict(recompute_granularity="selective", recompute_modules=("mlp", "layernorm")),
    "full, uniform 2": dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=2),
    "full, block 1": dict(recompute_granularity="full", recompute_method="block", recompute_num_layers=1),
    "by name": dict(activations=tuple((name, "recompute") for name in ("attn_norm", "core_attn", "mlp_act"))),
}
OFFLOAD = {
    "none": {},
    "layer inputs": dict(fine_grained_activation_offloading=True, offload_modules=("attn_norm",)),
    "four modules": dict(
        fine_grained_activation_offloading=True, offload_modules=("attn_norm", "core_attn", "attn_proj", "mlp_norm")
    ),
}
# splits that divide neither the vocabulary of 21 nor its padded 32 rows, nor what a device has of them
FUSED = dict(cross_entropy_loss_fusion=True, lce_fwd_vocab_split_size=5, lce_bwd_vocab_split_size=7)
LOSS = {"plain": {}, "fused": FUSED}
# with the first values the options are off
OPTIONS = {
    "layout": tuple(LAYOUTS),
    "recompute": tuple(RECOMPUTE),
    "sharding": ("no_shard", "optim", "optim_grads", "optim_grads_params"),
    "activation offload": tuple(OFFLOAD),
    "trains": ("all", "a part", "adapters"),
    "optimizer": ("device", "host"),
    "loss": tuple(LOSS),
    "attention": ("xla", "flash"),
    "micro-batch": ("1", "2"),
}

OFF = {name: values[0] for name, values in OPTIONS.items()}
# Clipping makes the largest gradients about a tenth of the largest parameters; both moments matter with this epsilon.
LEARNING_RATE, BETA1, BETA2, EPSILON, WEIGHT_DECAY, CLIP = 0.1, 0.9, 0.95, 0.1, 0.1, 0.25
# Of the largest parameter of a tensor.  An update rounds it, by 6e-8 at most, and deviates by LEARNING_RATE / EPSILON
# of what a gradient does, which is 1e-5 of its largest entry.
PARAMETER_TOLERANCE = 1e-6
FROZEN = ("decoder/layers/mlp/", "decoder/embedding_VD", "encoder/")


def does_train(path: str, trains: str) -> bool:
    """Whether a parameter does, by what `adapters` and `freeze` ask for."""
    if trains == "adapters":
        return "_lora_" in path or path == "decoder/final_norm/scale"
    return trains == "all" or not path.startswith(FROZEN)


def adapters(config: Config, trains: str) -> LoraConfig:
    """With scales of 1, as in test_lora_layouts.py."""
    if trains != "adapters":
        return LoraConfig()
    encoder = AdapterConfig(rank=2, alpha=2.0) if config.model.encoder else AdapterConfig()
    return LoraConfig(AdapterConfig(rank=3, alpha=3.0), encoder, train_also=("decoder/final_norm/*",))


def freeze(config: Config, trains: str) -> tuple[str, ...]:
    if trains != "a part":
        return ()
    return tuple(f"{path}**" for path in FROZEN if config.model.encoder or not path.startswith("encoder"))


def case_of(row: Row) -> TextCase | VisionCase:
    return dataclasses.replace(
        LAYOUTS[row["layout"]], sharding=row["sharding"], micro_batch=int(row["micro-batch"]), num_rows=NUM_ROWS
    )


def encoder_of(row: Row) -> str | None:
    layout = LAYOUTS[row["layout"]]
    return layout.encoder if isinstance(layout, VisionCase) else None


def config_of(row: Row) -> Config:
    config = case_of(row).config()
    return dataclasses.replace(
        config,
        memory=MemoryConfig(
            **RECOMPUTE[row["recompute"]],
            **OFFLOAD[row["activation offload"]],
            optimizer_cpu_offload=row["optimizer"] == "host",
        ),
        loss=dataclasses.replace(config.loss, **LOSS[row["loss"]]),
        lora=adapters(config, row["trains"]),
        optimizer=OptimizerConfig(
            learning_rate=LEARNING_RATE, lr_decay_style="constant", adam_beta1=BETA1, adam_beta2=BETA2,
            adam_eps=EPSILON, weight_decay=WEIGHT_DECAY, clip_grad=CLIP, freeze=freeze(config, row["trains"]),
        ),
        train=dataclasses.replace(
            config.train,
            global_batch_size=NUM_ROWS,
            micro_batch_size=int(row["micro-batch"]),
            attention_backend=row["attention"],
        ),
    )  # fmt: skip


def message(row: Row) -> str | None:
    """Why the config's own rules refuse a row, if they do: on GPUs, which have all backends of attention."""
    try:
        validate(config_of(row), NUM_DEVICES, "gpu")
    except ConfigError as error:
        return str(error)
    return None


def is_valid(row: Row) -> bool:
    return message(row) is None


@functools.cache
def every_pair() -> tuple[list[Row], list[Pair]]:
    return covering_array(OPTIONS, is_valid)


def few_rows() -> list[Row]:
    """One for each layout, pipelines last: there flash attention, which is interpreted, takes longest to compile."""
    rows, _ = every_pair()
    return one_of_each(sorted(rows, key=lambda row: "PP" in row["layout"]), "layout")


class Steps(NamedTuple):
    """What two steps make of a model.

    Attributes:
      losses: before each update, z-loss included.
      gradients: what the optimizer keeps of the clipped gradients: the first moment after each step, and the root of
        the second moment after both, which changes with the gradients by no more than they do.
      parameters: those that train, after both steps.
    """

    losses: tuple[float, float]
    gradients: dict
    parameters: dict


@functools.cache
def problem(encoder: str | None, trains: str) -> tuple[dict, dict, Steps]:
    """Parameters, rows, and two steps on one device with all options off.

    AdamW by its formula (Loshchilov and Hutter, arXiv:1711.05101).
    """
    config = vision_config(encoder) if encoder else text_config()
    config = dataclasses.replace(config, lora=adapters(config, trains))
    rows = rows_with_images(config, NUM_ROWS) if encoder else distinct_rows(config, NUM_ROWS)
    parameters = random_parameters(config)

    def trainable_of(tree):
        return split(tree, lambda path: does_train(path, trains))[0]

    frozen = split(parameters, lambda path: not does_train(path, trains))[0]
    masters = trainable_of(parameters)
    mu = nu = jax.tree.map(np.zeros_like, masters)
    losses, kept = [], {}
    for step in (1, 2):
        loss, gradients = loss_and_gradients(config, join(masters, frozen), rows)
        gradients = trainable_of(gradients)
        norm = np.sqrt(sum(np.sum(np.square(g, dtype=np.float64)) for g in jax.tree.leaves(gradients)))
        assert norm > CLIP, "nothing would be clipped"
        clipped = jax.tree.map(lambda g, norm=norm: g * (CLIP / norm), gradients)
        mu = jax.tree.map(lambda m, g: BETA1 * m + (1 - BETA1) * g, mu, clipped)
        nu = jax.tree.map(lambda v, g: BETA2 * v + (1 - BETA2) * g * g, nu, clipped)

        def updated(path, p, m, v, step=step):
            direction = m / (1 - BETA1**step) / (np.sqrt(v / (1 - BETA2**step)) + EPSILON)
            decay = 0 if path.endswith("scale") or "bias" in path else WEIGHT_DECAY
            return (p - LEARNING_RATE * (direction + decay * p)).astype(np.float32)

        masters = jax.tree.map(updated, parameter_paths(masters), masters, mu, nu)
        losses.append(loss)
        kept[f"step {step}"] = mu
    kept["squares"] = jax.tree.map(np.sqrt, nu)
    return parameters, rows, Steps(tuple(losses), kept, masters)


class Found(NamedTuple):
    """How far a row's steps are from those of one device: losses and gradients, and parameters."""

    gradients: Deviation
    parameters: Deviation


def submit(row: Row, compiler: Executor) -> Callable[[], Found]:
    """Has the row's train step compiled, and returns what runs it."""
    case, config = case_of(row), config_of(row)
    parameters, rows, expected = problem(encoder_of(row), row["trains"])
    program = case.program(config)
    shapes = program.abstract_state
    by_part = split(placed(config, parameters), lambda path: does_train(path, row["trains"]))
    zeros = jax.tree.map(lambda shape: np.zeros(shape.shape, shape.dtype), shapes)
    state = jax.device_put(
        zeros | dict(zip(("trainable", "frozen"), by_part, strict=True)),
        jax.tree.map(lambda shape: shape.sharding, shapes),
    )
    layout = BatchLayout.from_config(config, program.mesh, case.num_microbatches)
    batch = layout.batch(microbatches(rows, case.num_microbatches))
    traced = program.train_step.trace(state, batch)
    has_copies = "<host>" in str(traced.jaxpr)
    assert has_copies == (offloads_activations(config) or config.memory.optimizer_cpu_offload), row
    executable = compiler.submit(traced.lower().compile)
    return lambda: deviation_of_steps(config, executable.result(), state, batch, expected)


def deviation_of_steps(config: Config, train_step: Callable, state: dict, batch: dict, expected: Steps) -> Found:
    shardings = jax.tree.map(lambda array: array.sharding, state)
    losses, kept = [], {}
    for step in (1, 2):
        state, metrics = train_step(state, batch)
        assert bool(metrics["is_finite"])
        losses.append(float(metrics["loss"] + Z_LOSS * metrics["z_loss"]))
        mu, nu = moments(state["optimizer"])
        # copied, because the next step is given these arrays
        kept[f"step {step}"] = unplaced(config, jax.tree.map(np.array, mu))
    assert jax.tree.map(lambda array: array.sharding, state) == shardings
    kept["squares"] = unplaced(config, jax.tree.map(np.sqrt, nu))
    parameters = unplaced(config, jax.tree.map(np.asarray, state["trainable"]), unused=np.nan)
    for found, reference in ((kept, expected.gradients), (parameters, expected.parameters)):
        assert jax.tree.structure(found) == jax.tree.structure(reference)
    # of the losses the one that is further off
    loss, reference = max(zip(losses, expected.losses, strict=True), key=lambda two: abs(two[0] / two[1] - 1))
    return Found(
        deviation(loss, kept, reference, expected.gradients),
        deviation(loss, parameters, reference, expected.parameters),
    )


@pytest.fixture(autouse=True)
def small_slices(monkeypatch):
    # so that tiny matrices in host memory have several, with a rest
    monkeypatch.setattr(streaming, "SLICE_BYTES", 700)


@pytest.mark.slow
@pytest.mark.timeout(7200 if TABLE_PATH else 900)
def test_any_two_options_give_two_steps_of_one_device_without(compiler):
    rows, refused = every_pair()
    rows = rows if TABLE_PATH else few_rows()

    def found_in(rows: tuple[Row, ...]) -> list[Found]:
        runs = [submit(row, compiler) for row in rows]
        return [run() for run in runs]

    # some at a time: a compiled program takes 2,000 of the 65,530 memory maps that Linux gives a process
    found = [one for some in itertools.batched(rows, 8) for one in found_in(some)]
    if TABLE_PATH:
        Path(TABLE_PATH).write_text(markdown(rows, found, refused))
    for row, one in zip(rows, found, strict=True):
        one.gradients.assert_small(row)
        assert one.parameters.gradient <= PARAMETER_TOLERANCE, f"{row}: {one.parameters}"


def test_every_two_options_meet_in_a_row_or_are_refused_by_the_config():
    rows, refused = every_pair()
    assert all(is_valid(row) for row in rows)
    met = {pair for row in rows for pair in pairs_of(row)}
    for pair in all_pairs(OPTIONS):
        assert (pair in met) != (pair in refused), pair
    # nothing else makes a difference to the rules
    assert not any(is_valid(OFF | dict(pair)) for pair in refused)


def test_the_few_rows_have_every_value_of_every_option():
    for name, values in OPTIONS.items():
        assert {row[name] for row in few_rows()} == set(values)


def markdown(rows: list[Row], found: list[Found], refused: list[Pair]) -> str:
    lines = [
        f"| {' | '.join(OPTIONS)} | loss | gradient | of | parameter |",
        "|---" * (len(OPTIONS) + 4) + "|",
    ]
    for row, one in zip(rows, found, strict=True):
        lines.append(
            f"| {' | '.join(row.values())} | {one.gradients.loss:.1e} | {one.gradients.gradient:.1e} |"
            f" `{one.gradients.worst}` | {one.parameters.gradient:.1e} |"
        )
    lines += ["", "| refused | because |", "|---|---|"]
    for pair in refused:
        lines.append(f"| {' with '.join(f'{name} {value}' for name, value in pair)} | {message(OFF | dict(pair))} |")
    return "\n".join(lines) + "\n"
