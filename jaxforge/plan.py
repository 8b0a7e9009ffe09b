"""Compiles a run for a cluster that isn't here, and shows what it needs.

    python -m jaxforge.plan --config=configs/qwen2_5_vl_7b_pretrain.py --topology=h100:1x8 [--json=FILE]
        [--picture=FILE.png]

Memory per GPU against its capacity, the pipeline's schedule, the collectives, and the model's FLOPs, of the train step
that `jaxforge.train` would run.  Exit code 0 whether it fits or not, 2 on a config error.
"""

import json
import os
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from jaxforge.config import ConfigError, command_line, load_config

if TYPE_CHECKING:
    from jaxforge.training.planning import Pipeline, PlanReport

_WIDTH = 140  # columns of a table that isn't shown in a terminal


def main(argv: Sequence[str]) -> int:
    parser = command_line.parser("plan", "Compiles a run's train step for GPUs that aren't here: memory, collectives.")
    parser.add_argument(
        "--topology", required=True, metavar="GPU:HOSTSxGPUS", help="such as h100:2x8; also h200, b200, a100"
    )
    parser.add_argument("--json", metavar="FILE", help="also write the figures to this file")
    parser.add_argument("--picture", metavar="FILE.png", help="also draw the schedule of the pipeline")
    flags, overrides = command_line.parse(parser, argv)
    config = load_config(flags.config, overrides)
    for name in ("json", "picture"):  # before minutes of compiling
        if (path := getattr(flags, name)) is not None:
            check_writable(path, f"--{name}")
    if flags.picture is not None and Path(flags.picture).suffix != ".png":
        raise ConfigError(f"--picture={flags.picture} isn't a PNG file; name it {Path(flags.picture).stem}.png")

    # Without CUDA's libraries JAX can't start the plugin as a backend; as a compiler it needs none of them.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from jaxforge.training.planning import plan

    # in a file or a pipe names would be cut at the 80 columns of no terminal
    console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else _WIDTH)
    report = plan(
        config,
        flags.topology,
        say=lambda line: console.print(line, markup=False),
        picture=Path(flags.picture) if flags.picture else None,
    )
    show(report, console)
    if flags.json:
        Path(flags.json).write_text(json.dumps(report.to_json(), indent=2) + "\n")
        console.print(f"figures in {flags.json}", markup=False)
    return 0


def check_writable(path: str, flag: str) -> None:
    """ConfigError where the file can't be written; leaves none behind that wasn't there."""
    was_there = Path(path).exists()
    try:
        Path(path).open("a").close()
    except OSError as error:
        raise ConfigError(
            f"{flag}={path} can't be written ({error.strerror}); name a file in a folder that can"
        ) from error
    if not was_there:
        Path(path).unlink()


def show(report: "PlanReport", console: Console) -> None:
    """Prints the report as tables."""
    console.print(f"compiled in {report.compile_seconds:.0f} s")
    console.print(memory_table(report))
    console.print(verdict(report), markup=False)
    for change in report.advice:
        console.print(f"  {' '.join(change.settings)} would free {gib(change.frees)} GiB (formula)", markup=False)
    if len(report.pipeline.layers_by_rank) > 1:
        console.print(pipeline_line(report.pipeline), markup=False)
    if report.activations:
        console.print(activations_table(report))
    console.print(collectives_table(report))
    from jaxforge.cluster import parse_topology

    cluster = parse_topology(report.topology)
    at_peak = report.model_flops_per_step / cluster.gpu.peak_flops / cluster.num_devices
    console.print(
        f"{report.num_parameters / 1e9:.2f} G parameters; a step of {report.tokens_per_step} tokens is"
        f" {report.model_flops_per_step:.3g} model FLOPs, {at_peak:.2f} s at the peak of"
        f" {cluster.num_devices} {cluster.gpu.name.upper()}",
        markup=False,
    )


