"""The state that a run starts with: at random, from weights, or from its own checkpoint; and its export."""

from pathlib import Path
from typing import Any

import jax

from jaxforge.checkpoint.arrays import ArrayReader, DeviceArrays, load
from jaxforge.checkpoint.hf import export, exported_config
from jaxforge.checkpoint.manager import CheckpointManager
from jaxforge.checkpoint.weights import MergedArrays, fingerprint, hf_folder, origin, starting_weights
from jaxforge.config.errors import ConfigError
from jaxforge.config.schema import Config
from jaxforge.models.lora import is_adapter
from jaxforge.models.moe import is_statistics
from jaxforge.optim.host_memory import moved
from jaxforge.optim.paths import join, split
from jaxforge.parallel.pipeline.choice import layer_order
from jaxforge.training.program import Program

Tree = Any


def first_state(config: Config, program: Program) -> Tree:
    """The state before the first step: the weights of checkpoint.init_from_hf or pretrained_checkpoint, else random."""
    weights = starting_weights(config.checkpoint, config.model)
    if weights is None:
        return program.initialise(config.train.seed)
    return program.initialise_from(_load(config, program, weights), config.train.seed)


def restored_state(
    config: Config, program: Program, checkpoints: CheckpointManager
) -> tuple[int, Tree, dict[str, Any]] | None:
    """(step, state, metadata) of the newest whole checkpoint, or None.

    Raises:
      ConfigError: as `CheckpointManager.restore`, or if the weights under the adapters aren't those of the run.
    """
    restored = checkpoints.restore(program.saved(program.abstract_state), layer_order(config))
    if restored is None or not program.has_adapters:
        return restored
    step, saved, metadata = restored
    if metadata.get("base") != fingerprint(config):
        raise ConfigError(
            f"the checkpoint of step {step} holds adapters for other weights than those of {origin(config)}; give the"
            " ones that the run started from, unchanged, or another --workdir"
        )
    weights = starting_weights(config.checkpoint, config.model)
    if weights is None:
        base = program.initial_frozen_base(config.train.seed)
    else:
        base = program.frozen_base(_load(config, program, weights))
    return step, program.with_frozen_base(saved, base), metadata


def saved_base(config: Config, program: Program) -> str | None:
    """What a checkpoint of adapters says of the weights under them."""
    return fingerprint(config) if program.has_adapters else None


def export_source(config: Config) -> Path | None:
    """The Hugging Face folder whose config.json, tokenizer and processor files go along with a run's exports, if any.

    Raises:
      ConfigError: if the run's model can't be exported; better now than when it is trained.
    """
    source = hf_folder(config.checkpoint)
    exported_config(config.model, source=source)
    return source


def export_state(folder: Path, config: Config, state: Tree, source: Path | None) -> None:
    """Writes a Hugging Face folder of a state, adapters folded in, with its tokenizer.  Every process calls it."""
    arrays, dtype = state_arrays(config, state), config.checkpoint.export_hf_dtype
    export(folder, arrays, config.model, source=source, tokenizer=config.data.tokenizer, dtype=dtype)


def state_arrays(config: Config, state: Tree) -> ArrayReader:
    """The weights of a state, adapters folded in."""
    biases = split(state.get("router", {}), is_statistics)[1]
    parameters = join(join(state["trainable"], state["frozen"]), biases)
    adapters, base = split(parameters, is_adapter)
    order = layer_order(config)
    if not adapters:
        return DeviceArrays(parameters, config.checkpoint.export_hf_dtype, order)
    return MergedArrays(DeviceArrays(base, "float32", order), DeviceArrays(adapters, "float32", order), config.lora)


def _load(config: Config, program: Program, weights: ArrayReader) -> Tree:
    """The base parameters on the mesh."""
    order = layer_order(config)
    if not config.checkpoint.init_allow_missing:
        return load(weights, program.abstract_base, order=order)
    random = program.initialise(config.train.seed)
    _, initial = split(join(random["trainable"], random["frozen"]), is_adapter)
    initial = jax.tree.map(lambda array, shape: moved(array, shape.sharding), initial, program.abstract_base)
    loaded = load(weights, program.abstract_base, initial, order)
    return jax.block_until_ready(loaded)
