"""Qwen3-VL 30B-A3B: the config.json of Qwen/Qwen3-VL-30B-A3B-Instruct (arXiv:2511.21631)."""

from ml_collections import ConfigDict

from jaxforge.config import default_config, encoder_defaults


def get_config() -> ConfigDict:
    """The architecture, for `config.model`."""
    model = default_config().model
    model.decoder.update(
        num_layers=48,
        hidden_size=2048,
        ffn_hidden_size=6144,
        num_attention_heads=32,
        num_query_groups=4,
        kv_channels=128,
        vocab_size=151936,
        rotary_base=5e6,
        untie_embeddings_and_output_weights=True,
        qk_layernorm=True,
        norm_epsilon=1e-6,
        mrope_section=(24, 20, 20),
        mrope_interleaved=True,
        num_experts=128,
        moe_router_topk=8,
        moe_ffn_hidden_size=768,
    )
    model.encoder = encoder_defaults("qwen3_vit")
    model.encoder.update(
        num_layers=27,
        hidden_size=1152,
        ffn_hidden_size=4304,
        num_attention_heads=16,
        kv_channels=72,
        patch_size=16,
        temporal_patch_size=2,
        spatial_merge_size=2,
        num_position_embeddings=2304,
        deepstack_visual_indexes=(8, 16, 24),
        norm_epsilon=1e-6,
        rotary_base=1e4,
    )
    return model
