"""What goes with a pipeline gives the numbers of one device too.

Tied embeddings, dropout, frozen parts, adapters, clipping, and scores; layouts alone are in test_pipeline_layouts.py.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from one_device import deviation, loss_and_gradients, loss_of
from pipeline_cases import Case, problem, text_config, twelve_rows, unplaced
from tiny_models import random_parameters

from jaxforge.config.schema import AdapterConfig, LoraConfig
from jaxforge.ops.cross_entropy import IGNORE
from jaxforge.optim.paths import parameter_paths
from jaxforge.training.program import make_model, row_keys

UNEVEN = Case(2, 1, uneven=True, data=2, micro_batch=2)  # with unused places; 3 microbatches
INTERLEAVED = Case(2, 2, data=2, micro_batch=2)


def pipeline_gradients(case, parameters, rows, lora=None, **groups):
    """Loss, and gradients by layer."""
    config = case.config(**groups)
    config = dataclasses.replace(config, lora=lora or config.lora)
    program = case.program(config)
    gradients, sums = program.gradients(*case.arguments(program, config, parameters, rows))
    return loss_of(config, sums), unplaced(config, gradients)


@pytest.mark.parametrize("over_stages", [False, True], ids=["on the ends", "over stages"])
def test_tied_embeddings_sum_the_gradients_of_lookup_and_loss(over_stages):
    # F14
    tied = dict(untie_embeddings_and_output_weights=False)
    config = text_config(decoder_changes=tied)
    parameters, rows = random_parameters(config), twelve_rows(config)
    assert "head_VD" not in parameters["decoder"]
    case = dataclasses.replace(INTERLEAVED, tensor=2, sequence_parallel=True, vocabulary_over_stages=over_stages)
    loss, gradients = pipeline_gradients(case, parameters, rows, decoder_changes=tied)
    deviation(loss, gradients, *loss_and_gradients(config, parameters, rows)).assert_small(case)


def test_dropout_drops_what_it_drops_on_one_device():
    parameters, rows, loss_without, _ = problem()
    keys_R2 = np.asarray(row_keys(0, 0, (1, len(rows["tokens"]))))[0]
    rows = rows | {"dropout_keys": keys_R2}
    expected = loss_and_gradients(text_config(decoder_changes=dict(hidden_dropout=0.3)), parameters, rows)
    assert expected[0] != pytest.approx(loss_without, rel=1e-3)
    found = pipeline_gradients(INTERLEAVED, parameters, rows, decoder_changes=dict(hidden_dropout=0.3))
    deviation(*found, *expected).assert_small(INTERLEAVED)


@pytest.mark.parametrize(
    "freeze, trained",
    [
        (("decoder/layers/**",), {"embedding_VD", "head_VD", "final_norm/scale"}),
        (
            ("decoder/*_VD", "decoder/final_norm/*", "decoder/layers/attention/*"),
            {
                "layers/attention_norm/scale", "layers/mlp_norm/scale", "layers/mlp/gate_DF", "layers/mlp/up_DF",
                "layers/mlp/down_FE",
            },
        ),
    ],
    ids=["layers frozen", "all else frozen"],
)  # fmt: skip
def test_what_is_frozen_has_no_gradient_and_the_rest_that_of_one_device(freeze, trained):
    parameters, rows, *expected = problem()
    loss, gradients = pipeline_gradients(INTERLEAVED, parameters, rows, optimizer=dict(freeze=freeze))
    assert set(jax.tree.leaves(parameter_paths(gradients["decoder"]))) == trained
    deviation(loss, gradients, *expected).assert_small(freeze)


def test_adapters_have_the_gradients_of_one_device_and_the_base_none():
    # scales of 1, as in test_lora_layouts.py
    lora = LoraConfig(decoder=AdapterConfig(rank=3, alpha=3.0), train_also=("decoder/final_norm/*",))
    config = dataclasses.replace(text_config(), lora=lora)
    parameters, rows = random_parameters(config), twelve_rows(config)
    loss, gradients = pipeline_gradients(UNEVEN, parameters, rows, lora)
    paths = jax.tree.leaves(parameter_paths(gradients))
    assert len(paths) == 2 * 7 + 1
    deviation(loss, gradients, *loss_and_gradients(config, parameters, rows)).assert_small(UNEVEN)


def test_the_step_clips_by_the_norm_of_one_device():
    # F53.  A first Adam step without decay is rate * g / (|g| + epsilon): with this epsilon the clipping shows
    parameters, rows, _, gradients = problem()
    norm = np.sqrt(sum(np.sum(np.square(g, dtype=np.float64)) for g in jax.tree.leaves(gradients)))
    optimizer = dict(learning_rate=1.0, adam_eps=1.0, weight_decay=0.0, clip_grad=norm / 4)
    config = UNEVEN.config(optimizer=optimizer)
    program = UNEVEN.program(config)
    state = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype, device=a.sharding), program.abstract_state)
    state["trainable"], batch = UNEVEN.arguments(program, config, parameters, rows)
    state, metrics = program.train_step(state, batch)

    assert float(metrics["grad_norm"]) == pytest.approx(norm, rel=1e-5)
    trained = unplaced(config, state["trainable"], unused=np.nan)
    updates = jax.tree.map(lambda before, after: before - after, parameters, trained)
    expected = jax.tree.map(lambda g: (g / 4) / (np.abs(g / 4) + 1), gradients)
    deviation(1.0, updates, 1.0, expected).assert_small(UNEVEN)


@pytest.mark.parametrize("over_stages", [False, True], ids=["on the ends", "over stages"])
def test_scores_and_predictions_are_those_of_one_device(over_stages):
    parameters, rows, *_ = problem()
    config = text_config()
    graph = nnx.graphdef(nnx.eval_shape(lambda: make_model(config, "xla", nnx.Rngs(params=0))))
    expected_loss, expected_RS = jax.jit(lambda parameters: nnx.merge(graph, parameters).score(rows))(parameters)

    case = dataclasses.replace(INTERLEAVED, vocabulary_over_stages=over_stages)
    config = case.config()
    program = case.program(config)
    placed, batch = case.arguments(program, config, parameters, rows)
    loss, count, tokens_MBS = program.score({"trainable": placed, "frozen": {}}, batch)
    assert float(loss) == pytest.approx(float(expected_loss), rel=1e-6)
    assert int(count) == np.sum(rows["targets"] != IGNORE)
    np.testing.assert_array_equal(np.asarray(tokens_MBS).reshape(expected_RS.shape), expected_RS)
