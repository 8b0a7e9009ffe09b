"""The chart of a schedule, read back from its pixels."""

import numpy as np
import pytest
from PIL import Image

from jaxforge.parallel.pipeline.picture import MemoryBar, draw_schedule
from jaxforge.parallel.pipeline.schedule import make_schedule


def cells(schedule, path):
    """Whether each half cell [ranks, 2, ticks] is coloured, from the pixel left of its number."""
    draw_schedule(schedule, path)
    pixels = np.asarray(Image.open(path).convert("RGB")).astype(int)
    height, width = pixels.shape[:2]
    # the chart's field: from 0.75 inch on the left and 0.75 above the lower edge, at 100 pixels per inch
    cell_width = 17 if schedule.num_microbatches <= 10 else 19
    rows, columns = 2 * schedule.pipeline_size, schedule.num_ticks
    ys = height - 75 - 21 * rows + 21 * np.arange(rows) + 5
    xs = 75 + cell_width * np.arange(columns) + 3
    chart = pixels[np.ix_(np.round(ys).astype(int), xs)]
    coloured = np.ptp(chart, axis=2) > 30  # idle is grey
    return coloured.reshape(schedule.pipeline_size, 2, columns)


@pytest.mark.parametrize("sizes", [(4, 1, 8), (4, 2, 6), (8, 2, 32)])
def test_cells_are_coloured_where_a_rank_works(sizes, tmp_path):
    schedule = make_schedule(*sizes)
    coloured = cells(schedule, tmp_path / "new" / "schedule.png")
    assert (coloured[:, 0] == (schedule.forward[..., 0] >= 0).T).all()
    assert (coloured[:, 1] == (schedule.backward[..., 0] >= 0).T).all()


def test_a_schedule_of_thousands_of_ticks_is_drawn_without_numbers(tmp_path):
    draw_schedule(make_schedule(8, 4, 128), tmp_path / "large.png")
    width, height = Image.open(tmp_path / "large.png").size
    assert width < 5000 and height < 1000


def test_below_stands_the_memory_of_each_rank_beside_what_it_has(tmp_path):
    # of 80 GiB rank 0 holds 20 + 20, rank 1 20 + 40: read at 10, 30, 50 and 70 GiB
    sizes = {0: 20, 1: 40}
    memory = [MemoryBar({"a": 20 * 2**30, "b": sizes[rank] * 2**30}, 80 * 2**30, "x") for rank in (0, 1)]
    schedule = make_schedule(2, 1, 8)
    draw_schedule(schedule, tmp_path / "plain.png")
    draw_schedule(schedule, tmp_path / "memory.png", memory)
    plain, drawn = (np.asarray(Image.open(tmp_path / name).convert("RGB")) for name in ("plain.png", "memory.png"))
    np.testing.assert_array_equal(drawn[: plain.shape[0] - 40], plain[:-40])
    height, width = drawn.shape[:2]
    # the field: 0.75 inch on the left, 1.6 on the right, 0.5 below, bars of 0.3; 2 % more than the 80 GiB
    field = width - 75 - 160
    xs = np.round(75 + field * np.array([10, 30, 50, 70]) / (80 * 1.02)).astype(int)
    upper, lower = (drawn[height - 50 - 60 + 15 + 30 * rank, xs].astype(int) for rank in (0, 1))
    assert (upper[0] != upper[1]).any() and (upper[1] != upper[2]).any()
    np.testing.assert_array_equal(upper[2:], 255)
    np.testing.assert_array_equal(lower[1], lower[2])
    np.testing.assert_array_equal(lower[3], 255)
