"""The size and CRC-32 of every file of a checkpoint.

Zarr chunks carry no checksum: a flipped bit in the largest file of a checkpoint restores without an error, as other
weights.  So the files are summed before the checkpoint is committed, and checked before it is read.
"""

import concurrent.futures
import json
import os
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path

FILE_NAME = "checksums.json"
_BLOCK_BYTES = 1 << 24
# zlib.crc32 releases the GIL, so that threads use the cores and the file system's parallel paths.
_NUM_THREADS = 8


def write_checksums(folder: Path, parts: Iterable[str]) -> None:
    """Writes checksums.json into a checkpoint's folder, over its `parts`: files, and subfolders with all under them."""
    found = [file for part in parts for file in (folder / part, *sorted((folder / part).rglob("*")))]
    files = [file for file in found if file.is_file()]
    sums = dict(zip((str(file.relative_to(folder)) for file in files), _in_threads(_size_and_crc, files), strict=True))
    # Written whole or not at all, since the folder may survive a kill in the middle of this.
    unfinished = folder / (FILE_NAME + ".tmp")
    unfinished.write_text(json.dumps(sums, indent=1))
    os.replace(unfinished, folder / FILE_NAME)


def find_damage(folder: Path, share: int = 0, num_shares: int = 1) -> str | None:
    """What is wrong with the checkpoint in `folder`, in a few words, or None.

    `num_shares` processes may divide the work, each checking the files of its `share`.
    """
    try:
        sums = json.loads((folder / FILE_NAME).read_text())
    except (OSError, ValueError) as error:
        return f"{FILE_NAME} can't be read ({error})"
    mine = sorted(sums)[share::num_shares]
    problems = _in_threads(lambda name: _difference(folder / name, name, sums[name]), mine)
    return next((problem for problem in problems if problem is not None), None)


def _difference(file: Path, name: str, expected: list[int]) -> str | None:
    try:
        # The size first: a truncated file of many gigabytes needn't be read.
        if (size := file.stat().st_size) != expected[0]:
            return f"{name} has {size} bytes instead of {expected[0]}"
        if _size_and_crc(file)[1] != expected[1]:
            return f"{name} has changed since it was written (its CRC-32 differs)"
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} can't be read ({error.strerror})"
    return None


def _size_and_crc(file: Path) -> list[int]:
    size = crc = 0
    with file.open("rb") as stream:
        while block := stream.read(_BLOCK_BYTES):
            size += len(block)
            crc = zlib.crc32(block, crc)
    return [size, crc]


def _in_threads[T, R](function: Callable[[T], R], values: Iterable[T]) -> list[R]:
    with concurrent.futures.ThreadPoolExecutor(_NUM_THREADS) as pool:
        return list(pool.map(function, values))
