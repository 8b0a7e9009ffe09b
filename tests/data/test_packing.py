"""Rows packed of documents: nothing crosses a boundary, nothing is cut."""

import numpy as np
import pytest

from jaxforge.config.errors import ConfigError
from jaxforge.config.schema import EncoderConfig
from jaxforge.data.packing import IGNORE, Document, pack_row
from jaxforge.data.patches import patchify, stack_frames
from jaxforge.data.rows import RowFormat

ENCODER = EncoderConfig(patch_size=1, spatial_merge_size=2, temporal_patch_size=1, in_channels=1, window_size=2)


def text_rows(seq_length):
    return RowFormat(seq_length)


def vision_rows(seq_length, max_patches, mrope=True):
    return RowFormat(seq_length, max_patches, merge=2, channels=1, mrope=mrope)


def image(height, width, value=0.0):
    return patchify(np.full((height, width, 1), value, np.float32), ENCODER)


def video(values, height, width, time_step):
    return stack_frames([image(height, width, value) for value in values], time_step)


def document(tokens, visual, images):
    """A document in which every token may be a target."""
    return Document(np.array(tokens, np.int32), np.ones(len(tokens), bool), np.array(visual, bool), tuple(images))


def test_a_document_boundary_ends_the_loss():
    # F28
    row = pack_row([Document.text([5, 6, 7]), Document.text([8, 9, 4])], text_rows(6))
    assert row["targets"].tolist() == [6, 7, IGNORE, 9, 4, IGNORE]


def test_boundaries_come_from_segments_not_from_an_end_token():
    # F28: token 4 ends nothing, though it stands in the middle of both documents
    row = pack_row([Document.text([5, 4, 7]), Document.text([4, 4])], text_rows(5))
    assert row["targets"].tolist() == [4, 7, IGNORE, 4, IGNORE]
    assert row["segment_ids"].tolist() == [1, 1, 1, 2, 2]


def test_labels_are_shifted_once_and_cover_the_answer_and_its_end():
    # F43, F44: question 11 12 13, answer 21 22, end 4.  The position before a token predicts it.
    mask = [False, False, False, True, True, True]
    row = pack_row([Document.text([11, 12, 13, 21, 22, 4], mask)], text_rows(8))
    assert row["targets"].tolist() == [IGNORE, IGNORE, 21, 22, 4, IGNORE, IGNORE, IGNORE]


def test_positions_restart_in_each_document():
    row = pack_row([Document.text([5, 6, 7]), Document.text([8, 9])], text_rows(6))
    assert row["positions"].tolist() == [[0, 1, 2, 0, 1, 0]] * 3
    assert row["segment_ids"].tolist() == [1, 1, 1, 2, 2, 0]
    assert row["tokens"].tolist() == [5, 6, 7, 8, 9, 0]


def test_a_language_model_has_no_vision_arrays():
    assert set(pack_row([Document.text([1])], text_rows(2))) == {"tokens", "targets", "segment_ids", "positions"}


