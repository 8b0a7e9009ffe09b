"""Llama 3: the decoder's map, which the Qwen families extend."""

from jaxforge.checkpoint.hf.tensors import Linear, Tensor, Vector, Vocabulary
from jaxforge.config.derived import stacked_layer_has_experts
from jaxforge.config.model_schema import ModelConfig

PREFIXES = ({"decoder": "model."},)


def tensors(model: ModelConfig, prefixes: dict[str, str]) -> list[Tensor]:
    layer, ours = f"{prefixes['decoder']}layers.{{}}.self_attn.", "decoder/layers/attention/"
    return [
        *around_attention(model, prefixes),
        Linear(f"{layer}q_proj.weight", f"{ours}query_DHK"),
        Linear(f"{layer}k_proj.weight", f"{ours}key_DGK"),
        Linear(f"{layer}v_proj.weight", f"{ours}value_DGK"),
        Linear(f"{layer}o_proj.weight", f"{ours}out_HKD", num_inputs=2),
    ]


def around_attention(model: ModelConfig, prefixes: dict[str, str]) -> list[Tensor]:
    """Embedding and head, norms, and the feed-forward of those layers that have no experts."""
    there, here = prefixes["decoder"], "decoder/"
    layer, ours = f"{there}layers.{{}}.", f"{here}layers/"
    rows = model.decoder.vocab_size
    has_experts = stacked_layer_has_experts(model.decoder)
    dense = tuple(number for number, has in enumerate(has_experts) if not has)
    found: list[Tensor] = [
        Vocabulary(f"{there}embed_tokens.weight", f"{here}embedding_VD", num_rows=rows),
        Vector(f"{layer}input_layernorm.weight", f"{ours}attention_norm/scale"),
        Vector(f"{layer}post_attention_layernorm.weight", f"{ours}mlp_norm/scale"),
        *(feed_forward(f"{layer}mlp.", f"{ours}mlp/", dense) if dense else ()),
        Vector(f"{there}norm.weight", f"{here}final_norm/scale"),
    ]
    if model.decoder.untie_embeddings_and_output_weights:
        found.append(Vocabulary("lm_head.weight", f"{here}head_VD", num_rows=rows))
    return found


def feed_forward(there: str, here: str, layers: tuple[int, ...]) -> list[Tensor]:
    """A gated feed-forward without biases, of the layers that have these numbers."""
    return [
        Linear(f"{there}gate_proj.weight", f"{here}gate_DF", layers=layers),
        Linear(f"{there}up_proj.weight", f"{here}up_DF", layers=layers),
        Linear(f"{there}down_proj.weight", f"{here}down_FE", layers=layers),
    ]
