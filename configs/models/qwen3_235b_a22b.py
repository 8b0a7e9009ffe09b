"""Qwen3 235B-A22B: the config.json of Qwen/Qwen3-235B-A22B (arXiv:2505.09388)."""

from ml_collections import ConfigDict

from jaxforge.config import default_config


def get_config() -> ConfigDict:
    """The architecture, for `config.model`."""
    model = default_config().model
    model.decoder.update(
        num_layers=94,
        hidden_size=4096,
        ffn_hidden_size=12288,
        num_attention_heads=64,
        num_query_groups=4,
        kv_channels=128,
        vocab_size=151936,
        rotary_base=1e6,
        untie_embeddings_and_output_weights=True,
        qk_layernorm=True,
        norm_epsilon=1e-6,
        num_experts=128,
        moe_router_topk=8,
        moe_ffn_hidden_size=1536,
    )
    return model
