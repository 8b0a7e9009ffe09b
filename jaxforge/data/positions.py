"""Three-dimensional rotary positions of a document of text, images and videos (mRoPE)."""

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class VideoGrid:
    """A video as one run of visual tokens.

    Attributes:
      frames: temporal patches.
      down, across: patches of a frame.
      time_step: time positions from one temporal patch to the next; need not be whole.
    """

    frames: int
    down: int
    across: int
    time_step: float


# A run of a document: a number of text tokens, an image as (patches down, patches across), or a video.
Run = int | tuple[int, int] | VideoGrid


def mrope_positions(runs: Sequence[Run], merge: int) -> np.ndarray:
    """Time, height and width position of every token of a document [3, S] int32, from 0 (Qwen2-VL, arXiv:2409.12191).

    Text advances all three together.  An image of grid (h, w) has h w / merge^2 tokens: their time stands still at
    the position where the image starts, height and width add the token's row and column.  In a video, time advances
    by `time_step` from one temporal patch to the next, rounded down (Qwen2.5-VL, arXiv:2502.13923, 2.1.3).  What
    follows starts one after the largest position so far, that of a video's last moment included, as in the paper and
    in the code that the checkpoints were published with.
    """
    start, parts = 0, [np.zeros((3, 0), np.int32)]
    for run in runs:
        if isinstance(run, int):
            part, length = np.broadcast_to(np.arange(run, dtype=np.int32), (3, run)), run
        else:
            grid = run if isinstance(run, VideoGrid) else VideoGrid(1, *run, time_step=0)
            part = _visual_positions(grid, merge)
            length = int(part.max()) + 1
        parts.append(start + part)
        start += length
    return np.concatenate(parts, axis=1, dtype=np.int32)


@functools.lru_cache(maxsize=1024)
def _visual_positions(grid: VideoGrid, merge: int) -> np.ndarray:
    positions = np.indices((grid.frames, grid.down // merge, grid.across // merge), dtype=np.int32)
    # in single precision, like the reference, so that a step such as 2/3 is rounded down at the same places
    positions[0] = positions[0].astype(np.float32) * np.float32(grid.time_step)
    return positions.reshape(3, -1)
