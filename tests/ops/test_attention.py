"""Attention within segments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tensor_group import on_tensor_group

from jaxforge.ops.attention import attention, reference_attention, row_segments, visible_keys
from jaxforge.ops.placement import SINGLE_DEVICE
from jaxforge.parallel.encoder import encoder_placement
from jaxforge.parallel.rules import decoder_placement
from pallas_kernels.attention_blocks import packed_mask
from pallas_kernels.flash_attention import MASKED

# three documents of which one is a single token, and padding at the end
SEGMENTS = np.array([[1, 1, 1, 1, 2, 3, 3, 3, 0, 0], [1, 1, 2, 2, 2, 2, 2, 2, 2, 2]], np.int32)


def random_qkv(heads=4, groups=2, width=8, seed=0):
    rng = np.random.default_rng(seed)
    shape = SEGMENTS.shape
    return [rng.normal(size=(*shape, n, width)).astype(np.float32) for n in (heads, groups, groups)]


def attend(q, k, v, *, causal, backend="xla", segments=SEGMENTS, placement=SINGLE_DEVICE, mask=None):
    segments = row_segments(segments, causal=causal, backend=backend) if mask is None else mask
    return attention(q, k, v, segments, causal=causal, backend=backend, placement=placement)


def loop_attention(q, k, v, segments, causal, window=None):
    """One token and one head at a time, in float64: the output, and the log-sum-exp of the scores."""
    batch, length, heads, width = q.shape
    out, lse = np.zeros((*q.shape[:3], v.shape[-1])), np.full((batch, heads, length), MASKED)
    for b, s, h in np.ndindex(batch, length, heads):
        group = h * k.shape[2] // heads
        visible = [t for t in range(length) if segments[b, t] == segments[b, s] > 0 and (t <= s or not causal)]
        if window is not None:
            visible = [t for t in visible if s - t <= window]
        if visible:
            scores = [q[b, s, h].astype(float) @ k[b, t, group] / np.sqrt(width) for t in visible]
            weights = np.exp(scores - np.max(scores))
            out[b, s, h] = weights / weights.sum() @ v[b, visible, group]
            lse[b, h, s] = np.max(scores) + np.log(weights.sum())
    return out, lse


# cuDNN runs on GPUs alone; more of flash attention is tested with its kernels
every_backend = pytest.mark.parametrize("backend", ["xla", "flash"])


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("backend, heads, groups", [("xla", 4, 4), ("xla", 4, 2), ("xla", 6, 1), ("flash", 6, 2)])
def test_a_token_sees_its_segment_alone(backend, heads, groups, causal):
    q, k, v = random_qkv(heads, groups)
    expected, _ = loop_attention(q, k, v, SEGMENTS, causal)
    np.testing.assert_allclose(attend(q, k, v, causal=causal, backend=backend), expected, atol=2e-6)


@pytest.mark.parametrize("window", [0, 2, None])
def test_the_reference_knows_windows_and_values_of_another_width_and_gives_the_log_sum_exp(window):
    q, k, _ = random_qkv()
    _, _, v = random_qkv(width=5)
    visible = visible_keys(SEGMENTS, SEGMENTS, causal=True, window=window)
    out, lse = reference_attention(q, k, v, visible)
    expected_out, expected_lse = loop_attention(q, k, v, SEGMENTS, causal=True, window=window)
    np.testing.assert_allclose(out, expected_out, atol=2e-6)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-6, atol=2e-6)


def test_what_is_visible_goes_by_positions_wherever_tokens_are():
    whole = visible_keys(SEGMENTS, SEGMENTS, causal=True, window=3)
    order = np.array([8, 9, 0, 1, 4, 5])
    positions = np.broadcast_to(order, (2, 6))
    part = visible_keys(
        SEGMENTS[:, order], SEGMENTS, causal=True, window=3, q_positions_BS=positions,
        k_positions_BT=np.broadcast_to(np.arange(10), (2, 10)),
    )  # fmt: skip
    assert np.array_equal(part, whole[:, order])


def test_a_mask_made_once_gives_what_flash_attention_gives_without():
    q, k, v = random_qkv()
    mask = packed_mask(SEGMENTS, SEGMENTS, causal=True)
    with_mask = attend(q, k, v, causal=True, backend="flash", mask=mask)
    assert np.array_equal(with_mask, attend(q, k, v, causal=True, backend="flash"))


@every_backend
def test_padding_gives_zero_and_gets_no_gradient(backend):
    q, k, v = random_qkv()
    padding = SEGMENTS == 0
    out = attend(q, k, v, causal=True, backend=backend)
    gradients = jax.grad(lambda *qkv: jnp.sum(jnp.sin(attend(*qkv, causal=True, backend=backend))), argnums=(0, 1, 2))(
        q, k, v
    )
    assert not np.any(np.asarray(out)[padding])
    for gradient in gradients:
        assert np.all(np.isfinite(gradient))
        assert not np.any(np.asarray(gradient)[padding])
        assert np.any(np.asarray(gradient)[~padding])


def test_a_row_of_padding_alone_is_finite():
    q, k, v = random_qkv()
    nothing = np.zeros_like(SEGMENTS)
    value, gradients = jax.value_and_grad(
        lambda *qkv: jnp.sum(attend(*qkv, causal=False, segments=nothing)), argnums=(0, 1, 2)
    )(q, k, v)
    assert value == 0
    assert not any(np.any(gradient) for gradient in gradients)


@every_backend
@pytest.mark.parametrize("causal", [True, False])
def test_a_document_does_not_change_its_neighbours_by_one_bit(causal, backend):  # F23
    q, k, v = random_qkv()
    changed = [x.copy() for x in (q, k, v)]
    for x in changed:
        x[0, SEGMENTS[0] == 1] *= -3
    before, after = (np.asarray(attend(*qkv, causal=causal, backend=backend)) for qkv in ((q, k, v), changed))
    others = SEGMENTS != 1
    others[1] = True
    assert np.array_equal(before[others], after[others])
    assert not np.array_equal(before[~others], after[~others])


@every_backend
def test_a_token_does_not_change_what_comes_before_it_by_one_bit(backend):
    q, k, v = random_qkv()
    changed = [x.copy() for x in (q, k, v)]
    for x in changed:
        x[1, 6] += 5
    before, after = (np.asarray(attend(*qkv, causal=True, backend=backend)) for qkv in ((q, k, v), changed))
    assert np.array_equal(before[1, :6], after[1, :6])
    assert not np.array_equal(before[1, 6:], after[1, 6:])


def test_half_precision_goes_in_and_comes_out_and_softmax_is_wider():
    q, k, v = (x.astype(jnp.bfloat16) for x in random_qkv())
    out = attend(q, k, v, causal=True)
    assert out.dtype == jnp.bfloat16
    exact, _ = loop_attention(*(np.asarray(x, np.float64) for x in (q, k, v)), SEGMENTS, causal=True)
    # weights and result are rounded to bf16's 8 bits; values are of order 1
    np.testing.assert_allclose(np.asarray(out, np.float64), exact, atol=0.02)


@pytest.mark.parametrize("tensor, encoder_tensor", [(2, 2), (4, 2)])
@pytest.mark.parametrize("part", ["encoder", "decoder"])
@every_backend
def test_heads_shared_over_devices_give_the_same_result_and_gradients(backend, part, tensor, encoder_tensor):
    q, k, v = random_qkv(heads=8, groups=4)
    placement = encoder_placement() if part == "encoder" else decoder_placement(False)

    def with_gradients(backend, placement):
        def f(*qkv):
            return jnp.sum(jnp.sin(attend(*qkv, causal=True, backend=backend, placement=placement)))

        return jax.value_and_grad(f, argnums=(0, 1, 2))

    value, gradients = on_tensor_group(with_gradients(backend, placement), tensor, encoder_tensor)(q, k, v)
    expected_value, expected = with_gradients("xla", SINGLE_DEVICE)(q, k, v)
    np.testing.assert_allclose(value, expected_value, rtol=1e-6)
    for gradient, expected_gradient in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(gradient, expected_gradient, atol=1e-6)
