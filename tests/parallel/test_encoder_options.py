"""What goes with an encoder mode gives the numbers of one device too.

Fewer rows than devices, frozen parts, adapters, and scores; layouts alone are in test_encoder_modes.py.
"""

import dataclasses

import jax
import numpy as np
import pytest
from encoder_cases import (
    ENCODER_HETERO_DP,
    FULL_HETERO_DP,
    HETERO_TP,
    Case,
    rows_with_images,
    vision_config,
)
from one_device import deviation, loss_and_gradients, loss_of
from tiny_models import model_function, random_parameters

from jaxforge.config.schema import AdapterConfig, LoraConfig
from jaxforge.ops.cross_entropy import IGNORE
from jaxforge.optim.paths import parameter_paths

pytestmark = pytest.mark.slow

FULL = Case("qwen3_vit", FULL_HETERO_DP, 2, uneven=True, micro_batch=2)


def gradients_of(case, parameters, rows, lora=None, **groups):
    """Loss, and gradients by layer."""
    config = case.config(**groups)
    config = dataclasses.replace(config, lora=lora or config.lora)
    program = case.program(config)
    placed = case.parameters(program, config, parameters)
    gradients, sums = program.gradients(placed, case.batch(program, config, rows))
    return loss_of(config, sums), case.by_layer(config, gradients)


def test_three_rows_on_four_devices():
    config = vision_config("qwen2_5_vit")
    parameters, rows = random_parameters(config), rows_with_images(config, 3)
    case = Case("qwen2_5_vit", FULL_HETERO_DP, 2, tensor=2, num_rows=3)
    found = gradients_of(case, parameters, rows)
    deviation(*found, *loss_and_gradients(config, parameters, rows)).assert_small(case)


@pytest.mark.parametrize(
    "case, freeze, trained",
    [
        (FULL, ("encoder/**",), {"decoder", "projector"}),
        (Case("qwen2_5_vit", ENCODER_HETERO_DP, tensor=2), ("encoder/**", "projector/**"), {"decoder"}),
        (FULL, ("decoder/**", "projector/**"), {"encoder"}),
    ],
    ids=["encoder", "encoder and projector", "all but the encoder"],
)
def test_what_is_frozen_has_no_gradient_and_the_rest_that_of_one_device(case, freeze, trained):
    config = vision_config(case.encoder)
    parameters, rows = random_parameters(config), rows_with_images(config)
    loss, gradients = gradients_of(case, parameters, rows, optimizer=dict(freeze=freeze))
    expected_loss, expected = loss_and_gradients(config, parameters, rows)
    assert set(gradients) == trained
    for module in trained:
        assert jax.tree.structure(gradients[module]) == jax.tree.structure(expected[module])
    deviation(loss, gradients, expected_loss, expected).assert_small(freeze)


def test_adapters_of_the_encoder_have_the_gradients_of_one_device_and_the_rest_none():
    # a scale of 1, as in test_lora_layouts.py
    lora = LoraConfig(encoder=AdapterConfig(rank=2, alpha=2.0))
    config = dataclasses.replace(vision_config("qwen3_vit"), lora=lora)
    parameters, rows = random_parameters(config), rows_with_images(config)
    case = dataclasses.replace(FULL, tensor=2)
    loss, gradients = gradients_of(case, parameters, rows, lora)
    paths = jax.tree.leaves(parameter_paths(gradients))
    # two for each of query, key, value, out, up and down
    assert len(paths) == 12 and all(path.startswith("encoder/") for path in paths)
    deviation(loss, gradients, *loss_and_gradients(config, parameters, rows)).assert_small(case)


@pytest.mark.parametrize(
    "case",
    [
        Case("qwen3_vit", HETERO_TP, 2, 2, tensor=2, uneven=True),
        Case("qwen2_5_vit", ENCODER_HETERO_DP, tensor=2, data=2, micro_batch=2),
        Case("qwen3_vit", ENCODER_HETERO_DP, 2, tensor=2, data=2, sequence_parallel=True),
        Case("qwen2_5_vit", FULL_HETERO_DP, 4, tensor=2, vocabulary_over_stages=True),
    ],
    ids=lambda case: f"{case.mode}, {case.ranks} ranks",
)
def test_scores_and_predictions_are_those_of_one_device(case):
    config = vision_config(case.encoder)
    parameters, rows = random_parameters(config), rows_with_images(config)
    expected_loss, expected_RS = model_function(config, "score")(parameters, rows)

    config = case.config()
    program = case.program(config)
    state = {"trainable": case.parameters(program, config, parameters), "frozen": {}}
    loss, count, tokens_MBS = program.score(state, case.batch(program, config, rows))
    assert float(loss) == pytest.approx(float(expected_loss), rel=1e-6)
    assert int(count) == np.sum(rows["targets"] != IGNORE)
    np.testing.assert_array_equal(np.asarray(tokens_MBS).reshape(expected_RS.shape), expected_RS)
