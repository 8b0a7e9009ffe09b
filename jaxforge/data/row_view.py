"""The documents of a packed row as a person reads them: text, what of it is learnt, and images as pixels."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from jaxforge.config.schema import EncoderConfig
from jaxforge.data.packing import IGNORE
from jaxforge.words import counted


@dataclasses.dataclass(frozen=True)
class Span:
    """A stretch of a document.

    Attributes:
      text: what it says; of visual tokens, what they stand for.
      kind: "masked", "target" or "visual".
    """

    text: str
    kind: str


@dataclasses.dataclass(frozen=True, eq=False)
class ImageView:
    """An image or one temporal patch of a video: pixels [height, width, 1 or 3] from 0 to 1, and visual tokens."""

    pixels_HWC: np.ndarray
    grid: tuple[int, int]
    num_tokens: int

    def __str__(self) -> str:
        height, width, _ = self.pixels_HWC.shape
        tokens = counted(self.num_tokens, "token")
        return f"{width}x{height} pixels, {self.grid[1]}x{self.grid[0]} patches, {tokens}"


@dataclasses.dataclass(frozen=True)
class DocumentView:
    """A document of a row.

    Attributes:
      spans: its tokens in order.
      images: in order; span "[image 1: ...]" is the first.
      num_tokens, num_targets: how many.
      last_positions: largest time, height and width position; they begin at 0.
    """

    spans: tuple[Span, ...]
    images: tuple[ImageView, ...]
    num_tokens: int
    num_targets: int
    last_positions: tuple[int, int, int]


@dataclasses.dataclass(frozen=True)
class PixelScale:
    """How the pixels of a source were normalised: (pixel - mean) / std of each channel, pixels from 0 to 1."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


def document_views(
    row: Mapping[str, np.ndarray],
    decode: Callable[[Sequence[int]], str],
    encoder: EncoderConfig | None = None,
    scale: PixelScale | None = None,
) -> list[DocumentView]:
    """The documents of a row, from the arrays that the model gets.

    Args:
      row: as docs/architecture.md describes it.
      decode: tokens to text.
      encoder, scale: of a model that sees, to turn patches into pixels.
    """
    documents = []
    for segment in range(1, int(row["segment_ids"].max(initial=0)) + 1):
        inside_S = row["segment_ids"] == segment
        tokens, targets = row["tokens"][inside_S], row["targets"][inside_S]
        learnt = np.concatenate([[False], targets[:-1] != IGNORE])  # position i predicts token i + 1
        frames = np.zeros(len(tokens), np.int32)
        if encoder is not None:
            visual = row["visual_index"][inside_S]
            first_patch = np.maximum(visual, 0) * encoder.spatial_merge_size**2
            frames = np.where(visual >= 0, row["patch_segments"][first_patch], 0)
        images = []
        spans = []
        for start, end in _runs(np.stack([learnt, frames])):
            if encoder is not None and scale is not None and frames[start]:
                image = _image(row, int(frames[start]), end - start, encoder, scale)
                images.append(image)
                spans.append(Span(f"[image {len(images)}: {image}]", "visual"))
            else:
                text = decode(tokens[start:end].tolist())
                spans.append(Span(text, "target" if learnt[start] else "masked"))
        last = row["positions"][:, inside_S].max(axis=1).tolist()
        num_targets = int((targets != IGNORE).sum())
        documents.append(
            DocumentView(tuple(spans), tuple(images), len(tokens), num_targets, (last[0], last[1], last[2]))
        )
    return documents


def _runs(values_KS: np.ndarray) -> list[tuple[int, int]]:
    """Stretches in which no column differs from the one before."""
    changes = np.flatnonzero((values_KS[:, 1:] != values_KS[:, :-1]).any(axis=0)) + 1
    bounds = [0, *changes.tolist(), values_KS.shape[1]]
    return list(zip(bounds, bounds[1:], strict=False))


def _image(
    row: Mapping[str, np.ndarray], frame: int, num_tokens: int, encoder: EncoderConfig, scale: PixelScale
) -> ImageView:
    """Puts the patches of a frame back in their places; of several video frames in a patch, the first is shown."""
    inside_P = row["patch_segments"] == frame
    patch, channels = encoder.patch_size, encoder.in_channels
    pixels = row["patches"][inside_P].reshape(-1, channels, encoder.temporal_patch_size, patch, patch)[:, :, 0]
    down, across = row["patch_grids"][inside_P][0].tolist()
    image_HWC = np.zeros((down, patch, across, patch, channels), np.float32)
    y, x = row["patch_positions"][inside_P].T
    image_HWC[y, :, x] = pixels.transpose(0, 2, 3, 1)
    image_HWC = image_HWC.reshape(down * patch, across * patch, channels)
    image_HWC = image_HWC * np.array(scale.std, np.float32) + np.array(scale.mean, np.float32)
    return ImageView(image_HWC.clip(0, 1), (down, across), num_tokens)
