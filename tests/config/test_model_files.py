"""The architectures in configs/models, checked against the parameter counts that their publishers state."""

from pathlib import Path

import pytest

import jaxforge.config
from jaxforge.config import default_config, model_config, resolve, validate

# total parameters in the safetensors index of each model's Hugging Face repository
PUBLISHED_PARAMETERS = {
    "llama3_1_8b": 8_030_261_248,
    "llama3_1_70b": 70_553_706_496,
    "qwen3_4b": 4_022_468_096,
    "qwen3_8b": 8_190_735_360,
    "qwen3_14b": 14_768_307_200,
    "qwen3_32b": 32_762_123_264,
    "qwen2_5_vl_3b": 3_754_622_976,
    "qwen2_5_vl_7b": 8_292_166_656,
    "qwen2_5_vl_72b": 73_410_777_344,
    "qwen3_vl_4b": 4_437_815_808,
    "qwen3_vl_8b": 8_767_123_696,
    "qwen3_30b_a3b": 30_532_122_624,
    "qwen3_235b_a22b": 235_093_634_560,
    "qwen3_vl_30b_a3b": 31_070_754_032,
    # without the copies of embedding and head that its layer for multi-token prediction is published with
    "deepseek_v3": 684_489_845_504 - 2 * 129_280 * 7_168,
}


def _attention_parameters(d):
    width, head = d.hidden_size, d.kv_channels
    query, key = d.num_attention_heads * head, d.num_query_groups * head
    return 2 * width * query + 2 * width * key + (query + 2 * key) * d.add_qkv_bias + 2 * head * d.qk_layernorm


def _latent_attention_parameters(d):
    width, heads = d.hidden_size, d.num_attention_heads
    query = d.q_lora_rank * (width + 1 + heads * (d.qk_head_dim + d.qk_pos_emb_head_dim))
    compressed = width * (d.kv_lora_rank + d.qk_pos_emb_head_dim) + d.kv_lora_rank
    return query + compressed + heads * (d.kv_lora_rank * (d.qk_head_dim + d.v_head_dim) + d.v_head_dim * width)


def _decoder_parameters(d):
    width = d.hidden_size
    attention = _latent_attention_parameters(d) if d.multi_latent_attention else _attention_parameters(d)
    inner = d.num_experts * d.moe_ffn_hidden_size + (d.moe_shared_expert_intermediate_size or 0) if d.num_experts else 0
    experts = 3 * width * inner + (d.num_experts or 0) * (width + d.moe_router_enable_expert_bias)
    # a layer for multi-token prediction, like the last one; two norms, a projection of both inputs and a final norm
    frequency = (d.moe_layer_freq or d.num_layers * (1,)) if d.num_experts else d.num_layers * (0,)
    num_layers, with_experts = d.num_layers + d.mtp_num_layers, sum(frequency) + d.mtp_num_layers * frequency[-1]
    feed_forwards = with_experts * experts + (num_layers - with_experts) * 3 * width * d.ffn_hidden_size
    embeddings = (1 + d.untie_embeddings_and_output_weights) * d.vocab_size * width
    ahead = d.mtp_num_layers * (2 * width * width + 3 * width)
    return num_layers * (attention + 2 * width) + feed_forwards + ahead + embeddings + width


def _encoder_parameters(e, out_width):
    width, merged = e.hidden_size, e.hidden_size * e.spatial_merge_size**2
    is_qwen3 = e.model_type == "qwen3_vit"
    norm = 2 if e.normalization == "LayerNorm" else 1
    heads = e.num_attention_heads * e.kv_channels
    attention = 4 * width * heads + 3 * heads + width
    mlp = (3 if e.swiglu else 2) * width * e.ffn_hidden_size + (2 if e.swiglu else 1) * e.ffn_hidden_size + width
    layers = e.num_layers * (attention + mlp + 2 * norm * width)
    patch = e.in_channels * e.temporal_patch_size * e.patch_size**2 * width + is_qwen3 * width
    positions = (e.num_position_embeddings or 0) * width
    mlps = merged * merged + merged + merged * out_width + out_width
    # the merger normalises patches, DeepStack's mergers normalise merged squares
    mergers = mlps + norm * width + len(e.deepstack_visual_indexes) * (mlps + norm * merged)
    return layers + patch + positions + mergers


@pytest.mark.parametrize("name", PUBLISHED_PARAMETERS)
def test_the_architecture_has_the_published_number_of_parameters(name):
    model = resolve({"model": model_config(name)}).model
    count = _decoder_parameters(model.decoder)
    if model.encoder is not None:
        count += _encoder_parameters(model.encoder, model.decoder.hidden_size)
    assert count == PUBLISHED_PARAMETERS[name]


def test_every_model_file_is_checked_here():
    files = {path.stem for path in (Path(jaxforge.config.__file__).parents[2] / "configs" / "models").glob("*.py")}
    assert files == {*PUBLISHED_PARAMETERS, "demo_vlm_tiny"}


def test_rotary_settings_are_those_published():
    # parameter counts don't see these
    def rotary(name):
        decoder = resolve({"model": model_config(name)}).model.decoder
        return decoder.rotary_base, decoder.mrope_section, decoder.mrope_interleaved, decoder.use_rope_scaling

    assert rotary("llama3_1_8b") == (500_000, None, False, True)
    assert rotary("qwen3_8b") == (1_000_000, None, False, False)
    assert rotary("qwen2_5_vl_7b") == (1_000_000, (16, 24, 24), False, False)
    assert rotary("qwen3_vl_8b") == (5_000_000, (24, 20, 20), True, False)
    assert rotary("qwen3_30b_a3b") == rotary("qwen3_235b_a22b") == (1_000_000, None, False, False)
    assert rotary("qwen3_vl_30b_a3b") == (5_000_000, (24, 20, 20), True, False)
    assert rotary("deepseek_v3") == (10_000, None, False, False)


def test_routers_choose_as_published():
    # nor these
    def router(name):
        d = resolve({"model": model_config(name)}).model.decoder
        groups = (d.moe_router_num_groups, d.moe_router_group_topk)
        return d.moe_router_topk, d.moe_router_score_function, d.moe_router_pre_softmax, groups

    for name in ("qwen3_30b_a3b", "qwen3_235b_a22b", "qwen3_vl_30b_a3b"):
        assert router(name) == (8, "softmax", False, (None, None))
    assert router("deepseek_v3") == (8, "sigmoid", False, (8, 4))


def _config(model, tensor):
    config = default_config()
    config.model = model
    config.parallel.tensor_model_parallel_size = tensor
    if model.encoder is not None:
        # a full image of 1344 x 1344 pixels is 96 x 96 patches of 14, or 84 x 84 of 16
        config.data.max_patches_per_row, config.train.seq_length = 96 * 96, 4096
    return config


@pytest.mark.parametrize("name", [*PUBLISHED_PARAMETERS, "demo_vlm_tiny"])
def test_the_model_is_valid_at_tensor_parallel_2_on_8_devices(name):
    validate(resolve(_config(model_config(name), tensor=2)), 8)


def test_every_encoder_goes_with_every_decoder():
    visual = [name for name in [*PUBLISHED_PARAMETERS, "demo_vlm_tiny"] if model_config(name).encoder is not None]
    assert len(visual) == 7
    for encoder in visual:
        for decoder in PUBLISHED_PARAMETERS:
            model = model_config(decoder)
            model.encoder = model_config(encoder).encoder
            validate(resolve(_config(model, tensor=2)), 8)
