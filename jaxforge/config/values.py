"""Checks a value against its schema annotation, and reads one from the text of a command line.

ml_collections checks neither the elements of a tuple nor a field whose default is None, so both are done here.
Annotations are those that the schema uses: bool, int, float, str, tuples of them, and `X | None`.
"""

import dataclasses
import difflib
import functools
import math
import numbers
import re
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from ml_collections import ConfigDict

from jaxforge.config.errors import ConfigError
from jaxforge.config.schema import Config

_EXAMPLES = {
    bool: ("a boolean", "true or false"),
    int: ("a whole number", "for example 4"),
    float: ("a finite number", "for example 0.1 or 1e-4"),
    str: ("a string", "for example 'abc'"),
    tuple[str, ...]: ("a tuple of strings", "for example ('abc',)"),
}


@functools.cache
def annotations(cls: type) -> dict[str, Any]:
    """Field name -> annotation of a schema dataclass."""
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def optional_inner(annotation: Any) -> tuple[Any, bool]:
    """`X | None` as (X, True), anything else as (annotation, False)."""
    if isinstance(annotation, types.UnionType):
        inner = [member for member in typing.get_args(annotation) if member is not types.NoneType]
        return inner[0], True
    return annotation, False


def group_class(annotation: Any) -> type | None:
    """The schema dataclass of a nested group; None for a plain field."""
    inner, _ = optional_inner(annotation)
    return inner if isinstance(inner, type) and dataclasses.is_dataclass(inner) else None


def schema_paths(cls: type = Config, prefix: str = "") -> Iterator[str]:
    """The dotted path of every plain field, such as `train.steps`."""
    for name, annotation in annotations(cls).items():
        group = group_class(annotation)
        if group is None:
            yield prefix + name
        else:
            yield from schema_paths(group, f"{prefix}{name}.")


def close_names(name: str, names: Any) -> str:
    """`; did you mean ...?` with the nearest of `names`, or an empty string."""
    close = difflib.get_close_matches(name, list(names), n=2, cutoff=0.6)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def unknown_field(path: str, cls: type) -> ConfigError:
    """The error for a dotted path whose last name isn't a field of the group `cls`."""
    group, _, name = path.rpartition(".")
    hint = close_names(name, annotations(cls))
    if not hint:
        # the right name in the wrong group, such as config.steps
        elsewhere = [known for known in schema_paths() if known.rpartition(".")[2] == name]
        hint = f"; did you mean {' or '.join(elsewhere[:2])}?" if elsewhere else ""
    if not hint:
        hint = f"; its fields are {', '.join(annotations(cls))}"
    return ConfigError(f"{group or 'config'} has no field {name!r}{hint}")


def describe(annotation: Any) -> str:
    """The annotation in words: `a whole number or None`."""
    inner, is_optional = optional_inner(annotation)
    if typing.get_origin(inner) is tuple:
        elements = typing.get_args(inner)
        if elements[-1] is Ellipsis:
            words = f"a tuple of {_plural(elements[0])}"
        else:
            words = f"a tuple of ({', '.join(describe(element) for element in elements)})"
    else:
        words = _EXAMPLES[inner][0]
    return f"{words} or None" if is_optional else words


def _plural(annotation: Any) -> str:
    nouns = {int: "whole numbers", float: "numbers", str: "strings", bool: "booleans"}
    return (
        nouns.get(annotation) or f"tuples ({', '.join(describe(element) for element in typing.get_args(annotation))})"
    )


def check(value: Any, annotation: Any, path: str) -> Any:
    """`value` as the schema wants it: an int where a float is wanted becomes one, a list becomes a tuple.

    Raises:
      ConfigError: naming `path`, or the element `path[i]` of a tuple, if the type is another.
    """
    inner, is_optional = optional_inner(annotation)
    if value is None and is_optional:
        return None
    if typing.get_origin(inner) is tuple:
        if not isinstance(value, (tuple, list)):
            raise _wrong_type(repr(value), annotation, path)
        elements = _element_annotations(inner, len(value), value, path)
        pairs = enumerate(zip(value, elements, strict=True))
        return tuple(check(item, element, f"{path}[{i}]") for i, (item, element) in pairs)
    is_bool = isinstance(value, bool)
    if inner is bool and is_bool:
        return value
    if inner is int and isinstance(value, numbers.Integral) and not is_bool:
        return int(value)
    if inner is float and isinstance(value, numbers.Real) and not is_bool and math.isfinite(value):
        return float(value)
    if inner is str and isinstance(value, str):
        return value
    raise _wrong_type(repr(value), annotation, path)


