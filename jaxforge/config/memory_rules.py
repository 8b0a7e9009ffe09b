"""Rules on recompute and offload: each yields a message for each way in which the config breaks it."""

import itertools
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from jaxforge.config.activations import (
    ACTIONS,
    FULL,
    LAYER_INPUT,
    OFFLOAD,
    OFFLOAD_MODULES,
    OFFLOAD_TENSORS,
    RECOMPUTE,
    RECOMPUTE_MODULES,
    SAVE,
    SELECTIVE,
    Decision,
    absent_modules,
    decisions,
    layer_activations,
    model_parts,
    recompute_group,
)
from jaxforge.config.lora_rules import has_adapters
from jaxforge.config.model_rules import divisors, one_of
from jaxforge.config.patterns import takes_all, takes_some
from jaxforge.config.schema import Config, EncoderConfig
from jaxforge.config.values import close_names


def recompute_is_whole(config: Config) -> Iterator[str]:
    """Megatron's rules: full needs a method and a number of layers, selective forbids both, and has modules alone.

    Groups of uniform never span stages of a pipeline; there the last group of a stage may be smaller.
    """
    for part in model_parts(config):
        group, path = recompute_group(config, part)
        granularity = group.recompute_granularity
        needs = {"recompute_method": FULL, "recompute_num_layers": FULL, "recompute_modules": SELECTIVE}
        for name, needed in needs.items():
            value = getattr(group, name)
            if value not in (None, ()) and granularity != needed:
                yield (
                    f"{path}.{name}={value} would have no effect, because {path}.recompute_granularity is"
                    f" {granularity}; set that to {needed} or {name} to {() if needed == SELECTIVE else None}"
                )
        absent = absent_modules(config, part)
        yield from _known(group.recompute_modules, f"{path}.recompute_modules", RECOMPUTE_MODULES, absent)
        if granularity == FULL:
            num_layers = getattr(config.model, part).num_layers
            has_stages = part == "decoder" and config.parallel.pipeline_model_parallel_size > 1
            yield from _full_recompute(group, path, num_layers, f"model.{part}", has_stages)


def _full_recompute(group: Any, path: str, layers: int, model: str, has_stages: bool) -> Iterator[str]:
    method, number = group.recompute_method, group.recompute_num_layers
    if method is None:
        yield f"{path}.recompute_granularity=full needs {path}.recompute_method; use uniform or block"
    if number is None:
        yield f"{path}.recompute_granularity=full needs {path}.recompute_num_layers; 1 saves the most memory"
    elif method == "uniform" and layers % number and not has_stages:
        yield (
            f"{path}.recompute_num_layers={number} does not divide {model}.num_layers={layers}, which"
            f" {path}.recompute_method=uniform needs; use {one_of(divisors(layers))}"
        )
    elif number > layers:
        yield f"{path}.recompute_num_layers={number} is more than {model}.num_layers={layers}; use at most {layers}"


def offloading_is_whole(config: Config) -> Iterator[str]:
    """The switch and what it moves go together."""
    memory, existing = config.memory, layer_activations(config, "decoder")
    is_on, has_any = memory.fine_grained_activation_offloading, memory.offload_modules or memory.offload_tensors
    tables: dict[str, Mapping[str, tuple[str, ...]]]
    tables = {"offload_modules": OFFLOAD_MODULES, "offload_tensors": OFFLOAD_TENSORS}
    absent = {
        word: "model.decoder.num_experts"
        for table in tables.values()
        for word, names in table.items()
        if not set(names) & set(existing)
    }
    for name in tables:
        value = getattr(memory, name)
        if value and not is_on:
            yield (
                f"memory.{name}={value} would have no effect with memory.fine_grained_activation_offloading=False; set"
                f" that to true, or {name} to ()"
            )
    if is_on and not has_any:
        known = {name: ", ".join(word for word in table if word not in absent) for name, table in tables.items()}
        yield (
            "memory.fine_grained_activation_offloading=True moves nothing; name something in memory.offload_modules"
            f" ({known['offload_modules']}) or memory.offload_tensors ({known['offload_tensors']})"
        )
    for name, table in tables.items():
        yield from _known(getattr(memory, name), f"memory.{name}", table, absent)


def _known(words: tuple[str, ...], field: str, table: Collection[str], absent: Mapping[str, str]) -> Iterator[str]:
    known = [word for word in table if word not in absent]
    for word in words:
        if word in absent:
            yield (
                f"{field} has {word}, which comes with {absent[word]}, and these layers don't have it; use"
                f" {', '.join(known)}"
            )
        elif word not in known:
            yield f"{field} has {word!r}, which is none of {', '.join(known)}{close_names(word, known)}"
        elif words.count(word) > 1:
            yield f"{field}={words} names {word} more than once; once is enough"


