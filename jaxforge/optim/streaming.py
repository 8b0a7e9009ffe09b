"""What is computed of arrays in host memory, slice by slice, so that a device never holds more than a few slices.

An array is read as rows of its last dimension, R rows of C numbers, and a slice is a number of rows, whatever layers
they belong to.  Each device reads its own part, so that slices don't depend on how arrays are cut.  While one slice is
computed and goes back, the next one is on its way to the device.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jaxforge.optim.host_memory import to_device, to_host

Arrays = tuple[jax.Array, ...]
# (path, arrays, gradient, scalars) -> arrays: of a parameter with its first and second moment, or the same slice of the
# three.  Each number comes from those in the same place, and from scalars.
Rule = Callable[[str, Arrays, jax.Array, Any], Arrays]
# (arrays in host memory, other, slices of them on the device, first row) -> (arrays, other) with those rows written
_Visit = Callable[[Arrays, Any, Arrays, Any], tuple[Arrays, Any]]
# Of one array, in fp32, at most, but for a single row.  A copy of this size takes PCIe 0.3 ms, a hundred times what
# it takes to start one.
SLICE_BYTES = 16 * 2**20


def streamed_updates(
    rule: Rule, shardings: Mapping[str, NamedSharding], updates: Mapping[str, tuple[Arrays, jax.Array]], scalars: Any
) -> dict[str, Arrays]:
    """What `rule` gives of parameters whose arrays lie in host memory, written over them.

    Args:
      shardings: of a parameter's arrays, and of its gradient, by path.
      updates: (arrays in host memory, gradient on the device) by path.
      scalars: a tree, the same for all slices.
    """

    def local(updates: dict[str, tuple[Arrays, jax.Array]], scalars: Any) -> dict[str, Arrays]:
        def begin(path: str, host: Arrays) -> _Pass:
            gradient_RC = _rows(updates[path][1])

            def visit(host: Arrays, other: None, slices: Arrays, start: Any) -> tuple[Arrays, None]:
                gradient_slice = lax.dynamic_slice_in_dim(gradient_RC, start, slices[0].shape[0])
                updated = rule(path, slices, gradient_slice, scalars)
                written = [
                    lax.dynamic_update_slice_in_dim(array, to_host(new), start, 0)
                    for array, new in zip(host, updated, strict=True)
                ]
                return tuple(written), other

            return _Pass.begin(host, None, visit)

        hosts = {path: tuple(_rows(array) for array in arrays) for path, (arrays, _) in updates.items()}
        # nothing is read before the scalars are known, while gradients and activations fill the device
        hosts, scalars = lax.optimization_barrier((hosts, scalars))
        done = _in_turn(hosts, begin)
        return {
            path: tuple(array.reshape(gradient.shape) for array in done[path][0])
            for path, (_, gradient) in updates.items()
        }

    return _on_each_device(local, shardings, dict(updates), scalars)


def streamed_casts(
    masters: Mapping[str, jax.Array], shardings: Mapping[str, NamedSharding], dtype: jnp.dtype
) -> dict[str, jax.Array]:
    """Of masters in host memory, by path: the same numbers on the device in another dtype."""

    def local(masters: dict[str, jax.Array]) -> dict[str, jax.Array]:
        def visit(host: Arrays, weights_RC: jax.Array, slices: Arrays, start: Any) -> tuple[Arrays, jax.Array]:
            return host, lax.dynamic_update_slice_in_dim(weights_RC, slices[0].astype(dtype), start, 0)

        def begin(path: str, host: Arrays) -> _Pass:
            return _Pass.begin(host, jnp.zeros(host[0].shape, dtype), visit)

        done = _in_turn({path: (_rows(master),) for path, master in masters.items()}, begin)
        return {path: done[path][1].reshape(master.shape) for path, master in masters.items()}

    return _on_each_device(local, shardings, dict(masters))


def _on_each_device(local: Callable, shardings: Mapping[str, NamedSharding], by_path: dict[str, Any], *scalars: Any):
    """What `local` gives, on each device, of its parts of arrays and of the scalars."""
    specs = {path: shardings[path].spec for path in by_path}
    mesh = next(iter(shardings.values())).mesh
    in_specs = (specs, *(PartitionSpec() for _ in scalars))
    return jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=specs, check_vma=False)(by_path, *scalars)


def _rows(array: jax.Array) -> jax.Array:
    return array.reshape(-1, array.shape[-1])


def _in_turn(hosts: Mapping[str, Arrays], begin: Callable[[str, Arrays], "_Pass"]) -> dict[str, tuple[Arrays, Any]]:
    """What each pass gives.  One begins when the one before has its last slices, so that no more wait on the device."""
    done: dict[str, tuple[Arrays, Any]] = {}
    before: tuple[str, _Pass] | None = None
    for path, host in hosts.items():
        if before is None:
            before = path, begin(path, host)
            continue
        name, last = before
        host, last.slices = lax.optimization_barrier((host, last.slices))
        before = path, begin(path, host)
        done[name] = last.finish()
    if before is not None:
        done[before[0]] = before[1].finish()
    return done


@dataclasses.dataclass
class _Pass:
    """Through all rows of arrays [R, C] of one shape in host memory, slice by slice.

    Attributes:
      other: what visits change besides.
      slices: the last whole ones, which are on the device and not visited yet.
      rows: of a whole slice.
    """

    host: Arrays
    other: Any
    slices: Arrays
    rows: int
    visit: _Visit

    @classmethod
    def begin(cls, host: Arrays, other: Any, visit: _Visit) -> "_Pass":
        """Visits all whole slices but the last."""
        num_rows, width = host[0].shape
        num_slices = -(-num_rows // max(1, SLICE_BYTES // (4 * width)))
        rows = -(-num_rows // num_slices)

        def step(index: jax.Array, carry: tuple[Arrays, Any, Arrays]) -> tuple[Arrays, Any, Arrays]:
            host, other, slices = carry
            following = _read(host, (index + 1) * rows, rows)
            # An array's next slice is read before this one is written: XLA would copy the whole array if it didn't
            # know the order.  Of two arrays one is read while the other is written.
            ordered = [lax.optimization_barrier(pair) for pair in zip(host, following, strict=True)]
            host, other = visit(tuple(array for array, _ in ordered), other, slices, index * rows)
            return host, other, tuple(following for _, following in ordered)

        carry = host, other, _read(host, 0, rows)
        if num_rows >= 2 * rows:
            # the last slice is left out, so that offsets are linear in the index: XLA copies such slices by DMA
            carry = lax.fori_loop(0, num_rows // rows - 1, step, carry)
        return cls(*carry, rows, visit)

    def finish(self) -> tuple[Arrays, Any]:
        """Visits what is left, and gives (host, other)."""
        num_rows = self.host[0].shape[0]
        num_whole, rest = divmod(num_rows, self.rows)
        host, other = self.visit(self.host, self.other, self.slices, (num_whole - 1) * self.rows)
        if rest:
            host, other = self.visit(host, other, _read(host, num_rows - rest, rest), num_rows - rest)
        return host, other


def _read(host: Arrays, start: Any, rows: int) -> Arrays:
    return tuple(to_device(lax.dynamic_slice_in_dim(array, start, rows)) for array in host)
