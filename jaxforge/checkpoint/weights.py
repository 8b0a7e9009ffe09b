"""The weights that training starts from, and those that a run has trained: adapters folded in."""

import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from jaxforge.checkpoint.arrays import ArrayReader, abstract_parameters, flatten
from jaxforge.checkpoint.checksums import FILE_NAME
from jaxforge.checkpoint.hf import HFArrays
from jaxforge.checkpoint.hf.folder import TensorFolder
from jaxforge.checkpoint.stored import HF_FILES, RunCheckpoint, WeightsFolder
from jaxforge.config.errors import ConfigError
from jaxforge.config.hf_config import differences, read_by
from jaxforge.config.model_schema import ModelConfig
from jaxforge.config.schema import CheckpointConfig, Config, LoraConfig
from jaxforge.models.decoder import VOCABULARY_TABLES
from jaxforge.models.lora import A_SUFFIX, B_SUFFIX, adapter_scale, is_adapter

_log = logging.getLogger(__name__)


def starting_weights(checkpoint: CheckpointConfig, model: ModelConfig) -> ArrayReader | None:
    """The weights that a run starts from, or None where it starts at random.

    Raises:
      ConfigError: if they aren't there, are damaged, or are of another model.
    """
    if checkpoint.init_from_hf is not None:
        return HFArrays(
            checkpoint.init_from_hf, model, checkpoint.init_allow_missing, checkpoint.init_allow_unexpected
        )
    if checkpoint.pretrained_checkpoint is None:
        return None
    path = Path(checkpoint.pretrained_checkpoint)
    theirs: ModelConfig
    arrays: ArrayReader
    if WeightsFolder.is_one(path):
        folder = WeightsFolder.open(path)
        theirs, arrays = folder.model, folder.arrays
    else:
        saved = RunCheckpoint.open(*run_and_step(path, "checkpoint.pretrained_checkpoint"))
        theirs, arrays = saved.config.model, trained_weights(saved)
    lines = differences(model, read_by(model, theirs))
    if lines:
        raise ConfigError(
            f"checkpoint.pretrained_checkpoint={path} is of another model: {'; '.join(lines)}; use the config.model"
            " that it was made with"
        )
    if (left_out := theirs.decoder.mtp_num_layers) and not model.decoder.mtp_num_layers:
        _log.warning(
            "%s: %d layer(s) for multi-token prediction are left out; model.decoder.mtp_num_layers=%d keeps them",
            path, left_out, left_out,
        )  # fmt: skip
    return ArraysOfModel(arrays, model)


def hf_folder(checkpoint: CheckpointConfig) -> Path | None:
    """Where config.json, tokenizer and processor files of a run's starting weights lie, if they had some."""
    if checkpoint.init_from_hf is not None:
        return Path(checkpoint.init_from_hf)
    if checkpoint.pretrained_checkpoint is None:
        return None
    path = Path(checkpoint.pretrained_checkpoint)
    if WeightsFolder.is_one(path):
        return path / HF_FILES
    return hf_folder(RunCheckpoint.open(*run_and_step(path, "checkpoint.pretrained_checkpoint")).config.checkpoint)


def origin(config: Config) -> str:
    """The field that says where a run's starting weights come from, and its value."""
    for name in ("init_from_hf", "pretrained_checkpoint"):
        if (value := getattr(config.checkpoint, name)) is not None:
            return f"checkpoint.{name}={value}"
    return f"train.seed={config.train.seed}"


def fingerprint(config: Config) -> str:
    """What tells a run's starting weights from others: a hash of checksums, or of samples of their bytes.

    Where weights start at random, also of what their values follow from.
    """
    checkpoint, model = config.checkpoint, config.model
    text = ""
    if checkpoint.init_from_hf is not None:
        folder = TensorFolder(checkpoint.init_from_hf)
        files = sorted(set(folder.files.values()))
        text = (folder.path / "config.json").read_text() + "\n".join(f"{file.name} {_sample(file)}" for file in files)
    elif checkpoint.pretrained_checkpoint is not None:
        path = Path(checkpoint.pretrained_checkpoint)
        if not WeightsFolder.is_one(path):
            run, step = run_and_step(path, "checkpoint.pretrained_checkpoint")
            path = run / "checkpoints" / str(RunCheckpoint.open(run, step).step)
        text = (path / FILE_NAME).read_text()
    if not text or checkpoint.init_allow_missing:
        parts = [part for part in (model.decoder, model.encoder) if part is not None]
        text += f"\n{config.train.seed} {[part.init_method_std for part in parts]}"
    return hashlib.sha256(text.encode()).hexdigest()


