"""With the loss fused with the head, every layout has the loss and gradients of one device without it.

With other options, and for models with an encoder, in test_option_pairs.py.
"""

import dataclasses

import jax
import numpy as np
import pytest
from encoder_cases import assert_all_are_those_of_one_device
from flax import nnx
from one_device import deviation, loss_and_gradients, loss_of
from pipeline_cases import Case, problem, text_config, twelve_rows, unplaced
from tiny_models import random_parameters

from jaxforge.config.schema import AdapterConfig, LoraConfig
from jaxforge.optim.paths import parameter_paths
from jaxforge.training.program import make_model


def fused(config, split=None):
    """Splits that the vocabulary of 21 and its padded 32 rows, or the 8 of a device, don't divide into."""
    sizes = dict(lce_fwd_vocab_split_size=split, lce_bwd_vocab_split_size=split and split + 2)
    return dataclasses.replace(
        config, loss=dataclasses.replace(config.loss, cross_entropy_loss_fusion=True, **sizes)
    )


TEXT = [
    (Case(1, tensor=4, data=2, sequence_parallel=True), 3),
    (Case(2, 2, tensor=2, data=2, vocabulary_over_stages=True, sequence_parallel=True), 3),
    (Case(2, 1, data=2, vocabulary_over_stages=True, sharding="optim_grads_params"), None),
]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_gradients_are_those_of_one_device(compiler):
    assert_all_are_those_of_one_device(
        compiler, ((case, case, fused(case.config(), split), problem()) for case, split in TEXT)
    )


@pytest.mark.parametrize(
    "case", [Case(1, data=2), Case(2, data=2), Case(2, data=2, vocabulary_over_stages=True)], ids=str
)
def test_tied_embeddings_sum_the_gradients_of_lookup_and_loss(case):
    tied = dict(untie_embeddings_and_output_weights=False)
    plain = text_config(decoder_changes=tied)
    parameters, rows = random_parameters(plain), twelve_rows(plain)
    config = fused(case.config(decoder_changes=tied), 5)
    program = case.program(config)
    gradients, sums = program.gradients(*case.arguments(program, config, parameters, rows))
    found = loss_of(config, sums), unplaced(config, gradients)
    deviation(*found, *loss_and_gradients(plain, parameters, rows)).assert_small(case)


@pytest.mark.parametrize("case", [Case(1, data=2), Case(2, data=2, vocabulary_over_stages=True)], ids=str)
def test_a_frozen_head_has_no_gradient(case):
    lora = LoraConfig(decoder=AdapterConfig(rank=3, alpha=3.0))
    plain = dataclasses.replace(text_config(), lora=lora)
    parameters, rows = random_parameters(plain), twelve_rows(plain)
    config = dataclasses.replace(fused(case.config(), 5), lora=lora)
    program = case.program(config)
    gradients, sums = program.gradients(*case.arguments(program, config, parameters, rows))
    assert not any(path.endswith("_VD") for path in jax.tree.leaves(parameter_paths(gradients)))
    found = loss_of(config, sums), unplaced(config, gradients)
    deviation(*found, *loss_and_gradients(plain, parameters, rows)).assert_small(case)


@pytest.mark.parametrize(
    "case", [Case(1, data=2, tensor=2), Case(2), Case(2, vocabulary_over_stages=True)], ids=str
)
def test_scores_are_those_of_one_device(case):
    parameters, rows, *_ = problem()
    graph = nnx.graphdef(nnx.eval_shape(lambda: make_model(text_config(), "xla", nnx.Rngs(params=0))))
    expected, expected_RS = jax.jit(lambda parameters: nnx.merge(graph, parameters).score(rows))(parameters)
    config = fused(case.config(), 5)
    program = case.program(config)
    placed, batch = case.arguments(program, config, parameters, rows)
    loss, _, tokens_MBS = program.score({"trainable": placed, "frozen": {}}, batch)
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)
    np.testing.assert_array_equal(np.asarray(tokens_MBS).reshape(expected_RS.shape), expected_RS)
