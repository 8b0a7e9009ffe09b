"""Products of rows with the weights of their experts, for a mixture of experts.

Rows are sorted by expert: the first `sizes_X[0]` of R belong to the first of X experts, and so on; what is left of the
rows belongs to none, gives 0 and gets gradient 0.  Any sizes will do, 0 too.  The work is that of the rows that count,
and no array has a place for each row of each expert.

Two backends: "xla", jax.numpy, a loop over the experts that is meant for CPUs; "pallas", kernels for a GPU, which are
interpreted on a CPU, slowly.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels import grouped_matmul as kernels

_TILE = 64  # rows that the reference takes at a time


def grouped_matmul(rows_RD: jax.Array, weights_XDF: jax.Array, sizes_X: jax.Array, *, backend: str) -> jax.Array:
    """Each row times its expert's matrix.  [R, F] in the dtype of the rows, summed in fp32

    Gradients go to rows and weights, summed in fp32, each in its own dtype.

    Args:
      weights_XDF: in the dtype of the rows.
      sizes_X: int32, rows of each expert; their sum is at most R.
      backend: "xla" or "pallas".
    """
    [product_RF] = _products(backend, rows_RD, (weights_XDF,), sizes_X)
    return product_RF


def grouped_swiglu(
    rows_RD: jax.Array, gate_XDF: jax.Array, up_XDF: jax.Array, sizes_X: jax.Array, *, backend: str
) -> jax.Array:
    """silu(row gate) * (row up), each row with its expert's matrices (SwiGLU; Shazeer 2020, arXiv:2002.05202).  [R, F]

    One kernel forms both products in one pass over the rows, and one the gradient of the rows from both.  The
    activation is left to XLA, which makes it one elementwise pass, so that what the backward pass reads has names
    for `jax.checkpoint`: both products "expert_fc1", the result "moe_act".  Computing the result again then takes no
    product; in the kernel it would save reading the products once, 4 R F bytes in bfloat16 for 4 R D F FLOPs.

    Args: as of `grouped_matmul`.
    """
    products = _products(backend, rows_RD, (gate_XDF, up_XDF), sizes_X)
    gate_RF, up_RF = (checkpoint_name(product_RF, "expert_fc1") for product_RF in products)
    return checkpoint_name(_swiglu(gate_RF, up_RF), "moe_act")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _products(backend: str, rows_RD, weights: tuple[jax.Array, ...], sizes_X) -> tuple[jax.Array, ...]:
    """The rows times their experts' matrices, for each stack [X, D, F]."""
    return tuple(_BACKENDS[backend][0](rows_RD, weights, sizes_X))


def _products_forward(backend, rows_RD, weights, sizes_X):
    return _products(backend, rows_RD, weights, sizes_X), (rows_RD, weights, sizes_X)


def _products_backward(backend, residuals, dproducts):
    rows_RD, weights, sizes_X = residuals
    _, products_sum, outer_products = _BACKENDS[backend]
    return products_sum(dproducts, weights, sizes_X), tuple(outer_products(rows_RD, dproducts, sizes_X)), None


_products.defvjp(_products_forward, _products_backward)


@jax.custom_vjp
def _swiglu(gate_RF, up_RF):
    """silu(gate) * up, computed in fp32.  Its backward pass reads its arguments alone."""
    gate, up = gate_RF.astype(jnp.float32), up_RF.astype(jnp.float32)
    return (jax.nn.silu(gate) * up).astype(gate_RF.dtype)


def _swiglu_forward(gate_RF, up_RF):
    return _swiglu(gate_RF, up_RF), (gate_RF, up_RF)


def _swiglu_backward(residuals, dact_RF):
    # without the barrier XLA may keep the exponentials of the forward pass, in fp32
    gate, up, dact = (x.astype(jnp.float32) for x in lax.optimization_barrier((*residuals, dact_RF)))
    sigmoid = jax.nn.sigmoid(gate)
    silu = gate * sigmoid
    dgate = dact * up * (sigmoid + silu * (1 - sigmoid))
    return dgate.astype(dact_RF.dtype), (dact * silu).astype(dact_RF.dtype)


