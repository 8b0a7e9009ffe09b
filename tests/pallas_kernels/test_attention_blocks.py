"""Which tiles of packed rows are visited, against every pair of tokens."""

import jax
import numpy as np
import pytest

from jaxforge.ops.attention import visible_keys
from pallas_kernels.attention_blocks import TILE, packed_mask


def packed_segments(lengths, length):
    """One row of documents one after another, then padding."""
    documents = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    return np.pad(documents, (0, length - len(documents))).astype(np.int32)[None]


def tiles_of_pairs(visible_BST):
    """Whether any, and whether all, pairs of each two tiles are visible; tokens past the end see nothing.  [I, J]"""
    [visible_ST] = np.asarray(visible_BST)
    S, T = visible_ST.shape
    padded = np.pad(visible_ST, ((0, -S % TILE), (0, -T % TILE)))
    pairs = padded.reshape(-(-S // TILE), TILE, -(-T // TILE), TILE)
    return pairs.any((1, 3)), pairs.all((1, 3))


def listed_tiles(order_BIJ, counts_BI2):
    """The same as two arrays [I, J] from the lists of a mask: tiles that are visited, and those without a mask."""
    order_IJ, counts_I2 = np.asarray(order_BIJ)[0], np.asarray(counts_BI2)[0]
    visited, full = np.zeros((2, *order_IJ.shape), bool)
    for i, (num_full, num_partial) in enumerate(counts_I2):
        full[i, order_IJ[i, :num_full]] = True
        visited[i, order_IJ[i, : num_full + num_partial]] = True
    return visited, full


CASES = {
    "documents of all lengths, causal": ([100, 400, 1, 30, 256], 900, {"causal": True}),
    "documents of all lengths, both ways": ([100, 400, 1, 30, 256], 900, {"causal": False}),
    "one document": ([1024], 1024, {"causal": True}),
    "a sliding window": ([1000], 1024, {"causal": True, "window": 300}),
    "a window over documents": ([500, 500], 1024, {"causal": True, "window": 140}),
    "padding alone": ([], 300, {"causal": True}),
    "a short row": ([20, 20], 50, {"causal": False}),
}


@pytest.mark.parametrize("case", CASES)
def test_sorted_segments_are_visited_in_exactly_the_tiles_that_have_a_visible_pair(case):
    lengths, length, rule = CASES[case]
    segments = packed_segments(lengths, length)
    mask = jax.jit(lambda segments: packed_mask(segments, segments, **rule))(segments)
    some_IJ, all_IJ = tiles_of_pairs(visible_keys(segments, segments, **rule))
    for order, counts, transposed in (
        (mask.k_order_BIJ, mask.k_counts_BI2, False),
        (mask.q_order_BJI, mask.q_counts_BJ2, True),
    ):
        visited, full = listed_tiles(order, counts)
        assert np.array_equal(visited, some_IJ.T if transposed else some_IJ)
        assert np.array_equal(full, all_IJ.T if transposed else all_IJ)


def test_no_visible_pair_is_left_out_whatever_the_order_of_segments_and_positions():
    rng = np.random.default_rng(0)
    for causal, window in ((True, None), (True, 100), (False, None)):
        q_segments, k_segments = (rng.integers(0, 4, (1, n)).astype(np.int32) for n in (400, 650))
        # what a tile hasn't: some segments and positions
        k_segments[:, 128:256] = rng.integers(2, 4, 128)
        rule = {"causal": causal, "window": window}
        if causal:
            rule |= {"q_positions_BS": rng.permutation(400)[None], "k_positions_BT": rng.permutation(650)[None]}
        mask = packed_mask(q_segments, k_segments, **rule)
        some_IJ, all_IJ = tiles_of_pairs(visible_keys(q_segments, k_segments, **rule))
        visited, full = listed_tiles(mask.k_order_BIJ, mask.k_counts_BI2)
        assert np.all(visited[some_IJ])
        assert np.all(all_IJ[full])


def test_windows_of_an_image_are_visited_in_their_own_strip():
    # 64 x 64 patches in rows of 2 x 2 squares, which are 128 patches: a tile.  A window is 8 patches a side, so 4 tiles
    # make a strip of 8 windows, which see nothing of other strips.
    square_row, square_column = np.divmod(np.repeat(np.arange(32 * 32), 4), 32)
    windows = (square_row // 4 * 8 + square_column // 4 + 1)[None].astype(np.int32)
    mask = packed_mask(windows, windows, causal=False)
    visited, full = listed_tiles(mask.k_order_BIJ, mask.k_counts_BI2)
    assert np.array_equal(visited, np.kron(np.eye(8, dtype=bool), np.ones((4, 4), bool)))
    assert not full.any()


def test_keys_of_another_rank_are_visited_by_their_positions():
    # zigzag: the first of two ranks has quarters 0 and 3 of a row, the second 1 and 2
    quarters = np.arange(1024).reshape(4, 256)
    mine, other = (np.concatenate(quarters[list(pair)])[None] for pair in ((0, 3), (1, 2)))
    ones = np.ones((1, 512), np.int32)
    mask = packed_mask(ones, ones, causal=True, q_positions_BS=mine, k_positions_BT=other)
    # quarter 0 sees nothing of 1 and 2, quarter 3 all of them
    assert np.asarray(mask.k_counts_BI2)[0].tolist() == [[0, 0], [0, 0], [4, 0], [4, 0]]
    assert np.asarray(mask.q_counts_BJ2)[0].tolist() == [[2, 0]] * 4


@pytest.mark.parametrize("more", [{"window": 3}, {"q_positions_BS": np.zeros((1, 4), np.int32)}])
def test_a_window_or_positions_without_an_order_are_refused(more):
    ones = np.ones((1, 4), np.int32)
    with pytest.raises(ValueError, match="causal=True"):
        packed_mask(ones, ones, causal=False, **more)
