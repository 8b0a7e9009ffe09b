"""Images composed of scikit-learn's real handwritten digits (Alpaydin and Kaynak 1998, UCI optical digits, 8 x 8)."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from PIL import Image

from jaxforge.config.errors import ConfigError

SMALLEST_SHARE = 0.7  # side of the smallest digit's box, as a share of its cell's
MOST_LINES = 3
HELD_OUT_SHARE = 0.2
_BOX = 9  # pixels of the 8 x 8 original across a digit's box, so that a turned digit isn't cut
_CELL = 18  # side of a digit's cell in the atlas: a turned and slanted box of 9 never reaches the next digit
_ATLAS_ACROSS = 40
_CURVES = 8
CHANCES = 11  # random numbers for an image, and for each digit


@dataclasses.dataclass(frozen=True)
class DigitImages:
    """Handwritten digits of one split.

    Attributes:
      indexes: [N] position of each in scikit-learn's data set of 1797.
      labels: the digit that each shows, as text.
      atlas: all of them in one image, 255 where the ink is full, each in the middle of its own cell.
    """

    indexes: np.ndarray
    labels: tuple[str, ...]
    atlas: Image.Image

    def middle(self, number: int) -> tuple[float, float]:
        """Column and row of the middle of a digit in the atlas."""
        row, column = divmod(number, _ATLAS_ACROSS)
        return (column + 0.5) * _CELL, (row + 0.5) * _CELL


@functools.cache
def digit_images(split: str) -> DigitImages:
    """The digits of "train" (four fifths of each class) or "eval" (the rest): always the same ones.

    Raises ConfigError where scikit-learn isn't installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ConfigError(
            "data.source=digits needs scikit-learn, which is not installed; run make setup, or pip install"
            " scikit-learn, or use data.source=synthetic"
        ) from error
    digits = load_digits()
    rng = np.random.default_rng(1797)
    chosen = []
    for label in range(10):
        of_class = rng.permutation(np.flatnonzero(digits.target == label))
        held_out = round(len(of_class) * HELD_OUT_SHARE)
        chosen.append(of_class[:held_out] if split == "eval" else of_class[held_out:])
    indexes = np.sort(np.concatenate(chosen))
    inks = (digits.images[indexes] * (255 / 16)).round().astype(np.uint8)
    return DigitImages(indexes, tuple(map(str, digits.target[indexes])), _atlas(inks))


def _atlas(inks: np.ndarray) -> Image.Image:
    edge = (_CELL - inks.shape[1]) // 2
    missing = -len(inks) % _ATLAS_ACROSS
    cells = np.pad(inks, ((0, missing), (edge, edge), (edge, edge))).reshape(-1, _ATLAS_ACROSS, _CELL, _CELL)
    return Image.fromarray(np.ascontiguousarray(cells.transpose(0, 2, 1, 3)).reshape(-1, _ATLAS_ACROSS * _CELL))


class Box(NamedTuple):
    """A digit's place in an image: its number among the `DigitImages`, its box's corner and side in pixels."""

    number: int
    left: int
    top: int
    side: int


@dataclasses.dataclass(frozen=True)
class Layout:
    """An image of digits before it is drawn.

    Attributes:
      height, width: pixels.
      boxes: the digits in reading order: left to right, the upper line first.
      shapes: six numbers in [0, 1) for each digit, by which `draw` varies each digit.
    """

    height: int
    width: int
    boxes: tuple[Box, ...]
    shapes: tuple[Sequence[float], ...]


