"""The run directory: who may write to it, and where each thing lies."""

import errno
import fcntl
import logging
import os
import socket
from pathlib import Path
from types import TracebackType
from typing import TextIO

import jax

from jaxforge.config.errors import ConfigError

_log = logging.getLogger(__name__)


class RunDirectory:
    """A run's folder, held by one run at a time.

    The primary process makes the folder and takes an exclusive lock on `.lock`, which the kernel releases when the
    process ends, however it ends.  The other processes of a run only read; `writable` tells which one this is.

    Raises ConfigError if the folder can't be written, or if another run holds it.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path).absolute()
        self.writable = jax.process_index() == 0
        self._lock: TextIO | None = self._take_lock() if self.writable else None

    @property
    def config(self) -> Path:
        return self.path / "config.yml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def exports(self) -> Path:
        return self.path / "hf"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def pictures(self) -> Path:
        return self.path / "pictures"

    def write_config(self, text: str) -> None:
        """Writes config.yml.  An earlier start's that differs is kept as config.1.yml, the next as config.2.yml."""
        if not self.writable:
            return
        if self.config.exists():
            if self.config.read_text() == text:
                return
            os.rename(self.config, self._next_free("config", ".yml"))
        replace_text(self.config, text)

    def set_metrics_aside(self) -> Path:
        """Renames metrics.jsonl, whose run left no checkpoint, to metrics.1.jsonl or the next free number."""
        aside = self._next_free("metrics", ".jsonl")
        os.rename(self.metrics, aside)
        return aside

    def set_exports_aside(self, step: int) -> list[Path]:
        """Renames exports of steps after `step` to hf/STEP.1 or the next free number: they are of other weights."""
        exports = [path for path in self.exports.glob("*") if path.name.isdigit() and int(path.name) > step]
        aside = [self._next_free(f"hf/{path.name}", "") for path in exports]
        for path, target in zip(exports, aside, strict=True):
            os.rename(path, target)
        return aside

    def _next_free(self, stem: str, ending: str) -> Path:
        number = 1
        while (path := self.path / f"{stem}.{number}{ending}").exists():
            number += 1
        return path

    def close(self) -> None:
        """Lets another run have the folder."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def __enter__(self) -> "RunDirectory":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _take_lock(self) -> TextIO:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            # Opened to append: whoever doesn't get the lock must not wipe out the name of its holder.
            lock = (self.path / ".lock").open("a+")
        except OSError as error:
            raise ConfigError(
                f"--workdir={self.path} can't be written ({error.strerror}); name a folder that can: --workdir=DIR"
            ) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            holder = lock.read().strip() or "another process"
            lock.close()
            raise ConfigError(
                f"--workdir={self.path} is in use by {holder}; wait for it or stop it, or name another --workdir"
            ) from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                raise
            _log.warning("the file system of %s has no locks: nothing stops a second run from writing there", self.path)
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        lock.flush()
        return lock


def replace_text(file: Path, text: str) -> None:
    """Writes a file whole or not at all: a kill in the middle leaves what was there before."""
    unfinished = file.with_name(file.name + ".tmp")
    unfinished.write_text(text)
    os.replace(unfinished, file)