_swiglu.defvjp(_swiglu_forward, _swiglu_backward)


def _reference_products(rows_RD, weights, sizes_X):
    return [_by_experts(_tile_of(rows_RD), weights_XDF, sizes_X, rows_RD, "TD,DF->TF") for weights_XDF in weights]


def _reference_products_sum(rows, weights, sizes_X):
    # the sum is rounded once
    first, *others = [
        _by_experts(_tile_of(rows_RF), weights_XDF, sizes_X, rows_RF, "TF,DF->TD", jnp.float32)
        for rows_RF, weights_XDF in zip(rows, weights, strict=True)
    ]
    return sum(others, start=first).astype(rows[0].dtype)


def _reference_outer_products(rows_RD, others, sizes_X):
    tile_of, starts_X = _tile_of(rows_RD), jnp.cumsum(sizes_X) - sizes_X

    def of_others(other_RF):
        other_tile_of = _tile_of(other_RF)

        def of_expert(_, place):
            start, size = place

            def step(i, sum_DF):
                first = start + i * _TILE
                is_own_T1 = (i * _TILE + jnp.arange(_TILE) < size)[:, None]
                rows_TD, other_TF = (jnp.where(is_own_T1, of(first), 0) for of in (tile_of, other_tile_of))
                return sum_DF + _einsum("TD,TF->DF", rows_TD, other_TF)

            zeros_DF = jnp.zeros((rows_RD.shape[1], other_RF.shape[1]), jnp.float32)
            sum_DF = lax.fori_loop(0, _num_tiles(size), step, zeros_DF)
            return None, sum_DF.astype(rows_RD.dtype)

        return lax.scan(of_expert, None, (starts_X, sizes_X))[1]

    return [of_others(other_RF) for other_RF in others]


def _by_experts(tile_of: Callable, weights_XDF, sizes_X, rows_R: jax.Array, equation: str, dtype=None) -> jax.Array:
    """For each expert the einsum of its tiles of rows with its matrix; rows of none are 0."""
    R, width = rows_R.shape[0], jax.eval_shape(functools.partial(jnp.einsum, equation), rows_R, weights_XDF[0]).shape[1]

    def of_expert(out_RW, expert):
        weights_DF, start, size = expert

        def step(i, out_RW):
            first = start + i * _TILE
            product_TW = _einsum(equation, tile_of(first), weights_DF).astype(out_RW.dtype)
            is_own_T1 = (i * _TILE + jnp.arange(_TILE) < size)[:, None]
            kept_TW = lax.dynamic_slice_in_dim(out_RW, first, _TILE)
            return lax.dynamic_update_slice_in_dim(out_RW, jnp.where(is_own_T1, product_TW, kept_TW), first, 0)

        return lax.fori_loop(0, _num_tiles(size), step, out_RW), None

    # a tile's rows past the last one
    out_RW = jnp.zeros((R + _TILE, width), dtype or rows_R.dtype)
    starts_X = jnp.cumsum(sizes_X) - sizes_X
    return lax.scan(of_expert, out_RW, (weights_XDF, starts_X, sizes_X))[0][:R]


def _tile_of(rows_RD: jax.Array) -> Callable[[jax.Array], jax.Array]:
    """first -> `_TILE` rows from there, which may end past the last one."""
    padded = jnp.pad(rows_RD, ((0, _TILE), (0, 0)))
    return lambda first: lax.dynamic_slice_in_dim(padded, first, _TILE)


def _num_tiles(size):
    return -(-size // _TILE)


def _einsum(equation, a, b):
    return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32)


# products, the sum of products with the transposed weights, outer products
_BACKENDS = {
    "xla": (_reference_products, _reference_products_sum, _reference_outer_products),
    "pallas": (kernels.grouped_products, kernels.grouped_products_sum, kernels.grouped_outer_products),
}
