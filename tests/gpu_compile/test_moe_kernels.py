"""A mixture of experts' layer, compiled for GPUs that aren't here: kernels, and memory.

Forward and backward at the sizes of Qwen3-30B-A3B: 16384 tokens of width 2048 in bfloat16, the 8 best of 128 experts of
width 768.  The choice of experts is an argument.
"""

import functools
import re
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jaxforge.cluster.mesh import build_mesh, mesh_layout
from jaxforge.cluster.topology import described_devices, parse_topology
from jaxforge.ops.expert_rows import permutation
from jaxforge.ops.grouped_matmul import grouped_matmul, grouped_swiglu
from jaxforge.ops.moe_permute import permute, unpermute

N, K, E, D, F = 16384, 8, 128, 2048, 768
R = N * K
MIB = 2**20

pytestmark = pytest.mark.timeout(900)


def layer(x_ND, weights_NK, gate_EDF, up_EDF, down_EFD, experts_NK):
    order, sizes_E = permutation(experts_NK, gate_EDF.shape[0])
    rows_RD = permute(x_ND, order, backend="pallas")
    act_RF = grouped_swiglu(rows_RD, gate_EDF, up_EDF, sizes_E, backend="pallas")
    return unpermute(grouped_matmul(act_RF, down_EFD, sizes_E, backend="pallas"), weights_NK, order, backend="pallas")


def ragged_layer(x_ND, weights_NK, gate_EDF, up_EDF, down_EFD, experts_NK):
    order_R = jnp.argsort(experts_NK.reshape(-1))
    sizes_E = jnp.bincount(experts_NK.reshape(-1), length=gate_EDF.shape[0])
    rows_RD = x_ND[order_R // K]
    act_RF = jax.nn.silu(lax.ragged_dot(rows_RD, gate_EDF, sizes_E)) * lax.ragged_dot(rows_RD, up_EDF, sizes_E)
    out_RD = lax.ragged_dot(act_RF, down_EFD, sizes_E) * weights_NK.reshape(-1)[order_R][:, None]
    return jnp.zeros(x_ND.shape, jnp.float32).at[order_R // K].add(out_RD).astype(x_ND.dtype)


@functools.cache
def compiled(gpu, one_layer=layer, dtype=jnp.bfloat16, sizes=(N, K, E, D, F)):
    """The layer's result, and the gradients of tokens, weights and the three stacks, on one GPU."""
    n, k, e, d, f = sizes
    mesh = build_mesh(mesh_layout(1), described_devices(parse_topology(f"{gpu}:1x1")))
    whole = PartitionSpec()

    def argument(*shape, dtype=dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, whole))

    def step(*arguments):
        *differentiated, experts_NK, dy_ND = arguments
        y_ND, pull = jax.vjp(lambda *x: one_layer(*x, experts_NK), *differentiated)
        return y_ND, pull(dy_ND)

    arguments = (
        argument(n, d), argument(n, k, dtype=jnp.float32), argument(e, d, f), argument(e, d, f), argument(e, f, d),
        argument(n, k, dtype=jnp.int32), argument(n, d),
    )  # fmt: skip
    manual = jax.shard_map(step, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
    return jax.jit(manual).lower(*arguments).compile()


def kernels_of(program) -> Counter:
    """How often each kernel is called, by its name."""
    calls = re.findall(r'.*custom_call_target="__gpu\$xla.gpu.triton".*', program.as_text())
    return Counter(re.search(r'name = "(\w+)"', call)[1] for call in calls)


KERNELS = {
    "gather_rows": 1,  # permute
    "grouped_products": 2,  # gate and up in one, down
    "combine_rows": 2,  # unpermute; the gradient of permute
    "combine_gradients": 1,  # of unpermute, for rows and weights in one
    "grouped_products_sum": 2,  # the gradient of down's rows; of the rows of gate and up in one
    "grouped_outer_products": 2,  # the gradient of down; of gate and up in one
}

# What must be there at once, results included, for XLA puts other arrays into their memory until they are written.  It
# is most when the gradients of gate and up have just been formed: the permuted rows, which they are formed from; the
# gradients of both products, which that of the rows is still to be formed from; the gradients of all three stacks; and
# the layer's result.  That gradient then takes the place of the permuted rows.  Before, when the gradient of down has
# been formed: the permuted rows, both products and the activation, the gradient of the output rows (in the place of
# these rows), the gradient of down, and the layer's result.
WIDE, NARROW, STACK, TOKENS = 2 * R * D, 2 * R * F, 2 * E * D * F, 2 * N * D
NEEDED = max(WIDE + 2 * NARROW + 3 * STACK + TOKENS, WIDE + 3 * NARROW + WIDE + STACK + TOKENS)
# What the backward pass must find of the forward pass: permuted rows, products, activation, output rows.
KEPT = 2 * WIDE + 3 * NARROW


@pytest.mark.parametrize("gpu", ["h100", "b200"])
def test_a_layer_takes_little_more_than_the_arrays_that_must_be_there(gpu):  # F51
    program = compiled(gpu)
    assert kernels_of(program) == KERNELS
    memory = program.memory_analysis()
    temporary, results = memory.temp_size_in_bytes, memory.output_size_in_bytes
    print(
        f"{gpu}: temporary {temporary / MIB:.0f} MiB beside results of {results / MIB:.0f} MiB,"
        f" {(temporary + results) / NEEDED:.3f} of the {NEEDED / MIB:.0f} MiB that must be there at once;"
        f" temporary {temporary / KEPT:.3f} of the {KEPT / MIB:.0f} MiB that the backward pass must find"
    )
    # x and the stacks' gradients, y, and that of the weights
    assert 0 <= results - (3 * STACK + 2 * TOKENS + 4 * N * K) < 1024
    assert temporary + results <= 1.3 * NEEDED
    assert temporary <= 1.3 * KEPT


@pytest.mark.slow
def test_ragged_dot_takes_many_times_that():
    # XLA makes of it products with a place for each row of each expert
    ragged, grouped = (
        compiled("h100", one_layer).memory_analysis().temp_size_in_bytes for one_layer in (ragged_layer, layer)
    )
    print(f"temporary: ragged_dot {ragged / MIB:.0f} MiB, grouped {grouped / MIB:.0f} MiB")
    assert ragged > 10 * grouped


# A kernel that takes more shared memory than the GPU has would not compile.
@pytest.mark.parametrize(
    "gpu, dtype, sizes",
    [
        ("h100", jnp.float32, (1000, 2, 8, 1000, 200)),
        ("b200", jnp.float32, (1024, 2, 8, 512, 256)),
        ("a100", jnp.bfloat16, (1000, 6, 64, 2048, 1408)),
    ],
)
def test_other_widths_and_single_precision_fit(gpu, dtype, sizes):
    assert kernels_of(compiled(gpu, dtype=dtype, sizes=sizes)) == KERNELS


def test_rows_of_more_than_four_gibibytes_compile():
    # 524288 rows of 7168: 7 GiB
    assert kernels_of(compiled("h200", sizes=(65536, 8, 32, 7168, 256))) == KERNELS
