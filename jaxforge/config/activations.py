"""The activations of a layer by name, and what a config does with each of them: save, recompute or offload.

A name stands for what a backward pass reads; `docs/memory.md` says what each is.  Modules are Megatron's words, each
for some of these names: a module that is recomputed gives up what it computes, and one that is offloaded has its input
moved to host memory.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from jaxforge.config.derived import layer_has_experts
from jaxforge.config.schema import Config, DecoderConfig, EncoderConfig

SAVE, RECOMPUTE, OFFLOAD = ACTIONS = ("save", "recompute", "offload")
# What a layer, or a group of layers that is recomputed together, reads: where recomputing starts, so always kept.
LAYER_INPUT = "layer_input"

_SHARED = ("shared_gate", "shared_up", "shared_act")
RECOMPUTE_MODULES = {
    "core_attn": ("core_attn",),
    "mla_up_proj": ("query", "key", "value"),
    "mlp": ("mlp_gate", "mlp_up", "mlp_act"),
    "layernorm": ("attn_norm", "mlp_norm"),
    "moe": ("router", "dispatched_input", "expert_fc1", "moe_act", *_SHARED),
    "moe_act": ("moe_act",),
    "routed_experts": ("expert_fc1", "moe_act"),
    "shared_experts": _SHARED,
    # what may be computed again while tokens are on their way
    "a2a_overlap_attn": ("attn_norm", "query_compressed", "kv_compressed", "query", "key", "value", "core_attn"),
    "a2a_overlap_post_attn": ("mlp_norm", "router"),
    "a2a_overlap_mlp": ("expert_fc1", "moe_act", *_SHARED),
}
OFFLOAD_MODULES = {
    "attn_norm": (LAYER_INPUT,),
    "core_attn": ("query", "key", "value"),
    "attn_proj": ("core_attn",),
    "mlp_norm": ("mlp_norm_input",),
    "expert_fc1": ("dispatched_input",),
    "moe_act": ("expert_fc1",),
}
OFFLOAD_TENSORS = {"pre_mlp_layernorm_output": ("mlp_norm",), "dispatched_input": ("dispatched_input",)}
# The field that gives layers what a module is of.
_BROUGHT_BY = {
    **dict.fromkeys(("moe", "moe_act", "routed_experts", "a2a_overlap_mlp"), "model.decoder.num_experts"),
    "shared_experts": "model.decoder.moe_shared_expert_intermediate_size",
    "mlp": "a dense layer in model.decoder.moe_layer_freq",
}
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
    feed_forward: tuple[str, ...] = ("mlp_gate", "mlp_up", "mlp_act") if is_gated else ("mlp_up", "mlp_act")
    if isinstance(layer, DecoderConfig) and any(has_experts := layer_has_experts(layer)):
        dense = () if all(has_experts) else feed_forward
        shared = _SHARED if layer.moe_shared_expert_intermediate_size else ()
        feed_forward = (*dense, "router", "dispatched_input", "expert_fc1", "moe_act", *shared)
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


def absent_modules(config: Config, part: str) -> dict[str, str]:
    """Of the words of `recompute_modules`, those for what the part's layers don't have, with what would bring it."""
    layer, existing = _layer(config, part), layer_activations(config, part)
    absent = {}
    if not (isinstance(layer, DecoderConfig) and layer.multi_latent_attention):
        absent["mla_up_proj"] = "model.decoder.multi_latent_attention"
    for module, names in RECOMPUTE_MODULES.items():
        if not set(names) & set(existing):
            absent[module] = _BROUGHT_BY[module]
    if part == "encoder" or not config.parallel.overlap_moe_expert_parallel_comm:
        of_overlap = (module for module in RECOMPUTE_MODULES if "a2a" in module)
        absent |= dict.fromkeys(of_overlap, "parallel.overlap_moe_expert_parallel_comm")
    return absent


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
