"""Images divided among devices: tiny rows by hand, and every visual token looked up in what the devices encode."""

import numpy as np
import pytest
from tiny_models import document, image, row, tiny_config

from jaxforge.config import load_config, resolve
from jaxforge.data.digits import DigitsSource
from jaxforge.data.encoder_division import divide
from jaxforge.data.packing import Document
from jaxforge.data.patches import patchify, stack_frames
from jaxforge.data.rows import PATCH_KEYS


def rows_of(frame_lengths, room):
    """A microbatch of one row for each list of frames, of single patches: patch p of row r is the number 100 r + p.

    Every row is one text token and then the visual tokens of its frames; a frame is one window.
    """
    shape = (len(frame_lengths), 1)
    patches = 100.0 * np.arange(len(frame_lengths))[:, None] + np.arange(room)
    segments = np.zeros((len(frame_lengths), room), np.int32)
    index = np.full((len(frame_lengths), room + 1), -1, np.int32)
    for number, lengths in enumerate(frame_lengths):
        total = sum(lengths)
        segments[number, :total] = np.repeat(np.arange(1, len(lengths) + 1), lengths)
        index[number, 1 : total + 1] = np.arange(total)
    rows = {
        "visual_index": index,
        "patches": np.where(segments > 0, patches, 0.0).astype(np.float32)[..., None],
        "patch_segments": segments,
        "patch_windows": segments,
        "patch_positions": np.stack([np.zeros_like(segments), segments], axis=-1),
        "patch_grids": np.where(segments[..., None] > 0, 2, 1) * np.ones((1, 1, 2), np.int32),
    }
    return {key: array.reshape(*shape, *array.shape[1:]) for key, array in rows.items()}


def test_three_frames_on_two_devices_by_hand():
    # the largest, of 3, to the first device; the other two to the second, the larger of them first
    division = divide(rows_of([[3, 1], [2]], room=4), stages=1, tensor=2, merge=1)
    assert division.patches_G.tolist() == [3, 3]
    arrays = {key: array[0] for key, array in division.patch_arrays.items()}  # one round
    assert arrays["patches"][..., 0].tolist() == [[0, 1, 2, 0], [100, 101, 3, 0]]
    assert arrays["patch_segments"].tolist() == [[1, 1, 1, 0], [1, 1, 2, 0]]
    assert arrays["patch_windows"].tolist() == [[1, 1, 1, 0], [1, 1, 2, 0]]
    assert arrays["patch_positions"][..., 1].tolist() == [[1, 1, 1, 0], [1, 1, 2, 0]]  # as in their rows
    assert arrays["patch_grids"][..., 0].tolist() == [[2, 2, 2, 1], [2, 2, 2, 1]]
    # rows 0 to 3 of the table are the first device's, 4 to 7 the second's
    assert division.visual_index[:, 0].tolist() == [[-1, 0, 1, 2, 6], [-1, 4, 5, -1, -1]]


def test_the_table_is_ordered_by_tensor_rank_then_stage():
    # four full rows: row i to device i, which is stage i // 2, tensor rank i % 2
    division = divide(rows_of([[4]] * 4, room=4), stages=2, tensor=2, merge=1)
    assert division.patch_arrays["patches"][0, :, 0, 0].tolist() == [0, 100, 200, 300]
    assert division.visual_index[:, 0, 1].tolist() == [0, 8, 4, 12]


def test_rows_that_do_not_divide_by_the_devices_take_a_round_more():
    division = divide(rows_of([[4]] * 3, room=4), stages=1, tensor=2, merge=1)
    assert division.patch_arrays["patches"][..., 0, 0].tolist() == [[0, 100], [200, 0]]
    assert division.visual_index[:, 0, 1].tolist() == [0, 8, 4]  # the first device has rows 0 to 7
    assert division.patch_arrays["patch_segments"][1, 1].tolist() == [0, 0, 0, 0]
    assert division.patches_G.tolist() == [8, 4]


def test_a_frame_goes_to_the_fullest_round_that_it_fits():
    # of 6 patches: 4 and the first 2 fill a round, so the other round still has room for more than a 2
    division = divide(rows_of([[4], [2, 2]], room=6), stages=1, tensor=1, merge=1)
    assert division.patch_arrays["patches"][:, 0, :, 0].tolist() == [
        [0, 1, 2, 3, 100, 101],
        [102, 103, 0, 0, 0, 0],
    ]
    assert division.visual_index[:, 0].tolist() == [[-1, 0, 1, 2, 3, -1, -1], [-1, 4, 5, 6, 7, -1, -1]]


