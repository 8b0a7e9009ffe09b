"""Llama 3.1 70B: the config.json of meta-llama/Llama-3.1-70B (arXiv:2407.21783)."""

from ml_collections import ConfigDict

from jaxforge.config import default_config


def get_config() -> ConfigDict:
    """The architecture, for `config.model`."""
    model = default_config().model
    model.decoder.update(
        num_layers=80,
        hidden_size=8192,
        ffn_hidden_size=28672,
        num_attention_heads=64,
        num_query_groups=8,
        kv_channels=128,
        vocab_size=128256,
        rotary_base=5e5,
        untie_embeddings_and_output_weights=True,
        norm_epsilon=1e-5,
        use_rope_scaling=True,
        rope_scaling_factor=8.0,
        rope_scaling_low_freq_factor=1.0,
        rope_scaling_high_freq_factor=4.0,
        rope_scaling_original_max_position_embeddings=8192,
    )
    return model
