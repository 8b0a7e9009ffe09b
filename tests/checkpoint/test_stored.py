"""Weights on disk: a folder of weights, and the parameters of a run's checkpoints without its program."""

import dataclasses
import os
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts
from hf_folders import InMemory
from tiny_models import ENCODERS, random_parameters, tiny_config

from jaxforge.checkpoint import CheckpointManager
from jaxforge.checkpoint.arrays import flatten, is_stacked, layers_of
from jaxforge.checkpoint.stored import DESCRIPTION, RunCheckpoint, WeightsFolder, write_weights
from jaxforge.config.errors import ConfigError


def no_companions(folder: Path) -> None:
    pass


def make(folder: Path, encoder: str | None = None, dtype=np.float32):
    """A folder of weights: the model, and its parameters by path."""
    config = tiny_config(encoder)
    parameters = jax.tree.map(lambda array: array.astype(dtype), random_parameters(config))
    write_weights(folder, InMemory(parameters), config.model, lambda hf: (hf / "config.json").write_text("{}"))
    return config.model, flatten(parameters)


def assert_reads(arrays, expected: dict[str, np.ndarray]):
    assert arrays.shapes == {path: array.shape for path, array in expected.items()}
    for path, array in expected.items():
        for layer in layers_of(path, array.shape):
            found = arrays.read(path, layer)
            wanted = array if layer is None else array[layer]
            assert arrays.has(path, layer) and found.dtype == wanted.dtype and np.array_equal(found, wanted), path


@pytest.mark.parametrize("encoder", [None, *ENCODERS])
def test_a_folder_of_weights_gives_back_model_and_parameters(tmp_path, encoder):
    model, parameters = make(tmp_path / "weights", encoder)
    assert WeightsFolder.is_one(tmp_path / "weights") and not WeightsFolder.is_one(tmp_path)
    folder = WeightsFolder.open(tmp_path / "weights")
    assert folder.model == model
    assert (folder.hf_folder / "config.json").read_text() == "{}"
    assert_reads(folder.arrays, parameters)


def test_the_dtype_is_kept(tmp_path):
    _, parameters = make(tmp_path / "weights", dtype=ml_dtypes.bfloat16)
    assert_reads(WeightsFolder.open(tmp_path / "weights").arrays, parameters)


def test_a_folder_of_weights_can_be_moved(tmp_path, monkeypatch):
    model, parameters = make(tmp_path / "weights")
    os.rename(tmp_path / "weights", tmp_path / "elsewhere")
    monkeypatch.chdir(tmp_path)
    assert_reads(WeightsFolder.open("elsewhere").arrays, parameters)


def test_a_layer_is_read_without_the_others(tmp_path):
    _, parameters = make(tmp_path / "weights")
    folder = WeightsFolder.open(tmp_path / "weights")
    # a chunk's file starts with the number of its layer
    for file in (tmp_path / "weights" / "weights" / "decoder.layers.mlp.up_DF").glob("1.*"):
        file.unlink()
    first = folder.arrays.read("decoder/layers/mlp/up_DF", 0)
    assert np.array_equal(first, parameters["decoder/layers/mlp/up_DF"][0])
    # a chunk that isn't there reads as zeros; that is what the checksums are for
    assert not folder.arrays.read("decoder/layers/mlp/up_DF", 1).any()


def test_a_parameter_of_many_chunks_is_the_same(tmp_path, monkeypatch):
    # rows of 16 x 4 bytes: three of them in a chunk, which divides neither 32 nor 12
    monkeypatch.setattr("jaxforge.checkpoint.stored._CHUNK_BYTES", 200)
    _, parameters = make(tmp_path / "weights")
    assert len(list((tmp_path / "weights" / "weights" / "decoder.embedding_VD").glob("*.0"))) == 11
    assert_reads(WeightsFolder.open(tmp_path / "weights").arrays, parameters)


def files_of(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.is_file())


