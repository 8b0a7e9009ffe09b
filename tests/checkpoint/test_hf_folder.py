"""The safetensors files of a folder: what is read, refused and written, with the safetensors library as the judge."""

import json
import os
import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from jaxforge.checkpoint.hf.folder import INDEX, TensorFolder, write_tensors
from jaxforge.config.errors import ConfigError

BF16 = np.dtype(ml_dtypes.bfloat16)
TENSORS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.array([1.5, -2, 3.25], BF16),
    "c": np.array([[1, 2]], np.float16),
    "d": np.array([1e-300], np.float64),
}


def sharded(folder: Path) -> Path:
    """TENSORS in two shards with an index."""
    shards = {"model-00001-of-00002.safetensors": ["a", "b"], "model-00002-of-00002.safetensors": ["c", "d"]}
    for file, names in shards.items():
        save_file({name: TENSORS[name] for name in names}, folder / file)
    write_index(folder, {name: file for file, names in shards.items() for name in names})
    return folder


def write_index(folder: Path, weight_map) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def refusal(folder: Path) -> str:
    with pytest.raises(ConfigError) as error:
        TensorFolder(folder)
    return str(error.value)


def assert_holds_all(folder: TensorFolder):
    assert folder.shapes == {name: tensor.shape for name, tensor in TENSORS.items()}
    for name, tensor in TENSORS.items():
        found = folder.read(name)
        assert found.dtype == tensor.dtype and np.array_equal(found, tensor)


def test_one_file_is_read_in_the_dtypes_that_it_has(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors")
    assert_holds_all(TensorFolder(tmp_path))


def test_the_shards_of_an_index_are_read(tmp_path):
    assert_holds_all(TensorFolder(sharded(tmp_path)))


def test_shards_without_an_index_are_read(tmp_path):
    (sharded(tmp_path) / INDEX).unlink()
    assert_holds_all(TensorFolder(tmp_path))


def test_links_into_a_download_cache_are_read(tmp_path):
    (tmp_path / "blobs").mkdir()
    save_file(TENSORS, tmp_path / "blobs" / "0123abcd")
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "model.safetensors").symlink_to("../blobs/0123abcd")
    assert_holds_all(TensorFolder(tmp_path / "snapshot"))


def test_the_single_file_counts_beside_an_index_as_in_transformers(tmp_path):
    write_index(tmp_path, {"a": "model-00001-of-00009.safetensors"})
    save_file(TENSORS, tmp_path / "model.safetensors")
    assert_holds_all(TensorFolder(tmp_path))


def test_a_tensor_without_numbers_is_read(tmp_path):
    save_file({"none": np.zeros((0, 4), np.float32), "one": np.float32([[7]])}, tmp_path / "model.safetensors")
    folder = TensorFolder(tmp_path)
    assert folder.shapes == {"none": (0, 4), "one": (1, 1)} and folder.read("none").shape == (0, 4)


def test_pickles_are_refused_by_name(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"never read")
    message = refusal(tmp_path)
    assert "has no .safetensors file, only pytorch_model.bin: a pickle can run code" in message
    assert "save_pretrained" in message


def test_a_folder_without_weights_is_refused(tmp_path):
    assert refusal(tmp_path) == f"{tmp_path} has no .safetensors file; name the folder of a whole model"
    assert refusal(tmp_path / "nowhere").startswith(f"{tmp_path / 'nowhere'} is no folder of this machine")


def test_a_missing_shard_is_refused_by_name(tmp_path):
    (sharded(tmp_path) / "model-00002-of-00002.safetensors").unlink()
    assert "lacks 1 of the 2 files" in refusal(tmp_path)
    assert "the first model-00002-of-00002.safetensors; download them" in refusal(tmp_path)


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/outside.safetensors", "a/../../b.safetensors"])
def test_an_index_can_not_name_files_outside_its_folder(tmp_path, name):
    (tmp_path / "model").mkdir()
    save_file(TENSORS, tmp_path / "outside.safetensors")
    write_index(tmp_path / "model", {"a": name})
    assert f"names {name!r}, which isn't a file of its folder" in refusal(tmp_path / "model")


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"weight_map": ["a"]}', '{"weight_map": {"a": 1}}'])
def test_a_broken_index_is_refused(tmp_path, text):
    (tmp_path / INDEX).write_text(text)
    assert re.search(rf"{INDEX} can't be read \(.*\); download it again", refusal(tmp_path))


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def garbage(file: Path) -> None:
    file.write_bytes(bytes(range(256)))


