"""Batches on the mesh, prepared ahead by Grain's threads."""

import time
from collections.abc import Iterator, Sequence
from typing import SupportsIndex

import grain
import jax
import numpy as np

from jaxforge.config.schema import Config
from jaxforge.data.balance import balanced_order
from jaxforge.data.batches import Batch, BatchLayout
from jaxforge.data.sources import CostedSource, RowSource


class StepRows:
    """The rows of each step that one process needs: a random-access source for Grain.

    Element i is step `start_step + i`: arrays [M, len(columns), ...].  Step s has the rows from `s * M * B` to
    `(s + 1) * M * B - 1` of the source, whatever the number of processes.  Place r of them is microbatch r // B, column
    r % B.  Where the source knows what its rows cost and `balance_ranks` is given, they are dealt to the places so that
    the ranks of a microbatch cost about the same (`balanced_order`); else row r of a step has place r.
    """

    def __init__(
        self,
        source: RowSource,
        columns: Sequence[int],
        *,
        microbatches: int,
        rows: int,
        start_step: int,
        steps: int,
        balance_ranks: int | None = None,
    ):
        self._source = source
        self._columns = columns
        self._microbatches = microbatches
        self._rows = rows
        self._start_step = start_step
        self._steps = steps
        self._balance_ranks = balance_ranks

    def __len__(self) -> int:
        return max(0, self._steps - self._start_step)

    def __getitem__(self, index: SupportsIndex) -> dict[str, np.ndarray]:
        first = (self._start_step + int(index)) * self._microbatches * self._rows
        numbers_MB = first + self._places(first).reshape(self._microbatches, self._rows)
        rows = [self._source.row(number) for number in numbers_MB[:, self._columns].ravel().tolist()]
        shape = (self._microbatches, len(self._columns))
        return {key: np.stack([row[key] for row in rows]).reshape(*shape, *rows[0][key].shape) for key in rows[0]}

    def _places(self, first: int) -> np.ndarray:
        """For each place of the step, which of its rows lies there: [M B]."""
        count = self._microbatches * self._rows
        ranks = self._balance_ranks
        if ranks is None or not isinstance(self._source, CostedSource):
            return np.arange(count)
        return balanced_order(self._source.costs(first, count), self._microbatches, ranks, self._rows // ranks)


class Loader(Iterator):
    """Iterates over the steps of a run from `start_step` to train.steps.

    Each step gives (batch, info): the arrays of docs/architecture.md on the mesh (`BatchLayout`), and `wait_seconds`,
    the time that the step waited for data, with `encoder_load` where devices divide the images (`LocalBatch`).  A
    process builds only the rows that its devices hold.  The rows of a step depend on the step alone, so a resumed run,
    or one on other devices, reads the same.  Their places in it may depend on the layout (`StepRows`), except with
    dropout, whose masks follow the place.  An error in a thread is raised by `next`.
    """

    def __init__(
        self, source: RowSource, config: Config, mesh: jax.sharding.Mesh, num_microbatches: int, start_step: int = 0
    ):
        self._layout = BatchLayout.from_config(config, mesh, num_microbatches)
        step_rows = StepRows(
            source,
            self._layout.columns("tokens"),
            microbatches=num_microbatches,
            rows=self._layout.rows,
            start_step=start_step,
            steps=config.train.steps,
            balance_ranks=None if config.model.decoder.hidden_dropout else self._layout.ranks,
        )
        options = grain.ReadOptions(num_threads=config.data.num_threads, prefetch_buffer_size=config.data.prefetch)
        local_batches = grain.MapDataset.source(step_rows).map(self._layout.assemble)
        self._steps = iter(local_batches.to_iter_dataset(options))
        # the first batches are ready by the time the step is compiled
        self._steps.start_prefetch()

    def __next__(self) -> tuple[Batch, dict[str, float]]:
        start = time.perf_counter()
        local = next(self._steps)
        info = {"wait_seconds": time.perf_counter() - start}
        if local.encoder_load is not None:
            info["encoder_load"] = local.encoder_load
        return self._layout.place(local.arrays), info

    def close(self) -> None:
        """Stops the threads; rows that they have begun are finished and dropped."""
        self._steps.close()

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
