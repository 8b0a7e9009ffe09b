"""mRoPE positions, against values worked out by hand from the Qwen2-VL paper, and those of transformers."""

import numpy as np
import pytest
from media_samples import fixture

from jaxforge.data.positions import VideoGrid, mrope_positions

TOKENS_PER_SECOND = 2  # of the published Qwen2.5-VL checkpoints, and of the fixtures
CASES = fixture("positions.json")


def run(kind, *numbers):
    """A run of the fixtures: text n, image h w, video t h w [seconds between temporal patches]."""
    if kind == "text":
        return numbers[0]
    if kind == "image" or numbers[0] == 1:
        return tuple(numbers[-2:])
    frames, down, across, seconds = numbers
    return VideoGrid(frames, down, across, TOKENS_PER_SECOND * seconds)


def outlasts_its_sides(case):
    """Whether a video is longer in time than high and wide, so that transformers goes another way after it."""
    return any(
        kind == "video" and int((numbers[0] - 1) * TOKENS_PER_SECOND * numbers[3]) >= max(numbers[1:3]) // 2
        for kind, *numbers in case["runs"]
        if len(numbers) == 4
    )


def test_text_around_an_image():
    # F30: 3 text tokens, a grid of 4x4 patches merged 2x2, 2 text tokens
    time, height, width = mrope_positions([3, (4, 4), 2], merge=2).tolist()
    assert time == [0, 1, 2] + [3, 3, 3, 3] + [5, 6]
    assert height == [0, 1, 2] + [3, 3, 4, 4] + [5, 6]
    assert width == [0, 1, 2] + [3, 4, 3, 4] + [5, 6]


def test_text_after_a_wide_image_starts_after_its_width():
    # one row of three tokens, whose largest position is 2
    assert mrope_positions([(2, 6), 1], merge=2).tolist() == [[0, 0, 0, 3], [0, 0, 0, 3], [0, 1, 2, 3]]


def test_an_image_after_an_image_starts_after_it():
    assert mrope_positions([(2, 4), (4, 2)], merge=2).tolist() == [[0, 0, 2, 2], [0, 0, 2, 3], [0, 1, 2, 2]]


def test_text_alone_counts_in_all_three():
    assert mrope_positions([4], merge=2).tolist() == [[0, 1, 2, 3]] * 3


def test_an_empty_document_has_no_positions():
    assert mrope_positions([], merge=2).shape == (3, 0)


def test_time_advances_by_2_in_a_video_at_2_frames_per_second():
    # F32: temporal patches of 2 frames are a second long, which is 2 positions; a grid of 2x4 patches has 2 tokens
    second = TOKENS_PER_SECOND * 2 / 2
    time, height, width = mrope_positions([1, VideoGrid(3, 2, 4, second), 2], merge=2).tolist()
    assert time == [0] + [1, 1, 3, 3, 5, 5] + [6, 7]
    assert height == [0] + [1, 1, 1, 1, 1, 1] + [6, 7]
    assert width == [0] + [1, 2, 1, 2, 1, 2] + [6, 7]


def test_a_fraction_of_a_time_step_is_rounded_down():
    # 0, 2/3, 4/3, 2
    assert mrope_positions([VideoGrid(4, 2, 2, 2 / 3)], merge=2)[0].tolist() == [0, 0, 1, 2]


@pytest.mark.parametrize(
    "case", [case for case in CASES if not outlasts_its_sides(case)], ids=lambda case: str(case["runs"])
)
def test_positions_are_exactly_those_of_transformers(case):
    positions = mrope_positions([run(*each) for each in case["runs"]], merge=2)
    assert positions.tolist() == case["positions"]
    assert positions.max() + 1 - positions.shape[1] == case["delta"]


def test_text_starts_after_the_last_moment_of_a_long_video():
    # transformers 5 starts it after the video's height and width, in the middle of its time; the paper, the code that
    # the checkpoints were published with, and transformers 4 start it after the largest position
    (case,) = [case for case in CASES if outlasts_its_sides(case)]
    assert case["runs"] == [["text", 2], ["video", 8, 4, 4, 1.0], ["text", 3]]
    positions, theirs = mrope_positions([run(*each) for each in case["runs"]], merge=2), np.array(case["positions"])
    assert positions[:, :-3].tolist() == theirs[:, :-3].tolist()
    # 2 + 7 steps of 2 is the last moment
    assert positions[:, -3:].tolist() == [[17, 18, 19]] * 3
    assert theirs[:, -3:].tolist() == [[4, 5, 6]] * 3
