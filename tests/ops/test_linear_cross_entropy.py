"""Fused linear cross-entropy: sums, gradients and predictions without the logits of all tokens."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec
from tensor_group import on_tensor_group

from jaxforge.cluster.mesh import MANUAL_AXES, STAGE, build_mesh, mesh_layout
from jaxforge.config.errors import ConfigError
from jaxforge.models.attention import RESIDUAL
from jaxforge.ops.cross_entropy import IGNORE, cross_entropy
from jaxforge.ops.linear_cross_entropy import LinearCrossEntropy, vocab_splits
from jaxforge.ops.placement import SINGLE_DEVICE
from jaxforge.parallel.rules import decoder_placement

VOCAB, PADDED, WIDTH, Z = 21, 24, 6, 0.3
WHOLE = LinearCrossEntropy(VOCAB, SINGLE_DEVICE, Z)
# 10 tokens in chunks of 4, the last of which begins 2 tokens early; tiles of 5 rows and of 9, and rests of 4 and of 6
CUT = dataclasses.replace(WHOLE, forward_split=5, backward_split=9, chunk_bytes=4 * 4 * (PADDED + WIDTH))
SETTINGS = {
    "whole": WHOLE,
    "cut": CUT,
    "cut, kernels": dataclasses.replace(CUT, backend="interpret"),
    "softcap": dataclasses.replace(CUT, softcap=2.0),
    "softcap, kernels": dataclasses.replace(WHOLE, softcap=2.0, backend="interpret"),
    "without z-loss": dataclasses.replace(CUT, z_loss_coefficient=0.0),
}


def random_problem(seed=0):
    """Hidden states [2, 5, D], a table whose padded rows are large, targets of which four are ignored, and weights."""
    rng = np.random.default_rng(seed)
    hidden = rng.normal(size=(2, 5, WIDTH)).astype(np.float32)
    head = rng.normal(size=(PADDED, WIDTH)).astype(np.float32)
    head[VOCAB:] *= 100
    targets = rng.integers(0, VOCAB, (2, 5)).astype(np.int32)
    targets[0, :3] = targets[1, 4] = IGNORE
    targets[1, 0] = VOCAB - 1
    return hidden, head, targets, rng.uniform(0.5, 2, (2, 5)).astype(np.float32)


def expected(hidden, head, targets, weights, settings=WHOLE):
    """Loss, z, and the gradients of loss + coefficient z for hidden and head: the formulas in float64, token by token.

    With x = cap tanh(raw / cap): d / dx = softmax (1 + 2 coefficient lse) - onehot, and dx / draw = 1 - (x / cap)^2.
    """
    hidden, head = hidden.astype(float), head.astype(float)
    loss, z, dhidden, dhead = 0.0, 0.0, np.zeros(hidden.shape), np.zeros(head.shape)
    cap = settings.softcap
    for b, s in zip(*np.where(targets != IGNORE), strict=True):
        raw = head[:VOCAB] @ hidden[b, s]
        x = raw if cap is None else cap * np.tanh(raw / cap)
        lse = np.log(np.exp(x - x.max()).sum()) + x.max()
        loss += weights[b, s] * (lse - x[targets[b, s]])
        z += weights[b, s] * lse**2
        d = np.exp(x - lse) * (1 + 2 * settings.z_loss_coefficient * lse)
        d[targets[b, s]] -= 1
        d *= weights[b, s] * (1 if cap is None else 1 - (x / cap) ** 2)
        dhidden[b, s] = d @ head[:VOCAB]
        dhead[:VOCAB] += np.outer(d, hidden[b, s])
    return loss, z, dhidden, dhead


def assert_close(found, wanted, gradient_tolerance=2e-6):
    """Sums to 1e-6, gradients to a part of their largest entry."""
    np.testing.assert_allclose(found[:2], wanted[:2], rtol=1e-6)
    for gradient, right in zip(found[2:], wanted[2:], strict=True):
        np.testing.assert_allclose(gradient, right, atol=gradient_tolerance * np.abs(right).max())


def differentiated(settings, *problem):
    """Loss, z and gradients by autodiff."""
    grad = jax.value_and_grad(lambda hidden, head: settings(hidden, head, *problem[2:]), (0, 1), has_aux=True)
    (_, (loss, z)), gradients = grad(*problem[:2])
    return loss, z, *gradients


@pytest.mark.parametrize("name", SETTINGS)
def test_sums_and_gradients_are_those_of_the_formula(name):
    problem, settings = random_problem(), SETTINGS[name]
    assert_close(differentiated(settings, *problem), expected(*problem, settings))


def test_it_is_the_plain_loss():
    hidden, head, targets, _ = random_problem()

    def plain(hidden, head):
        loss, z = cross_entropy(hidden, head, targets, vocab_size=VOCAB, placement=SINGLE_DEVICE)
        return loss + Z * z, (loss, z)

    (_, sums), gradients = jax.value_and_grad(plain, (0, 1), has_aux=True)(hidden, head)
    assert_close(differentiated(CUT, hidden, head, targets), (*sums, *gradients))


def test_without_gradients_the_sums_are_the_same():
    problem = random_problem()
    for settings in (WHOLE, CUT):
        objective, (loss, z) = settings(*problem)
        right_loss, right_z, *_ = expected(*problem)
        np.testing.assert_allclose((objective, loss, z), (right_loss + Z * right_z, right_loss, right_z), rtol=1e-6)


def test_an_upstream_gradient_scales_both_gradients():
    hidden, head, *rest = random_problem()

    def objective(hidden, head, scale):
        return scale * WHOLE(hidden, head, *rest)[0]

    value, gradients = jax.value_and_grad(objective, (0, 1))(hidden, head, -2.5)
    loss, z, *rights = expected(hidden, head, *rest)
    np.testing.assert_allclose(value, -2.5 * (loss + Z * z), rtol=1e-6)
    for gradient, right in zip(gradients, rights, strict=True):
        np.testing.assert_allclose(gradient, -2.5 * right, atol=2e-6 * np.abs(2.5 * right).max())


def test_no_gradient_goes_to_weights_loss_and_z():
    hidden, head, targets, weights = random_problem()
    assert not np.any(jax.grad(lambda weights: WHOLE(hidden, head, targets, weights)[0])(weights))
    assert not np.any(jax.grad(lambda hidden: sum(WHOLE(hidden, head, targets, weights)[1]))(hidden))


def test_the_gradient_of_the_head_is_added_to_a_sum():
    problem = random_problem()
    before = np.random.default_rng(1).normal(size=(PADDED, WIDTH)).astype(np.float32)
    loss, z, dhidden, dhead = CUT.gradients(*problem[:3], before, problem[3])
    assert_close((loss, z, dhidden, dhead - before), expected(*problem))


def matmuls(f, *arguments):
    """How many the program has, each counted once however often a loop runs it."""
    return str(jax.make_jaxpr(f)(*arguments)).count(" dot_general[")


def test_three_matmuls_give_loss_and_gradients_and_a_frozen_head_needs_two():
    hidden, head, targets, _ = random_problem()
    settings = dataclasses.replace(CUT, forward_split=8, backward_split=8)  # tiles without a rest
    assert matmuls(jax.grad(lambda *both: settings(*both, targets)[0], (0, 1)), hidden, head) == 3
    assert matmuls(jax.grad(lambda hidden: settings(hidden, head, targets)[0]), hidden) == 2
    assert matmuls(lambda hidden: settings.gradients(hidden, head, targets, None), hidden) == 2
    assert settings.gradients(hidden, head, targets, None).dhead_sum_VD is None
    assert matmuls(lambda hidden: settings.score(hidden, head, targets), hidden) == 1


def test_padded_rows_change_nothing_and_get_no_gradient():  # F12
    hidden, head, *rest = random_problem()
    other = head.copy()
    other[VOCAB:] = np.random.default_rng(1).normal(size=(PADDED - VOCAB, WIDTH)) * 1e4
    one, two = (CUT.gradients(hidden, table, rest[0], np.zeros_like(head)) for table in (head, other))
    for a, b in zip(one, two, strict=True):
        assert np.array_equal(a, b)
    assert not np.any(one.dhead_sum_VD[VOCAB:])
    assert np.any(one.dhead_sum_VD[VOCAB - 1])


@pytest.mark.parametrize("settings", [CUT, SETTINGS["cut, kernels"]], ids=["reference", "kernels"])
def test_without_targets_everything_is_zero(settings):  # F4
    hidden, head, targets, weights = random_problem()
    found = settings.gradients(hidden, head, np.full_like(targets, IGNORE), np.zeros_like(head), weights)
    assert not any(np.any(array) for array in found)


def test_a_chunk_without_targets_adds_nothing():
    hidden, head, targets, weights = random_problem()
    targets[0, :4] = IGNORE  # the first chunk has 4 tokens
    problem = hidden, head, targets, weights
    assert_close(differentiated(CUT, *problem), expected(*problem))


def test_half_precision_is_within_a_hundredth():  # F8
    hidden, head, targets, weights = random_problem()
    hidden, head = hidden.astype(jnp.bfloat16), head.astype(jnp.bfloat16)
    loss, z, dhidden, dhead = differentiated(CUT, hidden, head, targets, weights)
    assert dhidden.dtype == dhead.dtype == jnp.bfloat16
    right = expected(np.asarray(hidden, np.float32), np.asarray(head, np.float32), targets, weights)
    # products of bf16 are exact in fp32, so the sums are as good as in fp32
    assert_close((loss, z, np.asarray(dhidden, float), np.asarray(dhead, float)), right, gradient_tolerance=1e-2)
    assert CUT.gradients(hidden, head, targets, jnp.zeros(head.shape)).dhead_sum_VD.dtype == jnp.float32


# with 8 devices the last holds padded rows alone
@pytest.mark.parametrize("tensor, backend", [(2, "reference"), (8, "reference"), (8, "interpret")])
def test_a_sharded_head_gives_the_same(tensor, backend):
    problem = random_problem()
    settings = dataclasses.replace(CUT, placement=decoder_placement(False), backend=backend)
    found = on_tensor_group(lambda *problem: differentiated(settings, *problem), tensor)(*problem)
    assert_close(found, expected(*problem))
    assert not np.any(found[3][VOCAB:])


def collectives(compiled):
    """(kind, number of elements) of every collective in a program."""
    found = re.findall(r"= \w+\[([\d,]*)\]\S* (all-gather|all-reduce|reduce-scatter)\(", compiled.as_text())
    return sorted((kind, int(np.prod([int(size) for size in shape.split(",") if size]))) for shape, kind in found)


def test_under_sequence_parallel_tokens_are_gathered_once_and_their_gradient_scattered_once():
    hidden, head, targets, weights = random_problem()
    hidden, targets, weights = hidden[:, :4], targets[:, :4], weights[:, :4]
    placement = decoder_placement(sequence_parallel=True)
    settings = dataclasses.replace(WHOLE, placement=placement)

    def gradients(hidden, head, targets, weights, dhead_sum):
        hidden = placement.constrain(hidden, RESIDUAL)
        head, dhead_sum = (placement.constrain(x, ("vocab", None)) for x in (head, dhead_sum))
        found = settings.gradients(hidden, head, targets, dhead_sum, weights)
        return found._replace(dhidden_BSD=placement.constrain(2 * found.dhidden_BSD, RESIDUAL))

    arguments = hidden, head, targets, weights, np.zeros_like(head)
    compiled = on_tensor_group(gradients, 2).lower(*arguments).compile()
    loss, z, twice_dhidden, dhead = compiled(*arguments)
    assert_close((loss, z, twice_dhidden / 2, dhead), expected(hidden, head, targets, weights))
    # hidden states of 8 tokens, three numbers of each token from 2 devices (as many), the gradient's halves
    hidden_size, statistics_size = 8 * WIDTH, 2 * 3 * 8
    assert collectives(compiled) == [
        ("all-gather", hidden_size),
        ("all-gather", statistics_size),
        ("reduce-scatter", hidden_size // 2),
    ]


def on_stages(f, tensor, in_specs, out_specs):
    """`f` on two stages, as the pipeline calls it."""
    mesh = build_mesh(mesh_layout(2 * tensor, tensor=tensor, stage=2), jax.devices()[: 2 * tensor])
    return jax.jit(
        jax.shard_map(
            f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=set(MANUAL_AXES), check_vma=False
        )
    )


@pytest.mark.parametrize("tensor", [1, 2])
def test_a_head_over_stages_and_tensor_gives_the_same(tensor):
    problem = random_problem()
    settings = dataclasses.replace(CUT, placement=decoder_placement(False), outer_axes=(STAGE,))

    def both(hidden, head, targets, weights):
        found = settings.gradients(hidden, head, targets, jnp.zeros(head.shape), weights)
        loss, tokens = settings.score(hidden, head, targets)
        return (found.loss, found.z, lax.psum(found.dhidden_BSD, STAGE), found.dhead_sum_VD), (loss, tokens)

    whole, rows = PartitionSpec(), PartitionSpec(STAGE)
    out_specs = ((whole, whole, whole, rows), (whole, whole))
    found, scored = on_stages(both, tensor, (whole, rows, whole, whole), out_specs)(*problem)
    assert_close(found, expected(*problem))
    assert_scored(scored, *problem[:3])


def test_a_head_over_stages_is_not_for_autodiff():
    hidden, head, targets, _ = random_problem()
    with pytest.raises(ValueError, match="outer_axes"):
        dataclasses.replace(CUT, outer_axes=(STAGE,))(hidden, head, targets)


def assert_scored(scored, hidden, head, targets):
    loss, tokens = scored
    np.testing.assert_allclose(loss, expected(hidden, head, targets, np.ones(targets.shape))[0], rtol=1e-6)
    assert np.array_equal(tokens, (hidden.astype(float) @ head[:VOCAB].astype(float).T).argmax(-1))
    assert tokens.dtype == jnp.int32


@pytest.mark.parametrize("tensor", [1, 8])
def test_scoring_gives_the_loss_and_the_most_likely_token(tensor):
    problem = random_problem()[:3]
    settings = dataclasses.replace(CUT, chunk_bytes=4 * 5 * 3)  # 3 of 10 tokens
    if tensor > 1:
        sharded = dataclasses.replace(settings, placement=decoder_placement(False), backend="interpret")
        scored = on_tensor_group(sharded.score, tensor)(*problem)
    else:
        scored = settings.score(*problem)
    assert_scored(scored, *problem)


@pytest.mark.parametrize("tensor", [1, 2])
def test_the_lowest_token_wins_a_tie(tensor):
    hidden, head, targets, _ = random_problem()
    hidden[:] = 1
    head[:] = 0
    head[[7, 8, 12, 20]] = 1  # two in one tile, and with 2 devices one on the other
    placement = decoder_placement(False) if tensor > 1 else SINGLE_DEVICE
    settings = dataclasses.replace(CUT, placement=placement)
    score = on_tensor_group(settings.score, tensor) if tensor > 1 else settings.score
    assert np.all(score(hidden, head, targets)[1] == 7)


def test_large_logits_stay_finite():
    hidden, *rest = random_problem()
    problem = 1000 * hidden, *rest
    for settings in (CUT, SETTINGS["cut, kernels"]):
        _, sums = settings(*problem)
        np.testing.assert_allclose(sums, expected(*problem)[:2], rtol=1e-6)


def test_the_environment_sets_the_splits():
    assert vocab_splits({}) == (3072, 3072)
    both = {"LCE_GENERIC_FWD_VOCAB_SPLIT_SIZE": "1024", "LCE_GENERIC_BWD_VOCAB_SPLIT_SIZE": "2048"}
    assert vocab_splits(both) == (1024, 2048)


@pytest.mark.parametrize("text", ["0", "-5", "1.5", "many", ""])
def test_a_split_that_is_no_number_of_rows_is_refused(text):
    with pytest.raises(ConfigError, match="LCE_GENERIC_BWD_VOCAB_SPLIT_SIZE"):
        vocab_splits({"LCE_GENERIC_BWD_VOCAB_SPLIT_SIZE": text})
