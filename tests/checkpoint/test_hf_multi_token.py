"""Layers for multi-token prediction in and out of a Hugging Face folder: their places, and when they are left out."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest
from hf_folders import FIXTURES, InMemory, assert_same_bits, changed, config_of, tensors_of

from jaxforge.checkpoint.arrays import DeviceArrays, abstract_parameters, flatten, load
from jaxforge.checkpoint.hf import HFArrays, export, load_parameters, read_architecture
from jaxforge.checkpoint.weights import starting_weights
from jaxforge.cluster.mesh import MeshLayout, build_mesh
from jaxforge.config.errors import ConfigError
from jaxforge.config.model_schema import ModelConfig
from jaxforge.config.schema import CheckpointConfig, Config, ParallelConfig, TrainConfig
from jaxforge.convert import main as convert
from jaxforge.parallel.pipeline.choice import layer_order
from jaxforge.training.program import build_program

# two decoder layers, of which the second has experts, and two for multi-token prediction
NAME, MTP_LAYERS = "deepseek_v3_mtp", (2, 3)
FOLDER = FIXTURES / NAME
COPIES = ("embed_tokens.weight", "shared_head.head.weight")


def model_of(folder: Path, **decoder) -> ModelConfig:
    model = read_architecture(folder).model
    return dataclasses.replace(model, decoder=dataclasses.replace(model.decoder, **decoder))


def refusal(folder: Path, model: ModelConfig | None = None, *allowed) -> str:
    with pytest.raises(ConfigError) as error:
        HFArrays(folder, model or model_of(folder), *allowed)
    return str(error.value)


def is_of_mtp(name: str) -> bool:
    return name.startswith(tuple(f"model.layers.{number}." for number in MTP_LAYERS))


def is_copy(name: str) -> bool:
    return is_of_mtp(name) and name.endswith(COPIES)


def keep(is_kept):
    return lambda tensors: {name: value for name, value in tensors.items() if is_kept(name)}


def decoder_alone(tensors):
    return keep(lambda name: not is_of_mtp(name))(tensors)


def says(number: int):
    return lambda config: config | {"num_nextn_predict_layers": number}


def warnings(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


# Places


def test_a_layer_is_behind_those_of_the_decoder_and_what_it_has_besides_beside_them(caplog):
    arrays, tensors = HFArrays(FOLDER, model_of(FOLDER)), tensors_of(FOLDER)

    def assert_is(path, layer, expected):
        assert np.array_equal(arrays.read(path, layer), expected), path

    for depth, number in enumerate(MTP_LAYERS):
        there = {
            name.removeprefix(f"model.layers.{number}."): value
            for name, value in tensors.items()
            if name.startswith(f"model.layers.{number}.")
        }
        assert_is("decoder/mtp/embedding_norm/scale", depth, there["enorm.weight"])
        assert_is("decoder/mtp/states_norm/scale", depth, there["hnorm.weight"])
        assert_is("decoder/mtp/final_norm/scale", depth, there["shared_head.norm.weight"])
        of_embedding, of_states = np.split(there["eh_proj.weight"], 2, axis=1)
        assert_is("decoder/mtp/projection_2DE", depth, np.stack([of_embedding.T, of_states.T]))
        assert_is("decoder/layers/attention_norm/scale", number, there["input_layernorm.weight"])
        # the stack of experts begins with the second decoder layer
        assert_is("decoder/layers/moe/router_DE", number - 1, there["mlp.gate.weight"].T)
        assert_is("decoder/layers/moe/expert_bias_E", number - 1, there["mlp.gate.e_score_correction_bias"])
        experts = [there[f"mlp.experts.{expert}.up_proj.weight"].T for expert in range(6)]
        assert_is("decoder/layers/moe/up_EDF", number - 1, np.stack(experts))
    assert arrays.shapes["decoder/mtp/projection_2DE"] == (2, 2, 24, 24)
    assert arrays.shapes["decoder/layers/mlp/up_DF"][0] == 1
    assert warnings(caplog) == []


def test_copies_of_embedding_and_head_are_not_read_and_written_again(tmp_path, caplog):
    def harm(tensors):
        return tensors | {name: value[:7] + 1 for name, value in tensors.items() if is_copy(name)}

    assert sum(map(is_copy, tensors_of(FOLDER))) == 4
    for name, change in (("without", keep(lambda name: not is_copy(name))), ("other", harm)):
        folder = changed(tmp_path / name, NAME, change)
        arrays = HFArrays(folder, model_of(folder))
        assert arrays.absent == set()
        export(tmp_path / f"{name}_out", arrays, model_of(folder), source=folder, dtype="float32")
        assert_same_bits(tensors_of(tmp_path / f"{name}_out"), tensors_of(FOLDER))
    assert warnings(caplog) == []


def test_where_the_head_is_the_embedding_both_copies_are_of_it(tmp_path):
    def tied(tensors):
        return keep(lambda name: name != "lm_head.weight" and not is_copy(name))(tensors)

    folder = changed(tmp_path / "hf", NAME, tied, lambda config: config | {"tie_word_embeddings": True})
    parameters = load_parameters(folder, model_of(folder))
    # padded with zeros here, and with what training leaves there
    padded = np.asarray(parameters["decoder"]["embedding_VD"]).copy()
    assert padded.shape == (256, 24) and not padded[131:].any()
    padded[131:] = 1
    arrays = InMemory(parameters | {"decoder": parameters["decoder"] | {"embedding_VD": padded}})
    export(tmp_path / "out", arrays, model_of(folder), dtype="float32")
    found = tensors_of(tmp_path / "out")
    embedding = tensors_of(FOLDER)["model.embed_tokens.weight"]
    assert found.keys() == tensors_of(FOLDER).keys() - {"lm_head.weight"}
    for name in ["model.embed_tokens.weight", *filter(is_copy, found)]:
        assert found[name].tobytes() == embedding.tobytes(), name


def test_an_export_in_shards_has_them_too(tmp_path):
    model = model_of(FOLDER)
    export(tmp_path / "hf", HFArrays(FOLDER, model), model, dtype="float32", shard_bytes=40_000)
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 3
    assert_same_bits(tensors_of(tmp_path / "hf"), tensors_of(FOLDER))
    assert config_of(tmp_path / "hf")["num_nextn_predict_layers"] == 2


@pytest.mark.parametrize("stages", ["Et|tmmL", "Et|t|mm|L"])
def test_stages_hold_them_where_the_layout_places_them(tmp_path, stages):
    parallel = ParallelConfig(pipeline_model_parallel_size=2, pipeline_model_parallel_layout=stages)
    config = Config(model=model_of(FOLDER), parallel=parallel, train=TrainConfig(seq_length=64))
    program = build_program(config, build_mesh(MeshLayout.from_config(config, 2), jax.devices()[:2]), "cpu")
    order = layer_order(config)
    parameters = load(HFArrays(FOLDER, config.model), program.abstract_base, order=order)
    export(tmp_path / "hf", DeviceArrays(parameters, "float32", order), config.model, source=FOLDER, dtype="float32")
    assert_same_bits(tensors_of(tmp_path / "hf"), tensors_of(FOLDER))


# A model without them


def test_a_model_without_them_leaves_them_out_with_one_warning(tmp_path, caplog):
    model, tensors = model_of(FOLDER, mtp_num_layers=0), tensors_of(FOLDER)
    arrays = HFArrays(FOLDER, model)
    num_left_out = sum(map(is_of_mtp, tensors))
    [message] = warnings(caplog)
    assert message.startswith(f"{FOLDER}: {num_left_out} tensors of 2 layer(s) for multi-token prediction are left out")
    assert message.endswith("; model.decoder.mtp_num_layers=2 keeps them")
    export(tmp_path / "out", arrays, model, source=FOLDER, dtype="float32")
    assert_same_bits(tensors_of(tmp_path / "out"), decoder_alone(tensors))
    assert config_of(tmp_path / "out")["num_nextn_predict_layers"] == 0
    assert len(warnings(caplog)) == 1


def test_a_model_without_them_leaves_them_out_of_a_folder_of_weights_too(tmp_path, caplog):
    assert convert(["from-hf", str(FOLDER), str(tmp_path / "weights")]) == 0
    checkpoint = CheckpointConfig(pretrained_checkpoint=str(tmp_path / "weights"))
    model = model_of(FOLDER, mtp_num_layers=0)
    arrays = starting_weights(checkpoint, model)
    assert warnings(caplog) == [
        f"{tmp_path / 'weights'}: 2 layer(s) for multi-token prediction are left out; model.decoder.mtp_num_layers=2"
        " keeps them"
    ]
    assert arrays.shapes == {path: leaf.shape for path, leaf in flatten(abstract_parameters(model)).items()}
    export(tmp_path / "out", arrays, model, dtype="float32")
    assert_same_bits(tensors_of(tmp_path / "out"), decoder_alone(tensors_of(FOLDER)))
    with pytest.raises(ConfigError, match="is of another model: model.decoder.mtp_num_layers is 1, there 2"):
        starting_weights(checkpoint, model_of(FOLDER, mtp_num_layers=1))


# A folder without them


@pytest.mark.parametrize("what_is_left", [decoder_alone, keep(lambda name: not is_of_mtp(name) or is_copy(name))])
def test_a_folder_that_promises_them_and_has_none_is_refused_with_the_way_out(tmp_path, caplog, what_is_left):
    folder = changed(tmp_path / "hf", NAME, what_is_left)
    message = refusal(folder)
    assert message.startswith(f"{folder}: its config.json has num_nextn_predict_layers=2, but no tensor of these")
    assert "leave them out with model.decoder.mtp_num_layers=0" in message and "\n" not in message
    assert "(for jaxforge.convert)" in message
    assert warnings(caplog) == []
    # both ways out
    arrays = HFArrays(folder, model_of(folder, mtp_num_layers=0))
    assert np.array_equal(arrays.read("decoder/final_norm/scale", None), tensors_of(FOLDER)["model.norm.weight"])
    silent = changed(tmp_path / "silent", NAME, decoder_alone, says(0))
    assert HFArrays(silent, model_of(silent)).shapes == arrays.shapes


def test_tensors_that_some_of_them_lack_are_named(tmp_path):
    lacking = ("model.layers.3.eh_proj.weight", "model.layers.2.input_layernorm.weight")
    message = refusal(changed(tmp_path / "hf", NAME, keep(lambda name: name not in lacking)))
    assert "missing: model.layers.3.eh_proj.weight [24, 48]" in message
    assert "missing: model.layers.2.input_layernorm.weight [24]" in message
    assert "mtp_num_layers" not in message


def test_a_folder_without_them_may_be_trained_on_where_patterns_say_so(tmp_path):
    folder = changed(tmp_path / "hf", NAME, decoder_alone, says(0))
    model = model_of(folder, mtp_num_layers=2)
    assert "model.decoder.mtp_num_layers is 2, there 0" in refusal(folder, model)
    assert "missing: model.layers.3.input_layernorm.weight [24]" in refusal(folder, model, ["model.layers.2.*"])
    arrays = HFArrays(folder, model, ["model.layers.[23].*"])
    assert not any(arrays.has(path, 0) for path in arrays.shapes if path.startswith("decoder/mtp/"))
    assert [arrays.has("decoder/layers/moe/up_EDF", place) for place in range(3)] == [True, False, False]
    # the same for a folder that promises them
    promising = changed(tmp_path / "promising", NAME, decoder_alone)
    assert HFArrays(promising, model_of(promising), ["model.layers.[23].*"]).absent == arrays.absent


# Another number of them


def test_another_number_of_them_is_another_architecture(tmp_path):
    assert "model.decoder.mtp_num_layers is 1, there 2" in refusal(FOLDER, model_of(FOLDER, mtp_num_layers=1))
    fewer = changed(tmp_path / "fewer", NAME, config=says(1))
    assert "model.decoder.mtp_num_layers is 2, there 1" in refusal(fewer, model_of(FOLDER))
    assert "unexpected: model.layers.3." in refusal(fewer)
    assert "unexpected: model.layers.3." in refusal(fewer, model_of(FOLDER, mtp_num_layers=0))
    more = changed(tmp_path / "more", NAME, config=says(3))
    assert "missing: model.layers.4.input_layernorm.weight [24]" in refusal(more)
    # the first alone, by pattern
    first = HFArrays(FOLDER, model_of(FOLDER, mtp_num_layers=1), [], ["model.layers.3.*"])
    assert first.shapes["decoder/mtp/projection_2DE"] == (1, 2, 24, 24)


def test_other_families_have_none_whatever_patterns_say(tmp_path):
    model = model_of(FIXTURES / "llama", mtp_num_layers=1)
    for allowed in ((), (["model.layers.2.*"],)):
        message = refusal(FIXTURES / "llama", model, *allowed)
        assert "model.decoder.mtp_num_layers is 1, there 0" in message
    with pytest.raises(ConfigError, match="llama family can't express this model: model.decoder.mtp_num_layers is 1"):
        export(tmp_path / "hf", InMemory({}), model)
    assert not (tmp_path / "hf").exists()


# By the command line


def test_verify_compares_what_they_predict(tmp_path, capsys, monkeypatch):
    convert(["from-hf", str(FOLDER), str(tmp_path / "weights")])
    assert convert(["to-hf", str(tmp_path / "weights"), str(tmp_path / "hf"), "--verify"]) == 0
    assert "read again, equal those of the weights in bfloat16 (largest difference 0)" in capsys.readouterr().out

    def export_of_another(folder, *_, **__):
        name = "model.layers.3.eh_proj.weight"
        changed(Path(folder), NAME, lambda tensors: tensors | {name: tensors[name] * np.float32(1.01)})

    monkeypatch.setattr("jaxforge.checkpoint.hf.export", export_of_another)
    with pytest.raises(ConfigError, match="isn't what was trained: its logits differ by up to"):
        convert(["to-hf", str(tmp_path / "weights"), str(tmp_path / "other"), "--dtype=float32", "--verify"])
