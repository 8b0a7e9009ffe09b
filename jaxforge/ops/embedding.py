"""Lookups by data: vocabulary-parallel embedding and row gathers.

Each is a manual island over tensor, because the partitioner aborts on a gather inside a partly manual region.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxforge.ops.placement import Placement


def embed(table_VD: jax.Array, ids_BS: jax.Array, placement: Placement) -> jax.Array:
    """Rows of a table whose vocabulary may be sharded.  Returns [B, S, D], S sharded under sequence parallelism."""
    axes = placement.axes("vocab")
    scatter = bool(placement.axes("residual_sequence"))

    def local(table_vD, ids_BS):
        num_rows = table_vD.shape[0]
        local_BS = ids_BS - lax.axis_index(axes) * num_rows
        inside_BS = (local_BS >= 0) & (local_BS < num_rows)
        x_BSD = jnp.where(inside_BS[..., None], table_vD[jnp.where(inside_BS, local_BS, 0)], 0)
        if scatter:
            return lax.psum_scatter(x_BSD, axes, scatter_dimension=1, tiled=True)
        return lax.psum(x_BSD, axes)

    out_names = (None, "residual_sequence", None)
    return placement.island(local, [("vocab", None), (None, None)], out_names)(table_VD, ids_BS)


def gather_rows(x_BND: jax.Array, index_BS: jax.Array, placement: Placement) -> jax.Array:
    """x[b, index[b, s]], and 0 where the index is negative.  Returns [B, S, D] with D sharded over tensor."""

    def local(x_BNd, index_BS):
        rows_BSd = jnp.take_along_axis(x_BNd, jnp.maximum(index_BS, 0)[..., None], axis=1)
        return jnp.where((index_BS >= 0)[..., None], rows_BSd, 0)

    names = (None, None, "width")
    return placement.island(local, [names, (None, None)], names)(x_BND, index_BS)


def table_rows(table_GXD: jax.Array, index_BS: jax.Array, placement: Placement) -> jax.Array:
    """Row `index` of a table whose rows are counted through G and X, and 0 where the index is negative.

    G may be sharded over tensor ("visual_rows").  Returns [B, S, D], S sharded under sequence parallelism.
    """
    axes = placement.axes("visual_rows")
    scatter = bool(axes and placement.axes("residual_sequence"))

    def local(table_gXD, index_BS):
        table_TD = table_gXD.reshape(-1, table_gXD.shape[-1])
        local_BS = index_BS - lax.axis_index(axes) * table_TD.shape[0]
        inside_BS = (index_BS >= 0) & (local_BS >= 0) & (local_BS < table_TD.shape[0])
        x_BSD = jnp.where(inside_BS[..., None], table_TD[jnp.where(inside_BS, local_BS, 0)], 0)
        if scatter:
            return lax.psum_scatter(x_BSD, axes, scatter_dimension=1, tiled=True)
        return lax.psum(x_BSD, axes)

    out_names = (None, "residual_sequence" if scatter else None, None)
    in_names = [("visual_rows", None, None), (None, None)]
    return placement.island(local, in_names, out_names)(table_GXD, index_BS)


def weighted_rows(table_ND: jax.Array, index_BPJ: jax.Array, weight_BPJ: jax.Array, placement: Placement) -> jax.Array:
    """Sum over j of weight[b, p, j] * table[index[b, p, j]].  Returns [B, P, D] with D sharded over tensor."""

    def local(table_Nd, index_BPJ, weight_BPJ):
        rows_BPJd = table_Nd[index_BPJ]
        return jnp.sum(rows_BPJd * weight_BPJ[..., None].astype(rows_BPJd.dtype), axis=2)

    per_patch = (None, None, None)
    island = placement.island(local, [(None, "width"), per_patch, per_patch], (None, None, "width"))
    return island(table_ND, index_BPJ, weight_BPJ)