def test_images_follow_each_other_along_the_patch_axis():
    first = document([1, 3, 3, 5], [0, 1, 1, 0], [image(2, 4, 0.25)])
    second = document([3, 6], [1, 0], [image(2, 2, 0.5)])
    row = pack_row([first, second], vision_rows(8, 16))
    assert row["visual_index"].tolist() == [-1, 0, 1, -1, 2, -1, -1, -1]
    assert row["patches"][:, 0].tolist() == [0.25] * 8 + [0.5] * 4 + [0.0] * 4
    assert row["patch_segments"].tolist() == [1] * 8 + [2] * 4 + [0] * 4
    # windows of one square: two in the first image, so the second image's is the third of the row
    assert row["patch_windows"].tolist() == [1] * 4 + [2] * 4 + [3] * 4 + [0] * 4
    assert row["patch_grids"].tolist() == [[2, 4]] * 8 + [[2, 2]] * 4 + [[1, 1]] * 4
    square = [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert row["patch_positions"].tolist() == square + [[0, 2], [0, 3], [1, 2], [1, 3]] + square + [[0, 0]] * 4


def test_frames_of_a_video_never_see_each_other():
    # F34: each frame is a segment of its own, for the layers that attend over all of it, and has windows of its own
    clip = document([3] * 4 + [5], [1] * 4 + [0], [video([0.25, 0.5], 2, 4, time_step=2.0)])
    row = pack_row([clip, document([3, 6], [1, 0], [image(2, 2, 0.75)])], vision_rows(8, 24))
    assert row["patches"][:, 0].tolist() == [0.25] * 8 + [0.5] * 8 + [0.75] * 4 + [0.0] * 4
    assert row["patch_segments"].tolist() == [1] * 8 + [2] * 8 + [3] * 4 + [0] * 4
    assert row["patch_windows"].tolist() == [1] * 4 + [2] * 4 + [3] * 4 + [4] * 4 + [5] * 4 + [0] * 4
    assert row["patch_grids"].tolist() == [[2, 4]] * 16 + [[2, 2]] * 4 + [[1, 1]] * 4
    square = [[0, 0], [0, 1], [1, 0], [1, 1]]
    frame = square + [[0, 2], [0, 3], [1, 2], [1, 3]]
    assert row["patch_positions"].tolist() == frame + frame + square + [[0, 0]] * 4
    assert row["visual_index"].tolist() == [0, 1, 2, 3, -1, 4, -1, -1]


def test_time_advances_in_a_video_and_the_next_document_restarts():
    # F32, F30: frames of one token, 2 positions apart
    clip = document([1, 3, 3, 3, 5], [0, 1, 1, 1, 0], [video([0, 0, 0], 2, 2, time_step=2.0)])
    row = pack_row([clip, document([3, 6], [1, 0], [image(2, 2)])], vision_rows(8, 16))
    assert row["positions"][0].tolist() == [0, 1, 3, 5, 6, 0, 1, 0]
    assert row["positions"][1:].tolist() == [[0, 1, 1, 1, 6, 0, 1, 0]] * 2


def test_a_visual_token_is_never_a_target():
    row = pack_row([document([1, 3, 3, 5], [0, 1, 1, 0], [image(2, 4)])], vision_rows(4, 8))
    assert row["targets"].tolist() == [IGNORE, IGNORE, 5, IGNORE]


def test_a_second_document_with_an_image_restarts_at_0():
    # F30
    asked = document([1, 1, 1, 3, 3, 3, 3, 1, 1], [0] * 3 + [1] * 4 + [0] * 2, [image(4, 4)])
    row = pack_row([asked, document([3, 1], [1, 0], [image(2, 2)])], vision_rows(12, 20))
    assert row["positions"].tolist() == [
        [0, 1, 2, 3, 3, 3, 3, 5, 6, 0, 1, 0],
        [0, 1, 2, 3, 3, 4, 4, 5, 6, 0, 1, 0],
        [0, 1, 2, 3, 4, 3, 4, 5, 6, 0, 1, 0],
    ]


def test_without_mrope_positions_count_visual_tokens_like_any_other():
    row = pack_row([document([1, 3, 3, 5], [0, 1, 1, 0], [image(2, 4)])], vision_rows(4, 8, mrope=False))
    assert row["positions"].tolist() == [[0, 1, 2, 3]] * 3


def test_an_empty_row_is_all_padding():
    row = pack_row([], vision_rows(4, 8))
    assert not row["segment_ids"].any() and not row["patch_segments"].any()
    assert (row["targets"] == IGNORE).all() and (row["visual_index"] == -1).all() and (row["patch_grids"] == 1).all()


def test_a_document_longer_than_the_row_is_refused_whole():
    # F39
    with pytest.raises(ConfigError, match=r"a document of 4 tokens .* train.seq_length=3.*no image is ever cut"):
        pack_row([document([3, 3, 5, 6], [1, 1, 0, 0], [image(2, 4)])], vision_rows(3, 8))


def test_an_image_larger_than_the_row_is_refused_whole():
    # F39
    with pytest.raises(ConfigError, match=r"of 8 image patches .* data.max_patches_per_row=4.*no image is ever cut"):
        pack_row([document([3, 3, 5], [1, 1, 0], [image(2, 4)])], vision_rows(8, 4))


def test_a_video_is_never_cut_between_its_frames():
    # F39: one of its two frames would fit
    clip = document([3] * 4 + [5], [1] * 4 + [0], [video([0, 0], 2, 4, time_step=1.0)])
    with pytest.raises(ConfigError, match=r"of 16 image patches .* data.max_patches_per_row=8.*no image is ever cut"):
        pack_row([clip], vision_rows(8, 8))


def test_a_video_must_not_be_split_by_text():
    with pytest.raises(ValueError, match="consecutive visual tokens"):
        pack_row([document([3, 5, 3], [1, 0, 1], [video([0, 0], 2, 2, time_step=1.0)])], vision_rows(8, 16))


@pytest.mark.parametrize("mrope", [True, False])
@pytest.mark.parametrize("visual", [[1, 0, 0], [1, 1, 1]])
def test_visual_tokens_must_match_the_images(mrope, visual):
    with pytest.raises(ValueError, match="visual tokens"):
        pack_row([document([3, 3, 3], visual, [image(2, 4)])], vision_rows(8, 16, mrope))


def test_an_image_must_not_be_split_by_text():
    with pytest.raises(ValueError, match="consecutive visual tokens"):
        pack_row([document([3, 5, 3], [1, 0, 1], [image(2, 4)])], vision_rows(8, 16))


def test_arrays_of_a_document_must_have_one_length():
    with pytest.raises(ValueError, match="3 tokens, 2 entries in loss_mask"):
        Document.text([1, 2, 3], [True, False])
