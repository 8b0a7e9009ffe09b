"""Runs that start from given weights: what they compute, save, export and resume, with adapters and without."""

import dataclasses
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from commands import RECIPES, losses
from hf_folders import FIXTURES, InMemory, assert_same_bits, changed, config_of, tensors_of
from tiny_models import model_function, random_parameters

import jaxforge
from jaxforge import convert, evaluate
from jaxforge.checkpoint.arrays import flatten, layers_of
from jaxforge.checkpoint.hf import HFArrays, export, load_parameters
from jaxforge.checkpoint.stored import RunCheckpoint
from jaxforge.checkpoint.weights import fingerprint, hf_folder, starting_weights, trained_weights
from jaxforge.cluster.mesh import build_mesh, mesh_layout
from jaxforge.config import load_config, resolve
from jaxforge.config.errors import ConfigError
from jaxforge.data.synthetic import SyntheticSource
from jaxforge.optim.paths import join
from jaxforge.training.program import build_program
from jaxforge.training.state import first_state

LLAMA = FIXTURES / "llama"
RANK, ALPHA = 4, 16.0

pytestmark = pytest.mark.usefixtures("shared_programs")


def config_with(*overrides: str):
    return load_config(RECIPES / "tiny_finetune.py", overrides)


LORA = (
    f"lora.decoder.rank={RANK}", f"lora.decoder.alpha={ALPHA}", "lora.decoder.targets=(**/query_*,**/down_*)",
    "lora.train_also=(decoder/final_norm/*,)",
)  # fmt: skip


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    """Four steps of all parameters, saved and exported at 2 and 4: (run directory, result)."""
    workdir = tmp_path_factory.mktemp("full")
    return workdir, jaxforge.train(config_with("checkpoint.export_hf_dtype=bfloat16"), workdir)


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """Four steps of adapters on query and down, and of the final norm: (run directory, result)."""
    workdir = tmp_path_factory.mktemp("adapted")
    return workdir, jaxforge.train(config_with(*LORA), workdir)


def reads(arrays) -> dict[str, np.ndarray]:
    """All of a reader's parameters."""
    return {
        path: np.stack([arrays.read(path, layer) for layer in layers_of(path, shape)])
        if None not in layers_of(path, shape) else arrays.read(path, None)
        for path, shape in arrays.shapes.items()
    }  # fmt: skip


def true_rows(path: str, array: np.ndarray) -> np.ndarray:
    return array[:131] if path.endswith("_VD") else array


def copy_at_step_2(run: Path, tmp_path: Path) -> Path:
    """The run as a kill after step 2 leaves it."""
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "checkpoints" / "4")
    shutil.rmtree(copy / "hf" / "4")
    return copy


# All parameters


def test_the_first_loss_is_that_of_the_given_weights(full):
    config = resolve(config_with())
    rows = [SyntheticSource(config).row(index) for index in range(config.train.global_batch_size)]
    batch = {key: jnp.asarray(np.stack([row[key] for row in rows])) for key in rows[0]}
    loss_sum = model_function(config, "loss")(load_parameters(LLAMA, config.model), batch).loss
    expected = float(loss_sum) / int((np.asarray(batch["targets"]) >= 0).sum())
    assert losses(full[0])[1] == pytest.approx(expected, rel=1e-6)


def test_the_last_export_is_the_trained_weights_rounded(full):  # F72
    workdir, result = full
    exported = reads(HFArrays(workdir / "hf" / "4", resolve(config_with()).model))
    trained = flatten(join(result.state["trainable"], result.state["frozen"]))
    assert exported.keys() == trained.keys()
    for path, array in trained.items():
        expected = true_rows(path, np.asarray(array)).astype(ml_dtypes.bfloat16)
        assert true_rows(path, exported[path]).dtype == expected.dtype
        assert np.array_equal(true_rows(path, exported[path]), expected), path
    assert config_of(workdir / "hf" / "4")["dtype"] == "bfloat16"
    assert (workdir / "hf" / "4" / "generation_config.json").is_file()


