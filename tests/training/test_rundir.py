"""The run directory: its lock, its paths and the history of its config."""

import os
import signal
import socket
import subprocess
import sys

import pytest

from jaxforge.config.errors import ConfigError
from jaxforge.training.rundir import RunDirectory

HOLD_IT = """
import sys, time
from jaxforge.training.rundir import RunDirectory
run = RunDirectory(sys.argv[1])
print("held", flush=True)
time.sleep(60)
"""


def test_the_folder_is_made_with_its_parents_and_its_files_have_fixed_places(tmp_path):
    with RunDirectory(tmp_path / "runs" / "demo") as run:
        assert (tmp_path / "runs" / "demo").is_dir()
        assert run.metrics == tmp_path / "runs" / "demo" / "metrics.jsonl"
        assert run.config.name == "config.yml"
        assert [run.checkpoints.name, run.tensorboard.name, run.pictures.name] == [
            "checkpoints", "tensorboard", "pictures",
        ]  # fmt: skip


def test_a_second_process_is_refused_by_the_name_of_the_first_and_enters_after_kill_9(tmp_path):
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    process = subprocess.Popen([sys.executable, "-c", HOLD_IT, tmp_path], env=environment, stdout=subprocess.PIPE)
    try:
        assert process.stdout.readline() == b"held\n"
        for _ in range(2):  # being refused doesn't wipe out the holder's name
            with pytest.raises(ConfigError, match=f"in use by process {process.pid} on {socket.gethostname()}; wait"):
                RunDirectory(tmp_path)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    with RunDirectory(tmp_path):
        assert (tmp_path / ".lock").read_text() == f"process {os.getpid()} on {socket.gethostname()}\n"


def test_a_closed_run_leaves_the_folder_to_the_next_in_the_same_notebook(tmp_path):
    with RunDirectory(tmp_path), pytest.raises(ConfigError, match=f"in use by process {os.getpid()}"):
        RunDirectory(tmp_path)
    RunDirectory(tmp_path).close()


def test_exports_of_later_steps_are_kept_under_free_names(tmp_path):
    for name in ("10", "20", "20.1", "30", "notes"):
        (tmp_path / "hf" / name).mkdir(parents=True)
        (tmp_path / "hf" / name / f"was_{name}").touch()
    with RunDirectory(tmp_path) as run:
        assert sorted(path.name for path in run.set_exports_aside(10)) == ["20.2", "30.1"]
        assert run.set_exports_aside(10) == []
    found = {path.parent.name: path.name for path in (tmp_path / "hf").glob("*/*")}
    assert found == {"10": "was_10", "20.1": "was_20.1", "20.2": "was_20", "30.1": "was_30", "notes": "was_notes"}


def test_an_unwritable_folder_is_an_error_that_names_the_way_out(tmp_path):
    (tmp_path / "file").write_text("")
    # Two that fail for root too: inside a file, and where the kernel makes no folders.
    for path in (tmp_path / "file" / "run", "/proc/jaxforge_run"):
        with pytest.raises(ConfigError, match=f"--workdir={path} can't be written .*--workdir=DIR"):
            RunDirectory(path)


def test_a_folder_that_is_a_file_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="can't be written"):
        RunDirectory(tmp_path / "file")


def test_no_config_of_an_earlier_start_is_lost(tmp_path):
    for text in ("steps: 1\n", "steps: 1\n", "steps: 2\n", "steps: 3\n"):
        with RunDirectory(tmp_path) as run:
            run.write_config(text)
    kept = {path.name: path.read_text() for path in tmp_path.glob("config*")}
    assert kept == {"config.1.yml": "steps: 1\n", "config.2.yml": "steps: 2\n", "config.yml": "steps: 3\n"}


def test_other_processes_of_a_run_neither_lock_nor_write(tmp_path, monkeypatch):
    with RunDirectory(tmp_path) as primary:
        primary.write_config("steps: 1\n")
        monkeypatch.setattr("jax.process_index", lambda: 1)
        with RunDirectory(tmp_path) as other:
            assert not other.writable
            other.write_config("steps: 2\n")
        assert primary.config.read_text() == "steps: 1\n"
