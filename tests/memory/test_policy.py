"""What a layer keeps for its backward pass: exactly the arrays under the names that are kept, where they should lie."""

import functools
import importlib.util
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name, print_saved_residuals
from tiny_models import decoder_of, encoder_of

from jaxforge.config.activations import LAYER_INPUT, RECOMPUTE_MODULES
from jaxforge.memory.policy import make_policies
from jaxforge.models.decoder import DecoderLayer
from jaxforge.models.vision import EncoderLayer
from jaxforge.ops.attention import row_segments
from jaxforge.ops.placement import SINGLE_DEVICE

# rows, tokens; width 16, 8 heads of 8 on 4 key/value heads, ffn 12 as in tiny_models.py
B, S = 2, 16
SHAPES = {
    "layer_input": "2,16,16", "attn_norm": "2,16,16", "query": "2,16,8,8", "key": "2,16,4,8", "value": "2,16,4,8",
    "core_attn": "2,16,8,8", "mlp_norm_input": "2,16,16", "mlp_norm": "2,16,16", "mlp_gate": "2,16,12",
    "mlp_up": "2,16,12", "mlp_act": "2,16,12",
}  # fmt: skip


def layer_function(make_layer, policies, *, causal, backend, **inputs):
    """(parameters, x, inputs) -> y, and shapes of these: the layer alone, in bfloat16."""
    segments_of = functools.partial(row_segments, causal=causal, backend=backend)
    inputs |= {
        "angles": jax.ShapeDtypeStruct((B, S, 4), jnp.float32),
        "segments": jax.eval_shape(segments_of, jax.ShapeDtypeStruct((B, S), jnp.int32)),
    }
    graph, state = nnx.split(nnx.eval_shape(make_layer))
    parameters = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, jnp.bfloat16), nnx.to_pure_dict(state))

    def layer(parameters, x, inputs):
        others = dict(inputs)
        angles, segments = others.pop("angles"), others.pop("segments")

        def named(parameters, x):
            return nnx.merge(graph, parameters)(checkpoint_name(x, LAYER_INPUT), angles, segments, **others)

        return policies.checkpoint(named, is_recomputed=False)(parameters, x)

    return layer, parameters, jax.ShapeDtypeStruct((B, S, 16), jnp.bfloat16), inputs


def decoder_layer(policies, backend="xla", **changes):
    config = decoder_of(changes.pop("style", None), **changes)
    inputs = {"dropout_keys_B2": jax.ShapeDtypeStruct((B, 2), jnp.uint32)} if config.hidden_dropout else {}

    def make():
        return DecoderLayer(config, backend=backend, placement=SINGLE_DEVICE, rngs=nnx.Rngs(params=0))

    return layer_function(make, policies, causal=True, backend=backend, **inputs)


def encoder_layer(policies, style):
    def make():
        return EncoderLayer(encoder_of(style), backend="xla", placement=SINGLE_DEVICE, rngs=nnx.Rngs(params=0))

    return layer_function(make, policies, causal=False, backend="xla")


def residuals(capsys, layer, *arguments):
    """name, or operation without one -> shapes of what the backward pass keeps, by JAX's own account.

    Arguments and literals are kept by whoever has them.
    """
    print_saved_residuals(layer, *arguments)
    kept: dict = {}
    for line in capsys.readouterr().out.splitlines():
        array, source = line.split(" ", 1)
        if source.startswith("from "):
            continue
        _, shape = re.fullmatch(r"(\w+(?:<host>)?)\[([\d,]*)\]", array).groups()
        named = re.match(r"named '(\w+)'", source)
        where = named[1] if named else source.split(" from ")[0] + (" in host memory" if "<host>" in array else "")
        kept.setdefault(where, []).append(shape)
    return kept


def test_by_default_everything_that_has_a_name_is_kept_and_nothing_else(capsys):
    weights = "2,4,2,16,16"  # of the reference attention, all scores of grouped heads
    expected = {name: [shape] for name, shape in SHAPES.items()} | {"core_attn": [weights, SHAPES["core_attn"]]}
    assert residuals(capsys, *decoder_layer(make_policies({}))) == expected


def test_flash_attention_keeps_its_output_and_log_sum_exp(capsys):
    kept = residuals(capsys, *decoder_layer(make_policies({}), "flash"))
    assert kept == {name: [shape] for name, shape in SHAPES.items()} | {"core_attn": ["2,16,64", "2,8,16"]}


@pytest.mark.skipif(importlib.util.find_spec("jax_cuda12_plugin") is None, reason="needs cuDNN, as the compiler does")
def test_cudnn_attention_keeps_the_kernels_own_output_and_log_sum_exp(capsys):
    kept = residuals(capsys, *decoder_layer(make_policies({}), "cudnn"))
    assert kept.pop("output of dot_product_attention_fwd_wrapper") == ["2,16,8,8", "2,8,16"]
    assert kept == {name: [shape] for name, shape in SHAPES.items() if name != "core_attn"}
    kept = residuals(capsys, *decoder_layer(make_policies({"core_attn": "recompute"}), "cudnn"))
    assert kept == {name: [shape] for name, shape in SHAPES.items() if name != "core_attn"}


