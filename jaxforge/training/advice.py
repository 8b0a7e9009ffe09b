"""What would make a run smaller, by formula: nothing is compiled for it."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

from jaxforge.config.errors import ConfigError
from jaxforge.config.schema import Config
from jaxforge.config.validate import validate
from jaxforge.training.memory_parts import formula_bytes
from jaxforge.training.program import Program

_STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")


@dataclasses.dataclass(frozen=True)
class Change:
    """Fields to set, as arguments of the command line, and the bytes that they free on each GPU."""

    settings: tuple[str, ...]
    frees: int


def changes_that_free_most(
    config: Config, num_devices: int, program_of: Callable[[Config], Program], most: int = 3
) -> list[Change]:
    """The best change of each kind, the one that frees most first; none that the config or the devices don't allow.

    Args:
      program_of: builds the program of a config for the devices, without compiling it; raises ConfigError.
    """
    now = formula_bytes(config, program_of(config))
    best: dict[str, Change] = {}
    for kind, candidate in _candidates(config):
        settings = [(path, value) for path, value in candidate if _get(config, path) != value]
        try:
            changed = _with(config, settings)
            validate(changed, num_devices, "gpu")
            frees = now - formula_bytes(changed, program_of(changed))
        except ConfigError:
            continue
        if frees > best.get(kind, Change((), 0)).frees:
            best[kind] = Change(tuple(f"--config.{path}={_text(value)}" for path, value in settings), frees)
    return sorted(best.values(), key=lambda change: -change.frees)[:most]


def _candidates(config: Config) -> Iterator[tuple[str, tuple[tuple[str, Any], ...]]]:
    """(kind, fields to set): those of a kind exclude each other."""
    parallel, memory = config.parallel, config.memory
    strategy = "parallel.data_parallel_sharding_strategy"
    for name in _STRATEGIES[_STRATEGIES.index(parallel.data_parallel_sharding_strategy) + 1 :]:
        yield "sharding", ((strategy, name),)
    tensor = "parallel.tensor_model_parallel_size", 2 * parallel.tensor_model_parallel_size
    yield "tensor", (tensor, ("parallel.sequence_parallel", True))
    if parallel.pipeline_model_parallel_layout is None:
        yield "pipeline", (("parallel.pipeline_model_parallel_size", 2 * parallel.pipeline_model_parallel_size),)
    for part in ("memory", *(["model.encoder"] if config.model.encoder else [])):
        selective = (f"{part}.recompute_granularity", "selective"), (f"{part}.recompute_modules", ("mlp", "layernorm"))
        unset = (f"{part}.recompute_method", None), (f"{part}.recompute_num_layers", None)
        yield f"recompute of {part}", (*selective, *unset)
        full = (f"{part}.recompute_granularity", "full"), (f"{part}.recompute_modules", ())
        yield f"recompute of {part}", (
            *full, (f"{part}.recompute_method", "uniform"), (f"{part}.recompute_num_layers", 1)
        )  # fmt: skip
    if not memory.optimizer_cpu_offload:
        yield "optimizer", (("memory.optimizer_cpu_offload", True),)
    yield "loss", (("loss.cross_entropy_loss_fusion", True),)
    if config.train.micro_batch_size > 1:
        yield "micro-batch", (("train.micro_batch_size", config.train.micro_batch_size // 2),)


def _text(value: Any) -> str:
    """As the command line takes it."""
    if isinstance(value, tuple):
        return ",".join(value) or "()"
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _get(config: Any, path: str) -> Any:
    return functools.reduce(getattr, path.split("."), config)


def _with(config: Any, settings: list[tuple[str, Any]]) -> Any:
    """A config with fields set by path."""
    for path, value in settings:
        config = _set(config, path.split("."), value)
    return config


def _set(node: Any, path: list[str], value: Any) -> Any:
    inner = value if len(path) == 1 else _set(getattr(node, path[0]), path[1:], value)
    return dataclasses.replace(node, **{path[0]: inner})
