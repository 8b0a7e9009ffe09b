"""A model's parameters by path and layer, wherever they lie: what conversion, loading and export read from.

Everything is read one layer of one parameter at a time, so that host memory doesn't grow with the model.  Readers count
the layers of the model from 0, whatever pipeline the parameters are laid out for: `order` says where a layer lies, as
`jaxforge.parallel.pipeline.choice.layer_order` gives it; None where they lie in turn.
"""

import functools
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jaxforge.config.model_schema import ModelConfig
from jaxforge.models import VisionLanguageModel
from jaxforge.models.layer_order import LayerOrder, is_in_stacks
from jaxforge.models.moe import is_router_state, is_statistics
from jaxforge.optim.host_memory import is_in_host_memory, moved, to_device
from jaxforge.optim.paths import split

Tree = Any
# Modules that `jaxforge.models.parameters.stack` makes: their parameters have a leading dimension of layers.
_STACKS = ("layers", "deepstack", "mtp")


class ArrayReader(Protocol):
    """Parameters that can be read piece by piece.

    Attributes:
      shapes: path, such as "decoder/layers/mlp/up_DF", to the shape of the whole parameter without a pipeline,
        [layers, ...] in a stack.
    """

    shapes: Mapping[str, tuple[int, ...]]

    def has(self, path: str, layer: int | None) -> bool:
        """Whether this piece can be read."""
        ...

    def read(self, path: str, layer: int | None) -> np.ndarray:
        """One layer of a stacked parameter, or a whole one that isn't stacked (layer None), in its stored dtype."""
        ...


def is_stacked(path: str) -> bool:
    """Whether the parameter has a leading dimension of layers."""
    return any(part in _STACKS for part in path.split("/"))


def layers_of(path: str, shape: tuple[int, ...]) -> Iterator[int | None]:
    """The pieces that a parameter is read in; `shape` is as an ArrayReader gives it."""
    yield from range(shape[0]) if is_stacked(path) else (None,)


