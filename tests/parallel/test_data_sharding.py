"""Every data_parallel_sharding_strategy has the loss and gradients of one device, and cuts what it says.

With other options, clipping and updates in test_option_pairs.py.
"""

import dataclasses

import jax
import numpy as np
import pytest
from encoder_cases import FULL_HETERO_DP, HETERO_TP, assert_all_are_those_of_one_device, vision_problem
from encoder_cases import Case as VisionCase
from flax import nnx
from one_device import deviation, loss_and_gradients, loss_of
from pipeline_cases import Case, problem, text_config, twelve_rows, unplaced
from tiny_models import random_parameters

from jaxforge.cluster.mesh import MeshLayout, build_mesh
from jaxforge.config import ConfigError
from jaxforge.config.schema import AdapterConfig, LoraConfig
from jaxforge.training.program import build_program, make_model

TEXT = [
    Case(1, tensor=2, data=4, sequence_parallel=True, sharding="optim_grads_params"),
    Case(2, 2, data=2, vocabulary_over_stages=True, sharding="optim"),
    Case(4, 1, uneven=True, data=2, sharding="optim"),  # embedding and head over data and stage
    Case(4, 1, sharding="optim"),  # over stage alone
]
VISION = [
    VisionCase("qwen2_5_vit", FULL_HETERO_DP, 2, data=2, vocabulary_over_stages=True, sharding="optim"),
    VisionCase("qwen3_vit", HETERO_TP, 2, 2, data=2, vocabulary_over_stages=True, sharding="optim_grads"),
]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_text_model_has_the_gradients_of_one_device(compiler):
    assert_all_are_those_of_one_device(compiler, ((case, case, case.config(), problem()) for case in TEXT))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_vision_model_has_the_gradients_of_one_device(compiler):
    assert_all_are_those_of_one_device(
        compiler, ((case, case, case.config(), vision_problem(case.encoder)) for case in VISION)
    )


@pytest.mark.parametrize("fused", [False, True], ids=["plain loss", "fused loss"])
def test_gradients_that_are_reduced_with_the_last_microbatch_are_the_same(fused):
    parameters, rows, *expected = problem()
    case = Case(1, tensor=2, data=2, sharding="optim")
    config = case.config()
    config = dataclasses.replace(
        config,
        parallel=dataclasses.replace(config.parallel, overlap_grad_reduce=True),
        loss=dataclasses.replace(config.loss, cross_entropy_loss_fusion=fused),
    )
    program = case.program(config)
    assert program.sharding.scatters_with_last
    gradients, sums = program.gradients(*case.arguments(program, config, parameters, rows))
    deviation(loss_of(config, sums), gradients, *expected).assert_small(case)


def test_adapters_train_on_a_base_that_is_cut():
    # scales of 1, as in test_lora_layouts.py
    lora = LoraConfig(decoder=AdapterConfig(rank=3, alpha=3.0), train_also=("decoder/head_VD",))
    plain = dataclasses.replace(text_config(), lora=lora)
    parameters, rows = random_parameters(plain), twelve_rows(plain)
    case = Case(1, data=4, sharding="optim_grads_params")
    config = dataclasses.replace(case.config(), lora=lora)
    program = case.program(config)
    gradients, sums = program.gradients(*case.arguments(program, config, parameters, rows))
    found = loss_of(config, sums), unplaced(config, gradients)
    deviation(*found, *loss_and_gradients(plain, parameters, rows)).assert_small(case)
    assert "replica" in program.abstract_state["frozen"]["decoder"]["layers"]["mlp"]["up_DF"].sharding.spec


@pytest.mark.parametrize("case", [Case(1, data=4), Case(2, data=2, vocabulary_over_stages=True)])
def test_scores_are_those_of_one_device(case):
    parameters, rows, *_ = problem()
    graph = nnx.graphdef(nnx.eval_shape(lambda: make_model(text_config(), "xla", nnx.Rngs(params=0))))
    expected, expected_RS = jax.jit(lambda parameters: nnx.merge(graph, parameters).score(rows))(parameters)
    case = dataclasses.replace(case, sharding="optim_grads_params")
    config = case.config()
    program = case.program(config)
    placed, batch = case.arguments(program, config, parameters, rows)
    loss, _, tokens_MBS = program.score({"trainable": placed, "frozen": {}}, batch)
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)
    np.testing.assert_array_equal(np.asarray(tokens_MBS).reshape(expected_RS.shape), expected_RS)


def abstract_state(case: Case, **groups):
    config = case.config(**groups)
    mesh = build_mesh(MeshLayout.from_config(config, 8), jax.devices())
    return build_program(config, mesh, "cpu").abstract_state


def numbers_per_device(shape):
    return int(np.prod(shape.sharding.shard_shape(shape.shape)))


@pytest.mark.parametrize(
    "case, tables, matrices",
    [
        # of 8 devices: parts of embedding and head, and of a matrix of the layers
        (Case(1, tensor=2, data=4, sharding="no_shard"), 2, 2),
        (Case(1, tensor=2, data=4, sharding="optim"), 8, 8),
        (Case(2, tensor=2, data=2, sharding="optim"), 8, 8),  # tensor, data, stage; tensor, stage, data
        (Case(2, tensor=2, data=2, vocabulary_over_stages=True, sharding="optim"), 8, 8),
        (Case(4, tensor=2, sharding="optim"), 8, 8),  # without data parallel ranks, the tables alone are cut more
        (Case(4, tensor=2, sharding="no_shard"), 2, 8),
    ],
)
def test_masters_and_moments_are_cut_over_all_that_would_repeat_them(case, tables, matrices):
    state = abstract_state(case)
    for tree in (state["trainable"], state["optimizer"][1].mu, state["optimizer"][1].nu):
        decoder = tree["decoder"]
        for name in ("embedding_VD", "head_VD"):
            assert decoder[name].size == tables * numbers_per_device(decoder[name])
        up = decoder["layers"]["mlp"]["up_DF"]
        assert up.size == matrices * numbers_per_device(up)
        scale = decoder["final_norm"]["scale"]
        assert scale.size == numbers_per_device(scale)  # a norm is small, and stays whole


def test_matrices_that_cannot_be_cut_are_refused_where_they_are_more_than_a_little():
    narrow = dict(hidden_size=12, ffn_hidden_size=12, num_attention_heads=2, num_query_groups=2, kv_channels=8)
    with pytest.raises(ConfigError, match=r"into 8 parts.*; decoder/.* of shape \(8, 12, 12\) has none that 8 divides"):
        abstract_state(Case(1, data=8, sharding="optim_grads"), decoder_changes=narrow)
    # Qwen3-VL's table of 9 positions, over 2 ranks
    state = abstract_state(VisionCase("qwen3_vit", HETERO_TP, tensor=4, data=2, sharding="optim"))
    assert state["trainable"]["encoder"]["position_ND"].sharding.spec[0] is None
