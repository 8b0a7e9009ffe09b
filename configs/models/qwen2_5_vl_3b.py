"""Qwen2.5-VL 3B: the config.json of Qwen/Qwen2.5-VL-3B-Instruct (arXiv:2502.13923)."""

from ml_collections import ConfigDict

from jaxforge.config import default_config, encoder_defaults


def get_config() -> ConfigDict:
    """The architecture, for `config.model`."""
    model = default_config().model
    model.decoder.update(
        num_layers=36,
        hidden_size=2048,
        ffn_hidden_size=11008,
        num_attention_heads=16,
        num_query_groups=2,
        kv_channels=128,
        vocab_size=151936,
        rotary_base=1e6,
        untie_embeddings_and_output_weights=False,
        add_qkv_bias=True,
        norm_epsilon=1e-6,
        mrope_section=(16, 24, 24),
    )
    model.encoder = encoder_defaults("qwen2_5_vit")
    model.encoder.update(
        num_layers=32,
        hidden_size=1280,
        ffn_hidden_size=3420,
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
