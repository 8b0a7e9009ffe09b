"""The compiled parts of a run: from a config and a mesh to initialisation, train step and scoring.

`jaxforge.plan` compiles exactly these for GPUs that aren't here.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from jaxforge.cluster.xla_flags import exchange_options, overlap_options
from jaxforge.config.activations import model_parts
from jaxforge.config.derived import experts_are_over_tensor, num_microbatches, vocabulary_is_over_stages
from jaxforge.config.lora_rules import has_adapters
from jaxforge.config.schema import Config, MemoryConfig
from jaxforge.data.batches import batch_sharding
from jaxforge.memory.offload import compiler_options
from jaxforge.memory.policy import layer_policies
from jaxforge.memory.recompute import recompute_segments, recomputes_mtp_layers
from jaxforge.models import VisionLanguageModel
from jaxforge.models.lora import add_adapters, is_adapter, trained_patterns
from jaxforge.models.moe import ExpertsRun, is_router_state, is_statistics
from jaxforge.ops.linear_cross_entropy import LinearCrossEntropy
from jaxforge.ops.placement import SINGLE_DEVICE, Placement
from jaxforge.optim import make_optimizer, split_trainable
from jaxforge.optim.host_memory import chosen_for_host_memory, in_host_memory, is_in_host_memory
from jaxforge.optim.optimizer import moments, with_moments
from jaxforge.optim.paths import join, parameter_paths, split
from jaxforge.parallel.data import DataSharding, data_sharding
from jaxforge.parallel.encoder import encoder_placement
from jaxforge.parallel.microbatch_loss import FusedLoss, PlainLoss
from jaxforge.parallel.pipeline.choice import layer_order
from jaxforge.parallel.rules import (
    decoder_placement,
    logical_axes,
    of_parameters,
    parameter_shardings,
    replicated,
)
from jaxforge.training.activation_costs import (
    ActivationCost,
    activation_costs,
    refuse_a_size_that_nothing_reaches,
)
from jaxforge.training.backends import attention_backend, compute_dtype, make_experts_run, make_fused_loss
from jaxforge.training.phases import divided_axes, is_summed_over_stages, make_phases
from jaxforge.training.router_state import next_router, router_metrics
from jaxforge.training.step import DepthLosses, apply_gradients, cast, make_gradients, make_scoring

Tree = Any


@dataclasses.dataclass(frozen=True)
class Program:
    """What a run compiles.

    Attributes:
      mesh: the devices.
      sharding: what is sharded over data parallel ranks.
      abstract_state: shapes, dtypes and shardings of the state: nested dict with "trainable" parameters (fp32),
        "frozen" ones (in the compute dtype: no update needs more), "optimizer", "step" (int32, completed steps) and,
        with experts, "router" (fp32; what routers keep beside weights).
        Masters and moments may lie in host memory (`memory.optimizer_cpu_offload`); then no device holds all of them
        while a step runs.
      abstract_base: of all parameters but adapters and routers' statistics, together, as the state has them, but none
        in host memory.
      has_adapters: whether adapters train (`config.lora`), and the base stays as it was given.
      batch_sharding: of every array [M, B, ...] of a batch; `BatchLayout` knows those of divided patch arrays too.
      initialise: seed -> state, computed straight into its shards.
      initialise_from: (base, seed) -> the state of given base parameters, of which those are donated that stay on the
        device; adapters are those of `initialise(seed)`.  `base` is laid out as `abstract_base`; its dtypes may differ,
        but then need memory twice.
      train_step: (state, batch) -> (state, metrics), jitted; the state is donated.
      score: (state, batch) -> (loss sum, target tokens, predicted next tokens [M, B, S]).
      gradients: (parameters, batch) -> (gradients, sums), before any optimizer; for tests and measurements.  Statistics
        of routers are among the gradients, as sums over the step.
      activation_costs: () -> what each activation of a layer takes, traced when it is called.
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
    activation_costs: Callable[[], list[ActivationCost]]

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


def make_model(
    config: Config,
    backend: str,
    rngs: nnx.Rngs,
    placements: dict[str, Placement] | None = None,
    fused_loss: LinearCrossEntropy | None = None,
    experts: ExpertsRun | None = None,
):
    """The model of a config, adapters included; with `placements` (of "encoder", "decoder") laid out over a mesh."""
    model = config.model
    placements = placements or {}
    by_part: dict[str, Any] = {f"{part}_placement": placement for part, placement in placements.items()}
    for part in model_parts(config):
        by_part[f"{part}_policies"] = layer_policies(config, part, placements.get(part, SINGLE_DEVICE))
    made = VisionLanguageModel(
        model,
        rngs=rngs,
        backend=backend,
        decoder_segments=recompute_segments(config.memory, model.decoder.num_layers),
        decoder_layer_order=layer_order(config),
        encoder_segments=recompute_segments(model.encoder, model.encoder.num_layers) if model.encoder else None,
        fused_loss=fused_loss,
        experts=experts,
        recomputes_mtp=recomputes_mtp_layers(config.memory),
        **by_part,
    )
    add_adapters(made, config.lora, rngs)
    return made


