"""The compiled parts of a run: from a config and a mesh to initialisation, train step and scoring.

`jaxforge.plan` compiles exactly these for GPUs that aren't here.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from jaxforge.config.derived import vocabulary_is_over_stages
from jaxforge.config.errors import ConfigError
from jaxforge.config.lora_rules import has_adapters
from jaxforge.config.schema import Config
from jaxforge.data.batches import batch_sharding
from jaxforge.memory.recompute import recompute_segments
from jaxforge.models import VisionLanguageModel
from jaxforge.models.lora import add_adapters, is_adapter, trained_patterns
from jaxforge.ops.placement import Placement
from jaxforge.optim import learning_rate_schedule, make_optimizer, split_trainable
from jaxforge.optim.paths import join, parameter_paths, split
from jaxforge.parallel.data import DataSharding, data_sharding
from jaxforge.parallel.encoder import encoder_placement
from jaxforge.parallel.pipeline.choice import layer_order, pipeline_layout
from jaxforge.parallel.rules import (
    decoder_placement,
    logical_axes,
    parameter_shardings,
    replicated,
    vocabulary_over_stages,
)
from jaxforge.training.phases import divided_axes, is_summed_over_stages, make_phases
from jaxforge.training.step import apply_gradients, cast, make_gradients, make_scoring

Tree = Any


@dataclasses.dataclass(frozen=True)
class Program:
    """What a run compiles.

    Attributes:
      mesh: the devices.
      sharding: what is sharded over data parallel ranks.
      abstract_state: shapes, dtypes and shardings of the state: nested dict with "trainable" parameters (fp32),
        "frozen" ones (in the compute dtype: no update needs more), "optimizer", and "step" (int32, completed steps).
      abstract_base: of all parameters but the adapters, together, as the state has them.
      has_adapters: whether adapters train (`config.lora`), and the base stays as it was given.
      batch_sharding: of every array [M, B, ...] of a batch; `BatchLayout` knows those of divided patch arrays too.
      initialise: seed -> state, computed straight into its shards.
      initialise_from: (base, seed) -> the state of given base parameters, which are donated; adapters are those of
        `initialise(seed)`.  `base` is laid out as `abstract_base`; its dtypes may differ, but then need memory twice.
      train_step: (state, batch) -> (state, metrics), jitted; the state is donated.
      score: (state, batch) -> (loss sum, target tokens, predicted next tokens [M, B, S]).
      gradients: (parameters, batch) -> (gradients, sums), before any optimizer; for tests and measurements.
    """

    mesh: Mesh
    sharding: DataSharding
    abstract_state: Tree
    abstract_base: Tree
    has_adapters: bool
    batch_sharding: NamedSharding
    initialise: Callable[[int], Tree]
    initialise_from: Callable[[Tree, int], Tree]
    train_step: jax.stages.Wrapped
    score: Callable[[Tree, dict], tuple[jax.Array, jax.Array, jax.Array]]
    gradients: Callable[[Tree, dict], tuple[Tree, dict]]

    def saved(self, state: Tree) -> Tree:
        """What a checkpoint holds of a state, or of `abstract_state`: with adapters, not the frozen base."""
        if not self.has_adapters:
            return state
        return state | {"frozen": split(state["frozen"], is_adapter)[0]}

    def with_frozen_base(self, saved: Tree, frozen_base: Tree) -> Tree:
        """The state of which `saved` was saved."""
        return saved | {"frozen": join(saved["frozen"], frozen_base)}

    def frozen_base(self, base: Tree) -> Tree:
        """Of base parameters laid out as `abstract_base`, those that are frozen, as the state has them."""
        frozen = split(self.abstract_state["frozen"], is_adapter)[1]
        paths = set(jax.tree.leaves(parameter_paths(frozen)))
        kept = split(base, lambda path: path in paths)[0]
        return jax.tree.map(lambda array, shape: array.astype(shape.dtype), kept, frozen)

    def initial_frozen_base(self, seed: int) -> Tree:
        """The frozen base of `initialise(seed)`, by the same compiled program and so the same to the last bit."""
        return split(self.initialise(seed)["frozen"], is_adapter)[1]


def compute_dtype(config: Config, platform: str) -> jnp.dtype:
    """`train.compute_dtype`, with auto resolved: bfloat16 on GPU, float32 elsewhere."""
    if config.train.compute_dtype == "auto":
        return jnp.dtype(jnp.bfloat16 if platform == "gpu" else jnp.float32)
    return jnp.dtype(config.train.compute_dtype)


def attention_backend(config: Config, platform: str) -> str:
    """`train.attention_backend`, with auto resolved: cuDNN on GPU for half precision, else the reference.

    `platform` is that of the devices the program is compiled for, not of the machine that compiles it.
    """
    if config.train.attention_backend == "auto":
        is_half = compute_dtype(config, platform) == jnp.bfloat16
        return "cudnn" if platform == "gpu" and is_half else "xla"
    return config.train.attention_backend


def make_model(config: Config, backend: str, rngs: nnx.Rngs, placements: dict[str, Placement] | None = None):
    """The model of a config, adapters included; with `placements` (of "encoder", "decoder") laid out over a mesh."""
    model = config.model
    layout = {f"{part}_placement": placement for part, placement in (placements or {}).items()}
    made = VisionLanguageModel(
        model,
        rngs=rngs,
        backend=backend,
        decoder_segments=recompute_segments(config.memory, model.decoder.num_layers),
        decoder_layer_order=layer_order(pipeline_layout(config)),
        encoder_segments=recompute_segments(model.encoder, model.encoder.num_layers) if model.encoder else None,
        **layout,
    )
    add_adapters(made, config.lora, rngs)
    return made


def build_program(config: Config, mesh: Mesh, platform: str) -> Program:
    """Everything that a run of `config` compiles for the devices of `mesh` ("cpu" or "gpu").  Compiles nothing yet."""
    divided = divided_axes(config)
    placements = {
        "encoder": encoder_placement(divided),
        "decoder": decoder_placement(config.parallel.sequence_parallel, bool(divided)),
    }
    dtype = compute_dtype(config, platform)
    make = functools.partial(make_model, config, attention_backend(config, platform), placements=placements)
    model = nnx.eval_shape(lambda: make(nnx.Rngs(params=0)))
    graph, abstract = nnx.split(model)
    by_module = placements | {"projector": placements["encoder"]}
    if vocabulary_is_over_stages(config):
        by_module["decoder"] = vocabulary_over_stages(placements["decoder"])
    shardings = parameter_shardings(logical_axes(abstract), mesh, by_module)
    shapes = jax.tree.map(
        lambda shape, sharding: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding),
        nnx.to_pure_dict(abstract),
        shardings,
    )
    strategy = config.parallel.data_parallel_sharding_strategy
    sharding = data_sharding(strategy, mesh, shapes, functools.partial(is_summed_over_stages, config))
    _, base = split(shapes, is_adapter)
    base_paths = jax.tree.leaves(parameter_paths(base))
    only = trained_patterns(config.lora, config.optimizer.freeze, base_paths)

    def trainable_and_frozen(parameters):
        return split_trainable(parameters, config.optimizer.freeze, only)

    trainable, frozen = trainable_and_frozen(shapes)
    trainable = jax.tree.map(
        lambda shape, layout: shape.update(sharding=layout), trainable, sharding.trainable_shardings(trainable)
    )
    frozen = jax.tree.map(
        lambda shape, layout: shape.update(dtype=dtype, sharding=layout), frozen, sharding.frozen_shardings(frozen)
    )
    optimizer = make_optimizer(config.optimizer, config.train.steps, trainable)
    schedule = learning_rate_schedule(config.optimizer, config.train.steps)

    # both under jit and with output shardings, so that no device ever holds a whole model; the values of JAX's
    # counter-based generator don't depend on the sharding
    def initial_state(seed):
        return state_from(initial_parameters(seed))

    def initial_state_from(base, seed):
        adapters, _ = split(initial_parameters(seed), is_adapter)
        return state_from(join(base, adapters))

    def initial_parameters(seed):
        return nnx.to_pure_dict(nnx.split(make(nnx.Rngs(params=jax.random.key(seed))))[1])

    def state_from(parameters):
        trainable, frozen = trainable_and_frozen(parameters)
        trainable = cast(trainable, jnp.dtype(jnp.float32))
        return {
            "trainable": trainable,
            "frozen": cast(frozen, dtype),
            "optimizer": optimizer.init(trainable),
            "step": jnp.zeros((), jnp.int32),
        }

    everywhere = replicated(mesh)

    def on_mesh(shape):
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=everywhere)

    abstract_state = {
        "trainable": trainable,
        "frozen": frozen,
        "optimizer": optax.tree.map_params(
            optimizer,
            lambda shape, parameter: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=parameter.sharding),
            jax.eval_shape(optimizer.init, trainable),
            trainable,
            transform_non_params=on_mesh,
        ),
        "step": jax.ShapeDtypeStruct((), jnp.int32, sharding=everywhere),
    }
    state_shardings = jax.tree.map(lambda shape: shape.sharding, abstract_state)

    def loss_of(parameters, microbatch):
        return nnx.merge(graph, parameters).loss(microbatch)

    def score_of(parameters, microbatch):
        return nnx.merge(graph, parameters).score(microbatch)

    phases = make_phases(config, model, mesh, sharding)
    if phases is None:
        gradients_of = make_gradients(loss_of, mesh, config.loss.z_loss_coefficient, sharding)
        scores_of = make_scoring(score_of, mesh, sharding)
    else:
        gradients_of, scores_of = phases.gradients, phases.scores

    def gradients(trainable, frozen, batch):
        # cast once, before the loop over microbatches
        return gradients_of(sharding.cast(trainable, dtype), frozen, batch)

    def scores(state, batch):
        return scores_of(join(sharding.cast(state["trainable"], dtype), state["frozen"]), batch)

    def train_step(state, batch):
        if config.model.decoder.hidden_dropout:
            batch = batch | {"dropout_keys": row_keys(config.train.seed, state["step"], batch["tokens"].shape[:2])}
        grads, sums = gradients(state["trainable"], state["frozen"], batch)
        # the last link of the optimizer's chain counts the updates that were applied, which the schedule follows
        learning_rate = schedule(state["optimizer"][-1].count)
        next_state, metrics = apply_gradients(optimizer, state, grads, sums)
        return next_state, metrics | {"learning_rate": learning_rate}

    @jax.jit
    def all_gradients(parameters, batch):
        trainable, frozen = trainable_and_frozen(parameters)
        return gradients(trainable, cast(frozen, dtype), batch)

    # compiling these well would take longer than they run
    runs_once = {"xla_backend_optimization_level": 1}
    return Program(
        mesh=mesh,
        sharding=sharding,
        abstract_state=abstract_state,
        abstract_base=split(join(trainable, frozen), is_adapter)[1],
        has_adapters=has_adapters(config.lora),
        batch_sharding=batch_sharding(mesh),
        initialise=jax.jit(initial_state, out_shardings=state_shardings, compiler_options=runs_once),
        initialise_from=jax.jit(
            initial_state_from, donate_argnums=0, out_shardings=state_shardings, compiler_options=runs_once
        ),
        train_step=jax.jit(train_step, donate_argnums=0, out_shardings=(state_shardings, everywhere)),
        # replicated, so that every process can read every prediction
        score=jax.jit(scores, out_shardings=everywhere),
        gradients=all_gradients,
    )


@contextlib.contextmanager
def missing_libraries_as_config_errors(backend: str) -> Iterator[None]:
    """What the compiler lacks; and what JAX's cuDNN attention, which checks it while it is traced, can't compute."""
    try:
        yield
    except NotImplementedError as error:
        if backend != "cudnn":
            raise
        raise ConfigError(
            f"train.attention_backend is cudnn on GPU, which can't compute this: {error}"
            " (set train.attention_backend=xla)"
        ) from error
    except RuntimeError as error:
        first_line = str(error).partition("\n")[0]
        if "No PTX compilation provider" in first_line:
            raise ConfigError(
                "compiling for a GPU needs ptxas, of NVIDIA's CUDA toolkit; run: make setup-gpu-compile"
                " (or pip install --no-deps nvidia-cuda-nvcc-cu12)"
            ) from error
        if "cudnn" in first_line.lower():
            raise ConfigError(
                f"train.attention_backend is cudnn on GPU, and there is no cuDNN to compile for ({first_line}); run:"
                " make setup-gpu-compile (or pip install --no-deps nvidia-cudnn-cu12), or set"
                " train.attention_backend=xla"
            ) from error
        raise


def bytes_per_device(tree: Tree) -> int:
    """What one device holds of a tree of ShapeDtypeStructs with shardings."""
    return sum(shard_size(leaf) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def shard_size(leaf: jax.ShapeDtypeStruct) -> int:
    """How many numbers one device holds of an array."""
    return math.prod(leaf.sharding.shard_shape(leaf.shape))


def bytes_while_running(analysis: Any) -> int:
    """What a compiled program takes on a device, from its `memory_analysis()`: donated inputs count once."""
    return (
        analysis.argument_size_in_bytes
        + analysis.temp_size_in_bytes
        + analysis.output_size_in_bytes
        - analysis.alias_size_in_bytes
    )


def row_keys(seed: int, step: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """A random key for each row of a step, [M, B, 2] uint32: the same at every layout."""
    rows = jnp.arange(shape[0] * shape[1], dtype=jnp.uint32)
    key = jax.random.fold_in(jax.random.key(seed), step)
    keys = jax.vmap(lambda row: jax.random.key_data(jax.random.fold_in(key, row)))(rows)
    return keys.reshape(*shape, -1)
