"""Types of values, in Python and as text."""

import pytest

from jaxforge.config.errors import ConfigError
from jaxforge.config.values import check, parse

Pairs = tuple[tuple[str, float], ...]


@pytest.mark.parametrize(
    ("text", "annotation", "value"),
    [
        ("20", int, 20),
        ("-1", int, -1),
        ("1e-4", float, 0.0001),
        ("3", float, 3.0),
        ("true", bool, True),
        ("False", bool, False),
        ("none", int | None, None),
        ("None", str | None, None),
        ("none", str, "none"),
        ("full", str | None, "full"),
        ("'a,b'", str, "a,b"),
        ("(1,2)", tuple[int, ...], (1, 2)),
        ("1,2", tuple[int, ...], (1, 2)),
        ("[1, 2]", tuple[int, int], (1, 2)),
        ("7", tuple[int, ...], (7,)),
        ("(7,)", tuple[int, ...], (7,)),
        ("()", tuple[int, ...], ()),
        ("none", tuple[int, ...] | None, None),
        ("encoder/**,decoder/*", tuple[str, ...], ("encoder/**", "decoder/*")),
        ("((encoder/**,0.1),(decoder/*,1))", Pairs, (("encoder/**", 0.1), ("decoder/*", 1.0))),
        ("(encoder/**,0.1),(decoder/*,1)", Pairs, (("encoder/**", 0.1), ("decoder/*", 1.0))),
        ("((encoder/**,0.1),)", Pairs, (("encoder/**", 0.1),)),
        ("(encoder/**,0.1)", Pairs, (("encoder/**", 0.1),)),
        ("('a,(b',0.5)", Pairs, (("a,(b", 0.5),)),
    ],
)
def test_text_is_read_by_the_type_of_its_field(text, annotation, value):
    parsed = parse(text, annotation, "f")
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize(
    ("text", "annotation", "message"),
    [
        ("abc", int, "f=abc has the wrong type; give a whole number, for example 4"),
        ("1.5", int, "f=1.5 has the wrong type; give a whole number, for example 4"),
        ("1e3", int, "give a whole number"),
        ("none", int, "give a whole number"),
        ("nan", float, "give a finite number"),
        ("x", float | None, "give a finite number or None"),
        ("yes", bool, "give a boolean, true or false"),
        ("1,x", tuple[int, ...], "f[1]=x"),
        ("1,2,3", tuple[int, int], "f='1,2,3' has 3 elements; it needs 2"),
        ("((a,0.1),(b,x))", Pairs, "f[1][1]=x"),
        ("((a,0.1)", Pairs, "f=((a,0.1) lacks a closing )"),
    ],
)
def test_text_of_another_type_is_refused(text, annotation, message):
    with pytest.raises(ConfigError) as error:
        parse(text, annotation, "f")
    assert message in str(error.value)


def test_an_int_is_a_float_and_a_list_is_a_tuple():
    assert type(check(3, float, "f")) is float
    assert check([1, 2], tuple[int, ...], "f") == (1, 2)
    assert check([["a", 1]], Pairs, "f") == (("a", 1.0),)


@pytest.mark.parametrize(
    ("value", "annotation", "message"),
    [
        (True, int, "f=True has the wrong type"),
        (1, bool, "f=1 has the wrong type"),
        (2.0, int, "f=2.0 has the wrong type"),
        ("20", int, "f='20' has the wrong type"),
        (None, int, "f=None has the wrong type"),
        (float("inf"), float, "f=inf has the wrong type"),
        ((1, "x"), tuple[int, ...], "f[1]='x' has"),
        (5, tuple[int, ...], "f=5 has the wrong type; give a tuple of whole numbers"),
        ("a.jsonl", tuple[str, ...], "f='a.jsonl' has the wrong type; give a tuple of strings, for example ('abc',)"),
        ((("a", "b"),), Pairs, "f[0][1]='b' has"),
    ],
)
def test_a_value_of_another_type_is_refused(value, annotation, message):
    with pytest.raises(ConfigError) as error:
        check(value, annotation, "f")
    assert message in str(error.value)
