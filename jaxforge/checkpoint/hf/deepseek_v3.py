"""DeepSeek-V3: latent attention, experts with a selection bias beside shared ones, and multi-token prediction."""

from jaxforge.checkpoint.hf import experts, llama, multi_token
from jaxforge.checkpoint.hf.tensors import Linear, RotaryLinear, Tensor, Vector
from jaxforge.config.model_schema import DecoderConfig, ModelConfig

PREFIXES = llama.PREFIXES
PUBLISHED_EXPERTS = experts.SEPARATE


def tensors(model: ModelConfig, prefixes: dict[str, str], layout: str = PUBLISHED_EXPERTS) -> list[Tensor]:
    layer, ours = f"{prefixes['decoder']}layers.{{}}.", "decoder/layers/"
    there, here, layers = f"{layer}mlp.", f"{ours}moe/", experts.layers_with_experts(model.decoder)
    return [
        *llama.around_attention(model, prefixes),
        *_latent_attention(model.decoder, f"{layer}self_attn.", f"{ours}attention/"),
        *experts.tensors(model.decoder, there, here, layout),
        # published in fp32 beside weights of bfloat16, which would round away what a step adds
        Vector(f"{there}gate.e_score_correction_bias", f"{here}expert_bias_E", layers=layers, dtype="float32"),
        *llama.feed_forward(f"{there}shared_experts.", f"{here}shared/", layers),
        *multi_token.tensors(model, prefixes),
    ]


def _latent_attention(decoder: DecoderConfig, there: str, here: str) -> list[Tensor]:
    rotary = decoder.qk_pos_emb_head_dim
    queries: list[Tensor] = [RotaryLinear(f"{there}q_proj.weight", f"{here}query_DHK", num_rotary=rotary)]
    if decoder.q_lora_rank is not None:
        queries = [
            Linear(f"{there}q_a_proj.weight", f"{here}query_down_DR"),
            Vector(f"{there}q_a_layernorm.weight", f"{here}query_norm/scale"),
            RotaryLinear(f"{there}q_b_proj.weight", f"{here}query_up_RHK", num_rotary=rotary),
        ]
    return [
        *queries,
        RotaryLinear(f"{there}kv_a_proj_with_mqa.weight", f"{here}kv_down_DR", num_rotary=rotary),
        Vector(f"{there}kv_a_layernorm.weight", f"{here}kv_norm/scale"),
        Linear(f"{there}kv_b_proj.weight", f"{here}kv_up_RHK"),
        Linear(f"{there}o_proj.weight", f"{here}out_HVD", num_inputs=2),
    ]