def activations_are_known(config: Config) -> Iterator[str]:
    """Each pair of `activations` names an activation that the layers have, once, and one of the three actions."""
    for part in model_parts(config):
        group, path = recompute_group(config, part)
        existing, names = layer_activations(config, part), [name for name, _ in group.activations]
        for name, action in group.activations:
            if name not in existing:
                yield (
                    f"{path}.activations has {name!r}, which the {part}'s layers don't have; they have"
                    f" {', '.join(existing)}"
                )
            if action not in ACTIONS:
                yield f"{path}.activations has the action {action!r} for {name}; use {', '.join(ACTIONS)}"
            if names.count(name) > 1:
                yield f"{path}.activations names {name} more than once; leave all but one out"
            if name == LAYER_INPUT and action == RECOMPUTE:
                yield (
                    f"{path}.activations recomputes {LAYER_INPUT}, from which everything else is recomputed; save or"
                    " offload it"
                )


def activations_are_decided_once(config: Config) -> Iterator[str]:
    """Two fields don't ask for the same of an activation, nor for different things; save overrides a module's word."""
    for part in model_parts(config):
        by_name = sorted(decisions(config, part), key=lambda decision: decision.activation)
        for name, group in itertools.groupby(by_name, lambda decision: decision.activation):
            first, *others = sorted(group, key=lambda decision: decision.action == SAVE)
            if first.action == SAVE:
                yield f"{first.field} saves {name}, which nothing recomputes or offloads; leave ({first.entry}) out"
            for other in others:
                if other.action != SAVE:
                    yield _decided_twice(first, other)


def _decided_twice(first: Decision, other: Decision) -> str:
    if first.action == other.action:
        return f"{first}, and so does {other.field} ({other.entry}); leave one of them out"
    return f"{first}, but {other}; an activation is either recomputed or in host memory, so leave one of them out"


def full_recompute_keeps_only_its_input(config: Config) -> Iterator[str]:
    """Inside of layers that are recomputed nothing is kept; with a pipeline, `stage_units` knows which are."""
    for part in model_parts(config):
        group, path = recompute_group(config, part)
        layers = getattr(config.model, part).num_layers
        recomputes_all = group.recompute_method == "uniform" or group.recompute_num_layers == layers
        if group.recompute_granularity == FULL and recomputes_all:
            yield from decisions_inside_of_recomputed_layers(config, part)


def decisions_inside_of_recomputed_layers(config: Config, part: str) -> Iterator[str]:
    """Why activations other than the input can't be decided on, where every layer is recomputed."""
    _, path = recompute_group(config, part)
    for decision in decisions(config, part):
        if decision.activation != LAYER_INPUT:
            yield (
                f"{decision} inside of layers, but {path}.recompute_granularity=full recomputes all of every layer"
                f" from its input; leave it out, or use selective or None with {path}.activations"
            )


def a_smallest_size_has_something_to_select(config: Config) -> Iterator[str]:
    """A size below which activations don't move needs some that would; what they measure is known to the program."""
    size = config.memory.min_offloaded_tensor_size
    offloads = any(decision.action == OFFLOAD for part in model_parts(config) for decision in decisions(config, part))
    if size is not None and not offloads:
        yield (
            f"memory.min_offloaded_tensor_size={size} would have no effect, because no activation is offloaded; leave"
            " it at None"
        )


def encoder_has_a_backward_pass(config: Config) -> Iterator[str]:
    """Nothing is kept of an encoder in which nothing trains, so nothing can be recomputed or moved."""
    encoder = config.model.encoder
    if encoder is None:
        return
    if has_adapters(config.lora):
        trains = config.lora.encoder.rank > 0 or takes_some(config.lora.train_also, "encoder")
    else:
        trains = not takes_all(config.optimizer.freeze, "encoder")
    for name in ("recompute_granularity", "activations"):
        value = getattr(encoder, name)
        if value and not trains:
            yield (
                f"model.encoder.{name}={value} would have no effect, because nothing in the encoder trains, so that it"
                f" has no backward pass; leave it at {getattr(EncoderConfig, name)}"
            )


MEMORY_RULES = (
    encoder_has_a_backward_pass,
    recompute_is_whole,
    offloading_is_whole,
    activations_are_known,
    activations_are_decided_once,
    full_recompute_keeps_only_its_input,
    a_smallest_size_has_something_to_select,
)
