"""The lengths pass: tokens and patches of every document of the user's files, measured once and cached."""

import dataclasses
import functools
import hashlib
import itertools
import json
import logging
import os
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import jax
import numpy as np
from jax.experimental import multihost_utils
from orbax.checkpoint import multihost
from rich import progress as rich_progress
from rich.console import Console

from jaxforge.config.errors import ConfigError
from jaxforge.config.schema import DataConfig
from jaxforge.data.conversation import Sample, SampleError
from jaxforge.data.formats import to_sample
from jaxforge.data.packing import Document
from jaxforge.data.sample_files import SampleFiles

_log = logging.getLogger(__name__)

# Part of each cache file's key: raise it when the same files and settings would give other lengths.
_VERSION = 2
_CHUNK = 64
_EXAMPLES = 3
TOO_LONG = "too long"
# Faults that may be mended without a change of the data files.
_MEDIA_FAULTS = ("missing media", "corrupt media", "refused media", "aspect ratio")
_barriers = itertools.count()
# How long processes wait for the one that measures.
_PATIENCE_SECONDS = 24 * 3600


class Encoder(Protocol):
    """Makes documents of samples; both methods raise SampleError where a sample can't be used.

    Attributes:
      settings: everything that its documents depend on besides the sample.
    """

    settings: str

    def sizes(self, sample: Sample, root: Path) -> Sequence[tuple[int, int]]:
        """(tokens, patches) of each document, without decoding the images."""

    def documents(self, sample: Sample, root: Path) -> Sequence[Document]: ...


@dataclasses.dataclass(frozen=True)
class Skip:
    """A sample that can't be used: the kind of its fault, its file and line, what is wrong, and its number."""

    kind: str
    where: str
    message: str
    sample: int


@dataclasses.dataclass(frozen=True, eq=False)
class Lengths:
    """The documents of all usable samples, in the samples' order.

    Attributes:
      key: a hash of what they depend on.
      num_samples: samples, usable or not.
      samples_N: [N] int64, the document's sample.
      parts_N: [N] int32, its number among the sample's documents.
      tokens_N: [N] int32.
      patches_N: [N] int32.
      skipped: kind of fault -> samples that have it.
      examples: the first few of each kind.
    """

    key: str
    num_samples: int
    samples_N: np.ndarray
    parts_N: np.ndarray
    tokens_N: np.ndarray
    patches_N: np.ndarray
    skipped: Mapping[str, int]
    examples: tuple[Skip, ...]

    def __len__(self) -> int:
        return len(self.samples_N)

    def hash(self, settings: str) -> str:
        """A hash of the documents' sizes and of `settings`; unlike `key`, the same for a copy of the files."""
        digest = hashlib.sha256(settings.encode())
        for values_N in (self.samples_N, self.parts_N, self.tokens_N, self.patches_N):
            digest.update(values_N.tobytes())
        return digest.hexdigest()


def cache_folder(data: DataConfig) -> Path:
    """Where lengths and packing plans are kept."""
    if data.cache_dir is not None:
        return Path(data.cache_dir).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxforge"


def find_lengths(files: SampleFiles, encoder: Encoder, data: DataConfig, console: Console | None = None) -> Lengths:
    """The lengths of all documents, from the cache or measured; in a run of several processes by the first alone.

    Raises:
      ConfigError: where more than data.max_skipped_fraction of the samples can't be used, or any with data.strict;
        in every process alike.
    """
    key = hashlib.sha256(repr((_VERSION, files.fingerprint, encoder.settings, data.strict)).encode()).hexdigest()
    path = cache_folder(data) / f"lengths-{key[:32]}.npz"

    def find() -> Lengths:
        found = _read(path, key)
        # what was kept may be refused by a stricter config
        if found is not None and not refusal(found.skipped, found.examples, found.num_samples, data):
            # the others take what the first process found, whatever has been mended meanwhile
            if jax.process_index() or not _is_mended(found, files, encoder):
                return found
        found = measure(files, encoder, data, key, console)
        if message := refusal(found.skipped, found.examples, found.num_samples, data):
            raise ConfigError(message)
        write_arrays(path, _to_arrays(found))
        return found

    return first_process_first(find)


