"""A Hugging Face folder as parameters and back: what is refused, what may differ, and what goes along."""

import dataclasses
import os
import re
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from hf_folders import FIXTURES, InMemory, assert_same_bits, changed, config_of, tensors_of
from tiny_models import random_parameters, tiny_config

from jaxforge.checkpoint.arrays import DeviceArrays, abstract_parameters, flatten
from jaxforge.checkpoint.hf import HFArrays, copy_companions, export, load_parameters, read_architecture
from jaxforge.cluster.mesh import build_mesh, mesh_layout
from jaxforge.config.errors import ConfigError
from jaxforge.config.model_schema import ModelConfig
from jaxforge.config.schema import Config, DataConfig, ParallelConfig, TrainConfig
from jaxforge.training.program import build_program
from jaxforge.training.verification import compare_export

LLAMA, TIED, VL = FIXTURES / "llama", FIXTURES / "llama_tied", FIXTURES / "qwen2_5_vl"


def model_of(folder: Path) -> ModelConfig:
    return read_architecture(folder).model


def opened(folder: Path, *allowed) -> HFArrays:
    return HFArrays(folder, model_of(folder), *allowed)


def refusal(folder: Path, *allowed, model: ModelConfig | None = None) -> str:
    with pytest.raises(ConfigError) as error:
        HFArrays(folder, model or model_of(folder), *allowed)
    return str(error.value)


def without(*names):
    return lambda tensors: {name: value for name, value in tensors.items() if name not in names}


def with_tensors(**values):
    return lambda tensors: tensors | {name.replace("__", "."): value for name, value in values.items()}


# Missing, unexpected and mismatched tensors


def test_missing_unexpected_and_mismatched_tensors_are_named(tmp_path):
    def harm(tensors):
        tensors.pop("model.layers.1.mlp.up_proj.weight")
        return tensors | {"extra.weight": np.ones(3, np.float32), "model.norm.weight": np.ones(7, np.float32)}

    lines = refusal(changed(tmp_path / "hf", "llama", harm)).splitlines()
    assert lines[0].endswith("aren't those of a llama model of this architecture:")
    assert lines[1:4] == [
        "  missing: model.layers.1.mlp.up_proj.weight [70, 48]",
        "  another shape: model.norm.weight is [7], the model's is [48]",
        "  unexpected: extra.weight [3]",
    ]
    assert "init_allow_missing" in lines[4] and "--allow-unexpected" in lines[4]


def test_a_long_list_is_cut(tmp_path):
    extra = {f"extra.{number}": np.ones(1, np.float32) for number in range(20)}
    lines = refusal(changed(tmp_path / "hf", "llama", lambda tensors: tensors | extra)).splitlines()
    assert len(lines) == 11 and lines[9] == "  and 12 more"


def test_what_is_allowed_by_pattern_may_differ(tmp_path):
    harm = lambda tensors: without("lm_head.weight")(tensors) | {"score.weight": np.ones(2, np.float32)}  # noqa: E731
    folder = changed(tmp_path / "hf", "llama", harm)
    arrays = opened(folder, ["lm_head.*"], ["score.*"])
    assert arrays.absent == {"lm_head.weight"}
    assert not arrays.has("decoder/head_VD", None) and arrays.has("decoder/embedding_VD", None)
    assert "unexpected: score.weight" in refusal(folder, ["lm_head.*"])
    assert "missing: lm_head.weight" in refusal(folder, [], ["score.*"])


def test_a_pattern_without_effect_is_refused(tmp_path):
    assert "checkpoint.init_allow_missing has 'lm*', which matches no such tensor" in refusal(LLAMA, ["lm*"])
    assert "checkpoint.init_allow_unexpected has 'x*', which matches no such tensor" in refusal(LLAMA, [], ["x*"])


