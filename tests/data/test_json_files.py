"""JSON lines and arrays: every sample at its line, whatever the file's blanks, line ends and encoding marks."""

import json

import pytest

from jaxforge.config.errors import ConfigError
from jaxforge.data import json_files
from jaxforge.data.conversation import SampleError
from jaxforge.data.json_files import json_array, json_lines


def write(folder, content, name="samples.jsonl"):
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def texts(samples):
    return [(samples.place(i), samples.raw(i)["text"]) for i in range(len(samples))]


def test_each_line_is_a_sample_at_its_number(tmp_path):
    path = write(tmp_path, '{"text": "one"}\n{"text": "two"}\n{"text": "three"}\n')
    assert texts(json_lines(path)) == [(1, "one"), (2, "two"), (3, "three")]


def test_the_last_line_needs_no_end(tmp_path):
    assert texts(json_lines(write(tmp_path, '{"text": "one"}\n{"text": "two"}'))) == [(1, "one"), (2, "two")]


def test_blank_lines_are_passed_over_and_still_counted(tmp_path):
    path = write(tmp_path, '\n{"text": "two"}\n  \t \n\n   {"text": "five"}\n\n')
    assert texts(json_lines(path)) == [(2, "two"), (5, "five")]


def test_windows_line_ends_and_a_byte_order_mark_do_no_harm(tmp_path):
    path = write(tmp_path, b'\xef\xbb\xbf{"text": "one"}\r\n\r\n{"text": "\xc3\xa9t\xc3\xa9"}\r\n')
    assert texts(json_lines(path)) == [(1, "one"), (3, "été")]


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xef\xbb\xbf", b"  \r\n "])
def test_a_file_of_blanks_has_no_samples(tmp_path, content):
    assert len(json_lines(write(tmp_path, content))) == 0


@pytest.mark.parametrize("block", [1, 2, 3, 7, 16, 17, 64])
def test_lines_are_found_whatever_the_block_that_is_read(tmp_path, monkeypatch, block):
    monkeypatch.setattr(json_files, "_BLOCK_BYTES", block)
    path = write(tmp_path, '{"text": "one"}\n\n{"text": "three"}\n \n{"text": "five"}')
    assert texts(json_lines(path)) == [(1, "one"), (3, "three"), (5, "five")]


@pytest.mark.parametrize(
    "line, kind",
    [
        ('{"text": "cut', "bad json"),
        ("[1, 2]", "bad format"),
        ("[" * 100_000, "bad json"),
        (b'{"text": "\xff"}', "bad json"),
    ],
)
def test_a_broken_line_is_an_error_of_that_sample_alone(tmp_path, line, kind):
    line = line if isinstance(line, bytes) else line.encode()
    samples = json_lines(write(tmp_path, b'{"text": "one"}\n' + line + b'\n{"text": "three"}\n'))
    assert [samples.raw(i)["text"] for i in (0, 2)] == ["one", "three"]
    with pytest.raises(SampleError) as error:
        samples.raw(1)
    assert error.value.kind == kind


def test_half_a_character_is_an_error_of_that_sample_alone(tmp_path):
    # U+1F600 in JSON's escapes, and its first half, as cutting a text leaves it: no tokenizer and no terminal takes it
    path = write(tmp_path, '{"text": "\\ud83d\\ude00"}\n{"text": "cut", "tags": ["\\uD83D"]}\n{"text": "\\\\ud83d"}\n')
    samples = json_lines(path)
    assert [samples.raw(i)["text"] for i in (0, 2)] == ["\U0001f600", "\\ud83d"]
    with pytest.raises(SampleError, match=r"has \\ud83d, half of a character") as error:
        samples.raw(1)
    assert error.value.kind == "bad json"


def test_elements_of_an_array_lie_at_the_line_where_they_begin(tmp_path):
    path = write(tmp_path, '[\n  {"text": "é", "n": [1,\n 2]},\n\n {"text": "two"}, {"text":"three"}\n]\n', "a.json")
    assert texts(json_array(path)) == [(2, "é"), (5, "two"), (5, "three")]


def test_an_array_gives_what_the_json_library_reads(tmp_path):
    values = [{"text": 'a\n[}"', "n": n, "deep": [{"ü": None}]} for n in range(7)]
    path = write(tmp_path, json.dumps(values, indent=1, ensure_ascii=False), "a.json")
    samples = json_array(path)
    assert [samples.raw(i) for i in range(len(samples))] == values


def test_a_json_file_may_hold_lines(tmp_path):
    path = write(tmp_path, '{"text": "one"}\n{"text": "two"}\n', "a.json")
    assert texts(json_array(path)) == [(1, "one"), (2, "two")]


@pytest.mark.parametrize(
    "content, message",
    [
        ('{\n "data": []\n}', "is not a JSON array of samples; write one, or a .jsonl file"),
        ('[{"text": "one"}\n {"text": "two"}]', ":2 is not a JSON array: a comma or ] is missing"),
        ('[{"text": "one"},\n', ":2 is not a JSON array"),
        ('[{"text": "one"}]\n[]', "something follows the array"),
        (b'["\xff"]', "is not UTF-8"),
    ],
)
def test_a_broken_array_is_refused_with_its_line(tmp_path, content, message):
    with pytest.raises(ConfigError, match=r"a\.json.*") as error:
        json_array(write(tmp_path, content, "a.json"))
    assert message in str(error.value)