def _is_mended(lengths: Lengths, files: SampleFiles, encoder: Encoder) -> bool:
    """Whether a sample that was left out for an image or video can be used by now; those that are shown are tried."""
    for skip in lengths.examples:
        if skip.kind in _MEDIA_FAULTS:
            try:
                encoder.sizes(to_sample(files.raw(skip.sample)), files.root(skip.sample))
            except SampleError:
                continue
            return True
    return False


def first_process_first[Result](make: Callable[[], Result]) -> Result:
    """What `make` gives: in the first process of a run, then in the others, which so find what it cached.

    A ConfigError of the first process is one in every process: none waits for it.
    """
    if jax.process_count() == 1:
        return make()
    result, failure = None, None
    if jax.process_index() == 0:
        try:
            result = make()
        except ConfigError as error:
            failure = error
    # this barrier may last for hours; a collective on the devices gives up in minutes
    multihost.get_barrier_sync_fn()(key=f"jaxforge data {next(_barriers)}", timeout_ms=_PATIENCE_SECONDS * 1000)
    if multihost_utils.process_allgather(np.array(failure is not None)).any():
        raise failure or ConfigError("the data were refused by process 0, which says why")
    return make() if result is None else result


def refusal(skipped: Mapping[str, int], examples: Sequence[Skip], num_samples: int, data: DataConfig) -> str | None:
    """What is wrong where the config doesn't allow so many of the samples to be skipped.

    One that is too long isn't broken: data.overlong says that it is left out.
    """
    total = sum(count for kind, count in skipped.items() if kind != TOO_LONG)
    examples = [skip for skip in examples if skip.kind != TOO_LONG]
    if data.strict and total:
        first = examples[0]
        return (
            f"{first.where}: {first.message} ({first.kind}); mend the sample, or set data.strict=False to skip and"
            " count such samples"
        )
    if total > data.max_skipped_fraction * num_samples:
        percent = -(-100 * total // num_samples)
        way_out = f"mend them, or set data.max_skipped_fraction={percent / 100} to go on without them"
        return (
            f"{total} of {num_samples} samples can't be used, more than data.max_skipped_fraction="
            f"{data.max_skipped_fraction}: {describe_skipped(skipped)}\n"
            + "\n".join(f"  {skip.where}: {skip.message} ({skip.kind})" for skip in examples)
            + f"\n{way_out if percent < 100 else 'mend them'}"
        )
    return None


def describe_skipped(skipped: Mapping[str, int]) -> str:
    """The counts in words, the most frequent kind first."""
    return ", ".join(f"{kind} {count}" for kind, count in sorted(skipped.items(), key=lambda item: (-item[1], item[0])))


def measure(
    files: SampleFiles, encoder: Encoder, data: DataConfig, key: str = "", console: Console | None = None
) -> Lengths:
    """Measures all samples in threads; the result doesn't depend on their number.

    With data.strict images are decoded too, so that a corrupt one is found here; and the pass ends soon after the first
    sample that can't be used, and is not complete.
    """
    documents: list[np.ndarray] = []
    skipped: Counter[str] = Counter()
    examples: list[Skip] = []
    chunks = [range(start, min(start + _CHUNK, len(files))) for start in range(0, len(files), _CHUNK)]
    threads = ThreadPoolExecutor(max(data.num_threads, os.cpu_count() or 1))
    try:
        measured = threads.map(functools.partial(_measure_chunk, files, encoder, data.strict), chunks)
        for documents_D4, skips in _with_progress(measured, chunks, console):
            documents.append(documents_D4)
            for skip in skips:
                skipped[skip.kind] += 1
                if skipped[skip.kind] <= _EXAMPLES:
                    examples.append(skip)
            if data.strict and any(skip.kind != TOO_LONG for skip in skips):
                break
    finally:  # whatever ends the pass, an hour of it must not be waited for
        threads.shutdown(cancel_futures=True)
    columns = np.concatenate(documents).T
    samples_N, (parts_N, tokens_N, patches_N) = columns[0].copy(), columns[1:].astype(np.int32)
    return Lengths(key, len(files), samples_N, parts_N, tokens_N, patches_N, dict(skipped), tuple(examples))


def _measure_chunk(
    files: SampleFiles, encoder: Encoder, reads_media: bool, samples: range
) -> tuple[np.ndarray, list[Skip]]:
    """Sample, part, tokens and patches of each document of some samples [D, 4] int64; and what can't be used."""
    documents, skips = list[tuple[int, int, int, int]](), list[Skip]()
    for sample in samples:
        try:
            sizes = _sizes(encoder, to_sample(files.raw(sample)), files.root(sample), reads_media)
        except SampleError as error:
            skips.append(Skip(error.kind, files.where(sample), str(error), sample))
        else:
            documents.extend((sample, part, tokens, patches) for part, (tokens, patches) in enumerate(sizes))
    return np.array(documents, np.int64).reshape(-1, 4), skips


def _sizes(encoder: Encoder, sample: Sample, root: Path, reads_media: bool) -> Sequence[tuple[int, int]]:
    """(tokens, patches) of each document of a sample."""
    if reads_media:
        return [(len(document.tokens), document.num_patches) for document in encoder.documents(sample, root)]
    return encoder.sizes(sample, root)


def _with_progress(measured: Iterator, chunks: Sequence[range], console: Console | None) -> Iterator:
    """Shows how far the pass is: a bar in a terminal, elsewhere one line where it may take long."""
    total = chunks[-1].stop if chunks else 0
    console = console or Console(file=sys.stdout, highlight=False)
    if not console.is_terminal:
        if total > 10_000:
            console.print(f"measuring the lengths of {total} samples; they are cached for the next run")
        yield from measured
        return
    bar = rich_progress.Progress(
        rich_progress.TextColumn("measuring lengths: sample {task.completed}/{task.total}"),
        rich_progress.BarColumn(bar_width=20),
        rich_progress.TimeRemainingColumn(),
        console=console,
        transient=True,
    )
    with bar:
        task = bar.add_task("", total=total)
        for chunk, result in zip(chunks, measured, strict=True):
            bar.update(task, completed=chunk.stop)
            yield result


def _to_arrays(lengths: Lengths) -> dict[str, np.ndarray]:
    report = {
        "num_samples": lengths.num_samples,
        "skipped": dict(lengths.skipped),
        "examples": [dataclasses.astuple(skip) for skip in lengths.examples],
    }
    names = ("samples_N", "parts_N", "tokens_N", "patches_N")
    return {name: getattr(lengths, name) for name in names} | {"report": np.array(json.dumps(report))}


def _read(path: Path, key: str) -> Lengths | None:
    arrays = read_arrays(path)
    try:
        report = json.loads(str(arrays["report"]))
        return Lengths(
            key=key,
            num_samples=report["num_samples"],
            samples_N=arrays["samples_N"],
            parts_N=arrays["parts_N"],
            tokens_N=arrays["tokens_N"],
            patches_N=arrays["patches_N"],
            skipped=report["skipped"],
            examples=tuple(Skip(*skip) for skip in report["examples"]),
        )
    except (KeyError, TypeError, ValueError):  # not there, or damaged: it is made again
        return None


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a cache file; none where it isn't there or is damaged, which its checksums tell."""
    try:
        with np.load(path, allow_pickle=False) as file:
            return dict(file)
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile):
        return {}


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes a cache file as a whole or not at all; a folder that can't be written leaves the cache out."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as file:
            np.savez(file, allow_pickle=False, **arrays)
        os.chmod(file.name, 0o644)  # temporary files are private, and a cache may be shared
        os.replace(file.name, path)
    except OSError as error:
        _log.warning("%s can't be written (%s): lengths and plans are made again in every run", path, error.strerror)
