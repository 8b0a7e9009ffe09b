"""Qwen3 30B-A3B: the config.json of Qwen/Qwen3-30B-A3B (arXiv:2505.09388)."""

from ml_collections import ConfigDict

from jaxforge.config import default_config


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
        rotary_base=1e6,
        untie_embeddings_and_output_weights=True,
        qk_layernorm=True,
        norm_epsilon=1e-6,
        num_experts=128,
        moe_router_topk=8,
        moe_ffn_hidden_size=768,
    )
    return model
