"""A run: from a config to trained weights, with checkpoints, metrics and pictures on the way."""

import contextlib
import dataclasses
import logging
import os
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from ml_collections import ConfigDict

from jaxforge.checkpoint.manager import CheckpointManager
from jaxforge.checkpoint.stored import LAYER_ORDER, described_order
from jaxforge.cluster import MeshLayout, build_mesh, detect, initialize, peak_flops, simulate_devices
from jaxforge.config import Config, ConfigError, resolve, to_yaml, validate, value_origins
from jaxforge.config.derived import num_microbatches
from jaxforge.data import BatchLayout, DigitsSource, Loader, eval_source, train_source
from jaxforge.data.files_source import FilesSource
from jaxforge.data.lengths import describe_skipped
from jaxforge.parallel.pipeline.choice import layer_order, pipeline_layout
from jaxforge.training.backends import attention_backend, missing_libraries_as_config_errors
from jaxforge.training.describe import describe_evaluation, describe_run, describe_state, differences, gibibytes
from jaxforge.training.evaluation import Evaluation, Evaluator, LossEvaluator, make_evaluator
from jaxforge.training.flops import model_flops_per_step
from jaxforge.training.metrics import MetricsWriter
from jaxforge.training.program import build_program, bytes_while_running
from jaxforge.training.report import Progress, draw_pictures, draw_predictions
from jaxforge.training.rundir import RunDirectory
from jaxforge.training.state import export_source, export_state, first_state, restored_state, saved_base

_log = logging.getLogger(__name__)


class NotFiniteError(RuntimeError):
    """The loss or a gradient isn't finite, and no more updates may be skipped."""


@dataclasses.dataclass(frozen=True)
class Result:
    """What a run leaves.

    Attributes:
      metrics: the rows of metrics.jsonl, from the first step on.
      step: completed optimizer steps; fewer than train.steps if the run was told to stop.
      workdir: the run directory.
      evaluation: the last one, or None.
      state: parameters and optimizer state, on the devices.
    """

    metrics: list[dict[str, Any]]
    step: int
    workdir: Path
    evaluation: Evaluation | None
    state: Any


def start(config: Config) -> str:
    """Joins the processes of the run, simulates devices if asked, and checks the config against the devices.

    Returns the platform, "cpu" or "gpu".  Must come before anything else starts a JAX backend.
    """
    if config.train.simulated_devices is not None:
        simulate_devices(config.train.simulated_devices)
    if not jax.distributed.is_initialized():
        initialize(detect(os.environ))
    platform = jax.default_backend()
    validate(config, jax.device_count(), platform)
    pipeline_layout(config)  # refuses one that doesn't place all layers, before anything is written
    return platform


def train(config: ConfigDict | Config, workdir: str | os.PathLike[str] | None = None) -> Result:
    """Trains; in a notebook as from the command line.

    Args:
      config: from `load_config`, perhaps changed since.
      workdir: the run directory; one that holds a run of the same model is resumed.  None makes a new one under runs/.

    Raises:
      ConfigError: for what the user can mend; nothing has been lost.
      NotFiniteError: when more than train.max_skipped_steps updates were not finite.
    """
    origins: Mapping[str, str] = {}
    if not isinstance(config, Config):
        origins = value_origins(config)
        config = resolve(config)
    platform = start(config)
    if workdir is None:
        if jax.process_count() > 1:
            raise ConfigError("a run of several processes needs a folder that all of them see; pass workdir")
        workdir = Path("runs") / time.strftime("%Y%m%d-%H%M%S")
    with stop_signal() as stop, open_rundir(workdir) as run, contextlib.ExitStack() as resources:
        return _Run(config, platform, run, stop, resources).train(to_yaml(config, origins))


def open_rundir(workdir: str | os.PathLike[str]) -> RunDirectory:
    """The run's folder.  What the primary process can't have is a ConfigError in every process: none waits for it."""
    run, refusal = None, None
    try:
        run = RunDirectory(workdir)
    except ConfigError as error:
        refusal = error
    if jax.process_count() > 1 and multihost_utils.process_allgather(np.array(refusal is not None)).any():
        raise refusal or ConfigError(f"--workdir={workdir} was refused by process 0, which says why")
    if run is None:
        assert refusal is not None
        raise refusal
    return run


