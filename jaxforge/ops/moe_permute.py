"""Tokens in the order of the experts that they are sent to, and back.

N tokens of width D, K choices of each, E experts, R rows of a buffer.  Every (token, choice) pair that is routed has
one row, and every row at most one pair, both known by number.  So what would be a scatter-add is a sum of K gathered
rows, in both directions and in their gradients, and the same bit for bit from run to run.

Two backends: "xla", jax.numpy; "pallas", kernels for a GPU, which are interpreted on a CPU, slowly.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import moe_permute as kernels


class Permutation(NamedTuple):
    """Which pair lies in which row.

    Attributes:
      choice_R: int32, n K + k of the row's pair, N K where the row is empty.
      place_NK: int32, the pair's row, R where it has none.
    """

    choice_R: jax.Array
    place_NK: jax.Array


def permute(x_ND: jax.Array, permutation: Permutation, *, backend: str) -> jax.Array:
    """The token of each row, 0 in empty ones.  [R, D] in the dtype of the tokens

    The gradient of a token is the sum over its rows, in fp32.

    Args:
      backend: "xla" or "pallas".
    """
    return _permute(backend, x_ND, permutation)


def unpermute(
    rows_RD: jax.Array, weights_NK: jax.Array | None, permutation: Permutation, *, backend: str
) -> jax.Array:
    """The sum over k of weights_NK[n, k] * the row of (n, k), in fp32; pairs without a row add 0.  [N, D], rows' dtype

    Gradients go to the rows, in their dtype and 0 for empty ones, and to the weights.

    Args:
      weights_NK: fp32; None for rows that are weighted already, of which the backward pass then reads none.
      backend: "xla" or "pallas".
    """
    return _unpermute(backend, rows_RD, weights_NK, permutation)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _permute(backend: str, x_ND, permutation: Permutation):
    return _BACKENDS[backend][0](x_ND, _source(permutation))


def _permute_forward(backend, x_ND, permutation):
    return _permute(backend, x_ND, permutation), permutation


def _permute_backward(backend, permutation, drows_RD):
    return _BACKENDS[backend][1](drows_RD, None, permutation.place_NK), None


_permute.defvjp(_permute_forward, _permute_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _unpermute(backend: str, rows_RD, weights_NK, permutation: Permutation):
    return _BACKENDS[backend][1](rows_RD, weights_NK, permutation.place_NK)


def _unpermute_forward(backend, rows_RD, weights_NK, permutation):
    kept = (None if weights_NK is None else rows_RD, weights_NK, permutation)
    return _unpermute(backend, rows_RD, weights_NK, permutation), kept


def _unpermute_backward(backend, residuals, dy_ND):
    rows_RD, weights_NK, permutation = residuals
    if weights_NK is None:
        return _BACKENDS[backend][0](dy_ND, _source(permutation)), None, None
    weight_R = _filled(weights_NK.reshape(-1), permutation.choice_R)
    drows_RD, dweight_R = _BACKENDS[backend][2](rows_RD, dy_ND, weight_R, _source(permutation))
    return drows_RD, _filled(dweight_R, permutation.place_NK).astype(weights_NK.dtype), None


_unpermute.defvjp(_unpermute_forward, _unpermute_backward)


def _source(permutation: Permutation) -> jax.Array:
    """The token of each row, N where the row is empty.  [R] int32"""
    return permutation.choice_R // permutation.place_NK.shape[1]


def _filled(x: jax.Array, index: jax.Array) -> jax.Array:
    """Entries of `x` by number, 0 where there is none.  Numbers are never negative."""
    return x.at[index].get(mode="fill", fill_value=0)


def _reference_combine(rows_RD, weights_NK, place_NK):
    total_ND = jnp.zeros((place_NK.shape[0], rows_RD.shape[1]), jnp.float32)
    for k in range(place_NK.shape[1]):
        row_ND = _filled(rows_RD, place_NK[:, k]).astype(jnp.float32)
        total_ND += row_ND if weights_NK is None else weights_NK[:, k, None] * row_ND
    return total_ND.astype(rows_RD.dtype)


def _reference_combine_gradients(rows_RD, dy_ND, weight_R, source_R):
    dy_RD = _filled(dy_ND, source_R).astype(jnp.float32)
    return (weight_R[:, None] * dy_RD).astype(rows_RD.dtype), jnp.sum(rows_RD.astype(jnp.float32) * dy_RD, axis=1)


# rows from tokens; tokens from rows; the gradients of the second
_BACKENDS = {
    "xla": (_filled, _reference_combine, _reference_combine_gradients),
    "pallas": (kernels.gather_rows, kernels.combine_rows, kernels.combine_gradients),
}
