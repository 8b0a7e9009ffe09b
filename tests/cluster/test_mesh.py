import dataclasses
import random

import jax
import numpy as np
import pytest

from jaxforge.cluster import mesh as mesh_module
from jaxforge.cluster.mesh import (
    MeshLayout,
    arrange,
    axes_crossing_nodes,
    build_mesh,
    describe,
    mesh_layout,
    node_of,
    num_nodes_along,
)
from jaxforge.config.errors import ConfigError
from jaxforge.config.schema import Config, EncoderConfig, ModelConfig, ParallelConfig


@dataclasses.dataclass(frozen=True)
class FakeDevice:
    id: int
    process_index: int
    slice_index: int | None = None


class CompileOnlyPyClient:
    """Named like jaxlib's client of described devices."""


@dataclasses.dataclass(frozen=True)
class DescribedDevice(FakeDevice):
    slice_index: int | None = 0
    client: CompileOnlyPyClient = dataclasses.field(default_factory=CompileOnlyPyClient)


def gpus(nodes: int, per_node: int) -> list[FakeDevice]:
    """One process per node; devices numbered node by node."""
    return [FakeDevice(id=index, process_index=index // per_node) for index in range(nodes * per_node)]


def ids(array: np.ndarray) -> list:
    return np.vectorize(lambda device: device.id, otypes=[int])(array).tolist()


def test_the_replica_axis_is_what_remains_of_the_devices():
    layout = mesh_layout(64, tensor=4, stage=4)
    assert layout.shape == (4, 4, 1, 1, 1, 4)
    assert (layout.data_parallel_size, layout.num_devices) == (4, 64)


def test_experts_count_as_data_parallel_ranks():
    layout = mesh_layout(64, tensor=2, expert=8, context=2)
    assert layout.shape == (1, 2, 8, 2, 1, 2)
    assert layout.data_parallel_size == 16


@pytest.mark.parametrize("encoder_tensor, outer, inner", [(None, 1, 4), (1, 4, 1), (2, 2, 2), (4, 1, 4)])
def test_encoder_tensor_parallel_size_is_the_inner_tensor_axis(encoder_tensor, outer, inner):
    layout = mesh_layout(8, tensor=4, encoder_tensor=encoder_tensor)
    assert (layout.tensor_outer, layout.tensor_inner) == (outer, inner)
    assert (layout.tensor_parallel_size, layout.encoder_tensor_parallel_size) == (4, inner)


def test_a_config_without_an_encoder_keeps_the_tensor_axis_whole():
    config = Config(parallel=ParallelConfig(tensor_model_parallel_size=4))
    assert MeshLayout.from_config(config, 8) == MeshLayout(replica=2, tensor_inner=4)


def test_a_config_gives_the_encoder_its_own_tensor_size():
    config = Config(
        model=ModelConfig(encoder=EncoderConfig(tensor_model_parallel_size=1)),
        parallel=ParallelConfig(tensor_model_parallel_size=2),
    )
    assert MeshLayout.from_config(config, 8) == MeshLayout(replica=4, tensor_outer=2, tensor_inner=1)


@pytest.mark.parametrize(
    "sizes, message",
    [
        ({"tensor": 3}, "parallel.tensor_model_parallel_size=3 does not divide the 8 devices; use"
                        " parallel.tensor_model_parallel_size=1, 2, 4 or 8"),
        ({"tensor": 4, "encoder_tensor": 3}, "model.encoder.tensor_model_parallel_size=3 does not divide"
                                             " parallel.tensor_model_parallel_size=4; use 1, 2 or 4"),
        # 8 devices / 3 stages leaves no tensor size, 8 / 4 leaves 1 or 2 stages
        ({"tensor": 4, "stage": 3}, "parallel.tensor_model_parallel_size=4 x parallel.pipeline_model_parallel_size=3"
                                    " = 12 does not divide the 8 devices; use"
                                    " parallel.pipeline_model_parallel_size=1 or 2"),
        ({"stage": 3, "context": 5}, "parallel.pipeline_model_parallel_size=3 x parallel.context_parallel_size=5 = 15"
                                     " does not divide the 8 devices; use sizes whose product is 1, 2, 4 or 8"),
        ({"expert": 0}, "parallel.expert_model_parallel_size=0 is not a number of devices; use 1 or more"),
    ],
)  # fmt: skip
def test_sizes_that_do_not_factor_name_the_fields_and_what_would_do(sizes, message):
    with pytest.raises(ConfigError) as error:
        mesh_layout(8, **sizes)
    assert str(error.value) == message


def test_a_layout_of_another_number_of_devices_is_refused():
    with pytest.raises(ConfigError, match="the mesh replica 4 x tensor 2 needs 8 devices, there are 16"):
        arrange(MeshLayout(replica=4, tensor_inner=2), gpus(2, 8))


def test_64_gpus_in_8_nodes_keep_tensor_groups_inside_a_node():
    # Megatron's order by hand: GPU = 16 stage + 4 replica + tensor, 8 GPUs to a node
    layout = mesh_layout(64, tensor=4, stage=4)
    devices = gpus(8, 8)
    random.Random(0).shuffle(devices)
    array = arrange(layout, devices)
    assert ids(array[0, 0, 0, 0, 0]) == [0, 1, 2, 3]
    assert ids(array[1, 2, 0, 0, 0]) == [24, 25, 26, 27]
    assert ids(array[3, 3, 0, 0, 0]) == [60, 61, 62, 63]
    assert {device.process_index for device in array[1, 2].flat} == {3}
    assert {device.process_index for device in array[1].flat} == {2, 3}
    assert axes_crossing_nodes(array) == {
        "stage": True, "replica": True, "expert": False, "context": False, "tensor_outer": False, "tensor_inner": False
    }  # fmt: skip


def test_64_gpus_in_8_nodes_are_described_in_a_line_per_node():
    layout = mesh_layout(64, tensor=4, stage=4)
    assert describe(arrange(layout, gpus(8, 8)), layout).splitlines() == [
        "64 devices in 8 nodes: stage 4 x replica 4 x tensor 4",
        "node 0  GPU 0-7  stage 0  replica 0-1  tensor 0-3",
        "node 1  GPU 0-7  stage 0  replica 2-3  tensor 0-3",
        "node 2  GPU 0-7  stage 1  replica 0-1  tensor 0-3",
        "node 3  GPU 0-7  stage 1  replica 2-3  tensor 0-3",
        "node 4  GPU 0-7  stage 2  replica 0-1  tensor 0-3",
        "node 5  GPU 0-7  stage 2  replica 2-3  tensor 0-3",
        "node 6  GPU 0-7  stage 3  replica 0-1  tensor 0-3",
        "node 7  GPU 0-7  stage 3  replica 2-3  tensor 0-3",
        "between nodes: stage, replica",
        "inside a node: tensor_inner",
    ]


def test_devices_along_axes_lie_on_nodes_in_blocks_or_else_count_as_on_one():
    # 4 nodes of 8: an expert group of 16 is two nodes, with tensor groups of 2 inside; of 4 it is half a node
    array = arrange(mesh_layout(32, tensor=2, expert=8), gpus(4, 8))
    assert num_nodes_along(array, ("expert",)) == 2
    assert num_nodes_along(array, ("expert", "tensor_inner")) == 2
    assert num_nodes_along(array, ("replica", "expert")) == 4
    assert num_nodes_along(array, ("tensor_inner",)) == 1
    assert num_nodes_along(arrange(mesh_layout(32, tensor=2, expert=2), gpus(4, 8)), ("expert",)) == 1
    # groups of 4 on nodes of 6: some lie on one node, some on two
    assert num_nodes_along(arrange(mesh_layout(12, expert=4), gpus(2, 6)), ("expert",)) == 1
    # a tensor rank's ranks of the first axis alternate between nodes
    assert num_nodes_along(arrange(mesh_layout(16, tensor=2, expert=8), gpus(2, 8)), ("tensor_inner", "expert")) == 1


def test_1024_gpus_are_described_in_a_line_per_node_too():
    layout = mesh_layout(1024, tensor=8, encoder_tensor=1, stage=16)
    text = describe(arrange(layout, gpus(128, 8)), layout)
    # GPU 776 = 64 x 12 + 8 x 1: node 97 is stage 12, replica 1
    assert "node  97  GPU 0-7  stage 12  replica 1  tensor 0-7" in text
    assert "8 copies of the encoder in each tensor group" in text
    assert len(text.splitlines()) == 1 + 1 + 128 + 2


def test_a_tensor_group_over_two_nodes_is_warned_of():
    layout = mesh_layout(16, tensor=16, encoder_tensor=4)
    array = arrange(layout, gpus(2, 8))
    assert axes_crossing_nodes(array)["tensor_outer"] and not axes_crossing_nodes(array)["tensor_inner"]
    text = describe(array, layout)
    assert "node 1  GPU 0-7  tensor 8-15" in text
    assert "warning: parallel.tensor_model_parallel_size=16 crosses nodes" in text
    assert "1, 2, 4 or 8 would stay inside a node of 8" in text


def test_a_tensor_group_inside_a_node_is_not_warned_of():
    layout = mesh_layout(16, tensor=8)
    assert "warning" not in describe(arrange(layout, gpus(2, 8)), layout)


def test_a_node_that_cuts_a_tensor_group_takes_a_line_for_each_part():
    # 6 GPUs to a node, tensor 4: GPUs 0-3 | 4-5 and 6-7 | 8-11
    layout = mesh_layout(12, tensor=4)
    lines = describe(arrange(layout, gpus(2, 6)), layout).splitlines()
    assert lines[1:5] == [
        "node 0  GPU 0-3  replica 0  tensor 0-3",
        "        GPU 4-5  replica 1  tensor 0-1",
        "node 1  GPU 0-1  replica 1  tensor 2-3",
        "        GPU 2-5  replica 2  tensor 0-3",
    ]


def test_processes_dealt_out_over_nodes_in_turn_are_gathered_by_node():
    # SLURM's cyclic distribution, one process per GPU: even ranks on node 0, odd ranks on node 1
    devices = [FakeDevice(id=rank, process_index=rank, slice_index=rank % 2) for rank in range(8)]
    array = arrange(mesh_layout(8, tensor=4), devices)
    assert ids(array[0, :, 0, 0, 0]) == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_a_node_is_the_slice_where_there_is_one_else_the_process():
    assert node_of(FakeDevice(id=9, process_index=5, slice_index=0)) == 0
    assert node_of(FakeDevice(id=9, process_index=5)) == 5
    assert node_of(DescribedDevice(id=9, process_index=5)) == 5


def test_the_mesh_has_the_six_axes_all_automatic():
    mesh = build_mesh(MeshLayout(), jax.devices()[:1])
    assert mesh.axis_names == ("stage", "replica", "expert", "context", "tensor_outer", "tensor_inner")
    assert set(mesh.axis_types) == {jax.sharding.AxisType.Auto}
    assert describe(mesh, MeshLayout()).splitlines()[:2] == ["1 device in 1 node: no parallelism", "node 0  device 0"]


def test_manual_and_tensor_axes_are_the_mesh_in_two_parts():
    assert mesh_module.MANUAL_AXES + mesh_module.TENSOR_AXES == mesh_module.AXES
