"""Rows of tokens to and from the order of their experts, in Pallas Triton: gathers in both directions, no atomics.

Dimensions: N tokens of width D, K choices of each, R rows.  Numbers of rows and tokens are int32; N for a row without a
token and R for a choice without a row stand for zeros.  Sums are fp32.

Roofline, for n rows that have a token and elements of e bytes; all are bound by memory:
  gather_rows         e D (n + R) bytes; no FLOPs
  combine_rows        e D (n + N) bytes, 2 n D FLOPs
  combine_gradients   e D (2 n + R) bytes, 3 n D FLOPs
On an H100 (3.35 TB/s), 131072 rows of 2048 in bfloat16 take 0.32 ms, 0.18 ms and 0.48 ms at the least.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.on_platform import interpreted_on_cpu

# Rows of a block, and the columns of it that are in registers at a time: 16 elements for each of 128 threads, two
# loads of 16 bytes in bfloat16.
ROWS, COLUMNS = 4, 512
_COMPILER = plgpu.CompilerParams(num_warps=4, num_stages=1)


def gather_rows(x_ND: jax.Array, source_R: jax.Array) -> jax.Array:
    """Row r is token source_R[r], or 0 where that is N.  [R, D] in the dtype of the tokens"""
    R, D = source_R.shape[0], x_ND.shape[1]
    [rows_RD] = _call("gather_rows", _gather_kernel, R, [source_R, x_ND], [jax.ShapeDtypeStruct((R, D), x_ND.dtype)])
    return rows_RD


def combine_rows(rows_RD: jax.Array, weights_NK: jax.Array | None, place_NK: jax.Array) -> jax.Array:
    """The sum over k of weights_NK[n, k] * rows_RD[place_NK[n, k]]; 0 for a place of R.  [N, D] in the rows' dtype

    Args:
      weights_NK: fp32; None for the plain sum.
    """
    (N, _), D = place_NK.shape, rows_RD.shape[1]
    [y_ND] = _call(
        "combine_rows", _combine_kernel, N, [place_NK, weights_NK, rows_RD],
        [jax.ShapeDtypeStruct((N, D), rows_RD.dtype)],
    )  # fmt: skip
    return y_ND


def combine_gradients(
    rows_RD: jax.Array, dy_ND: jax.Array, weight_R: jax.Array, source_R: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """What the gradient of `combine_rows`'s result gives each row, and each row's weight, in one pass.

    Args:
      dy_ND: in the dtype of the rows.
      weight_R: fp32, of the choice whose row it is; 0 where the row has no token.
      source_R: the token of each row, or N.

    Returns:
      weight_R[r] * dy_ND[source_R[r]] [R, D] in the dtype of the rows, written over them, which are lost; and the sum
      over D of rows_RD[r] * dy_ND[source_R[r]] [R] fp32, which means nothing where a row has no token.
    """
    R = rows_RD.shape[0]
    drows_RD, dweight_R = _call(
        "combine_gradients", _combine_gradients_kernel, R, [source_R, weight_R, dy_ND, rows_RD],
        [jax.ShapeDtypeStruct(rows_RD.shape, rows_RD.dtype), jax.ShapeDtypeStruct((R,), jnp.float32)], aliases={3: 0},
    )  # fmt: skip
    return drows_RD, dweight_R


def _gather_kernel(source_ref, x_ref, out_ref):
    row, exists_R = _own_rows(source_ref.shape[0])
    source_R = plgpu.load(source_ref.at[pl.ds(row, ROWS)], mask=exists_R, other=x_ref.shape[0])

    def step(columns, is_column_1C, _):
        x_RC = _gathered(x_ref, source_R, columns, is_column_1C)
        plgpu.store(out_ref.at[pl.ds(row, ROWS), columns], x_RC, mask=_both(exists_R, is_column_1C))

    _by_columns(x_ref.shape[1], step, None)


def _combine_kernel(place_ref, weights_ref, rows_ref, out_ref):
    (N, K), (R, D) = place_ref.shape, rows_ref.shape
    token, exists_N = _own_rows(N)
    here = pl.ds(token, ROWS)
    # numbers in a kernel, which the interpreter wants of an index
    choices = [jnp.int32(k) for k in range(K)]
    places = [plgpu.load(place_ref.at[here, k], mask=exists_N, other=R) for k in choices]
    if weights_ref is not None:
        weights = [plgpu.load(weights_ref.at[here, k], mask=exists_N, other=0.0) for k in choices]

    def step(columns, is_column_1C, _):
        total_NC = jnp.zeros((ROWS, COLUMNS), jnp.float32)
        for k, place_N in enumerate(places):
            row_NC = _gathered(rows_ref, place_N, columns, is_column_1C).astype(jnp.float32)
            total_NC += row_NC if weights_ref is None else weights[k][:, None] * row_NC
        mask = _both(exists_N, is_column_1C)
        plgpu.store(out_ref.at[here, columns], total_NC.astype(out_ref.dtype), mask=mask)

    _by_columns(D, step, None)


def _combine_gradients_kernel(source_ref, weight_ref, dy_ref, rows_ref, drows_ref, dweight_ref):
    N, D = dy_ref.shape
    row, exists_R = _own_rows(source_ref.shape[0])
    here = pl.ds(row, ROWS)
    source_R = plgpu.load(source_ref.at[here], mask=exists_R, other=N)
    weight_R1 = plgpu.load(weight_ref.at[here], mask=exists_R, other=0.0)[:, None]

    def step(columns, is_column_1C, dweight_R):
        mask = _both(exists_R, is_column_1C)
        dy_RC = _gathered(dy_ref, source_R, columns, is_column_1C).astype(jnp.float32)
        rows_RC = plgpu.load(rows_ref.at[here, columns], mask=mask, other=0.0).astype(jnp.float32)
        plgpu.store(drows_ref.at[here, columns], (weight_R1 * dy_RC).astype(drows_ref.dtype), mask=mask)
        return dweight_R + jnp.sum(rows_RC * dy_RC, axis=1)

    dweight_R = _by_columns(D, step, jnp.zeros((ROWS,), jnp.float32))
    plgpu.store(dweight_ref.at[here], dweight_R, mask=exists_R)


def _own_rows(num_rows: int):
    """The first row of the program's block, and which of its rows exist."""
    row = pl.program_id(0) * ROWS
    return row, row + jnp.arange(ROWS) < num_rows


