"""Tokens to experts on other GPUs, compiled for H100: what is exchanged, and what is computed meanwhile.

A layer of experts, forward and backward, in bfloat16.  Its compiler options: without the scheduler that hides latencies
every exchange is waited for at once; and by default XLA makes of a ragged exchange between hosts an all-gather of the
hosts' whole buffers and a ragged exchange inside a host.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxforge.cluster.topology import described_devices, parse_topology
from jaxforge.ops.expert_dispatch import Dispatcher

N, D, F, E, K = 1024, 512, 256, 16, 4
OPTIONS = {
    "xla_gpu_enable_latency_hiding_scheduler": True,
    "xla_gpu_unsupported_enable_ragged_all_to_all_multi_host_decomposer": False,
}

pytestmark = pytest.mark.timeout(900)


@functools.cache
def compiled(topology: str, kind: str, overlap: bool) -> str:
    """The scheduled HLO; the hosts are axis "host", or two halves of the only host."""
    cluster = parse_topology(topology)
    mesh = Mesh(np.array(described_devices(cluster)).reshape(2, -1), ("host", "gpu"))
    one = Dispatcher(
        kind, E, ("host", "gpu"), num_nodes=2, buffer_factor=2.0, uses_ragged_exchange=True, overlap=overlap
    )

    def local(x_ND, weights_NK, up_XDF, down_XFD, experts_NK):
        def run(x_ND, weights_NK, up_XDF, down_XFD):
            def compute(rows_RD, weights_R, sizes_X):
                hidden_RF = jax.nn.silu(jax.lax.ragged_dot(rows_RD, up_XDF, sizes_X))
                hidden_RF = (weights_R[:, None] * hidden_RF).astype(rows_RD.dtype)
                return jax.lax.ragged_dot(hidden_RF, down_XFD, sizes_X)

            return one(x_ND, experts_NK, weights_NK, compute)

        y_ND, pull, dropped = jax.vjp(run, x_ND, weights_NK, up_XDF, down_XFD, has_aux=True)
        # the backward pass waits for all of the forward pass, as that of a layer in a model does
        return dropped[None], *pull(y_ND * jnp.mean(y_ND))

    by_device = PartitionSpec(("host", "gpu"))

    def argument(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, by_device))

    tokens = N * mesh.size
    arguments = (
        argument((tokens, D), jnp.bfloat16),
        argument((tokens, K), jnp.float32),
        argument((E, D, F), jnp.bfloat16),
        argument((E, F, D), jnp.bfloat16),
        argument((tokens, K), jnp.int32),
    )
    mapped = jax.shard_map(local, mesh=mesh, in_specs=by_device, out_specs=(by_device,) * 5, check_vma=False)
    hlo = jax.jit(mapped).lower(*arguments).compile(OPTIONS).as_text()
    assert hlo is not None
    return hlo


def moves(hlo: str) -> list[tuple[str, str]]:
    """Kind and whole line of each collective, where it starts."""
    pattern = r"^\s*(?:ROOT )?%?\S+ = .*? ((?:ragged-)?all-to-all|all-gather|all-reduce|reduce-scatter)(?:-start)?\(.*$"
    return [(match[1], match[0]) for match in re.finditer(pattern, hlo, re.M)]


def products_beside(hlo: str, kind: str) -> list[tuple[int, int]]:
    """Of each exchange the products of the forward and of the backward pass between its start and its end."""
    lines, found = hlo.splitlines(), []
    for number, line in enumerate(lines):
        if start := re.match(rf"\s*%?(\S+) = .* {kind}-start\(", line):
            done = re.compile(rf" {kind}-done\(%?{re.escape(start[1])}\)")
            end = next(i for i in range(number, len(lines)) if done.search(lines[i]))
            products = [line for line in lines[number + 1 : end] if "ragged_dot_general" in line]
            backward = sum("transpose(" in line for line in products)
            found.append((len(products) - backward, backward))
    return found


def largest(line: str) -> int:
    """Elements of the largest array in a line of HLO."""
    shapes = re.findall(r"\w+\[([\d,]+)\]", line.split(", metadata=")[0])
    return max(int(np.prod([int(size) for size in shape.split(",")])) for shape in shapes)


@pytest.mark.parametrize("overlap", [False, True])
def test_inside_a_host_rows_go_by_ragged_exchanges_alone(overlap):
    found = moves(compiled("h100:1x8", "alltoall", overlap))
    # rows and weights there and rows back, and the gradients of all three, for each half
    assert sum(kind == "ragged-all-to-all" for kind, _ in found) == (12 if overlap else 6)
    # beside them the counts of pairs of each rank and expert
    for kind, line in found:
        if kind != "ragged-all-to-all":
            assert kind == "all-gather" and largest(line) <= 8 * E, line


def test_halves_are_exchanged_while_halves_are_computed():
    hlo = compiled("h100:1x8", "alltoall", True)
    # forward: the second half's way there beside the first half's products, the first's way back beside the second's
    beside = products_beside(hlo, "ragged-all-to-all")
    assert sum(forward >= 1 for forward, _ in beside) >= 2
    # backward the same in the other order; and the last way back beside the gradients of weights
    assert sum(backward >= 1 for _, backward in beside) >= 2


def test_without_halves_only_gradients_of_weights_hide_an_exchange():
    beside = products_beside(compiled("h100:1x8", "alltoall", False), "ragged-all-to-all")
    assert sum(forward >= 1 for forward, _ in beside) == 0
    # the exchange of the rows' gradients, and that of their weights'
    assert sum(backward >= 1 for _, backward in beside) <= 2


def test_between_hosts_each_token_goes_once_and_inside_each_choice():
    found = moves(compiled("h100:2x8", "flex", False))
    exchanges = [line for kind, line in found if kind == "ragged-all-to-all"]
    between = [line for line in exchanges if "{0,8}" in line]
    inside = [line for line in exchanges if "{0,1,2,3,4,5,6,7}" in line]
    assert len(between) + len(inside) == len(exchanges)
    # rows and choices there, rows and what was dropped back, and three gradients: no buffer of more than 2 N rows
    assert len(between) == 7 and max(map(largest, between)) == 2 * N * D
    # with weights and their gradients; a buffer of 2 N K rows
    assert len(inside) == 6 and max(map(largest, inside)) == 2 * N * K * D
    for kind, line in found:
        if kind != "ragged-all-to-all":
            assert kind == "all-gather" and largest(line) <= 8 * E, line