def test_exports_are_made_when_asked_and_differ(full):
    folders = sorted(folder.name for folder in (full[0] / "hf").iterdir())
    assert folders == ["2", "4"]
    early, late = (tensors_of(full[0] / "hf" / name)["model.norm.weight"] for name in folders)
    assert not np.array_equal(early, late)
    assert not np.array_equal(early, tensors_of(LLAMA)["model.norm.weight"].astype(ml_dtypes.bfloat16))


def test_the_run_directory_is_exported_by_the_command_line(full, tmp_path, capsys):
    for source, step in ((full[0], 4), (full[0] / "checkpoints" / "2", 2)):
        assert convert.main(["to-hf", str(source), str(tmp_path / str(step))]) == 0
        assert f"step {step} of {source}" in capsys.readouterr().out
        assert_same_bits(tensors_of(tmp_path / str(step)), tensors_of(full[0] / "hf" / str(step)))
        assert config_of(tmp_path / str(step)) == config_of(full[0] / "hf" / str(step))


def test_verify_does_not_mind_what_training_did_to_padded_rows(full, tmp_path, capsys):
    assert convert.main(["to-hf", str(full[0]), str(tmp_path / "hf"), "--verify"]) == 0
    assert "(largest difference 0)" in capsys.readouterr().out


def test_a_resumed_run_needs_no_second_export_and_ends_the_same(full, tmp_path, capsys):
    copy = copy_at_step_2(full[0], tmp_path)
    before = (copy / "hf" / "2" / "model.safetensors").stat().st_mtime_ns
    (copy / "hf" / "4").mkdir()  # of a start whose later steps are lost, perhaps with other settings
    (copy / "hf" / "4" / "stale").touch()
    result = jaxforge.train(config_with("checkpoint.export_hf_dtype=bfloat16"), copy)
    output = capsys.readouterr().out
    assert "resuming from step 2" in output and "starting from the weights" not in output
    assert output.count("exported to") == 1 and f"step 4: exported to {copy / 'hf' / '4'}" in output
    assert (copy / "hf" / "2" / "model.safetensors").stat().st_mtime_ns == before
    assert result.step == 4 and losses(copy) == losses(full[0])
    assert_same_bits(tensors_of(copy / "hf" / "4"), tensors_of(full[0] / "hf" / "4"))
    assert "after step 2 is now" in output and [path.name for path in (copy / "hf" / "4.1").iterdir()] == ["stale"]


def test_an_export_that_is_missing_is_made_when_nothing_is_left_to_train(full, tmp_path, capsys):
    shutil.copytree(full[0], tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy" / "hf")
    jaxforge.train(config_with("checkpoint.export_hf_dtype=bfloat16"), tmp_path / "copy")
    assert "nothing to train" in capsys.readouterr().out
    assert [folder.name for folder in (tmp_path / "copy" / "hf").iterdir()] == ["4"]
    assert_same_bits(tensors_of(tmp_path / "copy" / "hf" / "4"), tensors_of(full[0] / "hf" / "4"))


def test_moved_hugging_face_files_are_asked_for(full, tmp_path):
    source = changed(tmp_path / "source", "llama")
    shutil.copytree(full[0] / "checkpoints" / "2", tmp_path / "run" / "checkpoints" / "2")
    saved = RunCheckpoint.open(tmp_path / "run")
    moved = dataclasses.replace(saved.config.checkpoint, init_from_hf=str(tmp_path / "gone"))
    with pytest.raises(ConfigError, match=r"gone is no Hugging Face folder.*; name their folder with --hf"):
        convert.source_of(moved)
    assert convert.source_of(dataclasses.replace(moved, init_from_hf=str(source))) == source


# A model that can't be exported, or isn't the folder's, is refused before anything is trained


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["checkpoint.init_from_hf=none", "model.decoder.qk_layernorm=true", "model.decoder.add_qkv_bias=true"],
         "the qwen3 family can't express this model: model.decoder.add_qkv_bias is True"),
        (["model.decoder.num_layers=3"], "model.decoder.num_layers is 3, there 2"),
        (["checkpoint.init_from_hf=/nowhere"], "/nowhere is no Hugging Face folder"),
        (["checkpoint.init_from_hf=/nowhere", "checkpoint.export_hf_every_steps=0",
          "checkpoint.export_hf_dtype=bfloat16"], "/nowhere is no Hugging Face folder"),
        (["checkpoint.pretrained_checkpoint=/nowhere"], "both give the weights to start from"),
        (["checkpoint.init_from_hf=none", "checkpoint.pretrained_checkpoint=/nowhere"],
         "checkpoint.pretrained_checkpoint=/nowhere is neither a folder of jaxforge.convert nor a run's directory"),
        (["checkpoint.export_hf_every_steps=0"], "checkpoint.export_hf_dtype=float32 would have no effect"),
        (["checkpoint.init_from_hf=none", "checkpoint.init_allow_missing=(lm_head.*,)"], "would have no effect"),
    ],
)  # fmt: skip
def test_a_run_that_can_not_end_well_does_not_begin(overrides, message, tmp_path):
    with pytest.raises(ConfigError) as error:
        jaxforge.train(config_with(*overrides), tmp_path)
    assert message in str(error.value)
    assert not (tmp_path / "metrics.jsonl").exists() and not (tmp_path / "hf").exists()