@contextlib.contextmanager
def stop_signal() -> Iterator[list[int]]:
    """A list that SIGTERM is put into when it comes, instead of ending the process."""
    received: list[int] = []
    try:
        previous = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    except ValueError:  # not the main thread: a notebook's server keeps its own handler
        yield received
        return
    try:
        yield received
    finally:
        signal.signal(signal.SIGTERM, previous)


class _Run:
    """The parts of a run, and the loop over its steps.  What must be closed is left to `resources`."""

    def __init__(
        self, config: Config, platform: str, run: RunDirectory, stop: list[int], resources: contextlib.ExitStack
    ):
        self.config, self.run, self.stop, self.resources = config, run, stop, resources
        num_devices = jax.device_count()
        self.layout = MeshLayout.from_config(config, num_devices)
        self.mesh = build_mesh(self.layout)
        self.microbatches = num_microbatches(config, num_devices)
        self.batches = BatchLayout.from_config(config, self.mesh, self.microbatches)
        self.program = build_program(config, self.mesh, platform)
        self.backend = attention_backend(config, platform)
        self.peak_flops = peak_flops(jax.devices()[0].device_kind) if platform == "gpu" else None
        self.base = saved_base(config, self.program)
        self.export_source = export_source(config) if config.checkpoint.export_hf_every_steps else None
        # behind what may be refused, since it starts threads and makes a folder
        self.checkpoints = CheckpointManager(
            run.checkpoints, config.checkpoint.keep, config.checkpoint.save_every_steps
        )
        resources.callback(self.checkpoints.close)
        self.skipped = 0

    def train(self, config_text: str) -> Result:
        """The whole run; `config_text` is what config.yml will hold once nothing can be refused any more."""
        config = self.config
        steps, every = config.train.steps, config.train.eval_every_steps
        progress = Progress(steps, config.train.log_every_steps)
        progress.say(describe_run(config, self.mesh, self.layout, self.microbatches))
        progress.say(describe_state(config, self.program))
        evaluator = make_evaluator(eval_source(config), self.program, self.batches)
        self.source = train_source(config)
        held_out = evaluator.source if evaluator else None
        for split in (self.source, held_out):
            if isinstance(split, FilesSource):
                progress.say(split.describe())
        if isinstance(self.source, FilesSource) and isinstance(held_out, FilesSource):
            for file in held_out.files.shared_with(self.source.files):
                progress.say(f"data.eval_path has {file}, which data.path has too: its loss is not that of unseen data")
        first, state = self._restore_or_initialise(progress)
        self.run.write_config(config_text)
        if first == 0 and self.run.metrics.exists() and self.run.writable:
            progress.say(f"no checkpoint: starting at step 0; earlier metrics are now {self.run.set_metrics_aside()}")
        for folder in self.run.set_exports_aside(first) if self.run.writable else ():
            progress.say(f"an export that an earlier start made after step {first} is now {folder}")
        metrics = MetricsWriter(self.run, config.logging.tensorboard, resume_step=first)
        self.resources.callback(metrics.close)
        evaluation = None
        # a run killed during an evaluation has the checkpoint of that step, but not what the evaluation found
        if evaluator and every and 0 < first < steps and first % every == 0:
            evaluation = self._evaluate(evaluator, state, first, metrics, progress)
        done = first
        if first < steps and not self._should_stop():
            # the loader first: its first batches are ready by the time the step is compiled
            loader = self.resources.enter_context(
                Loader(self.source, config, self.mesh, self.microbatches, start_step=first)
            )
            train_step, step_bytes = self._compile(progress)
            progress = Progress(steps, config.train.log_every_steps, first_step=first)
            with progress:
                while done < steps and not self._should_stop():
                    done += 1
                    state, row = self._step(train_step, state, loader, done, step_bytes)
                    progress.update(metrics.write(row))
                    self._save(done, state, is_last=False)
                    self._export(done, state, progress, is_last=False)
                    if evaluator and every and done % every == 0 and done < steps and not self._should_stop():
                        evaluation = self._evaluate(evaluator, state, done, metrics, progress)
        if done > first:
            self._save(done, state, is_last=True)
        if done == steps:
            self._export(done, state, progress, is_last=True)
        if self._should_stop():
            self.checkpoints.wait()
            saved = f"saved step {done}" if done else "no step was done"
            progress.say(f"stopped by SIGTERM; {saved}: the same command resumes")
            return Result(metrics.rows, done, self.run.path, evaluation, state)
        if isinstance(self.source, FilesSource) and self.source.skipped:
            progress.say(f"skipped samples: {describe_skipped(self.source.skipped)}")
        if evaluator:
            evaluation = self._evaluate(evaluator, state, done, metrics, progress)
        if config.logging.pictures and self.run.writable and metrics.rows:
            draw_pictures(metrics.rows, self.run.pictures)
            progress.say(f"pictures in {self.run.pictures}")
        return Result(metrics.rows, done, self.run.path, evaluation, state)

    def _restore_or_initialise(self, progress: Progress) -> tuple[int, Any]:
        checkpoint = self.config.checkpoint
        restored = restored_state(self.config, self.program, self.checkpoints)
        if restored is None:
            if source := checkpoint.init_from_hf or checkpoint.pretrained_checkpoint:
                progress.say(f"starting from the weights of {source}")
            return 0, first_state(self.config, self.program)
        step, state, metadata = restored
        self.skipped = metadata["skipped_steps"]
        progress.say(f"resuming from step {step} of {self.run.path}")
        for line in differences(metadata["config"], dataclasses.asdict(self.config)):
            progress.say(f"  changed since: {line}")
        if metadata.get("data", self._data_fingerprint()) != self._data_fingerprint():
            progress.say("  changed since: the documents that data.path gives; their rows are other ones from here on")
        if step > self.config.train.steps:
            raise ConfigError(
                f"train.steps={self.config.train.steps}, but {self.run.path} holds step {step} already;"
                f" use {step} or more, or another --workdir"
            )
        if step == self.config.train.steps:
            progress.say(f"the run has all its {step} steps: nothing to train")
        return step, state

    def _compile(self, progress: Progress) -> tuple[Any, int]:
        """The compiled train step, and the bytes that it needs on each device."""
        progress.say("compiling the train step")
        began = time.perf_counter()
        with missing_libraries_as_config_errors(self.backend):
            compiled: Any = self.program.train_step.lower(self.program.abstract_state, self.batches.shapes()).compile()
        memory = compiled.memory_analysis()
        total = bytes_while_running(memory)
        progress.say(
            f"compiled in {time.perf_counter() - began:.0f} s: {gibibytes(total)} on each device while a step runs,"
            f" {gibibytes(memory.temp_size_in_bytes)} of it activations, gradients and workspace"
        )
        return compiled, total

    def _step(self, train_step, state, loader, step: int, step_bytes: int) -> tuple[Any, dict[str, Any]]:
        began = time.perf_counter()
        batch, info = next(loader)
        state, outcome = train_step(state, batch)
        outcome = {key: np.asarray(value).item() for key, value in jax.block_until_ready(outcome).items()}
        seconds = time.perf_counter() - began
        if not outcome.pop("is_finite"):
            self._skip(step, outcome)
        teraflops = model_flops_per_step(self.config) / seconds / self.mesh.size / 1e12
        memory = jax.local_devices()[0].memory_stats() or {}
        row = {"step": step} | outcome
        if not self.config.loss.z_loss_coefficient:
            row.pop("z_loss")
        positions = self.config.train.global_batch_size * self.config.train.seq_length
        return state, row | {
            "padding_fraction": 1 - outcome["tokens"] / positions,
            "step_seconds": seconds,
            "tokens_per_second": outcome["tokens"] / seconds,
            "tflops_per_device": teraflops,
            "mfu": teraflops * 1e12 / self.peak_flops if self.peak_flops else None,
            "data_wait_seconds": info["wait_seconds"],
            **({"encoder_load": info["encoder_load"]} if "encoder_load" in info else {}),
            **self._skipped_samples(),
            # a CPU keeps no count; there it is what the compiled step needs
            "peak_device_bytes": memory.get("peak_bytes_in_use", step_bytes),
        }

    def _data_fingerprint(self) -> str | None:
        """What a checkpoint says of the user's files."""
        return self.source.fingerprint if isinstance(self.source, FilesSource) else None

    def _skipped_samples(self) -> dict[str, int]:
        """Samples of the user's files that could not be used, as this process knows them so far."""
        source = self.source
        return {"data/skipped_samples": sum(source.skipped.values())} if isinstance(source, FilesSource) else {}

    def _skip(self, step: int, outcome: dict[str, Any]) -> None:
        """Counts an update that wasn't finite and so changed nothing; raises where no more may be skipped."""
        self.skipped += 1
        batch = self.config.train.global_batch_size
        what = (
            f"step {step}: loss {outcome['loss']}, gradient norm {outcome['grad_norm']};"
            f" rows {(step - 1) * batch} to {step * batch - 1} of the data"
        )
        allowed = self.config.train.max_skipped_steps
        if self.skipped > allowed:
            raise NotFiniteError(
                f"{what}; the weights are as before this step.  {allowed} skipped steps are allowed: lower"
                f" optimizer.learning_rate, or set train.max_skipped_steps={self.skipped} or more to go on without them"
            )
        _log.warning("%s; update skipped (%d of %d allowed)", what, self.skipped, allowed)

    def _save(self, step: int, state: Any, is_last: bool) -> None:
        metadata = {
            "config": dataclasses.asdict(self.config),
            "skipped_steps": self.skipped,
            "jax_version": jax.__version__,
            "base": self.base,
            "data": self._data_fingerprint(),
            LAYER_ORDER: described_order(layer_order(self.config)),
        }
        saved = self.program.saved(state)
        (self.checkpoints.save if is_last else self.checkpoints.maybe_save)(step, saved, metadata)

    def _export(self, step: int, state: Any, progress: Progress, is_last: bool) -> None:
        """Writes hf/STEP where the config asks for it; a run resumed at that step may have it already."""
        every = self.config.checkpoint.export_hf_every_steps
        folder = self.run.exports / str(step)
        if every and (is_last or step % every == 0) and not self._exists(folder):
            export_state(folder, self.config, state, self.export_source)
            progress.say(f"step {step}: exported to {folder}")

    def _exists(self, folder: Path) -> bool:
        """Whether the primary process sees the folder."""
        if jax.process_count() == 1:
            return folder.exists()
        return bool(multihost_utils.broadcast_one_to_all(np.array(folder.exists())))

    def _should_stop(self) -> bool:
        """Whether any process was told to stop.  Processes exchange the answer, so all must ask at the same places."""
        if jax.process_count() == 1:
            return bool(self.stop)
        return bool(multihost_utils.process_allgather(np.array(bool(self.stop))).any())

    def _evaluate(
        self, evaluator: Evaluator | LossEvaluator, state: Any, step: int, metrics: MetricsWriter, progress: Progress
    ) -> Evaluation:
        with missing_libraries_as_config_errors(self.backend):
            evaluation = evaluator(state)
        if not any(row["step"] == step and "eval/loss" in row for row in metrics.rows):
            metrics.write(evaluation.row(step))
        progress.say(f"step {step}: {describe_evaluation(evaluation)}")
        if isinstance(evaluator, Evaluator) and step == self.config.train.steps and self.run.writable:
            self._show_predictions(evaluator.source, evaluation, progress)
        return evaluation

    def _show_predictions(
        self, source: DigitsSource, evaluation: Evaluation, progress: Progress, shown: int = 16
    ) -> None:
        pairs = list(zip(evaluation.documents, evaluation.answers, strict=True))[:shown]
        samples = [(source.sample(document.sample_index), answer) for document, answer in pairs]
        for sample, answer in samples:
            mark = " " if answer == sample.answer else "x"
            progress.say(f"  {mark} {sample.question:<10} truth {sample.answer:<8} prediction {answer}")
        if self.config.logging.pictures:
            path = self.run.pictures / "predictions.png"
            draw_predictions([(s.image, s.question, s.answer, answer) for s, answer in samples], path)
