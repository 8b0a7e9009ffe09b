"""Flash attention, compiled for GPUs that aren't here: that it fits, and that nothing of S x S is ever held."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxforge.cluster.mesh import DATA_AXES, MANUAL_AXES, build_mesh, mesh_layout
from jaxforge.cluster.topology import described_devices, parse_topology
from jaxforge.ops.attention import attention, row_segments
from jaxforge.parallel.encoder import encoder_placement
from jaxforge.parallel.rules import decoder_placement
from pallas_kernels.attention_blocks import packed_mask
from pallas_kernels.flash_attention import flash_attention

KERNELS = {"flash_attention_forward", "flash_attention_backward_q", "flash_attention_backward_kv"}

pytestmark = pytest.mark.timeout(900)


def compile_on(mesh: Mesh, f, *shapes):
    """`f` in a region of `mesh` that is manual over its data axes, as a train step is; all arguments hold rows."""
    rows = PartitionSpec(DATA_AXES)
    manual = jax.shard_map(
        f, mesh=mesh, in_specs=rows, out_specs=rows, axis_names=set(MANUAL_AXES), check_vma=False
    )  # fmt: skip
    sharding = NamedSharding(mesh, rows)
    shapes = jax.tree.map(lambda shape: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding), shapes)
    return jax.jit(manual).lower(*shapes).compile()


def kernels_of(compiled) -> dict[str, str]:
    """The HLO line of each kernel's call, by its name."""
    calls = re.findall(r'.*custom_call_target="__gpu\$xla.gpu.triton".*', compiled.as_text())
    return {re.search(r"flash_attention_\w+", call)[0]: call for call in calls}


def qkv(rows, length, heads, groups, width, value_width, dtype=jnp.bfloat16):
    shapes = (heads, width), (groups, width), (groups, value_width)
    return [jax.ShapeDtypeStruct((rows, length, *shape), dtype) for shape in shapes]


def segments(rows, length):
    return jax.ShapeDtypeStruct((rows, length), jnp.int32)


def gradients_of(*, causal: bool):
    def f(q, k, v, segment_ids):
        mask = packed_mask(segment_ids, segment_ids, causal=causal)

        def loss(q, k, v):
            return jnp.sum(flash_attention(q, k, v, mask)[0].astype(jnp.float32))

        return jax.grad(loss, argnums=(0, 1, 2))(q, k, v)

    return f


@functools.cache
def one_gpu(gpu: str) -> Mesh:
    return build_mesh(mesh_layout(1), described_devices(parse_topology(f"{gpu}:1x1")))


LONG, SHORT = 32768, 8192


# Between them each GPU, each length, each width.  A kernel that takes more shared memory than the GPU has would not
# compile.
@pytest.mark.parametrize(
    "gpu, length, width, value_width",
    [
        ("h100", SHORT, 64, 64), ("h100", LONG, 80, 80), ("h100", LONG, 128, 128), ("h100", SHORT, 192, 128),
        ("b200", LONG, 64, 64), ("b200", SHORT, 80, 80), ("b200", SHORT, 128, 128), ("b200", LONG, 192, 128),
        ("h200", SHORT, 128, 128), ("a100", SHORT, 128, 128),
    ],
)  # fmt: skip
def test_forward_and_backward_fit_and_hold_no_scores(gpu, length, width, value_width):
    heads = 2
    f = gradients_of(causal=width != 80)
    compiled = compile_on(one_gpu(gpu), f, *qkv(1, length, heads, 1, width, value_width), segments(1, length))
    assert kernels_of(compiled).keys() == KERNELS
    # the output and its gradient in bfloat16, the log-sum-exp and delta in fp32: a byte for each pair of tokens would
    # be far more
    held = heads * length * (2 * value_width * 2 + 2 * 4)
    tables = 2 * (length // 128) ** 2 * 4 * 4
    temporary = compiled.memory_analysis().temp_size_in_bytes
    assert temporary < held + tables + 2**20 < length**2 / 4


@pytest.mark.parametrize("width", [72, 96])
def test_other_head_widths_fit(width):
    compiled = compile_on(
        one_gpu("h100"), gradients_of(causal=True), *qkv(1, 1000, 2, 1, width, width), segments(1, 1000)
    )
    assert kernels_of(compiled).keys() == KERNELS


def test_single_precision_fits():
    shapes = qkv(1, 1024, 2, 1, 192, 128, dtype=jnp.float32)
    compiled = compile_on(one_gpu("h100"), gradients_of(causal=True), *shapes, segments(1, 1024))
    assert kernels_of(compiled).keys() == KERNELS


def test_arrays_of_more_than_four_gibibytes_compile():
    # 4 rows x 32768 tokens x 160 heads x 128: 5 GiB
    compiled = compile_on(
        one_gpu("h200"), gradients_of(causal=True), *qkv(4, 32768, 160, 16, 128, 128), segments(4, 32768)
    )
    assert kernels_of(compiled).keys() == KERNELS


@pytest.mark.parametrize("part", ["encoder", "decoder"])
def test_heads_over_tensor_parallel_gpus_are_computed_where_they_are(part):
    mesh = build_mesh(mesh_layout(8, tensor=2), described_devices(parse_topology("h100:1x8")))
    placement = encoder_placement() if part == "encoder" else decoder_placement(False)
    causal = part == "decoder"

    def over_tensor(arrays):
        return [placement.constrain(x, (None, None, "heads", None)) for x in arrays]

    def f(*arrays):
        *qkv, segment_ids = arrays

        def attend(q, k, v):
            segments = row_segments(segment_ids, causal=causal, backend="flash")
            return attention(q, k, v, segments, causal=causal, backend="flash", placement=placement)

        out, pull = jax.vjp(attend, *over_tensor(qkv))
        return over_tensor(pull(out))

    compiled = compile_on(mesh, f, *qkv(4, 1024, 8, 4, 128, 128), segments(4, 1024))
    calls = kernels_of(compiled)
    # a GPU has one of the four rows, and half of the heads
    assert "bf16[1,1024,4,128]" in calls["flash_attention_forward"].split("custom-call(")[0]
    assert calls["flash_attention_backward_kv"].split("custom-call(")[0].count("bf16[1,1024,2,128]") == 2
    exchanges = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
    assert [name for name in exchanges if name in compiled.as_text()] == []


def test_keys_that_all_gpus_share_get_the_sum_of_their_gradients():
    # in a region where JAX checks what varies: queries are of each GPU, keys and values the same on all
    mesh = Mesh(described_devices(parse_topology("h100:1x2")), ("x",))
    specs = PartitionSpec(None, None, "x"), PartitionSpec(), PartitionSpec(), PartitionSpec()
    mapped = jax.shard_map(
        gradients_of(causal=True), mesh=mesh, in_specs=specs, out_specs=specs[:3], check_vma=True
    )  # fmt: skip
    shapes = [
        jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip([*qkv(1, 1024, 8, 2, 128, 128), segments(1, 1024)], specs, strict=True)
    ]
    text = jax.jit(mapped).lower(*shapes).compile().as_text()
    # dk and dv, which XLA puts into one
    [reduced] = re.findall(r"all-reduce-done = bf16\[(\d+)\]", text)
    assert int(reduced) == 2 * 1024 * 2 * 128