def test_missing_tensors_start_at_random_where_that_is_allowed(tmp_path):
    drop = lambda tensors: {name: value for name, value in tensors.items() if name != "lm_head.weight"}  # noqa: E731
    folder = changed(tmp_path / "hf", "llama", drop)
    allowed = ["checkpoint.init_allow_missing=(lm_head.*,)", "parallel.tensor_model_parallel_size=1"]
    config = resolve(config_with(f"checkpoint.init_from_hf={folder}", *allowed))
    program = build_program(config, build_mesh(mesh_layout(1), jax.devices()[:1]), "cpu")
    state, random = first_state(config, program)["trainable"], program.initialise(config.train.seed)["trainable"]
    assert np.array_equal(state["decoder"]["head_VD"], random["decoder"]["head_VD"])
    embedding_VD = np.asarray(state["decoder"]["embedding_VD"])[:131]
    assert np.array_equal(embedding_VD, tensors_of(LLAMA)["model.embed_tokens.weight"])


# Weights of a run, or of a folder of weights, for another run


def checkpoint_config(path: Path, **changes):
    config = resolve(config_with("checkpoint.init_from_hf=none", f"checkpoint.pretrained_checkpoint={path}"))
    decoder = dataclasses.replace(config.model.decoder, **changes)
    return config.checkpoint, dataclasses.replace(config.model, decoder=decoder)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights") / "llama"
    assert convert.main(["from-hf", str(LLAMA), str(folder)]) == 0
    return folder


def test_weights_come_from_a_folder_of_weights_at_any_padding(weights):
    expected = tensors_of(LLAMA)["model.embed_tokens.weight"]
    for multiple, rows in ((1, 131), (128, 256), (512, 512)):
        found = starting_weights(*checkpoint_config(weights, make_vocab_size_divisible_by=multiple))
        assert found.shapes["decoder/embedding_VD"] == (rows, 48) and found.has("decoder/embedding_VD", None)
        table = found.read("decoder/embedding_VD", None)
        assert table.shape == (rows, 48) and np.array_equal(table[:131], expected) and not table[131:].any()
    up_DF = found.read("decoder/layers/mlp/up_DF", 1)
    assert np.array_equal(up_DF, tensors_of(LLAMA)["model.layers.1.mlp.up_proj.weight"].T)
    assert hf_folder(checkpoint_config(weights)[0]) == weights / "hf"


def test_weights_come_from_a_run_or_from_one_of_its_checkpoints(full):
    for path, step in ((full[0], 4), (full[0] / "checkpoints" / "2", 2)):
        found = reads(starting_weights(*checkpoint_config(path)))
        exported = reads(HFArrays(full[0] / "hf" / str(step), resolve(config_with()).model))
        assert found.keys() == exported.keys()
        for name, array in exported.items():
            assert found[name].dtype == np.float32
            assert np.array_equal(true_rows(name, found[name]).astype(ml_dtypes.bfloat16), true_rows(name, array))
        # config.json and tokenizer are those that the run before it began with
        assert hf_folder(checkpoint_config(path)[0]) == LLAMA


def test_weights_of_another_model_are_refused(weights, full):
    for path in (weights, full[0]):
        with pytest.raises(ConfigError, match="is of another model: model.decoder.num_layers is 3, there 2; use the"):
            starting_weights(*checkpoint_config(path, num_layers=3))


