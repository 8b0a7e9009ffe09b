"""Runs JaxForge's commands as a user does: in a process of their own, or in this one where that doesn't matter."""

import contextlib
import importlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest

from jaxforge.config import command_line

RECIPES = Path(__file__).parent / "recipes"
TIMEOUT = 300


def environment(**extra: str) -> dict[str, str]:
    """A clean environment for a run: the recipe says how many devices it simulates."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("XLA_FLAGS", "JAXFORGE_"))}
    # half the time to compile; the programs run slower, but only for a few steps
    flags = {"JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1", "XLA_FLAGS": "--xla_backend_optimization_level=0"}
    return kept | flags | extra


def start(command: str, *flags: str, **extra: str) -> subprocess.Popen[str]:
    """Starts `python -m jaxforge.COMMAND FLAGS`."""
    return subprocess.Popen(
        [sys.executable, "-m", f"jaxforge.{command}", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(**extra),
    )


def run(command: str, *flags: str, **extra: str) -> tuple[int, str]:
    """Exit code, and what was printed."""
    with start(command, *flags, **extra) as process:
        try:
            output, _ = process.communicate(timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    return process.returncode, output


def run_here(command: str, *flags: str) -> tuple[int, str]:
    """As `run`, but in this process and on its eight devices: nothing is imported or started again."""
    main = importlib.import_module(f"jaxforge.{command}").main
    output = io.StringIO()
    with (
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(output),
        mock.patch.object(sys, "argv", [command, *flags]),
        pytest.raises(SystemExit) as end,
    ):
        command_line.run(main)
    return end.value.code, output.getvalue()


def rows(workdir: Path) -> list[dict]:
    """The rows of metrics.jsonl so far."""
    file = workdir / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def losses(workdir: Path) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in rows(workdir) if "loss" in row}


def end_at_step(process: subprocess.Popen[str], workdir: Path, step: int, signal_number: signal.Signals) -> str:
    """Sends the signal once the run has logged `step`, and returns what it printed."""
    deadline = time.monotonic() + TIMEOUT
    while process.poll() is None and time.monotonic() < deadline:
        if any(row["step"] >= step for row in rows(workdir)):
            process.send_signal(signal_number)
            break
        time.sleep(0.02)
    output, _ = process.communicate(timeout=TIMEOUT)
    return output