def trained_weights(saved: RunCheckpoint) -> ArrayReader:
    """All weights of a run's checkpoint; of one with adapters, on the base that the run started from.

    Raises:
      ConfigError: if the base can't be found, or isn't what the adapters were trained on.
    """
    arrays, config = saved.arrays, saved.config
    if not any(is_adapter(path) for path in arrays.shapes):
        return arrays
    try:
        base = starting_weights(config.checkpoint, config.model)
    except ConfigError as error:
        raise ConfigError(
            f"the checkpoint of step {saved.step} holds adapters alone, and the weights under them can't be read:"
            f" {error}"
        ) from error
    # of a Hugging Face folder, tensors may have been allowed to be missing
    if base is None or (isinstance(base, HFArrays) and base.absent):
        raise ConfigError(
            f"the checkpoint of step {saved.step} holds adapters alone, on weights that came from train.seed; set"
            " checkpoint.export_hf_every_steps in the run, which exports them together"
        )
    if saved.base != fingerprint(config):
        raise ConfigError(
            f"the checkpoint of step {saved.step} holds adapters for other weights than those that are now in"
            f" {origin(config)}; put back the ones that the run started from"
        )
    return MergedArrays(base, arrays, config.lora)


class ArraysOfModel:
    """Of another reader's arrays those that a model has: its layers, and the vocabulary padded as its own, by zeros.

    What a run pads to is its choice.
    """

    def __init__(self, arrays: ArrayReader, model: ModelConfig):
        self._arrays = arrays
        self.shapes: Mapping[str, tuple[int, ...]] = {
            path: leaf.shape for path, leaf in flatten(abstract_parameters(model)).items()
        }

    def has(self, path: str, layer: int | None) -> bool:
        return self._arrays.has(path, layer)

    def read(self, path: str, layer: int | None) -> np.ndarray:
        values = self._arrays.read(path, layer)
        if path not in VOCABULARY_TABLES:
            return values
        rows = self.shapes[path][0]
        return np.pad(values[:rows], ((0, max(0, rows - len(values))), (0, 0)))


class MergedArrays:
    """Weights with adapters folded in: W + scale A B, in fp32, as an ArrayReader.

    Args:
      base: the weights without adapters.
      trained: the adapters, beside what trained as a whole, which takes the place of the base's.
      lora: with which they were trained.
    """

    def __init__(self, base: ArrayReader, trained: ArrayReader, lora: LoraConfig):
        self._base, self._trained, self._lora = base, trained, lora
        shapes = dict(base.shapes) | dict(trained.shapes)
        self.shapes: Mapping[str, tuple[int, ...]] = {
            path: shape for path, shape in shapes.items() if not is_adapter(path)
        }

    def has(self, path: str, layer: int | None) -> bool:
        return self._trained.has(path, layer) or self._base.has(path, layer)

    def read(self, path: str, layer: int | None) -> np.ndarray:
        weight = (self._trained if path in self._trained.shapes else self._base).read(path, layer)
        if path + A_SUFFIX not in self._trained.shapes:
            return weight
        a, b = (self._trained.read(path + suffix, layer).astype(np.float32) for suffix in (A_SUFFIX, B_SUFFIX))
        scale = adapter_scale(getattr(self._lora, path.partition("/")[0]))
        return weight.astype(np.float32) + np.float32(scale) * np.tensordot(a, b, 1)


def _sample(file: Path, samples: int = 64, length: int = 4096) -> str:
    """Size of a file, and a hash of bytes from places spread over it."""
    size = file.stat().st_size
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        for number in range(samples):
            stream.seek(number * max(0, size - length) // max(1, samples - 1))
            digest.update(stream.read(length))
    return f"{size} {digest.hexdigest()}"


def run_and_step(path: Path, field: str) -> tuple[Path, int | None]:
    """A run's directory, or one checkpoint in it (RUN/checkpoints/STEP)."""
    if path.name.isdigit() and path.parent.name == "checkpoints":
        return path.parent.parent, int(path.name)
    if not (path / "checkpoints").is_dir():
        raise ConfigError(
            f"{field}={path} is neither a folder of jaxforge.convert nor a run's directory; a"
            " Hugging Face folder goes to checkpoint.init_from_hf"
        )
    return path, None
