"""Parameters on disk: a folder of weights that `jaxforge.convert` makes, and the checkpoints of a run.

Both are zarr arrays, read layer by layer through TensorStore, the library under Orbax.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from jaxforge.checkpoint.arrays import ArrayReader, is_stacked, layers_of, place_of, shape_in_turn
from jaxforge.checkpoint.checksums import find_damage, write_checksums
from jaxforge.checkpoint.new_folder import new_folder
from jaxforge.config import resolve
from jaxforge.config.errors import ConfigError
from jaxforge.config.model_schema import ModelConfig
from jaxforge.config.schema import Config
from jaxforge.models.layer_order import LayerOrder
from jaxforge.models.moe import is_statistics

DESCRIPTION = "jaxforge_weights.json"
HF_FILES = "hf"
_WEIGHTS = "weights"
# In a checkpoint's metadata, the LayerOrder of its state.  Layouts by FLOPs may come out otherwise in another version.
LAYER_ORDER = "layer_order"
_FORMAT = 1
_CHUNK_BYTES = 1 << 26


class StoredArrays:
    """Zarr arrays under a TensorStore key-value store, as an ArrayReader.

    Args:
      kvstore: of the folder that holds one array for each name.
      names: path of a parameter -> (name of its array, its shape there).
      order: in which the decoder's layers lie there.
    """

    def __init__(
        self,
        kvstore: Mapping[str, Any],
        names: Mapping[str, tuple[str, tuple[int, ...]]],
        order: LayerOrder | None = None,
    ):
        self.shapes: Mapping[str, tuple[int, ...]] = {
            path: shape_in_turn(path, shape, order) for path, (_, shape) in names.items()
        }
        self._kvstore, self._names, self._order = kvstore, names, order

    def has(self, path: str, layer: int | None) -> bool:
        return path in self._names

    def read(self, path: str, layer: int | None) -> np.ndarray:
        # opened anew for each: nothing stays in memory
        array = ts.open(_zarr(self._kvstore, self._names[path][0]), open=True, read=True).result()
        place = place_of(path, layer, self._order)
        return np.asarray((array if place is None else array[place]).read().result())


@dataclasses.dataclass(frozen=True)
class WeightsFolder:
    """What `write_weights` made.

    Attributes:
      model: the architecture.
      arrays: the weights.
      hf_folder: config.json, tokenizer and processor files of the Hugging Face folder that they came from.
    """

    model: ModelConfig
    arrays: StoredArrays
    hf_folder: Path

    @classmethod
    def open(cls, folder: str | Path) -> "WeightsFolder":
        """Raises ConfigError where the folder is damaged, or of a later format."""
        folder = Path(folder)
        damage = find_damage(folder)
        if damage is not None:
            raise ConfigError(f"{folder} is damaged: {damage}; convert it again")
        description = json.loads((folder / DESCRIPTION).read_text())
        if description["format"] != _FORMAT:
            raise ConfigError(
                f"{folder} has format {description['format']}, this JaxForge reads {_FORMAT}; convert it again"
            )
        names = {path: (_array_name(path), tuple(shape)) for path, shape in description["shapes"].items()}
        arrays = StoredArrays({"driver": "file", "path": f"{(folder / _WEIGHTS).absolute()}/"}, names)
        return cls(resolve({"model": description["model"]}).model, arrays, folder / HF_FILES)

    @staticmethod
    def is_one(folder: str | Path) -> bool:
        return (Path(folder) / DESCRIPTION).is_file()


def write_weights(folder: str | Path, arrays: ArrayReader, model: ModelConfig, copy_companions: Any) -> None:
    """Writes a folder of weights, one piece at a time, in the dtype that `arrays` gives.

    It appears under its name when it is complete, with checksums.

    Args:
      copy_companions: called with the subfolder for the Hugging Face files.

    Raises:
      ConfigError: if the folder exists, or can't be written.
    """
    description = {
        "format": _FORMAT,
        "model": dataclasses.asdict(model),
        "shapes": {path: list(shape) for path, shape in arrays.shapes.items()},
    }
    with new_folder(Path(folder)) as unfinished:
        (unfinished / DESCRIPTION).write_text(json.dumps(description, indent=1) + "\n")
        _write_arrays(unfinished / _WEIGHTS, arrays)
        (unfinished / HF_FILES).mkdir()
        copy_companions(unfinished / HF_FILES)
        write_checksums(unfinished, [DESCRIPTION, _WEIGHTS, HF_FILES])


def _write_arrays(folder: Path, arrays: ArrayReader) -> None:
    kvstore = {"driver": "file", "path": f"{folder.absolute()}/"}
    for path, shape in arrays.shapes.items():
        array = None
        for layer in layers_of(path, shape):
            values = np.ascontiguousarray(arrays.read(path, layer))
            if array is None:
                array = _create(kvstore, path, shape, values.dtype)
            (array if layer is None else array[layer]).write(values).result()


@dataclasses.dataclass(frozen=True)
class RunCheckpoint:
    """A run's checkpoint, read without its program.

    Attributes:
      step: completed steps.
      config: that it was saved with.
      base: of adapters, the fingerprint of the weights under them.
      arrays: the parameters that it holds; of a run with adapters these are the adapters, and what trains beside them.
    """

    step: int
    config: Config
    base: str | None
    arrays: StoredArrays

    @classmethod
    def open(cls, run: str | Path, step: int | None = None) -> "RunCheckpoint":
        """The newest whole checkpoint of a run directory, or that of `step`.  Raises ConfigError if there is none."""
        checkpoints = Path(run).absolute() / "checkpoints"  # Orbax takes no other
        steps = sorted((int(path.name) for path in checkpoints.glob("*") if path.name.isdigit()), reverse=True)
        if step is not None:
            if step not in steps:
                raise ConfigError(f"{checkpoints} has no checkpoint of step {step}; there are {steps or 'none'}")
            steps = [step]
        damage = {}
        for found in steps:
            problem = find_damage(checkpoints / str(found))
            if problem is None:
                return cls._open(checkpoints / str(found), found)
            damage[found] = problem
        reasons = "; ".join(f"step {found}: {problem}" for found, problem in damage.items())
        raise ConfigError(f"{checkpoints} has no whole checkpoint" + (f" ({reasons})" if reasons else ""))

    @classmethod
    def _open(cls, folder: Path, step: int) -> "RunCheckpoint":
        metadata = json.loads((folder / "metadata" / "metadata").read_text())
        state = folder / "state"
        saved = ocp.StandardCheckpointHandler().metadata(state)
        names = {}
        for kind in ("trainable", "frozen", "router"):
            for path, shape in _shapes(saved.get(kind, {})):
                if not is_statistics(path):
                    names[path] = (_array_name(f"{kind}/{path}"), shape)
        arrays = StoredArrays(_state_store(state), names, saved_order(metadata))
        return cls(step, resolve(metadata["config"]), metadata.get("base"), arrays)


def described_order(order: LayerOrder | None) -> dict[str, list[int]] | None:
    """An order as a checkpoint's metadata hold it."""
    return None if order is None else {name: list(of_stack) for name, of_stack in order._asdict().items()}


