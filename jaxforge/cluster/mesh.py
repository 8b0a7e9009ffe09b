"""The one device mesh: its axes, how they follow from the config, and which GPU holds what.

The order of the axes is Megatron's: pipeline outermost, tensor innermost (Narayanan et al. 2021, arXiv:2104.04473,
section 3), so that the heaviest and most frequent messages stay between GPUs of one node.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxforge.config.derived import encoder_tensor_parallel_size, expert_axis_size, experts_are_over_tensor
from jaxforge.config.errors import ConfigError
from jaxforge.config.model_rules import divisors, one_of
from jaxforge.config.schema import Config
from jaxforge.words import counted

AXES = ("stage", "replica", "expert", "context", "tensor_outer", "tensor_inner")
STAGE, EXPERT = "stage", "expert"
DATA_AXES = ("replica", "expert")
TENSOR_AXES = ("tensor_outer", "tensor_inner")
MANUAL_AXES = ("stage", "replica", "expert", "context")


@dataclasses.dataclass(frozen=True)
class MeshLayout:
    """Sizes of the six mesh axes, outermost to innermost, in devices."""

    stage: int = 1
    replica: int = 1
    expert: int = 1
    context: int = 1
    tensor_outer: int = 1
    tensor_inner: int = 1

    @classmethod
    def from_config(cls, config: Config, num_devices: int) -> "MeshLayout":
        """The layout that a run's config asks for.  Raises ConfigError when it doesn't factor `num_devices`."""
        parallel = config.parallel
        return mesh_layout(
            num_devices,
            tensor=parallel.tensor_model_parallel_size,
            encoder_tensor=encoder_tensor_parallel_size(config),
            stage=parallel.pipeline_model_parallel_size,
            expert=expert_axis_size(config),
            context=parallel.context_parallel_size,
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes in the order of AXES."""
        return dataclasses.astuple(self)

    @property
    def data_parallel_size(self) -> int:
        """Ranks that hold different rows: replica x expert."""
        return self.replica * self.expert

    @property
    def tensor_parallel_size(self) -> int:
        """Devices that share each decoder layer."""
        return self.tensor_outer * self.tensor_inner

    @property
    def encoder_tensor_parallel_size(self) -> int:
        """Devices that share each encoder layer; the encoder is repeated over `tensor_outer`."""
        return self.tensor_inner

    @property
    def num_devices(self) -> int:
        return math.prod(self.shape)


def mesh_layout(
    num_devices: int,
    *,
    tensor: int = 1,
    encoder_tensor: int | None = None,
    stage: int = 1,
    expert: int = 1,
    context: int = 1,
) -> MeshLayout:
    """Factor `num_devices` into the mesh axes; `replica` is what remains.

    `encoder_tensor` None inherits `tensor`.  Raises ConfigError, with the numbers that would do, when a size isn't
    positive, when the encoder's tensor size doesn't divide the decoder's, or when the sizes don't divide the devices.
    """
    inner = tensor if encoder_tensor is None else encoder_tensor
    sizes = {
        "parallel.tensor_model_parallel_size": tensor,
        "parallel.pipeline_model_parallel_size": stage,
        "parallel.expert_model_parallel_size": expert,
        "parallel.context_parallel_size": context,
    }
    for name, size in {**sizes, "model.encoder.tensor_model_parallel_size": inner}.items():
        if size < 1:
            raise ConfigError(f"{name}={size} is not a number of devices; use 1 or more")
    if tensor % inner:
        raise ConfigError(
            f"model.encoder.tensor_model_parallel_size={inner} does not divide"
            f" parallel.tensor_model_parallel_size={tensor}; use {one_of(divisors(tensor))}"
        )
    model_size = math.prod(sizes.values())
    if num_devices < 1 or num_devices % model_size:
        raise ConfigError(_does_not_factor(num_devices, sizes))
    return MeshLayout(
        stage=stage,
        replica=num_devices // model_size,
        expert=expert,
        context=context,
        tensor_outer=tensor // inner,
        tensor_inner=inner,
    )


def large_axes(mesh: jax.sharding.Mesh, axes: Sequence[str]) -> tuple[str, ...]:
    """Those of more than one device.

    XLA's partitioner refuses a reduction over manual axes when all of them have size 1.
    """
    return tuple(axis for axis in axes if mesh.shape[axis] > 1)


