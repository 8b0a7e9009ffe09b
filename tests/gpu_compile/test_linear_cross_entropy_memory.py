"""The fused linear cross-entropy, compiled for GPUs that aren't here: memory, matmuls, and messages.

16384 tokens, a vocabulary of 129280 and width 7168, in bfloat16, on one GPU except where several are named.
"""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxforge.cluster.mesh import MANUAL_AXES, build_mesh, mesh_layout
from jaxforge.cluster.topology import described_devices, parse_topology
from jaxforge.ops.cross_entropy import cross_entropy
from jaxforge.ops.linear_cross_entropy import LinearCrossEntropy
from jaxforge.parallel.rules import decoder_placement
from jaxforge.training import collectives

T, V, D = 16384, 129280, 7168
GIB = 2**30
Z = 1e-4

pytestmark = pytest.mark.timeout(900)


def compiled(f, gpu="h100", tensor=1, options=None):
    """`f(hidden, head, targets, head's sum)` for one host, the sum donated."""
    mesh = build_mesh(mesh_layout(tensor, tensor=tensor), described_devices(parse_topology(f"{gpu}:1x8"))[:tensor])
    placement = decoder_placement(sequence_parallel=True)

    def argument(shape, dtype, names):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, placement.spec(names)))

    arguments = (
        argument((1, T, D), jnp.bfloat16, (None, "residual_sequence", None)),
        argument((V, D), jnp.bfloat16, ("vocab", None)),
        argument((1, T), jnp.int32, (None, None)),
        argument((V, D), jnp.float32, ("vocab", None)),
    )
    whole = PartitionSpec()
    mapped = jax.shard_map(
        f, mesh=mesh, in_specs=whole, out_specs=whole, axis_names=set(MANUAL_AXES), check_vma=False
    )
    return jax.jit(mapped, donate_argnums=3).lower(*arguments).compile(options)


@functools.cache
def fused(gpu="h100", backend="triton", tensor=1, cublas=False):
    """Loss and gradients.  Without autotuning XLA chooses its own matmul kernels; `cublas` forbids them."""
    loss = LinearCrossEntropy(V, decoder_placement(sequence_parallel=True), Z, backend=backend)
    return compiled(loss.gradients, gpu, tensor, {"xla_gpu_enable_triton_gemm": False} if cublas else None)


def temporary(program):
    return program.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("gpu", ["h100", "h200", "b200"])
def test_beyond_the_two_gradients_it_takes_less_than_1_5_gib(gpu):
    memory = fused(gpu).memory_analysis()
    assert memory.temp_size_in_bytes <= 1.5 * GIB
    # the head's gradient is added in place, to a sum in fp32; that of the hidden states is a result
    assert memory.alias_size_in_bytes == 4 * V * D
    assert 0 <= memory.output_size_in_bytes - 4 * V * D - 2 * T * D < 1024


def test_the_plain_loss_takes_many_times_that():
    def plain(hidden_BSD, head_VD, targets_BS, dhead_sum_VD):
        def objective(hidden_BSD, head_VD):
            placement = decoder_placement(sequence_parallel=True)
            loss, z = cross_entropy(hidden_BSD, head_VD, targets_BS, vocab_size=V, placement=placement)
            return loss + Z * z

        loss, (dhidden_BSD, dhead_VD) = jax.value_and_grad(objective, (0, 1))(hidden_BSD, head_VD)
        return loss, dhidden_BSD, dhead_sum_VD + dhead_VD.astype(jnp.float32)

    plain_bytes, fused_bytes = temporary(compiled(plain)), temporary(fused())
    print(f"temporary: plain {plain_bytes / GIB:.2f} GiB, fused {fused_bytes / GIB:.2f} GiB")
    assert plain_bytes > 7 * fused_bytes


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_with_cublas_no_tile_is_copied(backend):
    program = fused(backend=backend, cublas=True)
    assert temporary(program) <= 1.2 * GIB
    # each reads and writes its tiles where they lie, by XLA's dynamic slice fusion
    hlo = program.as_text()
    assert hlo.count('"__cublas$lt$matmul"') == hlo.count('"name":"dynamic_slice_fusion"') == 6


def test_three_matmuls_for_each_tile_of_each_chunk():
    # 8 chunks of 2048 tokens; 42 tiles of 3072 rows in a loop, and one of 256
    hlo = fused().as_text()
    instructions = list(collectives._instructions(hlo))
    runs = collectives._executions(instructions, collectives._entry(hlo))
    dots = [runs[one.computation][0] for one in instructions if one.opcode == "dot"]
    assert sorted(dots) == 3 * [8] + 3 * [8 * 42]


def test_both_kernels_are_in_the_program_and_one_writes_over_the_logits():
    kernels = [line for line in fused().as_text().splitlines() if "__gpu$xla.gpu.triton" in line]
    assert sorted("output_to_operand_aliasing={{}: (0, {})}" in line for line in kernels) == [False, True]


def test_over_tensor_three_numbers_a_token_are_exchanged():
    program = fused(tensor=8)
    found = collectives.find_collectives(program.as_text(), {"tensor": 8})
    hidden_bytes, statistics_bytes = 2 * T * D, 4 * 3 * 8 * 4096
    assert {(one.kind, one.bytes, one.count) for one in found} == {
        ("all-gather", hidden_bytes, 1), ("reduce-scatter", hidden_bytes, 1), ("all-gather", statistics_bytes, 4)
    }  # fmt: skip
    # the hidden states and their gradient, both whole, and a chunk of 4096 tokens
    print(f"temporary over 8 GPUs: {temporary(program) / GIB:.2f} GiB")
    assert temporary(program) <= 2 * hidden_bytes + GIB


def test_autodiff_holds_one_table_in_fp32_beside_its_gradient():
    loss = LinearCrossEntropy(V, decoder_placement(sequence_parallel=True), Z, backend="triton")
    program = compiled(
        lambda hidden, head, targets, _: jax.value_and_grad(loss, (0, 1), has_aux=True)(hidden, head, targets)
    )
    assert temporary(program) <= 4 * V * D + 1.5 * GIB


def test_the_loss_alone_needs_no_chunk_of_logits():
    loss = LinearCrossEntropy(V, decoder_placement(sequence_parallel=True), backend="triton")
    program = compiled(lambda hidden, head, targets, _: loss.score(hidden, head, targets))
    # a tile of 3072 x 4096 in fp32 is 48 MiB; the chunk's logits would be 2 GiB
    assert temporary(program) <= 0.25 * GIB