def test_what_the_folder_lacks_keeps_the_values_that_were_there(tmp_path):
    folder = changed(tmp_path / "hf", "llama", without("lm_head.weight", "model.layers.1.mlp.up_proj.weight"))
    model, tensors = model_of(folder), tensors_of(LLAMA)
    shapes = abstract_parameters(model)
    initial = jax.tree.map(lambda leaf: jax.numpy.full(leaf.shape, 7, leaf.dtype), shapes)
    found = flatten(load_parameters(folder, model, shapes, allow_missing=["lm_head.*", "*.1.mlp.up*"], initial=initial))
    assert np.all(np.asarray(found["decoder/head_VD"]) == 7)
    with pytest.raises(ValueError, match="decoder/head_VD has no values|decoder/layers/mlp/up_DF has no values"):
        load_parameters(folder, model, shapes, allow_missing=["lm_head.*", "*.1.mlp.up*"])
    up_LDF = np.asarray(found["decoder/layers/mlp/up_DF"])
    assert np.array_equal(up_LDF[0], tensors["model.layers.0.mlp.up_proj.weight"].T) and np.all(up_LDF[1] == 7)


def test_the_model_of_the_config_must_be_the_folders():
    model = model_of(LLAMA)
    other = dataclasses.replace(model, decoder=dataclasses.replace(model.decoder, num_layers=3, rotary_base=1e4))
    message = refusal(LLAMA, model=other)
    assert f"isn't that of {LLAMA}: model.decoder.num_layers is 3, there 2; model.decoder.rotary_base is 1" in message
    assert f"--config.model={LLAMA}" in message
    # patterns on names allow what names and shapes show, and nothing else
    deeper = dataclasses.replace(model, decoder=dataclasses.replace(model.decoder, num_layers=3))
    assert HFArrays(LLAMA, deeper, ["model.layers.2.*"]).has("decoder/layers/mlp/up_DF", 1)
    assert not HFArrays(LLAMA, deeper, ["model.layers.2.*"]).has("decoder/layers/mlp/up_DF", 2)
    shallower = dataclasses.replace(model, decoder=dataclasses.replace(model.decoder, num_layers=1))
    assert HFArrays(LLAMA, shallower, [], ["model.layers.1.*"]).shapes["decoder/layers/mlp/up_DF"][0] == 1
    assert "model.decoder.rotary_base is 1" in refusal(LLAMA, ["model.layers.2.*"], model=other)
    assert "model.encoder is None, there set" in refusal(VL, ["visual.*"], model=model)
    # what a run may choose is no difference
    decoder = dataclasses.replace(model.decoder, make_vocab_size_divisible_by=512, hidden_dropout=0.1)
    assert HFArrays(LLAMA, dataclasses.replace(model, decoder=decoder)).shapes["decoder/embedding_VD"] == (512, 48)


# Tied heads, buffers, prefixes


def test_a_tied_head_that_is_the_embedding_is_accepted(tmp_path):
    embedding = tensors_of(TIED)["model.embed_tokens.weight"]
    folder = changed(tmp_path / "hf", "llama_tied", with_tensors(lm_head__weight=embedding))
    assert "decoder/head_VD" not in opened(folder).shapes


def test_a_tied_head_that_is_another_is_refused_unless_it_may_be_left_out(tmp_path):
    embedding = tensors_of(TIED)["model.embed_tokens.weight"]
    folder = changed(tmp_path / "hf", "llama_tied", with_tensors(lm_head__weight=embedding + 1))
    message = refusal(folder)
    assert "config.json ties head and embedding, but lm_head.weight isn't model.embed_tokens.weight" in message
    assert "set tie_word_embeddings to false" in message
    opened(folder, [], ["lm_head.weight"])


def test_a_tied_head_without_an_embedding_is_a_missing_embedding(tmp_path):
    def renamed(tensors):
        return without("model.embed_tokens.weight")(tensors) | {"lm_head.weight": tensors["model.embed_tokens.weight"]}

    assert "missing: model.embed_tokens.weight [131, 48]" in refusal(changed(tmp_path / "hf", "llama_tied", renamed))


def test_buffers_that_old_releases_saved_are_ignored(tmp_path):
    buffers = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": np.ones(6, np.float32) for layer in range(2)}
    opened(changed(tmp_path / "hf", "llama", lambda tensors: tensors | buffers))


