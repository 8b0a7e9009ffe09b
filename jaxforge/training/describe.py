"""A run in words: what runs where, what it holds, what an evaluation found, and what has changed since a checkpoint."""

from collections.abc import Iterator
from typing import Any

import jax

from jaxforge.cluster import MeshLayout, describe
from jaxforge.config import Config
from jaxforge.config.derived import (
    encoder_devices,
    encoder_tensor_parallel_size,
    experts_are_over_tensor,
    vocabulary_is_over_stages,
)
from jaxforge.parallel.pipeline.choice import layer_order, num_parameters, pipeline_layout
from jaxforge.parallel.pipeline.summary import describe_pipeline, describe_sizes
from jaxforge.training.evaluation import Evaluation
from jaxforge.training.program import Program, bytes_per_device
from jaxforge.words import counted


def describe_run(config: Config, mesh, layout: MeshLayout, microbatches: int) -> str:
    """What will run where, known before anything is compiled."""
    train, pipeline = config.train, pipeline_layout(config)
    kind = "simulated CPU device" if train.simulated_devices else jax.devices()[0].device_kind
    return "\n".join(
        [
            f"{mesh.size} x {kind} in {counted(jax.process_count(), 'process', 'es')}:"
            f" decoder TP {layout.tensor_parallel_size},"
            + (f" {describe_encoder(config)}," if config.model.encoder else "")
            + (f" {describe_sizes(pipeline, vocabulary_is_over_stages(config))}," if pipeline else "")
            + f" DP {layout.data_parallel_size}"
            + describe_experts(config),
            describe(mesh, layout),
            f"{counted(train.steps, 'step')} of {describe_step(config, microbatches)}",
            *([describe_pipeline(pipeline, microbatches)] if pipeline else []),
        ]
    )


def describe_step(config: Config, microbatches: int) -> str:
    """What a step reads, and in how many parts."""
    train = config.train
    return (
        f"{counted(train.global_batch_size, 'row')} x {counted(train.seq_length, 'token')}:"
        f" {counted(microbatches, 'microbatch', 'es')} of {counted(train.micro_batch_size, 'row')}"
        " on each data parallel rank"
    )


def describe_experts(config: Config) -> str:
    """Over how many devices experts are shared out, after a comma; nothing where there are none."""
    if config.model.decoder.num_experts is None:
        return ""
    ranks, where = config.parallel.expert_model_parallel_size, ""
    if experts_are_over_tensor(config):
        where = ", the tensor group among them"
    elif config.parallel.tensor_model_parallel_size > 1:
        where = ", each cut over the tensor group"
    return f", {config.model.decoder.num_experts} experts over {counted(ranks, 'device')}{where}"


def describe_encoder(config: Config) -> str:
    """How the encoder's work is shared."""
    if config.parallel.enable_full_hetero_dp:
        return f"full hetero DP of the encoder over {encoder_devices(config)} devices"
    if config.parallel.enable_encoder_hetero_dp:
        return f"encoder hetero DP over {encoder_devices(config)} devices"
    return f"encoder TP {encoder_tensor_parallel_size(config)}"


def describe_state(config: Config, program: Program) -> str:
    """Parameters by part, and the bytes of state on each device."""
    parts: dict[str, int] = {}
    order = layer_order(config)
    for kind in ("trainable", "frozen"):
        for module, tree in program.abstract_state[kind].items():
            parts[module] = parts.get(module, 0) + num_parameters({module: tree}, order)
    held, in_host = (bytes_per_device(program.abstract_state, in_host=where) for where in (False, True))
    offloaded = f" and {gibibytes(in_host)} in host memory" if in_host else ""
    named = ", ".join(f"{module} {count / 1e6:.2f} M" for module, count in sorted(parts.items()))
    return (
        f"parameters: {named}; {gibibytes(held)} of parameters and optimizer state on each device{offloaded};"
        " compiling shows what a step needs besides"
    )


def describe_evaluation(evaluation: Evaluation) -> str:
    """Accuracy in a line."""
    kinds = ", ".join(f"{kind} {right}/{total}" for kind, (right, total) in sorted(evaluation.by_kind().items()))
    count = len(evaluation.documents)
    if evaluation.exact_match is None:
        return f"loss {evaluation.loss:.4f} over {evaluation.target_tokens} held-out target tokens"
    return f"exact match {evaluation.exact_match:.1%} of {count} held-out samples ({kinds}), loss {evaluation.loss:.4f}"


def gibibytes(count: float) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**28 else f"{count / 2**20:.1f} MiB"


def differences(old: Any, new: Any, path: str = "") -> Iterator[str]:
    """Lines "field: old -> new" for the values of two nested dicts that differ; lists and tuples compare equal."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            yield from differences(old.get(key), new.get(key), f"{path}.{key}" if path else key)
    elif _plain(old) != _plain(new):
        yield f"{path}: {old} -> {new}"


def _plain(value: Any) -> Any:
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value
