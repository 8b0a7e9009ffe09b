"""Rows of the right shape with random content: for measuring speed and memory, and for runs without data."""

import numpy as np

from jaxforge.config.schema import Config, EncoderConfig
from jaxforge.data.packing import Document, pack_row
from jaxforge.data.patches import Patches, patch_positions, patch_windows
from jaxforge.data.rows import RowFormat

# At least this share of a row stays text, however many patches it could hold.
TEXT_SHARE = 0.25


class SyntheticSource:
    """Full rows of two or three documents, with images of varied sizes where the model has an encoder.

    A pure function of (train.seed, index).  Every text token but a document's first is a target.  Images are at most
    model.encoder.image_size in area; a document has as many as fill its share of the row.
    """

    def __init__(self, config: Config):
        self.row_format = RowFormat.from_config(config)
        self._seed = config.train.seed
        self._encoder = config.model.encoder
        self._vocab_size = config.model.decoder.vocab_size

    def row(self, index: int) -> dict[str, np.ndarray]:
        """Row `index`."""
        rng = np.random.default_rng((self._seed, index))
        room = self.row_format
        squares = min(room.max_patches // room.merge**2, int(room.seq_length * (1 - TEXT_SHARE)))
        num_documents = min(int(rng.integers(2, 4)), max(1, room.seq_length // 2))
        grids = [_grids(rng, share, self._encoder) for share in _shares(rng, squares, num_documents)]
        text = room.seq_length - sum(h * w for document in grids for h, w in document) // room.merge**2
        # a token each, so that no document is empty
        text_shares = _shares(rng, text - num_documents, num_documents)
        documents = [self._document(rng, 1 + share, grid) for share, grid in zip(text_shares, grids, strict=True)]
        return pack_row(documents, room)

    def _document(self, rng: np.random.Generator, text: int, grids: list[tuple[int, int]]) -> Document:
        images = tuple(self._image(rng, grid, self._encoder) for grid in grids if self._encoder)
        num_visual = sum(len(image.patches_PC) for image in images) // self.row_format.merge**2
        tokens = rng.integers(self._vocab_size, size=num_visual + text, dtype=np.int32)
        visual = np.arange(len(tokens)) < num_visual
        return Document(tokens, ~visual, visual, images)

    def _image(self, rng: np.random.Generator, grid: tuple[int, int], encoder: EncoderConfig) -> Patches:
        pixels = rng.random((grid[0] * grid[1], self.row_format.channels), np.float32)
        pixels = pixels * 2 - 1
        positions = patch_positions(grid, self.row_format.merge)
        return Patches(pixels, positions, grid, patch_windows(grid, encoder))


def _grids(rng: np.random.Generator, squares: int, encoder: EncoderConfig | None) -> list[tuple[int, int]]:
    """Images that together have at most so many squares, and nearly as many, as patches down and across."""
    if encoder is None:
        return []
    merge = encoder.spatial_merge_size
    largest = max(1, encoder.image_size[0] * encoder.image_size[1] // (encoder.patch_size * merge) ** 2)
    # what a shape leaves over is no image of its own
    smallest = max(1, min(squares, largest) // 4)
    grids = []
    while squares >= smallest:
        area = min(squares, largest)
        height_over_width = rng.uniform(0.5, 2.0)
        down = min(area, max(1, round((area * height_over_width) ** 0.5)))
        across = area // down
        grids.append((down * merge, across * merge))
        squares -= down * across
    return grids


def _shares(rng: np.random.Generator, total: int, parts: int) -> list[int]:
    """Splits a whole number at random into parts, none more than about twice another."""
    weights = rng.uniform(1.0, 2.0, size=parts)
    ends = np.floor(total * np.cumsum(weights) / weights.sum() + 1e-9).astype(int)
    ends[-1] = total
    return np.diff(ends, prepend=0).tolist()