def piece_shape(path: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of one piece."""
    return shape[1:] if is_stacked(path) else shape


def shape_in_turn(path: str, shape: tuple[int, ...], order: LayerOrder | None) -> tuple[int, ...]:
    """The shape without a pipeline, [num_layers, ...] in a stack, of an array that has `shape` in `order`."""
    return shape if order is None or not is_in_stacks(path) else (max(order.of(path)) + 1, *shape[1:])


def place_of(path: str, layer: int | None, order: LayerOrder | None) -> int | None:
    """Where a layer lies in the stack of a parameter; None for one that isn't stacked."""
    return layer if order is None or layer is None or not is_in_stacks(path) else order.of(path).index(layer)


def is_same_order(one: LayerOrder | None, other: LayerOrder | None) -> bool:
    """Whether stacks in these orders are the same arrays; None where all layers lie in turn."""

    def in_turn(order):
        return order is None or all(of_stack == tuple(range(len(of_stack))) for of_stack in order)

    return one == other or (in_turn(one) and in_turn(other))


def exported_dtype(path: str, dtype: Any) -> Any:
    """What a parameter is exported in, by the dtype of an export: what routers keep beside weights stays fp32."""
    return jnp.dtype(jnp.float32 if is_router_state(path) else dtype)


def flatten(tree: Tree) -> dict[str, Any]:
    """Nested dict to path -> leaf."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {"/".join(str(key.key) for key in path): leaf for path, leaf in leaves}


def unflatten(leaves: Mapping[str, Any]) -> Tree:
    """Path -> leaf to nested dict."""
    tree: Tree = {}
    for path, leaf in leaves.items():
        *folders, name = path.split("/")
        node = tree
        for folder in folders:
            node = node.setdefault(folder, {})
        node[name] = leaf
    return tree


def abstract_parameters(model: ModelConfig) -> Tree:
    """Shapes of a model's fp32 parameters, as a nested dict of ShapeDtypeStruct for one device.

    Statistics of routers aren't among them: weights come without.
    """
    graph_and_state = nnx.split(nnx.eval_shape(lambda: VisionLanguageModel(model, rngs=nnx.Rngs(params=0))))
    return split(nnx.to_pure_dict(graph_and_state[1]), is_statistics)[1]


def load(reader: ArrayReader, abstract: Tree, initial: Tree | None = None, order: LayerOrder | None = None) -> Tree:
    """The parameters on the devices, each device reading no more than one piece of one parameter at a time.

    Args:
      abstract: nested dict of ShapeDtypeStruct, as the result is; the shapes are the reader's, but for `order`.
      initial: arrays of those shapes and shardings, which are donated; pieces that the reader lacks keep their values.
      order: of the result.  Places that no layer uses hold zeros, or what `initial` has there.
    """
    wanted, given = flatten(abstract), flatten(initial) if initial is not None else {}
    for path in wanted.keys() - given.keys():
        shape = shape_in_turn(path, wanted[path].shape, order)
        if not all(reader.has(path, layer) for layer in layers_of(path, shape)):
            raise ValueError(f"{path} has no values: the weights lack it, or a layer of it, and `initial` has none")
    return unflatten({path: load_one(reader, path, leaf, given.get(path), order) for path, leaf in wanted.items()})


def load_one(
    reader: ArrayReader,
    path: str,
    leaf: jax.ShapeDtypeStruct,
    initial: jax.Array | None = None,
    order: LayerOrder | None = None,
) -> jax.Array:
    """One array of those that `load` reads, with the same arguments for it alone; or one in host memory.

    The latter is put together on the devices, which have room for it before a run starts.
    """
    if is_in_host_memory(leaf):
        on_devices = leaf.update(sharding=leaf.sharding.with_memory_kind("device"))
        return moved(load_one(reader, path, on_devices, initial, order), leaf.sharding)
    sharding = leaf.sharding or SingleDeviceSharding(jax.local_devices()[0])
    if not is_stacked(path) and reader.has(path, None):
        return _on_devices(reader.read(path, None), sharding, leaf.dtype)
    whole = initial
    if whole is None:
        whole = _zeros(leaf.shape, leaf.dtype, sharding)()
    if not is_stacked(path):
        return whole
    for layer in layers_of(path, shape_in_turn(path, leaf.shape, order)):
        if reader.has(path, layer):
            piece = _on_devices(reader.read(path, layer), _of_a_layer(sharding), leaf.dtype)
            whole = _set_layer(whole, piece, place_of(path, layer, order))
            # transfers are asynchronous: unawaited, a whole model would pile up in host memory
            whole.block_until_ready()
    return whole


@functools.lru_cache
def _zeros(shape: tuple[int, ...], dtype: Any, sharding: Sharding) -> Any:
    # compiled once for a parameter and its moments
    return jax.jit(functools.partial(jnp.zeros, shape, dtype), out_shardings=sharding)


@functools.partial(jax.jit, donate_argnums=0)
def _set_layer(whole, piece, place):
    return lax.dynamic_update_index_in_dim(whole, piece, place, 0)


def _on_devices(values: np.ndarray, sharding: Any, dtype: Any) -> jax.Array:
    return jax.make_array_from_callback(
        values.shape, sharding, lambda index: np.asarray(values[index], dtype, order="C")
    )


def _of_a_layer(sharding: Any) -> Any:
    """The sharding of one layer of a stack."""
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))
    return sharding


class DeviceArrays:
    """Parameters on the devices of any number of processes, all of which must read the same pieces in turn.

    They may lie in host memory: then no more than a piece of them comes to the device.

    Args:
      parameters: nested dict of arrays.
      dtype: what pieces are converted to before they leave the device; of a router's biases, fp32.
      order: in which the decoder's layers lie.
    """

    def __init__(self, parameters: Tree, dtype: Any, order: LayerOrder | None = None):
        self._arrays = flatten(parameters)
        self.shapes: Mapping[str, tuple[int, ...]] = {
            path: shape_in_turn(path, array.shape, order) for path, array in self._arrays.items()
        }
        self._dtype, self._order = dtype, order

    def has(self, path: str, layer: int | None) -> bool:
        return path in self._arrays

    def read(self, path: str, layer: int | None) -> np.ndarray:
        array, place = self._arrays[path], place_of(path, layer, self._order)
        read = _piece(array.sharding, exported_dtype(path, self._dtype), is_layer=place is not None)
        return np.asarray(read(array, place or 0).addressable_data(0))


@functools.lru_cache
def _piece(sharding: Sharding, dtype: Any, is_layer: bool) -> Any:
    """(array, place) -> the piece whole on every device, where each process can read it."""

    def piece(array, place):
        return (_at(sharding, array, place) if is_layer else to_device(array)).astype(dtype)

    replicated = NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else None
    return jax.jit(piece, out_shardings=replicated)


def _at(sharding: Sharding, stack: jax.Array, place: jax.Array) -> jax.Array:
    """What lies in a place of a stack.  Of one that is cut over stages, no more than that leaves its stage.

    XLA would gather the whole stack, because it doesn't know the place.
    """
    if sharding.shard_shape(stack.shape)[0] == stack.shape[0]:
        return to_device(lax.dynamic_index_in_dim(stack, place, keepdims=False))
    assert isinstance(sharding, NamedSharding)
    axes, spec = sharding.spec[0], tuple(sharding.spec)

    def at(stack, place):
        own = place - lax.axis_index(axes) * stack.shape[0]
        is_here = (own >= 0) & (own < stack.shape[0])
        piece = to_device(lax.dynamic_index_in_dim(stack, own, keepdims=False))
        # the sum of one piece and zeros as bits, so that -0 stays -0; NCCL adds no integers of 16 bits
        bits = lax.bitcast_convert_type(piece, f"uint{8 * stack.dtype.itemsize}")
        found = lax.psum(jnp.where(is_here, bits.astype(jnp.uint32), 0), axes)
        return lax.bitcast_convert_type(found.astype(bits.dtype), stack.dtype)

    in_specs, out_spec = (PartitionSpec(*spec), PartitionSpec()), PartitionSpec(*spec[1:])
    return jax.shard_map(at, mesh=sharding.mesh, in_specs=in_specs, out_specs=out_spec)(stack, place)
