"""Tokens in the order of their experts and back, kernels interpreted on the CPU, against a loop over the pairs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxforge.ops.expert_rows import permutation
from jaxforge.ops.moe_permute import Permutation, permute, unpermute

BACKENDS = ["xla", "pallas"]
# blocks are of 4 rows and 512 columns
N, K, E, D = 13, 3, 5, 530


def random_experts(seed=0, unrouted=4):
    """Each token's experts, all different; expert 2 gets none, the last tokens are padding."""
    rng = np.random.default_rng(seed)
    experts = np.array([rng.permutation([0, 1, 3, 4])[:K] for _ in range(N)], np.int32)
    experts[N - unrouted :] = E
    experts[0, 1] = E  # one choice of a token that isn't routed
    return experts


def rows_by_hand(experts, num_rows):
    """(pair of each row, row of each pair, rows of each expert), a pair at a time in the order of the experts."""
    pairs = [(x, n, k) for x in range(E) for n in range(N) for k in range(K) if experts[n, k] == x][:num_rows]
    choice, place = np.full(num_rows, N * K), np.full((N, K), num_rows)
    for r, (_, n, k) in enumerate(pairs):
        choice[r], place[n, k] = n * K + k, r
    return choice, place, np.bincount([x for x, _, _ in pairs], minlength=E)


CASES = {
    "as many rows as pairs": (random_experts(), N * K),
    "more rows than pairs": (random_experts(), N * K + 6),
    "fewer rows than routed pairs": (random_experts(), 17),
    "all tokens to one expert": (np.where(np.arange(K) == 1, 3, E).repeat(N).reshape(K, N).T.astype(np.int32), N * K),
    "nothing is routed": (np.full((N, K), E, np.int32), N * K),
}


@pytest.mark.parametrize("case", CASES)
def test_rows_are_sorted_by_expert_and_then_by_token(case):
    experts, num_rows = CASES[case]
    found, sizes = jax.jit(functools.partial(permutation, num_experts=E, num_rows=num_rows))(experts)
    choice, place, counts = rows_by_hand(experts, num_rows)
    assert found.choice_R.tolist() == choice.tolist()
    assert found.place_NK.tolist() == place.tolist()
    assert sizes.tolist() == counts.tolist()
    assert {x.dtype for x in (*found, sizes)} == {jnp.dtype(jnp.int32)}


def test_without_a_number_of_rows_there_is_one_for_each_pair():
    found, _ = permutation(random_experts(), E)
    assert found.choice_R.shape == (N * K,)


def one_hot(choice):
    """[R, N K] float32; a row of zeros where a row is empty."""
    return np.eye(N * K + 1, dtype=np.float32)[choice][:, :-1]


@functools.cache
def rows_and_gradient(backend):
    @jax.jit
    def f(x, choice, place, drows):
        rows, pull = jax.vjp(lambda x: permute(x, Permutation(choice, place), backend=backend), x)
        return rows, *pull(drows)

    return f


@functools.cache
def tokens_and_gradients(backend):
    @jax.jit
    def f(rows, weights, choice, place, dy):
        y, pull = jax.vjp(lambda *x: unpermute(*x, Permutation(choice, place), backend=backend), rows, weights)
        return y, *pull(dy)

    return f


def random_problem(num_rows, dtype=np.float32, seed=1):
    """Tokens, rows, their gradients, and weights."""
    rng = np.random.default_rng(seed)
    x, dy = rng.normal(size=(2, N, D)).astype(dtype)
    rows, drows = rng.normal(size=(2, num_rows, D)).astype(dtype)
    return x, dy, rows, drows, rng.uniform(0.1, 1, (N, K)).astype(np.float32)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES)
def test_each_row_is_its_token_and_each_token_gets_the_gradients_of_its_rows(backend, case):
    experts, num_rows = CASES[case]
    choice, place, _ = rows_by_hand(experts, num_rows)
    x, _, _, drows, _ = random_problem(num_rows)
    rows, dx = rows_and_gradient(backend)(x, choice.astype(np.int32), place.astype(np.int32), drows)
    right_rows, right_dx = np.zeros((num_rows, D)), np.zeros((N, D))
    for r, pair in enumerate(choice):
        if pair < N * K:
            right_rows[r] = x[pair // K]
            right_dx[pair // K] += drows[r]
    assert np.array_equal(rows, right_rows)
    np.testing.assert_allclose(dx, right_dx, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES)
def test_each_token_is_the_weighted_sum_of_its_rows_and_the_gradients_are_those_of_one_hot_matrices(backend, case):
    experts, num_rows = CASES[case]
    choice, place, _ = rows_by_hand(experts, num_rows)
    _, dy, rows, _, weights = random_problem(num_rows)
    found = tokens_and_gradients(backend)(rows, weights, choice.astype(np.int32), place.astype(np.int32), dy)
    right_y = np.zeros((N, D))
    for n in range(N):
        for k in range(K):
            if place[n, k] < num_rows:
                right_y[n] += weights[n, k].astype(float) * rows[place[n, k]].astype(float)
    np.testing.assert_allclose(found[0], right_y, atol=1e-6)

    def dense(rows, weights):
        onehot = one_hot(choice).reshape(num_rows, N, K)
        return jnp.einsum("RNK,NK,RD->ND", onehot, weights, rows)

    _, pull = jax.vjp(dense, rows, weights)
    for gradient, right in zip(found[1:], pull(dy), strict=True):
        np.testing.assert_allclose(gradient, right, atol=1e-5 * max(np.abs(right).max(), 1))


@pytest.mark.parametrize("backend", BACKENDS)
def test_in_bfloat16_sums_are_rounded_once(backend):
    experts, num_rows = CASES["as many rows as pairs"]
    choice, place, _ = (x.astype(np.int32) for x in rows_by_hand(experts, num_rows))
    x, dy, rows, drows, weights = random_problem(num_rows, jnp.bfloat16)
    padded_rows, padded_drows = (np.vstack([a.astype(float), np.zeros((1, D))]) for a in (rows, drows))
    taken, dx = rows_and_gradient(backend)(x, choice, place, drows)
    y, drows, dweights = tokens_and_gradients(backend)(rows, weights, choice, place, dy)
    assert {a.dtype for a in (taken, dx, y, drows)} == {jnp.dtype(jnp.bfloat16)} and dweights.dtype == jnp.float32
    np.testing.assert_allclose(dx.astype(float), padded_drows[place].sum(1), rtol=2**-8, atol=1e-5)
    right_y = np.einsum("nk,nkd->nd", weights.astype(float), padded_rows[place])
    np.testing.assert_allclose(y.astype(float), right_y, rtol=2**-8, atol=1e-5)
    right_dweights = np.einsum("nkd,nd->nk", padded_rows[place], dy.astype(float))
    np.testing.assert_allclose(dweights, right_dweights, atol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_stands_in_empty_rows_reaches_nothing(backend):
    experts, num_rows = CASES["more rows than pairs"]
    choice, place, _ = (x.astype(np.int32) for x in rows_by_hand(experts, num_rows))
    x, dy, rows, drows, weights = random_problem(num_rows)
    rows[choice == N * K], drows[choice == N * K] = np.nan, np.inf
    results = (
        *rows_and_gradient(backend)(x, choice, place, drows),
        *tokens_and_gradients(backend)(rows, weights, choice, place, dy),
    )
    assert all(np.all(np.isfinite(result)) for result in results)
