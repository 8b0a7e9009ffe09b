"""Qwen3 4B: the config.json of Qwen/Qwen3-4B (arXiv:2505.09388)."""

from ml_collections import ConfigDict

from jaxforge.config import default_config


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
        rotary_base=1e6,
        untie_embeddings_and_output_weights=False,
        qk_layernorm=True,
        norm_epsilon=1e-6,
    )
    return model
