"""The safetensors files of a Hugging Face folder: read tensor by tensor, and written in shards."""

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import ml_dtypes  # also tells NumPy, and so safetensors, what bfloat16 is
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxforge.config.errors import ConfigError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SHARD_BYTES = 5 * 10**9
DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}
_NAMES = {name: code for code, name in DTYPES.items()}
# Formats that can run code when they are loaded.
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


class TensorFolder:
    """The tensors of a folder by name, from model.safetensors, or from the shards that an index names.

    Attributes:
      path: the folder.
      shapes: name -> shape.
      files: name -> the file that holds it.

    Raises ConfigError if there are none (a folder of pickles is refused by name), a shard is missing or not readable,
    or a tensor is stored in a dtype that isn't floating point.  Where both are there, the single file counts, as in
    transformers.
    """

    def __init__(self, folder: str | Path):
        self.path = Path(folder)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.files: dict[str, Path] = {}
        for file in self._shards():
            self._read_header(file)

    def read(self, name: str) -> np.ndarray:
        """A tensor, in the dtype that it is stored in."""
        # opened anew for each: the pages of a file that stays open count as memory of this process
        with safe_open(self.files[name], framework="np") as file:
            return file.get_tensor(name)

    def _shards(self) -> list[Path]:
        if not self.path.is_dir():
            raise ConfigError(
                f"{self.path} is no folder of this machine, and nothing is downloaded; name the folder of a checkpoint"
            )
        if (self.path / SINGLE).is_file():
            return [self.path / SINGLE]
        if (self.path / INDEX).is_file():
            return self._shards_of_index(self.path / INDEX)
        files = sorted(self.path.glob("*.safetensors"))
        if not files:
            pickles = sorted(file.name for pattern in _PICKLES for file in self.path.glob(pattern))
            raise ConfigError(
                f"{self.path} has no .safetensors file"
                + (
                    f", only {pickles[0]}: a pickle can run code when it is loaded, so none is read; write the model as"
                    " safetensors with transformers' save_pretrained"
                    if pickles
                    else "; name the folder of a whole model"
                )
            )
        return files

    def _shards_of_index(self, index: Path) -> list[Path]:
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            outside = [name for name in names if Path(name).name != name]
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ConfigError(f"{index} can't be read ({error!r}); download it again") from error
        if outside:
            raise ConfigError(f"{index} names {outside[0]!r}, which isn't a file of its folder; download it again")
        missing = [name for name in names if not (self.path / name).is_file()]
        if missing:
            raise ConfigError(
                f"{self.path} lacks {len(missing)} of the {len(names)} files that {INDEX} names, the first"
                f" {missing[0]}; download them"
            )
        return [self.path / name for name in names]

    def _read_header(self, file: Path) -> None:
        try:
            with safe_open(file, framework="np") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                    piece = tensors.get_slice(name)
                    if piece.get_dtype() not in DTYPES:
                        raise ConfigError(
                            f"{file}: {name} is stored as {piece.get_dtype()}; {', '.join(DTYPES.values())} are read:"
                            " use the folder of the model in bfloat16"
                        )
                    if name in self.files:
                        raise ConfigError(f"{name} is both in {self.files[name].name} and {file.name} of {self.path}")
                    self.shapes[name] = tuple(piece.get_shape())
                    self.files[name] = file
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{file} can't be read ({error}); download it again") from error


def write_tensors(
    folder: Path | None,
    shapes: Iterable[tuple[str, tuple[int, ...]]],
    dtype: str,
    read: Callable[[str], np.ndarray],
    shard_bytes: int = SHARD_BYTES,
    dtypes: Mapping[str, str] | None = None,
) -> None:
    """Writes tensors into shards of at most `shard_bytes` (a larger tensor has its own), holding one at a time.

    The format is documented at https://github.com/huggingface/safetensors: the length of a header, the header as JSON,
    and the tensors' bytes.  It is written here because the library wants a whole shard in memory.

    Args:
      folder: None in a process that only takes part in `read`.
      shapes: (name, shape) in the order in which they are written.
      dtype: of all tensors, one of DTYPES' values.
      read: gives a tensor by name, in any float dtype.
      dtypes: of tensors that have another, by name.
    """
    shards: list[list[tuple[str, tuple[int, ...], str]]] = [[]]
    held = total = 0
    for name, shape in shapes:
        of_tensor = (dtypes or {}).get(name, dtype)
        size = math.prod(shape) * _numpy_dtype(of_tensor).itemsize
        if shards[-1] and held + size > shard_bytes:
            shards.append([])
            held = 0
        shards[-1].append((name, shape, of_tensor))
        held, total = held + size, total + size
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        weight_map |= {name: file for name, *_ in shard}
        _write_shard(folder / file if folder is not None else None, shard, read)
    if len(shards) > 1 and folder is not None:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _write_shard(
    file: Path | None, shard: list[tuple[str, tuple[int, ...], str]], read: Callable[[str], np.ndarray]
) -> None:
    header: dict = {"__metadata__": {"format": "pt"}}  # transformers asks for it
    end = 0
    for name, shape, dtype in shard:
        start, end = end, end + math.prod(shape) * _numpy_dtype(dtype).itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors' bytes are aligned
    stream = open(file, "wb") if file is not None else open(os.devnull, "wb")
    with stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for name, shape, dtype in shard:
            tensor = np.ascontiguousarray(read(name), dtype=_numpy_dtype(dtype))
            assert tensor.shape == shape, (name, tensor.shape, shape)
            if file is not None:
                stream.write(tensor.reshape(-1).view(np.uint8).data)
        stream.flush()
        if file is not None:
            os.fsync(stream.fileno())


def _numpy_dtype(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name) if name == "bfloat16" else name)
