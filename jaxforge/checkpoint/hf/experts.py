"""Mixtures of experts: how the families store a router and its experts."""

from jaxforge.checkpoint.hf.tensors import AllExperts, Expert, Linear, Tensor
from jaxforge.config.derived import stacked_layer_has_experts
from jaxforge.config.model_schema import DecoderConfig

# A tensor for each expert, as most families are published; or all experts in one, as Qwen3-VL is published, and as
# transformers 5 holds and sometimes saves them.
SEPARATE, TOGETHER, TOGETHER_TRANSPOSED = "separate", "together", "together, transposed"
LAYOUTS = (SEPARATE, TOGETHER, TOGETHER_TRANSPOSED)
_GATE, _UP, _DOWN = "gate_EDF", "up_EDF", "down_EFD"


def layers_with_experts(decoder: DecoderConfig) -> tuple[int, ...]:
    """Their numbers among all layers, those for multi-token prediction among them."""
    return tuple(number for number, has_experts in enumerate(stacked_layer_has_experts(decoder)) if has_experts)


def tensors(decoder: DecoderConfig, there: str, here: str, layout: str) -> list[Tensor]:
    """Router and experts; `there` and `here` are the prefixes of a layer's feed-forward."""
    layers, num_experts = layers_with_experts(decoder), decoder.num_experts
    assert num_experts is not None
    router: list[Tensor] = [Linear(f"{there}gate.weight", f"{here}router_DE", layers=layers)]
    if layout == SEPARATE:
        names = {"gate_proj": _GATE, "up_proj": _UP, "down_proj": _DOWN}
        return router + [
            Expert(f"{there}experts.{number}.{name}.weight", f"{here}{ours}", number=number, layers=layers)
            for name, ours in names.items()
            for number in range(num_experts)
        ]
    path, transposed = f"{here}{{part}}", layout == TOGETHER_TRANSPOSED
    return router + [
        AllExperts(f"{there}experts.{name}", path, parts=parts, transposed=transposed, layers=layers)
        for name, parts in {"gate_up_proj": (_GATE, _UP), "down_proj": (_DOWN,)}.items()
    ]
