"""What a person is shown of the data."""

import io
import re

import pytest
from data_configs import text_config, vision_config
from PIL import Image
from rich.console import Console
from sft_files import conversation_config, write_conversations

from jaxforge.config.errors import ConfigError
from jaxforge.data.inspect import inspect, main
from jaxforge.data.inspect_picture import _COLUMNS, _lines
from jaxforge.data.row_view import Span


def inspected(config, tmp_path, num_documents=2, width=200):
    console = Console(file=io.StringIO(), width=width)
    inspect(config, num_documents, tmp_path / "pictures" / "a.png", console)
    with Image.open(tmp_path / "pictures" / "a.png") as picture:
        assert picture.width > 1000 and picture.getcolors(1 << 24) and len(picture.getcolors(1 << 24)) > 10
    return console.file.getvalue()


def test_files_are_summed_up_and_their_first_documents_shown(tmp_path):
    path = write_conversations(tmp_path, 60, broken_every=30)
    shown = inspected(conversation_config(tmp_path, path), tmp_path)
    table = {
        cells[1].strip(): cells[2].strip() for cells in (line.split("│") for line in shown.splitlines()) if cells[2:]
    }
    assert table["samples"] == "60"
    assert table["skipped"] == "2: media count 1, missing media 1"
    assert table["documents"] == "58" and table["with images"] == "58 documents"
    assert f"skipped, missing media: {path}:30: image gone.jpg" in shown
    assert shown.count("<|im_start|>assistant\n⟦A picture of noise. ") == 2
    assert shown.count("<|vision_start|>[image 1: 80x") == 2 and shown.count("<|im_end|>⟧") == 2


def test_headings_are_whole_in_a_narrow_file(tmp_path):
    shown = inspected(conversation_config(tmp_path, write_conversations(tmp_path, 60)), tmp_path, width=40)
    headings = [line for line in shown.splitlines() if line.startswith("── ")]
    assert len(headings) == 2
    for heading in headings:
        assert re.search(
            r"train\.jsonl:\d+, row 0: \d+ tokens, \d+ learnt, 1 image, positions to \d+, \d+, \d+$", heading
        )


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (vision_config("digits"), "<answer>⟦"),
        (vision_config("synthetic"), "[image 1: "),
        (text_config(), "row 0: 3 documents, 100.0% of 32 tokens"),
    ],
    ids=["digits", "synthetic", "text"],
)
def test_sources_without_files_show_their_rows(tmp_path, config, expected):
    assert expected in inspected(config, tmp_path)


def widths(lines):
    return [sum(len(span.text) for span in line) for line in lines]


def test_text_of_the_picture_is_wrapped_between_words():
    lines = _lines([Span("word " * 60, "masked"), Span("answer\n    indented", "target")])
    assert max(widths(lines)) < _COLUMNS
    assert "".join(span.text for line in lines for span in line).replace(" ", "") == "word" * 60 + "answer↵indented"
    assert lines[-1] == [Span("    indented", "target")]
    assert not any(line[0].text.startswith(" ") for line in lines[:-1])


def test_a_long_text_shows_its_beginning_and_its_end():
    lines = _lines([Span("".join(f"{n}\n" for n in range(100)), "masked")])
    # a hundred lines and an empty one: 11 and 6 are shown
    texts = ["".join(span.text for span in line) for line in lines]
    assert texts == [f"{n}↵" for n in range(11)] + ["... 84 more lines ..."] + [f"{n}↵" for n in range(95, 100)] + [""]


def test_a_word_longer_than_a_line_and_characters_without_a_glyph_fit_too():
    lines = _lines([Span("x" * 1000, "masked"), Span(" 日本", "target")])
    assert max(widths(lines)) < _COLUMNS
    assert lines[-1][-1].text.endswith("□□")


@pytest.mark.parametrize(
    ("flags", "message"),
    [(["--samples=0"], "--samples=0 must be at least 1"), (["--picture=a.jpg"], "--picture=a.jpg must end in .png")],
)
def test_wrong_flags_are_refused(flags, message):
    with pytest.raises(ConfigError, match=message):
        main(["--config=configs/demo_vlm.py", *flags])


def test_the_command_inspects_a_recipe(tmp_path, capsys):
    picture = tmp_path / "demo.png"
    assert main(["--config=configs/demo_vlm.py", "--samples=1", f"--picture={picture}"]) == 0
    assert picture.exists() and "row 0:" in capsys.readouterr().out
