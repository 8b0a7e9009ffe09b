"""What a run would need on a cluster that isn't here: its very train step, compiled for described GPUs."""

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from jaxforge.cluster import (
    Gpu,
    MeshLayout,
    Topology,
    axes_crossing_nodes,
    build_mesh,
    describe,
    described_devices,
    parse_topology,
)
from jaxforge.config import Config, ConfigError, resolve, validate
from jaxforge.config.derived import data_source, num_microbatches, vocabulary_is_over_stages
from jaxforge.data.batches import BatchLayout
from jaxforge.data.digits import checked_encoder
from jaxforge.parallel.pipeline.choice import layer_order, num_parameters, pipeline_layout
from jaxforge.parallel.pipeline.layout import PipelineLayout
from jaxforge.parallel.pipeline.picture import MemoryBar, draw_schedule
from jaxforge.parallel.pipeline.summary import describe_pipeline, describe_sizes, in_flight, schedule_of
from jaxforge.training.activation_costs import ActivationCost
from jaxforge.training.advice import Change, changes_that_free_most
from jaxforge.training.backends import attention_backend, compute_dtype, missing_libraries_as_config_errors
from jaxforge.training.collectives import Collective, find_collectives
from jaxforge.training.describe import describe_encoder, describe_experts, describe_step
from jaxforge.training.flops import model_flops_per_step
from jaxforge.training.memory_parts import MemoryParts, memory_parts
from jaxforge.training.program import Program, build_program, bytes_while_running

# What the compiler doesn't see: the CUDA context and the kernels' code, NCCL's buffers, cuDNN's workspace (it is 0 in
# the compiler's account), and the next batch.  2 GiB is an allowance, not a measurement.
RESERVE_BYTES = 2 * 2**30
# The share of a GPU that JAX takes for itself unless told otherwise (docs.jax.dev, "GPU memory allocation").
DEFAULT_MEMORY_FRACTION = 0.75
_HEARTBEAT_SECONDS = 15


@dataclasses.dataclass(frozen=True)
class DeviceBytes:
    """Bytes on each GPU while a step runs, as the compiler's buffer assignment has them; `capacity` is the GPU's.

    `peak` is arguments + temporary + output - aliased: the GPU runtime holds every allocation of a program for as long
    as it runs, so this is what is taken, and a little more than what is alive at the worst moment.
    """

    arguments: int
    temporary: int
    output: int
    aliased: int
    peak: int
    capacity: int


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """How the microbatches pass through the stages.  Without pipeline parallelism there is one stage: no bubble.

    Attributes:
      ticks: of the schedule (`jaxforge.parallel.pipeline.schedule`); without a pipeline, microbatches.
      bubble_fraction: share of a step's time in which a rank has nothing to compute.
      max_chunks_in_flight: chunks of the fullest rank that are between their forward and their backward at a time.
      layers_by_rank: decoder layers of each rank, chunk by chunk.
    """

    ticks: int
    bubble_fraction: float
    max_chunks_in_flight: int
    layers_by_rank: list[list[int]]


@dataclasses.dataclass(frozen=True)
class PlanReport:
    """What `plan` found; `to_json` has the keys that others rely on.

    Attributes:
      topology: such as "h100:1x8".
      host_bytes: in host memory, for each GPU.
      fits: whether peak + reserve_bytes is within the GPU's capacity.
      collectives: as `jaxforge.training.collectives` describes them.
      model_flops_per_step: of all GPUs together, as `jaxforge.training.flops` counts them.
      tokens_per_step: of full rows.
      compile_seconds: tracing and compiling.
      num_parameters: of the whole model, frozen ones included.
      activations: what each activation of a layer costs.
      advice: for a run that doesn't fit, the changes that would free most.
    """

    topology: str
    device_bytes: DeviceBytes
    host_bytes: int
    fits: bool
    collectives: list[Collective]
    model_flops_per_step: int
    tokens_per_step: int
    compile_seconds: float
    pipeline: Pipeline
    memory_parts: MemoryParts
    reserve_bytes: int
    num_parameters: int
    activations: list[ActivationCost]
    advice: list[Change]

    def to_json(self) -> dict[str, Any]:
        """As plain dicts and lists."""
        return dataclasses.asdict(self)


