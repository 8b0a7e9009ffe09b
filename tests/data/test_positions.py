"""mRoPE positions, against values worked out by hand from the Qwen2-VL paper."""

from jaxforge.data.positions import mrope_positions


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
