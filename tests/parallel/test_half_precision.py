"""A pipeline in bfloat16 on the CPU, where XLA can't take every sum in bfloat16: it must not abort."""

import dataclasses

import pytest
from encoder_cases import FULL_HETERO_DP, Case, rows_with_images, vision_config
from one_device import loss_and_gradients, loss_of
from tiny_models import random_parameters


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_pipeline_computes_in_bfloat16_on_the_cpu():
    case = Case("qwen3_vit", FULL_HETERO_DP, 2, tensor=2, vocabulary_over_stages=True)
    alone = vision_config(case.encoder)
    parameters, rows = random_parameters(alone), rows_with_images(alone)
    expected, _ = loss_and_gradients(alone, parameters, rows)
    config = case.config()
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, compute_dtype="bfloat16"))
    program = case.program(config)
    gradients, sums = program.gradients(
        case.parameters(program, config, parameters), case.batch(program, config, rows)
    )
    # bfloat16 has 8 bits: a loss is right to about 1/256 where its rounding errors add up
    assert loss_of(config, sums) == pytest.approx(float(expected), rel=4e-3)
