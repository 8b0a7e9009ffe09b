"""Products of rows with their experts' weights, kernels interpreted on the CPU, against a loop over the rows."""

import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from jaxforge.memory.policy import make_policies
from jaxforge.ops.grouped_matmul import grouped_matmul, grouped_swiglu

BACKENDS = ["xla", "pallas"]
# 300 rows in tiles of 128, widths that end inside of a block
R, D, F = 300, 80, 72
SIZES = {
    "counts of all kinds": [0, 37, 200, 13],
    "full": [100, 0, 0, 200],
    "tiles of one expert each": [128, 128, 0, 0],
    "all rows to one": [0, 0, 300, 0],
    "a row each": [1, 1, 1, 1],
    "no row": [0, 0, 0, 0],
}


def experts_of(sizes):
    """The expert of each row that has one."""
    return np.repeat(np.arange(len(sizes)), sizes)


def random_arrays(*shapes, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def loop(rows, weights, sizes):
    """float64, a row at a time; 0 where a row has no expert."""
    out = np.zeros((len(rows), weights.shape[2]))
    for r, x in enumerate(experts_of(sizes)):
        out[r] = rows[r].astype(float) @ weights[x].astype(float)
    return out


def one_hot_product(rows, weights, sizes):
    """The same with a place for each row of each expert, for JAX to differentiate."""
    onehot = np.zeros((len(rows), len(sizes)), np.float32)
    onehot[np.arange(sum(sizes)), experts_of(sizes)] = 1
    return jnp.einsum("RD,XDF,RX->RF", rows, weights, onehot)


@functools.cache
def product_and_gradients(backend):
    @jax.jit
    def f(rows, weights, sizes, dproduct):
        product, pull = jax.vjp(lambda *x: grouped_matmul(*x, sizes, backend=backend), rows, weights)
        return product, *pull(dproduct)

    return f


def assert_close(found, wanted):
    """fp32 sums of some hundred products, in another order: to 1e-5 of the largest entry."""
    for x, right in zip(found, wanted, strict=True):
        np.testing.assert_allclose(x, right, atol=1e-5 * max(np.abs(right).max(), 1))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", SIZES)
def test_products_and_gradients_are_those_of_the_rows_own_experts(backend, case):
    sizes = SIZES[case]
    rows, weights, dproduct = random_arrays((R, D), (4, D, F), (R, F))
    found = product_and_gradients(backend)(rows, weights, np.array(sizes, np.int32), dproduct)
    assert_close(found[:1], [loop(rows, weights, sizes)])
    _, pull = jax.vjp(lambda *x: one_hot_product(*x, sizes), rows, weights)
    assert_close(found[1:], pull(dproduct))
    # not nearly: a row without an expert, an expert without a row
    assert not np.any(found[0][sum(sizes) :]) and not np.any(found[1][sum(sizes) :])
    assert not np.any(found[2][np.array(sizes) == 0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_stands_in_rows_without_an_expert_changes_nothing(backend):
    sizes = np.array([0, 37, 200, 13], np.int32)
    rows, weights, dproduct = random_arrays((R, D), (4, D, F), (R, F))
    clean = product_and_gradients(backend)(rows, weights, sizes, dproduct)
    rows[250:], dproduct[250:] = np.nan, np.inf
    for x, right in zip(product_and_gradients(backend)(rows, weights, sizes, dproduct), clean, strict=True):
        assert np.array_equal(x, right)


@pytest.mark.parametrize("backend", BACKENDS)
def test_widths_of_several_blocks(backend):
    # products in blocks of 256 columns, sums in blocks of 32 in fp32
    sizes = [5, 20]
    rows, weights, dproduct = random_arrays((40, 300), (2, 300, 270), (40, 270))
    found = product_and_gradients(backend)(rows, weights, np.array(sizes, np.int32), dproduct)
    assert_close(found[:1], [loop(rows, weights, sizes)])
    _, pull = jax.vjp(lambda *x: one_hot_product(*x, sizes), rows, weights)
    assert_close(found[1:], pull(dproduct))


@pytest.mark.parametrize("backend", BACKENDS)
def test_in_bfloat16_only_the_results_are_rounded(backend):
    sizes = [0, 37, 200, 13]
    rows, weights, dproduct = (x.astype(jnp.bfloat16) for x in random_arrays((R, D), (4, D, F), (R, F)))
    found = product_and_gradients(backend)(rows, weights, np.array(sizes, np.int32), dproduct)
    assert {x.dtype for x in found} == {jnp.dtype(jnp.bfloat16)}
    drows = loop(dproduct, weights.swapaxes(1, 2), sizes)
    dweights = np.zeros((4, D, F))
    for r, x in enumerate(experts_of(sizes)):
        dweights[x] += np.outer(rows[r].astype(float), dproduct[r].astype(float))
    for x, right in zip(found, (loop(rows, weights, sizes), drows, dweights), strict=True):
        # half a unit in the last of 8 bits, and where the sum is small the error of adding in fp32
        np.testing.assert_allclose(x.astype(float), right, rtol=2**-8, atol=1e-4)


def swiglu_layer(backend, rows, gate, up, down, sizes):
    act = grouped_swiglu(rows, gate, up, sizes, backend=backend)
    return grouped_matmul(act, down, sizes, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_swiglu_and_its_gradients_are_those_of_the_dense_formula(backend):
    sizes = [0, 37, 200, 13]
    rows, gate, up, down, dy = random_arrays((R, D), (4, D, F), (4, D, F), (4, F, D), (R, D))
    gate, up, down = (w / np.sqrt(D, dtype=np.float32) for w in (gate, up, down))

    def dense(rows, gate, up, down):
        hidden = jax.nn.silu(one_hot_product(rows, gate, sizes)) * one_hot_product(rows, up, sizes)
        return one_hot_product(hidden, down, sizes)

    @jax.jit
    def f(rows, gate, up, down, sizes, dy):
        y, pull = jax.vjp(lambda *x: swiglu_layer(backend, *x, sizes), rows, gate, up, down)
        return y, *pull(dy)

    y, pull = jax.vjp(dense, rows, gate, up, down)
    assert_close(f(rows, gate, up, down, np.array(sizes, np.int32), dy), (y, *pull(dy)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_swiglu_in_bfloat16_is_computed_in_single_precision(backend):
    rows, gate, up = (x.astype(jnp.bfloat16) for x in random_arrays((40, D), (2, D, F), (2, D, F)))
    sizes = [11, 20]
    found = jax.jit(functools.partial(grouped_swiglu, backend=backend))(rows, gate, up, np.array(sizes, np.int32))
    gate_RF, up_RF = (loop(rows, w, sizes).astype(jnp.bfloat16).astype(float) for w in (gate, up))
    # a product is rounded up where the loop's is rounded down: 2**-8, through silu, and the result once more
    np.testing.assert_allclose(found.astype(float), gate_RF / (1 + np.exp(-gate_RF)) * up_RF, rtol=2**-5, atol=1e-4)


def kernel_calls(jaxpr, found=None):
    """How often each kernel is called, by name; of the two for CPU and GPU that of the GPU."""
    found = Counter() if found is None else found
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            if not equation.params["interpret"]:
                found[str(equation.params["name"])] += 1
        else:
            for inner in jaxprs_in_params(equation.params):
                kernel_calls(inner, found)
    return found


@pytest.mark.parametrize(
    "actions, products",
    [({}, 2), ({"moe_act": "recompute"}, 2), ({"expert_fc1": "recompute"}, 3)],
)  # fmt: skip
def test_the_backward_pass_computes_only_those_products_again_that_are_not_kept(actions, products):
    rows, gate, down = random_arrays((R, D), (4, D, F), (4, F, D))
    sizes = np.array([0, 37, 200, 13], np.int32)
    layer = make_policies(actions).checkpoint(functools.partial(swiglu_layer, "pallas"), is_recomputed=False)

    def gradients(rows, gate, up, down, dy):
        return jax.vjp(lambda *x: layer(*x, sizes), rows, gate, up, down)[1](dy)

    jaxpr = jax.make_jaxpr(gradients)(rows, gate, gate, down, rows)
    assert kernel_calls(jaxpr.jaxpr) == {
        "grouped_products": products, "grouped_products_sum": 2, "grouped_outer_products": 2
    }  # fmt: skip


def test_arrays_that_do_not_belong_together_are_refused():
    rows, weights = random_arrays((R, D), (4, D + 1, F))
    with pytest.raises(ValueError, match="don't belong together"):
        grouped_matmul(rows, weights, np.zeros(4, np.int32), backend="pallas")
