"""Qwen3-VL with experts: Qwen3-VL's map, with a router and experts in the place of a feed-forward."""

from jaxforge.checkpoint.hf import experts, qwen3_vl
from jaxforge.checkpoint.hf.tensors import Tensor
from jaxforge.config.model_schema import ModelConfig

PREFIXES = qwen3_vl.PREFIXES
PUBLISHED_EXPERTS = experts.TOGETHER


def tensors(model: ModelConfig, prefixes: dict[str, str], layout: str = PUBLISHED_EXPERTS) -> list[Tensor]:
    there, here = f"{prefixes['decoder']}layers.{{}}.mlp.", "decoder/layers/moe/"
    return [*qwen3_vl.tensors(model, prefixes), *experts.tensors(model.decoder, there, here, layout)]
