"""Rows of the user's files: all of them, in an order that depends on seed and epoch alone, broken samples counted."""

import dataclasses
import json
import logging
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
from data_configs import text_config, vision_config
from word_encoder import WordEncoder, write_texts

from jaxforge.cluster.mesh import build_mesh, mesh_layout
from jaxforge.config.errors import ConfigError
from jaxforge.data.files_source import FilesSource
from jaxforge.data.loader import Loader


def with_data(config, **data):
    return dataclasses.replace(config, data=dataclasses.replace(config.data, **data))


@pytest.fixture
def make(tmp_path):
    """A source of texts in one file, or of a list of files; its rows have 32 tokens."""

    def source(texts=None, split="train", train=None, encoder=None, **data):
        if texts is not None:
            data["path"] = (write_texts(tmp_path / "a.jsonl", texts),)
        config = text_config(**(train or {}))
        config = with_data(config, **{"source": "files", "cache_dir": str(tmp_path / "cache"), **data})
        return FilesSource(config, split, encoder or WordEncoder())

    return source


def numbered(count):
    """Texts of 1 to 20 tokens, each its own number from 1."""
    return [f"{n} " * (n % 20 + 1) for n in range(1, count + 1)]


def samples_of(row):
    """The numbers of the texts in a row."""
    return [int(row["tokens"][row["segment_ids"] == segment][0]) for segment in range(1, row["segment_ids"].max() + 1)]


def rows_of_epoch(source, epoch):
    first = sum(len(source.epoch_plan(e)) for e in range(epoch))
    return [source.row(first + i) for i in range(len(source.epoch_plan(epoch)))]


def test_an_epoch_has_every_sample_once_and_each_epoch_its_own_order(make):
    # F59
    source = make(numbered(300))
    epochs = [[sample for row in rows_of_epoch(source, epoch) for sample in samples_of(row)] for epoch in range(3)]
    for samples in epochs:
        assert sorted(samples) == list(range(1, 301))
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def test_rows_are_full(make):
    rows = rows_of_epoch(make(numbered(300)), 0)
    # 3150 tokens; the last row holds what is over
    assert sum((row["segment_ids"] > 0).sum() for row in rows) == sum(n % 20 + 1 for n in range(1, 301))
    assert np.mean([(row["segment_ids"] > 0).mean() for row in rows]) > 0.97


def test_the_seed_changes_the_order(make):
    one, two = (make(numbered(50), train={"seed": seed}).row(0)["tokens"].tolist() for seed in (0, 1))
    assert one != two


def test_rows_are_the_same_in_any_order_and_number_of_threads(make):
    texts = numbered(200)
    expected = [make(texts).row(index) for index in range(150)]  # the fourth epoch begins at about row 100
    again = make(texts)
    order = np.random.default_rng(0).permutation(150).tolist()
    with ThreadPoolExecutor(8) as threads:
        found = dict(zip(order, threads.map(again.row, order), strict=True))
    for index, row in enumerate(expected):
        for key, array in row.items():
            np.testing.assert_array_equal(array, found[index][key], err_msg=f"row {index} {key}")


def test_a_plan_that_comes_from_the_cache_gives_the_same_rows(make, monkeypatch):
    monkeypatch.setattr("jaxforge.data.files_source._DOCUMENTS_WORTH_CACHING", 1)
    first = make(numbered(100))
    rows = [first.row(index)["tokens"].tolist() for index in range(60)]
    monkeypatch.setattr("jaxforge.data.files_source.plan_rows", None)  # nothing is planned again
    again = make(numbered(100), encoder=WordEncoder())
    assert [again.row(index)["tokens"].tolist() for index in range(60)] == rows


@pytest.mark.parametrize(
    "change", [{"seed": 3}, {"seq_length": 48}, {"packing_window": 10}, {"weights": (1.0,)}], ids=str
)
def test_a_plan_of_other_settings_is_not_taken(make, monkeypatch, change):
    monkeypatch.setattr("jaxforge.data.files_source._DOCUMENTS_WORTH_CACHING", 1)
    make(numbered(100)).row(0)
    train = {name: value for name, value in change.items() if name in ("seed", "seq_length")}
    data = {name: value for name, value in change.items() if name not in train}
    fresh = make(numbered(100), train=train, **data, cache_dir="/proc/none")  # a folder that can't be
    assert make(numbered(100), train=train, **data).row(0)["tokens"].tolist() == fresh.row(0)["tokens"].tolist()


def test_a_long_text_is_split_over_documents_and_none_is_lost(make):
    # 70 tokens are rows of 32, 32 and 6; the last token of a part predicts nothing
    source = make(["7 " * 70, "8 " * 20])
    rows = rows_of_epoch(source, 0)
    tokens = np.concatenate([row["tokens"][row["segment_ids"] > 0] for row in rows])
    assert sorted(tokens.tolist()) == [7] * 70 + [8] * 20


