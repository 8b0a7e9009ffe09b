"""Products of rows, sorted by expert, with the weights of their experts, in Pallas Triton.

Dimensions: R rows, of which the first `sum(sizes_X)` belong to X experts in turn; D and F widths; V visits.

A visit is a tile of rows and an expert that has rows in it.  The table of visits is made from the sizes, so experts
without rows cost nothing, and a tile is read once for each expert in it.  What follows the last expert's rows is one
more group, whose visits write zeros.  No program waits for another, and nothing depends on their order: results are
the same bit for bit.

Roofline, for n rows that count and elements of e bytes; all three are bound by FLOPs from some 300 rows an expert on:
  grouped_products         2 n D F FLOPs for each stack; e (n D + X D F + R F) bytes at the least, the rows once
  grouped_products_sum     2 n D F FLOPs for each stack; e (n F + X D F + R D) bytes
  grouped_outer_products   2 n D F FLOPs for each; e (n D + n F + X D F) bytes
Rows that a tile shares among experts are computed once for each of them: X half tiles more on the average.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.on_platform import interpreted_on_cpu

_SMALLEST = 16  # side of a block, for tensor cores


class _Blocks(NamedTuple):
    """Rows and columns of a block of a result, and how much of the dimension that is summed is loaded at a time."""

    rows: int
    columns: int
    summed: int


def grouped_products(rows_RD: jax.Array, weights: Sequence[jax.Array], sizes_X: jax.Array) -> list[jax.Array]:
    """Each row times the matrix of its expert, for each of the stacks; rows past the last expert's give 0.

    Sums are fp32.  Products of fp32 inputs are as precise as JAX's setting says (`jax.default_matmul_precision`; by
    default TF32 on a GPU).  On the CPU the kernels are interpreted, which is slow.

    Args:
      rows_RD: bfloat16 or float32.
      weights: one or two stacks [X, D, F], in the dtype of the rows.
      sizes_X: int32, rows of each expert; their sum is at most R.

    Returns:
      [R, F] for each stack, in the dtype of the rows.
    """
    (R, D), (X, _, F) = rows_RD.shape, weights[0].shape
    _check(len(weights), [rows_RD, *weights], [(R, D), *[(X, D, F)] * len(weights)], sizes_X)
    # two blocks of results take the registers that one twice as wide does
    blocks = _blocks(R, F, D, rows_RD.dtype, 256 // len(weights))
    kernel = functools.partial(_products_kernel, num_experts=X, blocks=blocks)
    return _call(
        "grouped_products",
        kernel,
        (pl.cdiv(F, blocks.columns), _num_visits(R, X, blocks.rows)),
        [_visits(sizes_X, R, blocks.rows), rows_RD, tuple(weights)],
        [jax.ShapeDtypeStruct((R, F), rows_RD.dtype)] * len(weights),
    )


def grouped_products_sum(rows: Sequence[jax.Array], weights: Sequence[jax.Array], sizes_X: jax.Array) -> jax.Array:
    """The sum over the stacks of each row times its expert's matrix transposed: the gradient of `grouped_products`.

    Args:
      rows: [R, F] for each stack.
      weights: one or two stacks [X, D, F].
      sizes_X: as of `grouped_products`.

    Returns:
      [R, D] in the dtype of the rows; rows past the last expert's are 0.
    """
    (R, F), (X, D, _) = rows[0].shape, weights[0].shape
    _check(len(weights), [*rows, *weights], [(R, F)] * len(rows) + [(X, D, F)] * len(rows), sizes_X)
    blocks = _blocks(R, D, F, rows[0].dtype, 256)
    kernel = functools.partial(_products_sum_kernel, num_experts=X, blocks=blocks)
    [sum_RD] = _call(
        "grouped_products_sum",
        kernel,
        (pl.cdiv(D, blocks.columns), _num_visits(R, X, blocks.rows)),
        [_visits(sizes_X, R, blocks.rows), tuple(rows), tuple(weights)],
        [jax.ShapeDtypeStruct((R, D), rows[0].dtype)],
    )
    return sum_RD


def grouped_outer_products(rows_RD: jax.Array, others: Sequence[jax.Array], sizes_X: jax.Array) -> list[jax.Array]:
    """The sum over an expert's rows of row^T other, for each of the others: the gradient of the weights.

    Args:
      others: one or two of [R, F], in the dtype of the rows.
      rows_RD, sizes_X: as of `grouped_products`.

    Returns:
      [X, D, F] for each of the others, in the dtype of the rows; 0 for an expert without rows.
    """
    (R, D), F, X = rows_RD.shape, others[0].shape[1], sizes_X.shape[0]
    _check(len(others), [rows_RD, *others], [(R, D), *[(R, F)] * len(others)], sizes_X)
    blocks = _blocks(D, F, R, rows_RD.dtype, 256 // len(others))
    ends_X = jnp.cumsum(sizes_X, dtype=jnp.int32)
    return _call(
        "grouped_outer_products",
        functools.partial(_outer_products_kernel, blocks=blocks),
        (pl.cdiv(F, blocks.columns), pl.cdiv(D, blocks.rows), X),
        [jnp.stack((ends_X - sizes_X, ends_X), axis=1), rows_RD, tuple(others)],
        [jax.ShapeDtypeStruct((X, D, F), rows_RD.dtype)] * len(others),
    )


def _blocks(rows: int, columns: int, summed: int, dtype, most_columns: int) -> _Blocks:
    """Blocks of a result [rows, columns].

    With two blocks of columns where there are two stacks, a step of the sum loads 48 KiB, and three steps are on their
    way: 144 KiB of the 227 that an H100 and a B200 have, of an A100's 163.  Chosen by that alone, not yet by time.
    """

    def at_most(size, most):
        return max(_SMALLEST, min(most, pl.next_power_of_2(size)))

    return _Blocks(at_most(rows, 128), at_most(columns, most_columns), at_most(summed, 128 // dtype.itemsize))


# The accumulators are 128 registers of each of 256 threads.
_COMPILER = plgpu.CompilerParams(num_warps=8, num_stages=3)


def _num_visits(R, X, tile):
    """The most that there can be: one for each tile, and one more for each group, empty ones apart, after the first."""
    return pl.cdiv(R, tile) + X


def _visits(sizes_X: jax.Array, R: int, tile: int) -> jax.Array:
    """(tile, group, first and past the last row of the group) of each visit, in order.  [V, 4] int32

    Group X is that of the rows past the last expert's.  Where there are fewer visits the table ends with visits to a
    group without rows.
    """
    X = sizes_X.shape[0]
    ends_G = jnp.cumsum(jnp.append(sizes_X, R - jnp.sum(sizes_X)), dtype=jnp.int32)
    starts_G = jnp.append(0, ends_G[:-1])
    first_tile_G = starts_G // tile
    tiles_G = jnp.where(ends_G > starts_G, (ends_G - 1) // tile - first_tile_G + 1, 0)
    visits_end_G = jnp.cumsum(tiles_G)
    visit_V = jnp.arange(_num_visits(R, X, tile), dtype=jnp.int32)
    group_V = jnp.sum(visit_V[:, None] >= visits_end_G[None, :], axis=1, dtype=jnp.int32)
    is_visit_V, group_V = group_V <= X, jnp.minimum(group_V, X)
    tile_V = first_tile_G[group_V] + visit_V - (visits_end_G - tiles_G)[group_V]
    visits_V4 = jnp.stack((tile_V, group_V, starts_G[group_V], ends_G[group_V]), axis=1)
    return jnp.where(is_visit_V[:, None], visits_V4, jnp.array([0, X, 0, 0])).astype(jnp.int32)


def _products_kernel(visits_ref, rows_ref, weights_refs, *out_refs, num_experts: int, blocks: _Blocks):
    tile, expert, num_steps, is_own_R1 = _visit(visits_ref, rows_ref.shape[1], num_experts, blocks)
    row, column = tile * blocks.rows, pl.program_id(0) * blocks.columns

    def step(i, sums):
        summed = i * blocks.summed
        rows = _load(rows_ref, (row, blocks.rows), (summed, blocks.summed))
        return tuple(
            total + plgpu.dot(rows, _load(ref, (summed, blocks.summed), (column, blocks.columns), expert=expert))
            for total, ref in zip(sums, weights_refs, strict=True)
        )

    zeros = jnp.zeros((blocks.rows, blocks.columns), jnp.float32)
    sums = lax.fori_loop(0, num_steps, step, (zeros,) * len(out_refs))
    for ref, total in zip(out_refs, sums, strict=True):
        _store(ref, (row, blocks.rows), (column, blocks.columns), total, mask=is_own_R1)


def _products_sum_kernel(visits_ref, rows_refs, weights_refs, out_ref, *, num_experts: int, blocks: _Blocks):
    tile, expert, num_steps, is_own_R1 = _visit(visits_ref, rows_refs[0].shape[1], num_experts, blocks)
    row, column = tile * blocks.rows, pl.program_id(0) * blocks.columns
    total = jnp.zeros((blocks.rows, blocks.columns), jnp.float32)
    for rows_ref, weights_ref in zip(rows_refs, weights_refs, strict=True):

        def step(i, total, rows_ref=rows_ref, weights_ref=weights_ref):
            summed = i * blocks.summed
            rows = _load(rows_ref, (row, blocks.rows), (summed, blocks.summed))
            weights = _load(weights_ref, (column, blocks.columns), (summed, blocks.summed), expert=expert)
            return total + plgpu.dot(rows, weights, trans_b=True)

        total = lax.fori_loop(0, num_steps, step, total)
    _store(out_ref, (row, blocks.rows), (column, blocks.columns), total, mask=is_own_R1)


def _outer_products_kernel(ends_ref, rows_ref, others_refs, *out_refs, blocks: _Blocks):
    expert = pl.program_id(2)
    start, end = ends_ref[expert, 0], ends_ref[expert, 1]
    column, other_column = pl.program_id(1) * blocks.rows, pl.program_id(0) * blocks.columns

    def step(i, sums):
        row = start + i * blocks.summed
        is_own_R1 = (row + jnp.arange(blocks.summed) < end)[:, None]
        rows = _load(rows_ref, (row, blocks.summed), (column, blocks.rows), mask=is_own_R1)
        return tuple(
            total
            + plgpu.dot(
                rows,
                _load(ref, (row, blocks.summed), (other_column, blocks.columns), mask=is_own_R1),
                trans_a=True,
            )
            for total, ref in zip(sums, others_refs, strict=True)
        )

    zeros = jnp.zeros((blocks.rows, blocks.columns), jnp.float32)
    sums = lax.fori_loop(0, pl.cdiv(end - start, blocks.summed), step, (zeros,) * len(out_refs))
    for ref, total in zip(out_refs, sums, strict=True):
        _store(ref, (column, blocks.rows), (other_column, blocks.columns), total, expert=expert)


def _visit(visits_ref, width: int, num_experts: int, blocks: _Blocks):
    """(tile, expert, steps of the sum, which rows of the tile belong to the group [rows, 1]) of the program's visit."""
    visit = pl.program_id(1)
    tile, group, start, end = (visits_ref[visit, i] for i in range(4))
    row_R1 = (tile * blocks.rows + jnp.arange(blocks.rows))[:, None]
    num_steps = jnp.where(group < num_experts, jnp.int32(pl.cdiv(width, blocks.summed)), jnp.int32(0))
    return tile, group, num_steps, (row_R1 >= start) & (row_R1 < end)