def test_where_single_frames_do_not_fit_whole_rows_are_dealt():
    # largest first: 3 and 3 to one device each, so do 2 and 2, and the last 2 finds 1 and 1 left
    rows = rows_of([[3, 3], [2, 2, 2]], room=6)
    division = divide(rows, stages=1, tensor=2, merge=1)
    for key in PATCH_KEYS:
        np.testing.assert_array_equal(division.patch_arrays[key][0], rows[key][:, 0])
    assert division.visual_index[:, 0].tolist() == [[-1, 0, 1, 2, 3, 4, 5], [-1, 6, 7, 8, 9, 10, 11]]


def test_whole_rows_are_dealt_by_their_patches():
    # two rounds of 6: 6 and 5, then 3 and 3, then 2 and 2 to a device each, and the last 2 finds 1 at most
    division = divide(rows_of([[5], [6], [3, 3], [2, 2, 2]], room=6), stages=1, tensor=2, merge=1)
    # those of 6 in turn, then that of 5
    assert division.patch_arrays["patches"][..., 0, 0].tolist() == [[100, 200], [300, 0]]
    assert division.patches_G.tolist() == [12, 11]


def test_a_device_without_images_has_padding_alone():
    division = divide(rows_of([[2], [], [], []], room=4), stages=2, tensor=2, merge=1)
    assert division.patches_G.tolist() == [2, 0, 0, 0]
    for key in PATCH_KEYS:
        assert (division.patch_arrays[key][:, 1:] == (1 if key == "patch_grids" else 0)).all()


def test_rows_without_images_give_nothing_to_encode():
    division = divide(rows_of([[], []], room=4), stages=1, tensor=2, merge=1)
    assert not division.patches_G.any() and not division.patch_arrays["patch_segments"].any()
    assert (division.visual_index == -1).all()


def test_the_frames_of_a_video_go_to_different_devices():
    config = tiny_config("qwen2_5_vit", encoder_changes={"window_size": 4})
    # two temporal patches of 4 x 4 patches, each of 2 x 2 windows
    encoder = config.model.encoder
    frames = [patchify(image(8, 8, seed=frame), encoder) for frame in range(2)]
    video = stack_frames(frames, time_step=1.0)
    visual = np.arange(10) < 8
    packed = row(config, Document(np.ones(10, np.int32), ~visual, visual, (video,)))
    assert set(packed["patch_windows"][16:32]) == {5, 6, 7, 8}
    rows = {key: array[None, None] for key, array in packed.items()}
    division = divide(rows, stages=2, tensor=1, merge=2)
    assert division.patches_G.tolist() == [16, 16]
    for device, frame in enumerate(frames):
        arrays = {key: array[0, device, :16] for key, array in division.patch_arrays.items()}
        np.testing.assert_array_equal(arrays["patches"], frame.patches_PC)
        assert set(arrays["patch_windows"]) == {1, 2, 3, 4}
        assert (arrays["patch_segments"] == 1).all()
    # 8 rows of the table from each device, half of them padding
    assert division.visual_index[0, 0].tolist() == [0, 1, 2, 3, 8, 9, 10, 11] + [-1] * 8


def random_rows(config, microbatches, rows_at_once, seed):
    """Rows from empty to full, of images of many sizes and videos of one size."""
    rng = np.random.default_rng(seed)
    encoder, packed = config.model.encoder, []
    for number in range(microbatches * rows_at_once):
        room, images = int(rng.integers(0, 33)), []
        while room >= 4:
            height, width = (4 * int(side) for side in rng.integers(1, 4, size=2))
            if height * width // 4 > room:
                break
            count = int(rng.integers(1, 3)) if height * width // 2 <= room else 1
            pixels = [image(height, width, seed=int(rng.integers(1 << 30))) for _ in range(count)]
            images.append(stack_frames([patchify(each, encoder) for each in pixels], time_step=1.0))
            room -= count * height * width // 4
        visual = np.arange(16) >= 16 - sum(len(each.patches_PC) for each in images) // 4
        packed.append(row(config, Document(np.full(16, 1 + number % 5, np.int32), ~visual, visual, tuple(images))))
    shape = (microbatches, rows_at_once)
    return {key: np.stack([one[key] for one in packed]).reshape(*shape, *packed[0][key].shape) for key in packed[0]}


