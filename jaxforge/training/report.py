"""What a person sees of a run: progress while it trains, pictures at its end."""

import collections
import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import jax
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure  # without pyplot, which would change a notebook's backend
from matplotlib.patches import Rectangle
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter
from rich import progress as rich_progress
from rich.console import Console

Rows = Sequence[Mapping[str, Any]]

# Steps whose mean duration gives the time left: enough to smooth over an evaluation, few enough to follow a change.
_STEPS_OF_PACE = 20
_TRAIN, _EVAL, _FAINT = "#1f5fa8", "#d95f02", "#a9c4e4"
_RIGHT, _WRONG = "#1a7f37", "#c0262d"


class Progress:
    """A bar in a terminal; elsewhere (a file, SLURM's output) a line every `log_every_steps`.

    The primary process alone shows anything.  Used as a context, with `update` after each step and `say` for anything
    else, since a plain print would break the bar.
    """

    def __init__(self, total_steps: int, log_every_steps: int, first_step: int = 0, console: Console | None = None):
        self._total = total_steps
        self._log_every = log_every_steps
        self._console = console or Console(file=sys.stdout, highlight=False)
        self._shown = jax.process_index() == 0
        self._pace = collections.deque[tuple[int, float]](maxlen=_STEPS_OF_PACE + 1)
        self._bar: rich_progress.Progress | None = None
        if self._shown and self._console.is_terminal:
            self._bar = rich_progress.Progress(
                rich_progress.TextColumn("step {task.completed}/{task.total}"),
                rich_progress.BarColumn(bar_width=20),
                rich_progress.TextColumn("{task.description}"),
                console=self._console,
            )
            self._task = self._bar.add_task("compiling", total=total_steps, completed=first_step)

    def update(self, row: Mapping[str, Any]) -> None:
        """Shows the row of a step that ended; `row` has what a row of metrics.jsonl has."""
        step = row["step"]
        self._pace.append((step, time.monotonic()))
        if not self._shown:
            return
        text = "  ".join([*describe(row), *self._time_left(step)])
        if self._bar is not None:
            self._bar.update(self._task, completed=step, description=text)
        elif step % self._log_every == 0 or step == self._total:
            self.say(f"step {step}/{self._total}  {text}")

    def say(self, text: str) -> None:
        """Prints a line, above the bar if there is one."""
        if self._shown:
            self._console.print(text, markup=False, soft_wrap=True)

    def __enter__(self) -> "Progress":
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _time_left(self, step: int) -> list[str]:
        (first_step, first_time), (_, now) = self._pace[0], self._pace[-1]
        if step == first_step or step >= self._total:
            return []
        return [f"{duration((self._total - step) * (now - first_time) / (step - first_step))} left"]


def describe(row: Mapping[str, Any]) -> list[str]:
    """A row in a few words: what it has of loss, throughput, and use of the devices."""
    formats: dict[str, Callable[[float], str]] = {
        "loss": lambda value: f"loss {value:.4f}",
        "tokens_per_second": lambda value: f"{_thousands(value)} tokens/s",
        "tflops_per_device": lambda value: f"{value:.3g} TFLOP/s per device",
        "mfu": lambda value: f"MFU {value:.1%}",
    }
    words = [words(row[name]) for name, words in formats.items() if row.get(name) is not None]
    # metrics.jsonl has null where the loss isn't finite; a person should see it.
    return ["loss not finite", *words] if "loss" in row and row["loss"] is None else words


