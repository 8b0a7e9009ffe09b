"""From an image or the frames of a video to the patches that a vision encoder reads, in the model's order."""

import dataclasses
import functools
import math
from collections.abc import Sequence

import numpy as np

from jaxforge.config.errors import ConfigError
from jaxforge.config.schema import EncoderConfig
from jaxforge.data.conversation import SampleError

MAX_ASPECT_RATIO = 200


@dataclasses.dataclass(frozen=True)
class Patches:
    """What becomes one run of consecutive visual tokens: an image, a temporal patch of a video, or a whole video.

    Squares of merge x merge patches in row-major order, row-major inside a square too; temporal patches in turn.

    Attributes:
      patches_PC: [P, C] float32 pixels, C ordered (channel, frame, y, x).
      positions_P2: [P, 2] int32, row and column of the patch in its frame.
      grid: patches down and across of a frame.
      windows_P: [P] int32, attention-window number from 1; no window reaches from one temporal patch into the next.
      frames: temporal patches, of temporal_patch_size frames of video each; 1 for an image.
      time_step: rotary time positions from one temporal patch to the next.
    """

    patches_PC: np.ndarray
    positions_P2: np.ndarray
    grid: tuple[int, int]
    windows_P: np.ndarray
    frames: int = 1
    time_step: float = 0.0


def patch_channels(encoder: EncoderConfig) -> int:
    """Numbers in one patch: channels x frames x pixels."""
    return encoder.in_channels * encoder.temporal_patch_size * encoder.patch_size**2


