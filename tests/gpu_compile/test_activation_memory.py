"""Recompute and offload, compiled for GPUs that aren't here: what leaves device memory, what arrives in the host's.

Each run is compiled once, however many tests look at it.  Sizes are such that activations outweigh everything else.
"""

import dataclasses
import functools
import re

import pytest
from tiny_runs import ACTIVATION_BYTES, LAYERS, PATCHES, SEQ_LENGTH, WIDTH, vision_language_model

from jaxforge.cluster import MeshLayout, build_mesh, described_devices, parse_topology
from jaxforge.config import validate
from jaxforge.config.derived import num_microbatches
from jaxforge.config.schema import Config, DecoderConfig, MemoryConfig, ModelConfig, ParallelConfig, TrainConfig
from jaxforge.data.batches import BatchLayout
from jaxforge.training.activation_costs import ActivationCost
from jaxforge.training.program import build_program

pytestmark = pytest.mark.timeout(900)

S, D, H, G, K, F, TP = 4096, 1024, 16, 4, 64, 2816, 2
# bytes of one token on one GPU, bfloat16 over TP 2 with sequence parallelism; the log-sum-exp is in fp32
RESIDUAL, QUERY, KEY, FFN = 2 * D // TP, 2 * H * K // TP, 2 * G * K // TP, 2 * F // TP
BYTES = {
    "layer_input": RESIDUAL, "attn_norm": RESIDUAL, "query": QUERY, "key": KEY, "value": KEY,
    "core_attn": QUERY + 4 * H // TP, "mlp_norm_input": RESIDUAL, "mlp_norm": RESIDUAL, "mlp_gate": FFN, "mlp_up": FFN,
    "mlp_act": FFN,
}  # fmt: skip
OFFLOADED = ("layer_input", "query", "key", "value", "core_attn", "mlp_norm_input")
RECOMPUTED = ("attn_norm", "core_attn", "mlp_norm", "mlp_gate", "mlp_up", "mlp_act")

_OFFLOAD = MemoryConfig(
    fine_grained_activation_offloading=True, offload_modules=("attn_norm", "core_attn", "attn_proj", "mlp_norm")
)
_SELECTIVE = MemoryConfig(recompute_granularity="selective", recompute_modules=("core_attn", "mlp", "layernorm"))
_FULL = MemoryConfig("full", "uniform", 1, activations=(("layer_input", "offload"),))
MEMORY = {"kept": MemoryConfig(), "offload": _OFFLOAD, "selective": _SELECTIVE}
# ranks, layers, and how many layers' activations a GPU keeps at a time: all, or of two on the first of four ranks those
# of seven microbatches (4 x 2 - 1)
NO_PIPELINE, PIPELINE = (1, 16, 16), (4, 8, 2 * 7)


def language_model(memory: str, ranks: int, layers: int) -> Config:
    decoder = DecoderConfig(
        num_layers=layers, hidden_size=D, ffn_hidden_size=F, num_attention_heads=H, num_query_groups=G, kv_channels=K,
        vocab_size=512,
    )  # fmt: skip
    parallel = ParallelConfig(
        tensor_model_parallel_size=TP, sequence_parallel=True, pipeline_model_parallel_size=ranks
    )
    train = TrainConfig(seq_length=S, global_batch_size=32)
    return Config(model=ModelConfig(decoder), parallel=parallel, memory=MEMORY[memory], train=train)


@dataclasses.dataclass(frozen=True)
class Compiled:
    device_bytes: int
    host_bytes: int
    hlo: str
    costs: list[ActivationCost]

    @property
    def host_bytes_by_formula(self) -> int:
        return sum(cost.host_bytes for cost in self.costs)


def compile_step(config: Config) -> Compiled:
    cluster = parse_topology("h100:1x8")
    validate(config, cluster.num_devices, "gpu")
    mesh = build_mesh(MeshLayout.from_config(config, cluster.num_devices), described_devices(cluster))
    program = build_program(config, mesh, "gpu")
    batch = BatchLayout.from_config(config, mesh, num_microbatches(config, cluster.num_devices)).shapes()
    executable = program.train_step.lower(program.abstract_state, batch).compile()
    memory = executable.memory_analysis()
    costs = program.activation_costs()
    return Compiled(memory.temp_size_in_bytes, memory.host_temp_size_in_bytes, executable.as_text(), costs)


