"""Imported models give the numbers of `transformers`: logits, loss and gradients, on one device and on two.

The scripts that reference.py names made the models and the numbers, one document at a time; here the documents are
packed, two to a row.  Of multi-token prediction, logits and losses of every depth are compared too.
JAXFORGE_PARITY_TABLE=FILE writes the largest differences as a markdown table (see docs/parity.md).
"""

import dataclasses
import functools
import itertools
import os
import re
import tempfile
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from reference import (
    FAMILIES,
    FIXTURES,
    MTP_WEIGHT,
    by_token,
    expected_gradients,
    imported,
    packed_rows,
    run_config,
    stored,
    tensors_in,
    zeros_of,
)
from tensor_group import on_tensor_group
from tiny_models import microbatches

from jaxforge.checkpoint.arrays import DeviceArrays
from jaxforge.checkpoint.hf import export, read_architecture
from jaxforge.config.model_rules import MODEL_RULES
from jaxforge.config.moe_rules import MOE_RULES
from jaxforge.models.moe import is_router_state, is_statistics
from jaxforge.optim.paths import join
from jaxforge.parallel.encoder import encoder_placement
from jaxforge.parallel.rules import decoder_placement
from jaxforge.training.backends import make_experts_run
from jaxforge.training.program import make_model

# Both sides are fp32.  Logits are of order 1 to 5 and pass some hundred operations; the loss is of order 6, its last
# digit 5e-7; a gradient is compared with the largest entry of its tensor.
LOGIT_TOLERANCE, LOSS_TOLERANCE, GRADIENT_TOLERANCE = 2e-5, 1e-6, 1e-4
# Biases that experts are chosen by, and what has its gradient under another name.
WITHOUT_GRADIENT = re.compile(r".*\.e_score_correction_bias|.*\.layers\.\d+\.(embed_tokens|shared_head\.head)\.weight")
TABLE_PATH = os.environ.get("JAXFORGE_PARITY_TABLE")
LAYOUTS = (1, 2)  # decoder tensor parallel sizes; the encoder's is 1

# Compiled in ten seconds each; the decoders, and one of each encoder, are left for make test-fast.
SLOW = {
    ("qwen2_5_vl", 1), ("qwen3_vl", 1), ("qwen3_vl_moe", 1), ("deepseek_v3_tied", 1), ("deepseek_v3_mtp", 1),
    *itertools.product(("qwen2_5_vl_tied", "qwen3_vl_tied"), LAYOUTS),
}  # fmt: skip

every_model = pytest.mark.parametrize("name", FAMILIES)
every_model_at_every_layout = pytest.mark.parametrize(
    "name, tensor",
    [
        pytest.param(*case, marks=pytest.mark.slow if case in SLOW else (), id=f"{case[0]}-tensor_{case[1]}")
        for case in itertools.product(FAMILIES, LAYOUTS)
    ],
)


@dataclasses.dataclass(frozen=True)
class Difference:
    """The largest from transformers.

    Attributes:
      logits: absolute.
      loss: relative.
      gradients: by the tensor's name in the folder, relative to its largest entry.
    """

    logits: float
    loss: float
    gradients: dict[str, float]

    @property
    def worst(self) -> str:
        return max(self.gradients, key=self.gradients.__getitem__)


@functools.cache
def difference(name: str, tensor: int) -> Difference:
    """Of the imported model at a layout: what the train step computes, and the logits."""
    config, program, parameters = imported(name, tensor)
    rows, expected = packed_rows(name, config), stored(name, "expected")
    batch = jax.device_put(microbatches(rows, 1), program.batch_sharding)
    gradients, sums = program.gradients(parameters, batch)
    expected_losses = np.array([expected["loss"], *expected.get("loss_ahead", ())])
    expected_logits = np.stack([expected["logits"], *expected.get("logits_ahead", ())])
    # NaN where a document has no token as far ahead
    of_logits = np.abs(logits(name, tensor, rows) - expected_logits)[~np.isnan(expected_logits)]
    return Difference(
        logits=float(of_logits.max()),
        loss=float(np.abs(losses(sums) / expected_losses - 1).max()),
        gradients=gradient_differences(name, join(gradients, zeros_of(program, is_bias)), config.model),
    )


