import importlib.util

import jax
import pytest

from jaxforge.cluster.mesh import axes_crossing_nodes, build_mesh, mesh_layout, node_of
from jaxforge.cluster.topology import GPUS, described_devices, parse_topology, peak_flops, target_config
from jaxforge.config.errors import ConfigError

needs_compiler_plugin = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda12_plugin") is None, reason="needs the CUDA compiler plugin"
)


def test_a_topology_is_a_gpu_and_hosts_by_gpus():
    topology = parse_topology("H100:2x8")
    assert (topology.gpu.name, topology.hosts, topology.gpus_per_host) == ("h100", 2, 8)
    assert topology.num_devices == 16


@pytest.mark.parametrize("text", ["h100", "h100:8", "h100:0x8", "h100:2x8x1", "h100:2x-8", ""])
def test_a_topology_of_another_form_is_refused_with_an_example(text):
    with pytest.raises(ConfigError, match="use for example h100:2x8"):
        parse_topology(text)


def test_a_gpu_that_is_not_in_the_table_is_refused_with_those_that_are():
    with pytest.raises(ConfigError, match="names GPU 'v100'; use h100, h200, b200, a100"):
        parse_topology("v100:1x8")


def test_capacity_is_about_the_memory_on_the_label():
    gib = 2**30
    assert {name: gpu.capacity // gib for name, gpu in GPUS.items()} == {
        "a100": 79, "h100": 79, "h200": 141, "b200": 178
    }  # fmt: skip


def test_the_target_config_carries_the_figures_of_its_gpu():
    words = target_config(GPUS["b200"]).split()
    expected = {"core_count:": "148", "memory_bandwidth:": "7672320000000", "major:": "10", "minor:": "0"}
    assert {name: words[words.index(name) + 1] for name in expected} == expected
    assert "feature_extension: NONE" in target_config(GPUS["a100"])


@pytest.mark.parametrize(
    "device_kind, peak",
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A100-PCIE-40GB", 312e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA H20", 148e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA A10G", 70e12),
        ("Tesla V100-SXM2-16GB", None),
        ("Tesla T4", None),
        ("cpu", None),
    ],
)
def test_peak_flops_of_a_device_kind(device_kind, peak):
    assert peak_flops(device_kind) == peak


def test_a_described_gpu_has_the_peak_of_the_real_one():
    assert {name: peak_flops(gpu.description) for name, gpu in GPUS.items()} == {
        "h100": 989e12, "h200": 989e12, "b200": 2250e12, "a100": 312e12
    }  # fmt: skip


def test_a_missing_compiler_plugin_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as error:
        described_devices(parse_topology("h100:1x8"))
    assert "make setup-gpu-compile" in str(error.value)
    assert f"jax-cuda12-plugin=={jax.__version__} jax-cuda12-pjrt=={jax.__version__}" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_compiler_plugin_that_does_not_load_is_told_from_a_missing_one(monkeypatch):
    def not_registered(**_):
        raise NotImplementedError("topology not implemented for cuda")

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr("jax.experimental.topologies.get_topology_desc", not_registered)
    with pytest.raises(ConfigError, match="set JAX_PLATFORMS=cpu"):
        described_devices(parse_topology("h100:1x8"))


@needs_compiler_plugin
@pytest.mark.parametrize("name", sorted(GPUS))
def test_the_compiler_describes_every_gpu_of_the_table(name):
    devices = described_devices(parse_topology(f"{name}:2x4"))
    assert [device.id for device in devices] == [0, 1, 2, 3, 4, 5, 6, 7]
    assert [node_of(device) for device in devices] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert devices[0].device_kind == GPUS[name].description


@needs_compiler_plugin
def test_a_mesh_of_described_gpus_knows_which_axes_cross_hosts():
    mesh = build_mesh(mesh_layout(16, tensor=8), described_devices(parse_topology("h100:2x8")))
    assert [axis for axis, crosses in axes_crossing_nodes(mesh).items() if crosses] == ["replica"]
