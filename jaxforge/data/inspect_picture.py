"""The picture that `jaxforge.data.inspect` draws: documents with their images, and a strip for each row."""

import functools
import itertools
import re
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure  # without pyplot, which would change a notebook's backend
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.patches import Patch

from jaxforge.data.packing import IGNORE
from jaxforge.data.row_view import DocumentView, ImageView, Span
from jaxforge.words import counted

# Inches.  Everything has a fixed place, so that nothing can lie over anything else.
_WIDTH, _MARGIN, _GAP = 14.0, 0.3, 0.3
_TEXT_WIDTH, _IMAGES_WIDTH = 8.9, 4.2
_TITLE, _LINE, _STRIP, _STRIP_LABEL, _STRIP_GAP = 0.26, 0.152, 0.24, 0.15, 0.12
_IMAGE_HEIGHT, _CAPTION = 1.55, 0.2
# The font comes with matplotlib; a character is 0.602 of its size wide: 8 pixels, as glyphs are put on whole pixels.
_FONT, _FONT_SIZE, _DPI = "DejaVu Sans Mono", 8.0, 120
_COLUMN = 8 / _DPI
_COLUMNS = int(_TEXT_WIDTH / _COLUMN)
_FIRST_LINES, _LAST_LINES, _IMAGES_SHOWN, _HEADING = 11, 6, 4, 150
_INK = {"masked": "#8b929c", "target": "#12722f", "visual": "#a8620a"}
_BAND = {"masked": "#cfd6df", "target": "#3f9d5a", "visual": "#eab464", "padding": "#ffffff"}
_MEANING = {"masked": "not learnt", "target": "learnt", "visual": "image", "padding": "padding"}


def draw_inspection(
    title: str,
    documents: Sequence[tuple[str, DocumentView]],
    rows: Sequence[tuple[str, Mapping[str, np.ndarray]]],
    path: Path,
) -> None:
    """Draws documents and rows, each with a heading, into a PNG file."""
    texts = [_lines(document.spans) for _, document in documents]
    heights = [
        _TITLE + max(len(lines) * _LINE, _images_height(document))
        for lines, (_, document) in zip(texts, documents, strict=True)
    ]
    strips = _TITLE + len(rows) * (_STRIP_LABEL + _STRIP + _STRIP_GAP)
    height = 2 * _MARGIN + 0.4 + sum(heights) + _GAP * len(documents) + strips
    page = _Page(height)
    page.text(_MARGIN, page.top, title, size=11, weight="bold")
    page.top -= 0.4
    for (heading, document), lines, used in zip(documents, texts, heights, strict=True):
        # file and line come first; of a long path the end says more
        shown = heading if len(heading) <= _HEADING else f"...{heading[-_HEADING:]}"
        page.text(_MARGIN, page.top, shown, size=8.5, weight="bold")
        _draw_text(page, page.top - _TITLE, lines)
        _draw_images(page, page.top - _TITLE, document.images)
        page.top -= used + _GAP
    _draw_rows(page, rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    page.figure.savefig(path, dpi=_DPI, facecolor="white")


class _Page:
    """A figure that is drawn on from the top, in inches from its lower left corner."""

    def __init__(self, height: float):
        self.height = height
        self.top = height - _MARGIN
        self.figure = Figure(figsize=(_WIDTH, height))

    def text(self, x: float, y: float, text: str, size: float = _FONT_SIZE, color: str = "black", **options) -> None:
        """Text whose upper left corner is at (x, y), or upper right one with ha="right"; no mathematics."""
        self.figure.text(
            x / _WIDTH, y / self.height, text, va="top", fontsize=size, color=color, parse_math=False, **options
        )

    def axes(self, x: float, y: float, width: float, height: float) -> Axes:
        """Axes whose lower left corner is at (x, y)."""
        return self.figure.add_axes((x / _WIDTH, y / self.height, width / _WIDTH, height / self.height))


def _draw_text(page: _Page, top: float, lines: Sequence[Sequence[Span]]) -> None:
    for number, line in enumerate(lines):
        column = 0
        for span in line:
            page.text(_MARGIN + column * _COLUMN, top - number * _LINE, span.text, color=_INK[span.kind], family=_FONT)
            column += _columns(span.text)


def _lines(spans: Sequence[Span]) -> list[list[Span]]:
    """Spans wrapped between words; of a long text the beginning and the end."""
    lines: list[list[Span]] = [[]]
    column = 0
    for span in spans:
        for piece in re.findall(r"\n|[^\S\n]+|\S+", span.text):
            if piece == "\n":
                lines[-1].append(Span("↵", span.kind))
                lines.append([])
                column = 0
                continue
            for part in _parts(_drawable(piece)):
                if column + _columns(part) > _COLUMNS - 1:
                    lines.append([])
                    column = 0
                    if part.isspace():
                        continue
                lines[-1].append(Span(part, span.kind))
                column += _columns(part)
    lines = [_merged(line) for line in lines]
    hidden = len(lines) - _FIRST_LINES - _LAST_LINES
    if hidden <= 1:
        return lines
    return [*lines[:_FIRST_LINES], [Span(f"... {hidden} more lines ...", "masked")], *lines[-_LAST_LINES:]]


def _merged(line: Sequence[Span]) -> list[Span]:
    """Neighbours of one kind as one span."""
    kinds = itertools.groupby(line, key=lambda span: span.kind)
    return [Span("".join(span.text for span in spans), kind) for kind, spans in kinds]


def _parts(word: str) -> list[str]:
    """A word in parts that fit a line."""
    size = (_COLUMNS - 1) // 2  # every character may be two columns wide
    return [word[start : start + size] for start in range(0, len(word), size)]


def _drawable(text: str) -> str:
    """The text without characters that the font lacks."""
    known = _font_characters()
    return "".join(character if ord(character) in known else "\N{WHITE SQUARE}" for character in text)


@functools.cache
def _font_characters() -> frozenset[int]:
    return frozenset(get_font(findfont(FontProperties(family=_FONT))).get_charmap())


def _columns(text: str) -> int:
    return sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in text)


