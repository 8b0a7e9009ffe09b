"""How the vision encoder lies under the decoder's layout.

Hetero tensor parallelism: the decoder's tensor group is tensor_outer x tensor_inner; the encoder shards over
tensor_inner alone and is replicated over tensor_outer.  Encoder hetero DP: each device of the tensor group encodes
other images, with the whole encoder.  Full hetero DP: each device of the stage x tensor group does.

In the hetero DP modes, and with a pipeline, the encoder runs apart from the decoder: all images of the step are encoded
first, into a table of visual tokens that the decoder's lookups read; when the decoder is done, the gradient of the
table goes back through the encoder, which is computed again a round at a time.  A table that several devices have made
stays sharded over them: a lookup sums over tensor as that of the vocabulary does, and its gradient comes back
scattered.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jaxforge.cluster.mesh import STAGE, TENSOR_AXES, large_axes
from jaxforge.ops.placement import SINGLE_DEVICE, Placement
from jaxforge.ops.sharded_weight import differentiable, with_differentiable
from jaxforge.optim.paths import join
from jaxforge.parallel.data import whole_but_layers
from jaxforge.parallel.rules import SHARDED_OVER_TENSOR
from jaxforge.parallel.stage_sums import is_cpu, sum_over_stages, sum_scattered_over_stages

Tree = Any
ENCODER_MODULES = ("encoder", "projector")


def encoder_placement(divided_axes: tuple[str, ...] = ()) -> Placement:
    """The encoder's and the projector's view of the mesh.  Islands are manual over both tensor axes.

    Where devices encode different images (`divided_axes`), each computes as if it were alone.
    """
    if divided_axes:
        return SINGLE_DEVICE
    return Placement(tuple((name, ("tensor_inner",)) for name in SHARDED_OVER_TENSOR), TENSOR_AXES)


@dataclasses.dataclass(frozen=True)
class EncoderPhase:
    """Encodes all images of a step, and takes the gradient back; called in a region that is manual over stage.

    Patch arrays are [K, G, P, ...]: K rounds, in each of which G rows of patches are encoded.  A table of visual tokens
    is {"tokens": [T, X, D]} and with DeepStack {"features": [J, T, X, D]}: T is the tensor group where devices encode
    different images, else 1, and a row's number counts through T and X.

    Attributes:
      encode: (parameters, patch arrays [B, P, ...]) -> visual tokens [B, N, D], features [J, B, N, D] or None.
      mesh: the devices.
      patches_per_token: patches that become one visual token.
      divided_axes: the mesh axes whose devices encode different images: none, TENSOR_AXES, or stage and these.
    """

    encode: Callable[[Tree, Tree], tuple[jax.Array, jax.Array | None]]
    mesh: Mesh
    patches_per_token: int
    divided_axes: tuple[str, ...] = ()

    def forward(self, parameters: Tree, patches: Tree) -> Tree:
        """The table, whole along stage."""

        def rounds(parameters, patches):
            _, tables = lax.scan(lambda _, one: (None, self._table(parameters, one)), None, patches)
            return {name: _rounds_joined(name, rows) for name, rows in tables.items()}

        out_specs = _table_specs(self._names(parameters, patches))
        table = self._by_device(rounds, [PartitionSpec(), _rows_spec()], out_specs)(parameters, patches)
        if STAGE in large_axes(self.mesh, self.divided_axes):
            table = {name: lax.all_gather(rows, STAGE, axis=rows.ndim - 2, tiled=True) for name, rows in table.items()}
        return table

    def backward(self, trainable: Tree, frozen: Tree, patches: Tree, dtable: Tree) -> Tree:
        """fp32 gradients of `trainable`, summed over the tensor group; `dtable` is this stage's part of the table's.

        Where stages encode different images, each stage's are of its own.
        """
        if self.mesh.shape[STAGE] > 1:
            if STAGE in self.divided_axes:
                dtable = {
                    name: sum_scattered_over_stages(rows, rows.ndim - 2, is_cpu(self.mesh))
                    for name, rows in dtable.items()
                }
            else:  # then every stage encodes all, and finds the same gradients
                dtable = {name: sum_over_stages(rows, is_cpu(self.mesh)) for name, rows in dtable.items()}

        def rounds(trainable, frozen, patches, dtable):
            rounds_and_rows = jax.tree.leaves(patches)[0].shape[:2]
            drounds = {name: _rounds_apart(name, rows, *rounds_and_rows) for name, rows in dtable.items()}

            variables = differentiable(trainable)

            def one(sums, patches_and_gradient):
                patches, dtable = patches_and_gradient

                def encode(variables):
                    return self._table(join(with_differentiable(trainable, variables), frozen), patches)

                table, vjp = jax.vjp(encode, variables)
                dtable = jax.tree.map(lambda d, rows: d.astype(rows.dtype), dtable, table)
                return jax.tree.map(lambda a, b: a + b.astype(a.dtype), sums, vjp(dtable)[0]), None

            zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), variables)
            sums, _ = lax.scan(one, zeros, (patches, drounds))
            tensor = large_axes(self.mesh, TENSOR_AXES) if self.divided_axes else ()
            return lax.psum(sums, tensor) if tensor else sums

        specs = [PartitionSpec(), PartitionSpec(), _rows_spec(), _table_specs(dtable)]
        return self._by_device(rounds, specs, PartitionSpec())(trainable, frozen, patches, dtable)

    def visual_tokens(self, patches: Tree) -> int:
        """Visual tokens of a row of patches, padding included."""
        return patches["patch_segments"].shape[-1] // self.patches_per_token

    def _table(self, parameters: Tree, patches: Tree) -> Tree:
        tokens_BND, features_JBND = self.encode(whole_but_layers(parameters), patches)
        return {"tokens": tokens_BND} | ({} if features_JBND is None else {"features": features_JBND})

    def _names(self, parameters: Tree, patches: Tree) -> Tree:
        one = jax.tree.map(lambda a: a[0], patches)
        return jax.eval_shape(self._table, parameters, one)

    def _by_device(self, f: Callable, in_specs: list, out_specs: Any) -> Callable:
        """`f` on every device of the tensor group by itself, where they encode different images."""
        if not self.divided_axes:
            return f
        return jax.shard_map(
            f, in_specs=tuple(in_specs), out_specs=out_specs, axis_names=set(TENSOR_AXES), check_vma=False
        )


def _rows_spec() -> PartitionSpec:
    return PartitionSpec(None, TENSOR_AXES)


def _table_specs(table: Tree) -> Tree:
    return {name: PartitionSpec(*(None,) * (name == "features"), TENSOR_AXES) for name in table}


def _rounds_joined(name: str, rows: jax.Array) -> jax.Array:
    """[K, G, N, D] as [1, K G N, D], and [K, J, G, N, D] as [J, 1, K G N, D]."""
    if name == "features":
        rows = jnp.moveaxis(rows, 1, 0)
        return rows.reshape(rows.shape[0], 1, -1, rows.shape[-1])
    return rows.reshape(1, -1, rows.shape[-1])


def _rounds_apart(name: str, rows: jax.Array, num_rounds: int, num_rows: int) -> jax.Array:
    """The inverse of `_rounds_joined`."""
    if name == "features":
        rows = rows.reshape(rows.shape[0], num_rounds, num_rows, -1, rows.shape[-1])
        return jnp.moveaxis(rows, 1, 0)
    return rows.reshape(num_rounds, num_rows, -1, rows.shape[-1])
