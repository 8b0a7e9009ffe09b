"""Qwen3: Llama's map, with norms on query and key heads."""

from jaxforge.checkpoint.hf import llama
from jaxforge.checkpoint.hf.tensors import Tensor, Vector
from jaxforge.config.model_schema import ModelConfig

PREFIXES = llama.PREFIXES


def tensors(model: ModelConfig, prefixes: dict[str, str]) -> list[Tensor]:
    layer, ours = f"{prefixes['decoder']}layers.{{}}.self_attn.", "decoder/layers/attention/"
    return [
        *llama.tensors(model, prefixes),
        Vector(f"{layer}q_norm.weight", f"{ours}query_norm/scale"),
        Vector(f"{layer}k_norm.weight", f"{ours}key_norm/scale"),
    ]
