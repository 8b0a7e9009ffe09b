"""What is recomputed: Megatron's words, the same gradients, and really less memory for more work."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import ClosedJaxpr, Jaxpr
from tiny_models import random_parameters, rows_of_many_kinds, tiny_config

from jaxforge.config.schema import MemoryConfig
from jaxforge.memory.recompute import recompute_segments
from jaxforge.training.program import make_model

LAYERS = 4
slow = functools.partial(pytest.param, marks=pytest.mark.slow)


def full(method: str, number: int) -> dict:
    return dict(recompute_granularity="full", recompute_method=method, recompute_num_layers=number)


@pytest.mark.parametrize(
    "memory, expected",
    [
        (dict(), ((4, 0),)),
        (full("uniform", 1), ((4, 1),)),
        (full("uniform", 2), ((4, 2),)),
        (full("uniform", 4), ((4, 4),)),
        # the first n layers, one by one
        (full("block", 1), ((1, 1), (3, 0))),
        (full("block", 3), ((3, 1), (1, 0))),
        (full("block", 4), ((4, 1),)),
    ],
)
def test_megatrons_words_become_runs_of_layers(memory, expected):
    assert recompute_segments(MemoryConfig(**memory), LAYERS) == expected


def gradient_program(encoder: str | None, decoder_memory: dict, encoder_memory: dict, decoder_changes=()):
    """Gradients of all rows on one device, ready to call with parameters and rows; and these."""
    vision = dict(num_layers=LAYERS, deepstack_visual_indexes=(0, 2)) | encoder_memory
    decoder_changes = dict(num_layers=LAYERS) | dict(decoder_changes)
    config = tiny_config(encoder, encoder_changes=vision if encoder else {}, decoder_changes=decoder_changes)
    config = dataclasses.replace(config, memory=MemoryConfig(**decoder_memory))
    graph = nnx.graphdef(nnx.eval_shape(lambda: make_model(config, "xla", nnx.Rngs(params=0))))
    gradients = jax.jit(jax.grad(lambda parameters, rows: nnx.merge(graph, parameters).loss(rows)[0]))
    return gradients, random_parameters(config), rows_of_many_kinds(config)


def matmuls(gradients, *arguments) -> int:
    """Matrix products that the program executes: those in a scan count once for each turn."""

    def is_jaxpr(node):
        return isinstance(node, (Jaxpr, ClosedJaxpr))

    def count(jaxpr) -> int:
        total = 0
        for equation in jaxpr.eqns:
            inner = filter(is_jaxpr, jax.tree.leaves(list(equation.params.values()), is_leaf=is_jaxpr))
            turns = equation.params["length"] if equation.primitive.name == "scan" else 1
            total += (equation.primitive.name == "dot_general") + turns * sum(map(count, inner))
        return total

    return count(jax.make_jaxpr(gradients)(*arguments))


@functools.cache
def where_everything_is_kept(encoder: str | None):
    """Gradients and number of products."""
    gradients, *arguments = gradient_program(encoder, {}, {})
    return gradients(*arguments), matmuls(gradients, *arguments)


# a decoder layer has 9 products in its forward pass (4 projections, 2 of attention, 3 of the gated feed-forward), an
# encoder layer 8; what the backward pass doesn't need of them (such as the last of a layer) may be left out
@pytest.mark.parametrize(
    "encoder, decoder_memory, encoder_memory, recomputed",
    [
        (None, full("uniform", 1), {}, range(4 * 7, 4 * 9 + 1)),
        (None, full("uniform", 2), {}, range(4 * 7, 4 * 9 + 1)),
        (None, full("block", 1), {}, range(1 * 7, 1 * 9 + 1)),
        (None, full("block", 3), {}, range(3 * 7, 3 * 9 + 1)),
        (None, full("block", 4), {}, range(4 * 7, 4 * 9 + 1)),
        slow("qwen3_vit", {}, full("uniform", 1), range(4 * 6, 4 * 8 + 1)),
        slow("qwen3_vit", full("uniform", 4), full("block", 2), range(4 * 7 + 2 * 6, 4 * 9 + 2 * 8 + 1)),
    ],
    ids=["1 layer", "2 layers", "first layer", "first 3", "first 4", "encoder", "both"],
)
def test_recomputing_changes_the_work_and_not_the_gradients(encoder, decoder_memory, encoder_memory, recomputed):
    expected, products = where_everything_is_kept(encoder)
    gradients, *arguments = gradient_program(encoder, decoder_memory, encoder_memory)
    assert matmuls(gradients, *arguments) - products in recomputed
    for gradient, reference in zip(jax.tree.leaves(gradients(*arguments)), jax.tree.leaves(expected), strict=True):
        # the same operations, but fused and so rounded differently
        np.testing.assert_allclose(gradient, reference, atol=2e-6 * np.abs(reference).max())


def selective(*modules: str) -> dict:
    return dict(recompute_granularity="selective", recompute_modules=modules)


@pytest.mark.parametrize(
    "decoder_memory, recomputed",
    [
        (selective(), 4 * 2),  # core_attn: scores, and their sum of values
        (selective("core_attn"), 4 * 2),
        (selective("mlp"), 4 * 2),  # gate and up
        (selective("layernorm"), 0),
        (selective("core_attn", "mlp", "layernorm"), 4 * 4),
        (dict(activations=(("query", "recompute"),)), 4 * 1),
        (dict(activations=(("mlp_norm_input", "recompute"),)), 4 * 1),  # the output projection
        (dict(activations=(("mlp_act", "recompute"), ("attn_norm", "recompute"))), 0),
        (full("block", 1) | dict(activations=(("mlp_up", "recompute"),)), None),
    ],
    ids=str,
)
def test_selective_recompute_does_the_products_of_its_modules_again_and_no_others(decoder_memory, recomputed):
    _, products = where_everything_is_kept(None)
    if recomputed is None:  # one product in each layer that isn't recomputed as a whole
        recomputed = matmuls(*gradient_program(None, full("block", 1), {})) - products + 3
    assert matmuls(*gradient_program(None, decoder_memory, {})) - products == recomputed


def test_recomputing_the_up_projections_of_latent_attention_is_two_products_of_a_layer():
    latent = dict(multi_latent_attention=True, q_lora_rank=7, kv_lora_rank=9, qk_head_dim=6, qk_pos_emb_head_dim=8,
                  v_head_dim=5)  # fmt: skip
    memories = {}, selective("mla_up_proj"), selective("mla_up_proj", "core_attn")
    kept, up, attention = (gradient_program(None, memory, {}, latent) for memory in memories)
    assert matmuls(*up) - matmuls(*kept) == LAYERS * 2
    assert matmuls(*attention) - matmuls(*kept) == LAYERS * 4


def test_recomputing_takes_less_memory():
    def temporary_bytes(memory):
        gradients, parameters, rows = gradient_program(None, memory, {})
        # 16 times the rows, so that activations outweigh everything else
        many = {key: np.concatenate([value] * 16) for key, value in rows.items()}
        return gradients.lower(parameters, many).compile().memory_analysis().temp_size_in_bytes

    kept, first_two, all_four = (temporary_bytes(memory) for memory in ({}, full("block", 2), full("uniform", 1)))
    assert all_four < 0.6 * kept
    assert all_four < first_two < kept
