"""Devices that exchange with each other: all along some mesh axes, or those of them that lie on one node, or beside."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax


@dataclasses.dataclass(frozen=True)
class DeviceGroup:
    """The devices along `axes`, which are manual, in groups; a device's collectives reach its own group.

    Attributes:
      axes: outermost first; a device's rank along them is `lax.axis_index(axes)`.
      ranks: of each group, in its order, equally many in each; () where all devices are one group.
    """

    axes: tuple[str, ...]
    ranks: tuple[tuple[int, ...], ...] = ()

    @property
    def size(self) -> int:
        """Devices of a group; where the axes are manual."""
        return len(self.ranks[0]) if self.ranks else lax.axis_size(self.axes)

    def index(self) -> jax.Array:
        """This device's place in its group, int32."""
        rank = lax.axis_index(self.axes)
        if not self.ranks:
            return rank
        place = {rank: place for group in self.ranks for place, rank in enumerate(group)}
        return jnp.array([place[rank] for rank in range(len(place))], jnp.int32)[rank]

    @property
    def index_groups(self) -> list[list[int]] | None:
        """What JAX's collectives take."""
        return [list(group) for group in self.ranks] or None

    def all_gather(self, x: jax.Array) -> jax.Array:
        """`x` of all devices of the group, along a new first dimension."""
        return lax.all_gather(x, self.axes, axis_index_groups=self.index_groups)


def blocks(axes: tuple[str, ...], num_devices: int, num_blocks: int) -> tuple[DeviceGroup, DeviceGroup]:
    """Ranks cut into equal blocks of consecutive ones: (those with the same place in their block, those of a block)."""
    size = num_devices // num_blocks
    of_block = tuple(tuple(range(first, first + size)) for first in range(0, num_devices, size))
    return DeviceGroup(axes, tuple(zip(*of_block, strict=True))), DeviceGroup(axes, of_block)