_Part = tuple[Any, int]  # the first, and how many, of a dimension


def _load(ref, rows: _Part, columns: _Part, *, expert=None, mask=None) -> jax.Array:
    """A block of a reference [rows, columns] or [experts, rows, columns]; 0 outside of it, and where `mask` is False.

    `mask` [rows, 1] is False outside.
    """
    block, mask = _block(ref, rows, columns, expert, mask)
    return plgpu.load(block, mask=mask, other=None if mask is None else 0.0)


def _store(ref, rows: _Part, columns: _Part, value, *, expert=None, mask=None) -> None:
    block, mask = _block(ref, rows, columns, expert, mask)
    plgpu.store(block, value.astype(ref.dtype), mask=mask)


def _block(ref, rows: _Part, columns: _Part, expert, mask_R1):
    num_rows, num_columns = ref.shape[-2:]
    masks = [] if mask_R1 is None else [mask_R1]
    if mask_R1 is None and num_rows % rows[1]:
        masks.append((rows[0] + jnp.arange(rows[1]) < num_rows)[:, None])
    if num_columns % columns[1]:
        masks.append((columns[0] + jnp.arange(columns[1]) < num_columns)[None, :])
    mask = jnp.broadcast_to(functools.reduce(jnp.logical_and, masks), (rows[1], columns[1])) if masks else None
    here = pl.ds(*rows), pl.ds(*columns)
    return ref.at[here if expert is None else (expert, *here)], mask


def _call(name: str, kernel: Callable, grid: tuple[int, ...], arguments: list, out_shape: list) -> list[jax.Array]:
    """Runs a kernel that is given whole arrays; interpreted on the CPU."""

    def run(*arguments, interpret):
        return pl.pallas_call(
            kernel, grid=grid, out_shape=out_shape, compiler_params=_COMPILER, interpret=interpret, name=name
        )(*arguments)

    return interpreted_on_cpu(run, *arguments)


def _check(num_stacks: int, arrays: Sequence[jax.Array], shapes: Sequence[tuple[int, ...]], sizes_X) -> None:
    found = [array.shape for array in arrays]
    if num_stacks > 2 or found != list(shapes) or len({array.dtype for array in arrays}) > 1 or sizes_X.ndim != 1:
        described = ", ".join(f"{array.dtype}{list(array.shape)}" for array in arrays)
        raise ValueError(f"{described} and sizes {list(sizes_X.shape)} don't belong together")
