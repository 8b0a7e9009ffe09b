"""With latent attention any layout has the loss and gradients of one device, and steps to the same parameters."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from encoder_cases import assert_all_are_those_of_one_device
from one_device import GRADIENT_TOLERANCE, loss_and_gradients
from pipeline_cases import Case, text_config, twelve_rows, unplaced
from tiny_models import random_parameters

from jaxforge.config.schema import AdapterConfig, Config, DecoderConfig, LoraConfig, MemoryConfig

LATENT = dict(
    multi_latent_attention=True, q_lora_rank=8, kv_lora_rank=12, qk_head_dim=6, qk_pos_emb_head_dim=4, v_head_dim=5,
    num_query_groups=DecoderConfig.num_query_groups, kv_channels=DecoderConfig.kv_channels, rope_type="yarn",
    rotary_base=81.0, rotary_scaling_factor=8.0, original_max_position_embeddings=8, beta_fast=1.0, beta_slow=0.1,
    mscale_all_dim=0.7,
)  # fmt: skip
PLAIN_QUERIES = LATENT | dict(q_lora_rank=None)
# Scales of 1/3.  With 1, as in test_lora_layouts.py, eight layers have fp32 gradients that on one device too are 0.7e-5
# away from float64's.
LORA = LoraConfig(decoder=AdapterConfig(rank=3, alpha=1.0))
NO_ADAPTERS = LoraConfig()
UP_PROJECTIONS = MemoryConfig(recompute_granularity="selective", recompute_modules=("mla_up_proj", "core_attn"))
COMPRESSED_ON_THE_HOST = MemoryConfig(
    activations=(("query_compressed", "offload"), ("kv_compressed", "recompute"), ("key", "offload"))
)


@functools.cache
def problem(compresses_queries: bool = True, lora: LoraConfig = NO_ADAPTERS):
    """Parameters, rows, and what one device computes from them: loss and gradients."""
    config = text_config(decoder_changes=LATENT if compresses_queries else PLAIN_QUERIES)
    config = dataclasses.replace(config, lora=lora)
    parameters, rows = random_parameters(config), twelve_rows(config)
    return parameters, rows, *loss_and_gradients(config, parameters, rows)


def config_of(case: Case, decoder=LATENT, **groups) -> Config:
    return dataclasses.replace(case.config(decoder_changes=decoder), **groups)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_parallelism_has_the_gradients_of_one_device(compiler, sequence_parallel):
    narrow = Case(1, tensor=2, sequence_parallel=sequence_parallel)
    wide = Case(1, tensor=4, data=2, sequence_parallel=sequence_parallel)
    plain_queries = (wide, wide, config_of(wide, PLAIN_QUERIES), problem(compresses_queries=False))
    assert_all_are_those_of_one_device(compiler, [(narrow, narrow, config_of(narrow), problem()), plain_queries])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_pipelines_cut_weights_recompute_and_offload_have_the_gradients_of_one_device(compiler):
    cases = (
        (Case(2, 1, tensor=2, data=2, sequence_parallel=True, sharding="optim_grads_params"), UP_PROJECTIONS),
        (Case(1, tensor=2, data=4, sequence_parallel=True, sharding="optim_grads_params"), COMPRESSED_ON_THE_HOST),
        (Case(4, 2, uneven=True, data=2, sharding="optim"), MemoryConfig()),
    )
    assert_all_are_those_of_one_device(
        compiler,
        ((f"{case} {memory}", case, config_of(case, memory=memory), problem()) for case, memory in cases),
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_adapters_have_the_gradients_of_one_device(compiler):
    cases = (Case(1, tensor=2, data=2, sequence_parallel=True), Case(2, 1, tensor=2, data=2))
    assert_all_are_those_of_one_device(
        compiler, ((case, case, config_of(case, lora=LORA), problem(lora=LORA)) for case in cases)
    )


@pytest.mark.timeout(900)
def test_a_step_in_a_pipeline_of_tensor_groups_with_cut_weights_is_that_of_one_device():
    # a first Adam step without decay is rate * g / (|g| + epsilon)
    parameters, rows, _, gradients = problem()
    norm = np.sqrt(sum(np.sum(np.square(g, dtype=np.float64)) for g in jax.tree.leaves(gradients)))
    case = Case(2, 1, tensor=2, data=2, sequence_parallel=True, sharding="optim_grads_params")
    optimizer = dict(learning_rate=1.0, adam_eps=1.0, weight_decay=0.0, clip_grad=norm / 4)
    config = case.config(decoder_changes=LATENT, optimizer=optimizer)
    program = case.program(config)
    state = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype, device=a.sharding), program.abstract_state)
    state["trainable"], batch = case.arguments(program, config, parameters, rows)
    state, metrics = program.train_step(state, batch)

    assert float(metrics["grad_norm"]) == pytest.approx(norm, rel=1e-5)
    stepped = unplaced(config, state["trainable"])
    for (path, after), before, gradient in zip(
        jax.tree_util.tree_leaves_with_path(stepped), *map(jax.tree.leaves, (parameters, gradients)), strict=True
    ):
        update = (gradient / 4) / (np.abs(gradient / 4) + 1)
        # the layouts' limit, and the rounding of parameters that may be above 1
        atol = GRADIENT_TOLERANCE * np.abs(update).max() + 2**-23
        np.testing.assert_allclose(before - after, update, atol=atol, rtol=0, err_msg=jax.tree_util.keystr(path))
