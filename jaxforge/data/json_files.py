"""JSON in files: a sample a line, or an array of samples; found once, parsed when asked for."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from jaxforge.config.errors import ConfigError
from jaxforge.data.conversation import SampleError

_BLOCK_BYTES = 1 << 24
_NEWLINE, _SPACE = 10, 32
_BOM = b"\xef\xbb\xbf"
# Half of a character beyond U+FFFF, as JSON escapes it; UTF-8 can't hold it in any other way.
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class JsonSamples:
    """Samples that lie in a text file as JSON.

    Args:
      starts_N, lengths_N: [N] int64, where each is, in bytes.
      lines_N: [N] int64, the lines where they begin, from 1.
    """

    def __init__(self, path: Path, starts_N: np.ndarray, lengths_N: np.ndarray, lines_N: np.ndarray):
        self.path = path
        self._starts_N, self._lengths_N, self._lines_N = starts_N, lengths_N, lines_N

    def __len__(self) -> int:
        return len(self._starts_N)

    def raw(self, index: int) -> dict[str, Any]:
        # opened for each sample: a handle for each of thousands of files would be too many, and this is thread-safe
        with self.path.open("rb") as file:
            file.seek(self._starts_N[index])
            return parse_object(file.read(self._lengths_N[index]))

    def place(self, index: int) -> int:
        return int(self._lines_N[index])


def parse_object(text: bytes) -> dict[str, Any]:
    """A JSON object.  Raises SampleError "bad json" or "bad format"."""
    try:
        value = json.loads(text.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise SampleError("bad json", f"can't be parsed as JSON: {error}") from error
    if not isinstance(value, dict):
        raise SampleError("bad format", f"is a JSON {type(value).__name__}, not an object")
    if _SURROGATE.search(text):
        _refuse_half_characters(value)
    return value


def _refuse_half_characters(value: dict[str, Any]) -> None:
    """Python takes them, but no tokenizer, file name or terminal does."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start])[1:-1]
        raise SampleError(
            "bad json", f"has {half}, half of a character, as a text cut in two has; mend the text"
        ) from error


def json_lines(path: Path) -> JsonSamples:
    """The lines of a file that aren't blank, found without parsing them."""
    starts, ends, suspects = [], [], []
    with path.open("rb") as file:
        offset = len(_BOM) if file.read(len(_BOM)) == _BOM else 0
        file.seek(offset)
        begins_line = True
        while block := file.read(_BLOCK_BYTES):
            bytes_N = np.frombuffer(block, np.uint8)
            newlines = np.flatnonzero(bytes_N == _NEWLINE)
            starting = newlines[:-1] + 1 if len(newlines) and newlines[-1] == len(block) - 1 else newlines + 1
            starting = np.concatenate([[0], starting]) if begins_line else starting
            starts.append(starting + offset)
            suspects.append(bytes_N[starting] <= _SPACE)
            ends.append(newlines + offset)
            begins_line = block[-1] == _NEWLINE
            offset += len(block)
        if not starts:
            return JsonSamples(path, *(np.zeros(0, np.int64),) * 3)
        starts_N, suspect_N = np.concatenate(starts), np.concatenate(suspects)
        ends_N = np.concatenate(ends if begins_line else [*ends, [offset]])
        keep_N = np.ones(len(starts_N), bool)
        for line in np.flatnonzero(suspect_N):  # few: most lines start with a brace
            file.seek(starts_N[line])
            keep_N[line] = bool(file.read(ends_N[line] - starts_N[line]).strip())
    lines_N = np.arange(1, len(starts_N) + 1)
    return JsonSamples(path, starts_N[keep_N], (ends_N - starts_N)[keep_N], lines_N[keep_N])


def json_array(path: Path) -> JsonSamples:
    """The elements of an array.  A file whose first line is an object is taken as lines, as many are named .json."""
    content = path.read_bytes()
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 ({error.reason} at byte {error.start}); convert it") from error
    position = _after_space(text, 0)
    if position == len(text):
        return JsonSamples(path, *(np.zeros(0, np.int64),) * 3)
    if text[position] != "[":
        if _is_object(text[position:].split("\n", 1)[0]):
            return json_lines(path)
        raise ConfigError(f"{path} is not a JSON array of samples; write one, or a .jsonl file of an object a line")
    spans, decoder = [], json.JSONDecoder()
    position = _after_space(text, position + 1)
    try:
        while text[position : position + 1] != "]":
            _, end = decoder.raw_decode(text, position)
            spans.append((position, end))
            position = _after_space(text, end)
            if text[position : position + 1] == ",":
                position = _after_space(text, position + 1)
            elif text[position : position + 1] != "]":
                raise json.JSONDecodeError("a comma or ] is missing", text, position)
        if _after_space(text, position + 1) != len(text):
            raise json.JSONDecodeError("something follows the array", text, position + 1)
    except (json.JSONDecodeError, RecursionError) as error:
        line = error.lineno if isinstance(error, json.JSONDecodeError) else text.count("\n", 0, position) + 1
        raise ConfigError(f"{path}:{line} is not a JSON array: {error}; mend it, or write a .jsonl file") from error
    return _from_characters(path, text, spans, len(_BOM) if content.startswith(_BOM) else 0)


def _from_characters(path: Path, text: str, spans: list[tuple[int, int]], offset: int) -> JsonSamples:
    """Places in characters as places in bytes from `offset`, and their lines."""
    starts, lengths, lines = [], [], []
    position, line = 0, 1
    for start, end in spans:
        line += text.count("\n", position, start)
        offset += len(text[position:start].encode())
        length = len(text[start:end].encode())
        starts.append(offset)
        lengths.append(length)
        lines.append(line)
        line += text.count("\n", start, end)
        offset, position = offset + length, end
    return JsonSamples(path, *(np.array(values, np.int64) for values in (starts, lengths, lines)))


def _after_space(text: str, position: int) -> int:
    while position < len(text) and text[position] in " \t\r\n":
        position += 1
    return position


def _is_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False
