"""All samples of a user's files and folders by number, read only when they are asked for."""

import bisect
import functools
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxforge.config.errors import ConfigError
from jaxforge.data.conversation import SampleError
from jaxforge.data.json_files import json_array, json_lines
from jaxforge.data.webdataset import TarSamples

# Row groups of parquet files held in memory, over all files together; with images one may have 100 MB.
_ROW_GROUPS = 8


class _Samples(Protocol):
    """The samples of one file."""

    path: Path

    def __len__(self) -> int: ...

    def raw(self, index: int) -> dict[str, Any]: ...

    def place(self, index: int) -> str | int: ...


class SampleFiles:
    """The samples of files and folders, one path after the other, each file from its beginning.

    Known are .jsonl (a sample a line), .json (an array of samples, or lines all the same), .parquet (a sample a row),
    .tar (WebDataset: members of one name are a sample) and folders of these, which are read in the order of their
    names with all folders below; hidden files are passed over.  Only places are kept, so the files may be larger than
    the memory, and any number of threads may read.

    Args:
      paths: as in data.path.
      media_root: folder that media paths start from; None is the folder of the sample's file.
      field: the config field that holds `paths`, for messages.

    Attributes:
      paths: the paths as they were given.
      entry_ends: for each of them, the number of the first sample after it.
      files: the files that were found.
      fingerprint: changes with the order of the files, a file's path, size or time of change, and `media_root`.

    Raises:
      ConfigError: for a path that doesn't exist, an unknown extension, a file that can't be read as what its extension
        says, or a path without any sample.
    """

    def __init__(self, paths: Sequence[str], media_root: str | None = None, field: str = "data.path"):
        self.paths = tuple(paths)
        self._media_root = None if media_root is None else Path(media_root).expanduser()
        if self._media_root is not None and not self._media_root.is_dir():
            raise ConfigError(f"data.media_root={media_root} is not a folder; name the one that media paths start from")
        # One cache for all parquet files: a folder may hold thousands of them.
        read_row_group = functools.lru_cache(_ROW_GROUPS)(_read_row_group)
        self._parts: list[_Samples] = []
        self.entry_ends: list[int] = []
        ends = [0]
        for given in self.paths:
            try:
                paths_here = _files_at(Path(given).expanduser(), f"{field}={given}")
            except OSError as error:
                raise ConfigError(f"{field}={given} can't be read: {error}; mend it or leave it out") from error
            for path in paths_here:
                part = _open(path, read_row_group)
                if len(part):
                    self._parts.append(part)
                    ends.append(ends[-1] + len(part))
            if ends[-1] == (self.entry_ends[-1] if self.entry_ends else 0):
                raise ConfigError(f"{field}={given} holds no samples; remove it, or fill it")
            self.entry_ends.append(ends[-1])
        self._ends = ends[1:]
        self.files = tuple(part.path for part in self._parts)
        self._stamps = {path: _stamp(path) for path in self.files}
        stamps = [(str(path.resolve()), self._stamps[path]) for path in self.files]
        self.fingerprint = hashlib.sha256(repr((media_root, stamps)).encode()).hexdigest()

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def raw(self, index: int) -> dict[str, Any]:
        """Sample `index` as its file has it.

        Raises SampleError of the kind "bad json" where it can't be parsed, "bad format" where it isn't an object.
        """
        part, index = self._part(index)
        return part.raw(index)

    def where(self, index: int) -> str:
        """Where sample `index` lies: file:line, with the row's number for parquet and the key for a tar."""
        part, index = self._part(index)
        return f"{part.path}:{part.place(index)}"

    def root(self, index: int) -> Path:
        """The folder that the media paths of sample `index` start from."""
        return self._media_root or self._part(index)[0].path.parent

    def shared_with(self, other: "SampleFiles") -> list[Path]:
        """The files that are among another's too."""
        others = {path.resolve() for path in other.files}
        return [path for path in self.files if path.resolve() in others]

    def changed(self) -> list[Path]:
        """The files whose size or time of change is no longer what it was."""
        return [path for path, stamp in self._stamps.items() if _stamp(path) != stamp]

    def _part(self, index: int) -> tuple[_Samples, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        number = bisect.bisect_right(self._ends, index)
        return self._parts[number], index - (self._ends[number - 1] if number else 0)


def _files_at(path: Path, given: str) -> list[Path]:
    """The data files that a path names.  Raises OSError where it, or a folder in it, can't be looked at."""
    if path.is_dir():
        files = []
        for folder, folders, names in path.walk(on_error=_raise):
            folders[:] = [name for name in folders if not name.startswith(".")]
            inside = (folder / name for name in names if not name.startswith("."))
            files += [file for file in inside if file.suffix.lower() in _KINDS and file.is_file()]
        files.sort()
        if not files:
            raise ConfigError(f"{given} is a folder without data files; put {', '.join(_KINDS)} there")
        return files
    if not path.exists():
        raise ConfigError(f"{given} does not exist; give files and folders that this machine has")
    if path.suffix.lower() not in _KINDS:
        raise ConfigError(f"{given} has an unknown extension; known are {', '.join(_KINDS)} and folders of these")
    return [path]


def _raise(error: OSError) -> None:
    raise error


def _open(path: Path, read_row_group: Callable) -> _Samples:
    kind = _KINDS[path.suffix.lower()]
    try:
        return _ParquetSamples(path, read_row_group) if kind is _ParquetSamples else kind(path)
    except OSError as error:
        raise ConfigError(f"{path} can't be read ({error.strerror or error}); mend it or leave it out") from error


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


class _ParquetSamples:
    """The rows of a parquet file; a row group is read as a whole when one of its rows is asked for."""

    def __init__(self, path: Path, read_row_group: Callable):
        import pyarrow
        import pyarrow.parquet

        self.path = path
        self._read_row_group, self._arrow_error = read_row_group, pyarrow.ArrowException
        try:
            metadata = pyarrow.parquet.read_metadata(path)
        except pyarrow.ArrowException as error:
            raise ConfigError(f"{path} is not a parquet file ({error}); mend it or leave it out") from error
        self._ends = np.cumsum([metadata.row_group(g).num_rows for g in range(metadata.num_row_groups)]).tolist()

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def raw(self, index: int) -> dict[str, Any]:
        group = bisect.bisect_right(self._ends, index)
        row = index - (self._ends[group - 1] if group else 0)
        try:
            values = self._read_row_group(self.path, group).slice(row, 1).to_pylist()[0]
        except (self._arrow_error, OSError) as error:
            raise SampleError("bad format", f"is in a row group that can't be read: {error}") from error
        # every row has all columns; those without a value are fields that the sample doesn't have
        return {name: value for name, value in values.items() if value is not None}

    def place(self, index: int) -> int:
        return index + 1


def _read_row_group(path: Path, group: int) -> Any:
    import pyarrow.parquet  # heavy, and most runs have none

    with pyarrow.parquet.ParquetFile(path) as file:
        return file.read_row_group(group)


_KINDS: dict[str, Callable] = {
    ".jsonl": json_lines,
    ".json": json_array,
    ".parquet": _ParquetSamples,
    ".tar": TarSamples,
}