def test_a_run_trains_from_a_folder_of_weights_as_from_its_source(weights, full, tmp_path):
    overrides = ["checkpoint.init_from_hf=none", f"checkpoint.pretrained_checkpoint={weights}", "train.steps=2"]
    jaxforge.train(config_with(*overrides, "checkpoint.export_hf_dtype=bfloat16"), tmp_path)
    # Adam's first two steps at a constant rate don't depend on how many follow
    assert losses(tmp_path) == {step: loss for step, loss in losses(full[0]).items() if step <= 2}
    assert_same_bits(tensors_of(tmp_path / "hf" / "2"), tensors_of(full[0] / "hf" / "2"))
    assert (tmp_path / "hf" / "2" / "generation_config.json").is_file()


# Adapters


def test_a_checkpoint_of_adapters_holds_no_other_weights(adapted):
    saved = RunCheckpoint.open(adapted[0])
    base = {"decoder/layers/attention/query_DHK", "decoder/layers/mlp/down_FE"}
    assert saved.arrays.shapes.keys() == {f"{path}_lora_{part}" for path in base for part in "ab"} | {
        "decoder/final_norm/scale"
    }
    stored = ocp.StandardCheckpointHandler().metadata(adapted[0] / "checkpoints" / "4" / "state")
    # with the moments; 46,800 parameters are under the adapters
    assert sum(int(np.prod(array.shape)) for array in jax.tree.leaves(stored)) < 46_800


def test_an_export_of_adapters_is_base_plus_scale_a_b(adapted):
    workdir, result = adapted
    exported, source = tensors_of(workdir / "hf" / "4"), tensors_of(LLAMA)
    trained = {path: np.asarray(array, np.float64) for path, array in flatten(result.state["trainable"]).items()}
    expected = dict(source) | {"model.norm.weight": trained["decoder/final_norm/scale"]}
    for path, name in (("attention/query_DHK", "self_attn.q_proj"), ("mlp/down_FE", "mlp.down_proj")):
        a, b = (trained[f"decoder/layers/{path}_lora_{part}"] for part in "ab")
        assert np.abs(b).max() > 1e-4, "the adapters learnt nothing"
        for layer in range(2):
            change = ALPHA / RANK * a[layer] @ b[layer].reshape(RANK, -1)
            expected[f"model.layers.{layer}.{name}.weight"] = source[f"model.layers.{layer}.{name}.weight"] + change.T
    assert exported.keys() == source.keys()
    for name, value in expected.items():
        # fp32 against fp64: weights are about 0.1, products of adapters less; the base alone is as it was
        tolerance = 0 if value is source[name] else 1e-6
        assert np.abs(exported[name] - value).max() <= tolerance, name


def test_adapters_are_exported_from_the_run_directory_too(adapted, tmp_path, capsys):
    assert convert.main(["to-hf", str(adapted[0]), str(tmp_path / "hf"), "--dtype=float32", "--verify"]) == 0
    assert "verified: logits" in capsys.readouterr().out
    assert_same_bits(tensors_of(tmp_path / "hf"), tensors_of(adapted[0] / "hf" / "4"))


def test_a_run_with_adapters_resumes_bit_for_bit(adapted, tmp_path):  # F55
    copy = copy_at_step_2(adapted[0], tmp_path)
    jaxforge.train(config_with(*LORA), copy)
    assert losses(copy) == losses(adapted[0])
    assert_same_bits(tensors_of(copy / "hf" / "4"), tensors_of(adapted[0] / "hf" / "4"))


def on_base(saved: RunCheckpoint, init_from_hf: Path | str | None) -> RunCheckpoint:
    """The checkpoint as if its run had started from there."""
    folder = None if init_from_hf is None else str(init_from_hf)
    checkpoint = dataclasses.replace(saved.config.checkpoint, init_from_hf=folder)
    return dataclasses.replace(saved, config=dataclasses.replace(saved.config, checkpoint=checkpoint))


