"""Vision-language models in every encoder mode: layouts, rows with images, and programs for them."""

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from one_device import deviation, loss_and_gradients, loss_of
from pipeline_cases import NUM_LAYERS, NUM_ROWS, Z_LOSS, distinct_rows, placed, unplaced
from pipeline_cases import Case as TextCase
from tiny_models import ENCODERS, document, image, microbatches, random_parameters, row, tiny_config

from jaxforge.cluster.mesh import MeshLayout, build_mesh
from jaxforge.config.schema import Config
from jaxforge.data.batches import BatchLayout
from jaxforge.memory.offload import offloads_activations
from jaxforge.optim.paths import join
from jaxforge.training.program import Program, build_program

HETERO_TP, ENCODER_HETERO_DP, FULL_HETERO_DP = MODES = ("hetero TP", "encoder hetero DP", "full hetero DP")
_SWITCHES = {ENCODER_HETERO_DP: "enable_encoder_hetero_dp", FULL_HETERO_DP: "enable_full_hetero_dp"}

# (ranks, chunks in each): layers of a chunk, and stages of different sizes.  DeepStack's two features belong after the
# first two layers, which lie on two ranks (F35) in chunks of one layer and wherever the stages differ.
PIPELINES = {
    (2, 1): (4, "Et|t*7L"),
    (2, 2): (2, "Et|t*4|tt|tL"),
    (4, 1): (2, "E|t|t*5|ttL"),
    (4, 2): (1, "E|t|t|t||tt|tt|tL"),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A mode and how the devices are shared; the micro-batch is that of one data parallel rank."""

    encoder: str
    mode: str
    ranks: int = 1
    chunks: int = 1
    uneven: bool = False
    tensor: int = 1
    encoder_tensor: int = 1
    data: int = 1
    micro_batch: int = 1
    sequence_parallel: bool = False
    vocabulary_over_stages: bool = False
    encoder_recompute: bool = False
    sharding: str = "no_shard"
    num_rows: int = NUM_ROWS

    @property
    def num_devices(self) -> int:
        return self.ranks * self.tensor * self.data

    @property
    def num_microbatches(self) -> int:
        return self.num_rows // (self.data * self.micro_batch)

    @property
    def stages(self) -> str:
        if self.ranks == 1:
            return ""
        per_chunk, layout = PIPELINES[self.ranks, self.chunks]
        return layout if self.uneven else f"{per_chunk} layer{'s' if per_chunk > 1 else ''} each"

    @property
    def options(self) -> str:
        on = {
            "sequence parallel": self.sequence_parallel,
            "vocabulary over stages": self.vocabulary_over_stages,
            "encoder recompute": self.encoder_recompute,
            self.sharding: self.sharding != "no_shard",
        }
        return "; ".join(name for name, is_on in on.items() if is_on)

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
        recompute = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
        return vision_config(
            self.encoder,
            encoder_changes=dict(tensor_model_parallel_size=self.encoder_tensor)
            | (recompute if self.encoder_recompute else {}),
            parallel=dict(
                tensor_model_parallel_size=self.tensor,
                sequence_parallel=self.sequence_parallel,
                data_parallel_sharding_strategy=self.sharding,
            )
            | pipeline
            | {switch: True for mode, switch in _SWITCHES.items() if mode == self.mode},
            train=dict(global_batch_size=self.num_rows, micro_batch_size=self.micro_batch),
            **groups,
        )

    def program(self, config: Config) -> Program:
        mesh = build_mesh(MeshLayout.from_config(config, self.num_devices), jax.devices()[: self.num_devices])
        return build_program(config, mesh, "cpu")

    def parameters(self, program: Program, config: Config, parameters: dict) -> dict:
        """Parameters of one device, laid out for the functions of the program."""
        abstract = join(program.abstract_state["trainable"], program.abstract_state["frozen"])
        return jax.device_put(placed(config, parameters), jax.tree.map(lambda shape: shape.sharding, abstract))

    def batch(self, program: Program, config: Config, rows: dict[str, np.ndarray]) -> dict:
        layout = BatchLayout.from_config(config, program.mesh, self.num_microbatches)
        return layout.batch(microbatches(rows, self.num_microbatches))

    def by_layer(self, config: Config, gradients: dict) -> dict:
        """Gradients as those of one device."""
        return unplaced(config, gradients)

    def rank_of_row(self, row: int) -> int:
        """The data parallel rank that has a row of the step."""
        return row % (self.data * self.micro_batch) // self.micro_batch


def all_cases() -> list[Case]:
    """Every pipeline over both kinds of stages, TP and DP 1 and 2 as 8 devices allow, in every mode that they have.

    Options and micro-batches change from one to the next, so that each goes with each mode.
    """
    pipelines = [(1, 1, False), *((*pipeline, uneven) for pipeline in PIPELINES for uneven in (False, True))]
    cases = []
    for encoder, mode, tensor, data, pipeline in itertools.product(ENCODERS, MODES, (1, 2), (1, 2), pipelines):
        ranks = pipeline[0]
        group = {HETERO_TP: 0, ENCODER_HETERO_DP: tensor, FULL_HETERO_DP: ranks * tensor}[mode]
        if ranks * tensor * data > 8 or group == 1:
            continue
        for encoder_tensor in (1, 2)[:tensor] if mode == HETERO_TP else (1,):
            number = len(cases)
            cases.append(
                Case(
                    encoder,
                    mode,
                    *pipeline,
                    tensor,
                    encoder_tensor,
                    data,
                    micro_batch=1 + number // 2 % 2,
                    sequence_parallel=tensor > 1 and number % 2 == 0,
                    vocabulary_over_stages=ranks > 1 and number % 3 == 0,
                    encoder_recompute=number % 5 == 0,
                )
            )
    return cases


def vision_config(encoder: str, *, encoder_changes=(), **groups) -> Config:
    """By default on one device; eight decoder layers, two DeepStack features of qwen3_vit, and z-loss."""
    deepstack = {"deepstack_visual_indexes": (0, 1)} if encoder == "qwen3_vit" else {}
    return tiny_config(
        encoder,
        encoder_changes=deepstack | dict(encoder_changes),
        decoder_changes=dict(num_layers=NUM_LAYERS),
        loss=dict(z_loss_coefficient=Z_LOSS),
        **groups,
    )


def rows_with_images(config: Config, num_rows: int = NUM_ROWS) -> dict[str, np.ndarray]:
    """Rows of which no two have the same tokens or the same pixels; every fourth is text alone."""
    rows = distinct_rows(config, num_rows)
    brightness_R = 1 + np.arange(num_rows) // 4 / 4
    return rows | {"patches": rows["patches"] * brightness_R.astype(np.float32)[:, None, None]}


def rows_where(config: Config, images_of: Mapping[int, Sequence[tuple[int, int]]]) -> dict[str, np.ndarray]:
    """Twelve rows of text, of which some have images too: (height, width) of those of each row that has any."""
    packed = []
    for number in range(NUM_ROWS):
        images = [image(*size, seed=100 * number + i) for i, size in enumerate(images_of.get(number, ()))]
        packed.append(row(config, document(config, 2, images, 3, seed=number), document(config, 1, after=2)))
    return {key: np.stack([one[key] for one in packed]) for key in packed[0]}


@functools.cache
def vision_problem(encoder: str) -> tuple[dict, dict, float, dict]:
    """Parameters, rows with images, and what one device computes from them: loss and gradients."""
    config = vision_config(encoder)
    parameters, rows = random_parameters(config), rows_with_images(config)
    return parameters, rows, *loss_and_gradients(config, parameters, rows)


def gradient_program(case: Case | TextCase, config: Config, parameters: dict, rows: dict) -> tuple:
    """The jitted gradients of a case, and their arguments."""
    program = case.program(config)
    if isinstance(case, Case):
        return program.gradients, case.parameters(program, config, parameters), case.batch(program, config, rows)
    return program.gradients, *case.arguments(program, config, parameters, rows)


def assert_all_are_those_of_one_device(compiler, runs) -> None:
    """(name, case, config, (parameters, rows, loss, gradients of one device)); compiled beside each other."""
    pending = []
    for name, case, config, (parameters, rows, *expected) in runs:
        gradients, *arguments = gradient_program(case, config, parameters, rows)
        traced = gradients.trace(*arguments)
        assert ("<host>" in str(traced.jaxpr)) == offloads_activations(config), name
        pending.append((name, config, compiler.submit(traced.lower().compile), arguments, expected))
    for name, config, executable, arguments, expected in pending:
        gradients, sums = executable.result()(*arguments)
        deviation(loss_of(config, sums), unplaced(config, gradients), *expected).assert_small(name)
