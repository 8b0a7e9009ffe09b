"""Qwen3 with experts: Qwen3's map, with a router and experts in the place of a feed-forward."""

from jaxforge.checkpoint.hf import experts, qwen3
from jaxforge.checkpoint.hf.tensors import Tensor
from jaxforge.config.model_schema import ModelConfig

PREFIXES = qwen3.PREFIXES
PUBLISHED_EXPERTS = experts.SEPARATE


def tensors(model: ModelConfig, prefixes: dict[str, str], layout: str = PUBLISHED_EXPERTS) -> list[Tensor]:
    there, here = f"{prefixes['decoder']}layers.{{}}.mlp.", "decoder/layers/moe/"
    return [*qwen3.tensors(model, prefixes), *experts.tensors(model.decoder, there, here, layout)]