def test_head_norms_and_rotations_are_computed_again_from_one_query_and_key(capsys):
    kept = residuals(capsys, *decoder_layer(make_policies({}), "flash", style="qwen3_vit"))
    assert kept == {name: [shape] for name, shape in SHAPES.items()} | {"core_attn": ["2,16,64", "2,8,16"]}


def test_latent_attention_keeps_what_is_compressed_and_what_its_up_projections_make(capsys):
    # of 8 heads: 6 + 4 features of queries, 6 of keys (the others are of kv_compressed), 5 of values
    latent = dict(
        multi_latent_attention=True, q_lora_rank=7, kv_lora_rank=9, qk_head_dim=6, qk_pos_emb_head_dim=8, v_head_dim=5
    )
    sizes = {
        "query_compressed": "2,16,7", "kv_compressed": "2,16,17", "query": "2,16,8,14", "key": "2,16,8,6",
        "value": "2,16,8,5",
    }  # fmt: skip
    expected = {name: [shape] for name, shape in (SHAPES | sizes).items()} | {"core_attn": ["2,16,40", "2,8,16"]}
    assert residuals(capsys, *decoder_layer(make_policies({}), "flash", **latent)) == expected
    up = dict.fromkeys(RECOMPUTE_MODULES["mla_up_proj"], "recompute")
    kept = residuals(capsys, *decoder_layer(make_policies(up), "flash", **latent))
    assert kept == {name: shapes for name, shapes in expected.items() if name not in ("query", "key", "value")}
    without = latent | dict(q_lora_rank=None)
    del expected["query_compressed"]
    assert residuals(capsys, *decoder_layer(make_policies({}), "flash", **without)) == expected


def test_masks_of_dropout_are_kept(capsys):
    kept = residuals(capsys, *decoder_layer(make_policies({}), "flash", hidden_dropout=0.1))
    assert kept["dropout"] == 2 * ["2,16,16"]


def test_an_encoder_layer_has_no_gate_where_it_is_not_gated(capsys):
    heads = {name: ["2,16,4,8"] for name in ("query", "key", "value")}
    attention = heads | {"core_attn": ["2,4,1,16,16", "2,16,4,8"]}
    expected = {name: [shape] for name, shape in SHAPES.items()} | attention
    assert residuals(capsys, *encoder_layer(make_policies({}), "qwen2_5_vit")) == expected
    del expected["mlp_gate"]
    assert residuals(capsys, *encoder_layer(make_policies({}), "qwen3_vit")) == expected


def test_what_is_recomputed_is_not_kept_and_what_is_offloaded_lies_in_host_memory(capsys):
    actions = {"mlp_gate": "recompute", "mlp_act": "recompute", "layer_input": "offload", "query": "offload"}
    kept = residuals(capsys, *decoder_layer(make_policies(actions), "flash"))
    assert kept.pop("output of device_put in host memory") == [SHAPES["layer_input"], SHAPES["query"]]
    assert kept.keys() == SHAPES.keys() - actions.keys()


def test_a_unit_that_is_computed_again_keeps_its_input_alone_in_either_memory(capsys):
    def unit(actions):
        layer = make_policies(actions).checkpoint(
            lambda x: jnp.sin(checkpoint_name(jnp.sin(checkpoint_name(x, LAYER_INPUT)), "query")), is_recomputed=True
        )
        return residuals(capsys, lambda x: layer(2 * x), jax.ShapeDtypeStruct((3,), jnp.float32))

    assert unit({}) == {"layer_input": ["3"]}
    assert unit({"layer_input": "offload"}) == {"output of device_put in host memory": ["3"]}


def test_small_arrays_stay_on_the_device(capsys):
    # in bytes: the query 2 x 16 x 64 in bfloat16; of attention the same, and its log-sum-exp 2 x 16 x 8 in fp32
    actions = dict.fromkeys(("query", "key", "core_attn"), "offload")
    policies = make_policies(actions, smallest_offloaded=2 * 16 * 64 * 2)
    kept = residuals(capsys, *decoder_layer(policies, "flash"))
    assert kept.pop("output of device_put in host memory") == [SHAPES["query"], "2,16,64"]
    assert kept["key"] == [SHAPES["key"]] and kept["core_attn"] == ["2,8,16"]
    policies = make_policies(actions, smallest_offloaded=2 * 16 * 64 * 2 + 1)
    assert "output of device_put in host memory" not in residuals(capsys, *decoder_layer(policies, "flash"))


@pytest.mark.parametrize("action", ["save", "recompute", "offload"])
def test_the_reference_softmax_has_the_gradient_of_jaxs(action):
    from jaxforge.ops.attention import _softmax

    scores = np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32)
    weights = np.arange(15, dtype=np.float32).reshape(3, 5)
    policies = make_policies({"core_attn": action})

    def loss(softmax, scores):
        return jnp.sum(weights * policies.checkpoint(softmax, is_recomputed=False)(scores))

    found = jax.jit(jax.grad(lambda scores: loss(_softmax, scores)))(scores)
    np.testing.assert_allclose(found, jax.grad(lambda scores: loss(jax.nn.softmax, scores))(scores), atol=1e-6)
