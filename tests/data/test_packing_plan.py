"""The plan of an epoch: nothing lost, nothing too full, little left empty."""

import time

import numpy as np
import pytest

from jaxforge.data.packing_plan import document_order, plan_rows
from jaxforge.data.rows import RowFormat

SEQ_LENGTH = 1024


def lognormal_tokens(count, seed=0):
    """Lengths of mean near SEQ_LENGTH / 6, their logarithms of deviation 1, as conversations have; none above a row."""
    rng = np.random.default_rng(seed)
    return np.clip(rng.lognormal(np.log(SEQ_LENGTH / 6) - 0.5, 1.0, count), 8, SEQ_LENGTH).astype(np.int64)


def vision_sizes(count, seed=0):
    """Tokens and patches of conversations, two thirds of which have one to three images."""
    rng = np.random.default_rng(seed)
    squares = np.where(rng.random(count) < 2 / 3, rng.integers(1, 4, count) * rng.integers(16, 100, count), 0)
    return squares + rng.integers(10, 200, count), 4 * squares


def plan(tokens_N, patches_N=None, *, patches=0, window=2000, seed=0):
    patches_N = np.zeros_like(tokens_N) if patches_N is None else patches_N
    order = document_order([len(tokens_N)], (), seed, 0)
    row_format = RowFormat(SEQ_LENGTH, patches, merge=2, channels=1)
    return plan_rows(order, tokens_N, patches_N, row_format, window, np.random.default_rng(seed))


def test_each_document_lies_in_exactly_one_row_and_no_row_is_too_full():
    tokens_N, patches_N = vision_sizes(5000)
    found = plan(tokens_N, patches_N, patches=2048)
    assert sorted(found.documents.tolist()) == list(range(5000))
    for row in range(len(found)):
        assert tokens_N[found.row(row)].sum() <= SEQ_LENGTH and patches_N[found.row(row)].sum() <= 2048
        assert len(found.row(row))


def test_rows_of_a_realistic_distribution_are_full():
    tokens_N = lognormal_tokens(20_000)
    assert 0.13 < tokens_N.mean() / SEQ_LENGTH < 0.19  # a sixth, less what the longest lost
    found = plan(tokens_N)
    assert found.fill(tokens_N, SEQ_LENGTH) >= 0.97
    assert found.fill(tokens_N, SEQ_LENGTH) == tokens_N.sum() / (len(found) * SEQ_LENGTH)


def test_rows_of_documents_of_similar_length_are_full_too():
    # seven of the mean fill a row; best-fit decreasing starts with six of the largest, and leaves the room of half one
    tokens_N = np.random.default_rng(0).normal(SEQ_LENGTH / 7, SEQ_LENGTH / 70, 20_000).astype(np.int64)
    assert plan(tokens_N).fill(tokens_N, SEQ_LENGTH) >= 0.97


def test_rows_with_images_are_full_too():
    tokens_N, patches_N = vision_sizes(20_000)
    # patches are the scarcer room by a little: the rows can't be fewer than they need
    found = plan(tokens_N, patches_N, patches=2048)
    needed = max(tokens_N.sum() / SEQ_LENGTH, patches_N.sum() / 2048)
    assert len(found) <= needed / 0.97
    # tokens are
    found = plan(tokens_N, patches_N, patches=4096)
    assert found.fill(tokens_N, SEQ_LENGTH) >= 0.97


def test_half_rows_pair_up_across_windows():
    # a window of 5 halves leaves one over, which the next takes
    assert len(plan(np.full(20, SEQ_LENGTH // 2), window=5)) == 10


def test_documents_that_never_pair_up_still_end():
    found = plan(np.full(5000, SEQ_LENGTH * 6 // 10), window=100)
    assert len(found) == 5000


def test_a_row_that_is_full_of_patches_takes_text():
    # the images can't share a row, and each of the long texts goes with one of them
    found = plan(np.array([SEQ_LENGTH - 20, SEQ_LENGTH - 20, 20, 20]), np.array([0, 0, 64, 64]), patches=64)
    assert len(found) == 2


@pytest.mark.parametrize(("tokens", "patches"), [(SEQ_LENGTH + 1, 0), (5, 65)])
def test_a_document_that_fits_no_row_is_refused(tokens, patches):
    with pytest.raises(ValueError, match=f"document 1 has {tokens} tokens and {patches} patches"):
        plan(np.array([5, tokens]), np.array([0, patches]), patches=64)


def test_the_same_documents_give_the_same_plan():
    tokens_N, patches_N = vision_sizes(3000)
    one, two, other = (plan(tokens_N, patches_N, patches=2048, seed=seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(one.documents, two.documents)
    np.testing.assert_array_equal(one.row_starts, two.row_starts)
    assert one.documents.tolist() != other.documents.tolist()


def test_rows_come_in_random_order_not_the_longest_document_first():
    tokens_N = lognormal_tokens(5000)
    found = plan(tokens_N, window=5000)
    longest = np.array([tokens_N[found.row(row)].max() for row in range(len(found))])
    first, last = longest[: len(longest) // 2].mean(), longest[len(longest) // 2 :].mean()
    assert 0.9 < first / last < 1.1  # sorted, the first half would be about twice the second


@pytest.mark.parametrize("epoch", [0, 1])
def test_without_weights_an_epoch_has_each_document_once(epoch):
    # F59
    order = document_order([30, 70], (), 0, epoch)
    assert sorted(order.tolist()) == list(range(100))


def test_each_epoch_and_seed_has_an_order_of_its_own():
    # F59
    orders = [tuple(document_order([100], (), seed, epoch).tolist()) for seed, epoch in [(0, 0), (0, 1), (1, 0)]]
    assert len(set(orders)) == 3


def test_weights_are_shares_and_leave_nothing_out():
    # shares 1/2, 1/4, 1/4 of 40, 40 and 5 documents.  The second is the largest for its share: 160 in all.
    order = document_order([40, 40, 5], (2.0, 1.0, 1.0), 0, 0)
    times = np.bincount(order, minlength=85)
    assert len(order) == 160
    assert times[:40].tolist() == [2] * 40 and times[40:80].tolist() == [1] * 40 and times[80:].tolist() == [8] * 5


def test_a_part_of_a_pass_is_drawn_at_random():
    # 10 and 4 documents in equal shares: 10 of the second, two passes and two more
    times = [np.bincount(document_order([10, 4], (1.0, 1.0), 0, epoch), minlength=14)[10:] for epoch in range(8)]
    assert all(sorted(counts.tolist()) == [2, 2, 3, 3] for counts in times)
    assert len({tuple(counts.tolist()) for counts in times}) > 1


def test_a_mixture_is_even_from_beginning_to_end_and_passes_follow_each_other():
    order = document_order([900, 100], (3.0, 1.0), 0, 0)
    for part in np.split(order, 4):
        # of 300, a share of a quarter: places are drawn within 1/300 of the epoch, so a part gains or loses few
        assert abs((part >= 900).sum() - 75) <= 2
    second = order[order >= 900]
    assert [sorted(third.tolist()) for third in np.split(second, 3)] == [list(range(900, 1000))] * 3


def test_a_hundred_thousand_documents_take_seconds():
    tokens_N, patches_N = vision_sizes(100_000)
    start = time.perf_counter()
    plan(tokens_N, patches_N, patches=4096, window=20_000)
    assert time.perf_counter() - start < 10  # about half a second on an idle core
