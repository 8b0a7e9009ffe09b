"""Blocks of attention heads in a Triton kernel: reading, writing and multiplying them.

Triton's arrays have sizes that are powers of two, so a block [tokens, head width] is a tuple of pieces along the head
width, of 16 or more: 80 is 64 + 16, 192 is 128 + 64.  What lies outside of the array, past the last token or past the
head width (72 is 64 + 16 too), is read as zeros and not written.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.attention_blocks import TILE

_SMALLEST = 16  # of a factor of a tensor core's product

Pieces = Sequence[jax.Array]


def piece_widths(width: int) -> tuple[int, ...]:
    """One piece, or the largest power of two and another for what remains."""
    largest = max(_SMALLEST, 1 << (width.bit_length() - 1))
    if largest >= width:
        return (largest,)
    return largest, max(_SMALLEST, pl.next_power_of_2(width - largest))


def padded(width: int) -> int:
    """Width of all pieces."""
    return sum(piece_widths(width))


def load(ref, width: int, start, size: int, *, head=None, is_inside: bool = False) -> tuple[jax.Array, ...]:
    """Tokens start .. start + size of a reference [tokens, padded width], or [tokens, heads, padded width].

    `is_inside`: whether all of them are known to be in the array.
    """
    pieces = []
    for columns, mask in _pieces(ref.shape[0], width, start, size, is_inside):
        block = ref.at[pl.ds(start, size), columns] if head is None else ref.at[pl.ds(start, size), head, columns]
        pieces.append(plgpu.load(block, mask=mask, other=None if mask is None else 0.0))
    return tuple(pieces)


def store(ref, width: int, start, size: int, values: Pieces, *, head=None) -> None:
    """Writes what `load` reads, in the dtype of the reference."""
    for (columns, mask), value in zip(_pieces(ref.shape[0], width, start, size, False), values, strict=True):
        block = ref.at[pl.ds(start, size), columns] if head is None else ref.at[pl.ds(start, size), head, columns]
        plgpu.store(block, value.astype(ref.dtype), mask=mask)


def load_tokens(ref, start, size: int, *, head=None, is_inside: bool = False) -> jax.Array:
    """Tokens start .. start + size of a reference [tokens] or [heads, tokens]; zeros past the last."""
    block = ref.at[pl.ds(start, size)] if head is None else ref.at[head, pl.ds(start, size)]
    mask = None if is_inside else inside(ref.shape[-1], start, size)
    return plgpu.load(block, mask=mask, other=None if mask is None else 0)


def inside(length: int, start, size: int) -> jax.Array | None:
    """Which of the tokens are in an array of `length`; None where no tile ends outside, so no block.  [size] bool"""
    return None if length % TILE == 0 else start + jnp.arange(size) < length


def _pieces(length: int, width: int, start, size: int, is_inside: bool):
    """The columns of each piece, and which of its elements are in the array [size, piece width] (None for all)."""
    rows = None if is_inside else inside(length, start, size)
    first = 0
    for piece_width in piece_widths(width):
        mask = None if rows is None else jnp.broadcast_to(rows[:, None], (size, piece_width))
        if first + piece_width > width:
            columns = jnp.broadcast_to((first + jnp.arange(piece_width) < width)[None, :], (size, piece_width))
            mask = columns if mask is None else mask & columns
        yield pl.ds(first, piece_width), mask
        first += piece_width


def zeros(size: int, width: int) -> tuple[jax.Array, ...]:
    """Accumulators of a block, float32."""
    return tuple(jnp.zeros((size, piece_width), jnp.float32) for piece_width in piece_widths(width))


def product(a: Pieces, b: Pieces) -> jax.Array:
    """a b^T, summed over the head width.  [tokens of a, tokens of b] float32"""
    first, *others = (plgpu.dot(x, y, trans_b=True) for x, y in zip(a, b, strict=True))
    return sum(others, start=first)


def add_product(totals: Pieces, weights: jax.Array, values: Pieces) -> tuple[jax.Array, ...]:
    """totals + weights @ values, the weights in the dtype of the values."""
    weights = weights.astype(values[0].dtype)
    return tuple(total + plgpu.dot(weights, value) for total, value in zip(totals, values, strict=True))