def lay_out(chances: Sequence[Sequence[float]], digits: DigitImages, digits_max: int, cell: int) -> Layout:
    """Chooses 1 to `digits_max` digits and strews them over a canvas of one line to three.

    The canvas is a grid of cells of `cell` pixels a side, some of them left blank; a digit's size and its place inside
    its cell vary.  `chances` are the random numbers in [0, 1) that decide: `CHANCES` of them for the image, and as many
    for each digit up to `digits_max`.
    """
    (many, split, wide, large, *_), *each = chances
    count = 1 + int(many * digits_max)
    lines = 1 + int(split * min(count, MOST_LINES))
    across = math.ceil(count / lines) + int(2 * wide)
    smallest = round(SMALLEST_SHARE * cell)
    size = smallest + large * (cell - smallest)
    free = list(range(lines * across))
    placed = []
    for which, where, side_chance, right, down, *shape in each[:count]:
        place = free.pop(int(where * len(free)))
        side = min(max(round(size - 2 + 4 * side_chance), smallest), cell)
        row, column = divmod(place, across)
        left, top = column * cell + round(right * (cell - side)), row * cell + round(down * (cell - side))
        placed.append((place, Box(int(which * len(digits.labels)), left, top, side), shape))
    placed.sort(key=lambda one: one[0])
    _, boxes, shapes = zip(*placed, strict=True)
    return Layout(lines * cell, across * cell, boxes, shapes)


def draw(layout: Layout, digits: DigitImages, augment: bool) -> np.ndarray:
    """The image [height, width] uint8, dark on white.

    `augment` turns, slants and stretches each digit a little and varies its ink.
    """
    shapes = layout.shapes if augment else (None,) * len(layout.boxes)
    mesh = []
    for box, shape in zip(layout.boxes, shapes, strict=True):
        bounds = (box.left, box.top, box.left + box.side, box.top + box.side)
        mesh.append((bounds, _corners(digits.middle(box.number), shape)))
    ink_HW = np.array(
        digits.atlas.transform((layout.width, layout.height), Image.Transform.MESH, mesh, Image.Resampling.BICUBIC)
    )
    if augment:
        for box, shape in zip(layout.boxes, layout.shapes, strict=True):
            ink = ink_HW[box.top : box.top + box.side, box.left : box.left + box.side]
            ink[...] = _ink_curves()[int(shape[4] * _CURVES)][int(shape[5] * _CURVES)][ink]
    return 255 - ink_HW


def largest_image(digits_max: int, cell: int) -> tuple[int, int]:
    """Height and width in pixels of the image with most pixels that `lay_out` can give."""
    sizes = [
        (lines * cell, (math.ceil(count / lines) + 1) * cell)
        for count in range(1, digits_max + 1)
        for lines in range(1, min(count, MOST_LINES) + 1)
    ]
    return max(sizes, key=math.prod)


def _corners(middle: tuple[float, float], shape: Sequence[float] | None) -> list[float]:
    """What a digit's box shows of the atlas: x, y of the upper left, lower left, lower right, upper right corner.

    `shape` turns and slants it by up to 0.2 (radians, slope) and stretches both sides by up to a tenth.
    """
    half = _BOX / 2
    xx, xy, yx, yy = half, 0.0, 0.0, half
    if shape is not None:
        turn, slant = 0.4 * shape[0] - 0.2, 0.4 * shape[1] - 0.2
        wide, high = half * (0.9 + 0.2 * shape[2]), half * (0.9 + 0.2 * shape[3])
        cosine, sine = math.cos(turn), math.sin(turn)
        xx, xy = cosine * wide, (cosine * slant - sine) * high
        yx, yy = sine * wide, (sine * slant + cosine) * high
    x, y = middle
    return [x - xx - xy, y - yx - yy, x - xx + xy, y - yx + yy, x + xx + xy, y + yx + yy, x + xx - xy, y + yx - yy]


@functools.cache
def _ink_curves() -> np.ndarray:
    """Curves from ink to ink [strength, weight, 256] uint8: strengths 0.6 to 1, weights as exponents 0.7 to 1.4."""
    strengths, exponents = np.linspace(0.6, 1.0, _CURVES), np.linspace(0.7, 1.4, _CURVES)
    return (255 * strengths[:, None, None] * (np.arange(256) / 255) ** exponents[:, None]).astype(np.uint8)
