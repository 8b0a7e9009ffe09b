"""Which source of rows a config asks for."""

from typing import Protocol

import numpy as np

from jaxforge.config.schema import Config
from jaxforge.data.digits import DigitsSource
from jaxforge.data.synthetic import SyntheticSource


class RowSource(Protocol):
    """Rows by number: `row(index)` is pure, so the same number gives the same row in any process, at any time."""

    def row(self, index: int) -> dict[str, np.ndarray]: ...


def train_source(config: Config) -> RowSource:
    """The rows that a run trains on."""
    return DigitsSource(config, "train") if config.data.source == "digits" else SyntheticSource(config)


def eval_source(config: Config) -> DigitsSource | None:
    """The held-out samples of a run; None where data.source has none."""
    return DigitsSource(config, "eval") if config.data.source == "digits" else None
