"""Progress and pictures."""

import io
import math

import numpy as np
import pytest
from matplotlib.image import imread
from rich.console import Console

from jaxforge.training import report

ROW = {"step": 1, "loss": 0.51234, "tokens_per_second": 12345.0, "tflops_per_device": 0.0123, "mfu": None}


@pytest.fixture
def clock(monkeypatch):
    """Time that moves when told to."""
    now = [100.0]
    monkeypatch.setattr(report.time, "monotonic", lambda: now[0])
    return now


def run_in_a_file(clock, steps, total, log_every, seconds_per_step=2.0, **more) -> list[str]:
    console = Console(file=io.StringIO(), width=60)
    with report.Progress(total, log_every, console=console) as progress:
        for step in steps:
            clock[0] += seconds_per_step
            progress.update(ROW | {"step": step} | more)
        progress.say("[saved] to /a")
    return console.file.getvalue().splitlines()


def test_without_a_terminal_there_is_a_plain_line_every_log_every_steps_and_at_the_end(clock):
    lines = run_in_a_file(clock, range(1, 6), total=5, log_every=2)
    assert lines == [
        # 3 steps of 2 s remain, then 1, then none
        "step 2/5  loss 0.5123  12.3k tokens/s  0.0123 TFLOP/s per device  6 s left",
        "step 4/5  loss 0.5123  12.3k tokens/s  0.0123 TFLOP/s per device  2 s left",
        "step 5/5  loss 0.5123  12.3k tokens/s  0.0123 TFLOP/s per device",
        "[saved] to /a",
    ]


def test_the_time_left_follows_the_last_steps_and_not_the_compilation(clock):
    # The first update comes 500 s late; later steps take 2 s, and 97 are left.
    console = Console(file=io.StringIO(), width=200)
    progress = report.Progress(100, 1, console=console)
    clock[0] += 500
    for step in (1, 2, 3):
        progress.update(ROW | {"step": step})
        clock[0] += 2
    assert console.file.getvalue().splitlines()[-1].endswith("3 min 14 s left")


def test_mfu_is_shown_where_there_is_one_and_a_loss_that_is_not_finite_is_named():
    assert report.describe({"loss": None, "mfu": 0.4321}) == ["loss not finite", "MFU 43.2%"]


def test_a_terminal_gets_a_bar_with_the_numbers(clock):
    console = Console(file=io.StringIO(), force_terminal=True, width=150)
    with report.Progress(10, 5, console=console) as progress:
        progress.update(ROW | {"step": 3})
    output = console.file.getvalue()
    assert "step 3/10" in output and "12.3k tokens/s" in output


def test_other_processes_show_nothing(clock, monkeypatch):
    monkeypatch.setattr("jax.process_index", lambda: 1)
    assert run_in_a_file(clock, range(1, 6), total=5, log_every=1) == []


@pytest.mark.parametrize(
    "seconds, text",
    [(0.4, "0 s"), (59.6, "1 min 00 s"), (200, "3 min 20 s"), (7500, "2 h 05 min"), (97200, "1 d 03 h")],
)
def test_a_duration_is_said_in_two_units(seconds, text):
    assert report.duration(seconds) == text


def made_up_rows(num_steps=300) -> list[dict]:
    rng = np.random.default_rng(0)
    rows = []
    for step in range(1, num_steps + 1):
        loss = 5 * math.exp(-step / 60) + 0.05 + 0.03 * rng.random()
        seconds = 6.0 if step == 1 else 0.35 + 0.05 * rng.random()
        wait = 0.005 + 0.1 * rng.random() * (rng.random() < 0.05)
        tokens_per_second = 4096 / seconds
        rows.append(
            {"step": step, "loss": loss, "step_seconds": seconds, "tokens_per_second": tokens_per_second,
             "tflops_per_device": tokens_per_second * 1e-6, "mfu": None, "data_wait_seconds": wait}
        )  # fmt: skip
        if step % 50 == 0:
            rows.append({"step": step, "eval/loss": loss + 0.05, "eval/exact_match": 1 - math.exp(-step / 80)})
    return rows


def test_a_curve_has_the_rows_where_the_metric_is_a_number():
    rows = [{"step": 1, "loss": 2.0}, {"step": 1, "x": 3.0}, {"step": 2, "loss": None}, {"step": 4, "loss": 1.0}]
    assert report.curve(rows, "loss") == ([1, 4], [2.0, 1.0])


@pytest.mark.parametrize("rows", [[], made_up_rows(1), made_up_rows()], ids=["none", "one step", "300 steps"])
def test_the_pictures_are_drawn_whatever_rows_there_are(tmp_path, rows):
    paths = report.draw_pictures(rows, tmp_path / "pictures")
    assert [path.name for path in paths] == ["loss.png", "throughput.png", "data_wait.png"]
    for path in paths:
        assert imread(path).std() > 0.01, "a blank picture"


def has_colour(picture: np.ndarray, colour: str) -> bool:
    wanted = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return bool((np.abs(picture[..., :3] - wanted).max(axis=-1) < 0.02).any())


@pytest.mark.parametrize("prediction, green, red", [("345", True, False), ("35", False, True), ("", False, True)])
def test_a_prediction_is_green_where_it_is_the_truth_and_red_elsewhere(tmp_path, prediction, green, red):
    image = np.full((16, 24), 128, np.uint8)
    path = tmp_path / "pictures" / "predictions.png"
    report.draw_predictions([(image, "read left to right", "345", prediction)], path)
    picture = imread(path)
    assert (has_colour(picture, "#1a7f37"), has_colour(picture, "#c0262d")) == (green, red)


def test_predictions_of_an_untrained_model_are_drawn_too(tmp_path):
    samples = [
        (np.zeros((8, 8, 1), np.uint8), "a question so long that it doesn't fit in a line", "1", "$^{\x00\n" * 20),
        (np.zeros((30, 8, 3), np.uint8), "", "", ""),
    ]
    report.draw_predictions(samples, tmp_path / "predictions.png")
    report.draw_predictions([], tmp_path / "none.png")
    assert (tmp_path / "predictions.png").exists() and (tmp_path / "none.png").exists()
