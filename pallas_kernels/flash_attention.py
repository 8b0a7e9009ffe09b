"""Attention over packed rows that never holds the scores, forward and backward, in Pallas Triton.

The method is FlashAttention-2's (arXiv:2307.08691), over the tiles that `attention_blocks` leaves.  Nothing depends on
the order in which blocks run: results are the same bit for bit.

Dimensions: B rows, S queries, T keys, H query heads, G key heads, K head width of queries and keys, W that of values.

Roofline, for N visible pairs of a query and a key (those of visited tiles), and elements of e bytes:
  forward    2 N H (K + W) FLOPs, e (S H + T G) (K + W) + 4 S H bytes
  backward   2 N H (4 K + 3 W) FLOPs, scores and their gradient being formed twice;
             e (S H (3 K + 2 W) + 3 T G (K + W)) + 16 S H bytes
A single causal segment of 8192 tokens has thousands of FLOPs a byte, far above the 295 at which an H100's tensor cores
wait for its memory; windows of 64 patches are near it.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.attention_blocks import PackedMask
from pallas_kernels.flash_attention_kernels import (
    MASKED,
    Blocks,
    Shape,
    Tokens,
    flash_attention_backward_kv,
    flash_attention_backward_q,
    flash_attention_forward,
)
from pallas_kernels.head_blocks import padded
from pallas_kernels.on_platform import interpreted_on_cpu

__all__ = ["MASKED", "HeadTooWide", "flash_attention", "flash_attention_gradients", "output_delta"]


class HeadTooWide(ValueError):
    """A head whose blocks don't fit into the shared memory of a GPU."""


def flash_attention(
    q_BSHK: jax.Array, k_BTGK: jax.Array, v_BTGW: jax.Array, mask: PackedMask, *, scale: float | None = None
) -> tuple[jax.Array, jax.Array]:
    """softmax(scale q k^T) v over the keys that `mask` lets a query see, and the log-sum-exp of the scores.

    Softmax and sums are fp32.  A query that sees nothing gives 0 and `MASKED`, and no gradient.  Products of fp32
    inputs are as precise as JAX's setting says (`jax.default_matmul_precision`; by default TF32 on a GPU).  On the CPU
    the kernels are interpreted, which is slow.

    Args:
      q_BSHK, k_BTGK, v_BTGW: bfloat16 or float32, all of one dtype; H is a multiple of G.
      mask: `packed_mask` of these rows.
      scale: above 0; 1 / sqrt(K) by default.

    Returns:
      out_BSHW in the dtype of the inputs, and lse_BHS float32 in natural units.

    Raises:
      ValueError: shapes or dtypes that don't belong together, or heads too wide for a GPU's shared memory.
    """
    shape = _shape_of(q_BSHK, k_BTGK, v_BTGW, mask, scale)
    return _attention(shape, *_varying_alike(q_BSHK, k_BTGK, v_BTGW), mask)


