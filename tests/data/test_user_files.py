"""From a user's file to rows, with everything in between: formats, template, tokenizer, images, packing."""

import dataclasses
import io
import json
import tarfile

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from data_configs import vision_config
from sft_files import BROKEN, conversation_config, write_conversations
from small_tokenizer import IM_END, IM_START

from jaxforge.config.errors import ConfigError
from jaxforge.data import RowFormat, eval_source, train_source
from jaxforge.data.files_source import FilesSource
from jaxforge.data.packing import IGNORE


def test_rows_of_files_are_what_the_step_is_compiled_for(tmp_path):
    config = conversation_config(tmp_path, write_conversations(tmp_path, 30))
    source = train_source(config)
    assert isinstance(source, FilesSource)
    arrays = {key: (array.shape, array.dtype) for key, array in source.row(1).items()}
    assert arrays == RowFormat.from_config(config).arrays


def as_json_array(samples, folder):
    (folder / "b.json").write_text(json.dumps(samples, indent=1))
    return folder / "b.json"


def as_parquet(samples, folder):
    rows = [
        sample | {"images": [{"bytes": (folder / name).read_bytes(), "path": name} for name in sample["images"]]}
        for sample in samples
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "b.parquet", row_group_size=7)
    return folder / "b.parquet"


def as_tar(samples, folder):
    with tarfile.open(folder / "b.tar", "w") as tar:
        for number, sample in enumerate(samples):
            text = json.dumps({"messages": sample["messages"]}).encode()
            member = tarfile.TarInfo(f"{number:04}.json")
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text))
            tar.add(folder / sample["images"][0], f"{number:04}.jpg")
    return folder / "b.tar"


@pytest.mark.parametrize("write", [as_json_array, as_parquet, as_tar])
def test_every_kind_of_file_gives_the_rows_of_the_lines(tmp_path, write):
    path = write_conversations(tmp_path, 30)
    samples = [json.loads(line) for line in path.read_text().splitlines()]
    expected = train_source(conversation_config(tmp_path, path))
    found = train_source(conversation_config(tmp_path, write(samples, tmp_path)))
    assert len(found.epoch_plan(0)) == len(expected.epoch_plan(0))
    for index in range(len(expected.epoch_plan(0))):
        for key, array in expected.row(index).items():
            np.testing.assert_array_equal(found.row(index)[key], array, err_msg=key)


def test_answers_and_their_ends_are_learnt_and_nothing_else(tmp_path):
    row = train_source(conversation_config(tmp_path, write_conversations(tmp_path, 30))).row(0)
    learnt = row["targets"][row["targets"] != IGNORE]
    texts = bytes(token for token in learnt.tolist() if token < 256).decode().split("A picture")
    assert set(texts[1:]) <= {" of noise. "} and texts[0] == ""
    # one answer for each conversation of the row: a turn of the user and one of the assistant
    assert (learnt == IM_END).sum() == row["segment_ids"].max() == (row["tokens"] == IM_START).sum() // 2


def test_a_few_broken_lines_are_skipped_and_counted_and_do_not_stop_the_epoch(tmp_path):
    # F37, F41
    config = conversation_config(tmp_path, write_conversations(tmp_path, 500, broken_every=25))
    source = train_source(config)
    # a JPEG whose end is missing has a header: it is found when it is read
    assert source.skipped == {"bad json": 4, "missing media": 4, "media count": 4, "aspect ratio": 4}
    rows = [source.row(index) for index in range(len(source.epoch_plan(0)))]
    assert source.skipped == {kind: 4 for kind in BROKEN.values()}
    assert sum(int(row["segment_ids"].max()) for row in rows) == 480
    assert np.mean([(row["segment_ids"] > 0).mean() for row in rows]) > 0.9


def test_strict_stops_at_the_first_broken_line(tmp_path):
    path = write_conversations(tmp_path, 300, broken_every=100)
    with pytest.raises(ConfigError, match=rf"{path}:100: .*gone\.jpg.*\(missing media\)"):
        train_source(conversation_config(tmp_path, path, strict=True))


def test_held_out_files_are_the_evaluation(tmp_path):
    path = write_conversations(tmp_path, 10)
    assert eval_source(conversation_config(tmp_path, path)) is None
    source = eval_source(conversation_config(tmp_path, path, eval_path=(str(path),)))
    rows = [source.row(index) for index in range(len(source.epoch_plan(0)))]
    assert sum(int(row["segment_ids"].max()) for row in rows) == 10


def test_a_text_model_reads_conversations_without_images_alone(tmp_path):
    # every sample has an image
    config = conversation_config(tmp_path, write_conversations(tmp_path, 10))
    text = dataclasses.replace(config, model=dataclasses.replace(config.model, encoder=None, projector=None))
    with pytest.raises(ConfigError, match=r"10 of 10 samples can't be used.*bad format 10"):
        train_source(text)


def test_files_are_not_read_where_another_source_is_asked_for():
    assert not isinstance(train_source(vision_config("synthetic")), FilesSource)
