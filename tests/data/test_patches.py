"""Patches: their order, contents and windows, and the sizes that images are resized to."""

import numpy as np
import pytest

from jaxforge.config.errors import ConfigError
from jaxforge.config.schema import EncoderConfig
from jaxforge.data.patches import patchify, smart_resize


def encoder(**fields):
    defaults = dict(patch_size=1, spatial_merge_size=2, temporal_patch_size=1, in_channels=1, window_size=8)
    return EncoderConfig(**defaults | fields)


def test_the_patches_of_a_merge_square_are_consecutive():
    #  0 1 | 2 3
    #  4 5 | 6 7    two squares of four patches of one pixel
    image_HWC = np.arange(8, dtype=np.float32).reshape(2, 4, 1)
    patches = patchify(image_HWC, encoder())
    assert patches.patches_PC[:, 0].tolist() == [0, 1, 4, 5, 2, 3, 6, 7]
    assert patches.positions_P2.tolist() == [[0, 0], [0, 1], [1, 0], [1, 1], [0, 2], [0, 3], [1, 2], [1, 3]]
    assert patches.grid == (2, 4)


def test_a_patch_is_ordered_by_channel_then_frame_then_row_then_column():
    image_HWC = np.zeros((2, 2, 2), np.float32)
    image_HWC[:, :, 0] = [[0, 1], [2, 3]]
    image_HWC[:, :, 1] = [[10, 11], [12, 13]]
    config = encoder(patch_size=2, spatial_merge_size=1, temporal_patch_size=2, in_channels=2)
    red, green = [0, 1, 2, 3], [10, 11, 12, 13]
    assert patchify(image_HWC, config).patches_PC.tolist() == [red + red + green + green]


def test_a_patch_holds_its_own_pixels():
    # a pixel's value is 100 y + x, so the first pixel of patch (row, column) is 100 * 3 row + 3 column
    y, x = np.mgrid[:12, :18]
    patches = patchify((100.0 * y + x)[..., None].astype(np.float32), encoder(patch_size=3))
    assert patches.grid == (4, 6)
    first_pixel = 300 * patches.positions_P2[:, 0] + 3 * patches.positions_P2[:, 1]
    assert patches.patches_PC[:, 0].tolist() == first_pixel.tolist()
    # y, x order inside: the second pixel is to the right, the fourth is below
    assert (patches.patches_PC[:, 1] - patches.patches_PC[:, 0]).tolist() == [1] * 24
    assert (patches.patches_PC[:, 3] - patches.patches_PC[:, 0]).tolist() == [100] * 24


def test_windows_at_the_edge_hold_what_remains():
    # windows of 2x2 squares (8 pixels of 2-pixel patches merged 2x2) on an image of 3x3 squares
    windows_of_squares = [1, 1, 2] + [1, 1, 2] + [3, 3, 4]
    patches = patchify(np.zeros((12, 12, 1), np.float32), encoder(patch_size=2))
    assert patches.windows_P.tolist() == np.repeat(windows_of_squares, 4).tolist()


def test_a_window_smaller_than_a_square_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"window_size=3 .* patch_size x spatial_merge_size=4"):
        patchify(np.zeros((4, 4, 1), np.float32), encoder(patch_size=2, window_size=3))


def test_an_image_that_does_not_divide_into_squares_is_refused():
    with pytest.raises(ValueError, match="6x8 pixels does not divide into squares of 4"):
        patchify(np.zeros((6, 8, 1), np.float32), encoder(patch_size=2))


def test_an_image_with_other_channels_is_refused():
    with pytest.raises(ValueError, match="3 channels, model.encoder.in_channels=1"):
        patchify(np.zeros((4, 4, 3), np.float32), encoder())


@pytest.mark.parametrize(
    "size, limits, expected",
    [
        # values of the published Qwen2-VL image processor
        ((31, 639), {"max_pixels": 20 * 28 * 28}, (28, 560)),
        ((14, 14), {}, (56, 56)),
        ((3000, 4000), {}, (840, 1148)),
        # 100 / 28 = 3.57 and 150 / 28 = 5.36: to the nearest multiple, within both limits
        ((100, 150), {}, (112, 140)),
    ],
)
def test_resized_sides_are_those_of_the_published_processor(size, limits, expected):
    assert smart_resize(*size, **limits) == expected


def test_an_aspect_ratio_above_200_is_refused():
    assert smart_resize(10, 2000)[0] == 28
    with pytest.raises(ConfigError, match="10x2270 pixels has an aspect ratio of 227, more than 200"):
        smart_resize(10, 2270)


def test_an_empty_image_is_refused():
    with pytest.raises(ConfigError, match="0x20 pixels is empty"):
        smart_resize(0, 20)
