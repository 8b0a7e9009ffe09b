"""Three-dimensional rotary positions of a document of text and images (mRoPE)."""

import functools
from collections.abc import Sequence

import numpy as np

# A run of a document: a number of text tokens, or an image as (patches down, patches across).
Run = int | tuple[int, int]


def mrope_positions(runs: Sequence[Run], merge: int) -> np.ndarray:
    """Time, height and width position of every token of a document [3, S] int32, from 0 (Qwen2-VL, arXiv:2409.12191).

    Text advances all three together.  An image of grid (h, w) has h w / merge^2 tokens: their time stands still at
    the position where the image starts, height and width add the token's row and column.  What follows starts one
    after the largest position so far.
    """
    start, parts = 0, [np.zeros((3, 0), np.int32)]
    for run in runs:
        if isinstance(run, tuple):
            down, across = run[0] // merge, run[1] // merge
            part, length = _image_positions(down, across), max(down, across)
        else:
            part, length = np.broadcast_to(np.arange(run, dtype=np.int32), (3, run)), run
        parts.append(start + part)
        start += length
    return np.concatenate(parts, axis=1, dtype=np.int32)


@functools.lru_cache(maxsize=1024)
def _image_positions(down: int, across: int) -> np.ndarray:
    return np.indices((1, down, across), dtype=np.int32).reshape(3, -1)