def test_adapters_are_refused_on_other_weights(adapted, tmp_path):
    shutil.copytree(adapted[0], tmp_path / "run")
    one_more = {"model.norm.weight": tensors_of(LLAMA)["model.norm.weight"] + 1}
    other = changed(tmp_path / "other", "llama", lambda tensors: tensors | one_more)
    with pytest.raises(ConfigError) as error:
        jaxforge.train(config_with(*LORA, f"checkpoint.init_from_hf={other}", "train.steps=6"), tmp_path / "run")
    assert f"holds adapters for other weights than those of checkpoint.init_from_hf={other}" in str(error.value)
    # the same bytes elsewhere are the same weights
    saved = RunCheckpoint.open(adapted[0])
    trained_weights(on_base(saved, shutil.copytree(LLAMA, tmp_path / "moved")))
    with pytest.raises(ConfigError, match="adapters for other weights than those that are now in checkpoint.init_from"):
        trained_weights(on_base(saved, other))


def test_adapters_whose_base_is_gone_or_random_are_not_exported(adapted):
    saved = RunCheckpoint.open(adapted[0])

    def refusal(init_from_hf):
        with pytest.raises(ConfigError) as error:
            trained_weights(on_base(saved, init_from_hf))
        return str(error.value)

    assert "and the weights under them can't be read: /nowhere is no Hugging" in refusal("/nowhere")
    assert "on weights that came from train.seed; set checkpoint.export_hf_every_steps" in refusal(None)


def test_adapters_on_random_weights_belong_to_their_seed():
    def of(*overrides):
        return fingerprint(resolve(config_with("checkpoint.init_from_hf=none", *overrides)))

    assert of() == of("train.steps=9") != of("train.seed=1")
    assert of("model.decoder.init_method_std=0.1") != of()
    # given weights don't depend on it
    assert fingerprint(resolve(config_with())) == fingerprint(resolve(config_with("train.seed=1")))


def test_a_run_of_adapters_gives_weights_to_the_next_run(adapted):
    found = starting_weights(*checkpoint_config(adapted[0]))
    query_DHK = found.read("decoder/layers/attention/query_DHK", 1)
    exported = tensors_of(adapted[0] / "hf" / "4")["model.layers.1.self_attn.q_proj.weight"]
    assert np.array_equal(query_DHK.reshape(48, 48).T, exported)
    assert not any("lora" in path for path in found.shapes)


def test_adapters_change_nothing_at_first(adapted, full):
    # B starts at zero
    assert losses(adapted[0])[1] == pytest.approx(losses(full[0])[1], rel=1e-6)
    assert losses(adapted[0])[4] != losses(full[0])[4]


@pytest.mark.slow
def test_evaluate_reads_the_weights_under_the_adapters(tmp_path, capsys):
    recipe = RECIPES / "tiny_digits.py"
    model = ["model.decoder.add_qkv_bias=true", "parallel.tensor_model_parallel_size=1", "logging.pictures=false"]
    config = resolve(load_config(recipe, model))
    export(tmp_path / "hf", InMemory(random_parameters(config)), config.model, dtype="float32")
    adapters = [f"checkpoint.init_from_hf={tmp_path / 'hf'}", "lora.decoder.rank=2", "lora.projector.rank=2"]
    overrides = [*model, *adapters, "train.steps=1", "optimizer.lr_warmup_iters=0"]
    result = jaxforge.train(load_config(recipe, overrides), tmp_path / "run")
    in_training = next(line for line in capsys.readouterr().out.splitlines() if "exact match" in line)
    assert all("_lora_" in path for path in RunCheckpoint.open(result.workdir).arrays.shapes)
    flags = [f"--config={recipe}", f"--workdir={tmp_path / 'run'}", *(f"--config.{text}" for text in overrides)]
    assert evaluate.main(flags) == 0
    assert capsys.readouterr().out.splitlines() == [in_training]
    # another scale is another model, which nothing in the shapes tells
    assert evaluate.main([*flags, "--config.lora.decoder.alpha=99"]) == 0
    changed_scale, evaluation = capsys.readouterr().out.splitlines()
    assert changed_scale == "changed since: lora.decoder.alpha: 16.0 -> 99.0"
    assert evaluation != in_training


def test_adapters_of_another_rank_are_refused_by_their_names(adapted, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(adapted[0], copy)
    with pytest.raises(ConfigError, match=r"another model or optimizer\n  trainable/.*_lora_a: .*, 4\], .*, 8\]"):
        jaxforge.train(config_with(*LORA[1:], "lora.decoder.rank=8"), copy)