def plan(
    config: ConfigDict | Config,
    topology: str = "h100:1x8",
    say: Callable[[str], None] = print,
    picture: Path | None = None,
) -> PlanReport:
    """Compiles the train step of a run for GPUs that aren't here, and reports its memory and communication.

    Nothing runs, and no GPU is used.  `train.simulated_devices` is about this machine, and is left aside.

    Args:
      config: from `load_config`, perhaps changed since.
      topology: GPU:HOSTSxGPUS, where GPU is h100, h200, b200 or a100.
      say: takes lines of progress.
      picture: a PNG file for the chart of the pipeline's schedule, drawn before anything is compiled.

    Raises:
      ConfigError: for a config that such a cluster can't run, for a picture of no pipeline, or without the compiler.
    """
    if not isinstance(config, Config):
        config = resolve(config)
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, simulated_devices=None))
    cluster = parse_topology(topology)
    validate(config, cluster.num_devices, "gpu")
    if data_source(config) == "digits":
        checked_encoder(config)
    stages = pipeline_layout(config)
    microbatches = num_microbatches(config, cluster.num_devices)
    if picture is not None:
        if stages is None:
            raise ConfigError(
                f"a picture of the schedule ({picture}) needs a pipeline, but parallel.pipeline_model_parallel_size=1;"
                " leave out --picture, or use more ranks"
            )
        draw_schedule(schedule_of(stages, microbatches), picture)
        say(f"schedule drawn in {picture}")
    layout = MeshLayout.from_config(config, cluster.num_devices)
    devices = described_devices(cluster)
    mesh = build_mesh(layout, devices)
    say(describe_plan(config, cluster, layout, mesh))

    began = time.perf_counter()
    with _heartbeat(say), missing_libraries_as_config_errors(attention_backend(config, "gpu")):
        _compile_something(devices[0])
        program = build_program(config, mesh, "gpu")
        batch = BatchLayout.from_config(config, mesh, microbatches).shapes()
        compiled = program.train_step.lower(program.abstract_state, batch).compile()
    compile_seconds = time.perf_counter() - began

    analysis, hlo = compiled.memory_analysis(), compiled.as_text()
    assert analysis is not None and hlo is not None  # other compilers may give none
    device_bytes = _device_bytes(analysis, cluster.gpu)
    fits = device_bytes.peak + RESERVE_BYTES <= device_bytes.capacity

    costs, collectives = program.activation_costs(), find_collectives(hlo, dict(mesh.shape))
    largest = max((one.bytes for one in collectives), default=0)
    parts = memory_parts(config, program, costs, batch, device_bytes.temporary, stages, largest)
    if picture is not None and stages is not None:
        draw_schedule(schedule_of(stages, microbatches), picture, _memory_bars(parts, device_bytes, stages))
        say(f"and the memory of each rank, in {picture}")

    def program_of(config: Config) -> Program:
        return build_program(config, build_mesh(MeshLayout.from_config(config, cluster.num_devices), devices), "gpu")

    state = program.abstract_state
    return PlanReport(
        topology=topology,
        device_bytes=device_bytes,
        host_bytes=analysis.host_argument_size_in_bytes
        + analysis.host_output_size_in_bytes
        + analysis.host_temp_size_in_bytes
        - analysis.host_alias_size_in_bytes,
        fits=fits,
        collectives=collectives,
        model_flops_per_step=model_flops_per_step(config),
        tokens_per_step=config.train.global_batch_size * config.train.seq_length,
        compile_seconds=compile_seconds,
        pipeline=_pipeline(config, stages, microbatches),
        memory_parts=parts,
        reserve_bytes=RESERVE_BYTES,
        num_parameters=sum(num_parameters(state[kind], layer_order(config)) for kind in ("trainable", "frozen")),
        activations=costs,
        advice=[] if fits else changes_that_free_most(config, cluster.num_devices, program_of),
    )


