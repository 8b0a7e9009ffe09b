"""Llama 3: the decoder's map, which the Qwen families extend."""

from jaxforge.checkpoint.hf.tensors import Linear, Tensor, Vector, Vocabulary
from jaxforge.config.model_schema import ModelConfig

PREFIXES = ({"decoder": "model."},)


def tensors(model: ModelConfig, prefixes: dict[str, str]) -> list[Tensor]:
    there, here = prefixes["decoder"], "decoder/"
    layer, ours = f"{there}layers.{{}}.", f"{here}layers/"
    rows = model.decoder.vocab_size
    found: list[Tensor] = [
        Vocabulary(f"{there}embed_tokens.weight", f"{here}embedding_VD", num_rows=rows),
        Vector(f"{layer}input_layernorm.weight", f"{ours}attention_norm/scale"),
        Linear(f"{layer}self_attn.q_proj.weight", f"{ours}attention/query_DHK"),
        Linear(f"{layer}self_attn.k_proj.weight", f"{ours}attention/key_DGK"),
        Linear(f"{layer}self_attn.v_proj.weight", f"{ours}attention/value_DGK"),
        Linear(f"{layer}self_attn.o_proj.weight", f"{ours}attention/out_HKD", num_inputs=2),
        Vector(f"{layer}post_attention_layernorm.weight", f"{ours}mlp_norm/scale"),
        Linear(f"{layer}mlp.gate_proj.weight", f"{ours}mlp/gate_DF"),
        Linear(f"{layer}mlp.up_proj.weight", f"{ours}mlp/up_DF"),
        Linear(f"{layer}mlp.down_proj.weight", f"{ours}mlp/down_FE"),
        Vector(f"{there}norm.weight", f"{here}final_norm/scale"),
    ]
    if model.decoder.untie_embeddings_and_output_weights:
        found.append(Vocabulary("lm_head.weight", f"{here}head_VD", num_rows=rows))
    return found