def patchify(pixels: np.ndarray, encoder: EncoderConfig) -> Patches:
    """Cuts a normalised image, or the frames of one temporal patch of a video, into patches.

    Args:
      pixels: [height, width, in_channels] float32, a still image, which fills all `temporal_patch_size` frames of its
        patches (Qwen2-VL, arXiv:2409.12191, 2.1); or [temporal_patch_size, height, width, in_channels].
      encoder: gives the sizes.

    Raises:
      ValueError: where the sides aren't multiples of patch_size x spatial_merge_size, or frames are missing.
    """
    still = pixels.ndim == 3
    frames_THWC = pixels[None] if still else pixels
    num_frames, height, width, channels = frames_THWC.shape
    patch, merge = encoder.patch_size, encoder.spatial_merge_size
    if channels != encoder.in_channels:
        raise ValueError(f"the image has {channels} channels, model.encoder.in_channels={encoder.in_channels}")
    if not still and num_frames != encoder.temporal_patch_size:
        raise ValueError(
            f"{num_frames} frames are not one temporal patch of model.encoder.temporal_patch_size="
            f"{encoder.temporal_patch_size}"
        )
    if height % (patch * merge) or width % (patch * merge) or not height or not width:
        raise ValueError(
            f"an image of {height}x{width} pixels does not divide into squares of {patch * merge}"
            f" (patch_size x spatial_merge_size); resize it with smart_resize first"
        )
    grid = (height // patch, width // patch)
    # down: square, patch in the square, y; across: square, patch in the square, x; frame first, channel last
    cut = frames_THWC.reshape(num_frames, grid[0] // merge, merge, patch, grid[1] // merge, merge, patch, channels)
    cut = cut.transpose(1, 4, 2, 5, 7, 0, 3, 6).reshape(-1, channels, num_frames, patch, patch)
    cut = np.broadcast_to(cut, (len(cut), channels, encoder.temporal_patch_size, patch, patch))
    return Patches(
        patches_PC=np.ascontiguousarray(cut, dtype=np.float32).reshape(len(cut), -1),
        positions_P2=patch_positions(grid, merge),
        grid=grid,
        windows_P=patch_windows(grid, encoder),
    )


def stack_frames(temporal_patches: Sequence[Patches], time_step: float) -> Patches:
    """The temporal patches of a video, all of one size, as a single run of visual tokens (Qwen2.5-VL).

    `time_step` is the rotary time from one to the next.
    """
    first = temporal_patches[0]
    num_windows = int(first.windows_P.max())
    return Patches(
        patches_PC=np.concatenate([each.patches_PC for each in temporal_patches]),
        positions_P2=np.concatenate([each.positions_P2 for each in temporal_patches]),
        grid=first.grid,
        windows_P=np.concatenate([each.windows_P + i * num_windows for i, each in enumerate(temporal_patches)]),
        frames=len(temporal_patches),
        time_step=time_step,
    )


@functools.lru_cache(maxsize=1024)
def patch_positions(grid: tuple[int, int], merge: int) -> np.ndarray:
    """Row and column of each patch of an image [P, 2] int32, in the order of `patchify`; read-only."""
    rows_HW, columns_HW = np.indices(grid, dtype=np.int32)
    positions_P2 = np.stack([_square_order(rows_HW, merge), _square_order(columns_HW, merge)], axis=1)
    positions_P2.flags.writeable = False
    return positions_P2


def patch_windows(grid: tuple[int, int], encoder: EncoderConfig) -> np.ndarray:
    """Attention-window number from 1 of each patch [P] int32, in the order of `patchify`; read-only.

    A window is window_size pixels a side, in whole squares; those at the right and lower edge hold what remains
    (Qwen2.5-VL, arXiv:2502.13923, 2.1.1).  Windows are numbered row by row.  Raises ConfigError where a window is
    smaller than a square.
    """
    merge = encoder.spatial_merge_size
    side = encoder.window_size // (encoder.patch_size * merge) * merge
    if not side:
        raise ConfigError(
            f"model.encoder.window_size={encoder.window_size} is smaller than one merged square of"
            f" patch_size x spatial_merge_size={encoder.patch_size * merge} pixels; use a multiple of it"
        )
    return _windows(grid, merge, side)


@functools.lru_cache(maxsize=1024)
def _windows(grid: tuple[int, int], merge: int, side: int) -> np.ndarray:
    """Windows of `side` patches a side."""
    rows_HW, columns_HW = np.indices(grid, dtype=np.int32)
    windows_across = -(-grid[1] // side)
    windows_P = _square_order(rows_HW // side * windows_across + columns_HW // side + 1, merge)
    windows_P.flags.writeable = False
    return windows_P


def _square_order(values_HW: np.ndarray, merge: int) -> np.ndarray:
    height, width = values_HW.shape
    return values_HW.reshape(height // merge, merge, width // merge, merge).transpose(0, 2, 1, 3).reshape(-1)


def smart_resize(
    height: int, width: int, factor: int = 28, min_pixels: int = 56 * 56, max_pixels: int = 28 * 28 * 1280
) -> tuple[int, int]:
    """The size (height, width) in pixels that an image is resized to before `patchify`.

    Both sides become multiples of `factor` (patch_size x spatial_merge_size), the area lies between `min_pixels` and
    `max_pixels`, the aspect ratio stays as close as that allows.  The rule and defaults are those of the Qwen2-VL
    image processor, whose checkpoints expect them.  Raises SampleError for an empty image ("corrupt media") and for an
    aspect ratio above 200 ("aspect ratio").
    """
    check_aspect_ratio(height, width)
    area = round(height / factor) * round(width / factor) * factor**2
    if area > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        height, width = (max(factor, math.floor(side / shrink / factor) * factor) for side in (height, width))
        return height, width
    if area < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        height, width = (math.ceil(side * grow / factor) * factor for side in (height, width))
        return height, width
    return round(height / factor) * factor, round(width / factor) * factor


def check_aspect_ratio(height: int, width: int) -> None:
    """Raises SampleError for an empty image and for one more than 200 times as long as it is broad."""
    if min(height, width) < 1:
        raise SampleError("corrupt media", f"an image of {height}x{width} pixels is empty; leave it out of the data")
    if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
        raise SampleError(
            "aspect ratio",
            f"an image of {height}x{width} pixels has an aspect ratio of {max(height, width) / min(height, width):.0f},"
            f" more than {MAX_ASPECT_RATIO}; crop it or leave it out of the data",
        )
