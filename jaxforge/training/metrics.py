"""metrics.jsonl and TensorBoard: a row for each step that is logged, and for each evaluation."""

import json
import logging
import math
import numbers
from collections.abc import Mapping
from typing import Any

from jaxforge.training.rundir import RunDirectory, replace_text

_log = logging.getLogger(__name__)

Row = dict[str, Any]


class MetricsWriter:
    """Appends rows to metrics.jsonl, and their numbers to TensorBoard's event files.

    `rows` holds what the file holds, from the first step of the run on, also where the run was resumed.  The primary
    process alone writes; the others keep the same rows.

    run: the run's directory, held by this process if it is the primary.
    tensorboard: whether to write event files too.
    resume_step: the last step that the restored checkpoint includes.  Rows of later steps come from a run that was
        killed; they are taken out of the file, since their steps are about to be done again.
    """

    def __init__(self, run: RunDirectory, tensorboard: bool, resume_step: int = 0):
        self.rows: list[Row] = [row for row in _read(run) if row["step"] <= resume_step]
        self._stream = None
        self._events = None
        if run.writable:
            replace_text(run.metrics, "".join(_line(row) for row in self.rows))
            self._stream = run.metrics.open("a")
        if run.writable and tensorboard:
            from tensorboardX import SummaryWriter  # here, since it takes a while to load

            self._events = SummaryWriter(str(run.tensorboard), purge_step=resume_step + 1, flush_secs=10)

    def write(self, row: Mapping[str, Any]) -> Row:
        """Adds a row, which must have `step`, and returns it as it was written.

        Scalars of NumPy and JAX become Python numbers.  JSON has no NaN and no infinity: they become None (null).
        """
        plain = {name: _plain(value) for name, value in row.items()}
        self.rows.append(plain)
        if self._stream is not None:
            self._stream.write(_line(plain))
            self._stream.flush()  # a killed run has every row that it logged
        if self._events is not None:
            for name, value in plain.items():
                if name != "step" and isinstance(value, (int, float)):
                    self._events.add_scalar(name, value, plain["step"])
        return plain

    def close(self) -> None:
        """Closes the files."""
        if self._stream is not None:
            self._stream.close()
        if self._events is not None:
            self._events.close()


def _line(row: Row) -> str:
    return json.dumps(row, allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, str)):
        return value
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, numbers.Integral):
        return int(value)
    return float(value) if math.isfinite(value) else None


def _read(run: RunDirectory) -> list[Row]:
    """The rows of metrics.jsonl; a line cut short by a kill or a full disk is left out."""
    if not run.metrics.exists():
        return []
    rows = []
    for number, line in enumerate(run.metrics.read_text(errors="replace").splitlines(), start=1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
        else:
            _log.warning("%s: line %d isn't a row of metrics and is left out", run.metrics, number)
    return rows
