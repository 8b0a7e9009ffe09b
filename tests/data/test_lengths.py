"""The lengths pass: every document once, broken samples counted, stopped at or refused, and the cache."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from word_encoder import WordEncoder, write_texts

from jaxforge.config.errors import ConfigError
from jaxforge.config.schema import DataConfig
from jaxforge.data.lengths import cache_folder, find_lengths, measure, refusal
from jaxforge.data.sample_files import SampleFiles


@pytest.fixture
def settings(tmp_path):
    """A config of the data with a cache of its own."""

    def make(**fields):
        return DataConfig(cache_dir=str(tmp_path / "cache"), **fields)

    return make


def files(tmp_path, texts):
    return SampleFiles([write_texts(tmp_path / "a.jsonl", texts)])


def test_every_document_of_every_sample_is_measured_in_order(tmp_path, settings):
    # rows of 4 tokens: the second text fills two of them and a half
    found = measure(files(tmp_path, ["1 1", "2 " * 10, "image 3", "4"]), WordEncoder(seq_length=4), settings())
    assert found.samples_N.tolist() == [0, 1, 1, 1, 2, 2, 3]
    assert found.parts_N.tolist() == [0, 0, 1, 2, 0, 1, 0]
    assert found.tokens_N.tolist() == [2, 4, 4, 2, 4, 1, 1]
    assert found.patches_N.tolist() == [0, 0, 0, 0, 16, 16, 0]
    assert (found.num_samples, found.skipped, found.examples) == (4, {}, ())


def test_the_number_of_threads_changes_nothing(tmp_path, settings):
    texts = [f"{n} " * (n % 40 + 1) if n % 50 else "broken bad json" for n in range(1000)]
    one, many = (measure(files(tmp_path, texts), WordEncoder(), settings(num_threads=n)) for n in (1, 32))
    for name in ("samples_N", "parts_N", "tokens_N", "patches_N"):
        np.testing.assert_array_equal(getattr(one, name), getattr(many, name))
    assert one.skipped == many.skipped == {"bad json": 20} and one.examples == many.examples


def test_broken_samples_are_counted_by_kind_with_the_first_of_each(tmp_path, settings):
    texts = ["1"] * 20
    texts[3], texts[5] = "broken missing media", "broken aspect ratio"
    for n in (6, 8, 10, 12):
        texts[n] = "broken missing media"
    source = files(tmp_path, texts)
    found = find_lengths(source, WordEncoder(), settings(max_skipped_fraction=0.5))
    assert found.skipped == {"missing media": 5, "aspect ratio": 1}
    path = tmp_path / "a.jsonl"
    assert [(skip.where, skip.kind) for skip in found.examples] == [
        (f"{path}:4", "missing media"),
        (f"{path}:6", "aspect ratio"),
        (f"{path}:7", "missing media"),
        (f"{path}:9", "missing media"),
    ]
    assert len(found) == 14


def test_strict_stops_at_the_first_broken_sample_with_file_and_line(tmp_path, settings):
    texts = ["1"] * 300
    texts[250], texts[90] = "broken bad json", "broken corrupt media"
    encoder = WordEncoder()
    with pytest.raises(ConfigError) as error:
        find_lengths(files(tmp_path, texts), encoder, settings(strict=True))
    assert str(error.value) == (
        f"{tmp_path / 'a.jsonl'}:91: the text says 'broken corrupt media' (corrupt media); mend the sample, or set"
        " data.strict=False to skip and count such samples"
    )


def test_a_sample_that_is_too_long_is_counted_but_is_not_broken(tmp_path, settings):
    # F39
    texts = ["1"] * 5 + ["broken too long"] * 5
    source = files(tmp_path, texts)
    for fields in (dict(max_skipped_fraction=0.0), dict(strict=True)):
        found = find_lengths(source, WordEncoder(), settings(**fields))
        assert len(found) == 5 and found.skipped == {"too long": 5}


def test_a_strict_pass_that_stopped_early_leaves_nothing_behind(tmp_path, settings):
    source = files(tmp_path, ["broken bad json"] + ["1"] * 299)
    with pytest.raises(ConfigError):
        find_lengths(source, WordEncoder(), settings(strict=True))
    assert len(find_lengths(source, WordEncoder(), settings())) == 299


def test_too_many_broken_samples_are_refused_with_counts_and_examples(tmp_path, settings):
    texts = ["1"] * 90 + ["broken missing media"] * 7 + ["broken bad json"] * 3
    source = files(tmp_path, texts)
    with pytest.raises(ConfigError) as error:
        find_lengths(source, WordEncoder(), settings(max_skipped_fraction=0.09))
    message = str(error.value)
    assert (
        "10 of 100 samples can't be used, more than data.max_skipped_fraction=0.09: missing media 7, bad json 3"
        in message
    )
    assert f"{tmp_path / 'a.jsonl'}:91: the text says 'broken missing media' (missing media)" in message
    assert "set data.max_skipped_fraction=0.1 to go on" in message
    # the way out works, and exactly so many are allowed
    assert len(find_lengths(source, WordEncoder(), settings(max_skipped_fraction=0.1))) == 90


def test_the_way_out_allows_what_was_found():
    # 7 of 300 is 2.33 %: rounded up to whole per cent, or the same message would come again
    data = DataConfig(max_skipped_fraction=0.01)
    assert "data.max_skipped_fraction=0.03" in refusal({"bad json": 7}, (), 300, data)
    assert refusal({"bad json": 7}, (), 300, DataConfig(max_skipped_fraction=0.03)) is None


def test_files_without_a_usable_sample_have_no_way_out_but_to_be_mended(tmp_path, settings):
    with pytest.raises(ConfigError, match="2 of 2 samples can't be used") as error:
        find_lengths(files(tmp_path, ["broken bad json"] * 2), WordEncoder(), settings(max_skipped_fraction=0.99))
    assert str(error.value).endswith("\nmend them")


def test_lengths_are_measured_once_and_then_read(tmp_path, settings):
    source, encoder = files(tmp_path, ["1 1", "broken bad json", "3 3 3"] * 5), WordEncoder()
    first = find_lengths(source, encoder, settings(max_skipped_fraction=0.5))
    assert len(encoder.measured) == 15
    again = find_lengths(source, encoder, settings(max_skipped_fraction=0.5))
    assert len(encoder.measured) == 15
    assert again.tokens_N.tolist() == first.tokens_N.tolist() == [2, 3] * 5
    assert (again.samples_N.dtype, again.tokens_N.dtype) == (first.samples_N.dtype, first.tokens_N.dtype)
    assert (again.skipped, again.examples, again.key) == (first.skipped, first.examples, first.key)


def test_a_cache_can_be_read_by_the_other_users_of_its_folder(tmp_path, settings):
    find_lengths(files(tmp_path, ["1"]), WordEncoder(), settings())
    (path,) = (tmp_path / "cache").iterdir()
    assert path.stat().st_mode & 0o777 == 0o644


def test_other_files_or_settings_are_measured_anew(tmp_path, settings):
    source, encoder = files(tmp_path, ["1 1"]), WordEncoder()
    find_lengths(source, encoder, settings())
    other = WordEncoder(settings="other words")
    find_lengths(source, other, settings())
    assert len(other.measured) == 1
    os.utime(tmp_path / "a.jsonl", (1, 1))
    find_lengths(SampleFiles([str(tmp_path / "a.jsonl")]), encoder, settings())
    assert len(encoder.measured) == 2


@pytest.mark.parametrize(
    "damage", [lambda content: content[:100], lambda content: b"", lambda content: content[:-200] + b"x" * 200]
)
def test_a_damaged_cache_is_made_again(tmp_path, settings, damage):
    source = files(tmp_path, ["1 1", "2"])
    find_lengths(source, WordEncoder(), settings())
    (path,) = (tmp_path / "cache").iterdir()
    path.write_bytes(damage(path.read_bytes()))
    encoder = WordEncoder()
    assert find_lengths(source, encoder, settings()).tokens_N.tolist() == [2, 1]
    assert len(encoder.measured) == 2
    assert find_lengths(source, encoder, settings()).tokens_N.tolist() == [2, 1]
    assert len(encoder.measured) == 2 and [path] == list((tmp_path / "cache").iterdir())


def test_what_was_refused_is_looked_at_again(tmp_path, settings):
    # an image that was missing may be there by now
    source = files(tmp_path, ["1", "broken missing media"])
    with pytest.raises(ConfigError):
        find_lengths(source, WordEncoder(), settings())
    mended = WordEncoder()
    mended._parts = lambda text, reading: [([1], False)]
    assert find_lengths(source, mended, settings()).skipped == {}


def test_an_image_that_was_missing_is_used_once_it_is_there(tmp_path, settings):
    source, data = files(tmp_path, ["1", "broken missing media"]), settings(max_skipped_fraction=0.5)
    assert find_lengths(source, WordEncoder(), data).skipped == {"missing media": 1}
    still_missing = WordEncoder()
    assert find_lengths(source, still_missing, data).skipped == {"missing media": 1}
    assert still_missing.measured == ["broken missing media"]  # looked at, without a pass over all
    mended = WordEncoder()
    mended._parts = lambda text, reading: [([1], False)]
    assert find_lengths(source, mended, data).skipped == {}
    assert len(find_lengths(source, WordEncoder(), data)) == 2  # and is in the cache


def test_a_cache_that_cannot_be_written_is_left_out(tmp_path, caplog):
    (tmp_path / "file").write_text("not a folder")
    data = DataConfig(cache_dir=str(tmp_path / "file" / "cache"))
    assert len(find_lengths(files(tmp_path, ["1"]), WordEncoder(), data)) == 1
    assert "can't be written" in caplog.text


def test_the_cache_lies_where_the_user_wants_it(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder(DataConfig()) == tmp_path / ".cache" / "jaxforge"
    monkeypatch.setenv("XDG_CACHE_HOME", "/scratch/cache")
    assert str(cache_folder(DataConfig())) == "/scratch/cache/jaxforge"
    assert cache_folder(DataConfig(cache_dir="~/mine")) == tmp_path / "mine"


# several processes

MEASURE = """
import os, sys
sys.path.insert(0, "tests/data")
from jaxforge.cluster import detect, initialize
from jaxforge.config import ConfigError
from jaxforge.config.schema import DataConfig
from jaxforge.data.lengths import find_lengths
from jaxforge.data.sample_files import SampleFiles
from word_encoder import WordEncoder

