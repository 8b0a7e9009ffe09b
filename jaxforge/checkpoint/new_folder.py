"""Folders that appear under their names when they are complete."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from jaxforge.config.errors import ConfigError


def refuse_existing(folder: Path) -> None:
    """ConfigError where something has that name already."""
    if folder.exists() or folder.is_symlink():
        raise ConfigError(f"{folder} exists already; name a folder that doesn't, or remove it")


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder beside `folder` to write into, which gets that name at the end; what a killed one left is removed.

    Raises:
      ConfigError: if the folder exists, or can't be written.
    """
    refuse_existing(folder)
    unfinished = folder.with_name(folder.name + ".unfinished")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        yield unfinished
        os.replace(unfinished, folder)
    except OSError as error:
        raise ConfigError(f"{folder} can't be written: {error}; name a folder elsewhere, or make room") from error