def renamed_as_held(tensors):
    """Qwen2.5-VL's tensors under the names that transformers 4.52 and later use inside."""
    inside = {"model.": "model.language_model.", "visual.": "model.visual."}
    return {re.sub(r"^(model\.|visual\.)", lambda found: inside[found[0]], name): v for name, v in tensors.items()}


def test_both_prefixes_of_qwen2_5_vl_load_and_stay_on_export(tmp_path):
    folder = changed(tmp_path / "hf", "qwen2_5_vl", renamed_as_held)
    published, held = opened(VL), opened(folder)
    assert published.shapes == held.shapes
    for path in ("decoder/layers/attention/query_DHK", "encoder/layers/attention/key_DGK"):
        assert np.array_equal(published.read(path, 1), held.read(path, 1))
    for source, arrays in ((VL, published), (folder, held)):
        made = tmp_path / f"export_of_{source.name}"
        export(made, arrays, model_of(source), source=source, dtype="float32")
        assert_same_bits(tensors_of(made), tensors_of(source))


# Export


def random_model(vocab_size=21, **decoder):
    """A language model with random weights, NumPy alone."""
    config = tiny_config(None, decoder_changes=dict(vocab_size=vocab_size, **decoder))
    return config.model, random_parameters(config)


def test_an_odd_vocabulary_is_exported_with_its_true_rows(tmp_path):  # F11
    model, parameters = random_model(vocab_size=65)
    assert parameters["decoder"]["embedding_VD"].shape == (96, 16)
    export(tmp_path / "hf", InMemory(parameters), model, dtype="float32")
    tensors = tensors_of(tmp_path / "hf")
    assert config_of(tmp_path / "hf")["vocab_size"] == 65
    for name, path in (("model.embed_tokens.weight", "embedding_VD"), ("lm_head.weight", "head_VD")):
        assert np.array_equal(tensors[name], parameters["decoder"][path][:65])


def test_the_dtype_is_bfloat16_unless_another_is_asked_for(tmp_path):  # F72
    model, parameters = random_model()
    master = np.float32(1) + np.arange(16, dtype=np.float32) * np.float32(1e-3)
    parameters["decoder"]["final_norm"]["scale"] = master
    export(tmp_path / "hf", InMemory(parameters), model)
    norm = tensors_of(tmp_path / "hf")["model.norm.weight"]
    assert norm.dtype == ml_dtypes.bfloat16 and np.array_equal(norm, master.astype(ml_dtypes.bfloat16))
    config = config_of(tmp_path / "hf")
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"
    export(tmp_path / "half", InMemory(parameters), model, dtype="float16")
    assert tensors_of(tmp_path / "half")["model.norm.weight"].dtype == np.float16
    assert config_of(tmp_path / "half")["dtype"] == "float16"


def test_tokenizer_and_processor_go_along_and_neither_code_nor_weights_do(tmp_path):
    along = [
        "tokenizer.json", "tokenizer_config.json", "merges.txt", "vocab.json", "preprocessor_config.json",
        "chat_template.jinja", "chat_template.json", "tokenizer.model", "generation_config.json", "LICENSE",
    ]  # fmt: skip
    not_along = [
        "modeling_x.py", "pytorch_model.bin", "training_args.bin", "old.pt", "other.safetensors",
        "model.safetensors.index.json", "pytorch_model.bin.index.json", "events.out",
    ]  # fmt: skip
    source = changed(tmp_path / "source", "llama")
    for name in (*along, *not_along):
        (source / name).write_text(name)
    (source / "folder.json").mkdir()
    export(tmp_path / "hf", opened(LLAMA), model_of(LLAMA), source=source)
    found = {file.name for file in (tmp_path / "hf").iterdir()}
    assert found == {*along, "config.json", "model.safetensors"}
    assert (tmp_path / "hf" / "vocab.json").read_text() == "vocab.json"
    assert config_of(tmp_path / "hf")["model_type"] == "llama"


