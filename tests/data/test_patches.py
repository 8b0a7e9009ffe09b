"""Patches: their order, contents and windows, and the sizes that images are resized to."""

import numpy as np
import pytest
from media_samples import FIXTURES, fixture

from jaxforge.config.errors import ConfigError
from jaxforge.config.schema import EncoderConfig
from jaxforge.data.conversation import SampleError
from jaxforge.data.patches import patchify, smart_resize, stack_frames


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


@pytest.mark.parametrize(
    "case", fixture("image_sizes.json"), ids=lambda case: f"{case['family']}-{case['max_pixels']}-{case['size']}"
)
def test_resized_sides_are_those_of_transformers(case):
    factor = {"qwen2_5_vit": 28, "qwen3_vit": 32}[case["family"]]
    limits = factor, case["min_pixels"], case["max_pixels"]
    if case["resized"] is None:
        with pytest.raises(SampleError):
            smart_resize(*case["size"], *limits)
    else:
        assert smart_resize(*case["size"], *limits) == tuple(case["resized"])


def test_an_aspect_ratio_above_200_is_refused():
    # F37
    assert smart_resize(10, 2000)[0] == 28
    with pytest.raises(SampleError, match="10x2270 pixels has an aspect ratio of 227, more than 200") as error:
        smart_resize(10, 2270)
    assert error.value.kind == "aspect ratio"


def test_an_empty_image_is_refused():
    with pytest.raises(SampleError, match="0x20 pixels is empty") as error:
        smart_resize(0, 20)
    assert error.value.kind == "corrupt media"


def test_frames_of_a_temporal_patch_lie_side_by_side_in_each_patch():
    frames_THWC = np.array([[[[0], [1]], [[2], [3]]], [[[10], [11]], [[12], [13]]]], np.float32)
    config = encoder(patch_size=2, spatial_merge_size=1, temporal_patch_size=2)
    assert patchify(frames_THWC, config).patches_PC.tolist() == [[0, 1, 2, 3, 10, 11, 12, 13]]


@pytest.mark.parametrize("family", ["qwen2_5_vit", "qwen3_vit"])
def test_patches_of_a_video_are_in_the_order_of_transformers(family):
    with np.load(FIXTURES / "patches.npz") as arrays:
        expected_PC, (frames, *grid) = arrays[f"{family} video patches"], arrays[f"{family} video grid"].tolist()
    config = encoder(patch_size=2, temporal_patch_size=2, in_channels=3)
    numbers_THWC = np.arange(4 * 8 * 12 * 3, dtype=np.float32).reshape(4, 8, 12, 3)
    video = stack_frames([patchify(numbers_THWC[:2], config), patchify(numbers_THWC[2:], config)], time_step=1.0)
    assert (video.frames, *video.grid) == (frames, *grid)
    assert np.array_equal(video.patches_PC, expected_PC)


def test_a_window_of_qwen2_5_is_8_by_8_patches_of_one_frame():
    # F34: 112 pixels are 8 patches of 14; a frame of 12 x 16 patches has windows of 8 x 8 and, below, of 4 x 8
    config = encoder(patch_size=14, window_size=112)
    frame = patchify(np.zeros((12 * 14, 16 * 14, 1), np.float32), config)
    video = stack_frames([frame, frame, frame], time_step=2.0)
    _, counts = np.unique(video.windows_P, return_counts=True)
    assert counts.tolist() == [64, 64, 32, 32] * 3
    frame_P = np.repeat([0, 1, 2], 12 * 16)
    place_P3 = np.column_stack([frame_P, video.positions_P2 // 8])
    # patches share a window just where they share frame and place in units of 8 patches
    window_of_place = {}
    for place, window in zip(map(tuple, place_P3.tolist()), video.windows_P.tolist(), strict=True):
        assert window_of_place.setdefault(place, window) == window
    assert len(set(window_of_place.values())) == len(window_of_place) == 12


def test_frames_other_than_one_temporal_patch_are_refused():
    with pytest.raises(ValueError, match="3 frames are not one temporal patch of .*temporal_patch_size=2"):
        patchify(np.zeros((3, 4, 4, 1), np.float32), encoder(temporal_patch_size=2))
