"""Documents, and rows packed of several documents that never see each other."""

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from jaxforge.config.errors import ConfigError
from jaxforge.data.patches import Patches
from jaxforge.data.positions import Run, VideoGrid, mrope_positions
from jaxforge.data.rows import RowFormat

IGNORE = -100  # the target of a position that doesn't count in the loss


@dataclasses.dataclass(frozen=True)
class Document:
    """Tokens that belong together, with the images and videos among them.

    Attributes:
      tokens: [S] int32.
      loss_mask: [S] bool, the tokens that the model must predict: an answer and its end token, or a whole text.  A
        visual token is never predicted, whatever the mask says, nor is the first token.
      visual: [S] bool, the visual tokens: frames h w / merge^2 in a row for each of `images`, in their order.
      images: the images, and the videos or their temporal patches, in reading order.
    """

    tokens: np.ndarray
    loss_mask: np.ndarray
    visual: np.ndarray
    images: tuple[Patches, ...] = ()

    @classmethod
    def text(cls, tokens: Sequence[int], loss_mask: Sequence[bool] | None = None) -> "Document":
        """A document without images; every token is a target when there is no mask."""
        mask = np.ones(len(tokens), bool) if loss_mask is None else np.asarray(loss_mask, bool)
        return cls(np.asarray(tokens, np.int32), mask, np.zeros(len(tokens), bool))

    def __post_init__(self):
        if not len(self.tokens) == len(self.loss_mask) == len(self.visual):
            raise ValueError(
                f"a document has {len(self.tokens)} tokens, {len(self.loss_mask)} entries in loss_mask and"
                f" {len(self.visual)} in visual; all three must have one length"
            )

    @functools.cached_property
    def num_patches(self) -> int:
        """Patches of all images."""
        return sum(len(image.patches_PC) for image in self.images)

    def targets(self) -> np.ndarray:
        """The next token where it counts in the loss, else IGNORE: [S] int32.  The shift happens here, once."""
        targets = np.full(len(self.tokens), IGNORE, np.int32)
        counts = self.loss_mask[1:] & ~self.visual[1:]
        targets[:-1][counts] = self.tokens[1:][counts]
        return targets

    def positions(self, merge: int, mrope: bool) -> np.ndarray:
        """Rotary positions [3, S] int32 from 0; without `mrope` they count tokens."""
        if not mrope or not self.images:
            return np.broadcast_to(np.arange(len(self.tokens), dtype=np.int32), (3, len(self.tokens)))
        return mrope_positions(self._runs(merge), merge)

    def _runs(self, merge: int) -> list[Run]:
        """The document as runs of text, images and videos.  Raises ValueError where tokens and images disagree."""
        runs: list[Run] = []
        images, token = iter(self.images), 0
        while token < len(self.tokens):
            if self.visual[token]:
                image = next(images, None)
                length = len(image.patches_PC) // merge**2 if image else 1
                if image is None or not self.visual[token : token + length].all() or token + length > len(self.tokens):
                    raise ValueError(
                        f"a document's visual tokens do not match its {len(self.images)} images at token {token};"
                        " give each image frames h w / merge^2 consecutive visual tokens"
                    )
                video = image.frames > 1
                runs.append(VideoGrid(image.frames, *image.grid, image.time_step) if video else image.grid)
            else:
                later = np.flatnonzero(self.visual[token:])
                length = int(later[0]) if len(later) else len(self.tokens) - token
                runs.append(length)
            token += length
        return runs


def pack_row(documents: Sequence[Document], row_format: RowFormat) -> dict[str, np.ndarray]:
    """One row of the documents in their order, in the format of docs/architecture.md; none at all gives padding.

    Nothing is ever cut.  Raises ConfigError when the documents don't fit, ValueError when a document's visual tokens
    and images disagree.
    """
    _check_room(documents, row_format)
    row: dict[str, np.ndarray] = {key: np.zeros(shape, dtype) for key, (shape, dtype) in row_format.arrays.items()}
    row["targets"].fill(IGNORE)
    start = 0
    for number, document in enumerate(documents, start=1):
        span = slice(start, start + len(document.tokens))
        row["tokens"][span] = document.tokens
        row["targets"][span] = document.targets()
        row["segment_ids"][span] = number
        row["positions"][:, span] = document.positions(row_format.merge, row_format.mrope)
        start = span.stop
    if row_format.max_patches:
        _pack_images(row, documents, row_format)
    return row


def _pack_images(row: dict[str, np.ndarray], documents: Sequence[Document], row_format: RowFormat) -> None:
    visual = np.zeros(row_format.seq_length, bool)
    start = patch = frames = windows = 0
    row["patch_grids"].fill(1)
    images = [image for document in documents for image in document.images]
    for document in documents:
        if document.visual.sum() * row_format.merge**2 != document.num_patches:
            raise ValueError(
                f"a document has {document.visual.sum()} visual tokens and {document.num_patches} patches;"
                f" {row_format.merge**2} patches make one visual token"
            )
        visual[start : start + len(document.tokens)] = document.visual
        start += len(document.tokens)
    row["visual_index"][:] = np.where(visual, np.cumsum(visual) - 1, -1)
    for image in images:
        span = slice(patch, patch + len(image.patches_PC))
        row["patches"][span] = image.patches_PC
        numbers = np.arange(frames + 1, frames + 1 + image.frames)
        row["patch_segments"][span] = np.repeat(numbers, len(image.patches_PC) // image.frames)
        row["patch_windows"][span] = image.windows_P + windows
        row["patch_positions"][span] = image.positions_P2
        row["patch_grids"][span] = image.grid
        patch, frames, windows = span.stop, frames + image.frames, windows + int(image.windows_P.max())


def _check_room(documents: Sequence[Document], row_format: RowFormat) -> None:
    tokens = sum(len(document.tokens) for document in documents)
    patches = sum(document.num_patches for document in documents)
    what = "a document" if len(documents) == 1 else f"{len(documents)} documents of a row"
    if tokens > row_format.seq_length:
        raise ConfigError(
            f"{what} of {tokens} tokens do not fit train.seq_length={row_format.seq_length}, and no image is ever cut;"
            f" use train.seq_length={tokens} or more, or shorten the text"
        )
    if patches > row_format.max_patches:
        raise ConfigError(
            f"{what} of {patches} image patches do not fit data.max_patches_per_row={row_format.max_patches}, and no"
            f" image is ever cut; use {patches} or more, or smaller images"
        )
