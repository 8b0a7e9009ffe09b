"""Rows of the user's files: planned for whole epochs from the documents' lengths, read when they are needed."""

import hashlib
import logging
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console

from jaxforge.config.errors import ConfigError
from jaxforge.config.schema import Config
from jaxforge.data.balance import document_costs
from jaxforge.data.conversation import SampleError
from jaxforge.data.formats import to_sample
from jaxforge.data.lengths import (
    Encoder,
    Skip,
    cache_folder,
    describe_skipped,
    find_lengths,
    read_arrays,
    refusal,
    write_arrays,
)
from jaxforge.data.packing import Document, pack_row
from jaxforge.data.packing_plan import PackingPlan, document_order, plan_rows
from jaxforge.data.rows import RowFormat
from jaxforge.data.sample_files import SampleFiles
from jaxforge.words import counted

_log = logging.getLogger(__name__)

SPLITS = ("train", "eval")
# Part of each cached plan's key: raise it when the same lengths would give other rows.
_VERSION = 1
# The plans of smaller epochs are made faster than they are read, and there may be many of them.
_DOCUMENTS_WORTH_CACHING = 20_000
_PLANS_IN_MEMORY = 2


class _Epoch(NamedTuple):
    """The rows of an epoch and what each costs: [R] float64."""

    plan: PackingPlan
    costs_R: np.ndarray


