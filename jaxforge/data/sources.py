"""Which source of rows a config asks for."""

from typing import Protocol

import numpy as np

from jaxforge.config.schema import Config
from jaxforge.data.digits import DigitsSource
from jaxforge.data.synthetic import SyntheticSource


class RowSource(Protocol):
    """Rows by number: `row(index)` is pure, so the same number gives the same row in any process, at any time."""

    def row(self, index: int) -> dict[str, np.ndarray]: ...


def make_source(config: Config, split: str) -> DigitsSource | SyntheticSource | None:
    """The source of a run's "train" or "eval" rows; None where data.source has nothing to evaluate on."""
    if config.data.source == "digits":
        return DigitsSource(config, split)
    return SyntheticSource(config) if split == "train" else None
