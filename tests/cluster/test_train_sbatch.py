import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "slurm" / "train.sbatch"

FAKE_SRUN = """#!/bin/bash
printf '%s\\n' "$@" > srun_arguments
env > srun_environment
exit 7
"""


@pytest.fixture
def submit(tmp_path):
    """Runs the batch script in an empty folder, with a `srun` that records how it was called and exits 7."""
    srun = tmp_path / "bin" / "srun"
    srun.parent.mkdir()
    srun.write_text(FAKE_SRUN)
    srun.chmod(0o755)

    def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess:
        environ = {"PATH": f"{srun.parent}:{os.environ['PATH']}"} | variables
        return subprocess.run(
            ["bash", SCRIPT, *arguments], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=20
        )

    return run


def test_the_batch_script_forwards_its_arguments_as_they_are(submit, tmp_path):
    result = submit("--config=configs/demo_vlm.py", "--config.data.path=two words", "--workdir=/run")
    assert (tmp_path / "srun_arguments").read_text().splitlines() == [
        "--kill-on-bad-exit=1", "python3", "-m", "jaxforge.train",
        "--config=configs/demo_vlm.py", "--config.data.path=two words", "--workdir=/run",
    ]  # fmt: skip
    assert result.returncode == 7  # what srun says is what SLURM records


def test_the_batch_script_prefers_the_projects_interpreter(submit, tmp_path):
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to("/bin/true")
    submit("--config=a.py")
    assert str(python) in (tmp_path / "srun_arguments").read_text().splitlines()
    submit("--config=a.py", PYTHON="/opt/python")
    assert "/opt/python" in (tmp_path / "srun_arguments").read_text().splitlines()


def test_the_batch_script_hands_the_jobs_cpus_to_the_step(submit, tmp_path):
    submit("--config=a.py", SLURM_CPUS_PER_TASK="16")
    environment = (tmp_path / "srun_environment").read_text().splitlines()
    assert "SRUN_CPUS_PER_TASK=16" in environment
    assert "PYTHONUNBUFFERED=1" in environment


def test_the_batch_script_without_arguments_says_how_to_use_it(submit, tmp_path):
    result = submit()
    assert result.returncode == 2
    assert result.stderr.startswith("usage: sbatch")
    assert not (tmp_path / "srun_arguments").exists()


def test_the_batch_script_asks_for_a_warning_and_a_requeue():
    directives = [line.split()[1:] for line in SCRIPT.read_text().splitlines() if line.startswith("#SBATCH")]
    # without B: in front, the signal goes to the processes and not to the shell
    assert ["--signal=TERM@120"] in directives
    assert ["--requeue"] in directives
    assert ["--open-mode=append"] in directives  # a requeued job keeps its first log
    assert ["--ntasks-per-node=1"] in directives