def describe_plan(config: Config, cluster: Topology, layout: MeshLayout, mesh: jax.sharding.Mesh) -> str:
    """What will be compiled for what, known before it is compiled."""
    stages = pipeline_layout(config)
    microbatches = num_microbatches(config, cluster.num_devices)
    parts = [f"decoder TP {layout.tensor_parallel_size}"]
    if config.model.encoder is not None:
        parts.append(describe_encoder(config))
    if stages is not None:
        parts.append(describe_sizes(stages, vocabulary_is_over_stages(config)))
    crossing = [axis for axis, crosses in axes_crossing_nodes(mesh).items() if crosses]
    return "\n".join(
        [
            f"compiling the train step for {cluster.num_devices} x {cluster.gpu.description}"
            f" ({cluster.hosts} x {cluster.gpus_per_host}): {', '.join(parts)}, DP {layout.data_parallel_size}"
            f"{describe_experts(config)},"
            f" {compute_dtype(config, 'gpu').name}, {attention_backend(config, 'gpu')} attention",
            f"a step is {describe_step(config, microbatches)}",
            *([describe_pipeline(stages, microbatches)] if stages is not None else []),
            describe(mesh, layout) if crossing else "every axis stays inside a node",
        ]
    )


@contextlib.contextmanager
def _heartbeat(say: Callable[[str], None]) -> Iterator[None]:
    """Says every few seconds that the compiler is still at work: it reports no progress of its own."""
    done = threading.Event()
    began = time.perf_counter()

    def beat():
        while not done.wait(_HEARTBEAT_SECONDS):
            say(f"compiling: {time.perf_counter() - began:.0f} s")

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _compile_something(device: Any) -> None:
    """A program of one multiplication: without ptxas a large one ends the process after minutes, this one raises."""
    x = jax.ShapeDtypeStruct((256,), np.float32, sharding=jax.sharding.SingleDeviceSharding(device))
    jax.jit(lambda x: x * 2).lower(x).compile()


def _device_bytes(analysis: Any, gpu: Gpu) -> DeviceBytes:
    arguments, temporary = analysis.argument_size_in_bytes, analysis.temp_size_in_bytes
    output, aliased = analysis.output_size_in_bytes, analysis.alias_size_in_bytes
    return DeviceBytes(arguments, temporary, output, aliased, bytes_while_running(analysis), gpu.capacity)


def _memory_bars(parts: MemoryParts, device: DeviceBytes, stages: PipelineLayout) -> list[MemoryBar]:
    """All ranks run one program, so each has places for as many layers as the fullest one has."""
    shown = {
        "masters, moments": parts.parameters + parts.optimizer,
        "gradients": parts.gradients,
        "compute weights": parts.compute_weights,
        "activations": parts.activations,
        "logits": parts.logits,
        "communication": parts.communication,
    }
    # parts that don't exist at the same time come to more than the whole
    scale = min(1.0, device.peak / max(1, sum(shown.values())))
    shown = {name: int(size * scale) for name, size in shown.items()}
    shown["the rest"] = max(0, device.peak - sum(shown.values()))
    return [
        MemoryBar(shown, device.capacity, f"{len(stages.layers_of_rank(rank))} of {stages.slots_per_rank} layers")
        for rank in range(stages.pipeline_size)
    ]


def _pipeline(config: Config, stages: PipelineLayout | None, microbatches: int) -> Pipeline:
    if stages is None:
        decoder = config.model.decoder
        return Pipeline(microbatches, 0.0, 1, [list(range(decoder.num_layers + decoder.mtp_num_layers))])
    schedule = schedule_of(stages, microbatches)
    layers = [list(stages.layers_of_rank(rank)) for rank in range(stages.pipeline_size)]
    return Pipeline(schedule.num_ticks, schedule.bubble_fraction, in_flight(schedule), layers)