def expert_axes(config: Config) -> tuple[str, ...]:
    """The axes over which experts are shared out, outermost first."""
    return (EXPERT, *TENSOR_AXES) if experts_are_over_tensor(config) else (EXPERT,)


def node_of(device: Any) -> int:
    """Number of the physical host of a device.

    JAX gives the devices of one host one `slice_index`, however many processes share the host; where a device has
    none, each process counts as a host.  So does it for a described device (`topologies`): its `slice_index` is 0 on
    every host.
    """
    slice_index = getattr(device, "slice_index", None)
    described = type(getattr(device, "client", None)).__name__ == "CompileOnlyPyClient"
    return device.process_index if slice_index is None or described else slice_index


def arrange(layout: MeshLayout, devices: Sequence[Any]) -> np.ndarray:
    """Devices in mesh order: object array of shape `layout.shape`, filled node by node, innermost axis first.

    Devices are anything with `id`, `process_index` and perhaps `slice_index`.  Raises ConfigError when their number
    isn't the layout's.
    """
    if len(devices) != layout.num_devices:
        raise ConfigError(
            f"the mesh {_sizes(layout)} needs {layout.num_devices} devices, there are {len(devices)};"
            f" set train.simulated_devices={layout.num_devices} on CPU, or start the run on {layout.num_devices} GPUs"
        )
    # Ids alone may interleave nodes (SLURM's cyclic distribution): sort by node first.
    ordered = sorted(devices, key=lambda device: (node_of(device), device.id))
    array = np.empty(len(ordered), dtype=object)
    array[:] = ordered
    return array.reshape(layout.shape)


def build_mesh(layout: MeshLayout, devices: Sequence[jax.Device] | None = None) -> jax.sharding.Mesh:
    """The mesh of a run over `devices` (all of the run's when None), every axis of type Auto."""
    devices = jax.devices() if devices is None else devices
    axis_types = (jax.sharding.AxisType.Auto,) * len(AXES)
    return jax.sharding.Mesh(arrange(layout, devices), AXES, axis_types=axis_types)


def axes_crossing_nodes(mesh: jax.sharding.Mesh | np.ndarray) -> dict[str, bool]:
    """For each mesh axis, whether some group of devices along it spans several nodes.

    Takes the mesh or the array of `arrange`.  An axis of size 1 crosses nothing.
    """
    nodes = _nodes(_device_array(mesh))
    return {axis: bool((nodes != nodes.take([0], axis=dim)).any()) for dim, axis in enumerate(AXES)}


def num_nodes_along(mesh: jax.sharding.Mesh | np.ndarray, axes: Sequence[str]) -> int:
    """Nodes that the devices along some axes lie on, as equal blocks of consecutive ones; 1 where they lie otherwise.

    Takes the mesh or the array of `arrange`; devices along several axes are counted through, the first axis outermost.
    """
    nodes, dims = _nodes(_device_array(mesh)), [AXES.index(axis) for axis in axes]
    size = math.prod(nodes.shape[dim] for dim in dims)
    nodes_GP = np.moveaxis(nodes, dims, range(-len(dims), 0)).reshape(-1, size)
    number = len(set(nodes_GP[0]))
    if size % number:
        return 1
    # one node in each block, and as many nodes as blocks
    nodes_GHL = nodes_GP.reshape(len(nodes_GP), number, -1)
    fits = (nodes_GHL == nodes_GHL[:, :, :1]).all() and all(len(set(group)) == number for group in nodes_GP)
    return number if fits else 1


