"""Sums over the pipeline's stages, of values in the compute dtype.

XLA's CPU compiler aborts the process on a bfloat16 all-reduce or reduce-scatter over an axis that is manual where
others are automatic ("Invalid binary instruction opcode copy", jax 0.12.0.1); there the sum is taken in fp32.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from jaxforge.cluster.mesh import STAGE


def is_cpu(mesh: Mesh) -> bool:
    return mesh.devices.flat[0].platform == "cpu"


def sum_over_stages(x: jax.Array, on_cpu: bool) -> jax.Array:
    """The sum, on every stage."""
    wide = x.astype(jnp.float32) if on_cpu else x
    return lax.psum(wide, STAGE).astype(x.dtype)


def sum_scattered_over_stages(x: jax.Array, dimension: int, on_cpu: bool) -> jax.Array:
    """The sum, a part of `dimension` on each stage."""
    wide = x.astype(jnp.float32) if on_cpu else x
    return lax.psum_scatter(wide, STAGE, scatter_dimension=dimension, tiled=True).astype(x.dtype)