initialize(detect(os.environ), timeout_seconds=30)
encoder, path, cache = WordEncoder(), *sys.argv[1:]
for fraction in (0.0, 0.5):
    try:
        found = find_lengths(SampleFiles([path]), encoder, DataConfig(cache_dir=cache, max_skipped_fraction=fraction))
        print("result:", len(found), len(encoder.measured))
    except ConfigError as error:
        print("result:", str(error).splitlines()[0])
"""


@pytest.mark.slow
@pytest.mark.parametrize("shared", [True, False])
def test_the_first_process_measures_for_all_and_refuses_for_all(tmp_path, shared):
    path = write_texts(tmp_path / "a.jsonl", ["1", "broken bad json", "3"])
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    processes = []
    for rank in (0, 1):
        variables = {
            "JAXFORGE_COORDINATOR": f"127.0.0.1:{port}",
            "JAXFORGE_NUM_PROCESSES": "2",
            "JAXFORGE_PROCESS_ID": str(rank),
        }
        cache = tmp_path / ("cache" if shared else f"cache{rank}")
        processes.append(
            subprocess.Popen(
                [sys.executable, "-c", MEASURE, path, str(cache)],
                cwd=Path(__file__).parents[2],
                env={name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | variables,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        )
    printed = []
    try:
        for process in processes:
            output, errors = process.communicate(timeout=60)
            assert process.returncode == 0, errors
            # Gloo's threads write to the same pipe, so a line of ours may follow a part of theirs.
            printed.append(re.findall("result: (.*)", output))
    finally:
        for process in processes:
            process.kill()
    # the first process looked at all three texts twice, as it kept nothing of what it refused
    assert printed[0] == ["1 of 3 samples can't be used, more than data.max_skipped_fraction=0.0: bad json 1", "2 6"]
    # the second read what the first had written, or measured once where it couldn't see it
    assert printed[1] == ["the data were refused by process 0, which says why", "2 0" if shared else "2 3"]
