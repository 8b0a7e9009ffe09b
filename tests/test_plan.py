import dataclasses
import io
import json

import pytest
from rich.console import Console

from jaxforge.config import ConfigError, load_config, resolve, validate
from jaxforge.plan import main, show
from jaxforge.training import planning
from jaxforge.training.activation_costs import ActivationCost
from jaxforge.training.advice import Change
from jaxforge.training.collectives import Collective
from jaxforge.training.memory_parts import MemoryParts
from jaxforge.training.planning import DeviceBytes, Pipeline, PlanReport
from pallas_kernels.flash_attention import HeadTooWide

GIB = 2**30


ONE_STAGE = Pipeline(1, 0.0, 1, [[0]])


def report(peak_gib: int, *, collectives: tuple[Collective, ...] = (), pipeline: Pipeline = ONE_STAGE) -> PlanReport:
    """A report whose figures are whole GiB, on GPUs of 80 GiB."""
    temporary = peak_gib - 13
    return PlanReport(
        topology="h100:1x8",
        device_bytes=DeviceBytes(13 * GIB, temporary * GIB, 12 * GIB, 12 * GIB, peak_gib * GIB, 80 * GIB),
        host_bytes=0,
        fits=peak_gib + 2 <= 80,
        collectives=list(collectives),
        model_flops_per_step=8 * 989 * 10**12,
        tokens_per_step=65536,
        compile_seconds=1.0,
        pipeline=pipeline,
        memory_parts=MemoryParts(
            4 * GIB, 8 * GIB, GIB, 6 * GIB, 2 * GIB, 3 * GIB, GIB, communication=GIB, rest=(temporary - 13) * GIB,
            host_state=0,
        ),
        reserve_bytes=2 * GIB,
        num_parameters=10**9,
        activations=[
            ActivationCost("decoder", "mlp_up", "save", 2**20, 3 * 10**9, 2 * GIB, 0),
            ActivationCost("encoder", "query", "offload", 3 * 2**19, 10**9, 0, 3 * GIB),
        ],
        advice=[] if peak_gib + 2 <= 80 else [Change(("--config.loss.cross_entropy_loss_fusion=True",), 3 * GIB)],
    )


def shown(report: PlanReport) -> str:
    console = Console(file=io.StringIO(), width=160)
    show(report, console)
    return console.file.getvalue()


def test_the_memory_table_adds_up_to_the_peak():
    table = shown(report(33))
    figures = {
        cells[1].strip(): float(cells[2])
        for cells in (line.replace("│", "|").split("|") for line in table.splitlines() if "│" in line)
        if cells[2].strip().replace(".", "").isdigit() and len(cells) == 5
    }
    top = ("parameters", "optimizer (moments)", "batch", "temporary", "results")
    below = (
        "gradients (fp32 sum, bfloat16)", "compute weights", "activations of layers", "logits",
        "communication (largest buffer)", "workspace",
    )  # fmt: skip
    assert sum(figures[name] for name in top) == figures["peak"] == 33
    assert sum(figures[name] for name in below) == figures["temporary"] == 20


def test_what_lies_in_host_memory_of_the_state_is_shown_where_some_does():
    offloaded = report(33)
    offloaded = dataclasses.replace(
        offloaded,
        host_bytes=7 * GIB,
        memory_parts=dataclasses.replace(offloaded.memory_parts, host_state=5 * GIB),
    )
    rows = [line.replace("│", " ").split() for line in shown(offloaded).splitlines()]
    assert ["host", "memory", "7.00", "compiled", "program"] in rows
    assert ["masters", "and", "moments", "5.00", "shapes", "and", "shardings"] in rows
    assert "masters and moments" not in shown(report(33))


def test_activations_are_shown_with_what_they_take_and_what_recomputing_them_would():
    rows = [line.replace("│", " ").split() for line in shown(report(33)).splitlines()]
    assert ["decoder", "mlp_up", "save", "1.00", "2.00", "0.00", "3"] in rows
    assert ["encoder", "query", "offload", "1.50", "0.00", "3.00", "1"] in rows


def test_the_verdict_says_how_much_is_left_or_missing():
    assert "fits: 45.00 GiB to spare" in shown(report(33))
    too_large = shown(report(79))
    assert "does not fit: 1.00 GiB too much" in too_large
    assert "  --config.loss.cross_entropy_loss_fusion=True would free 3.00 GiB (formula)" in too_large
    assert "would free" not in shown(report(33))


def test_a_run_that_needs_more_than_jax_takes_by_default_is_told_the_setting():
    assert "MEM_FRACTION" not in shown(report(60))
    # 75 % of 80 GiB are 60; all but the reserve of 2 are 97.5 %
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION=0.97" in shown(report(61))


def test_collectives_of_one_kind_over_the_same_axes_are_shown_together():
    collectives = (
        Collective("all-gather", ("tensor_outer", "tensor_inner"), bytes=2**20, count=1024, in_loop=True),
        Collective("all-gather", ("tensor_outer", "tensor_inner"), bytes=2**21, count=512, in_loop=True),
        Collective("all-reduce", ("replica",), bytes=2**30, count=1, in_loop=False),
    )
    table = shown(report(33, collectives=collectives))
    lines = [" ".join(line.replace("│", " ").split()) for line in table.splitlines()]
    assert "all-gather tensor_outer, tensor_inner yes 1536 2.00 2.00" in lines
    assert "all-reduce replica no 1 1024.00 1.00" in lines