def test_the_tokenizer_of_the_training_takes_the_place_of_the_sources(tmp_path):
    source, other = changed(tmp_path / "source", "llama"), tmp_path / "other"
    other.mkdir()
    for name in ("tokenizer.json", "merges.txt", "vocab.json", "chat_template.jinja", "preprocessor_config.json"):
        (source / name).write_text("of the source")
    for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.py", "config.json", "preprocessor_config.json"):
        (other / name).write_text("of the training")
    export(tmp_path / "hf", opened(LLAMA), model_of(LLAMA), source=source, tokenizer=other)
    texts = {file.name: file.read_text() for file in (tmp_path / "hf").iterdir() if "model" not in file.name}
    assert config_of(tmp_path / "hf")["model_type"] == "llama" and texts.pop("config.json")
    assert texts.pop("generation_config.json") == (source / "generation_config.json").read_text()
    assert texts == {
        "tokenizer.json": "of the training",
        "tokenizer_config.json": "of the training",
        "preprocessor_config.json": "of the source",
    }
    # weights that started at random have no source
    export(tmp_path / "alone", opened(LLAMA), model_of(LLAMA), tokenizer=other)
    assert (tmp_path / "alone" / "preprocessor_config.json").read_text() == "of the training"
    assert config_of(tmp_path / "alone")["model_type"] == "llama" and not (tmp_path / "alone" / "tokenizer.py").exists()


def test_a_folder_that_exists_is_not_touched(tmp_path):
    for target in (tmp_path / "folder", tmp_path / "file", tmp_path / "link"):
        if target.name == "folder":
            target.mkdir()
        elif target.name == "file":
            target.write_text("mine")
        else:
            target.symlink_to(tmp_path / "nowhere")
        with pytest.raises(ConfigError, match=f"{target} exists already; name a folder that doesn't, or remove it"):
            export(target, opened(LLAMA), model_of(LLAMA))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder", "link"]
    assert list((tmp_path / "folder").iterdir()) == []


def test_a_folder_inside_the_source_is_made(tmp_path):
    source = changed(tmp_path / "source", "llama")
    export(source / "new" / "hf", opened(source), model_of(source), source=source, dtype="float32")
    assert_same_bits(tensors_of(source / "new" / "hf"), tensors_of(LLAMA))


def test_a_place_that_can_not_be_written_is_a_config_error():
    with pytest.raises(ConfigError, match="/proc/nowhere can't be written: .*; name a folder elsewhere"):
        export("/proc/nowhere", opened(LLAMA), model_of(LLAMA))


class Interrupted(InMemory):
    """Fails at the last parameter."""

    def read(self, path, layer):
        if path == "decoder/head_VD":
            raise KeyboardInterrupt
        return super().read(path, layer)


def test_an_interrupted_export_leaves_no_folder_and_the_next_one_is_whole(tmp_path):
    model, parameters = random_model()
    with pytest.raises(KeyboardInterrupt):
        export(tmp_path / "hf", Interrupted(parameters), model, shard_bytes=1000)
    assert not (tmp_path / "hf").exists()
    export(tmp_path / "hf", InMemory(parameters), model)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
    assert sorted(path.name for path in (tmp_path / "hf").iterdir()) == ["config.json", "model.safetensors"]


def test_an_export_is_readable_by_others(tmp_path):
    export(tmp_path / "hf", opened(LLAMA), model_of(LLAMA))
    umask = os.umask(0)
    os.umask(umask)
    assert (tmp_path / "hf" / "model.safetensors").stat().st_mode & 0o777 == 0o666 & ~umask


def test_companions_may_be_links(tmp_path):
    (tmp_path / "blob").write_text("{}")
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "tokenizer.json").symlink_to("../blob")
    (tmp_path / "target").mkdir()
    copy_companions(tmp_path / "source", tmp_path / "target")
    copied = tmp_path / "target" / "tokenizer.json"
    assert copied.read_text() == "{}" and not copied.is_symlink()


# Experts

QWEN3_MOE, DEEPSEEK = FIXTURES / "qwen3_moe", FIXTURES / "deepseek_v3"
_ONE_EXPERT = re.compile(r"(.*\.experts\.)(\d+)\.(gate|up|down)_proj\.weight")


