"""What is refused of latent attention and YaRN, with a message that names the fields and a way out."""

import pytest

from jaxforge.config import ConfigError, default_config, resolve, validate
from jaxforge.config.activations import layer_actions, layer_activations

LATENT = {"multi_latent_attention": True, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_head_dim": 8, "v_head_dim": 8}
YARN = LATENT | {"rope_type": "yarn"}


def config_with(decoder, others=()):
    """`others`: fields by their whole path."""
    config = default_config()
    for name, value in decoder.items():
        config.model.decoder[name] = value
    for path, value in dict(others).items():
        group, name = path.split(".")
        config[group][name] = value
    return resolve(config)


def refusal(config, platform="cpu"):
    with pytest.raises(ConfigError) as error:
        validate(config, 8, platform)
    return str(error.value)


@pytest.mark.parametrize(
    "decoder",
    [LATENT, YARN, LATENT | {"q_lora_rank": None}, LATENT | {"use_rope_scaling": True}],
)
def test_latent_attention_is_valid(decoder):
    validate(config_with(decoder), 8)


def test_heads_are_divided_by_tensor_parallelism_and_key_value_groups_are_not():
    eight = {"parallel.tensor_model_parallel_size": 8}
    # num_query_groups is 4, and unused
    validate(config_with(LATENT | {"num_attention_heads": 8}, eight), 8)
    assert refusal(config_with(LATENT, eight)) == (
        "parallel.tensor_model_parallel_size=8 does not divide model.decoder.num_attention_heads=4; use 1, 2 or 4"
    )


@pytest.mark.parametrize(
    "decoder, message",
    [
        (
            {"q_lora_rank": 32},
            "model.decoder.q_lora_rank=32 would have no effect, because model.decoder.multi_latent_attention=False; set"
            " that to true or leave q_lora_rank at None",
        ),
        (
            {"qk_pos_emb_head_dim": 32},
            "model.decoder.qk_pos_emb_head_dim=32 would have no effect, because model.decoder.multi_latent_attention="
            "False; set that to true or leave qk_pos_emb_head_dim at 64",
        ),
        (
            LATENT | {"num_query_groups": 2},
            "model.decoder.num_query_groups=2 doesn't go with model.decoder.multi_latent_attention=True: its heads have"
            " q_lora_rank, kv_lora_rank, qk_head_dim, qk_pos_emb_head_dim and v_head_dim; leave num_query_groups at 4",
        ),
        (LATENT | {"kv_channels": 15}, "model.decoder.kv_channels=15 doesn't go with"),
        (
            LATENT | {"add_qkv_bias": True},
            "model.decoder.add_qkv_bias=True doesn't go with model.decoder.multi_latent_attention=True: its projections"
            " have no biases; leave add_qkv_bias at False",
        ),
        (LATENT | {"qk_layernorm": True}, "its compressed queries, keys and values always have norms; leave qk_layern"),
        (LATENT | {"mrope_section": (4, 2, 2)}, "it rotates by text position; leave mrope_section at None"),
        (
            LATENT | {"qk_pos_emb_head_dim": 7},
            "model.decoder.qk_pos_emb_head_dim=7 must be even, because RoPE rotates pairs; use 8",
        ),
        (LATENT | {"kv_lora_rank": 0}, "model.decoder.kv_lora_rank=0 must be at least 1"),
        (LATENT | {"q_lora_rank": 0}, "model.decoder.q_lora_rank=0 must be at least 1"),
        (YARN | {"rotary_scaling_factor": 0.5}, "model.decoder.rotary_scaling_factor=0.5 must be at least 1"),
        (YARN | {"beta_slow": 0.0}, "model.decoder.beta_slow=0.0 must be above 0"),
        (YARN | {"mscale": -1.0}, "model.decoder.mscale=-1.0 must be at least 0"),
        (
            LATENT | {"mscale_all_dim": 1.0},
            "model.decoder.mscale_all_dim=1.0 would have no effect with model.decoder.rope_type=rope; set that to yarn"
            " or leave mscale_all_dim at 0.0",
        ),
        ({"rope_type": "yarn"}, "model.decoder.rope_type=yarn needs model.decoder.multi_latent_attention=True"),
        (
            YARN | {"use_rope_scaling": True},
            "model.decoder.rope_type=yarn and model.decoder.use_rope_scaling=True both scale RoPE; leave one of them",
        ),
        (
            YARN | {"beta_slow": 32.0},
            "model.decoder.beta_fast=32.0 must be above model.decoder.beta_slow=32.0; DeepSeek-V3 has 32 and 1",
        ),
        (YARN | {"rotary_base": 1.0}, "model.decoder.rotary_base=1.0 must be above 1 with model.decoder.rope_type="),
    ],
)
def test_what_does_not_go_together_is_refused(decoder, message):
    assert message in refusal(config_with(decoder))


def test_another_rope_type_is_refused():
    with pytest.raises(ConfigError, match="model.decoder.rope_type=yarm is not one of rope, yarn; did you mean yarn"):
        config_with(LATENT | {"rope_type": "yarm"})


def test_cudnn_needs_values_as_wide_as_keys():
    cudnn = {"train.attention_backend": "cudnn"}
    assert refusal(config_with(LATENT, cudnn), "gpu") == (
        "train.attention_backend=cudnn needs values as wide as keys, but model.decoder.v_head_dim=8 and qk_head_dim +"
        " qk_pos_emb_head_dim=72; use flash"
    )
    validate(config_with(LATENT | {"v_head_dim": 72}, cudnn), 8, "gpu")


def test_the_up_projections_can_be_recomputed():
    up = {"memory.recompute_granularity": "selective", "memory.recompute_modules": ("mla_up_proj",)}
    config = config_with(LATENT, up)
    validate(config, 8)
    assert layer_actions(config, "decoder") == dict.fromkeys(["query", "key", "value"], "recompute")
    names = layer_activations(config, "decoder")
    assert names[:8] == (
        "layer_input", "attn_norm", "query_compressed", "kv_compressed", "query", "key", "value", "core_attn",
    )  # fmt: skip
    plain_queries = layer_activations(config_with(LATENT | {"q_lora_rank": None}), "decoder")
    assert plain_queries == tuple(name for name in names if name != "query_compressed")
    assert refusal(config_with({}, up)) == (
        "memory.recompute_modules has mla_up_proj, which comes with model.decoder.multi_latent_attention, and these"
        " layers don't have it; use core_attn, mlp, layernorm"
    )
    moved = {"memory.fine_grained_activation_offloading": True, "memory.offload_modules": ("core_attn",)}
    assert "memory.recompute_modules (mla_up_proj) recomputes key, but memory.offload_modules (core_attn)" in refusal(
        config_with(LATENT, up | moved)
    )
