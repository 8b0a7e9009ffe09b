"""The chart of a schedule, read back from its pixels."""

import numpy as np
import pytest
from PIL import Image

from jaxforge.parallel.pipeline.picture import draw_schedule
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