def describe(mesh: jax.sharding.Mesh | np.ndarray, layout: MeshLayout) -> str:
    """Which GPU of which node holds what, and which axes cross nodes: a line per node, for a person to read.

    Takes the mesh or the array of `arrange`.  A node whose GPUs aren't a full block of ranks takes several lines.
    """
    devices = _device_array(mesh)
    nodes = _nodes(devices)
    numbers = sorted(set(nodes.flat))
    lines = [f"{counted(devices.size, 'device')} in {counted(len(numbers), 'node')}: {_sizes(layout)}"]
    if layout.tensor_outer > 1:
        lines.append(
            f"encoder tensor parallel {layout.tensor_inner}: encoder tensor rank = tensor rank modulo"
            f" {layout.tensor_inner}, {layout.tensor_outer} copies of the encoder in each tensor group"
        )
    width = len(str(numbers[-1]))
    for number in numbers:
        label = f"node {number:>{width}}"
        for line in _node_lines(devices, nodes == number):
            lines.append(f"{label}  {line}")
            label = " " * len(label)
    crossing = axes_crossing_nodes(devices)
    large = [axis for axis, size in zip(AXES, layout.shape, strict=True) if size > 1]
    lines.append("between nodes: " + (", ".join(axis for axis in large if crossing[axis]) or "nothing"))
    lines.append("inside a node: " + (", ".join(axis for axis in large if not crossing[axis]) or "nothing"))
    if any(crossing[axis] for axis in TENSOR_AXES):
        per_node = int(min(np.count_nonzero(nodes == number) for number in numbers))
        lines.append(
            f"warning: parallel.tensor_model_parallel_size={layout.tensor_parallel_size} crosses nodes, so every"
            f" layer waits for the network; {one_of(divisors(per_node))} would stay inside a node of {per_node}"
        )
    return "\n".join(lines)


def _device_array(mesh: jax.sharding.Mesh | np.ndarray) -> np.ndarray:
    return mesh.devices if isinstance(mesh, jax.sharding.Mesh) else mesh


def _nodes(devices: np.ndarray) -> np.ndarray:
    return np.array([node_of(device) for device in devices.flat]).reshape(devices.shape)


def _node_lines(devices: np.ndarray, in_node: np.ndarray) -> Iterator[str]:
    """What each GPU of one node holds: a line for each block of ranks, GPUs counted from 0 in the order of ids."""
    tensor_outer_dim = AXES.index("tensor_outer")
    shape = (*devices.shape[:tensor_outer_dim], -1)  # a person thinks of one tensor rank, not of two
    names = (*AXES[:tensor_outer_dim], "tensor")
    ids = sorted(device.id for device in devices[in_node])
    local = {index: number for number, index in enumerate(ids)}
    sizes = devices.reshape(shape).shape
    coordinates = np.argwhere(in_node.reshape(shape))
    word = "device" if getattr(devices.flat[0], "platform", "gpu") == "cpu" else "GPU"
    for block in _blocks(coordinates):
        gpus = sorted(local[devices.reshape(shape)[tuple(rank)].id] for rank in block)
        held = [f"{name} {_ranges(block[:, dim])}" for dim, name in enumerate(names) if sizes[dim] > 1]
        yield "  ".join([f"{word} {_ranges(gpus)}", *held])


def _blocks(coordinates: np.ndarray) -> Iterator[np.ndarray]:
    """Split coordinates [n, axes] into blocks that are full products of their ranks along each axis."""
    ranks = [np.unique(column) for column in coordinates.T]
    if math.prod(len(values) for values in ranks) == len(coordinates):
        yield coordinates
        return
    dim = next(dim for dim, values in enumerate(ranks) if len(values) > 1)
    for value in ranks[dim]:
        yield from _blocks(coordinates[coordinates[:, dim] == value])


def _ranges(values: Sequence[int] | np.ndarray) -> str:
    """`0-3,7` for 0, 1, 2, 3, 7."""
    runs: list[list[int]] = []
    for value in sorted({int(value) for value in values}):
        if runs and value == runs[-1][1] + 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _does_not_factor(num_devices: int, sizes: Mapping[str, int]) -> str:
    """One message for a device count that doesn't factor, with the values of one field that would do."""
    used = {name: size for name, size in sizes.items() if size > 1}
    product = " x ".join(f"{name}={size}" for name, size in used.items())
    rule = f"{product} = {math.prod(used.values())} does not divide" if len(used) > 1 else f"{product} does not divide"
    for name, size in used.items():  # tensor first: it is the one most often set
        others = math.prod(used.values()) // size
        if num_devices % others == 0:
            return f"{rule} the {num_devices} devices; use {name}={one_of(divisors(num_devices // others))}"
    return f"{rule} the {num_devices} devices; use sizes whose product is {one_of(divisors(num_devices))}"


def _sizes(layout: MeshLayout) -> str:
    """`stage 4 x replica 4 x tensor 4`: the axes larger than 1."""
    outer = dict(zip(MANUAL_AXES, layout.shape, strict=False))
    sizes = {**outer, "tensor": layout.tensor_parallel_size}
    return " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "no parallelism"
