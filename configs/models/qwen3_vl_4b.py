"""Qwen3-VL 4B: the config.json of Qwen/Qwen3-VL-4B-Instruct (arXiv:2511.21631)."""

from ml_collections import ConfigDict

from jaxforge.config import default_config, encoder_defaults


def get_config() -> ConfigDict:
    """The architecture, for `config.model`."""
    model = default_config().model
    model.decoder.update(
        num_layers=36,
        hidden_size=2560,
        ffn_hidden_size=9728,
        num_attention_heads=32,
        num_query_groups=8,
        kv_channels=128,
        vocab_size=151936,
        rotary_base=5e6,
        untie_embeddings_and_output_weights=False,
        qk_layernorm=True,
        norm_epsilon=1e-6,
        mrope_section=(24, 20, 20),
        mrope_interleaved=True,
    )
    model.encoder = encoder_defaults("qwen3_vit")
    model.encoder.update(
        num_layers=24,
        hidden_size=1024,
        ffn_hidden_size=4096,
        num_attention_heads=16,
        kv_channels=64,
        patch_size=16,
        temporal_patch_size=2,
        spatial_merge_size=2,
        num_position_embeddings=2304,
        deepstack_visual_indexes=(5, 11, 17),
        norm_epsilon=1e-6,
        rotary_base=1e4,
    )
    return model
