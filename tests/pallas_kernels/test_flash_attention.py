"""The flash attention kernels, interpreted on the CPU, against the definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxforge.ops.attention import reference_attention, visible_keys
from pallas_kernels.attention_blocks import packed_mask
from pallas_kernels.flash_attention import MASKED, flash_attention, flash_attention_gradients, output_delta

# fp32 sums of some hundred products of order 1, in another order
FP32 = {"rtol": 1e-5, "atol": 1e-5}


def row(*lengths):
    """One document after another; a negative length is padding."""
    numbers = [0 if length < 0 else i + 1 for i, length in enumerate(lengths)]
    return np.repeat(numbers, np.abs(lengths)).astype(np.int32)


def random_arrays(*shapes, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def random_qkv(segments, heads, groups, width, value_width, seed=0):
    """q, k, v, and cotangents of the output and of the log-sum-exp."""
    B, S = segments.shape
    return random_arrays(
        (B, S, heads, width), (B, S, groups, width), (B, S, groups, value_width),
        (B, S, heads, value_width), (B, heads, S), seed=seed,
    )  # fmt: skip


def with_gradients(attend):
    """(q, k, v, dout, dlse) -> (out, lse, dq, dk, dv)"""

    def f(q, k, v, dout, dlse):
        results, pull = jax.vjp(attend, q, k, v)
        return *results, *pull((dout.astype(results[0].dtype), dlse))

    return jax.jit(f)


def flash(segments, **rule):
    return with_gradients(lambda q, k, v: flash_attention(q, k, v, packed_mask(segments, segments, **rule)))


def definition(segments, **rule):
    visible_BST = visible_keys(segments, segments, **rule)
    return with_gradients(lambda q, k, v: reference_attention(q, k, v, visible_BST))


# Each width, and each of: causal, both ways, a sliding window; one, two and three queries of a key; rows that are and
# that aren't whole tiles of 128; a document over several tiles, in one, of one token; padding at the end and inside.
TWO_ROWS = np.stack([row(50, 170, -20, 1, -15), row(256)])
UNEVEN = np.stack([row(3, 200, 40, -57), row(140, -20, 140)])
CASES = {
    "64": ((64, 64), (4, 2), TWO_ROWS, {"causal": True}),
    "72, both ways": ((72, 72), (2, 2), UNEVEN, {"causal": False}),
    "80, in windows": ((80, 80), (2, 2), UNEVEN, {"causal": True, "window": 77}),
    "96": ((96, 96), (3, 1), UNEVEN, {"causal": True}),
    "128, both ways": ((128, 128), (4, 2), TWO_ROWS, {"causal": False}),
    "192 and 128": ((192, 128), (2, 2), UNEVEN, {"causal": True}),
    "8": ((8, 8), (2, 1), np.stack([row(5, -1, 4)]), {"causal": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_output_log_sum_exp_and_gradients_are_those_of_the_definition(case):
    (width, value_width), (heads, groups), segments, rule = CASES[case]
    arrays = random_qkv(segments, heads, groups, width, value_width)
    got = flash(segments, **rule)(*arrays)
    expected = definition(segments, **rule)(*arrays)
    for name, one, other in zip(("out", "lse", "dq", "dk", "dv"), got, expected, strict=True):
        np.testing.assert_allclose(one, other, **FP32, err_msg=name)


def test_half_precision_is_as_near_as_its_roundings():
    segments = TWO_ROWS
    arrays = [x.astype(jnp.bfloat16) for x in random_qkv(segments, 4, 2, 80, 80)[:4]]
    dlse = random_arrays((2, 4, 256))[0]
    got = flash(segments, causal=True)(*arrays, dlse)
    exact = definition(segments, causal=True)(*(x.astype(jnp.float32) for x in arrays), dlse)
    assert [x.dtype for x in got] == [jnp.bfloat16, jnp.float32] + 3 * [jnp.bfloat16]
    for one, other in zip(got, exact, strict=True):
        one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
        seen = other > MASKED
        # weights, their gradients and results are rounded to 8 bits, each by 2^-9 at most and by a third of it on
        # average, and the errors are independent
        assert np.linalg.norm((one - other)[seen]) < 2**-8 * np.linalg.norm(other[seen])
    # scores are products of bf16 summed in fp32, so here nothing is rounded to 8 bits
    np.testing.assert_allclose(got[1], exact[1], **FP32)


def test_a_query_that_sees_nothing_gives_zero_and_no_gradient():
    # a row of padding, and one whose second half is
    segments = np.stack([row(-200), row(100, -100)])
    out, lse, *gradients = flash(segments, causal=True)(*random_qkv(segments, 2, 1, 64, 64))
    padding = segments == 0
    assert not np.any(np.asarray(out)[padding])
    assert np.all(np.asarray(lse).swapaxes(1, 2)[padding] == np.float32(MASKED))
    for gradient in gradients:
        assert np.all(np.isfinite(gradient))
        assert not np.any(np.asarray(gradient)[padding])
        assert np.any(np.asarray(gradient)[~padding])


@pytest.mark.parametrize("causal", [True, False])
def test_a_document_does_not_change_its_neighbours_by_one_bit(causal):  # F23
    segments = row(60, 100, 70, -26)[None]
    arrays = random_qkv(segments, 2, 1, 64, 64)
    changed = [x.copy() for x in arrays]
    for x in changed[:3]:
        x[segments == 2] *= -3
    attend = flash(segments, causal=causal)
    before, after = ([np.asarray(x) for x in attend(*inputs)] for inputs in (arrays, changed))
    before[1], after[1] = before[1].swapaxes(1, 2), after[1].swapaxes(1, 2)
    for one, other in zip(before, after, strict=True):
        assert np.array_equal(one[segments != 2], other[segments != 2])
        assert not np.array_equal(one[segments == 2], other[segments == 2])


def test_what_is_not_a_number_stays_so_and_tiles_without_a_visible_pair_are_not_read():
    # documents of whole tiles: if they were read, what isn't a number would spread through 0 * nan
    segments = row(128, 256, 128)[None]
    arrays = random_qkv(segments, 2, 1, 64, 64)
    broken = [np.where((segments == 2)[..., None, None], np.nan, x).astype(np.float32) for x in arrays[:4]]
    attend = flash(segments, causal=True)
    before, after = ([np.asarray(x) for x in attend(*inputs, arrays[4])] for inputs in (arrays[:4], broken))
    before[1], after[1] = before[1].swapaxes(1, 2), after[1].swapaxes(1, 2)
    for one, other in zip(before, after, strict=True):
        assert np.array_equal(one[segments != 2], other[segments != 2])
        assert np.all(np.isnan(other[segments == 2]))


def test_parts_of_the_keys_add_up_to_all_of_them():
    # Ring attention on two ranks in zigzag order, with a document that ends inside of a quarter: what one of them
    # computes from the keys of each in turn.
    quarters = np.arange(200).reshape(4, 50)
    mine, other = (np.concatenate(quarters[list(pair)]) for pair in ((0, 3), (1, 2)))
    segments = row(70, 130)[None]
    q, k, v, dout, _ = random_qkv(segments, 4, 2, 64, 64)
    expected = definition(segments, causal=True)(q, k, v, dout, np.zeros((1, 4, 200), np.float32))

    def of_part(keys):
        return packed_mask(
            segments[:, mine], segments[:, keys], causal=True, q_positions_BS=mine[None], k_positions_BT=keys[None]
        )

    parts = [(q[:, mine], k[:, keys], v[:, keys], of_part(keys)) for keys in (mine, other)]
    attend, gradients_of = jax.jit(flash_attention), jax.jit(flash_attention_gradients)
    outs, lses = zip(*(attend(*part) for part in parts), strict=True)
    lse = jnp.logaddexp(*lses)
    out = sum(one * jnp.exp(part - lse).swapaxes(1, 2)[..., None] for one, part in zip(outs, lses, strict=True))
    np.testing.assert_allclose(out, expected[0][:, mine], **FP32)
    np.testing.assert_allclose(lse, expected[1][..., mine], **FP32)

    dout, delta = dout[:, mine], output_delta(out, dout[:, mine])
    gradients = [gradients_of(*part, lse, dout, delta) for part in parts]
    np.testing.assert_allclose(sum(dq for dq, _, _ in gradients), expected[2][:, mine], **FP32)
    # the other rank's queries contribute to dk and dv as well; here only those of this rank have a gradient
    only_mine = np.zeros_like(expected[0])
    only_mine[:, mine] = dout
    *_, dk, dv = definition(segments, causal=True)(q, k, v, only_mine, np.zeros((1, 4, 200), np.float32))
    for (_, dk_part, dv_part), keys in zip(gradients, (mine, other), strict=True):
        np.testing.assert_allclose(dk_part, dk[:, keys], **FP32)
        np.testing.assert_allclose(dv_part, dv[:, keys], **FP32)


def test_a_scale_of_its_own():
    segments = row(30, 40)[None]
    q, k, v, *_ = random_qkv(segments, 2, 2, 16, 16)
    mask = packed_mask(segments, segments, causal=True)
    scaled = flash_attention(q, k, v, mask, scale=0.1)
    # 1 / sqrt(16) is the default
    for one, other in zip(scaled, flash_attention(q * np.float32(0.4), k, v, mask), strict=True):
        np.testing.assert_allclose(one, other, **FP32)


@pytest.mark.parametrize(
    "shapes, message",
    [
        (((1, 10, 3, 64), (1, 10, 2, 64), (1, 10, 2, 64)), "don't belong together"),
        (((1, 10, 2, 64), (1, 10, 2, 32), (1, 10, 2, 64)), "don't belong together"),
        (((1, 10, 2, 64), (1, 12, 2, 64), (1, 12, 2, 64)), "the mask is for queries and keys"),
        (((1, 10, 2, 256), (1, 10, 2, 256), (1, 10, 2, 256)), "at most 320 in float32"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(shapes, message):
    segments = row(10)[None]
    with pytest.raises(ValueError, match=message):
        flash_attention(*random_arrays(*shapes), packed_mask(segments, segments, causal=True))
