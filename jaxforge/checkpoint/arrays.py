"""A model's parameters by path and layer, wherever they lie: what conversion, loading and export read from.

Everything is read one layer of one parameter at a time, so that host memory doesn't grow with the model.
"""

import functools
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxforge.config.model_schema import ModelConfig
from jaxforge.models import VisionLanguageModel

Tree = Any
# Modules that `jaxforge.models.parameters.stack` makes: their parameters have a leading dimension of layers.
_STACKS = ("layers", "deepstack")


class ArrayReader(Protocol):
    """Parameters that can be read piece by piece.

    Attributes:
      shapes: path, such as "decoder/layers/mlp/up_DF", to the shape of the whole parameter, [layers, ...] in a stack.
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
    """The pieces that a parameter is read in."""
    yield from range(shape[0]) if is_stacked(path) else (None,)


def piece_shape(path: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of one piece."""
    return shape[1:] if is_stacked(path) else shape


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
    """Shapes of a model's fp32 parameters, as a nested dict of ShapeDtypeStruct for one device."""
    graph_and_state = nnx.split(nnx.eval_shape(lambda: VisionLanguageModel(model, rngs=nnx.Rngs(params=0))))
    return nnx.to_pure_dict(graph_and_state[1])


def load(reader: ArrayReader, abstract: Tree, initial: Tree | None = None) -> Tree:
    """The parameters on the devices, each device reading no more than one piece of one parameter at a time.

    Args:
      abstract: nested dict of ShapeDtypeStruct: the shapes are the reader's; dtype and sharding are the result's.
      initial: arrays of those shapes and shardings, which are donated; pieces that the reader lacks keep their values.
    """
    wanted, given = flatten(abstract), flatten(initial) if initial is not None else {}
    for path in wanted.keys() - given.keys():
        if not all(reader.has(path, layer) for layer in layers_of(path, wanted[path].shape)):
            raise ValueError(f"{path} has no values: the weights lack it, or a layer of it, and `initial` has none")
    return unflatten({path: _load_one(reader, path, leaf, given.get(path)) for path, leaf in wanted.items()})


def _load_one(reader: ArrayReader, path: str, leaf: jax.ShapeDtypeStruct, initial: jax.Array | None) -> jax.Array:
    sharding = leaf.sharding or SingleDeviceSharding(jax.local_devices()[0])
    if not is_stacked(path) and reader.has(path, None):
        return _on_devices(reader.read(path, None), sharding, leaf.dtype)
    whole = initial
    if whole is None:
        whole = jax.jit(functools.partial(jnp.zeros, leaf.shape, leaf.dtype), out_shardings=sharding)()
    if not is_stacked(path):
        return whole
    for layer in range(leaf.shape[0]):
        if reader.has(path, layer):
            piece = _on_devices(reader.read(path, layer), _of_a_layer(sharding), leaf.dtype)
            whole = _set_layer(whole, piece, layer)
            # transfers are asynchronous: unawaited, a whole model would pile up in host memory
            whole.block_until_ready()
    return whole


@functools.partial(jax.jit, donate_argnums=0)
def _set_layer(whole, piece, layer):
    return jax.lax.dynamic_update_index_in_dim(whole, piece, layer, 0)


def _on_devices(values: np.ndarray, sharding: Any, dtype: Any) -> jax.Array:
    return jax.make_array_from_callback(
        values.shape, sharding, lambda index: np.ascontiguousarray(values[index]).astype(dtype)
    )


def _of_a_layer(sharding: Any) -> Any:
    """The sharding of one layer of a stack."""
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))
    return sharding


class DeviceArrays:
    """Parameters on the devices of any number of processes, all of which must read the same pieces in turn.

    Args:
      parameters: nested dict of arrays.
      dtype: what pieces are converted to before they leave the device.
    """

    def __init__(self, parameters: Tree, dtype: Any):
        self._arrays = flatten(parameters)
        self.shapes: Mapping[str, tuple[int, ...]] = {path: array.shape for path, array in self._arrays.items()}
        self._dtype = jnp.dtype(dtype)

    def has(self, path: str, layer: int | None) -> bool:
        return path in self._arrays

    def read(self, path: str, layer: int | None) -> np.ndarray:
        array = self._arrays[path]
        sharding = array.sharding
        mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
        return np.asarray(_piece(mesh, self._dtype, layer is not None)(array, layer or 0).addressable_data(0))


@functools.lru_cache
def _piece(mesh: Mesh | None, dtype: Any, is_layer: bool) -> Any:
    """(array, layer) -> the piece whole on every device, where each process can read it."""

    def piece(array, layer):
        return (jax.lax.dynamic_index_in_dim(array, layer, keepdims=False) if is_layer else array).astype(dtype)

    return jax.jit(piece, out_shardings=NamedSharding(mesh, PartitionSpec()) if mesh is not None else None)
