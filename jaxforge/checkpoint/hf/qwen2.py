"""Qwen2 and Qwen2.5: Llama's map, with biases on query, key and value."""

from jaxforge.checkpoint.hf import llama
from jaxforge.checkpoint.hf.tensors import Tensor, Vector
from jaxforge.config.model_schema import ModelConfig

PREFIXES = llama.PREFIXES


def tensors(model: ModelConfig, prefixes: dict[str, str]) -> list[Tensor]:
    layer, ours = f"{prefixes['decoder']}layers.{{}}.self_attn.", "decoder/layers/attention/"
    return [
        *llama.tensors(model, prefixes),
        Vector(f"{layer}q_proj.bias", f"{ours}query_bias_HK"),
        Vector(f"{layer}k_proj.bias", f"{ours}key_bias_GK"),
        Vector(f"{layer}v_proj.bias", f"{ours}value_bias_GK"),
    ]
