"""DeepSeek-V3: the config.json of deepseek-ai/DeepSeek-V3 (arXiv:2412.19437)."""

from ml_collections import ConfigDict

from jaxforge.config import default_config


def get_config() -> ConfigDict:
    """The architecture, for `config.model`."""
    model = default_config().model
    model.decoder.update(
        num_layers=61,
        hidden_size=7168,
        ffn_hidden_size=18432,
        num_attention_heads=128,
        vocab_size=129280,
        rotary_base=1e4,
        untie_embeddings_and_output_weights=True,
        mtp_num_layers=1,
        norm_epsilon=1e-6,
        multi_latent_attention=True,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_head_dim=128,
        qk_pos_emb_head_dim=64,
        v_head_dim=128,
        rope_type="yarn",
        rotary_scaling_factor=40.0,
        original_max_position_embeddings=4096,
        beta_fast=32.0,
        beta_slow=1.0,
        mscale=1.0,
        mscale_all_dim=1.0,
        num_experts=256,
        moe_router_topk=8,
        moe_ffn_hidden_size=2048,
        moe_shared_expert_intermediate_size=2048,
        moe_layer_freq=3 * (0,) + 58 * (1,),
        moe_router_score_function="sigmoid",
        moe_router_num_groups=8,
        moe_router_group_topk=4,
        moe_router_topk_scaling_factor=2.5,
        moe_router_enable_expert_bias=True,
    )
    return model