def duration(seconds: float) -> str:
    """Seconds as a person says them, to two units: "48 s", "3 min 20 s", "2 h 05 min", "1 d 03 h"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600:02d} h"


def _thousands(value: float) -> str:
    return f"{value / 1000:.1f}k" if value >= 10_000 else f"{value:.0f}"


def draw_pictures(rows: Rows, directory: Path) -> list[Path]:
    """Draws loss.png, throughput.png and data_wait.png of a run's rows into `directory`; returns their paths.

    With experts also expert_load.png.
    """
    directory.mkdir(parents=True, exist_ok=True)
    drawings = {"loss.png": _draw_loss, "throughput.png": _draw_throughput, "data_wait.png": _draw_data_wait}
    if curve(rows, "moe/load_max_mean").steps:
        drawings["expert_load.png"] = _draw_expert_load
    for name, draw in drawings.items():
        _save(draw(rows), directory / name)
    return [directory / name for name in drawings]


class Curve(NamedTuple):
    """A metric over the steps that have it."""

    steps: list[int]
    values: list[float]


def curve(rows: Rows, name: str) -> Curve:
    """The metric `name` over the rows where it is a number."""
    found = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
    return Curve([step for step, _ in found], [value for _, value in found])


def _draw_loss(rows: Rows) -> Figure:
    match = curve(rows, "eval/exact_match")
    figure, panels = _figure(["loss (nats per target token)"] + (["exact match (% of answers)"] if match.steps else []))
    train, held_out = curve(rows, "loss"), curve(rows, "eval/loss")
    _plot_smoothed(panels[0], train, "training")
    if held_out.steps:
        panels[0].plot(*held_out, "o-", color=_EVAL, markersize=5, label="evaluation")
    values = [value for value in train.values + held_out.values if value > 0]
    # Over more than a factor of ten, a linear axis shows the first steps and a flat line.
    if values and max(values) > 10 * min(values):
        panels[0].set_yscale("log")
        panels[0].yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        panels[0].yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        panels[0].yaxis.set_minor_formatter(NullFormatter())
    panels[0].legend(frameon=False)
    if match.steps:
        panels[1].plot(match.steps, [100 * value for value in match.values], "o-", color=_EVAL, markersize=5)
        panels[1].set_ylim(0, 104)
    return figure


def _draw_throughput(rows: Rows) -> Figure:
    mfu = curve(rows, "mfu")
    labels = ["tokens per second", "TFLOP/s per device"] + (["MFU (%)"] if mfu.steps else [])
    figure, panels = _figure(labels)
    curves = [curve(rows, "tokens_per_second"), curve(rows, "tflops_per_device")]
    curves += [Curve(mfu.steps, [100 * value for value in mfu.values])] if mfu.steps else []
    for axes, found in zip(panels, curves, strict=True):
        _plot_smoothed(axes, found, "each step")
        axes.set_ylim(bottom=0)
    panels[0].legend(frameon=False, loc="lower right")
    return figure


def _draw_data_wait(rows: Rows) -> Figure:
    figure, (axes,) = _figure(["seconds"])
    axes.plot(*curve(rows, "step_seconds"), color=_TRAIN, linewidth=1.2, label="whole step")
    axes.plot(*curve(rows, "data_wait_seconds"), color=_EVAL, linewidth=1.2, label="waiting for data")
    # The first step may hold the compilation, a thousand times a step: the axis shows the other steps.
    seconds = curve(rows, "step_seconds").values + curve(rows, "data_wait_seconds").values
    axes.set_ylim(0, max(1.15 * float(np.quantile(seconds, 0.98)), 1e-3) if seconds else 1)
    axes.legend(frameon=False)
    return figure


def _draw_expert_load(rows: Rows) -> Figure:
    bias = curve(rows, "moe/bias_max")
    labels = ["load of an expert / mean of its layer", "entropy (nats)"] + (["selection bias"] if bias.steps else [])
    figure, panels = _figure(labels)
    low, middle, high = (curve(rows, f"moe/load_p{percent}") for percent in (10, 50, 90))
    panels[0].fill_between(low.steps, low.values, high.values, color=_FAINT, label="10th to 90th percentile")
    panels[0].plot(*middle, color=_TRAIN, linewidth=1.5, label="median of all experts")
    panels[0].plot(*curve(rows, "moe/load_max_mean"), color=_EVAL, linewidth=1.2, label="largest")
    panels[0].axhline(1, color="#888888", linewidth=0.8)
    panels[0].set_ylim(bottom=0)
    panels[0].legend(frameon=False)
    panels[1].plot(*curve(rows, "moe/entropy"), color=_TRAIN, linewidth=1.5)
    if bias.steps:
        lowest = curve(rows, "moe/bias_min")
        panels[2].fill_between(bias.steps, lowest.values, bias.values, color=_FAINT)
    return figure


def _figure(labels: Sequence[str]) -> tuple[Figure, list[Axes]]:
    """A figure of panels over the steps, one below the other, with these labels on their y axes."""
    figure = Figure(figsize=(8, 1.4 + 2.8 * len(labels)), layout="constrained")
    panels = list(figure.subplots(len(labels), 1, sharex=True, squeeze=False)[:, 0])
    for axes, label in zip(panels, labels, strict=True):
        axes.set_ylabel(label)
        axes.grid(color="#e4e4e4", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel("step")
    return figure, panels


def _plot_smoothed(axes: Axes, found: Curve, label: str) -> None:
    """A curve, and over a long one its running median, which outliers such as compilations leave alone."""
    count = len(found.values)
    window = count // 40
    if window < 3:
        axes.plot(*found, color=_TRAIN, linewidth=1.5, label=label)
        return
    # Narrower near the ends, so that as many steps before as after count, and a falling curve keeps its first value.
    reach = [min(i, count - 1 - i, window) for i in range(count)]
    medians = [float(np.median(found.values[i - reach[i] : i + reach[i] + 1])) for i in range(count)]
    axes.plot(*found, color=_FAINT, linewidth=0.8, label=label)
    axes.plot(found.steps, medians, color=_TRAIN, linewidth=1.8, label=f"{label}, running median")


def draw_predictions(samples: Sequence[tuple[np.ndarray, str, str, str]], path: Path, columns: int = 4) -> None:
    """Draws images with their questions and answers in a grid: the prediction green where it equals the truth, or red.

    samples: (image, question, truth, prediction); an image is uint8, [height, width] or [height, width, channels].
    """
    columns = min(columns, max(len(samples), 1))
    num_rows = -(-max(len(samples), 1) // columns)
    figure = Figure(figsize=(3.1 * columns, 2.9 * num_rows), layout="constrained")
    cells = figure.subplots(num_rows, columns, squeeze=False).ravel()
    for axes in cells:
        axes.set_axis_off()
    for axes, sample in zip(cells, samples, strict=False):
        _draw_prediction(axes, *sample)
    _save(figure, path)


def _draw_prediction(axes: Axes, image: np.ndarray, question: str, truth: str, prediction: str) -> None:
    pixels = np.squeeze(image)
    height, width = pixels.shape[:2]
    axes.imshow(pixels, cmap="gray", vmin=0, vmax=255, interpolation="nearest")
    # A thin frame shows where an image ends, whose background may be white.
    axes.add_patch(Rectangle((-0.5, -0.5), width, height, fill=False, edgecolor="#888888", linewidth=0.8))
    # Every image is centred in a field of 3 to 2, so that the questions of a row are level, and so are its answers.
    field_width, field_height = max(width, 1.5 * height) * 1.02, max(height, width / 1.5) * 1.02
    axes.set_xlim((width - field_width) / 2 - 0.5, (width + field_width) / 2 - 0.5)
    axes.set_ylim((height + field_height) / 2 - 0.5, (height - field_height) / 2 - 0.5)
    axes.set_title(_plain_text(question, 42), fontsize=9)
    right = prediction == truth
    answer = f"{'right' if right else 'wrong'}: {prediction or '(nothing)'}"
    answer += "" if right else f"\ntruth: {truth}"
    colour = _RIGHT if right else _WRONG
    below = axes.text(0.5, -0.03, _plain_text(answer, 34), color=colour, fontsize=10, fontweight="bold")
    below.set(transform=axes.transAxes, horizontalalignment="center", verticalalignment="top")


def _plain_text(text: str, width: int) -> str:
    """Wrapped to a width in characters, with no mathematics: an untrained model answers "$^{" too."""
    printable = "".join(character if character.isprintable() or character == "\n" else "?" for character in text)
    lines = [piece for line in printable.splitlines() for piece in textwrap.wrap(line, width)]
    shown = lines if len(lines) <= 4 else [*lines[:3], "..."]
    return "\n".join(shown).replace("$", r"\$")


def _save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
