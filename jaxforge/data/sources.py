"""Which source of rows a config asks for."""

from typing import Protocol, runtime_checkable

import numpy as np

from jaxforge.config.derived import data_source
from jaxforge.config.schema import Config
from jaxforge.data.digits import DigitsSource
from jaxforge.data.files_source import FilesSource, files_source
from jaxforge.data.synthetic import SyntheticSource


class RowSource(Protocol):
    """Rows by number: `row(index)` is pure, so the same number gives the same row in any process, at any time."""

    def row(self, index: int) -> dict[str, np.ndarray]: ...


@runtime_checkable
class CostedSource(RowSource, Protocol):
    """A source that knows what its rows cost to compute, before it reads them."""

    def costs(self, first: int, count: int) -> np.ndarray:
        """Relative cost of each of the rows `first` to `first + count - 1`: [count]."""


def train_source(config: Config) -> RowSource:
    """The rows that a run trains on."""
    match data_source(config):
        case "files":
            return files_source(config, "train")
        case "digits":
            return DigitsSource(config, "train")
        case _:
            return SyntheticSource(config)


def eval_source(config: Config) -> DigitsSource | FilesSource | None:
    """The held-out samples of a run; None where the source has none."""
    match data_source(config):
        case "files" if config.data.eval_path:
            return files_source(config, "eval")
        case "digits":
            return DigitsSource(config, "eval")
        case _:
            return None
