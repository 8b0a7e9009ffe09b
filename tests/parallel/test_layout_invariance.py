"""Any layout gives the numbers of one device: loss to 1e-6 relative, every gradient to 1e-5 of its largest entry, fp32.

There are 44 layouts and two encoders.  Each program takes about ten seconds to compile, so by default every combination
of tensor parallel sizes runs with one data parallel size and micro-batch for an encoder, and the other encoder has the
other size of both.  JAXFORGE_INVARIANCE_TABLE=FILE runs all 88 and writes the largest deviation of each as a
markdown table.
"""

import dataclasses
import functools
import itertools
import os

import jax
import pytest
from one_device import Deviation, deviation, deviation_table, loss_and_gradients, loss_of
from tiny_models import ENCODERS, microbatches, random_parameters, rows_of_many_kinds, tiny_config

from jaxforge.cluster.mesh import build_mesh, mesh_layout
from jaxforge.training.program import build_program

Z_LOSS = 0.1
NUM_ROWS = 4
TABLE_PATH = os.environ.get("JAXFORGE_INVARIANCE_TABLE")
FAST = {("qwen2_5_vit", 2, 1, True), ("qwen3_vit", 4, 2, False)}


@dataclasses.dataclass(frozen=True)
class Layout:
    """How the devices are shared; the micro-batch is that of one data parallel rank."""

    encoder: str
    tensor: int
    encoder_tensor: int
    sequence_parallel: bool
    data: int
    micro_batch: int

    def __str__(self):
        sequence = ", sequence parallel" if self.sequence_parallel else ""
        return (
            f"{self.encoder}, encoder TP {self.encoder_tensor}, decoder TP {self.tensor}{sequence}, DP {self.data},"
            f" micro-batch {self.micro_batch}"
        )


# (decoder TP, encoder TP, sequence parallel), where encoder TP divides decoder TP
TENSOR_LAYOUTS = [
    (tensor, encoder_tensor, sequence)
    for tensor, encoder_tensor, sequence in itertools.product((1, 2, 4), (1, 2, 4), (False, True))
    if tensor % encoder_tensor == 0 and (tensor > 1 or not sequence)
]
DATA_LAYOUTS = list(itertools.product((1, 2), (1, 2)))  # (DP, micro-batch)


def tensor_layouts():
    for encoder, layout in itertools.product(ENCODERS, TENSOR_LAYOUTS):
        yield pytest.param(encoder, *layout, marks=() if (encoder, *layout) in FAST else pytest.mark.slow)


def data_layouts(encoder, *tensor_layout):
    if TABLE_PATH:
        return DATA_LAYOUTS
    number = TENSOR_LAYOUTS.index(tensor_layout) % 4
    return [DATA_LAYOUTS[3 - number if ENCODERS.index(encoder) else number]]


@pytest.fixture(scope="module")
def table():
    yield from deviation_table(TABLE_PATH, markdown)


@functools.cache
def problem(encoder: str):
    """Parameters, rows, and what one device computes from them."""
    config = tiny_config(encoder, loss=dict(z_loss_coefficient=Z_LOSS))
    parameters, rows = random_parameters(config), rows_of_many_kinds(config)
    return parameters, rows, *loss_and_gradients(config, parameters, rows)


def lowered(layout: Layout):
    """The gradients' program for a layout, ready to compile, and its arguments."""
    parameters, rows, *_ = problem(layout.encoder)
    parallel = dict(tensor_model_parallel_size=layout.tensor, sequence_parallel=layout.sequence_parallel)
    config = tiny_config(
        layout.encoder,
        encoder_changes=dict(tensor_model_parallel_size=layout.encoder_tensor),
        parallel=parallel,
        loss=dict(z_loss_coefficient=Z_LOSS),
    )
    mesh_sizes = mesh_layout(layout.tensor * layout.data, tensor=layout.tensor, encoder_tensor=layout.encoder_tensor)
    mesh = build_mesh(mesh_sizes, jax.devices()[: mesh_sizes.num_devices])
    program = build_program(config, mesh, "cpu")
    batch = microbatches(rows, NUM_ROWS // (layout.data * layout.micro_batch))
    shardings = jax.tree.map(lambda shape: shape.sharding, program.abstract_state["trainable"])
    arguments = jax.device_put(parameters, shardings), jax.device_put(batch, program.batch_sharding)
    return config, program.gradients.lower(*arguments), arguments


@pytest.mark.timeout(900)  # up to four programs to compile
@pytest.mark.parametrize("encoder, tensor, encoder_tensor, sequence_parallel", tensor_layouts())
def test_every_layout_gives_the_loss_and_gradients_of_one_device(  # F22
    table, compiler, encoder, tensor, encoder_tensor, sequence_parallel
):
    layouts = [
        Layout(encoder, tensor, encoder_tensor, sequence_parallel, data, micro_batch)
        for data, micro_batch in data_layouts(encoder, tensor, encoder_tensor, sequence_parallel)
    ]
    pending = []
    for layout in layouts:
        config, program, arguments = lowered(layout)
        pending.append((layout, config, compiler.submit(program.compile), arguments))
    for layout, config, executable, arguments in pending:
        gradients, sums = executable.result()(*arguments)
        _, _, *expected = problem(layout.encoder)
        assert jax.tree.structure(gradients) == jax.tree.structure(expected[1])
        table[layout] = deviation(loss_of(config, sums), gradients, *expected)
    for layout in layouts:
        table[layout].assert_small(layout)


def markdown(deviations: dict[Layout, Deviation]) -> str:
    lines = [
        "| encoder | encoder TP | decoder TP | sequence parallel | DP | micro-batch | loss | gradient | of |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for layout, found in deviations.items():
        sequence = "on" if layout.sequence_parallel else "off"
        lines.append(
            f"| {layout.encoder} | {layout.encoder_tensor} | {layout.tensor} | {sequence} | {layout.data} |"
            f" {layout.micro_batch} | {found.loss:.1e} | {found.gradient:.1e} | `{found.worst}` |"
        )
    return "\n".join(lines) + "\n"