class FilesSource:
    """Rows of the samples of data.path, or of data.eval_path, as pure functions of (files, config, index).

    "train" has an order of its own in each epoch, "eval" reads the documents in theirs.  A document is never split, and
    each is read once an epoch, or as often as data.weights say.  A sample that can't be used is left out, counted, and
    logged with its file and line where it is the first of its kind.  Rows may be read in any number of threads.

    Attributes:
      files: the samples.
      lengths: their documents.
      row_format: the room of a row.
      fingerprint: changes with the documents: with samples, tokenizer, template and the sizes of media.

    Raises:
      ConfigError: for files that can't be read, and where config.data doesn't allow so many samples to be left out.
        Reading a row raises it too, and where a file was changed.
    """

    def __init__(self, config: Config, split: str, encoder: Encoder, console: Console | None = None):
        if split not in SPLITS:
            raise ValueError(f"split={split!r} is not one of {', '.join(SPLITS)}")
        self.split = split
        self.row_format = RowFormat.from_config(config)
        self._config, self._data, self._encoder = config, config.data, encoder
        paths, field = (self._data.path, "data.path") if split == "train" else (self._data.eval_path, "data.eval_path")
        self.files = SampleFiles(paths, self._data.media_root, field)
        self.lengths = find_lengths(self.files, encoder, self._data, console)
        self.fingerprint = self.lengths.hash(encoder.settings)
        self._document_costs_N = document_costs(self.lengths.tokens_N, self.lengths.patches_N, config)
        self._entry_sizes = self._documents_of_entries(field)
        self._lock = threading.Lock()
        self._epochs: dict[int, _Epoch] = {}
        self._epoch_ends: list[int] = []  # the number of the first row after each epoch whose plan was made
        self._failed: set[int] = set()
        self._failures: Counter[str] = Counter()
        self._failure_examples: list[Skip] = []

    def row(self, index: int) -> dict[str, np.ndarray]:
        """Row `index`, counted through the epochs."""
        return pack_row([document for _, document in self.documents(index)], self.row_format)

    def costs(self, first: int, count: int) -> np.ndarray:
        """Forward FLOPs of the rows `first` to `first + count - 1`: [count] float64."""
        places = [self._locate(index) for index in range(first, first + count)]
        return np.array([epoch.costs_R[row] for epoch, row in places])

    def documents(self, index: int) -> list[tuple[int, Document]]:
        """The documents of row `index` in their order, each after the number of its sample."""
        epoch, row = self._locate(index)
        read: dict[int, Sequence[Document] | None] = {}
        found = []
        for number in epoch.plan.row(row).tolist():
            sample = int(self.lengths.samples_N[number])
            if sample not in read:
                read[sample] = self._read(sample)
            documents = read[sample]
            if documents is not None:
                found.append((sample, self._as_planned(number, documents)))
        return found

    def epoch_plan(self, epoch: int) -> PackingPlan:
        """The rows of an epoch, counted from 0, known without reading any; "eval" has the same in each."""
        with self._lock:
            return self._epoch(epoch).plan

    @property
    def skipped(self) -> Mapping[str, int]:
        """Kind of fault -> samples left out: those of the lengths pass, and those that this process failed to read."""
        with self._lock:
            return dict(Counter(self.lengths.skipped) + self._failures)

    def describe(self) -> str:
        """What was found, in a few lines."""
        lengths, plan, skipped = self.lengths, self.epoch_plan(0), self.skipped
        files = counted(len(self.files.files), "file")
        lines = [
            f"{self.split} data: {len(self.files):,} samples in {files}, {len(lengths):,} documents,"
            f" {int(lengths.tokens_N.sum()):,} tokens; an epoch has {len(plan):,} rows,"
            f" fill {plan.fill(lengths.tokens_N, self.row_format.seq_length):.3f}"
        ]
        if skipped:
            lines.append(f"  skipped {sum(skipped.values()):,} samples: {describe_skipped(skipped)}")
            examples = sorted(self._examples(), key=lambda skip: skip.kind)
            lines += [f"    {skip.kind}: {skip.where}: {skip.message}" for skip in examples]
        return "\n".join(lines)

    def _documents_of_entries(self, field: str) -> list[int]:
        """How many documents each entry of data.path has."""
        ends = np.searchsorted(self.lengths.samples_N, self.files.entry_ends)
        sizes = np.diff(ends, prepend=0).tolist()
        starts = [0, *self.files.entry_ends[:-1]]
        for path, size, start in zip(self.files.paths, sizes, starts, strict=True):
            if not size:
                raise ConfigError(
                    f"{field}={path}: none of its samples can be used; remove it, or mend them"
                    f"\n  {self.files.where(start)}: {self._fault(start)}"
                )
        return sizes

    def _fault(self, sample: int) -> str:
        """What is wrong with a sample that the lengths pass left out."""
        try:
            self._encoder.sizes(to_sample(self.files.raw(sample)), self.files.root(sample))
        except SampleError as error:
            return f"{error} ({error.kind})"
        return f"its media were mended; remove the cached lengths {self._cached_lengths()} and start again"

    def _cached_lengths(self) -> Path:
        return cache_folder(self._data) / f"lengths-{self.lengths.key[:32]}.npz"

    def _locate(self, index: int) -> tuple[_Epoch, int]:
        """The epoch that row `index` is in, and its number there."""
        with self._lock:
            while not self._epoch_ends or self._epoch_ends[-1] <= index:
                rows = len(self._epoch(len(self._epoch_ends)).plan)
                self._epoch_ends.append(rows + (self._epoch_ends[-1] if self._epoch_ends else 0))
            epoch = int(np.searchsorted(self._epoch_ends, index, side="right"))
            return self._epoch(epoch), index - (self._epoch_ends[epoch - 1] if epoch else 0)

    def _epoch(self, epoch: int) -> _Epoch:
        """An epoch's plan, from memory, the cache, or made; the lock is held."""
        if self.split == "eval":
            epoch = 0
        if epoch not in self._epochs:
            plan = self._find_plan(epoch)
            while len(self._epochs) >= _PLANS_IN_MEMORY:
                self._epochs.pop(next(iter(self._epochs)))
            self._epochs[epoch] = _Epoch(plan, plan.row_sums(self._document_costs_N))
        return self._epochs[epoch]

    def _find_plan(self, epoch: int) -> PackingPlan:
        seed, weights = self._config.train.seed, self._data.weights
        room, window = self.row_format, self._data.packing_window
        key = (self.lengths.key, self._entry_sizes, seed, epoch, room.seq_length, room.max_patches, window, weights)
        name = hashlib.sha256(repr((_VERSION, self.split, *key)).encode()).hexdigest()[:32]
        path: Path = cache_folder(self._data) / f"plan-{name}.npz"
        is_cached = len(self.lengths) >= _DOCUMENTS_WORTH_CACHING
        arrays = read_arrays(path) if is_cached else {}
        if arrays.keys() == {"row_starts", "documents"}:
            return PackingPlan(**arrays)
        lengths = self.lengths
        if self.split == "train":
            order = document_order(self._entry_sizes, weights, seed, epoch)
            rng = np.random.default_rng((seed, epoch, 1))
        else:
            order, rng = np.arange(len(lengths)), None
        plan = plan_rows(order, lengths.tokens_N, lengths.patches_N, room, window, rng)
        if is_cached:
            write_arrays(path, {"row_starts": plan.row_starts, "documents": plan.documents})
        return plan

    def _read(self, sample: int) -> Sequence[Document] | None:
        """The documents of a sample; None where they can't be made, which is counted."""
        try:
            return self._encoder.documents(to_sample(self.files.raw(sample)), self.files.root(sample))
        except OSError as error:
            self._refuse_changed_files()
            raise ConfigError(f"{self.files.where(sample)} can't be read any more: {error}") from error
        except SampleError as error:
            self._refuse_changed_files()
            self._count(sample, error)
            return None

    def _as_planned(self, number: int, documents: Sequence[Document]) -> Document:
        """Document `number` among those of its sample, which has the length that was planned."""
        part = int(self.lengths.parts_N[number])
        planned = (int(self.lengths.tokens_N[number]), int(self.lengths.patches_N[number]))
        sizes = [(len(document.tokens), document.num_patches) for document in documents]
        if sizes[part : part + 1] != [planned]:
            self._refuse_changed_files()
            raise ConfigError(
                f"{self.files.where(int(self.lengths.samples_N[number]))} was planned with {planned[0]} tokens and"
                f" {planned[1]} patches, and now has {sizes}: its media were changed; remove the cached lengths"
                f" {self._cached_lengths()} and start again"
            )
        return documents[part]

    def _refuse_changed_files(self) -> None:
        changed = self.files.changed()
        if changed:
            raise ConfigError(
                f"{', '.join(map(str, changed))} changed while the run was reading it; start again, and leave the files"
                " as they are until it ends"
            )

    def _count(self, sample: int, error: SampleError) -> None:
        """Counts a sample that the lengths pass accepted; raises ConfigError where no more may be left out."""
        with self._lock:
            if sample in self._failed:
                return
            self._failed.add(sample)
            self._failures[error.kind] += 1
            if self._failures[error.kind] == 1:
                skip = Skip(error.kind, self.files.where(sample), str(error), sample)
                self._failure_examples.append(skip)
                _log.warning("%s: %s; skipped, as others of the kind %r will be", skip.where, error, error.kind)
            skipped = Counter(self.lengths.skipped) + self._failures
            message = refusal(skipped, self._examples(), self.lengths.num_samples, self._data)
        if message:
            raise ConfigError(message)

    def _examples(self) -> list[Skip]:
        return [*self.lengths.examples, *self._failure_examples]


def files_source(config: Config, split: str, console: Console | None = None) -> FilesSource:
    """The rows of a run's files, with the tokenizer, chat template and media of its config.

    `split` is "train" or "eval".  Raises ConfigError as FilesSource does, and for an unusable tokenizer.
    """
    # tokenizers and video libraries are slow to import, and other sources need none
    from jaxforge.data.encoding import SampleEncoder
    from jaxforge.data.media import MediaReader

    reader = MediaReader.from_config(config, checkpoint_folder(config)) if config.model.encoder else None
    return FilesSource(config, split, SampleEncoder.from_config(config, reader), console)


def checkpoint_folder(config: Config) -> Path | None:
    """Where the files of the image processor lie: beside the weights, or the tokenizer where there are no weights."""
    folder = config.checkpoint.init_from_hf or config.data.tokenizer
    return Path(folder) if folder else None
