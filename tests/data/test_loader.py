"""The loader: rows by step alone, on the devices that need them."""

import dataclasses
import threading
import time

import jax
import numpy as np
import pytest
from data_configs import text_config

from jaxforge.cluster.mesh import build_mesh, mesh_layout
from jaxforge.config.errors import ConfigError
from jaxforge.config.schema import DecoderConfig, ModelConfig
from jaxforge.data.balance import balanced_order
from jaxforge.data.loader import Loader, StepRows


class NumberedRows:
    """Each row says its number, and which were asked for is remembered."""

    def __init__(self):
        self.asked = []

    def row(self, index):
        self.asked.append(index)
        return {"tokens": np.full(3, index, np.int32), "positions": np.full((2, 3), -index, np.int32)}


class FailingRows(NumberedRows):
    def row(self, index):
        if index == 8:
            raise ConfigError("row 8 is broken; use another")
        return super().row(index)


class CostedRows(NumberedRows):
    """Some rows cost more than others."""

    def costs(self, first, count):
        return np.array([1.0 + index * 7 % 5 for index in range(first, first + count)])


@pytest.fixture
def mesh():
    """Data parallel 4, tensor parallel 2 with an encoder on each device alone."""
    return build_mesh(mesh_layout(8, tensor=2, encoder_tensor=1), jax.devices()[:8])


def config(steps=5, rows=8):
    return text_config(steps=steps, global_batch_size=rows)


def first_tokens(batch):
    return np.asarray(batch["tokens"])[:, :, 0].tolist()


def test_steps_come_in_order_with_each_row_in_its_place(mesh):
    with Loader(NumberedRows(), config(steps=3), mesh, num_microbatches=2) as loader:
        batches = [batch for batch, _ in loader]
    # row r of a step is microbatch r // 4, row r % 4
    assert [first_tokens(batch) for batch in batches] == [
        [[0, 1, 2, 3], [4, 5, 6, 7]],
        [[8, 9, 10, 11], [12, 13, 14, 15]],
        [[16, 17, 18, 19], [20, 21, 22, 23]],
    ]
    assert batches[0]["tokens"].shape == (2, 4, 3) and batches[0]["positions"].shape == (2, 4, 2, 3)


def test_a_resumed_run_reads_what_an_uninterrupted_one_reads(mesh):
    with Loader(NumberedRows(), config(), mesh, 2) as loader:
        whole = [first_tokens(batch) for batch, _ in loader]
    with Loader(NumberedRows(), config(), mesh, 2, start_step=3) as loader:
        assert [first_tokens(batch) for batch, _ in loader] == whole[3:]


def test_rows_lie_on_their_data_parallel_ranks_and_are_repeated_over_tensor_ranks(mesh):
    with Loader(NumberedRows(), config(rows=16), mesh, num_microbatches=2) as loader:
        batch, _ = next(loader)
    by_device = {shard.device: np.asarray(shard.data)[:, :, 0].tolist() for shard in batch["tokens"].addressable_shards}
    for rank, devices in enumerate(mesh.devices.reshape(4, 2)):
        for device in devices:
            assert by_device[device] == [[2 * rank, 2 * rank + 1], [8 + 2 * rank, 9 + 2 * rank]]


def test_every_row_is_built_once(mesh):
    source = NumberedRows()
    with Loader(source, config(steps=2), mesh, 2) as loader:
        list(loader)
    assert sorted(source.asked) == list(range(16))


def test_rows_that_cost_more_are_dealt_over_the_ranks_and_stay_in_their_step(mesh):
    source = CostedRows()
    with Loader(source, config(steps=2, rows=16), mesh, num_microbatches=2) as loader:
        batches = [np.asarray(first_tokens(batch)) for batch, _ in loader]
    for step, numbers_MB in enumerate(batches):
        assert sorted(numbers_MB.ravel().tolist()) == list(range(16 * step, 16 * step + 16))
        # 4 ranks of 2 rows; the rows of the first microbatch cost the most, and no rank has more than a row's surplus
        cost_MB = source.costs(0, 32)[numbers_MB]
        assert cost_MB[0].min() >= cost_MB[1].max()
        by_rank = cost_MB.reshape(2, 4, 2).sum(axis=(0, 2))
        assert by_rank.max() - by_rank.min() <= 1
        expected = balanced_order(source.costs(16 * step, 16), 2, 4, 2)
        assert (numbers_MB.ravel() - 16 * step).tolist() == expected.tolist()


def test_processes_agree_on_the_places_of_balanced_rows():
    def step(columns):
        rows = StepRows(CostedRows(), columns, microbatches=2, rows=4, start_step=1, steps=9, balance_ranks=4)
        return rows[2]["tokens"][:, :, 0]

    whole = step([0, 1, 2, 3])
    assert whole.ravel().tolist() != sorted(whole.ravel().tolist())
    np.testing.assert_array_equal(np.concatenate([step([0, 1]), step([2, 3])], axis=1), whole)


def test_with_dropout_a_row_keeps_its_place(mesh):
    # its masks follow the place, so that every layout drops the same numbers
    dropout = dataclasses.replace(
        config(steps=1, rows=16), model=ModelConfig(decoder=DecoderConfig(hidden_dropout=0.1))
    )
    with Loader(CostedRows(), dropout, mesh, num_microbatches=2) as loader:
        assert first_tokens(next(loader)[0]) == np.arange(16).reshape(2, 8).tolist()


def test_the_rows_of_two_processes_are_those_of_one():
    def step(columns, index):
        rows = StepRows(NumberedRows(), columns, microbatches=2, rows=4, start_step=1, steps=9)
        return rows[index]["tokens"][:, :, 0]

    whole = step([0, 1, 2, 3], 2)
    np.testing.assert_array_equal(np.concatenate([step([0, 1], 2), step([2, 3], 2)], axis=1), whole)
    # processes whose devices alternate hold every other row
    np.testing.assert_array_equal(step([1, 3], 2), whole[:, [1, 3]])


def test_the_wait_is_the_time_without_data(mesh):
    opened = threading.Event()

    class LateRows(NumberedRows):
        def row(self, index):
            opened.wait()
            return super().row(index)

    with Loader(LateRows(), config(steps=2), mesh, 2) as loader:
        threading.Timer(0.3, opened.set).start()
        _, first = next(loader)
        time.sleep(0.3)  # the second batch is made meanwhile
        _, second = next(loader)
    assert first["wait_seconds"] > 0.1
    assert second["wait_seconds"] < first["wait_seconds"] / 2


def test_an_error_in_a_thread_reaches_the_step_that_needs_the_row(mesh):
    with Loader(FailingRows(), config(), mesh, 2) as loader:
        next(loader)
        with pytest.raises(ConfigError, match="row 8 is broken; use another"):
            next(loader)


def test_closing_stops_the_threads(mesh):
    loader = Loader(NumberedRows(), config(steps=1000), mesh, 2)
    next(loader)
    before = [thread for thread in threading.enumerate() if thread.name.startswith("grain-prefetch")]
    assert before
    loader.close()
    for thread in before:
        thread.join(timeout=5)
    assert not any(thread.is_alive() for thread in before)


def test_rows_must_divide_over_the_data_parallel_ranks(mesh):
    with pytest.raises(ConfigError, match="6 rows of a microbatch do not divide over 4 data parallel ranks"):
        Loader(NumberedRows(), config(rows=12), mesh, 2)


def test_the_batch_must_divide_into_microbatches(mesh):
    with pytest.raises(ConfigError, match="train.global_batch_size=8 does not divide into 3 microbatches"):
        Loader(NumberedRows(), config(), mesh, 3)