def build_program(config: Config, mesh: Mesh, platform: str) -> Program:
    """Everything that a run of `config` compiles for the devices of `mesh` ("cpu" or "gpu").  Compiles nothing yet."""
    divided = divided_axes(config)
    placements = {
        "encoder": encoder_placement(divided),
        "decoder": decoder_placement(
            config.parallel.sequence_parallel, bool(divided), experts_are_over_tensor(config)
        ),
    }
    dtype = compute_dtype(config, platform)
    fused_loss = make_fused_loss(config, placements["decoder"], platform)
    make = functools.partial(
        make_model,
        config,
        attention_backend(config, platform),
        placements=placements,
        fused_loss=fused_loss,
        experts=make_experts_run(config, mesh, platform),
    )
    model = nnx.eval_shape(lambda: make(nnx.Rngs(params=0)))
    graph, abstract = nnx.split(model)
    by_module = placements | {
        "projector": placements["encoder"],
        "decoder": of_parameters(placements["decoder"], vocabulary_is_over_stages(config)),
    }
    shardings = parameter_shardings(logical_axes(abstract), mesh, by_module)
    shapes = jax.tree.map(
        lambda shape, sharding: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding),
        nnx.to_pure_dict(abstract),
        shardings,
    )
    sharding = data_sharding(
        config.parallel.data_parallel_sharding_strategy,
        mesh,
        shapes,
        functools.partial(is_summed_over_stages, config),
        config.parallel.overlap_grad_reduce,
    )
    _, base = split(shapes, lambda path: is_adapter(path) or is_router_state(path))
    base_paths = jax.tree.leaves(parameter_paths(base))
    only = trained_patterns(config.lora, config.optimizer.freeze, base_paths)

    def trainable_and_frozen(parameters):
        return split_trainable(split(parameters, is_router_state)[1], config.optimizer.freeze, only)

    trainable, frozen = trainable_and_frozen(shapes)
    trainable = jax.tree.map(
        lambda shape, layout: shape.update(sharding=layout), trainable, sharding.trainable_shardings(trainable)
    )
    frozen = jax.tree.map(
        lambda shape, layout: shape.update(dtype=dtype, sharding=layout), frozen, sharding.frozen_shardings(frozen)
    )
    masters = _masters(config.memory, trainable)
    optimizer = make_optimizer(config.optimizer, config.train.steps, masters)

    # both under jit and with output shardings, so that no device ever holds a whole model; the values of JAX's
    # counter-based generator don't depend on the sharding
    def initial_state(seed):
        return state_from(initial_parameters(seed))

    def initial_state_from(base, seed):
        others, _ = split(initial_parameters(seed), lambda path: is_adapter(path) or is_statistics(path))
        return state_from(join(base, others))

    def initial_parameters(seed):
        return nnx.to_pure_dict(nnx.split(make(nnx.Rngs(params=jax.random.key(seed))))[1])

    def state_from(parameters):
        trainable, frozen = trainable_and_frozen(parameters)
        trainable = cast(trainable, jnp.dtype(jnp.float32))
        state = {
            "trainable": trainable,
            "frozen": cast(frozen, dtype),
            "optimizer": optimizer.init(trainable),
            "step": jnp.zeros((), jnp.int32),
        }
        router, _ = split(parameters, is_router_state)
        return state | {"router": cast(router, jnp.dtype(jnp.float32))} if router else state

    everywhere = replicated(mesh)

    def on_mesh(shape):
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=everywhere)

    def like_masters(moment):
        return jax.tree.map(lambda shape, master: shape.update(sharding=master.sharding), moment, masters)

    optimizer_state = jax.eval_shape(optimizer.init, trainable)
    mu, nu = moments(optimizer_state)
    abstract_state = {
        "trainable": masters,
        "frozen": frozen,
        "optimizer": with_moments(jax.tree.map(on_mesh, optimizer_state), like_masters(mu), like_masters(nu)),
        "step": jax.ShapeDtypeStruct((), jnp.int32, sharding=everywhere),
    }
    router, _ = split(shapes, is_router_state)
    if router:
        abstract_state["router"] = router
    state_shardings = jax.tree.map(lambda shape: shape.sharding, abstract_state)

    def loss_of(parameters, microbatch):
        return nnx.merge(graph, parameters).loss(microbatch)

    def score_of(parameters, microbatch):
        return nnx.merge(graph, parameters).score(microbatch)

    def states_of(parameters, microbatch):
        return nnx.merge(graph, parameters).states(microbatch)

    depths = DepthLosses.from_config(config)
    phases = make_phases(config, model, mesh, sharding)
    if phases is None:
        loss: PlainLoss | FusedLoss = PlainLoss(loss_of, config.loss.z_loss_coefficient)
        if fused_loss is not None:
            loss = FusedLoss(states_of, fused_loss, tuple(model.decoder.head_path.split("/")))
        gradients_of = make_gradients(loss, mesh, sharding, depths)
        scores_of = make_scoring(score_of, mesh, sharding)
    else:
        gradients_of, scores_of = phases.gradients, phases.scores

    def weights_of(masters):
        return sharding.cast(optimizer.cast_from_host(masters, dtype), dtype)

    def gradients(trainable, frozen, router, batch):
        # cast once, before the loop over microbatches
        statistics, biases = split(router, is_statistics)
        return gradients_of(join(weights_of(trainable), statistics), join(frozen, biases), batch)

    def scores(state, batch):
        frozen = join(state["frozen"], state.get("router", {}))
        return scores_of(join(weights_of(state["trainable"]), frozen), batch)

    def train_step(state, batch):
        if config.model.decoder.hidden_dropout:
            batch = batch | {"dropout_keys": row_keys(config.train.seed, state["step"], batch["tokens"].shape[:2])}
        grads, sums = gradients(state["trainable"], state["frozen"], state.get("router", {}), batch)
        statistics, grads = split(grads, is_statistics)
        learning_rate = optimizer.learning_rate(state["optimizer"])
        next_state, metrics = apply_gradients(optimizer, state, grads, sums, depths)
        if statistics:
            router = next_router(config.moe, state["router"], statistics, state["trainable"], metrics["is_finite"])
            next_state = next_state | {"router": router}
            metrics = metrics | router_metrics(router)
        return next_state, metrics | {"learning_rate": learning_rate}

    @jax.jit
    def all_gradients(parameters, batch):
        trainable, frozen = trainable_and_frozen(parameters)
        return gradients(trainable, cast(frozen, dtype), split(parameters, is_router_state)[0], batch)

    def costs():
        alone = nnx.eval_shape(lambda: make_model(config, attention_backend(config, platform), nnx.Rngs(params=0)))
        microbatches = num_microbatches(config, mesh.devices.size)
        return activation_costs(config, alone, trainable, join(frozen, router), dtype, microbatches)

    if config.memory.min_offloaded_tensor_size is not None:
        refuse_a_size_that_nothing_reaches(config, costs())

    exchanges = exchange_options(config, mesh, platform)
    # compiling these well would take longer than they run
    runs_once = {"xla_backend_optimization_level": 1}
    run_from_parts = jax.jit(
        lambda movers, others, seed: initial_state_from(join(movers, others), seed),
        donate_argnums=1,
        out_shardings=state_shardings,
        compiler_options=runs_once,
    )

    def initialise_from(base, seed):
        # what goes to host memory doesn't become a part of the state
        return run_from_parts(*split(base, lambda path: path in optimizer.in_host_memory), seed)

    return Program(
        mesh=mesh,
        sharding=sharding,
        abstract_state=abstract_state,
        abstract_base=split(join(join(trainable, frozen), split(router, is_statistics)[1]), is_adapter)[1],
        has_adapters=has_adapters(config.lora),
        batch_sharding=batch_sharding(mesh),
        initialise=jax.jit(initial_state, out_shardings=state_shardings, compiler_options=runs_once),
        initialise_from=initialise_from,
        train_step=jax.jit(
            train_step,
            donate_argnums=0,
            out_shardings=(state_shardings, everywhere),
            compiler_options=compiler_options(config, platform) | overlap_options(config, platform) | exchanges,
        ),
        # replicated, so that every process can read every prediction
        score=jax.jit(scores, out_shardings=everywhere, compiler_options=exchanges),
        gradients=all_gradients,
        activation_costs=costs,
    )


def _masters(memory: MemoryConfig, trainable: Tree) -> Tree:
    """`trainable`, shapes with shardings, with those moved to host memory that the config says."""
    if not memory.optimizer_cpu_offload:
        return trainable
    sizes = jax.tree.map(shard_size, trainable)
    fraction = 1.0 if memory.optimizer_offload_fraction is None else memory.optimizer_offload_fraction
    chosen = chosen_for_host_memory(sizes, fraction)
    return jax.tree.map(
        lambda path, shape: shape.update(sharding=in_host_memory(shape.sharding)) if path in chosen else shape,
        parameter_paths(trainable),
        trainable,
    )


def bytes_per_device(tree: Tree, *, in_host: bool = False) -> int:
    """What one device holds of a tree of ShapeDtypeStructs with shardings; or what it has in host memory."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if is_in_host_memory(leaf) == in_host]
    return sum(shard_size(leaf) * leaf.dtype.itemsize for leaf in leaves)


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
