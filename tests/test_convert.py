"""From Hugging Face folders to folders of weights and back, by the command line."""

import re
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from commands import run
from hf_folders import FIXTURES, assert_same_bits, changed, config_of, tensors_of

from jaxforge.config.errors import ConfigError
from jaxforge.config.hf_config import read_architecture
from jaxforge.convert import main

NAMES = sorted(folder.name for folder in FIXTURES.iterdir())


def convert(*flags: str | Path) -> None:
    assert main([str(flag) for flag in flags]) == 0


def refusal(*flags: str | Path) -> str:
    with pytest.raises(ConfigError) as error:
        main([str(flag) for flag in flags])
    return str(error.value)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """A folder of weights of a tied Llama."""
    folder = tmp_path_factory.mktemp("convert") / "weights"
    convert("from-hf", FIXTURES / "llama_tied", folder)
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_from_hf_and_back_gives_the_same_tensors(name, tmp_path):  # F14, F15
    convert("from-hf", FIXTURES / name, tmp_path / "weights")
    convert("to-hf", tmp_path / "weights", tmp_path / "hf", "--dtype=float32")
    assert_same_bits(tensors_of(tmp_path / "hf"), tensors_of(FIXTURES / name))
    assert read_architecture(tmp_path / "hf") == read_architecture(FIXTURES / name)
    assert (tmp_path / "hf" / "generation_config.json").is_file()


def test_a_bfloat16_folder_comes_back_bit_for_bit(tmp_path):
    def rounded(tensors):
        return {name: value.astype(ml_dtypes.bfloat16) for name, value in tensors.items()}

    source = changed(tmp_path / "source", "qwen2_5_vl", rounded)
    convert("from-hf", source, tmp_path / "weights")
    convert("to-hf", tmp_path / "weights", tmp_path / "hf")
    assert_same_bits(tensors_of(tmp_path / "hf"), tensors_of(source))
    # half of the bytes of fp32 here too
    size = sum(file.stat().st_size for file in (tmp_path / "weights" / "weights").rglob("*") if file.is_file())
    assert size < 3 * sum(value.size for value in tensors_of(source).values())


def test_verify_says_that_the_logits_are_the_same(weights, tmp_path, capsys):
    convert("to-hf", weights, tmp_path / "hf", "--verify")
    found = re.search(
        r"verified: logits of .*, read again, equal those of the weights in bfloat16 \(largest difference (\S+)\);"
        r" rounding to bfloat16 moves them by up to (\S+), of (\S+) at most",
        capsys.readouterr().out,
    )
    difference, rounding, largest = map(float, found.groups())
    # bfloat16 keeps 8 bits
    assert difference == 0 and 0 < rounding < largest / 2**4


def test_verify_finds_an_export_that_is_not_what_was_trained(weights, tmp_path, monkeypatch):
    def harmed(**harm):
        def export(folder, *_, **__):
            changed(Path(folder), "llama_tied", **harm)

        monkeypatch.setattr("jaxforge.checkpoint.hf.export", export)
        return refusal("to-hf", weights, tmp_path / str(*harm), "--dtype=float32", "--verify")

    def larger(tensors):
        return tensors | {name: tensors[name] * np.float32(1.01) for name in ["model.layers.0.mlp.up_proj.weight"]}

    def rotated(config):
        return config | {"rope_parameters": config["rope_parameters"] | {"rope_theta": 51.0}}

    assert "isn't what was trained: its logits differ by up to" in harmed(tensors=larger)
    assert "model.decoder.rotary_base is 50.0, there 51.0" in harmed(config=rotated)


def test_config_json_and_tokenizer_may_come_from_another_folder(weights, tmp_path):
    source = changed(tmp_path / "source", "llama_tied", config=lambda config: config | {"eos_token_id": [2, 7]})
    (source / "tokenizer.json").write_text("{}")
    convert("to-hf", weights, tmp_path / "hf", f"--hf={source}")
    assert (tmp_path / "hf" / "tokenizer.json").read_text() == "{}"
    assert config_of(tmp_path / "hf")["eos_token_id"] == [2, 7]
    assert "config.json is of another model: model.decoder.untie_embeddings_and_output_weights is False" in refusal(
        "to-hf", weights, tmp_path / "other", f"--hf={FIXTURES / 'llama'}"
    )


def test_tensors_may_be_left_out_when_they_are_named(tmp_path):
    source = changed(tmp_path / "source", "llama", lambda tensors: tensors | {"score": np.ones(2, np.float32)})
    message = refusal("from-hf", source, tmp_path / "weights")
    assert "unexpected: score [2]" in message and "--allow-unexpected" in message
    convert("from-hf", source, tmp_path / "weights", "--allow-unexpected=sc*")
    assert "'x*', which matches no such tensor" in refusal(
        "from-hf", source, tmp_path / "again", "--allow-unexpected=sc*", "--allow-unexpected=x*"
    )


def test_a_target_that_exists_is_refused_before_the_source_is_read(weights, tmp_path):
    for command, source in (("from-hf", FIXTURES / "llama"), ("to-hf", weights), ("to-hf", tmp_path / "nowhere")):
        for target in (tmp_path, source if source.exists() else tmp_path, "/", "."):
            assert refusal(command, source, target).endswith("exists already; name a folder that doesn't, or remove it")


def test_a_folder_of_weights_and_a_hugging_face_folder_are_not_confused(weights, tmp_path):
    assert "is no Hugging Face folder: it has no config.json" in refusal("from-hf", weights, tmp_path / "x")
    message = refusal("to-hf", FIXTURES / "llama", tmp_path / "x")
    assert "is neither a folder of jaxforge.convert nor a run's directory" in message
    assert not (tmp_path / "x").exists()


def test_a_damaged_folder_of_weights_is_refused(weights, tmp_path):
    shutil.copytree(weights, tmp_path / "weights")
    (file,) = (tmp_path / "weights" / "weights" / "decoder.final_norm.scale").glob("0")
    file.write_bytes(bytes(file.stat().st_size))
    message = refusal("to-hf", tmp_path / "weights", tmp_path / "x")
    assert "is damaged: weights/decoder.final_norm.scale/0 has changed" in message and "convert it again" in message


def test_the_command_ends_with_0_or_with_2_and_one_message(weights, tmp_path):
    code, output = run("convert", "from-hf", str(FIXTURES / "llama"), str(tmp_path / "weights"))
    # 131 x 48 twice, 2 layers of 48 x 12 x 12 and 3 x 48 x 70 weights, 5 norms
    assert (code, output) == (0, f"llama, 0.05 M parameters: {tmp_path / 'weights'}\n")
    code, output = run("convert", "to-hf", str(weights), str(tmp_path / "hf"), "--dtype=int8")
    assert code == 2 and output.startswith("config error: argument --dtype: invalid choice: 'int8'")
    assert "Traceback" not in output and len(output.splitlines()) == 1
