"""Devices and processes: the mesh, the processes of a run, and descriptions of GPUs that aren't here."""

from jaxforge.cluster.distributed import initialize, simulate_devices
from jaxforge.cluster.launchers import ProcessSpec, detect
from jaxforge.cluster.mesh import (
    AXES,
    DATA_AXES,
    MANUAL_AXES,
    TENSOR_AXES,
    MeshLayout,
    arrange,
    axes_crossing_nodes,
    build_mesh,
    describe,
    mesh_layout,
    node_of,
)
from jaxforge.cluster.topology import (
    GPUS,
    Gpu,
    Topology,
    described_devices,
    parse_topology,
    peak_flops,
    target_config,
)

__all__ = [
    "AXES",
    "DATA_AXES",
    "GPUS",
    "MANUAL_AXES",
    "TENSOR_AXES",
    "Gpu",
    "MeshLayout",
    "ProcessSpec",
    "Topology",
    "arrange",
    "axes_crossing_nodes",
    "build_mesh",
    "describe",
    "described_devices",
    "detect",
    "initialize",
    "mesh_layout",
    "node_of",
    "parse_topology",
    "peak_flops",
    "simulate_devices",
    "target_config",
]
