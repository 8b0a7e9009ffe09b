"""How the rows of an optimizer step lie on the devices: shapes and shardings, and arrays put there."""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxforge.cluster.mesh import DATA_AXES, TENSOR_AXES
from jaxforge.config.derived import encoder_group
from jaxforge.config.errors import ConfigError
from jaxforge.config.schema import Config
from jaxforge.data.encoder_division import divide, num_rounds
from jaxforge.data.rows import PATCH_KEYS, RowFormat

Batch = dict[str, jax.Array]


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """The sharding of arrays [M, B, ...] that aren't divided: rows over data parallel ranks, the rest replicated."""
    return NamedSharding(mesh, PartitionSpec(None, DATA_AXES))


class LocalBatch(NamedTuple):
    """What one process has of a batch.

    Attributes:
      arrays: in the second dimension those columns that its devices hold (`BatchLayout.columns`), in increasing order.
      encoder_load: where images are divided, the patches of the most loaded device over the mean of its group, in the
        least balanced group of this process; 1 is perfect.  Else None.
    """

    arrays: dict[str, np.ndarray]
    encoder_load: float | None


@dataclasses.dataclass(frozen=True)
class BatchLayout:
    """The batch of an optimizer step, as docs/architecture.md has it, on the devices of a mesh.

    Arrays are [M, B, ...], rows sharded over data parallel ranks, each rank's rows on all its devices.  In the hetero
    DP modes the patch arrays are [K, R G, ...] instead: each of the R ranks divides the images of its M B / R rows
    among G devices, which encode them in K rounds (`jaxforge.data.encoder_division`).

    Attributes:
      row_format: of its rows.
      microbatches: M.
      rows: rows of a microbatch over all data parallel ranks, B.
      mesh: the devices.
      encoder_stages, encoder_tensor: pipeline stages and tensor ranks of the G devices.
    """

    row_format: RowFormat
    microbatches: int
    rows: int
    mesh: Mesh
    encoder_stages: int = 1
    encoder_tensor: int = 1

    @classmethod
    def from_config(cls, config: Config, mesh: Mesh, num_microbatches: int) -> "BatchLayout":
        """A step of train.global_batch_size rows.  Raises ConfigError where these don't divide."""
        rows, rest = divmod(config.train.global_batch_size, num_microbatches)
        if rest:
            raise ConfigError(
                f"train.global_batch_size={config.train.global_batch_size} does not divide into {num_microbatches}"
                " microbatches; use a multiple"
            )
        layout = cls(RowFormat.from_config(config), num_microbatches, rows, mesh, *encoder_group(config))
        if rows % layout.ranks:
            raise ConfigError(f"{rows} rows of a microbatch do not divide over {layout.ranks} data parallel ranks")
        return layout

    @property
    def ranks(self) -> int:
        """R, data parallel ranks: rank k has rows [k B / R, (k + 1) B / R) of a microbatch."""
        return math.prod(self.mesh.shape[axis] for axis in DATA_AXES)

    @property
    def devices(self) -> int:
        """G, devices among which each rank divides its images; 1 where they aren't divided."""
        return self.encoder_stages * self.encoder_tensor

    @property
    def rounds(self) -> int:
        """K."""
        return num_rounds(self.microbatches * self.rows // self.ranks, self.devices)

    def sharding(self, key: str) -> NamedSharding:
        """Of an array of the batch."""
        if not self._is_divided(key):
            return batch_sharding(self.mesh)
        stage = ("stage",) if self.encoder_stages > 1 else ()
        return NamedSharding(self.mesh, PartitionSpec(None, (*DATA_AXES, *stage, *TENSOR_AXES)))

    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shape, dtype and sharding of every array: enough to compile a step without data."""
        return {
            key: jax.ShapeDtypeStruct((*self._leading(key), *shape), dtype, sharding=self.sharding(key))
            for key, (shape, dtype) in self.row_format.arrays.items()
        }

    def columns(self, key: str) -> list[int]:
        """Which places of an array's second dimension lie on this process's devices, in increasing order."""
        return self._local_columns[self._is_divided(key)]

    def assemble(self, rows: dict[str, np.ndarray]) -> LocalBatch:
        """This process's part of a batch, from the rows of its data parallel ranks: [M, columns, ...]."""
        if self.devices == 1 or "patches" not in rows:
            return LocalBatch(rows, None)
        columns, slots = self.columns("tokens"), self.columns("patches")
        size = self.rows // self.ranks
        divisions = []
        for rank in sorted({column // size for column in columns}):
            start = columns.index(rank * size)  # a rank's rows are here all or none
            divisions.append(
                divide(
                    {key: array[:, start : start + size] for key, array in rows.items()},
                    stages=self.encoder_stages,
                    tensor=self.encoder_tensor,
                    merge=self.row_format.merge,
                    devices=[slot % self.devices for slot in slots if slot // self.devices == rank],
                )
            )
        divided = {key: _join([division.patch_arrays[key] for division in divisions]) for key in PATCH_KEYS}
        divided["visual_index"] = _join([division.visual_index for division in divisions])
        return LocalBatch(rows | divided, max(_load(division.patches_G) for division in divisions))

    def place(self, local: dict[str, np.ndarray]) -> Batch:
        """The arrays of `assemble` on the mesh, with those of the other processes."""
        return {key: self._place(key, array) for key, array in local.items()}

    def batch(self, rows: dict[str, np.ndarray]) -> Batch:
        """Rows [M, B, ...], which every process has all of, on the mesh."""
        columns = self.columns("tokens")
        return self.place(self.assemble({key: array[:, columns] for key, array in rows.items()}).arrays)

    def _is_divided(self, key: str) -> bool:
        return self.devices > 1 and key in PATCH_KEYS

    def _leading(self, key: str) -> tuple[int, int]:
        if self._is_divided(key):
            return self.rounds, self.ranks * self.devices
        return self.microbatches, self.rows

    @functools.cached_property
    def _local_columns(self) -> dict[bool, list[int]]:
        """Those of arrays that are not divided, and that are."""
        found = {}
        for key in ("tokens", "patches"):
            _, count = self._leading(key)
            indices = self.sharding(key).addressable_devices_indices_map((1, count)).values()
            found[self._is_divided(key)] = sorted(
                {column for index in indices if index for column in range(count)[index[1]]}
            )
        return found

    def _place(self, key: str, local: np.ndarray) -> jax.Array:
        leading, columns = self._leading(key), self.columns(key)

        def part(index: tuple[slice, ...] | None) -> np.ndarray:
            wanted = range(leading[1])[index[1]] if index else range(leading[1])
            start = columns.index(wanted[0])  # a device's columns follow each other here too
            return local[:, start : start + len(wanted)]

        return jax.make_array_from_callback((*leading, *local.shape[2:]), self.sharding(key), part)


def _join(parts: list[np.ndarray]) -> np.ndarray:
    """Side by side in the second dimension; one alone isn't copied, for pixels are many."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)


def _load(patches_G: np.ndarray) -> float:
    return float(patches_G.max() / patches_G.mean()) if patches_G.any() else 1.0
