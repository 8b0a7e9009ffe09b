"""The activations of a layer by name, and what a config does with each of them: save, recompute or offload.

A name stands for what a backward pass reads; `docs/memory.md` says what each is.  Modules are Megatron's words, each
for some of these names: a module that is recomputed gives up what it computes, and one that is offloaded has its input
moved to host memory.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from jaxforge.config.schema import Config, DecoderConfig, EncoderConfig

SAVE, RECOMPUTE, OFFLOAD = ACTIONS = ("save", "recompute", "offload")
# What a layer, or a group of layers that is recomputed together, reads: where recomputing starts, so always kept.
LAYER_INPUT = "layer_input"

RECOMPUTE_MODULES = {
    "core_attn": ("core_attn",),
    "mla_up_proj": ("query", "key", "value"),
    "mlp": ("mlp_gate", "mlp_up", "mlp_act"),
    "layernorm": ("attn_norm", "mlp_norm"),
}
OFFLOAD_MODULES = {
    "attn_norm": (LAYER_INPUT,),
    "core_attn": ("query", "key", "value"),
    "attn_proj": ("core_attn",),
    "mlp_norm": ("mlp_norm_input",),
}
OFFLOAD_TENSORS = {"pre_mlp_layernorm_output": ("mlp_norm",)}
DEFAULT_RECOMPUTE_MODULES = ("core_attn",)
FULL, SELECTIVE = "full", "selective"


class Decision(NamedTuple):
    """What one entry of a field says of one activation."""

    field: str
    entry: str
    activation: str
    action: str

    def __str__(self) -> str:
        return f"{self.field} ({self.entry}) {self.action}s {self.activation}"


def model_parts(config: Config) -> tuple[str, ...]:
    """The parts of the model whose layers have settings of their own."""
    return ("decoder",) if config.model.encoder is None else ("decoder", "encoder")


def layer_activations(config: Config, part: str) -> tuple[str, ...]:
    """The names of a layer's activations in the order in which they are computed; `part` is decoder or encoder."""
    layer = _layer(config, part)
    is_gated = not isinstance(layer, EncoderConfig) or layer.swiglu
    feed_forward = ("mlp_gate", "mlp_up", "mlp_act") if is_gated else ("mlp_up", "mlp_act")
    has_dropout = isinstance(layer, DecoderConfig) and layer.hidden_dropout > 0
    compressed: tuple[str, ...] = ()
    if isinstance(layer, DecoderConfig) and layer.multi_latent_attention:
        compressed = ("kv_compressed",) if layer.q_lora_rank is None else ("query_compressed", "kv_compressed")
    return (
        LAYER_INPUT, "attn_norm", *compressed, "query", "key", "value", "core_attn", "mlp_norm_input", "mlp_norm",
        *feed_forward,
        *(("dropout",) if has_dropout else ()),
        *(("adapter",) if getattr(config.lora, part).rank else ()),
    )  # fmt: skip


def recompute_modules(config: Config, part: str) -> tuple[str, ...]:
    """The words of `recompute_modules` that the part's layers know."""
    layer = _layer(config, part)
    is_latent = isinstance(layer, DecoderConfig) and layer.multi_latent_attention
    return tuple(module for module in RECOMPUTE_MODULES if module != "mla_up_proj" or is_latent)


def layer_actions(config: Config, part: str) -> dict[str, str]:
    """The activations of a layer that aren't just saved: name -> recompute or offload.

    Of layers that full recompute leaves out; `activations` has the last word.
    """
    decided = {decision.activation: decision.action for decision in decisions(config, part)}
    return {name: action for name, action in decided.items() if action != SAVE}


def decisions(config: Config, part: str) -> Iterator[Decision]:
    """What the fields say of activations, from modules to single ones; names that the layer lacks are left out.

    Of a config whose words are known; two decisions on one activation may disagree.
    """
    existing = layer_activations(config, part)
    for decision in _by_module(config, part):
        if decision.activation in existing:
            yield decision
    group, path = recompute_group(config, part)
    for name, action in group.activations:
        yield Decision(f"{path}.activations", f"{name}, {action}", name, action)


def recompute_group(config: Config, part: str) -> tuple[Any, str]:
    """The group with the part's `recompute_*` fields and `activations`, and its path."""
    return (config.memory, "memory") if part == "decoder" else (config.model.encoder, "model.encoder")


def _by_module(config: Config, part: str) -> Iterator[Decision]:
    group, path = recompute_group(config, part)
    if group.recompute_granularity == SELECTIVE:
        for module in group.recompute_modules or DEFAULT_RECOMPUTE_MODULES:
            for name in RECOMPUTE_MODULES[module]:
                yield Decision(f"{path}.recompute_modules", module, name, RECOMPUTE)
    if part == "decoder" and config.memory.fine_grained_activation_offloading:
        for field, known in (("offload_modules", OFFLOAD_MODULES), ("offload_tensors", OFFLOAD_TENSORS)):
            for entry in getattr(config.memory, field):
                for name in known[entry]:
                    yield Decision(f"memory.{field}", entry, name, OFFLOAD)


def _layer(config: Config, part: str) -> DecoderConfig | EncoderConfig:
    layer = getattr(config.model, part)
    assert layer is not None
    return layer