def _element_annotations(annotation: Any, length: int, value: Any, path: str) -> tuple:
    elements = typing.get_args(annotation)
    if elements[-1] is Ellipsis:
        return elements[:1] * length
    if length != len(elements):
        raise ConfigError(f"{path}={value!r} has {length} elements; it needs {len(elements)}: {describe(annotation)}")
    return elements


def _wrong_type(text: str, annotation: Any, path: str) -> ConfigError:
    inner, _ = optional_inner(annotation)
    example = f", {_EXAMPLES[inner][1]}" if inner in _EXAMPLES else ""
    return ConfigError(f"{path}={text} has the wrong type; give {describe(annotation)}{example}")


def parse(text: str, annotation: Any, path: str) -> Any:
    """The value that `text`, as written on a command line, means for a field of this annotation.

    Tuples may be written `(1,2)`, `[1,2]` or `1,2`; strings need no quotes; `none` is None where None is allowed.

    Raises:
      ConfigError: naming `path` if the text isn't such a value.
    """
    inner, is_optional = optional_inner(annotation)
    text = text.strip()
    if is_optional and text.lower() == "none":
        return None
    if typing.get_origin(inner) is tuple:
        items = _split_tuple(text, inner, path)
        elements = _element_annotations(inner, len(items), text, path)
        pairs = enumerate(zip(items, elements, strict=True))
        return tuple(parse(item, element, f"{path}[{i}]") for i, (item, element) in pairs)
    if inner is str:
        is_quoted = len(text) >= 2 and text[0] == text[-1] and text[0] in "'\""
        return text[1:-1] if is_quoted else text
    if inner is bool and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if inner is int and re.fullmatch(r"[+-]?\d+", text):
        return int(text)
    if inner is float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if math.isfinite(number):
            return number
    raise _wrong_type(text, annotation, path)


_CLOSING = {"(": ")", "[": "]"}


def _split_tuple(text: str, annotation: Any, path: str) -> list[str]:
    """The texts of a tuple's elements; outer brackets are optional, and so they are around a single pair."""
    whole = _split_commas(text, path)
    is_bracketed = len(whole) == 1 and text[:1] in _CLOSING and text[-1:] == _CLOSING[text[0]]
    items = _split_commas(text[1:-1], path) if is_bracketed else whole
    holds_tuples = typing.get_origin(typing.get_args(annotation)[0]) is tuple
    if holds_tuples and is_bracketed and items and not any(item[:1] in _CLOSING for item in items):
        return [text]
    return items


def _split_commas(text: str, path: str) -> list[str]:
    """Splits at the commas outside brackets and quotes; a trailing comma ends the last element."""
    items, current, expected, quote = [], "", [], ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character in _CLOSING:
            expected.append(_CLOSING[character])
        elif expected and character == expected[-1]:
            expected.pop()
        if character == "," and not expected and not quote:
            items.append(current.strip())
            current = ""
        else:
            current += character
    if expected or quote:
        raise ConfigError(f"{path}={text} lacks a closing {expected[-1] if expected else quote}; add it")
    if current.strip():
        items.append(current.strip())
    return items


def check_choice(value: Any, cls: type, name: str, path: str) -> None:
    """Raises ConfigError unless `value` is among the choices of the field `name` of `cls`, if it has any."""
    (metadata,) = (field.metadata for field in dataclasses.fields(cls) if field.name == name)
    choices = metadata["choices"]
    if not choices or value in choices:
        return
    if len(choices) == 1:
        raise ConfigError(f"{path}={value} must be {choices[0]}: {metadata['meaning']}")
    hint = close_names(str(value), map(str, choices))
    raise ConfigError(f"{path}={value} is not one of {', '.join(map(str, choices))}{hint}")


def as_mapping(value: Any, path: str) -> dict[str, Any]:
    """A group's fields as a dict; ConfigError if it is something else."""
    if not isinstance(value, (Mapping, ConfigDict)):
        raise ConfigError(f"{path}={value!r} must be a group of fields, not {type(value).__name__}")
    return dict(value.items())
