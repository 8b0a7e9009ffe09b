"""Which documents share a row, for a whole epoch at once: packed in windows of the shuffled documents.

A document takes room of two kinds, tokens and image patches.  A window is packed in two ways, and the one with fewer
rows is taken.  Best-fit decreasing (Johnson 1973): documents go, the largest first, into the row that they fill best.
It is near perfect where small documents fill up what large ones leave, and loses several per cent where all are of
similar size.  Even fill: each row takes the largest document left, then those of the size of which a whole number fills
it, last the largest that fits.  Rows that a window leaves far from full are taken apart, and their documents wait for
the next window.
"""

import bisect
import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from jaxforge.data.rows import RowFormat

# A row is full enough when this share of its tokens or patches is used.
_FULL = 0.98
# Rows, or documents, that are looked at for room of the second kind.
_TRIES = 100
# Of a window, the share of documents that may wait for the next one: where nothing fits together, the wait must end.
_WAITING = 0.25


@dataclasses.dataclass(frozen=True, eq=False)
class PackingPlan:
    """The rows of an epoch.

    Attributes:
      row_starts: [R + 1] int64, where each row starts in `documents`; a row has at least one document.
      documents: [D] int64, document numbers, row after row.
    """

    row_starts: np.ndarray
    documents: np.ndarray

    def __len__(self) -> int:
        return len(self.row_starts) - 1

    def row(self, index: int) -> np.ndarray:
        """The documents of a row, in their order."""
        return self.documents[self.row_starts[index] : self.row_starts[index + 1]]

    def row_sums(self, values_N: np.ndarray) -> np.ndarray:
        """For each row the sum of a value of its documents: [R]."""
        return np.add.reduceat(values_N[self.documents], self.row_starts[:-1])

    def fill(self, tokens_N: np.ndarray, seq_length: int) -> float:
        """The share of all rows' tokens that isn't padding."""
        return float(tokens_N[self.documents].sum()) / (len(self) * seq_length)