def together(tensors):
    """All experts in one tensor, as transformers 5 holds them: [E, 2 F, D] and [E, D, F]."""
    found = {name: value for name, value in tensors.items() if not _ONE_EXPERT.fullmatch(name)}
    layers = {match[1] for name in tensors if (match := _ONE_EXPERT.fullmatch(name))}
    for layer in layers:

        def of(kind, layer=layer):
            count = sum(name.startswith(layer) for name in tensors) // 3
            return np.stack([tensors[f"{layer}{number}.{kind}_proj.weight"] for number in range(count)])

        found[f"{layer}gate_up_proj"] = np.concatenate([of("gate"), of("up")], axis=1)
        found[f"{layer}down_proj"] = of("down")
    return found


def turned(tensors):
    """Experts with inputs and outputs in the other order."""
    return {name: value.swapaxes(1, 2) if ".experts." in name else value for name, value in tensors.items()}


def separate(tensors):
    """A tensor for each expert, of those that are together as published: [E, D, 2 F] and [E, F, D]."""
    found = {name: value for name, value in tensors.items() if ".experts." not in name}
    for name, value in tensors.items():
        folder, _, kind = name.rpartition(".experts.")
        for number, matrix in enumerate(value if folder else ()):
            names = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
            for part, weight in zip(names, np.split(matrix.T, len(names)), strict=True):
                found[f"{folder}.experts.{number}.{part}.weight"] = weight
    return found


@pytest.mark.parametrize(
    "name, change",
    [
        ("qwen3_moe", together),
        ("qwen3_moe", lambda tensors: turned(together(tensors))),
        ("deepseek_v3", together),
        ("qwen3_vl_moe", turned),
        ("qwen3_vl_moe", separate),
    ],
)
def test_experts_load_however_they_are_stored_and_are_exported_as_published(tmp_path, name, change):
    source = changed(tmp_path / "hf", name, change)
    arrays, published = opened(source), opened(FIXTURES / name)
    assert tensors_of(source).keys() != tensors_of(FIXTURES / name).keys() or change is turned
    for path in (path for path in published.shapes if "/moe/" in path):
        for layer in range(published.shapes[path][0]):
            assert np.array_equal(arrays.read(path, layer), published.read(path, layer)), path
    export(tmp_path / "out", arrays, model_of(source), source=source, dtype="float32")
    assert_same_bits(tensors_of(tmp_path / "out"), tensors_of(FIXTURES / name))


def test_layers_of_both_kinds_have_their_numbers_among_all_layers():
    # layers 0 and 2 have experts, layer 1 is dense
    arrays, tensors = opened(QWEN3_MOE), tensors_of(QWEN3_MOE)
    for place, layer in enumerate((0, 2)):
        router = tensors[f"model.layers.{layer}.mlp.gate.weight"]
        assert np.array_equal(arrays.read("decoder/layers/moe/router_DE", place), router.T)
        down = tensors[f"model.layers.{layer}.mlp.experts.4.down_proj.weight"]
        assert np.array_equal(arrays.read("decoder/layers/moe/down_EFD", place)[4], down.T)
    dense = tensors["model.layers.1.mlp.up_proj.weight"]
    assert np.array_equal(arrays.read("decoder/layers/mlp/up_DF", 0), dense.T)
    norm = tensors["model.layers.2.input_layernorm.weight"]
    assert np.array_equal(arrays.read("decoder/layers/attention_norm/scale", 2), norm)


class Counted(InMemory):
    """Remembers what was read."""

    def __init__(self, parameters):
        super().__init__(parameters)
        self.read_pieces = []

    def read(self, path, layer):
        self.read_pieces.append((path, layer))
        return super().read(path, layer)


def test_each_piece_is_read_once_for_all_its_experts(tmp_path):
    arrays = Counted(load_parameters(DEEPSEEK, model_of(DEEPSEEK)))
    export(tmp_path / "hf", arrays, model_of(DEEPSEEK), dtype="float32")
    assert len(arrays.read_pieces) == len(set(arrays.read_pieces))
    assert ("decoder/layers/moe/gate_EDF", 1) in arrays.read_pieces


