"""Qwen2.5-VL 72B: the config.json of Qwen/Qwen2.5-VL-72B-Instruct (arXiv:2502.13923)."""

from ml_collections import ConfigDict

from jaxforge.config import default_config, encoder_defaults


def get_config() -> ConfigDict:
    """The architecture, for `config.model`."""
    model = default_config().model
    model.decoder.update(
        num_layers=80,
        hidden_size=8192,
        ffn_hidden_size=29568,
        num_attention_heads=64,
        num_query_groups=8,
        kv_channels=128,
        vocab_size=152064,
        rotary_base=1e6,
        untie_embeddings_and_output_weights=True,
        add_qkv_bias=True,
        norm_epsilon=1e-6,
        mrope_section=(16, 24, 24),
    )
    model.encoder = encoder_defaults("qwen2_5_vit")
    model.encoder.update(
        num_layers=32,
        hidden_size=1280,
        ffn_hidden_size=3456,
        num_attention_heads=16,
        kv_channels=80,
        patch_size=14,
        temporal_patch_size=2,
        spatial_merge_size=2,
        window_size=112,
        fullatt_block_indexes=(7, 15, 23, 31),
        norm_epsilon=1e-6,
        rotary_base=1e4,
    )
    return model