def table(arrays_KGP, stages, tensor):
    """What the devices make of an array: the patches of visual tokens, as a table whose rows are counted as described.

    From [K, G, P, ...], devices ordered by stage and tensor rank, to [tensor, stages, K, N] rows of 4 patches.
    """
    rounds, _, patches, *rest = arrays_KGP.shape
    by_device = arrays_KGP.reshape(rounds, stages, tensor, patches // 4, 4, *rest)
    return np.moveaxis(by_device, (2, 1, 0), (0, 1, 2)).reshape(-1, 4, *rest)


@pytest.mark.parametrize("stages, tensor", [(1, 1), (1, 2), (2, 2), (3, 1), (2, 4)])
@pytest.mark.parametrize("microbatches, rows_at_once", [(1, 1), (2, 2), (3, 3)])
@pytest.mark.parametrize("seed", range(3))
def test_every_visual_token_finds_its_patches_in_the_table(stages, tensor, microbatches, rows_at_once, seed):
    config = tiny_config("qwen2_5_vit")
    rows = random_rows(config, microbatches, rows_at_once, seed)
    division = divide(rows, stages=stages, tensor=tensor, merge=2)
    rounds = -(-microbatches * rows_at_once // (stages * tensor))
    arrays = division.patch_arrays
    for key in PATCH_KEYS:
        # an encoder row has the room of a row, and the dtype
        assert arrays[key].shape == (rounds, stages * tensor, *rows[key].shape[2:])
        assert arrays[key].dtype == rows[key].dtype
    assert division.visual_index.dtype == np.int32

    is_visual = rows["visual_index"] >= 0
    np.testing.assert_array_equal(division.visual_index >= 0, is_visual)
    microbatch, row_number, _ = np.nonzero(is_visual)
    old, new = rows["visual_index"][is_visual], division.visual_index[is_visual]
    assert len(np.unique(new)) == len(new)
    for key in ("patches", "patch_positions", "patch_grids"):
        by_token = rows[key].reshape(microbatches, rows_at_once, 8, 4, *rows[key].shape[3:])
        np.testing.assert_array_equal(table(arrays[key], stages, tensor)[new], by_token[microbatch, row_number, old])

    for key in ("patch_segments", "patch_windows"):
        # what saw each other does so still, and nothing else
        before = rows[key].reshape(microbatches * rows_at_once, 8, 4)[microbatch * rows_at_once + row_number, old]
        after = table(arrays[key], stages, tensor)[new]
        pairs = {
            (row_of_batch, number, encoder_row, new_number)
            for row_of_batch, numbers, encoder_row, new_numbers in zip(
                (microbatch * rows_at_once + row_number).tolist(),
                before.tolist(),
                new // 8,
                after.tolist(),
                strict=True,
            )
            for number, new_number in zip(numbers, new_numbers, strict=True)
        }
        assert len(pairs) == len({pair[:2] for pair in pairs}) == len({pair[2:] for pair in pairs})
        # numbered from 1 in each encoder row, and nothing but the frames of the rows is there
        for numbers in arrays[key].reshape(-1, 32):
            assert sorted(set(numbers[numbers > 0])) == list(range(1, numbers.max() + 1))
        assert np.count_nonzero(arrays[key]) == np.count_nonzero(rows[key])
    padding = arrays["patch_segments"] == 0
    assert not arrays["patches"][padding].any() and (arrays["patch_grids"][padding] == 1).all()
    np.testing.assert_array_equal(division.patches_G, (~padding).sum(axis=(0, 2)))


def test_the_same_rows_are_divided_alike_and_devices_can_be_asked_for_alone():
    rows = random_rows(tiny_config("qwen2_5_vit"), 2, 3, seed=7)
    whole, again = (divide(rows, stages=2, tensor=2, merge=2) for _ in range(2))
    part = divide(rows, stages=2, tensor=2, merge=2, devices=[1, 3])
    for other, columns in ((again, slice(None)), (part, [1, 3])):
        np.testing.assert_array_equal(other.visual_index, whole.visual_index)
        np.testing.assert_array_equal(other.patches_G, whole.patches_G)
        for key in PATCH_KEYS:
            np.testing.assert_array_equal(other.patch_arrays[key], whole.patch_arrays[key][:, columns])


def test_images_of_one_document_may_lie_apart():
    # 6 and 2 visual tokens: 24 patches on one device, 8 on the other
    config = tiny_config("qwen2_5_vit")
    one = row(config, document(config, 1, (image(8, 12, seed=0), image(4, 8, seed=1)), 4))
    division = divide({key: array[None, None] for key, array in one.items()}, stages=1, tensor=2, merge=2)
    assert division.patches_G.tolist() == [24, 8]
    assert division.visual_index[0, 0, 1:9].tolist() == [0, 1, 2, 3, 4, 5, 8, 9]


@pytest.mark.parametrize("ranks, stages, tensor", [(4, 1, 2), (2, 2, 2)])
def test_the_most_loaded_device_has_at_most_a_tenth_more_than_the_mean_on_the_demo_data(ranks, stages, tensor):
    config = resolve(load_config("configs/demo_vlm.py"))
    source, rows_of_rank = DigitsSource(config, "train"), config.train.global_batch_size // ranks
    for first in range(0, 160, rows_of_rank):
        rows = [source.row(number) for number in range(first, first + rows_of_rank)]
        batch = {key: np.stack([one[key] for one in rows])[:, None] for key in rows[0]}
        arrays = divide(batch, stages=stages, tensor=tensor, merge=2).patch_arrays
        load_G = (arrays["patch_segments"] > 0).sum(axis=(0, 2))
        assert load_G.max() <= 1.1 * load_G.mean()