def memory_table(report: "PlanReport") -> Table:
    """Memory of one GPU, with where each figure comes from."""
    table = Table(title=f"each GPU of {report.topology}", title_justify="left")
    table.add_column("memory")
    table.add_column("GiB", justify="right")
    table.add_column("from", style="dim")
    parts, device = report.memory_parts, report.device_bytes
    shapes, formula, compiler = "shapes and shardings", "formula", "compiled program"
    rest = max(0, device.output - device.aliased)
    rows = [
        ("parameters", parts.parameters, shapes),
        ("optimizer (moments)", parts.optimizer, shapes),
        ("batch", parts.batch, shapes),
        ("temporary", device.temporary, compiler),
        ("  gradients (fp32 sum, bfloat16)", parts.gradients, formula),
        ("  compute weights", parts.compute_weights, formula),
        ("  activations of layers", parts.activations, formula),
        ("  logits", parts.logits, formula),
        ("  communication (largest buffer)", parts.communication, compiler),
        ("  workspace", parts.rest, "the rest of temporary"),
        ("results", rest, compiler),
    ]
    for name, size, source in rows:
        table.add_row(name, gib(size), source)
    table.add_section()
    table.add_row("peak", gib(device.peak), compiler)
    table.add_row("reserve (CUDA, NCCL, cuDNN)", gib(report.reserve_bytes), "allowance")
    table.add_row("capacity", gib(device.capacity), "data sheet")
    table.add_row("host memory", gib(report.host_bytes), compiler)
    if parts.host_state:
        table.add_row("  masters and moments", gib(parts.host_state), shapes)
    return table


def activations_table(report: "PlanReport") -> Table:
    """What each activation costs: where it is kept, and what computing it again would take instead."""
    table = Table(title="activations of the layers, on each GPU", title_justify="left")
    for name in ("of", "activation", "action"):
        table.add_column(name)
    for name in ("MiB a layer", "GiB kept", "GiB in host memory", "GFLOP to recompute a layer"):
        table.add_column(name, justify="right")
    for one in report.activations:
        table.add_row(
            one.part,
            one.name,
            one.action,
            f"{one.layer_bytes / 2**20:.2f}",
            gib(one.device_bytes),
            gib(one.host_bytes),
            f"{one.recompute_flops / 1e9:.3g}",
        )
    return table


def verdict(report: "PlanReport") -> str:
    """Whether it fits, and what the user must set for it."""
    from jaxforge.training.planning import DEFAULT_MEMORY_FRACTION

    device = report.device_bytes
    needed = device.peak + report.reserve_bytes
    if not report.fits:
        return f"does not fit: {gib(needed - device.capacity)} GiB too much"
    text = f"fits: {gib(device.capacity - needed)} GiB to spare"
    if device.peak > DEFAULT_MEMORY_FRACTION * device.capacity:
        text += (
            f"; JAX takes only {DEFAULT_MEMORY_FRACTION:.0%} of a GPU by default: run with"
            f" XLA_PYTHON_CLIENT_MEM_FRACTION={1 - report.reserve_bytes / device.capacity:.2f}"
        )
    return text


def pipeline_line(pipeline: "Pipeline") -> str:
    """How full the ranks are, and what the schedule costs; what each rank holds is said before compiling."""
    from jaxforge.parallel.pipeline.summary import describe_schedule

    counts = sorted({len(layers) for layers in pipeline.layers_by_rank})
    layers = " to ".join(str(count) for count in (counts[:1] + counts[1:][-1:]))
    schedule = describe_schedule(pipeline.ticks, pipeline.bubble_fraction, pipeline.max_chunks_in_flight)
    return f"pipeline of {len(pipeline.layers_by_rank)} ranks with {layers} layers each; {schedule}"


def collectives_table(report: "PlanReport") -> Table:
    """Collectives by kind, axes and place; the file of --json has them by size too."""
    table = Table(title="collectives of one step, on each GPU", title_justify="left")
    for name in ("kind", "over", "in a loop"):
        table.add_column(name)
    for name in ("count", "largest, MiB", "all, GiB"):
        table.add_column(name, justify="right")
    rows: dict[tuple, list[int]] = defaultdict(lambda: [0, 0, 0])
    for one in report.collectives:
        row = rows[one.kind, one.axes, one.in_loop]
        row[0] += one.count
        row[1] = max(row[1], one.bytes)
        row[2] += one.bytes * one.count
    for (kind, axes, in_loop), (count, largest, total) in sorted(rows.items(), key=lambda item: -item[1][2]):
        table.add_row(
            kind, ", ".join(axes), "yes" if in_loop else "no", str(count), f"{largest / 2**20:.2f}", gib(total)
        )
    return table


def gib(count: float) -> str:
    return f"{count / 2**30:.2f}"


if __name__ == "__main__":
    command_line.run(main)
