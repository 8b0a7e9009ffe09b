"""Runs that change their pipeline on the way, and what they export."""

import re
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from commands import RECIPES, losses, rows
from hf_folders import assert_same_bits, tensors_of
from small_tokenizer import qwen_folder

import jaxforge
from jaxforge import convert, evaluate
from jaxforge.checkpoint.arrays import flatten
from jaxforge.checkpoint.hf import load_parameters
from jaxforge.cluster.mesh import MeshLayout, build_mesh
from jaxforge.config import load_config, resolve
from jaxforge.training.program import build_program
from jaxforge.training.state import first_state

pytestmark = pytest.mark.slow

# Four layers with one table for embedding and head (F14), in six steps of one schedule.  Weights are large enough for
# the loss to depend on the order of the layers.  The vocabulary needs no padding.
MODEL = ("model.decoder.num_layers=4", "model.decoder.untie_embeddings_and_output_weights=false",
         "model.decoder.vocab_size=384", "model.decoder.init_method_std=0.2",
         "parallel.tensor_model_parallel_size=1")  # fmt: skip
RUN = (*MODEL, "optimizer.lr_decay_iters=6", "checkpoint.save_every_steps=2", "checkpoint.keep=3",
       "checkpoint.export_hf_every_steps=4", "checkpoint.export_hf_dtype=float32")  # fmt: skip
PP_2 = "parallel.pipeline_model_parallel_size=2"
SHUFFLED = (PP_2, "parallel.num_layers_per_virtual_pipeline_stage=1")
WITH_A_HOLE = (PP_2, "parallel.pipeline_model_parallel_layout=Et|t||ttL")


def train(workdir: Path, steps: int, *overrides: str):
    return jaxforge.train(load_config(RECIPES / "tiny_text.py", [*RUN, *overrides, f"train.steps={steps}"]), workdir)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The fields of runs on a file of texts."""
    folder = tmp_path_factory.mktemp("files")
    texts = folder / "texts.jsonl"
    texts.write_text("".join(f'{{"text": "the text of number {number}"}}\n' for number in range(30)))
    return f"data.path={texts}", f"data.tokenizer={qwen_folder(folder / 'qwen')}", f"data.cache_dir={folder}"


@pytest.fixture(scope="module")
def evaluated(files):
    """The field that has runs evaluated, on the same texts."""
    return files[0].replace("data.path", "data.eval_path")


@pytest.fixture(scope="module")
def plain(files, tmp_path_factory):
    """Six steps without a pipeline, saved at 2, 4 and 6."""
    workdir = tmp_path_factory.mktemp("plain")
    train(workdir, 6, *files)
    return workdir


@pytest.fixture(scope="module")
def shuffled(files, evaluated, plain, tmp_path_factory):
    """The first two of those steps, and two more on two ranks of two virtual stages: (run directory, result)."""
    workdir = shutil.copytree(plain, tmp_path_factory.mktemp("shuffled") / "run")
    for later in ("checkpoints/4", "checkpoints/6", "hf"):
        shutil.rmtree(workdir / later)
    return workdir, train(workdir, 4, *files, evaluated, *SHUFFLED)


def assert_same_run(found: Path, expected: Path) -> None:
    assert losses(found).keys() == losses(expected).keys() == set(range(1, 7))
    steps = ([row for row in rows(workdir) if "loss" in row] for workdir in (found, expected))
    for one, other in zip(*steps, strict=True):
        # the project's limit for any two layouts; of the norm, which sums squares, that of gradients
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-6)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-5)


def test_six_steps_are_two_without_a_pipeline_two_in_one_and_two_in_another(files, plain, shuffled, tmp_path, capsys):
    copy = shutil.copytree(shuffled[0], tmp_path / "copy")
    train(copy, 6, *files, *WITH_A_HOLE)
    output = capsys.readouterr().out
    assert "resuming from step 4" in output
    assert "changed since: parallel.pipeline_model_parallel_layout: None -> Et|t||ttL" in output
    assert_same_run(copy, plain)


def test_f14_tied_weights_come_out_of_a_pipeline_and_into_another(shuffled, tmp_path, capsys):
    workdir, result = shuffled
    exported = workdir / "hf" / "4"
    # the names of a tied model, and every layer under its number: places 0, 1, 2, 3 hold layers 0, 2, 1, 3
    tensors, trained = tensors_of(exported), flatten(result.state["trainable"])
    assert "lm_head.weight" not in tensors
    up_DF = np.asarray(trained["decoder/layers/mlp/up_DF"])
    for place, layer in enumerate((0, 2, 1, 3)):
        assert np.array_equal(tensors[f"model.layers.{layer}.mlp.up_proj.weight"].T, up_DF[place])
    assert np.array_equal(tensors["model.embed_tokens.weight"], trained["decoder/embedding_VD"])
    # the checkpoint gives the same folder, whose logits are those of the checkpoint
    assert convert.main(["to-hf", str(workdir), str(tmp_path / "hf"), "--dtype=float32", "--verify"]) == 0
    assert "(largest difference 0)" in capsys.readouterr().out
    assert_same_bits(tensors_of(tmp_path / "hf"), tensors)
    # from-hf, and from there into another pipeline
    assert convert.main(["from-hf", str(exported), str(tmp_path / "weights")]) == 0
    sources = (f"checkpoint.init_from_hf={exported}", f"checkpoint.pretrained_checkpoint={tmp_path / 'weights'}",
               f"checkpoint.pretrained_checkpoint={workdir}")  # fmt: skip
    expected = flatten(load_parameters(exported, result_config().model))
    for source in sources:
        config = result_config(*WITH_A_HOLE, source)
        mesh = build_mesh(MeshLayout.from_config(config, 2), jax.devices()[:2])
        state = flatten(first_state(config, build_program(config, mesh, "cpu"))["trainable"])
        assert state.keys() == expected.keys()
        for path, array in state.items():
            # stages of 1, 1, 0 and 2 layers: layers 0 | and 1, 2, 3 in places of three for each rank
            used = np.asarray(array)[[0, 3, 4, 5]] if "/layers/" in path else np.asarray(array)
            assert np.array_equal(used, expected[path]), (source, path)


def result_config(*overrides: str):
    return resolve(load_config(RECIPES / "tiny_text.py", [*MODEL, *overrides]))


def test_evaluate_reads_a_pipelined_run_without_a_pipeline(files, evaluated, shuffled, capsys):
    workdir, result = shuffled
    overrides = (*RUN, *files, evaluated, "train.steps=4")
    flags = [f"--config={RECIPES / 'tiny_text.py'}", f"--workdir={workdir}"]
    assert evaluate.main([*flags, *(f"--config.{text}" for text in overrides)]) == 0
    printed = re.search(r"step 4: loss (\S+) over", capsys.readouterr().out)
    assert float(printed[1]) == pytest.approx(result.evaluation.loss, abs=1e-4)  # it has four decimals