def flash_attention_gradients(
    q_BSHK: jax.Array,
    k_BTGK: jax.Array,
    v_BTGW: jax.Array,
    mask: PackedMask,
    lse_BHS: jax.Array,
    dout_BSHW: jax.Array,
    delta_BHS: jax.Array,
    *,
    scale: float | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients (dq_BSHK, dk_BTGK, dv_BTGW) in the dtype of the inputs.

    `lse_BHS` and `delta_BHS` may be those of an attention over more keys than these: then the gradients are what these
    keys contribute, and those of q add up over the parts (ring attention, arXiv:2310.01889).

    Args:
      dout_BSHW: gradient of the output.
      delta_BHS: `output_delta` of the whole output, float32.
    """
    shape = _shape_of(q_BSHK, k_BTGK, v_BTGW, mask, scale)
    return _gradients(shape, q_BSHK, k_BTGK, v_BTGW, mask, lse_BHS, dout_BSHW, delta_BHS)


def output_delta(out_BSHW: jax.Array, dout_BSHW: jax.Array) -> jax.Array:
    """The sum over W of out * dout, by which the gradient goes back through softmax.  [B, H, S] float32"""
    return jnp.sum(out_BSHW.astype(jnp.float32) * dout_BSHW.astype(jnp.float32), axis=-1).swapaxes(1, 2)


class _Plan(NamedTuple):
    forward: Blocks
    backward_q: Blocks
    backward_kv: Blocks


# The most bytes that K + W elements, padded, may have for each plan.  In bfloat16 accumulators stay in the registers of
# an H100 and a B200, and no plan takes more shared memory than an A100 has.  Chosen by that alone, not yet by time.
_PLANS = {
    256: _Plan(Blocks(128, 64, 4, 3), Blocks(128, 64, 8, 3), Blocks(64, 128, 8, 3)),
    512: _Plan(Blocks(128, 64, 8, 3), Blocks(128, 64, 8, 3), Blocks(64, 128, 8, 3)),
    640: _Plan(Blocks(128, 64, 8, 2), Blocks(128, 64, 8, 2), Blocks(64, 64, 8, 3)),
    1024: _Plan(Blocks(64, 64, 8, 2), Blocks(64, 32, 8, 2), Blocks(32, 64, 8, 2)),
    1280: _Plan(Blocks(64, 32, 8, 2), Blocks(64, 32, 8, 2), Blocks(32, 64, 8, 2)),
}


def _plan(shape: Shape) -> _Plan:
    """Raises HeadTooWide where no plan is wide enough."""
    width = padded(shape.K) + padded(shape.W)
    for limit, plan in _PLANS.items():
        if width * shape.dtype.itemsize <= limit:
            return plan
    most = max(_PLANS) // shape.dtype.itemsize
    raise HeadTooWide(f"heads of {shape.K} and values of {shape.W} are {width} padded, at most {most} in {shape.dtype}")


def _shape_of(q, k, v, mask: PackedMask, scale: float | None) -> Shape:
    (B, S, H, K), (_, T, G, W) = q.shape, v.shape
    if k.shape != (B, T, G, K) or v.shape[0] != B or H % G or not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q {q.dtype}{q.shape}, k {k.dtype}{k.shape} and v {v.dtype}{v.shape} don't belong together")
    rows = mask.q_segments_BS.shape, mask.k_segments_BT.shape
    if rows != ((B, S), (B, T)):
        raise ValueError(f"the mask is for queries and keys {rows}, not {((B, S), (B, T))}")
    return Shape(B, S, T, H, G, K, W, q.dtype, K**-0.5 if scale is None else scale, mask.window)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(shape: Shape, q, k, v, mask):
    blocks = _plan(shape).forward
    return _run(flash_attention_forward, shape, blocks, mask, {"q": q, "k": k, "v": v}, ("out", "lse"))


def _attention_forward(shape, q, k, v, mask):
    out, lse = _attention(shape, q, k, v, mask)
    return (out, lse), (q, k, v, mask, out, lse)


def _attention_backward(shape, residuals, cotangents):
    q, k, v, mask, out, lse = residuals
    dout, dlse = cotangents
    # the gradient of a query's log-sum-exp by a score is the key's weight, so dlse enters as delta does
    return *_gradients(shape, q, k, v, mask, lse, dout, output_delta(out, dout) - dlse), None


_attention.defvjp(_attention_forward, _attention_backward)


def _gradients(shape: Shape, q, k, v, mask, lse, dout, delta):
    plan = _plan(shape)
    inputs = {"q": q, "k": k, "v": v, "out": dout, "lse": lse, "delta": delta}
    [dq] = _run(flash_attention_backward_q, shape, plan.backward_q, mask, inputs, ("q",))
    dk, dv = _run(flash_attention_backward_kv, shape, plan.backward_kv, mask, inputs, ("k", "v"), by_keys=True)
    return dq, dk, dv


def _run(
    kernel: Callable,
    shape: Shape,
    blocks: Blocks,
    mask: PackedMask,
    inputs: dict[str, jax.Array],
    outputs: Sequence[str],
    *,
    by_keys: bool = False,
) -> list[jax.Array]:
    """Runs a kernel for each row, query head and block of queries, or with `by_keys` key head and block of keys.

    A program is given whole rows of its heads, of which it reads blocks.  JAX counts their elements in 32 bits where an
    array has at most 4 GiB, which is enough for elements of two bytes or more, and in 64 bits where it has more.

    Args:
      inputs, outputs: arrays, or gradients of arrays, by name.
    """
    num_blocks = pl.cdiv(shape.T, blocks.keys) if by_keys else pl.cdiv(shape.S, blocks.queries)
    num_heads, q_heads = (shape.G, shape.R) if by_keys else (shape.H, None)

    def of_queries(width):
        return pl.BlockSpec((None, shape.S, q_heads, padded(width)), lambda block, head, row: (row, 0, head, 0))

    def of_keys(width):
        def index(block, head, row):
            return row, 0, head if by_keys else lax.div(head, shape.R), 0

        return pl.BlockSpec((None, shape.T, None, padded(width)), index)

    def whole_row(array):
        return pl.BlockSpec((None, *array.shape[1:]), lambda block, head, row: (row, *[0] * (array.ndim - 1)))

    of_values = pl.BlockSpec((None, q_heads, shape.S), lambda block, head, row: (row, head, 0))
    specs = {
        "q": of_queries(shape.K), "k": of_keys(shape.K), "v": of_keys(shape.W), "out": of_queries(shape.W),
        "lse": of_values, "delta": of_values,
    }  # fmt: skip
    B, S, T, H, G = shape.B, shape.S, shape.T, shape.H, shape.G
    shapes = {
        "q": (B, S, H, shape.K), "k": (B, T, G, shape.K), "v": (B, T, G, shape.W), "out": (B, S, H, shape.W),
        "lse": (B, H, S),
    }  # fmt: skip
    tokens = Tokens(mask.q_segments_BS, mask.k_segments_BT, mask.q_positions_BS, mask.k_positions_BT)
    table = (mask.q_order_BJI, mask.q_counts_BJ2) if by_keys else (mask.k_order_BIJ, mask.k_counts_BI2)

    vary = jax.typeof(inputs["q"]).manual_axis_type

    def run(tokens, table, *arrays, interpret):
        return pl.pallas_call(
            functools.partial(kernel, shape=shape, blocks=blocks),
            grid=(num_blocks, num_heads, B),
            in_specs=[*jax.tree.map(whole_row, (tokens, table)), *(specs[name] for name in inputs)],
            out_specs=[specs[name] for name in outputs],
            out_shape=[
                jax.ShapeDtypeStruct(shapes[name], jnp.float32 if name == "lse" else shape.dtype, manual_axis_type=vary)
                for name in outputs
            ],
            compiler_params=plgpu.CompilerParams(num_warps=blocks.num_warps, num_stages=blocks.num_stages),
            interpret=interpret,
            name=kernel.__name__,
        )(tokens, table, *arrays)

    return interpreted_on_cpu(run, tokens, table, *inputs.values())


def _varying_alike(*arrays: jax.Array) -> list[jax.Array]:
    """Arrays that vary along the same axes of a mesh, so that the gradients of those that didn't are summed there."""

    def axes(array) -> frozenset:
        return jax.typeof(array).manual_axis_type.varying

    union = frozenset[Any]().union(*map(axes, arrays))
    return [lax.pcast(array, tuple(union - axes(array)), to="varying") for array in arrays]
