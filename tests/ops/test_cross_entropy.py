"""Cross-entropy, z-loss and greedy prediction over a vocabulary that may be padded and sharded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tensor_group import on_tensor_group

from jaxforge.ops.cross_entropy import IGNORE, cross_entropy, score_tokens
from jaxforge.ops.placement import SINGLE_DEVICE
from jaxforge.parallel.rules import decoder_placement

VOCAB, PADDED, WIDTH = 21, 32, 6


def random_problem(vocab=VOCAB, padded=PADDED, seed=0):
    """Hidden states [2, 5, D], a table whose padded rows are large, and targets of which three are ignored."""
    rng = np.random.default_rng(seed)
    hidden = rng.normal(size=(2, 5, WIDTH)).astype(np.float32)
    head = rng.normal(size=(padded, WIDTH)).astype(np.float32)
    head[vocab:] *= 100
    targets = rng.integers(0, vocab, (2, 5)).astype(np.int32)
    targets[0, 1:3] = targets[1, 4] = IGNORE
    targets[1, 0] = vocab - 1
    return hidden, head, targets


def expected_sums(hidden, head, targets, vocab=VOCAB):
    """Loss sum, sum of squared log-sum-exps, and the most likely tokens, in float64."""
    logits = hidden.astype(float) @ head[:vocab].astype(float).T
    lse = np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)) + logits.max(-1)
    loss = z = 0.0
    for b, s in zip(*np.where(targets != IGNORE), strict=True):
        loss += lse[b, s] - logits[b, s, targets[b, s]]
        z += lse[b, s] ** 2
    return loss, z, logits.argmax(-1)


def loss_and_z(hidden, head, targets, vocab=VOCAB, placement=SINGLE_DEVICE):
    return cross_entropy(hidden, head, targets, vocab_size=vocab, placement=placement)


def gradients_of_both(hidden, head, targets, placement=SINGLE_DEVICE):
    """Gradients of loss + 0.3 z for hidden and head."""

    def objective(hidden, head):
        loss, z = loss_and_z(hidden, head, targets, placement=placement)
        return loss + 0.3 * z

    return jax.grad(objective, argnums=(0, 1))(hidden, head)


def expected_gradients(hidden, head, targets):
    """d(loss + 0.3 z) / dlogits = softmax - onehot + 0.6 lse softmax, by hand."""
    dhidden, dhead = np.zeros(hidden.shape), np.zeros(head.shape)
    for b, s in zip(*np.where(targets != IGNORE), strict=True):
        logits = head[:VOCAB].astype(float) @ hidden[b, s].astype(float)
        lse = np.log(np.exp(logits - logits.max()).sum()) + logits.max()
        softmax = np.exp(logits - lse)
        dlogits = softmax * (1 + 0.6 * lse)
        dlogits[targets[b, s]] -= 1
        dhidden[b, s] = dlogits @ head[:VOCAB]
        dhead[:VOCAB] += np.outer(dlogits, hidden[b, s])
    return dhidden, dhead


def test_both_sums_are_those_of_numpy():
    problem = random_problem()
    loss, z = loss_and_z(*problem)
    expected_loss, expected_z, _ = expected_sums(*problem)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    np.testing.assert_allclose(z, expected_z, rtol=1e-6)
    assert loss.dtype == z.dtype == jnp.float32


def test_equal_logits_cost_the_logarithm_of_the_vocabulary():
    hidden, head, targets = np.zeros((1, 4, WIDTH), np.float32), random_problem()[1], np.zeros((1, 4), np.int32)
    np.testing.assert_allclose(loss_and_z(hidden, head, targets), (4 * np.log(21), 4 * np.log(21) ** 2), rtol=1e-6)


def test_gradients_are_softmax_minus_one_hot():
    problem = random_problem()
    for gradient, expected in zip(gradients_of_both(*problem), expected_gradients(*problem), strict=True):
        np.testing.assert_allclose(gradient, expected, atol=2e-6 * np.abs(expected).max())


def test_padded_rows_change_nothing_and_get_no_gradient():  # F12
    hidden, head, targets = random_problem(vocab=250, padded=256)
    other = head.copy()
    other[250:] = np.random.default_rng(1).normal(size=(6, WIDTH)) * 1e4
    sums = [loss_and_z(hidden, table, targets, vocab=250) for table in (head, other, head[:250])]
    np.testing.assert_allclose(sums[0], expected_sums(hidden, head, targets, vocab=250)[:2], rtol=1e-6)
    assert sums[0] == sums[1]
    # the unpadded table sums in another order
    np.testing.assert_allclose(sums[0], sums[2], rtol=1e-6)
    gradient = jax.grad(lambda table: sum(loss_and_z(hidden, table, targets, vocab=250)))(other)
    assert not np.any(gradient[250:])
    assert np.any(gradient[249])


def test_without_targets_loss_and_gradients_are_zero():  # F4
    hidden, head, targets = random_problem()
    nothing = np.full_like(targets, IGNORE)
    assert loss_and_z(hidden, head, nothing) == (0, 0)
    assert not any(np.any(gradient) for gradient in gradients_of_both(hidden, head, nothing))


def test_large_logits_stay_finite():
    hidden, head, targets = random_problem()
    loss, z = loss_and_z(1000 * hidden, head, targets)
    expected_loss, expected_z, _ = expected_sums(1000 * hidden, head, targets)
    np.testing.assert_allclose((loss, z), (expected_loss, expected_z), rtol=1e-6)


def test_half_precision_is_rounded_once_not_summed():
    hidden, head, targets = random_problem()
    hidden, head = hidden.astype(jnp.bfloat16), head.astype(jnp.bfloat16)
    loss, z = loss_and_z(hidden, head, targets)
    # products of bf16 are exact in fp32, so the sums are as good as in fp32
    wide = np.asarray(hidden, np.float32), np.asarray(head, np.float32)
    np.testing.assert_allclose((loss, z), expected_sums(*wide, targets)[:2], rtol=1e-6)
    gradients = gradients_of_both(hidden, head, targets)
    for gradient, expected in zip(gradients, expected_gradients(*wide, targets), strict=True):
        assert gradient.dtype == jnp.bfloat16
        # F8: 1e-2 of the largest entry in bf16
        np.testing.assert_allclose(np.asarray(gradient, float), expected, atol=1e-2 * np.abs(expected).max())


# with 4 devices the third holds 5 tokens and 3 padded rows, and the fourth padded rows alone
@pytest.mark.parametrize("tensor", [2, 4])
def test_a_sharded_vocabulary_gives_the_same_sums_and_gradients(tensor):
    problem = random_problem()
    placement = decoder_placement(False)
    loss, z = on_tensor_group(lambda *args: loss_and_z(*args, placement=placement), tensor)(*problem)
    np.testing.assert_allclose((loss, z), expected_sums(*problem)[:2], rtol=1e-6)
    gradients = on_tensor_group(lambda *args: gradients_of_both(*args, placement=placement), tensor)(*problem)
    for gradient, expected in zip(gradients, expected_gradients(*problem), strict=True):
        np.testing.assert_allclose(gradient, expected, atol=2e-6 * np.abs(expected).max())
    assert not np.any(gradients[1][VOCAB:])


@pytest.mark.parametrize("tensor", [1, 4])
@pytest.mark.parametrize("chunk", [1, 3, 10, 1024])  # of 10 tokens
def test_scoring_gives_the_loss_and_the_most_likely_token(tensor, chunk):
    problem = random_problem()

    def score(*args, placement=SINGLE_DEVICE):
        return score_tokens(*args, vocab_size=VOCAB, placement=placement, chunk=chunk)

    if tensor > 1:
        placement = decoder_placement(False)
        loss, tokens = on_tensor_group(lambda *args: score(*args, placement=placement), tensor)(*problem)
    else:
        loss, tokens = score(*problem)
    expected_loss, _, expected_tokens = expected_sums(*problem)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    assert np.array_equal(tokens, expected_tokens)
    assert tokens.dtype == jnp.int32


@pytest.mark.parametrize("tensor", [1, 2])
def test_the_lowest_token_wins_a_tie(tensor):
    hidden, head, targets = random_problem()
    hidden[:] = 1
    head[:] = 0
    head[[7, 20]] = 1  # with 2 devices, one on each
    placement = decoder_placement(False) if tensor > 1 else SINGLE_DEVICE

    def score(*args):
        return score_tokens(*args, vocab_size=VOCAB, placement=placement)

    _, tokens = (on_tensor_group(score, tensor) if tensor > 1 else score)(hidden, head, targets)
    assert np.all(tokens == 7)