def _by_columns(width: int, step: Callable, carry):
    """step(columns, which of them exist [1, COLUMNS], carry) for each part of a row."""

    def one(i, carry):
        first = i * COLUMNS
        return step(pl.ds(first, COLUMNS), (first + jnp.arange(COLUMNS) < width)[None, :], carry)

    return lax.fori_loop(0, pl.cdiv(width, COLUMNS), one, carry)


def _gathered(ref, index_R, columns, is_column_1C):
    """Rows of a reference [rows, width] by number; 0 where it isn't below the number of rows."""
    column_1C = (columns.start + jnp.arange(COLUMNS))[None, :]
    mask = _both(index_R < ref.shape[0], is_column_1C)
    return plgpu.load(ref.at[index_R[:, None], column_1C], mask=mask, other=0.0)


def _both(rows_R, columns_1C):
    return rows_R[:, None] & columns_1C


def _call(
    name: str, kernel: Callable, num_rows: int, arguments: list, out_shape: list, aliases: dict[int, int] | None = None
) -> list[jax.Array]:
    """Runs a kernel, which is given whole arrays, for each block of rows; interpreted on the CPU."""

    def run(*arguments, interpret):
        return pl.pallas_call(
            kernel, grid=(pl.cdiv(num_rows, ROWS),), out_shape=out_shape, input_output_aliases=aliases or {},
            compiler_params=_COMPILER, interpret=interpret, name=name,
        )(*arguments)  # fmt: skip

    return interpreted_on_cpu(run, *arguments)
