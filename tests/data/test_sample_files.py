"""Files and folders as one list of samples that is read anywhere, by any thread."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from jaxforge.config.errors import ConfigError
from jaxforge.data import sample_files
from jaxforge.data.conversation import SampleError
from jaxforge.data.sample_files import SampleFiles


def write_lines(path, texts):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def texts(files):
    return [files.raw(i)["text"] for i in range(len(files))]


def test_files_follow_each_other_as_they_are_given(tmp_path):
    second, first = write_lines(tmp_path / "b.jsonl", ["b1", "b2"]), write_lines(tmp_path / "a.jsonl", ["a1"])
    files = SampleFiles([str(second), str(first)])
    assert texts(files) == ["b1", "b2", "a1"]
    assert [files.where(i) for i in range(3)] == [f"{second}:1", f"{second}:2", f"{first}:1"]
    assert files.entry_ends == [2, 3]


def test_a_folder_is_read_by_name_with_the_folders_below(tmp_path):
    write_lines(tmp_path / "data" / "z.jsonl", ["z"])
    write_lines(tmp_path / "data" / "a" / "2.jsonl", ["a2"])
    write_lines(tmp_path / "data" / "a" / "1.jsonl", ["a1"])
    write_lines(tmp_path / "data" / ".hidden" / "h.jsonl", ["hidden"])
    (tmp_path / "data" / "notes.txt").write_text("no data")
    write_lines(tmp_path / "more.jsonl", ["more"])
    files = SampleFiles([str(tmp_path / "data"), str(tmp_path / "more.jsonl")])
    assert texts(files) == ["a1", "a2", "z", "more"]
    assert files.entry_ends == [3, 4]


def test_media_paths_start_from_the_file_or_from_the_root_that_is_given(tmp_path):
    path = write_lines(tmp_path / "data" / "a.jsonl", ["a"])
    assert SampleFiles([str(path)]).root(0) == tmp_path / "data"
    assert SampleFiles([str(path)], media_root=str(tmp_path)).root(0) == tmp_path


def write_parquet(path, rows, row_group_size=2):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=row_group_size)
    return path


def test_parquet_rows_are_samples_with_the_fields_that_they_have(tmp_path):
    rows = [{"text": f"row {n}", "images": [{"bytes": b"\x89PNG", "path": None}] if n == 2 else None} for n in range(5)]
    path = write_parquet(tmp_path / "a.parquet", rows)
    files = SampleFiles([str(path)])
    assert [files.raw(i) for i in range(5)] == [
        {"text": "row 0"},
        {"text": "row 1"},
        {"text": "row 2", "images": [{"bytes": b"\x89PNG", "path": None}]},
        {"text": "row 3"},
        {"text": "row 4"},
    ]
    assert files.where(4) == f"{path}:5"


def test_parquet_rows_of_a_group_are_read_together(tmp_path, monkeypatch):
    read = []
    real = sample_files._read_row_group
    monkeypatch.setattr(sample_files, "_read_row_group", lambda path, group: read.append(group) or real(path, group))
    files = SampleFiles([str(write_parquet(tmp_path / "a.parquet", [{"text": str(n)} for n in range(6)]))])
    assert texts(files) == ["0", "1", "2", "3", "4", "5"]
    assert read == [0, 1, 2]


def test_a_broken_row_group_is_an_error_of_its_rows_alone(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", [{"text": f"row {n} " * 100} for n in range(4)])
    metadata = pyarrow.parquet.read_metadata(path).row_group(1).column(0)
    content = bytearray(path.read_bytes())
    start = metadata.dictionary_page_offset or metadata.data_page_offset
    content[start : start + metadata.total_compressed_size] = b"\xff" * metadata.total_compressed_size
    path.write_bytes(content)
    files = SampleFiles([str(path)])
    assert files.raw(1) == {"text": "row 1 " * 100}
    with pytest.raises(SampleError, match="is in a row group that can't be read") as error:
        files.raw(2)
    assert error.value.kind == "bad format"


def test_threads_read_what_one_thread_reads(tmp_path):
    write_lines(tmp_path / "a.jsonl", [f"a{n}" for n in range(200)])
    write_parquet(tmp_path / "b.parquet", [{"text": f"b{n}"} for n in range(50)])
    files = SampleFiles([str(tmp_path)])
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda i: files.raw(i)["text"], [*range(250)] * 3))
    assert found == ([f"a{n}" for n in range(200)] + [f"b{n}" for n in range(50)]) * 3


def test_the_fingerprint_follows_names_order_size_and_time(tmp_path):
    a, b = write_lines(tmp_path / "a.jsonl", ["a"]), write_lines(tmp_path / "b.jsonl", ["b"])
    both = SampleFiles([str(a), str(b)])
    assert both.fingerprint == SampleFiles([str(a), str(b)]).fingerprint
    others = [SampleFiles([str(b), str(a)]), SampleFiles([str(a)]), SampleFiles([str(a), str(b)], str(tmp_path))]
    assert both.fingerprint not in {files.fingerprint for files in others} and both.changed() == []
    os.utime(b, (1, 1))
    assert SampleFiles([str(a), str(b)]).fingerprint != both.fingerprint
    assert both.changed() == [b]


def test_files_that_two_paths_share_are_found_whatever_they_are_called(tmp_path):
    train, held_out = write_lines(tmp_path / "train.jsonl", ["a"]), write_lines(tmp_path / "eval.jsonl", ["b"])
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "elsewhere" / "link.jsonl"
    link.symlink_to(held_out)
    folder = SampleFiles([str(tmp_path)])
    assert SampleFiles([str(link)]).shared_with(folder) == [link]
    assert SampleFiles([str(held_out)]).shared_with(SampleFiles([str(train)])) == []


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("missing.jsonl", None, "data.path={path} does not exist; give files and folders that this machine has"),
        ("a.csv", b"text\n", "data.path={path} has an unknown extension; known are .jsonl, .json, .parquet, .tar"),
        ("a.jsonl", b"\n", "data.path={path} holds no samples; remove it, or fill it"),
        ("a.json", b"[]", "data.path={path} holds no samples"),
        ("a.parquet", b"PAR1", "{path} is not a parquet file"),
        ("a.tar", b"x" * 1024, "{path} is not an uncompressed tar"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(tmp_path, name, content, message):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as error:
        SampleFiles([str(path)])
    assert message.format(path=path) in str(error.value)


def test_a_folder_that_cannot_be_looked_into_is_refused_and_not_passed_over(tmp_path, monkeypatch):
    write_lines(tmp_path / "a.jsonl", ["a"])
    write_lines(tmp_path / "closed" / "b.jsonl", ["b"])
    scandir = os.scandir

    def closed(path):  # permissions don't stop root
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", closed)
    with pytest.raises(ConfigError, match=r"data.path=.* can't be read: .*Permission denied: '.*closed'; mend it"):
        SampleFiles([str(tmp_path)])


def test_a_path_that_the_file_system_refuses_is_a_config_error():
    with pytest.raises(ConfigError, match="can't be read|does not exist"):
        SampleFiles(["x" * 300 + ".jsonl"])


def test_a_folder_without_data_and_a_missing_media_root_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="is a folder without data files; put .jsonl, .json, .parquet, .tar there"):
        SampleFiles([str(tmp_path)])
    path = write_lines(tmp_path / "a.jsonl", ["a"])
    with pytest.raises(ConfigError, match="data.media_root=/no/where is not a folder"):
        SampleFiles([str(path)], media_root="/no/where")


def test_the_field_that_names_the_files_is_in_the_message():
    with pytest.raises(ConfigError, match="data.eval_path=none.jsonl does not exist"):
        SampleFiles(["none.jsonl"], field="data.eval_path")


def test_a_home_folder_may_be_abbreviated(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write_lines(tmp_path / "a.jsonl", ["a"])
    assert SampleFiles(["~/a.jsonl"]).files == (Path(tmp_path / "a.jsonl"),)