def test_a_pipeline_is_told_in_a_line():
    pipeline = Pipeline(ticks=22, bubble_fraction=3 / 19, max_chunks_in_flight=11, layers_by_rank=[[0, 3], [1], [2, 4]])
    assert (
        "pipeline of 3 ranks with 1 to 2 layers each; schedule: 22 ticks, bubble 15.8%, at most 11 chunks in"
        " flight on a rank"
    ) in shown(report(33, pipeline=pipeline))
    assert "pipeline" not in shown(report(33))


def test_the_time_at_peak_is_flops_over_what_all_gpus_can_do():
    assert "1.00 s at the peak of 8 H100" in shown(report(33))


def test_the_command_writes_the_figures_as_json(monkeypatch, tmp_path):
    monkeypatch.setattr(planning, "plan", lambda config, topology, say, picture: report(33))
    file = tmp_path / "p.json"
    arguments = ["--config=configs/llama3_1_8b_pretrain.py", "--topology=h100:1x8", f"--json={file}"]
    assert main(arguments) == 0
    figures = json.loads(file.read_text())
    assert figures["device_bytes"]["peak"] == 33 * GIB
    assert figures["fits"] is True


PLAN = ["--config=configs/llama3_1_8b_pretrain.py", "--topology=h100:1x8"]
PP_4 = ["--config.parallel.tensor_model_parallel_size=2", "--config.parallel.pipeline_model_parallel_size=4"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--topology=h100:1x8"], "--config"),
        (["--config=configs/llama3_1_8b_pretrain.py"], "--topology"),
        (["--config=configs/llama3_1_8b_pretrain.py", "--topology=v100:1x8"], "use h100, h200, b200, a100"),
        (["--config=configs/llama3_1_8b_pretrain.py", "--topology=h100:1x6"], "6 devices don.t divide"),
        (
            ["--config=configs/llama3_1_8b_pretrain.py", "--topology=h100:1x8", "--json=/nowhere/p.json"],
            "can't be written",
        ),
        (["--config=configs/llama3_1_8b_pretrain.py", "--topology=h100:1x8", "--config.train.step=1"], "mean steps"),
        ([*PLAN, "--picture=/nowhere/p.png"], "--picture=/nowhere/p.png can't be written"),
        ([*PLAN, "--picture=p.pdf"], "--picture=.*p.pdf isn't a PNG file; name it p.png"),
        (
            [*PLAN, "--picture=p.png"],
            r"the schedule \(.*p.png\) needs a pipeline.*=1; leave out --picture, or use more",
        ),
        ([*PLAN, "--picture="], "--picture= can't be written"),
        (
            ["--config=configs/demo_vlm.py", "--topology=h100:1x8", "--config.model.decoder.vocab_size=100"],
            "vocab_size=100 is smaller than the byte tokenizer's vocabulary; use 261",
        ),
        (
            [*PLAN, *PP_4, "--config.parallel.pipeline_model_parallel_layout=Balanced"],
            "has an unknown symbol 'B'(.|\n)*did you mean balanced",
        ),
        (
            [*PLAN, *PP_4, "--config.parallel.pipeline_model_parallel_layout=Et|t*10|t*11|t*11L"],
            "places 33 decoder layers",
        ),
        (
            [*PLAN, "--config.parallel.pipeline_model_parallel_size=4"],
            "8 devices don't divide into groups of .*=4 x .*=4; use a pipeline of 1 or 2, or 16 devices",
        ),
    ],
)
def test_what_the_user_can_mend_is_a_config_error_before_anything_is_compiled(
    monkeypatch, tmp_path, arguments, message
):
    monkeypatch.setattr(planning, "described_devices", lambda topology: pytest.fail("went on"))
    arguments = [one.replace("--picture=p", f"--picture={tmp_path}/p") for one in arguments]
    with pytest.raises(ConfigError, match=message):
        main(arguments)


@pytest.mark.parametrize(
    "error, message",
    [
        (RuntimeError("cuDNN is not detected."), "pip install --no-deps nvidia-cudnn-cu12"),
        (RuntimeError("UNAVAILABLE: No PTX compilation provider is available."), "nvidia-cuda-nvcc-cu12"),
        (NotImplementedError("The head dim must be <= 128 and a multiple of 8, but got 12."), "attention_backend=xla"),
        (HeadTooWide("heads of 512 and values of 512"), "is flash on GPU, which can't compute this: heads of 512"),
    ],
)
def test_a_missing_library_or_an_unsupported_head_is_told_with_the_way_out(monkeypatch, error, message):
    def fail(*_):
        raise error

    monkeypatch.setattr(planning, "described_devices", lambda topology: [None])
    monkeypatch.setattr(planning, "_compile_something", lambda device: None)
    monkeypatch.setattr(planning, "build_mesh", lambda layout, devices: None)
    monkeypatch.setattr(planning, "describe_plan", lambda *_: "")
    monkeypatch.setattr(planning, "build_program", fail)
    with pytest.raises(ConfigError, match=message):
        backend = "flash" if isinstance(error, HeadTooWide) else "cudnn"
        overrides = [f"train.attention_backend={backend}"]
        planning.plan(load_config("configs/llama3_1_8b_pretrain.py", overrides), say=lambda line: None)


@pytest.mark.parametrize("recipe, num_gpus", [
    ("qwen2_5_vl_7b_pretrain", 8), ("llama3_1_8b_pretrain", 8), ("qwen3_30b_a3b_pretrain", 16),
    ("deepseek_v3_pretrain", 1024),
])  # fmt: skip
def test_a_recipe_is_valid_on_its_gpus(recipe, num_gpus):
    validate(resolve(load_config(f"configs/{recipe}.py")), num_gpus, "gpu")
