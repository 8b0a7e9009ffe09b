"""GPU descriptions: for compiling without the GPU, and for the peak that utilisation is measured against.

The hardware figures are those that the OpenXLA project publishes for these GPUs; peaks are from NVIDIA's data sheets.
"""

import dataclasses
import importlib.util
import re
from typing import Any

import jax
from jax.experimental import topologies

from jaxforge.config.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Gpu:
    """One GPU model.  Sizes in bytes, rates per second; `peak_flops` is dense bfloat16 with fp32 accumulation."""

    name: str
    description: str
    capacity: int
    compute_capability: tuple[int, int]
    peak_flops: float
    memory_bandwidth: int
    core_count: int
    fpus_per_core: int
    shared_memory_per_core: int
    shared_memory_per_block_optin: int
    l2_cache_size: int
    clock_rate_ghz: float
    feature_extension: str = "ACCELERATED_FEATURES"


_A100 = Gpu(
    name="a100",
    description="NVIDIA A100-SXM4-80GB",
    capacity=85_100_068_864,
    compute_capability=(8, 0),
    peak_flops=312e12,
    memory_bandwidth=2_039_040_000_000,
    core_count=108,
    fpus_per_core=64,
    shared_memory_per_core=167_936,
    shared_memory_per_block_optin=166_912,
    l2_cache_size=41_943_040,
    clock_rate_ghz=1.41,
    feature_extension="NONE",
)
_H100 = Gpu(
    name="h100",
    description="NVIDIA H100 80GB HBM3",
    capacity=84_942_979_072,
    compute_capability=(9, 0),
    peak_flops=989e12,
    memory_bandwidth=3_352_320_000_000,
    core_count=132,
    fpus_per_core=128,
    shared_memory_per_core=233_472,
    shared_memory_per_block_optin=232_448,
    l2_cache_size=52_428_800,
    clock_rate_ghz=1.98,
)
_H200 = dataclasses.replace(
    _H100,
    name="h200",
    description="NVIDIA H200 141GB HBM3e",
    capacity=151_397_597_184,
    memory_bandwidth=4_800_000_000_000,
)
_B200 = dataclasses.replace(
    _H100,
    name="b200",
    description="NVIDIA B200",
    capacity=191_514_411_008,
    compute_capability=(10, 0),
    peak_flops=2250e12,
    memory_bandwidth=7_672_320_000_000,
    core_count=148,
    l2_cache_size=132_644_864,
    clock_rate_ghz=1.965,
)
GPUS = {gpu.name: gpu for gpu in (_H100, _H200, _B200, _A100)}

# Words of `device_kind`, and dense bfloat16 FLOP/s; the first row whose words all appear.  GPUs without bfloat16
# tensor cores (V100, T4) aren't here.
_PEAKS = (
    (("H100", "PCIE"), 756e12),
    (("H100", "NVL"), 835e12),
    (("H200", "NVL"), 835e12),
    (("GB200",), 2500e12),
    (("B200",), 2250e12),
    (("GH200",), 989e12),
    (("H200",), 989e12),
    (("H100",), 989e12),
    (("H800",), 989e12),
    (("H20",), 148e12),
    (("A100",), 312e12),
    (("A800",), 312e12),
    (("A30",), 165e12),
    (("A40",), 149.7e12),
    (("A10",), 125e12),
    (("A10G",), 70e12),
    (("L40S",), 362e12),
    (("L40",), 181e12),
    (("L4",), 121e12),
)


@dataclasses.dataclass(frozen=True)
class Topology:
    """A cluster of `hosts` machines with `gpus_per_host` GPUs of one model each."""

    gpu: Gpu
    hosts: int
    gpus_per_host: int

    @property
    def num_devices(self) -> int:
        return self.hosts * self.gpus_per_host


def parse_topology(text: str) -> Topology:
    """`h100:2x8` is 2 hosts with 8 H100 each.  Raises ConfigError for anything else."""
    match = re.fullmatch(r"(\w+):([1-9]\d*)x([1-9]\d*)", text.strip().lower())
    if not match:
        raise ConfigError(f"topology={text!r} is not GPU:HOSTSxGPUS; use for example h100:2x8 for 2 hosts of 8 GPUs")
    if match[1] not in GPUS:
        raise ConfigError(f"topology={text!r} names GPU {match[1]!r}; use {', '.join(GPUS)}")
    return Topology(GPUS[match[1]], int(match[2]), int(match[3]))


def target_config(gpu: Gpu) -> str:
    """XLA's description of a GPU (text of its GpuTargetConfigProto), for compiling without one."""
    major, minor = gpu.compute_capability
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {gpu.shared_memory_per_core}
  threads_per_core_limit: 2048
  core_count: {gpu.core_count}
  fpus_per_core: {gpu.fpus_per_core}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {gpu.memory_bandwidth}
  l2_cache_size: {gpu.l2_cache_size}
  clock_rate_ghz: {gpu.clock_rate_ghz}
  device_memory_size: {gpu.capacity}
  shared_memory_per_block_optin: {gpu.shared_memory_per_block_optin}
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {gpu.feature_extension} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 7 }}
runtime_version {{ major: 12 minor: 8 patch: 0 }}
device_description_str: "{gpu.description}"
"""


def described_devices(topology: Topology) -> list[Any]:
    """Devices of a cluster that isn't here, in order of id; `process_index` is the host.  They compile, never run.

    Raises ConfigError when the CUDA compiler plugin isn't installed or doesn't load.  It wants JAX_PLATFORMS=cpu
    where its CUDA libraries aren't installed.
    """
    if importlib.util.find_spec("jax_cuda12_plugin") is None:
        raise ConfigError(
            "compiling for a GPU needs JAX's CUDA compiler plugin; run: make setup-gpu-compile"
            f" (or pip install --no-deps jax-cuda12-plugin=={jax.__version__} jax-cuda12-pjrt=={jax.__version__}"
            " nvidia-cuda-nvcc-cu12 nvidia-cudnn-cu12)"
        )
    try:
        description = topologies.get_topology_desc(
            platform="cuda",
            topology_name=topology.gpu.name,
            target_config=target_config(topology.gpu),
            # XLA reads NVLink domains x hosts in each x GPUs.
            topology=f"{topology.hosts}x1x{topology.gpus_per_host}",
        )
    except NotImplementedError as error:
        raise ConfigError(
            f"JAX's CUDA compiler plugin is installed but did not load (JAX_PLATFORMS={jax.config.jax_platforms});"
            " set JAX_PLATFORMS=cpu, or run: make setup-gpu-compile"
        ) from error
    return sorted(description.devices, key=lambda device: device.id)


def peak_flops(device_kind: str) -> float | None:
    """Dense bfloat16 FLOP/s of a real GPU from JAX's `device_kind`; None if unknown or without bfloat16 units."""
    words = set(re.split(r"[\s\-_/]+", device_kind.upper()))
    for needed, peak in _PEAKS:
        if words.issuperset(needed):
            return peak
    return None
