"""The chart of a schedule: what each rank does in each tick."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure  # without pyplot, which would change a notebook's backend
from matplotlib.patches import Rectangle

from jaxforge.parallel.pipeline.schedule import Schedule
from jaxforge.words import counted

# Inches.  Everything has a fixed place, so that nothing can lie over anything else.
_LEFT, _RIGHT, _TOP, _BOTTOM = 0.75, 0.8, 1.1, 0.75
_MIN_CELL_WIDTH, _CELL_HEIGHT = 0.17, 0.21
_MIN_WIDTH, _MAX_CELLS_WIDTH = 7.0, 40.0
_MEMORY_TOP, _BAR_HEIGHT, _MEMORY_BOTTOM = 0.75, 0.3, 0.5
_DIGIT_WIDTH = 0.07  # of a number in a cell
_DPI = 100
_DIRECTIONS = ("forward", "backward")
_SHADES = {"forward": colormaps["Blues"], "backward": colormaps["Oranges"]}
_IDLE, _INK, _EDGE = "#f1f2f4", "#3c4350", "#b9bec6"


@dataclasses.dataclass(frozen=True)
class MemoryBar:
    """Memory of a GPU of one rank, in bytes: parts by name, the same names for every rank, and what it has."""

    parts: Mapping[str, int]
    capacity: int
    note: str


def draw_schedule(schedule: Schedule, path: Path, memory: Sequence[MemoryBar] = ()) -> None:
    """Draws a PNG file: ranks down, ticks across, in each a forward above a backward with its microbatch's number.

    Chunks differ in shade, idle time is pale.  Above stand the three phases with their ticks, on the right the most
    chunks in flight of each rank.  Beyond about 200 ticks cells are too narrow for numbers, which are then left out.
    Below, where `memory` is given, stands what a GPU of each rank holds.
    """
    ranks, ticks = schedule.pipeline_size, schedule.num_ticks
    number_width = _DIGIT_WIDTH * len(str(schedule.num_microbatches - 1)) + 0.05
    cell_width = min(max(_MIN_CELL_WIDTH, number_width), _MAX_CELLS_WIDTH / ticks)
    width = max(_MIN_WIDTH, _LEFT + cell_width * ticks + _RIGHT)
    below = _MEMORY_TOP + _BAR_HEIGHT * ranks + _MEMORY_BOTTOM if memory else 0.0
    height = _TOP + 2 * _CELL_HEIGHT * ranks + _BOTTOM + below
    figure = Figure(figsize=(width, height))
    figure.text(0.15 / width, 1 - 0.12 / height, _title(schedule), va="top", size=12, weight="bold")
    figure.text(0.15 / width, 1 - 0.38 / height, _summary(schedule), va="top", size=10)
    cells = figure.add_axes(
        (_LEFT / width, (_BOTTOM + below) / height, cell_width * ticks / width, 1 - (_TOP + _BOTTOM + below) / height)
    )
    _draw_cells(cells, schedule, fine_lines=cell_width > 0.1)
    if cell_width >= number_width:
        _draw_numbers(cells, schedule)
    _label_axes(cells, schedule, cell_width)
    _draw_phases(cells, schedule, cell_width)
    cells.set(xlim=(0, ticks), ylim=(2 * ranks, 0))
    legend = figure.add_axes((0.15 / width, (0.1 + below) / height, 1 - 0.3 / width, 0.2 / height))
    legend.set(xlim=(0, width - 0.3), ylim=(0, 0.2))
    _draw_legend(legend, schedule)
    if memory:
        place = (_LEFT / width, _MEMORY_BOTTOM / height, (width - _LEFT - 2 * _RIGHT) / width)
        _draw_memory(figure.add_axes((*place, _BAR_HEIGHT * ranks / height)), memory)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=_DPI, facecolor="white")


def _title(schedule: Schedule) -> str:
    ranks, microbatches = schedule.pipeline_size, schedule.num_microbatches
    parts = [counted(ranks, "rank"), counted(microbatches, "microbatch", "es")]
    if schedule.virtual_stages > 1:
        parts.insert(1, f"{schedule.virtual_stages} chunks in each")
    return ("Interleaved 1F1B: " if schedule.virtual_stages > 1 else "1F1B: ") + ", ".join(parts)


def _summary(schedule: Schedule) -> str:
    return (
        f"{schedule.num_ticks} ticks, {schedule.forward_ticks} of them with forwards and {schedule.forward_ticks} with"
        f" backwards; bubble {100 * schedule.bubble_fraction:.1f} %"
    )


def _colours(schedule: Schedule, direction: str) -> np.ndarray:
    """The colour of each chunk, from pale to strong: [chunks, 3]."""
    shades = np.linspace(0.35, 0.8, schedule.virtual_stages) if schedule.virtual_stages > 1 else np.array([0.45])
    return _SHADES[direction](shades)[:, :3]


def _ink_on(colour: np.ndarray) -> str:
    return "white" if colour @ (0.3, 0.6, 0.1) < 0.6 else "black"


def _draw_cells(axes: Axes, schedule: Schedule, fine_lines: bool) -> None:
    """Rank r has rows 2 r (forward) and 2 r + 1 (backward)."""
    ranks, ticks = schedule.pipeline_size, schedule.num_ticks
    colours = np.empty((2 * ranks, ticks, 3))
    for row, direction in enumerate(_DIRECTIONS):
        palette = np.vstack([_colours(schedule, direction), to_rgb(_IDLE)])  # idle is chunk -1, the last colour
        colours[row::2] = palette[getattr(schedule, direction)[..., 1].T]
    axes.imshow(colours, aspect="auto", interpolation="nearest", extent=(0, ticks, 2 * ranks, 0))
    if fine_lines:
        axes.vlines(range(1, ticks), 0, 2 * ranks, color="white", linewidth=0.6)
    axes.hlines(range(1, 2 * ranks, 2), 0, ticks, color="white", linewidth=0.6)
    axes.hlines(range(2, 2 * ranks, 2), 0, ticks, color="white", linewidth=4)
    axes.hlines(range(2, 2 * ranks, 2), 0, ticks, color=_EDGE, linewidth=0.8)
    axes.spines[:].set(color=_EDGE, linewidth=0.8)


def _draw_numbers(axes: Axes, schedule: Schedule) -> None:
    for row, direction in enumerate(_DIRECTIONS):
        inks = [_ink_on(colour) for colour in _colours(schedule, direction)]
        table = getattr(schedule, direction)
        for tick, rank in np.argwhere(table[..., 0] >= 0):
            microbatch, chunk = table[tick, rank]
            _write(axes, tick + 0.5, 2 * rank + row + 0.54, f"{microbatch}", 8, inks[chunk], ha="center", va="center")


def _label_axes(axes: Axes, schedule: Schedule, cell_width: float) -> None:
    ranks, ticks = schedule.pipeline_size, schedule.num_ticks
    step = next(step for step in (5, 10, 50, 100, 500, 1000, 5000, ticks) if step * cell_width > 0.5 or step >= ticks)
    shown = range(0, ticks, step)
    axes.set_xticks([tick + 0.5 for tick in shown], [f"{tick}" for tick in shown], size=8)
    axes.set_yticks([2 * rank + 1 for rank in range(ranks)], [f"rank {rank}" for rank in range(ranks)], size=9)
    axes.tick_params(length=0, colors=_INK)
    axes.set_xlabel("tick", size=9, color=_INK, labelpad=1)
    right = ticks + 0.1 / cell_width
    _write(axes, right, -0.7, "in flight", 9, va="bottom")
    for rank, chunks in enumerate(schedule.max_chunks_in_flight):
        _write(axes, right, 2 * rank + 1, f"{chunks}", 9, va="center")


def _draw_phases(axes: Axes, schedule: Schedule, cell_width: float) -> None:
    """A bracket above each phase, and a line through all ranks where one ends."""
    names = (("forward", "F"), ("forward and backward", "F+B"), ("backward", "B"))
    for phase, (name, short_name) in zip(schedule.phases, names, strict=True):
        length = phase.stop - phase.start
        if length:
            ends = [phase.start + 0.15, phase.stop - 0.15]
            axes.plot(np.repeat(ends, 2), [-0.25, -0.5, -0.5, -0.25], color=_INK, linewidth=1, clip_on=False)
            text = f"{name}: {length}"
            if length * cell_width < 0.08 * len(text):
                text = f"{short_name} {length}"
            _write(axes, sum(ends) / 2, -0.7, text, 9, ha="center", va="bottom")
        if 0 < phase.stop < schedule.num_ticks:
            axes.vlines(phase.stop, 0, 2 * schedule.pipeline_size, color=_INK, linewidth=1.4)


def _draw_legend(axes: Axes, schedule: Schedule) -> None:
    """A swatch for each chunk of each direction, and one for idle time; in inches."""
    axes.set_axis_off()
    side, at = 0.2, 0.0
    for direction in _DIRECTIONS:
        label = f"{direction}, chunk" if schedule.virtual_stages > 1 else direction
        _write(axes, at, 0.1, label, 9, va="center")
        at += 0.08 * len(label) + 0.05
        for chunk, colour in enumerate(_colours(schedule, direction)):
            axes.add_patch(_swatch(at, side, colour))
            if schedule.virtual_stages > 1:
                _write(axes, at + side / 2, 0.09, f"{chunk}", 8, _ink_on(colour), ha="center", va="center")
            at += side
        at += 0.3
    _write(axes, at, 0.1, "idle", 9, va="center")
    axes.add_patch(_swatch(at + 0.37, side, to_rgb(_IDLE)))


def _draw_memory(axes: Axes, memory: Sequence[MemoryBar]) -> None:
    """A bar for each rank, its parts from left to right, and a line at what the GPU has."""
    left = np.zeros(len(memory))
    colours = colormaps["tab20c"](np.linspace(0, 0.95, len(memory[0].parts)))
    for name, colour in zip(memory[0].parts, colours, strict=True):
        sizes = np.array([bar.parts[name] for bar in memory]) / 2**30
        axes.barh(range(len(memory)), sizes, 0.7, left=left, color=colour, label=name)
        left += sizes
    capacity = memory[0].capacity / 2**30
    axes.axvline(capacity, color=_INK, linewidth=1.4)
    most = max(capacity, left.max())
    for rank, bar in enumerate(memory):
        _write(axes, 1.02 * most, rank, f"{left[rank]:.1f} GiB; {bar.note}", 9, va="center")
    axes.set(xlim=(0, 1.02 * most), ylim=(len(memory) - 0.5, -0.5))
    axes.set_yticks(range(len(memory)), [f"rank {rank}" for rank in range(len(memory))], size=9)
    axes.set_xlabel(f"GiB of each GPU; the line is what it has: {capacity:.1f}", size=9, color=_INK, labelpad=1)
    axes.tick_params(length=0, colors=_INK, labelsize=8)
    axes.spines[:].set(color=_EDGE, linewidth=0.8)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4, frameon=False, fontsize=8, borderaxespad=0.1)


def _swatch(left: float, side: float, colour: np.ndarray | tuple[float, float, float]) -> Rectangle:
    return Rectangle((left, 0), side, side, facecolor=tuple(colour), edgecolor="white", linewidth=0.6)


def _write(axes: Axes, x: float, y: float, text: str, size: float, color: str = _INK, **places: str) -> None:
    axes.text(x, y, text, size=size, color=color, **places)  # type: ignore[arg-type]
