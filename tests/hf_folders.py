"""Hugging Face folders to read: those that transformers wrote for the parity tests, and changed copies of them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from jaxforge.checkpoint.arrays import flatten

FIXTURES = Path(__file__).parent / "parity" / "fixtures"
COMPANIONS = ("config.json", "generation_config.json")


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    """All tensors of a folder, as the safetensors library reads them."""
    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


def config_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def changed(
    target: Path,
    name: str,
    tensors: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]] = lambda tensors: tensors,
    config: Callable[[dict], dict] = lambda config: config,
) -> Path:
    """A copy of a fixture with other tensors, or another config.json, in one file; `target` is made."""
    target.mkdir(parents=True)
    for file in COMPANIONS:
        shutil.copyfile(FIXTURES / name / file, target / file)
    (target / "config.json").write_text(json.dumps(config(config_of(target))))
    save_file({key: np.ascontiguousarray(value) for key, value in tensors(tensors_of(FIXTURES / name)).items()},
              target / "model.safetensors", metadata={"format": "pt"})  # fmt: skip
    return target


class InMemory:
    """A nested dict of NumPy arrays as an ArrayReader."""

    def __init__(self, parameters: dict):
        self._arrays = flatten(parameters)
        self.shapes = {path: array.shape for path, array in self._arrays.items()}

    def has(self, path: str, layer: int | None) -> bool:
        return path in self._arrays

    def read(self, path: str, layer: int | None) -> np.ndarray:
        return self._arrays[path] if layer is None else self._arrays[path][layer]


def assert_same_bits(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    """Names, dtypes, shapes and bytes."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape), name
        assert np.asarray(found[name]).tobytes() == np.asarray(value).tobytes(), name
