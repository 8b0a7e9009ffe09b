"""Qwen2.5-VL: Qwen2's decoder, a ViT with a gated feed-forward, and one patch merger."""

from jaxforge.checkpoint.hf import qwen2
from jaxforge.checkpoint.hf.tensors import Fused, Linear, PatchConvolution, Tensor, Vector
from jaxforge.config.model_schema import EncoderConfig, ModelConfig

# as published, and as transformers 4.52 and later hold and sometimes save them
PREFIXES = (
    {"decoder": "model.", "encoder": "visual."},
    {"decoder": "model.language_model.", "encoder": "model.visual."},
)


def tensors(model: ModelConfig, prefixes: dict[str, str]) -> list[Tensor]:
    assert model.encoder is not None
    there, merger = prefixes["encoder"], "projector/merger/"
    layer, ours = f"{there}blocks.{{}}.", "encoder/layers/"
    return [
        *qwen2.tensors(model, prefixes),
        *attention_tensors(layer, ours, model.encoder, there),
        Vector(f"{layer}norm1.weight", f"{ours}attention_norm/scale"),
        Vector(f"{layer}norm2.weight", f"{ours}mlp_norm/scale"),
        Linear(f"{layer}mlp.gate_proj.weight", f"{ours}mlp/gate_DF"),
        Vector(f"{layer}mlp.gate_proj.bias", f"{ours}mlp/gate_bias_F"),
        Linear(f"{layer}mlp.up_proj.weight", f"{ours}mlp/up_DF"),
        Vector(f"{layer}mlp.up_proj.bias", f"{ours}mlp/up_bias_F"),
        Linear(f"{layer}mlp.down_proj.weight", f"{ours}mlp/down_FE"),
        Vector(f"{layer}mlp.down_proj.bias", f"{ours}mlp/down_bias_E"),
        Vector(f"{there}merger.ln_q.weight", f"{merger}norm/scale"),
        Linear(f"{there}merger.mlp.0.weight", f"{merger}mlp/up_DF"),
        Vector(f"{there}merger.mlp.0.bias", f"{merger}mlp/up_bias_F"),
        Linear(f"{there}merger.mlp.2.weight", f"{merger}mlp/down_FE"),
        Vector(f"{there}merger.mlp.2.bias", f"{merger}mlp/down_bias_E"),
    ]


def attention_tensors(layer: str, ours: str, encoder: EncoderConfig, there: str) -> list[Tensor]:
    """What the ViTs of both VL families share: patch embedding, and attention with fused query, key and value."""
    patch = (encoder.in_channels, encoder.temporal_patch_size, encoder.patch_size, encoder.patch_size)
    # heads are H in the queries' names and G in those of keys and values
    weights, biases = ("query_DHK", "key_DGK", "value_DGK"), ("query_bias_HK", "key_bias_GK", "value_bias_GK")
    return [
        PatchConvolution(f"{there}patch_embed.proj.weight", "encoder/patch_CD", patch=patch),
        Fused(f"{layer}attn.qkv.weight", f"{ours}attention/{{part}}", parts=weights, of=Linear),
        Fused(f"{layer}attn.qkv.bias", f"{ours}attention/{{part}}", parts=biases, of=Vector),
        Linear(f"{layer}attn.proj.weight", f"{ours}attention/out_HKD", num_inputs=2),
        Vector(f"{layer}attn.proj.bias", f"{ours}attention/out_bias_D"),
    ]
