"""A run on a user's file with broken lines, from the command line."""

import json

import pytest
from commands import RECIPES, rows, run_here
from sft_files import BROKEN, write_conversations
from small_tokenizer import qwen_folder
from word_encoder import write_texts

import jaxforge
from jaxforge.config import load_config

RECIPE = RECIPES / "tiny_conversations.py"

pytestmark = pytest.mark.usefixtures("shared_programs")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """2,000 lines, of which every hundredth is broken, each kind in turn."""
    folder = tmp_path_factory.mktemp("sft")
    write_conversations(folder, 2000, broken_every=100)
    qwen_folder(folder / "tokenizer")
    return folder


@pytest.mark.slow
def test_a_file_with_broken_lines_trains_to_its_end_and_the_counts_are_reported(folder, tmp_path):
    code, output = run_here("train", f"--config={RECIPE}:{folder}", f"--workdir={tmp_path}")
    assert code == 0, output
    # 20 broken lines, four of each kind; half a JPEG is found when it is decoded
    assert "2,000 samples in 1 file" in output
    assert "skipped 16 samples: aspect ratio 4, bad json 4, media count 4, missing media 4" in output
    assert "train.jsonl:100" in output
    last = "aspect ratio 4, bad json 4, corrupt media 4, media count 4, missing media 4"
    assert f"skipped samples: {last}" in output
    found = rows(tmp_path)
    assert [row["step"] for row in found] == list(range(1, 17))
    # more rows than an epoch has: every line was read
    assert found[-1]["data/skipped_samples"] == 4 * len(BROKEN) == 20
    assert sum(row["images"] for row in found) > 1980
    assert found[-1]["loss"] < found[0]["loss"]


@pytest.mark.slow
def test_a_resumed_run_says_that_its_files_changed_and_that_it_is_evaluated_on_them(tmp_path, capsys):
    def output_of_run(texts):
        path = write_texts(tmp_path / "a.jsonl", texts)
        overrides = (f"data.path={path}", f"data.eval_path={path}", f"data.tokenizer={qwen_folder(tmp_path / 'qwen')}",
                     f"data.cache_dir={tmp_path}", "model.decoder.vocab_size=300", "train.steps=1",
                     "optimizer.lr_warmup_iters=0")  # fmt: skip
        jaxforge.train(load_config(RECIPES / "tiny_text.py", overrides), tmp_path / "run")
        return capsys.readouterr().out

    texts = [f"the text of number {number}" for number in range(30)]
    assert f"data.eval_path has {tmp_path / 'a.jsonl'}, which data.path has too" in output_of_run(texts)
    output = output_of_run(texts)
    assert "resuming from step 1" in output and "the documents that data.path gives" not in output
    assert "changed since: the documents that data.path gives" in output_of_run(texts[1:])


def test_strict_stops_at_the_first_broken_line(folder, tmp_path):
    first = next(
        number
        for number, line in enumerate((folder / "train.jsonl").read_text().splitlines(), start=1)
        if not _is_whole(line)
    )
    flags = [f"--config={RECIPE}:{folder}", f"--workdir={tmp_path}", "--config.data.strict=true"]
    code, output = run_here("train", *flags)
    assert code == 2
    assert f"config error: {folder / 'train.jsonl'}:{first}: " in output and "Traceback" not in output
    assert not rows(tmp_path)


def _is_whole(line):
    """Whether a line is one of those that aren't broken, by what its writer did to the others."""
    try:
        sample = json.loads(line)
    except ValueError:
        return False
    image = sample["images"][0]
    return image[0].isdigit() and sample["messages"][0]["content"].count("<image>") == 1