def is_bias(path: str) -> bool:
    return is_router_state(path) and not is_statistics(path)


def losses(sums) -> np.ndarray:
    """The mean over the targets of the next token, and of those of each depth of multi-token prediction."""
    ahead_J = np.asarray(sums["mtp_J"])
    return np.array([sums["loss"], *(ahead_J * len(ahead_J) / MTP_WEIGHT)]) / int(sums["target_tokens"])


def logits(name: str, tensor: int, rows) -> np.ndarray:
    """[1 + depths, tokens, V] of the imported model, laid out as in the train step."""
    config, program, parameters = imported(name, tensor)
    experts = make_experts_run(config, program.mesh, "cpu")
    placements = {"encoder": encoder_placement(), "decoder": decoder_placement(config.parallel.sequence_parallel)}
    make = functools.partial(make_model, config, "xla", placements=placements, experts=experts)
    graph = nnx.graphdef(nnx.eval_shape(lambda: make(nnx.Rngs(params=0))))
    logits_of = on_tensor_group(lambda parameters, rows: nnx.merge(graph, parameters).all_logits(rows), tensor, 1)
    return np.stack([by_token(logits_BSV, rows) for logits_BSV in np.asarray(logits_of(parameters, rows))])


def gradient_differences(name: str, gradients, model) -> dict[str, float]:
    """The gradients go through the weights' own map: they are exported as if they were a model."""
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "gradients"
        export(folder, DeviceArrays(gradients, "float32"), model, source=FIXTURES / name, dtype="float32")
        found = tensors_in(folder)
    found = {key: value for key, value in found.items() if not WITHOUT_GRADIENT.fullmatch(key)}
    expected = expected_gradients(name)
    assert found.keys() == expected.keys()
    return {key: float(np.abs(found[key] - value).max() / np.abs(value).max()) for key, value in expected.items()}


@every_model
def test_config_json_gives_the_family_and_a_model_that_breaks_no_rule(name):
    architecture = read_architecture(FIXTURES / name)
    assert architecture.family == FAMILIES[name]
    config = run_config(architecture.model, tensor=2)
    assert [message for rule in MODEL_RULES + MOE_RULES for message in rule(config)] == []


@every_model
def test_positions_are_exactly_those_of_transformers(name):
    rows = packed_rows(name, run_config(read_architecture(FIXTURES / name).model, tensor=1))
    positions_T3 = by_token(rows["positions"].transpose(0, 2, 1), rows)
    assert np.array_equal(positions_T3.T, stored(name, "expected")["positions"])


@every_model_at_every_layout
def test_logits_are_those_of_transformers(name, tensor):
    assert difference(name, tensor).logits <= LOGIT_TOLERANCE


@every_model_at_every_layout
def test_the_loss_is_that_of_transformers(name, tensor):
    assert difference(name, tensor).loss <= LOSS_TOLERANCE


@every_model_at_every_layout
def test_every_gradient_is_that_of_transformers(name, tensor):
    found = difference(name, tensor)
    assert found.gradients[found.worst] <= GRADIENT_TOLERANCE, found.worst


@pytest.mark.skipif(not TABLE_PATH, reason="writes a table where JAXFORGE_PARITY_TABLE names a file")
def test_the_table_is_written():
    lines = [
        "| model | encoder TP | decoder TP | logits | loss | gradient | of |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, tensor in itertools.product(FAMILIES, LAYOUTS):
        found, has_encoder = difference(name, tensor), imported(name, tensor).config.model.encoder is not None
        lines.append(
            f"| {name} | {1 if has_encoder else '-'} | {tensor} | {found.logits:.1e} | {found.loss:.1e} |"
            f" {found.gradients[found.worst]:.1e} | `{found.worst}` |"
        )
    Path(TABLE_PATH).write_text("\n".join(lines) + "\n")