def saved_order(metadata: Mapping[str, Any]) -> LayerOrder | None:
    """In which order a checkpoint's stacks hold the decoder's layers, from its metadata."""
    order = metadata.get(LAYER_ORDER)
    return None if order is None else LayerOrder(**{name: tuple(of_stack) for name, of_stack in order.items()})


def state_arrays(state: Path, shapes: Mapping[str, tuple[int, ...]], order: LayerOrder | None) -> StoredArrays:
    """All arrays of a checkpoint's state by their paths in it, such as "optimizer/1/mu/decoder/layers/mlp/up_DF".

    Args:
      state: the folder that Orbax wrote.
      shapes: of the arrays there.
    """
    names = {path: (_array_name(path), shape) for path, shape in shapes.items()}
    return StoredArrays(_state_store(state), names, order)


def _state_store(state: Path) -> dict[str, Any]:
    """The key-value store of an Orbax folder."""
    return {"driver": "ocdbt", "base": {"driver": "file", "path": f"{state.absolute()}/"}}


def _shapes(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, tuple[int, ...]]]:
    """(path, shape) of every array of Orbax's metadata."""
    for key, node in tree.items():
        if isinstance(node, Mapping):
            yield from _shapes(node, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", tuple(node.shape)


def _array_name(path: str) -> str:
    return path.replace("/", ".")


def _zarr(kvstore: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {
        "driver": "zarr",
        "kvstore": dict(kvstore) | {"path": f"{kvstore.get('path', '')}{name}/"},
    }


def _create(kvstore: Mapping[str, Any], path: str, shape: tuple[int, ...], dtype: np.dtype) -> Any:
    """A new zarr array whose chunks lie within a layer."""
    spec = _zarr(kvstore, _array_name(path)) | {"metadata": {"compressor": None}}
    chunk = list(shape)
    first = 0
    if is_stacked(path):
        chunk[0], first = 1, 1
    rows = max(1, _CHUNK_BYTES * shape[first] // max(1, int(np.prod(chunk)) * dtype.itemsize))
    chunk[first] = min(shape[first], rows)
    layout = ts.ChunkLayout(chunk_shape=chunk)
    return ts.open(spec, create=True, open=False, dtype=ts.dtype(dtype), shape=shape, chunk_layout=layout).result()