def document_order(entry_sizes: Sequence[int], weights: Sequence[float], seed: int, epoch: int) -> np.ndarray:
    """The documents of an epoch in random order: [D] int64 document numbers.

    Documents are numbered through the entries of a mixture.  Without weights, each occurs once.  With them, entry e is
    the share weights[e] / sum(weights) of the order, in every part of it alike: the entry that is largest for its
    share occurs once, the others are repeated, in whole passes of an order of their own and a random part of a last
    pass.
    """
    rng = np.random.default_rng((seed, epoch))
    if not weights:
        return rng.permutation(sum(entry_sizes))
    shares = np.array(weights) / np.sum(weights)
    total = max(size / share for size, share in zip(entry_sizes, shares, strict=True))
    numbers, places, first = [], [], 0
    for size, share in zip(entry_sizes, shares, strict=True):
        # rounding must not leave out a document of the entry that sets the total
        count = max(size, round(total * share))
        passes = [first + rng.permutation(size) for _ in range(-(-count // size))]
        numbers.append(np.concatenate(passes)[:count])
        places.append((np.arange(count) + rng.random(count)) / count)
        first += size
    return np.concatenate(numbers)[np.argsort(np.concatenate(places), kind="stable")]


def plan_rows(
    order: np.ndarray,
    tokens_N: np.ndarray,
    patches_N: np.ndarray,
    row_format: RowFormat,
    window: int,
    rng: np.random.Generator | None = None,
) -> PackingPlan:
    """Packs documents into rows; a pure function.  Raises ValueError for a document that is larger than a row.

    Args:
      order: [D] document numbers, in which they are taken into windows; a number may be there twice.
      tokens_N, patches_N: [N] size of each document.
      row_format: the room of a row.
      window: documents in a window.
      rng: shuffles the rows of each window, which else come with the largest documents first.
    """
    too_large = np.flatnonzero((tokens_N > row_format.seq_length) | (patches_N > row_format.max_patches))
    if too_large.size:
        number = too_large[0]
        raise ValueError(f"document {number} has {tokens_N[number]} tokens and {patches_N[number]} patches, too many")
    rooms = (row_format.seq_length, row_format.max_patches)
    rows: list[list[int]] = []
    waiting: list[int] = []
    for start in range(0, len(order), window):
        documents = waiting + order[start : start + window].tolist()
        needs_D2 = np.stack([tokens_N[documents], patches_N[documents]], axis=1)
        ways = [way(needs_D2, rooms) for way in (_best_fit_decreasing, _even_fill)]
        packed = [[documents[place] for place in row] for row in min(ways, key=len)]
        is_last = start + window >= len(order)
        packed, waiting = (packed, []) if is_last else _full_rows(packed, tokens_N, patches_N, row_format, window)
        if rng is not None:
            packed = [packed[i] for i in rng.permutation(len(packed))]
        rows.extend(packed)
    lengths = np.array([0, *map(len, rows)], np.int64)
    return PackingPlan(np.cumsum(lengths), np.array([number for row in rows for number in row], np.int64))


def _best_fit_decreasing(needs_D2: np.ndarray, rooms: tuple[int, int]) -> list[list[int]]:
    """Rows of the documents of one window, as places in it.

    Rows lie in a sorted list by the room that they have left of the scarcer kind, so the best is found by bisection;
    room of the other kind is looked for among a bounded number of rows: the next ones, and some spread over the rest.
    """
    needs, others, (room, other_room) = _scarcer_first(needs_D2, rooms)
    largest_first = np.argsort(-np.max(needs_D2 / np.maximum(rooms, 1), axis=1), kind="stable")
    rows: list[list[int]] = []
    others_left: list[int] = []
    # room left and the row's number as one whole number: such lists are searched fastest
    open_rows: list[int] = []
    shift = len(needs).bit_length()
    number_mask = (1 << shift) - 1
    for document in largest_first.tolist():
        need, other_need = needs[document], others[document]
        first, end = bisect.bisect_left(open_rows, need << shift), len(open_rows)
        near = min(end, first + _TRIES)
        places = itertools.chain(range(first, near), range(near, end, max(1, (end - near) // _TRIES)))
        found = next((i for i in places if others_left[open_rows[i] & number_mask] >= other_need), None)
        if found is None:
            row, left = len(rows), room
            rows.append([])
            others_left.append(other_room)
        else:
            entry = open_rows.pop(found)
            row, left = entry & number_mask, entry >> shift
        rows[row].append(document)
        others_left[row] -= other_need
        if left > need or others_left[row]:
            bisect.insort(open_rows, left - need << shift | row)
    return rows


def _even_fill(needs_D2: np.ndarray, rooms: tuple[int, int]) -> list[list[int]]:
    """Rows of the documents of one window, as places in it, one row after the other."""
    needs, others, (room, other_room) = _scarcer_first(needs_D2, rooms)
    shift = len(needs).bit_length()
    number_mask = (1 << shift) - 1
    remaining = sorted(need << shift | document for document, need in enumerate(needs))
    total = sum(needs)
    rows: list[list[int]] = []
    while remaining:
        row: list[int] = []
        left, other_left = room, other_room
        at: int | None = len(remaining) - 1
        while at is not None:
            document = remaining.pop(at) & number_mask
            row.append(document)
            left, other_left, total = left - needs[document], other_left - others[document], total - needs[document]
            end = bisect.bisect_left(remaining, left + 1 << shift)
            count = round(left * len(remaining) / total) if total else 1  # as many of mean size fill what is left
            wanted = end - 1 if count <= 1 else min(end - 1, bisect.bisect_left(remaining, left // count << shift))
            nearest = (i for step in range(_TRIES) for i in (wanted - step, wanted + step) if 0 <= i < end)
            at = next((i for i in nearest if others[remaining[i] & number_mask] <= other_left), None)
        rows.append(row)
    return rows


def _scarcer_first(needs_D2: np.ndarray, rooms: tuple[int, int]) -> tuple[list[int], list[int], tuple[int, int]]:
    """What documents need of the kind of room that they use more of, of the other kind, and a row's room of both."""
    tokens, patches = needs_D2.T.tolist()
    if sum(tokens) / rooms[0] >= sum(patches) / max(rooms[1], 1):
        return tokens, patches, rooms
    return patches, tokens, rooms[::-1]


def _full_rows(
    rows: list[list[int]], tokens_N: np.ndarray, patches_N: np.ndarray, row_format: RowFormat, window: int
) -> tuple[list[list[int]], list[int]]:
    """The rows to keep, and the documents of those that wait for the next window: the emptiest."""
    starts = np.cumsum([0, *map(len, rows)])
    plan = PackingPlan(starts, np.array([number for row in rows for number in row], np.int64))
    token_share = plan.row_sums(tokens_N) / row_format.seq_length
    patch_share = plan.row_sums(patches_N) / max(row_format.max_patches, 1)
    used = np.maximum(token_share, patch_share)
    kept, waiting = set(range(len(rows))), list[int]()
    for row in np.argsort(used, kind="stable").tolist():
        if used[row] >= _FULL or len(waiting) + len(rows[row]) > _WAITING * window:
            break
        kept.remove(row)
        waiting.extend(rows[row])
    return [rows[row] for row in sorted(kept)], waiting