def _images_height(document: DocumentView) -> float:
    rows = -(-min(len(document.images), _IMAGES_SHOWN) // 2)
    return rows * (_IMAGE_HEIGHT + _CAPTION)


def _draw_images(page: _Page, top: float, images: Sequence[ImageView]) -> None:
    """Two images abreast, each as large as its field allows, with its size below."""
    left = _WIDTH - _MARGIN - _IMAGES_WIDTH
    width = _IMAGES_WIDTH / min(2, max(1, len(images)))
    for number, image in enumerate(images[:_IMAGES_SHOWN]):
        x = left + number % 2 * width
        y = top - (number // 2) * (_IMAGE_HEIGHT + _CAPTION) - _IMAGE_HEIGHT
        axes = page.axes(x, y, width - 0.1, _IMAGE_HEIGHT)
        axes.imshow(np.broadcast_to(image.pixels_HWC, (*image.pixels_HWC.shape[:2], 3)), interpolation="nearest")
        axes.set(xticks=[], yticks=[], anchor="SW")
        axes.spines[:].set(color="#888888", linewidth=0.6)
        more = len(images) - _IMAGES_SHOWN
        is_last = number == _IMAGES_SHOWN - 1 and more > 0
        # half of the images' width is 45 such letters
        height, across, _ = image.pixels_HWC.shape
        caption = f"{number + 1}: {across}x{height} pixels, {counted(image.num_tokens, 'token')}"
        caption += f"; {more} more" if is_last else ""
        page.text(x, y - 0.04, caption, size=6.5, color="#555555")


def _draw_rows(page: _Page, rows: Sequence[tuple[str, Mapping[str, np.ndarray]]]) -> None:
    """A strip for each row: what each token is, with a line where a document begins."""
    handles = [Patch(facecolor=_BAND[kind], edgecolor="#888888", label=_MEANING[kind]) for kind in _BAND]
    legend = page.axes(_MARGIN, page.top - 0.2, _WIDTH - 2 * _MARGIN, 0.2)
    legend.set_axis_off()
    legend.legend(handles=handles, ncols=4, loc="center left", frameon=False, fontsize=8, borderpad=0, borderaxespad=0)
    page.top -= _TITLE
    for heading, row in rows:
        page.text(_MARGIN, page.top, heading, size=7.5, color="#333333")
        axes = page.axes(_MARGIN, page.top - _STRIP_LABEL - _STRIP, _WIDTH - 2 * _MARGIN, _STRIP)
        segments, num_tokens = row["segment_ids"], len(row["tokens"])
        axes.imshow(_band(row)[None], aspect="auto", extent=(0, num_tokens, 0, 1), interpolation="antialiased")
        starts = np.flatnonzero(np.diff(segments)) + 1
        axes.vlines(starts, 0, 1, color="black", linewidth=0.7)
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set(color="#888888", linewidth=0.6)
        page.top -= _STRIP_LABEL + _STRIP + _STRIP_GAP


def _band(row: Mapping[str, np.ndarray]) -> np.ndarray:
    """The colour of each token [S, 3]."""
    colours_S3 = np.empty((len(row["tokens"]), 3))
    colours_S3[:] = to_rgb(_BAND["masked"])
    predicted = np.roll(row["targets"] != IGNORE, 1)  # position i predicts token i + 1
    colours_S3[predicted] = to_rgb(_BAND["target"])
    if "visual_index" in row:
        colours_S3[row["visual_index"] >= 0] = to_rgb(_BAND["visual"])
    colours_S3[row["segment_ids"] == 0] = to_rgb(_BAND["padding"])
    return colours_S3