def test_any_changed_file_of_a_folder_of_weights_is_found(tmp_path):
    make(tmp_path / "whole")
    files = files_of(tmp_path / "whole")
    chosen = [file for file in files if file.name == DESCRIPTION or "final_norm" in str(file) or "hf" in file.parts]
    assert len(chosen) >= 4
    for file in chosen:
        shutil.rmtree(tmp_path / "broken", ignore_errors=True)
        shutil.copytree(tmp_path / "whole", tmp_path / "broken")
        broken = tmp_path / "broken" / file.relative_to(tmp_path / "whole")
        content = bytearray(broken.read_bytes())
        content[len(content) // 2] ^= 1
        broken.write_bytes(content)
        with pytest.raises(ConfigError, match=f"broken is damaged: .*{file.name} has changed .*; convert it again"):
            WeightsFolder.open(tmp_path / "broken")


def test_a_folder_without_checksums_is_damaged(tmp_path):
    make(tmp_path / "weights")
    (tmp_path / "weights" / "checksums.json").unlink()
    with pytest.raises(ConfigError, match="is damaged: checksums.json can't be read"):
        WeightsFolder.open(tmp_path / "weights")


def test_another_format_is_refused_by_number(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxforge.checkpoint.stored._FORMAT", 2)
    make(tmp_path / "weights")
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="has format 2, this JaxForge reads 1; convert it again"):
        WeightsFolder.open(tmp_path / "weights")


class Interrupted(InMemory):
    def read(self, path, layer):
        if path == "decoder/head_VD":
            raise KeyboardInterrupt
        return super().read(path, layer)


def test_an_interrupted_folder_does_not_appear_and_the_next_one_is_whole(tmp_path):
    config = tiny_config(None)
    parameters = random_parameters(config)
    with pytest.raises(KeyboardInterrupt):
        write_weights(tmp_path / "weights", Interrupted(parameters), config.model, no_companions)
    assert not (tmp_path / "weights").exists()
    write_weights(tmp_path / "weights", InMemory(parameters), config.model, no_companions)
    assert [path.name for path in tmp_path.iterdir()] == ["weights"]
    with pytest.raises(ConfigError, match="weights exists already"):
        write_weights(tmp_path / "weights", InMemory(parameters), config.model, no_companions)


# Checkpoints of a run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run directory with checkpoints of step 2 and 4, and the parameters of step 0: those of step n have n added."""
    folder = tmp_path_factory.mktemp("run")
    config = tiny_config("qwen3_vit")
    parameters = random_parameters(config)
    frozen = {"projector": parameters.pop("projector")}
    manager = CheckpointManager(folder / "checkpoints", keep=3, save_every_steps=1)
    for step in (2, 4):
        state = {
            "trainable": jax.tree.map(lambda array, step=step: jnp.asarray(array + step), parameters),
            "frozen": jax.tree.map(lambda array, step=step: jnp.asarray(array + step, jnp.bfloat16), frozen),
            "optimizer": {"count": jnp.int32(step)},
            "step": jnp.int32(step),
        }
        metadata = {"config": dataclasses.asdict(config), "skipped_steps": 0, "base": f"base of {step}"}
        manager.save(step, state, metadata)
    manager.close()
    return folder, config, flatten(parameters), flatten(frozen)


def copy_of(run, tmp_path: Path) -> Path:
    shutil.copytree(run[0], tmp_path / "copy")
    return tmp_path / "copy"


def assert_is_step(saved: RunCheckpoint, run, step: int):
    _, config, trainable, frozen = run
    assert (saved.step, saved.base, saved.config) == (step, f"base of {step}", config)
    halves = {path: (array + step).astype(ml_dtypes.bfloat16) for path, array in frozen.items()}
    assert_reads(saved.arrays, {path: array + step for path, array in trainable.items()} | halves)


def test_the_newest_checkpoint_of_a_run_is_read_without_its_program(run):
    assert_is_step(RunCheckpoint.open(run[0]), run, 4)


def test_a_checkpoint_is_read_by_its_step(run):
    assert_is_step(RunCheckpoint.open(run[0], 2), run, 2)
    with pytest.raises(ConfigError, match=r"has no checkpoint of step 3; there are \[4, 2\]"):
        RunCheckpoint.open(run[0], 3)


def harm(checkpoint: Path) -> None:
    largest = max(files_of(checkpoint), key=lambda file: file.stat().st_size)
    os.truncate(largest, largest.stat().st_size - 1)


def test_a_broken_newest_checkpoint_is_passed_over(run, tmp_path):  # F65
    folder = copy_of(run, tmp_path)
    harm(folder / "checkpoints" / "4")
    assert_is_step(RunCheckpoint.open(folder), run, 2)
    with pytest.raises(ConfigError, match=r"no whole checkpoint \(step 4: .* bytes instead of"):
        RunCheckpoint.open(folder, 4)
    harm(folder / "checkpoints" / "2")
    with pytest.raises(ConfigError, match=r"no whole checkpoint \(step 4: .*; step 2: .*"):
        RunCheckpoint.open(folder)


def test_folders_that_are_no_checkpoints_are_not_looked_at(run, tmp_path):
    folder = copy_of(run, tmp_path)
    os.rename(folder / "checkpoints" / "4", folder / "checkpoints" / "4.broken")
    (folder / "checkpoints" / "6.orbax-checkpoint-tmp").mkdir()
    assert_is_step(RunCheckpoint.open(folder), run, 2)


def test_a_run_without_checkpoints_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="checkpoints has no whole checkpoint$"):
        RunCheckpoint.open(tmp_path)


def test_stacks_are_cut_between_layers_and_nothing_else_is_cut(run):
    """So that a layer is read without decoding the others, and a table isn't a file of a million chunks."""
    store = {"driver": "ocdbt", "base": f"file://{run[0] / 'checkpoints' / '4' / 'state'}/"}
    for path, array in run[2].items():
        spec = {"driver": "zarr", "kvstore": store | {"path": f"trainable.{path.replace('/', '.')}/"}}
        chunk = ts.open(spec, open=True).result().chunk_layout.read_chunk.shape
        assert tuple(chunk) == ((1, *array.shape[1:]) if is_stacked(path) else array.shape), path
