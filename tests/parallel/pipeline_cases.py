"""Text models in a pipeline: layouts, rows, and the way between a stack of layers and the places of a pipeline."""

import dataclasses
import functools
import itertools

import jax
import numpy as np
from one_device import loss_and_gradients
from tiny_models import microbatches, random_parameters, rows_of_many_kinds, tiny_config

from jaxforge.cluster.mesh import MeshLayout, build_mesh
from jaxforge.config.schema import Config, MemoryConfig
from jaxforge.models.layer_order import is_in_stacks
from jaxforge.ops.cross_entropy import IGNORE
from jaxforge.optim.paths import join, parameter_paths
from jaxforge.parallel.pipeline.choice import layer_order
from jaxforge.training.program import Program, build_program

NUM_LAYERS, NUM_ROWS = 8, 12
Z_LOSS = 0.1

# (ranks, chunks in each): layers of a chunk; and stages of different sizes, some without a layer, some with nothing
PIPELINES = {
    (2, 1): (4, "Et*5|tttL"),
    (2, 2): (2, "Et*3||t*3|ttL"),
    (4, 1): (2, "E|t*4|t*4|L"),
    (4, 2): (1, "E|tt|t|t||tt|t|tL"),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """How the devices are shared; the micro-batch is that of one data parallel rank."""

    ranks: int
    chunks: int = 1
    uneven: bool = False
    tensor: int = 1
    data: int = 1
    micro_batch: int = 1
    sequence_parallel: bool = False
    recompute: tuple[str, int] | None = None
    vocabulary_over_stages: bool = False
    sharding: str = "no_shard"
    num_rows: int = NUM_ROWS

    @property
    def num_microbatches(self) -> int:
        return self.num_rows // (self.data * self.micro_batch)

    @property
    def options(self) -> str:
        sequence = ["sequence parallel"] if self.sequence_parallel else []
        recompute = ["recompute full, {} {}".format(*self.recompute)] if self.recompute else []
        vocabulary = ["vocabulary over stages"] if self.vocabulary_over_stages else []
        sharding = [self.sharding] if self.sharding != "no_shard" else []
        return "; ".join(sequence + recompute + vocabulary + sharding)

    def config(self, **groups) -> Config:
        """`groups` as `tiny_config` takes them."""
        pipeline = {}
        if self.ranks > 1:
            per_chunk, layout = PIPELINES[self.ranks, self.chunks]
            pipeline = dict(
                pipeline_model_parallel_size=self.ranks,
                pipeline_model_parallel_layout=layout if self.uneven else None,
                num_layers_per_virtual_pipeline_stage=None if self.uneven else per_chunk,
                vocabulary_parallel_over_pipeline=self.vocabulary_over_stages,
            )
        parallel = dict(
            tensor_model_parallel_size=self.tensor,
            sequence_parallel=self.sequence_parallel,
            data_parallel_sharding_strategy=self.sharding,
        )
        config = text_config(parallel=parallel | pipeline, **groups)
        if self.recompute is None:
            return config
        return dataclasses.replace(config, memory=MemoryConfig("full", *self.recompute))

    def program(self, config: Config) -> Program:
        num_devices = self.ranks * self.tensor * self.data
        mesh = build_mesh(MeshLayout.from_config(config, num_devices), jax.devices()[:num_devices])
        return build_program(config, mesh, "cpu")

    def arguments(self, program: Program, config: Config, parameters: dict, rows: dict) -> tuple[dict, dict]:
        """Parameters of one device and rows, laid out for the functions of the program."""
        state = program.abstract_state
        abstract = join(join(state["trainable"], state["frozen"]), state.get("router", {}))
        shardings = jax.tree.map(lambda shape: shape.sharding, abstract)
        batch = jax.device_put(microbatches(rows, self.num_microbatches), program.batch_sharding)
        return jax.device_put(placed(config, parameters), shardings), batch


def all_cases() -> list[Case]:
    """Every pipeline over both kinds of stages, TP and DP 1 and 2 as 8 devices allow, and 3, 6 and 12 microbatches."""
    sizes = itertools.product(PIPELINES, (False, True), (1, 2), (1, 2), (1, 2))
    cases = [Case(*pipeline, uneven, tensor, data, micro) for pipeline, uneven, tensor, data, micro in sizes]
    return [case for case in cases if case.ranks * case.tensor * case.data <= 8]


def text_config(*, decoder_changes=(), **groups) -> Config:
    """On one device; eight layers and z-loss."""
    decoder_changes = dict(num_layers=NUM_LAYERS) | dict(decoder_changes)
    return tiny_config(None, decoder_changes=decoder_changes, loss=dict(z_loss_coefficient=Z_LOSS), **groups)


def twelve_rows(config: Config) -> dict[str, np.ndarray]:
    return distinct_rows(config, NUM_ROWS)


def distinct_rows(config: Config, num_rows: int) -> dict[str, np.ndarray]:
    """Rows [num_rows, ...], at most 16, of which no two have the same tokens."""
    rows = rows_of_many_kinds(config)
    kinds = []
    for shift in (0, 5, 11, 16):

        def other(ids, shift=shift):
            return 1 + (ids - 1 + shift) % (config.model.decoder.vocab_size - 1)

        tokens = np.where(rows["segment_ids"] > 0, other(rows["tokens"]), rows["tokens"])
        targets = np.where(rows["targets"] != IGNORE, other(rows["targets"]), IGNORE)
        kinds.append(rows | {"tokens": tokens, "targets": targets})
    return {key: np.concatenate([kind[key] for kind in kinds])[:num_rows] for key in rows}


@functools.cache
def problem() -> tuple[dict, dict, float, dict]:
    """Parameters, rows, and what one device computes from them: loss and gradients."""
    config = text_config()
    parameters, rows = random_parameters(config), twelve_rows(config)
    return parameters, rows, *loss_and_gradients(config, parameters, rows)


def placed(config: Config, parameters: dict) -> dict:
    """Parameters of one device in the places of a pipeline, if there is one; what no layer uses is NaN."""
    orders = layer_order(config)
    if orders is None:
        return parameters

    def place(path, stack):
        order = np.array(orders.of(path))
        return np.where((order >= 0).reshape(-1, *(1,) * (stack.ndim - 1)), stack[order], np.float32(np.nan))

    return by_stack(place, parameters)


def unplaced(config: Config, tree: dict, unused: float = 0.0) -> dict:
    """The inverse of `placed`.  Places that no layer uses must be `unused`, which for gradients is 0."""
    orders = layer_order(config)
    if orders is None:
        return tree

    def unplace(path, stack):
        order, stack = np.array(orders.of(path)), np.asarray(stack)
        used = np.flatnonzero(order >= 0)
        np.testing.assert_array_equal(stack[order < 0], unused)
        return stack[used[np.argsort(order[used])]]

    return by_stack(unplace, tree)


def by_stack(f, tree: dict) -> dict:
    """`f` of path and array for the stacks of layers alone."""
    return jax.tree.map(lambda path, a: f(path, a) if is_in_stacks(path) else a, parameter_paths(tree), tree)