def test_biases_of_routers_are_exported_in_fp32_whatever_the_dtype(tmp_path):
    model = model_of(DEEPSEEK)
    arrays = DeviceArrays(load_parameters(DEEPSEEK, model), "bfloat16")
    export(tmp_path / "hf", arrays, model, source=DEEPSEEK, dtype="bfloat16")
    tensors, expected = tensors_of(tmp_path / "hf"), tensors_of(DEEPSEEK)
    assert tensors.keys() == expected.keys()
    for name, value in expected.items():
        dtype = np.float32 if name.endswith("e_score_correction_bias") else ml_dtypes.bfloat16
        assert tensors[name].dtype == dtype and np.array_equal(tensors[name], value.astype(dtype)), name


def test_a_bfloat16_export_with_biases_verifies(tmp_path):
    model = model_of(DEEPSEEK)
    export(tmp_path / "hf", opened(DEEPSEEK), model, source=DEEPSEEK)
    found = compare_export(tmp_path / "hf", opened(DEEPSEEK), model, "bfloat16")
    assert "equal those of the weights in bfloat16" in found


def test_a_folder_lacks_all_experts_of_a_layer_or_none(tmp_path):
    one = "model.layers.2.mlp.experts.3.up_proj.weight"
    folder = changed(tmp_path / "hf", "qwen3_moe", without(one))
    assert f"missing: {one} [14, 40]" in refusal(folder)
    assert f"missing: {one} [14, 40] (other experts of its layer are there" in refusal(folder, [one])
    every = [one.replace(".3.", f".{number}.") for number in range(6)]
    arrays = opened(changed(tmp_path / "all", "qwen3_moe", without(*every)), ["*.layers.2.mlp.experts.*.up_proj.*"])
    assert arrays.has("decoder/layers/moe/up_EDF", 0) and not arrays.has("decoder/layers/moe/up_EDF", 1)


def test_a_folder_may_have_another_number_of_experts_by_pattern(tmp_path):
    model = model_of(QWEN3_MOE)
    fewer = dataclasses.replace(model, decoder=dataclasses.replace(model.decoder, num_experts=4))
    with pytest.raises(ConfigError, match="num_experts is 4, there 6"):
        HFArrays(QWEN3_MOE, fewer)
    patterns = [f"*.experts.{number}.*" for number in (4, 5)]
    arrays = HFArrays(QWEN3_MOE, fewer, ["*.mlp.gate.weight"], patterns)
    assert arrays.read("decoder/layers/moe/up_EDF", 1).shape == (4, 40, 14)


# Layouts


def test_weights_load_into_the_shards_of_any_layout(tmp_path):  # F13
    name = "qwen3_vl"
    model = model_of(FIXTURES / name)
    model = dataclasses.replace(model, encoder=dataclasses.replace(model.encoder, tensor_model_parallel_size=1))
    config = Config(
        model=model,
        parallel=ParallelConfig(tensor_model_parallel_size=2),
        train=TrainConfig(seq_length=64),
        data=DataConfig(max_patches_per_row=64),
    )
    mesh = build_mesh(mesh_layout(8, tensor=2, encoder_tensor=1), jax.devices())
    abstract_base = build_program(config, mesh, "cpu").abstract_base
    parameters = load_parameters(FIXTURES / name, model, abstract_base)
    found, abstract = flatten(parameters), flatten(abstract_base)
    alone = flatten(load_parameters(FIXTURES / name, model))
    assert found.keys() == alone.keys() == abstract.keys()
    for path, array in found.items():
        assert array.sharding == abstract[path].sharding and array.dtype == np.float32
        assert np.array_equal(array, alone[path]), path
    split = [path for path, array in found.items() if array.addressable_shards[0].data.size < array.size]
    assert "decoder/layers/mlp/up_DF" in split and "decoder/embedding_VD" in split
    # and out of the shards of eight devices again
    export(tmp_path / "hf", DeviceArrays(parameters, "float32"), model, source=FIXTURES / name, dtype="float32")
    assert_same_bits(tensors_of(tmp_path / "hf"), tensors_of(FIXTURES / name))
