"""A few rows of settings in which every two values that go together meet."""

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

Row = dict[str, str]
# two values of two settings: ((name, value), (name, value)), the settings in their order
Pair = tuple[tuple[str, str], tuple[str, str]]


def covering_array(
    settings: Mapping[str, Sequence[str]], is_valid: Callable[[Row], bool]
) -> tuple[list[Row], list[Pair]]:
    """(valid rows, refused pairs): each pair of values of two settings is in a row, or in no valid row that there is.

    Greedy: a row starts from the first pair that no row has yet, with all else at its first value, as far as that is
    valid.  Then each setting in turn takes the value with which the row has most pairs that no other has, while it
    stays valid, until none has more; of values that are equal in this, the one whose pairs other rows have least.  The
    same arguments give the same rows.
    """
    # of settings with many values first: they need the most rows, and the other pairs find places there
    by_size = sorted(all_pairs(settings), key=lambda two: -len(settings[two[0][0]]) * len(settings[two[1][0]]))
    missing = dict.fromkeys(by_size)
    rows, refused = [], []
    seen: Counter[Pair] = Counter()

    def num_new(row: Row) -> int:
        return sum(pair in missing for pair in pairs_of(row))

    def value(row: Row) -> tuple[int, int]:
        return num_new(row), -sum(seen[pair] for pair in pairs_of(row))

    while missing:
        pair = next(iter(missing))
        row = next(filter(is_valid, _rows_with(settings, pair)), None)
        if row is None:
            refused.append(pair)
            del missing[pair]
            continue
        best = 0
        while num_new(row) > best:
            best = num_new(row)
            for name in settings:
                if name not in dict(pair):
                    others = [row | {name: other} for other in settings[name]]
                    row = max([row, *filter(is_valid, others)], key=value)
        rows.append(row)
        seen.update(pairs_of(row))
        for found in pairs_of(row):
            missing.pop(found, None)
    return rows, refused


def all_pairs(settings: Mapping[str, Sequence[str]]) -> list[Pair]:
    values = [[(name, value) for value in values] for name, values in settings.items()]
    return [pair for two in itertools.combinations(values, 2) for pair in itertools.product(*two)]


def pairs_of(row: Row) -> list[Pair]:
    return list(itertools.combinations(row.items(), 2))


def one_of_each(rows: Sequence[Row], name: str) -> list[Row]:
    """A row for each value of the setting `name`: the one with most values that none before has."""
    chosen: list[Row] = []
    for value in dict.fromkeys(row[name] for row in rows):
        seen = {item for row in chosen for item in row.items()}
        chosen.append(max((row for row in rows if row[name] == value), key=lambda row: len(set(row.items()) - seen)))
    return chosen


def _rows_with(settings: Mapping[str, Sequence[str]], pair: Pair):
    """All rows with a pair, valid or not, those with first values first; names in the order of `settings`."""
    fixed = dict(pair)
    choices = [[fixed[name]] if name in fixed else values for name, values in settings.items()]
    return (dict(zip(settings, values, strict=True)) for values in itertools.product(*choices))