def test_weights_repeat_the_entry_whose_share_is_larger(make, tmp_path):
    few = write_texts(tmp_path / "few.jsonl", [f"{n} " * 5 for n in range(1, 11)])
    many = write_texts(tmp_path / "many.jsonl", [f"{n} " * 5 for n in range(101, 161)])
    source = make(path=(few, many), weights=(0.5, 0.5))
    samples = [sample for row in rows_of_epoch(source, 0) for sample in samples_of(row)]
    # the larger entry once; as many of the smaller
    assert [samples.count(n) for n in range(1, 11)] == [6] * 10
    assert [samples.count(n) for n in range(101, 161)] == [1] * 60


# F41: broken samples


def test_samples_broken_from_the_start_are_skipped_and_counted(make):
    texts = numbered(100)
    texts[10], texts[20], texts[30] = "broken bad json", "broken missing media", "broken missing media"
    source = make(texts)
    samples = [sample for row in rows_of_epoch(source, 0) for sample in samples_of(row)]
    assert sorted(samples) == sorted(set(range(1, 101)) - {11, 21, 31})
    assert source.skipped == {"bad json": 1, "missing media": 2}


def test_a_sample_that_breaks_when_it_is_read_leaves_its_row_and_is_counted_once(make, caplog, tmp_path):
    texts = numbered(100)
    texts[10], texts[20], texts[40] = "rotten corrupt media", "rotten corrupt media", "rotten aspect ratio"
    source = make(texts)
    assert source.skipped == {}
    with caplog.at_level(logging.WARNING):
        for epoch in (0, 1):
            samples = [sample for row in rows_of_epoch(source, epoch) for sample in samples_of(row)]
            assert sorted(samples) == sorted(set(range(1, 101)) - {11, 21, 41})
    assert source.skipped == {"corrupt media": 2, "aspect ratio": 1}
    # one line of each kind, with file and line
    assert sorted(record.message.split(": the text")[0] for record in caplog.records)[0].startswith(str(tmp_path))
    assert len(caplog.records) == 2


def test_reading_stops_where_too_many_samples_break(make, tmp_path):
    texts = ["rotten corrupt media" if n % 10 == 0 else text for n, text in enumerate(numbered(100))]
    texts[5] = "broken bad json"
    source = make(texts, max_skipped_fraction=0.04)
    with pytest.raises(ConfigError, match=r"5 of 100 samples can't be used, more than data.max_skipped_fraction=0.04"):
        rows_of_epoch(source, 0)
    assert source.skipped == {"bad json": 1, "corrupt media": 4}


def test_strict_finds_what_breaks_in_reading_before_the_run(make):
    texts = numbered(50)
    texts[30], texts[40] = "rotten corrupt media", "broken bad json"
    with pytest.raises(ConfigError, match=r"a\.jsonl:31: the text says 'rotten corrupt media' \(corrupt media\); mend"):
        make(texts, strict=True)


def test_an_entry_without_a_usable_sample_is_refused(make, tmp_path):
    good, bad = write_texts(tmp_path / "g.jsonl", numbered(99)), write_texts(tmp_path / "b.jsonl", ["broken bad json"])
    with pytest.raises(ConfigError, match=r"data.path=.*b.jsonl: none of its samples can be used") as error:
        make(path=(good, bad))
    assert str(error.value).endswith("b.jsonl:1: the text says 'broken bad json' (bad json)")


def test_the_fingerprint_follows_the_documents_and_not_the_file_that_holds_them(make, tmp_path):
    source = make(numbered(50))
    copy = write_texts(tmp_path / "copy.jsonl", numbered(50))
    assert make(path=(copy,)).fingerprint == source.fingerprint
    others = [make(numbered(51)), make(numbered(50), encoder=WordEncoder(settings="another template"))]
    assert source.fingerprint not in {other.fingerprint for other in others}


def test_where_every_sample_is_too_long_the_message_says_so(make):
    # these count as left out, not as broken: nothing else would say why
    with pytest.raises(ConfigError, match=r"a.jsonl:1: the text says 'broken too long' \(too long\)$"):
        make(["broken too long"] * 3)


@pytest.mark.parametrize(
    "content", [json.dumps({"text": "1 2 3"}) + "\n", "{broken\n" * 30, ""], ids=["another sample", "broken", "empty"]
)
def test_a_file_that_changes_under_the_run_is_named(make, tmp_path, content):
    source = make(numbered(50))
    source.row(0)
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(ConfigError, match=r"a.jsonl changed while the run was reading it; start again"):
        rows_of_epoch(source, 0)


def test_a_file_that_is_gone_is_named(make, tmp_path):
    source = make(numbered(50))
    (tmp_path / "a.jsonl").unlink()
    with pytest.raises(ConfigError, match="a.jsonl changed while the run was reading it"):
        source.row(0)


# the whole way to the mesh


