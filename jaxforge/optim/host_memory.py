"""Which masters and moments lie in host memory, and how an array gets there and back.

Host memory is JAX's memory kind "pinned_host": pages that stay in place, which a GPU copies from and to by itself.
Simulated CPU devices have it too, in the same memory as everything else.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding, Sharding

from jaxforge.memory.policy import HOST_MEMORY
from jaxforge.optim.paths import Tree, parameter_paths


def chosen_for_host_memory(sizes: Tree, fraction: float) -> frozenset[str]:
    """Paths of the parameters whose state goes to host memory: the largest first, until they hold the fraction.

    Args:
      sizes: tree of the parameters' sizes on a device, in any unit.
      fraction: of the sum of sizes, above 0 and at most 1.  What is chosen is this much or, by a part of the last
        tensor, more.
    """
    of_path = dict(zip(jax.tree.leaves(parameter_paths(sizes)), jax.tree.leaves(sizes), strict=True))
    wanted, held = fraction * sum(of_path.values()), 0
    chosen = set()
    for path in sorted(of_path, key=lambda path: (-of_path[path], path)):
        if held >= wanted:
            break
        chosen.add(path)
        held += of_path[path]
    return frozenset(chosen)


def in_host_memory(sharding: NamedSharding) -> NamedSharding:
    """The same layout in host memory."""
    placed = NamedSharding(sharding.mesh, sharding.spec, memory_kind=HOST_MEMORY)
    if placed.memory_kind == HOST_MEMORY:
        return placed
    # JAX drops the kind where devices are only described, which have no memory; without devices it keeps it
    return NamedSharding(sharding.mesh.abstract_mesh, sharding.spec, memory_kind=HOST_MEMORY)


def is_in_host_memory(array: Any) -> bool:
    """Of an array, or of a shape with a sharding, which isn't inside a jitted function."""
    return getattr(getattr(array, "sharding", None), "memory_kind", None) == HOST_MEMORY


def moved(array: jax.Array, sharding: Sharding) -> jax.Array:
    """The array in the memory of `sharding`, each part at the device that has it; outside of jitted functions."""
    return array if array.sharding.memory_kind == sharding.memory_kind else _move(sharding)(array)


@functools.lru_cache
def _move(sharding: Sharding) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(to_host if sharding.memory_kind == HOST_MEMORY else to_device, out_shardings=sharding)


def to_device(array: jax.Array) -> jax.Array:
    """Inside a jitted function: the array, or the slice of one, on the device."""
    is_there = jax.typeof(array).memory_space == jax.memory.Space.Device
    return array if is_there else jax.device_put(array, jax.memory.Space.Device)


def to_host(array: jax.Array) -> jax.Array:
    """Inside a jitted function: in host memory."""
    return jax.device_put(array, jax.memory.Space.Host)