def empty(file: Path) -> None:
    file.write_bytes(b"")


def a_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


@pytest.mark.parametrize("harm", [cut, garbage, empty, a_folder])
def test_a_broken_file_is_refused_by_name(tmp_path, harm):
    file = tmp_path / "weights.safetensors"
    save_file(TENSORS, file)
    harm(file)
    assert re.match(rf"{file} can't be read \(.*\); download it again", refusal(tmp_path))


@pytest.mark.parametrize("code", ["F8_E4M3", "I8", "I64", "BOOL"])
def test_tensors_that_are_not_floating_point_are_refused_by_name(tmp_path, code):
    size = 8 if code == "I64" else 1
    header = json.dumps({"w": {"dtype": code, "shape": [1], "data_offsets": [0, size]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(size))
    assert f"w is stored as {code}; bfloat16, float16, float32, float64 are read" in refusal(tmp_path)


def test_a_tensor_in_two_files_is_refused(tmp_path):
    save_file({"a": TENSORS["a"]}, tmp_path / "one.safetensors")
    save_file({"a": TENSORS["a"]}, tmp_path / "two.safetensors")
    assert "a is both in one.safetensors and two.safetensors" in refusal(tmp_path)


# Writing


def write(folder: Path, tensors: dict[str, np.ndarray], dtype: str = "float32", **options) -> dict[str, np.ndarray]:
    """What the safetensors library reads of what was written."""
    write_tensors(
        folder, [(name, tensor.shape) for name, tensor in tensors.items()], dtype, tensors.__getitem__, **options
    )
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_what_is_written_is_read_by_the_library_in_the_dtype_asked_for(tmp_path, dtype):
    tensors = {name: tensor for name, tensor in TENSORS.items() if name != "d"}
    found = write(tmp_path, tensors, dtype)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        # NumPy and ml_dtypes round to nearest
        assert found[name].dtype == (BF16 if dtype == "bfloat16" else np.dtype(dtype))
        assert np.array_equal(found[name], tensor.astype(found[name].dtype))
    with safe_open(tmp_path / "model.safetensors", framework="np") as file:
        assert file.metadata() == {"format": "pt"}
    assert not (tmp_path / INDEX).exists()


def test_a_transposed_tensor_and_one_without_numbers_are_written(tmp_path):
    tensors = {"t": np.arange(6, dtype=np.float32).reshape(2, 3).T, "none": np.zeros((0, 3), np.float32)}
    found = write(tmp_path, tensors)
    assert np.array_equal(found["t"], [[0, 3], [1, 4], [2, 5]]) and found["none"].shape == (0, 3)


def test_shards_are_as_large_as_asked_for_and_a_larger_tensor_has_its_own(tmp_path):
    # 12, 12, 40, 12 and 8 bytes with 24 a shard
    sizes = {"a": 3, "b": 3, "large": 10, "c": 3, "d": 2}
    tensors = {name: np.full(size, size, np.float32) for name, size in sizes.items()}
    found = write(tmp_path, tensors, shard_bytes=24)
    assert all(np.array_equal(found[name], tensor) for name, tensor in tensors.items())
    names = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"]["total_size"] == 4 * sum(sizes.values())
    assert index["weight_map"] == dict(a=names[0], b=names[0], large=names[1], c=names[2], d=names[2])
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / file, framework="np") as tensors_of_file:
            assert name in tensors_of_file.keys()  # noqa: SIM118 (not a mapping)
    assert TensorFolder(tmp_path).shapes == {name: (size,) for name, size in sizes.items()}


def test_each_tensor_is_on_disk_before_the_next_is_read(tmp_path):
    written = []

    def read(name):
        written.append((tmp_path / "model.safetensors").stat().st_size)
        return np.ones(1 << 18, np.float32)

    write_tensors(tmp_path, [(name, (1 << 18,)) for name in "abc"], "float32", read)
    assert written[0] < 1 << 20 <= written[1] and written[2] >= 2 << 20


def test_a_process_that_only_takes_part_reads_everything_and_writes_nothing(tmp_path):
    read = []
    write_tensors(None, [("a", (1,)), ("b", (1,))], "float32", lambda name: read.append(name) or np.ones(1, np.float32))
    assert read == ["a", "b"]
