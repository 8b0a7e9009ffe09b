"""Rows of a covering array, against all pairs of all valid rows."""

import itertools

import pytest
from covering_array import all_pairs, covering_array, one_of_each, pairs_of

SETTINGS = {"size": ("1", "2", "4", "8"), "dtype": ("a", "b", "c"), "cache": ("off", "on"), "order": ("up", "down")}


def no_rule(row):
    return True


def some_rules(row):
    """A pair that is refused beside all else; one that needs a value that isn't the first; a setting with one way."""
    if row["dtype"] == "c" and row["order"] == "down":
        return False
    if row["size"] == "8" and row["dtype"] == "b" and row["cache"] == "off":
        return False
    return row["size"] != "4" or row["order"] == "down"


@pytest.mark.parametrize("is_valid", [no_rule, some_rules])
def test_a_pair_is_in_a_row_if_any_valid_row_has_it(is_valid):
    rows, refused = covering_array(SETTINGS, is_valid)
    everything = [dict(zip(SETTINGS, values, strict=True)) for values in itertools.product(*SETTINGS.values())]
    possible = {pair for row in everything if is_valid(row) for pair in pairs_of(row)}
    assert all(is_valid(row) and list(row) == list(SETTINGS) for row in rows)
    assert {pair for row in rows for pair in pairs_of(row)} == possible
    assert set(refused) == set(all_pairs(SETTINGS)) - possible
    # dtype c with order down; with size 4 too, which needs that order, and so with order up
    expected = {(("dtype", "c"), ("order", "down")), (("size", "4"), ("dtype", "c")), (("size", "4"), ("order", "up"))}
    assert set(refused) == (expected if is_valid is some_rules else set())


def test_without_rules_the_rows_are_as_few_as_the_two_largest_settings_need():
    rows, _ = covering_array(SETTINGS, no_rule)
    assert len(rows) == 4 * 3


def test_the_same_settings_give_the_same_rows():
    assert covering_array(SETTINGS, some_rules) == covering_array(SETTINGS, some_rules)


def test_one_of_each_has_a_row_for_each_value_and_as_many_others_as_it_can():
    rows = [dict(zip("ab", values, strict=True)) for values in ("11", "12", "21", "22", "31")]
    assert one_of_each(rows, "a") == [rows[0], rows[3], rows[4]]