@pytest.fixture
def vision_source(tmp_path):
    """Texts and images in rows of 32 tokens and 64 patches; the config trains 12 steps of 8 rows."""
    texts = [("image " if n % 3 == 0 else "") + f"{n} " * (n % 20 + 1) for n in range(1, 201)]

    def make(**data):
        config = vision_config(
            "files",
            train={"seq_length": 32, "steps": 12, "global_batch_size": 8},
            data={
                "max_patches_per_row": 64,
                "eval_samples": 256,
                "path": (write_texts(tmp_path / "v.jsonl", texts),),
                "cache_dir": str(tmp_path / "cache"),
                **data,
            },
        )
        return FilesSource(config, "train", WordEncoder()), config

    return make


def batches(source, config, start_step=0, devices=8):
    mesh = build_mesh(mesh_layout(devices, tensor=1), jax.devices()[:devices])
    with Loader(source, config, mesh, num_microbatches=1, start_step=start_step) as loader:
        return [{key: np.asarray(array) for key, array in batch.items()} for batch, _ in loader]


def assert_equal(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        for key in other:
            np.testing.assert_array_equal(one[key], other[key], err_msg=key)


def test_a_run_resumed_twice_reads_what_an_uninterrupted_one_reads(vision_source):
    # F55, F57
    whole = batches(*vision_source())
    first = batches(*vision_source())[:5]
    second = batches(*vision_source(), start_step=5)[:4]
    third = batches(*vision_source(), start_step=9)
    assert_equal([*first, *second, *third], whole)


def test_rows_do_not_depend_on_threads_or_prefetching(vision_source):
    assert_equal(batches(*vision_source(num_threads=8, prefetch=9)), batches(*vision_source(num_threads=1, prefetch=1)))


def test_every_layout_reads_the_same_rows_in_a_step(vision_source):
    # balancing moves rows inside a step, by the number of ranks
    def steps(devices):
        found = batches(*vision_source(), devices=devices)
        return [sorted(row.tolist() for row in batch["tokens"].reshape(-1, 32)) for batch in found]

    assert steps(8) == steps(2) == steps(1)


def test_no_image_is_cut(vision_source):
    # F39: each image's four visual tokens and 16 patches are together in one row
    for batch in batches(*vision_source()):
        for visual, segments, patches in zip(
            *(batch[key].reshape(8, -1) for key in ("visual_index", "segment_ids", "patch_segments")), strict=True
        ):
            assert (visual >= 0).sum() * 4 == (patches > 0).sum()
            assert all(count == 4 for count in np.unique(segments[visual >= 0], return_counts=True)[1])


def test_media_that_changed_are_named_with_the_cache_that_is_out_of_date(vision_source):
    source, _ = vision_source()
    source._encoder.documents = lambda sample, root: [source._encoder._document([1] * 9, image=True)]
    with pytest.raises(ConfigError, match=r"v\.jsonl:\d+ was planned with .* and now has \[\(9, 16\)\].*lengths-.*npz"):
        for index in range(3):
            source.row(index)


def test_costs_follow_the_documents_of_a_row(vision_source):
    source, _ = vision_source()
    costs = source.costs(3, 20)
    rows = [source.row(index) for index in range(3, 23)]
    patches = np.array([(row["patch_segments"] > 0).sum() for row in rows])
    assert costs.shape == (20,) and len(set(patches.tolist())) > 1
    assert costs[patches == patches.max()].min() > costs[patches == patches.min()].max()


# evaluation


def test_evaluation_reads_the_held_out_files_once_in_the_same_rows_for_every_seed(make, tmp_path):
    held_out = write_texts(tmp_path / "eval.jsonl", numbered(40))
    one, two = (make(["1"], "eval", train={"seed": seed}, eval_path=(held_out,)) for seed in (0, 1))
    rows = rows_of_epoch(one, 0)
    assert sorted(sample for row in rows for sample in samples_of(row)) == list(range(1, 41))
    assert [row["tokens"].tolist() for row in rows] == [row["tokens"].tolist() for row in rows_of_epoch(two, 0)]


def test_a_second_pass_over_the_evaluation_is_the_first(make, tmp_path):
    source = make(["1"], "eval", eval_path=(write_texts(tmp_path / "eval.jsonl", numbered(40)),))
    count = len(source.epoch_plan(0))
    assert source.row(count)["tokens"].tolist() == source.row(0)["tokens"].tolist()


def test_what_was_found_is_described(make):
    texts = numbered(100)
    texts[10] = "broken bad json"
    lines = make(texts).describe().splitlines()
    # 1050 tokens, of which sample 11 had 12
    assert lines[0].startswith("train data: 100 samples in 1 file, 99 documents, 1,038 tokens; an epoch has 33 rows")
    assert lines[1] == "  skipped 1 samples: bad json 1"
    assert lines[2].startswith("    bad json: ") and lines[2].endswith("a.jsonl:11: the text says 'broken bad json'")
