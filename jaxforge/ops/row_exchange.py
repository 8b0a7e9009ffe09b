"""Rows exchanged between devices, as many from each to each as a table of sizes says.

On GPU the rows go as they are, by XLA's ragged all-to-all.  XLA's CPU compiler has none: there each pair of devices
exchanges as many rows as there could be at the most, and the result is the same.

Between hosts XLA's GPU compiler would by default gather whole buffers of all hosts instead (jax 0.12.0.1); a program
that exchanges there sets its option xla_gpu_unsupported_enable_ragged_all_to_all_multi_host_decomposer to false.

P devices, S rows to send, R rows of the result.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from jaxforge.ops.device_group import DeviceGroup


def exchange(
    rows_SD: jax.Array, sizes_PP: jax.Array, group: DeviceGroup, num_rows_out: int, *, ragged: bool
) -> jax.Array:
    """Sends rows to the devices of a group.  Returns [num_rows_out, D].

    Rows for device 0 come first, then those for device 1, and so on; in the result those of source 0 come first.  Rows
    behind the last one are ignored, and are 0 in the result.  The gradient is the exchange in the other direction.

    Args:
      rows_SD: of any dtype; integers have no gradient.
      sizes_PP: int32, rows from each source (first dimension) to each destination, by their place in the group; the
        same on every device of it.  A device must not send more than S rows, nor get more than `num_rows_out`.
      ragged: use the ragged all-to-all.
    """
    if not jnp.issubdtype(rows_SD.dtype, jnp.floating):
        return _move(rows_SD, sizes_PP, group, num_rows_out, ragged)
    return _exchange(group, rows_SD.shape[0], num_rows_out, ragged, rows_SD, sizes_PP)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _exchange(group, num_rows_in, num_rows_out, ragged, rows_SD, sizes_PP):
    return _move(rows_SD, sizes_PP, group, num_rows_out, ragged)


def _exchange_forward(group, num_rows_in, num_rows_out, ragged, rows_SD, sizes_PP):
    return _move(rows_SD, sizes_PP, group, num_rows_out, ragged), sizes_PP


def _exchange_backward(group, num_rows_in, num_rows_out, ragged, sizes_PP, drows_RD):
    return _move(drows_RD, sizes_PP.T, group, num_rows_in, ragged), None


_exchange.defvjp(_exchange_forward, _exchange_backward)


def _move(rows_SD, sizes_PP, group, num_rows_out, ragged):
    rank = group.index()
    send_P, receive_P = sizes_PP[rank], sizes_PP[:, rank]
    if not ragged:
        return _move_padded(rows_SD, send_P, receive_P, group, num_rows_out)
    # where this device's rows begin on each destination: behind those of the sources before it
    begin_P = (jnp.cumsum(sizes_PP, axis=0, dtype=jnp.int32) - sizes_PP)[rank]
    output_RD = jnp.zeros((num_rows_out, rows_SD.shape[1]), rows_SD.dtype)
    return lax.ragged_all_to_all(
        rows_SD, output_RD, _starts(send_P), send_P, begin_P, receive_P,
        axis_name=group.axes, axis_index_groups=group.index_groups,
    )  # fmt: skip


def _move_padded(rows_SD, send_P, receive_P, group, num_rows_out):
    """A block of M rows for each pair of devices: M is the most that one device may send to another."""
    block = min(rows_SD.shape[0], num_rows_out)
    # a block's rows are followed by those of the next destination, which the receiver leaves alone
    index_PM = _starts(send_P)[:, None] + jnp.arange(block, dtype=jnp.int32)
    blocks_PMD = rows_SD.at[index_PM].get(mode="fill", fill_value=0)
    blocks_PMD = lax.all_to_all(
        blocks_PMD, group.axes, split_axis=0, concat_axis=0, axis_index_groups=group.index_groups, tiled=True
    )
    row_R = jnp.arange(num_rows_out, dtype=jnp.int32)
    source_R = jnp.searchsorted(jnp.cumsum(receive_P), row_R, side="right").astype(jnp.int32)  # P behind the last row
    index_R = row_R - _starts(receive_P).at[source_R].get(mode="clip")
    return blocks_PMD.at[source_R, index_R].get(mode="fill", fill_value=0)


def _starts(sizes_P):
    return jnp.cumsum(sizes_P, dtype=jnp.int32) - sizes_P
