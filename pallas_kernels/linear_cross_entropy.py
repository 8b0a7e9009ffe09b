"""The elementwise half of the fused linear cross-entropy, in Pallas Triton; its matmuls are XLA's.

Logits are fp32 and vocabulary-major, [V, T]: V rows of the head's shard, T tokens.  So neighbouring threads read
neighbouring tokens, each has the running maximum and sum of its own tokens, and none waits for another before the end.

Roofline, for V T logits; both kernels are bound by memory:
  token_statistics  4 V T bytes read, about 12 V T FLOPs and an exponential each
  dlogits_in_place  4 V T bytes read and 4 V T written, about 6 V T FLOPs and an exponential each
On an H100 (3.35 TB/s), 16384 x 129280 logits take 2.5 ms and 5.1 ms at the least; their three matmuls of width 7168
take 92 ms.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

# Finite: the difference of two stays a number.
MASKED = -1e30
# Tokens of a block, and the rows of it that are in registers at a time: 16 logits for each of 128 threads.
TOKENS, ROWS = 128, 16
# Rows that one program works through.
STATISTICS_ROWS, DLOGITS_ROWS = 512, 128
_COMPILER = plgpu.CompilerParams(num_warps=4, num_stages=1)


def token_statistics(
    logits_VT: jax.Array, targets_T: jax.Array, num_rows: jax.Array, *, softcap: float | None, interpret: bool = False
) -> jax.Array:
    """Of blocks of 512 rows, each token's largest logit, sum of exp(logit - largest), and its target's logit or 0.

    The sums are the online softmax's (Milakov and Gimelshein 2018, arXiv:1805.02867), with one exponential a logit.

    Args:
      logits_VT: fp32, before the softcap.
      targets_T: int32 row of each token's target, counted from the first row here; any other number where it isn't
        here.
      num_rows: int32 scalar, at most V: rows from this one on only pad the vocabulary and count as -1e30.
      softcap: logits become softcap * tanh(logits / softcap); None leaves them.

    Returns:
      [ceil(V / 512), 3, T] fp32.
    """
    V, T = logits_VT.shape
    _check_size(V, T)
    num_blocks = pl.cdiv(V, STATISTICS_ROWS)
    return pl.pallas_call(
        functools.partial(_statistics_kernel, softcap=softcap, num_tokens=T),
        grid=(pl.cdiv(T, TOKENS), num_blocks),
        in_specs=[
            pl.BlockSpec((STATISTICS_ROWS, TOKENS), lambda t, v: (v, t)),
            pl.BlockSpec((TOKENS,), lambda t, v: (t,)),
            pl.BlockSpec((1,), lambda t, v: (0,)),
        ],
        out_specs=pl.BlockSpec((None, 3, TOKENS), lambda t, v: (v, 0, t)),
        out_shape=jax.ShapeDtypeStruct((num_blocks, 3, T), jnp.float32),
        compiler_params=_COMPILER,
        interpret=interpret,
        name="token_statistics",
    )(logits_VT, targets_T, jnp.reshape(num_rows, 1))


def dlogits_in_place(
    logits_VT: jax.Array,
    targets_T: jax.Array,
    num_rows: jax.Array,
    coefficients_3T: jax.Array,
    *,
    softcap: float | None,
    interpret: bool = False,
) -> jax.Array:
    """exp(logit - lse) * scale - weight * (row is the target), through the softcap; 0 for rows that pad.  [V, T] fp32.

    Written over the logits, which are lost.

    Args:
      coefficients_3T: fp32 (lse, scale, weight) of each token.
      others: as of `token_statistics`.
    """
    V, T = logits_VT.shape
    _check_size(V, T)
    logits_spec = pl.BlockSpec((DLOGITS_ROWS, TOKENS), lambda t, v: (v, t))
    return pl.pallas_call(
        functools.partial(_dlogits_kernel, softcap=softcap, num_logit_rows=V, num_tokens=T),
        grid=(pl.cdiv(T, TOKENS), pl.cdiv(V, DLOGITS_ROWS)),
        in_specs=[
            logits_spec,
            pl.BlockSpec((TOKENS,), lambda t, v: (t,)),
            pl.BlockSpec((1,), lambda t, v: (0,)),
            pl.BlockSpec((3, TOKENS), lambda t, v: (0, t)),
        ],
        out_specs=logits_spec,
        out_shape=jax.ShapeDtypeStruct((V, T), jnp.float32),
        input_output_aliases={0: 0},
        compiler_params=_COMPILER,
        interpret=interpret,
        name="dlogits_in_place",
    )(logits_VT, targets_T, jnp.reshape(num_rows, 1), coefficients_3T)


def _statistics_kernel(logits_ref, targets_ref, num_rows_ref, out_ref, *, softcap, num_tokens):
    first_row = pl.program_id(1) * STATISTICS_ROWS
    is_token_T = pl.program_id(0) * TOKENS + jnp.arange(TOKENS) < num_tokens
    target_T = plgpu.load(targets_ref, mask=is_token_T, other=-1)
    num_rows = num_rows_ref[0]

    def step(i, carry):
        max_RT, sum_RT, target_RT = carry
        row_R = first_row + i * ROWS + jnp.arange(ROWS)
        counts_RT = (row_R < num_rows)[:, None] & is_token_T[None, :]
        x_RT = plgpu.load(logits_ref.at[pl.ds(i * ROWS, ROWS), :], mask=counts_RT, other=0.0)
        x_RT = jnp.where(counts_RT, _capped(x_RT, softcap), MASKED)
        # the larger of the old maximum and the new logit has the exponential 1
        above_RT = x_RT - max_RT
        other_RT = jnp.exp(-jnp.abs(above_RT))
        sum_RT = jnp.where(above_RT > 0, sum_RT * other_RT + 1, sum_RT + other_RT)
        is_target_RT = (row_R[:, None] == target_T[None, :]) & counts_RT
        return jnp.maximum(max_RT, x_RT), sum_RT, target_RT + jnp.where(is_target_RT, x_RT, 0.0)

    zeros_RT = jnp.zeros((ROWS, TOKENS), jnp.float32)
    carry = (zeros_RT + MASKED, zeros_RT, zeros_RT)
    max_RT, sum_RT, target_RT = lax.fori_loop(0, STATISTICS_ROWS // ROWS, step, carry)
    max_T = jnp.max(max_RT, axis=0)
    sum_T = jnp.sum(sum_RT * jnp.exp(max_RT - max_T[None, :]), axis=0)
    for i, statistic_T in enumerate((max_T, sum_T, jnp.sum(target_RT, axis=0))):
        plgpu.store(out_ref.at[pl.ds(i, 1), :], statistic_T[None, :], mask=is_token_T[None, :])


def _dlogits_kernel(
    logits_ref, targets_ref, num_rows_ref, coefficients_ref, out_ref, *, softcap, num_logit_rows, num_tokens
):
    first_row = pl.program_id(1) * DLOGITS_ROWS
    is_token_T = pl.program_id(0) * TOKENS + jnp.arange(TOKENS) < num_tokens
    target_T = plgpu.load(targets_ref, mask=is_token_T, other=-1)
    lse_1T, scale_1T, weight_1T = (
        plgpu.load(coefficients_ref.at[pl.ds(i, 1), :], mask=is_token_T[None, :], other=0.0) for i in range(3)
    )
    num_rows = num_rows_ref[0]

    def step(i, _):
        here = (pl.ds(i * ROWS, ROWS), slice(None))
        row_R = first_row + i * ROWS + jnp.arange(ROWS)
        counts_RT = (row_R < num_rows)[:, None] & is_token_T[None, :]
        raw_RT = plgpu.load(logits_ref.at[here], mask=counts_RT, other=0.0)
        x_RT = _capped(raw_RT, softcap)
        is_target_RT = row_R[:, None] == target_T[None, :]
        d_RT = jnp.exp(x_RT - lse_1T) * scale_1T - jnp.where(is_target_RT, weight_1T, 0.0)
        if softcap is not None:
            d_RT = d_RT * (1 - (x_RT / softcap) ** 2)
        exists_RT = (row_R < num_logit_rows)[:, None] & is_token_T[None, :]
        plgpu.store(out_ref.at[here], jnp.where(counts_RT, d_RT, 0.0), mask=exists_RT)

    lax.fori_loop(0, DLOGITS_ROWS // ROWS, step, None)


def _capped(x, softcap):
    return x if softcap is None else softcap * jnp.tanh(x / softcap)


def _check_size(V, T):
    if V * T >= 2**31:
        raise ValueError(f"{V} x {T} logits: a kernel counts them in int32; take fewer tokens at a time")
