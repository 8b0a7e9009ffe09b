"""metrics.jsonl: rows as JSON, resume, and damage."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto import event_pb2

from jaxforge.training.metrics import MetricsWriter
from jaxforge.training.rundir import RunDirectory


@pytest.fixture
def run(tmp_path):
    with RunDirectory(tmp_path) as run:
        yield run


def lines(run) -> list[dict]:
    return [json.loads(line) for line in run.metrics.read_text().splitlines()]


def write_steps(run, steps, resume_step=0, tensorboard=False, **more):
    writer = MetricsWriter(run, tensorboard=tensorboard, resume_step=resume_step)
    for step in steps:
        writer.write({"step": step, "loss": step / 2, **more})
    writer.close()
    return writer


def test_rows_are_in_the_file_before_the_run_ends(run):
    writer = MetricsWriter(run, tensorboard=False)
    writer.write({"step": 1, "loss": 0.5, "mfu": None})
    assert lines(run) == [{"step": 1, "loss": 0.5, "mfu": None}]
    writer.close()


def test_scalars_of_numpy_and_jax_become_numbers(run):
    row = {"step": np.int64(1), "loss": jnp.float32(0.5), "images": jnp.int32(3), "seconds": np.float32(0.25)}
    writer = write_steps(run, [])
    writer = MetricsWriter(run, tensorboard=False)
    writer.write(row)
    writer.close()
    assert lines(run) == writer.rows == [{"step": 1, "loss": 0.5, "images": 3, "seconds": 0.25}]
    assert [type(value) for value in writer.rows[0].values()] == [int, float, int, float]


def test_what_is_not_finite_becomes_null(run):
    writer = MetricsWriter(run, tensorboard=True)
    returned = writer.write({"step": 1, "loss": float("nan"), "grad_norm": jnp.float32(jnp.inf)})
    writer.close()
    assert run.metrics.read_text() == '{"step": 1, "loss": null, "grad_norm": null}\n'
    assert returned == {"step": 1, "loss": None, "grad_norm": None} == writer.rows[0]


def test_resuming_takes_out_the_steps_that_are_done_again(run):
    write_steps(run, range(1, 8))  # killed after step 7; the newest checkpoint is of step 5
    writer = write_steps(run, range(6, 10), resume_step=5)
    assert [row["step"] for row in lines(run)] == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert writer.rows == lines(run)


def test_starting_again_without_a_checkpoint_starts_the_file_again(run):
    write_steps(run, range(1, 4))
    write_steps(run, [1])
    assert [row["step"] for row in lines(run)] == [1]


def test_a_line_cut_short_by_a_kill_is_left_out_and_named(run, caplog):
    write_steps(run, [1, 2])
    with run.metrics.open("a") as stream:
        stream.write('{"step": 3, "lo')
    writer = write_steps(run, [3], resume_step=3)
    assert "line 3 isn't a row" in caplog.text
    assert [row["step"] for row in lines(run)] == [1, 2, 3] == [row["step"] for row in writer.rows]


def test_other_processes_have_the_same_rows_and_write_nothing(run, monkeypatch):
    write_steps(run, [1, 2])
    before = run.metrics.read_bytes()
    monkeypatch.setattr("jax.process_index", lambda: 1)
    writer = write_steps(RunDirectory(run.path), [2], resume_step=1, tensorboard=True)
    assert [row["step"] for row in writer.rows] == [1, 2]
    assert run.metrics.read_bytes() == before
    assert not run.tensorboard.exists()


def read_events(folder) -> dict[str, list[tuple[int, float]]]:
    """The scalars of TensorBoard's event files: records of (length, its CRC, an Event, its CRC)."""
    scalars: dict[str, list[tuple[int, float]]] = {}
    for file in sorted(folder.iterdir()):
        content = file.read_bytes()
        while content:
            length = int.from_bytes(content[:8], "little")
            event = event_pb2.Event.FromString(content[12 : 12 + length])
            for value in event.summary.value:
                scalars.setdefault(value.tag, []).append((event.step, value.simple_value))
            content = content[16 + length :]
    return scalars


def test_tensorboard_has_the_numbers_of_each_row(run):
    write_steps(run, [1, 2], tensorboard=True, mfu=None)
    assert read_events(run.tensorboard) == {"loss": [(1, 0.5), (2, 1.0)]}
