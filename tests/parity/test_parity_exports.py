"""What is exported is what was imported: the tensors bit for bit, and config.json field by field.

That `transformers` loads the exports and gives its own logits again is checked in its own venv, outside of the tests:

    JAXFORGE_PARITY_EXPORTS=exports make test ARGS=tests/parity/test_parity_exports.py
    parity/bin/python scripts/check_exports.py exports

The first writes a folder for each model with the source's config.json as the base, as `python -m jaxforge.convert` does
from a checkpoint, and one as a model without a source is exported.
"""

import json
import os
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from reference import FAMILIES, FIXTURES, imported, tensors_in
from safetensors.numpy import load_file

from jaxforge.checkpoint.arrays import DeviceArrays
from jaxforge.checkpoint.hf import export, read_architecture
from jaxforge.checkpoint.hf.folder import TensorFolder
from jaxforge.config.hf_config import config_json_of

EXPORTS = os.environ.get("JAXFORGE_PARITY_EXPORTS")
every_model = pytest.mark.parametrize("name", FAMILIES)


def export_of(name: str, folder: Path, *, tensor: int = 1, dtype: str = "float32", **options) -> Path:
    """The imported model, exported from `tensor` devices."""
    config, _, parameters = imported(name, tensor)
    export(folder, DeviceArrays(parameters, dtype), config.model, dtype=dtype, **options)
    return folder


@pytest.fixture(scope="module")
def exports(tmp_path_factory) -> Path:
    if not EXPORTS:
        return tmp_path_factory.mktemp("exports")
    Path(EXPORTS).mkdir(parents=True)  # not one that is there: what lies in it would pass for new
    return Path(EXPORTS)


@pytest.fixture
def exported(name, exports) -> Path:
    """The model exported with its source, once for all tests."""
    folder = exports / name
    return folder if folder.exists() else export_of(name, folder, source=FIXTURES / name)


def config_json(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def assert_same_bits(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]):
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert found[key].dtype == tensor.dtype, key
        assert found[key].shape == tensor.shape, key
        assert found[key].tobytes() == tensor.tobytes(), key


@every_model
def test_an_export_has_the_tensors_of_its_source_bit_for_bit(name, exported):  # F15
    assert_same_bits(tensors_in(exported), tensors_in(FIXTURES / name))


@every_model
def test_an_export_from_two_devices_has_them_too(name, tmp_path):  # F13
    folder = export_of(name, tmp_path / name, tensor=2, source=FIXTURES / name)
    assert_same_bits(tensors_in(folder), tensors_in(FIXTURES / name))


@every_model
def test_an_export_without_a_source_has_the_tensors_and_the_architecture(name, exports):
    folder = export_of(name, exports / f"{name}.without_source", family=FAMILIES[name])
    assert_same_bits(tensors_in(folder), tensors_in(FIXTURES / name))
    assert read_architecture(folder) == read_architecture(FIXTURES / name)


def fields(config: dict, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], object]:
    """The values of a config.json by their places."""
    found = {}
    for key, value in config.items():
        found |= fields(value, (*path, key)) if isinstance(value, dict) else {(*path, key): value}
    return found


@every_model
def test_config_json_keeps_every_field_of_its_source(name, exported):
    source, written = fields(config_json(FIXTURES / name)), fields(config_json(exported))
    changed = {key for key, value in source.items() if written.get(key) != value}
    # the dtype is said once, at the top, and not for each part
    assert changed <= {("text_config", "dtype"), ("vision_config", "dtype")}


@every_model
def test_config_json_without_a_source_says_the_same_in_the_same_types(name):
    # transformers 5 refuses 4.0 where it expects 4
    written = fields(config_json_of(read_architecture(FIXTURES / name).model, FAMILIES[name]))
    source = fields(config_json(FIXTURES / name))
    # which layers have experts can be said in two ways, and is by the layers that don't
    of_layers = {("decoder_sparse_step",), ("mlp_only_layers",)} if name == "qwen3_moe_tied" else set()
    both = written.keys() & source.keys() - of_layers
    assert {key: repr(written[key]) for key in both} == {key: repr(source[key]) for key in both}
    # of what it doesn't say, nothing is a size; the number of experts has the published name
    left_out = source.keys() - written.keys() - {(*key[:-1], "num_local_experts") for key in written}
    assert not {key for key in left_out if "size" in key[-1] or key[-1].startswith("num_")}


@every_model
def test_rotary_settings_are_exported_in_the_form_of_transformers_4_and_of_5(name, exported):  # F17
    source, written = config_json(FIXTURES / name), config_json(exported)
    rope = source.get("text_config", source)["rope_parameters"]
    text = written.get("text_config", written)
    assert text["rope_parameters"] == rope
    assert text["rope_theta"] == rope["rope_theta"]
    # transformers 4 has theta beside the scaling, which is null where there is none
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    assert text["rope_scaling"] == (scaling if len(scaling) > 1 else None)


@every_model
def test_the_old_form_of_rotary_settings_gives_the_same_architecture(name, tmp_path):  # F17
    config = config_json(FIXTURES / name)
    text = config.get("text_config", config)
    rope = text.pop("rope_parameters")
    text["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    # releases of the VL models say "mrope" under the older name "type"
    text["rope_scaling"] = {"type": "mrope" if "mrope_section" in rope else kind} | rope if rope else None
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_architecture(tmp_path) == read_architecture(FIXTURES / name)


@every_model
def test_true_vocabulary_rows_are_exported_and_a_head_only_where_it_is_untied(name, exported):  # F11, F14
    padded_VD = imported(name, 1).parameters["decoder"]["embedding_VD"]
    assert padded_VD.shape[0] == 256  # 131 rows, and zeros up to a multiple of 128
    tensors = tensors_in(exported)
    tables = ("embed_tokens.weight", "lm_head.weight", "shared_head.head.weight")
    vocabulary = {key: tensor.shape[0] for key, tensor in tensors.items() if key.endswith(tables)}
    assert set(vocabulary.values()) == {131}
    of_layers = [key for key in vocabulary if ".layers." in key]  # of multi-token prediction
    assert len(vocabulary) - len(of_layers) == (1 if name.endswith("_tied") else 2)
    assert len(of_layers) == (4 if name.endswith("_mtp") else 0)


def test_a_sharded_source_is_read_and_a_sharded_export_written(tmp_path):
    index = "model.safetensors.index.json"
    name = "qwen3_sharded"
    assert len(set(json.loads((FIXTURES / name / index).read_text())["weight_map"].values())) == 5
    folder = export_of(name, tmp_path / name, source=FIXTURES / name, shard_bytes=60_000)
    written = json.loads((folder / index).read_text())
    expected = tensors_in(FIXTURES / name)
    assert written["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected.values())
    assert len(set(written["weight_map"].values())) > 1
    assert all(key in load_file(folder / file) for key, file in written["weight_map"].items())
    assert_same_bits(tensors_in(folder), expected)


def test_a_bfloat16_export_is_the_source_rounded(tmp_path):
    folder = export_of("llama", tmp_path / "llama", dtype="bfloat16", source=FIXTURES / "llama")
    written, expected = TensorFolder(folder), tensors_in(FIXTURES / "llama")
    assert written.shapes.keys() == expected.keys()
    for key, tensor in expected.items():
        assert np.array_equal(written.read(key), tensor.astype(ml_dtypes.bfloat16)), key
    assert config_json(folder)["dtype"] == config_json(folder)["torch_dtype"] == "bfloat16"