@functools.cache
def language(memory: str, ranks: int, layers: int, _kept: int) -> Compiled:
    return compile_step(language_model(memory, ranks, layers))


def held(names, kept_layers: int) -> int:
    """By the formula: what some activations of so many layers hold on a GPU."""
    return sum(BYTES[name] for name in names) * S * kept_layers


def test_the_table_of_activations_is_the_formula():
    for memory, run in (("kept", NO_PIPELINE), ("offload", PIPELINE)):
        costs = language(memory, *run).costs
        assert {cost.name: cost.layer_bytes for cost in costs} == {name: BYTES[name] * S for name in BYTES}
        held_bytes = {cost.name: cost.device_bytes + cost.host_bytes for cost in costs}
        assert held_bytes == {name: BYTES[name] * S * run[2] for name in BYTES}
    flops = {cost.name: cost.recompute_flops for cost in language("kept", *NO_PIPELINE).costs}
    products = {"query": D * H * K, "key": D * G * K, "value": D * G * K, "mlp_norm_input": H * K * D}
    products |= {"mlp_gate": D * F, "mlp_up": D * F, "core_attn": 2 * H * K * S // 2}
    assert flops == {name: 2 * products.get(name, 0) * S // TP for name in BYTES}


def test_what_is_offloaded_leaves_the_device_and_arrives_in_host_memory():
    kept, offload = language("kept", *NO_PIPELINE), language("offload", *NO_PIPELINE)
    expected = held(OFFLOADED, 16)
    assert kept.host_bytes == 0
    assert offload.host_bytes == offload.host_bytes_by_formula == expected
    # less than all of it by what is on its way: one layer's at most
    freed = kept.device_bytes - offload.device_bytes
    print(f"freed {freed / 2**20:.0f} MiB of {expected / 2**20:.0f}")
    assert expected - held(OFFLOADED, 1) <= freed <= 1.01 * expected


def test_in_a_pipeline_the_buffers_of_what_is_offloaded_lie_in_host_memory_as_a_whole():
    offload, layers = language("offload", *PIPELINE), PIPELINE[2]
    assert offload.host_bytes == offload.host_bytes_by_formula == held(OFFLOADED, layers)
    in_host, on_device = (
        set(re.findall(rf"\w+\[{layers},1,([\d,]+)\]{{[\d,]+{space}}}", offload.hlo)) for space in (r":S\(5\)", "")
    )
    residual, ffn = f"{S // TP},{D}", f"{S},{F // TP}"
    query, key, core_attn, lse = f"{S},{H // TP},{K}", f"{S},{G // TP},{K}", f"{S},{H * K // TP}", f"{H // TP},{S}"
    assert in_host == {residual, query, key, core_attn, lse}
    assert on_device == {residual, ffn}  # outputs of the norms, and the feed-forward


def test_what_is_recomputed_leaves_the_device():
    kept, selective = language("kept", *NO_PIPELINE), language("selective", *NO_PIPELINE)
    expected = held(RECOMPUTED, 16)
    assert kept.device_bytes - selective.device_bytes == pytest.approx(expected, rel=0.03)
    assert selective.host_bytes == 0


def loops_with_host_copies(hlo: str) -> dict[str, list[str]]:
    """The instructions, in the order of the schedule, of computations that copy slices to or from host memory."""
    computations, lines = {}, []
    for line in hlo.splitlines():
        if line.endswith("{") and line.startswith(("%", "ENTRY")):
            name, lines = line.split()[0], []
        elif line.startswith("}"):
            if any("S(5)" in one and "fusion-start(" in one for one in lines):
                computations[name] = lines
        else:
            lines.append(line)
    return computations


def compute_meanwhile(lines: list[str]) -> dict[str, int]:
    """Copies to and from host memory -> matrix products and attention kernels between their start and their end."""
    found = {}
    for start, line in enumerate(lines):
        if "S(5)" not in line or "fusion-start(" not in line:
            continue
        name = line.split()[0]
        end = next(i for i, one in enumerate(lines) if f"fusion-done({name})" in one)
        heavy = re.compile(r"__cublas|__triton_gemm|gemm_fusion|__cudnn")
        found[name] = sum(bool(heavy.search(one)) for one in lines[start:end])
    return found


@pytest.mark.parametrize("run", [NO_PIPELINE, PIPELINE], ids=["no pipeline", "pipeline"])
def test_copies_to_and_from_the_host_overlap_with_compute(run):
    hlo = language("offload", *run).hlo
    loops = loops_with_host_copies(hlo)
    # a loop over the layers forward and one backward; a pipeline has each in two of its three phases
    assert len(loops) == (2 if run is NO_PIPELINE else 4)
    for lines in loops.values():
        meanwhile = compute_meanwhile(lines)
        assert len(meanwhile) == len(OFFLOADED) + 1  # attention's log-sum-exp is an array of its own
        assert min(meanwhile.values()) >= 1, meanwhile


def test_what_is_kept_lies_in_the_order_in_which_it_was_made():
    """XLA may have all layers' arrays reordered, a copy of all of them, where that suits what reads one."""
    for memory, run in (("kept", NO_PIPELINE), ("offload", NO_PIPELINE), ("offload", PIPELINE)):
        layouts = re.findall(rf"\w+\[{run[2]},1,[\d,]+\]\{{([\d,]+)", language(memory, *run).hlo)
        assert set(layouts) <= {"3,2,1,0", "4,3,2,1,0"}


def test_nothing_in_host_memory_is_copied_as_a_whole():
    for run in (NO_PIPELINE, PIPELINE):
        hlo = language("offload", *run).hlo
        assert not re.findall(r"= \w+\[[\d,]*\]\{[\d,]*:S\(5\)\} copy\(", hlo)
        assert "copy-start(" not in hlo


def test_an_encoder_of_its_own_layout_offloads_its_own_and_a_decoder_that_is_recomputed_its_inputs_alone():
    """Hetero DP: each GPU of the decoder's tensor group encodes rows of patches by itself."""
    config = vision_language_model("qwen2_5_vit", 4, 1, sequence_parallel=True)
    config = dataclasses.replace(
        config,
        memory=_FULL,
        parallel=dataclasses.replace(
            config.parallel, enable_encoder_hetero_dp=True, data_parallel_sharding_strategy="optim_grads_params"
        ),
        model=dataclasses.replace(
            config.model,
            encoder=dataclasses.replace(
                config.model.encoder, recompute_granularity=None, recompute_method=None, recompute_num_layers=None,
                activations=(("layer_input", "offload"), ("core_attn", "offload"), ("mlp_act", "recompute")),
            ),
        ),
    )  # fmt: skip
    compiled = compile_step(config)
    # two layers of width 64 with 4 heads of 16, in bfloat16, and the log-sum-exp
    of_encoder = {cost.name: cost.host_bytes for cost in compiled.costs if cost.part == "encoder"}
    assert of_encoder["layer_input"] == 2 * PATCHES * 64 * 2
    assert of_encoder["core_attn"] == 2 * PATCHES * (64 * 2 + 4 * 4)
    assert sum(of_encoder.values()) == of_encoder["layer_input"] + of_encoder["core_attn"]
    # [layers, rows, patches, width] of both, and the log-sum-exp [layers, rows, heads, patches]; and of the decoder
    # [layers, rows, tokens, width], over 4 GPUs
    allocated = re.findall(r"= (\S+){[\d,]*:S\(5\)} custom-call.*AllocateBuffer", compiled.hlo)
    inputs = f"bf16[{LAYERS},1,{SEQ_LENGTH // 4},{WIDTH}]"
    assert sorted(allocated) == [*2 * [f"bf16[2,1,{PATCHES},64]"], inputs, f"f32[2,1,4,{PATCHES}]"]
    # they are read by the time when the decoder's are made, which take their place
    of_decoder = {cost.name: cost.host_bytes for cost in compiled.costs if cost.part == "decoder" and cost.host_bytes}
    assert of_decoder == {"layer_input": LAYERS * ACTIVATION_BYTES // 4}
    assert compiled.host_bytes == max(sum(of_encoder.values()), sum(of_decoder.values()))
