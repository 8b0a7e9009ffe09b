"""The synthetic source: full rows of the right shape, for any model."""

import numpy as np
import pytest
from data_configs import text_config, vision_config

from jaxforge.data.packing import IGNORE
from jaxforge.data.synthetic import SyntheticSource


@pytest.mark.parametrize("config", [text_config(), vision_config("synthetic")], ids=["text", "vision"])
def test_rows_are_full_and_hold_two_or_three_documents(config):
    rows = [SyntheticSource(config).row(index) for index in range(30)]
    assert all((row["segment_ids"] > 0).all() for row in rows)
    assert {int(row["segment_ids"].max()) for row in rows} == {2, 3}


def test_the_same_row_twice_is_the_same_and_others_differ():
    one, other = SyntheticSource(vision_config("synthetic")), SyntheticSource(vision_config("synthetic"))
    for key, array in one.row(5).items():
        np.testing.assert_array_equal(array, other.row(5)[key], err_msg=key)
    assert (one.row(5)["tokens"] != one.row(6)["tokens"]).any()
    reseeded = SyntheticSource(vision_config("synthetic", train={"seed": 1}))
    assert (one.row(5)["tokens"] != reseeded.row(5)["tokens"]).any()


def test_tokens_fill_the_vocabulary():
    config = vision_config("synthetic", decoder={"vocab_size": 50})
    tokens = np.concatenate([SyntheticSource(config).row(index)["tokens"] for index in range(30)])
    assert set(tokens.tolist()) == set(range(50))


def test_every_text_token_after_a_documents_first_is_a_target():
    row = SyntheticSource(text_config()).row(0)
    starts = np.flatnonzero(np.diff(row["segment_ids"], prepend=0))
    expected = np.append(row["tokens"][1:], 0)
    expected[np.append(starts[1:], len(expected)) - 1] = IGNORE
    assert row["targets"].tolist() == expected.tolist()


def test_images_vary_and_use_most_of_the_patches():
    rows = [SyntheticSource(vision_config("synthetic")).row(index) for index in range(30)]
    assert len({tuple(grid) for row in rows for grid in row["patch_grids"].tolist()}) > 10
    assert np.mean([(row["patch_segments"] > 0).mean() for row in rows]) > 0.8


def test_no_image_is_larger_than_image_size_and_several_fill_the_row():
    # 64 x 64 pixels are 64 patches of 8; a row of 256 patches needs several such images
    rows = [
        SyntheticSource(vision_config("synthetic", encoder={"image_size": (64, 64)})).row(index) for index in range(20)
    ]
    assert max(np.bincount(row["patch_segments"])[1:].max() for row in rows) == 64
    assert min(row["patch_segments"].max() for row in rows) >= 4


def test_a_quarter_of_the_row_stays_text_when_patches_abound():
    rows = SyntheticSource(vision_config("synthetic", data={"max_patches_per_row": 4096}))
    for index in range(10):
        assert (rows.row(index)["visual_index"] == -1).mean() >= 0.25


def test_the_shortest_rows_work():
    # of 2 tokens: a document each has nothing to predict, so it is one
    assert SyntheticSource(text_config(seq_length=2)).row(0)["segment_ids"].tolist() == [1, 1]
    assert SyntheticSource(text_config(seq_length=4)).row(0)["segment_ids"].max() == 2
