"""Who gave each value: records that every node of a ConfigDict carries, hidden beside its fields.

A value that was changed after it was recorded no longer matches its record, and counts as set in Python.
"""

from typing import Any

from ml_collections import ConfigDict

SET_IN_PYTHON = "set in Python"


def record_origins(node: ConfigDict, origin: str) -> None:
    """Marks the values of `node` and of its groups that have no record yet as coming from `origin`."""
    for name, value in node.items():
        if isinstance(value, ConfigDict):
            record_origins(value, origin)
        elif not _is_recorded(node, name):
            _records(node)[name] = (value, origin)


def set_value(node: ConfigDict, name: str, value: Any, origin: str) -> None:
    """Sets a field, which a node without defaults may still lack, and records where its value comes from."""
    with node.unlocked():
        node[name] = value
    _records(node)[name] = (value, origin)


def copy_records(source: Any, target: ConfigDict) -> None:
    """Gives `target` the records of `source`, if that is a ConfigDict."""
    if isinstance(source, ConfigDict):
        _records(target).update(_records(source))


def origin_of(node: Any, name: str) -> str:
    """Where the field's value comes from."""
    is_recorded = isinstance(node, ConfigDict) and _is_recorded(node, name)
    return _records(node)[name][1] if is_recorded else SET_IN_PYTHON


def _records(node: ConfigDict) -> dict[str, tuple[Any, str]]:
    """Field name -> (value, origin)."""
    if "_origins" not in vars(node):
        object.__setattr__(node, "_origins", {})
    return vars(node)["_origins"]


def _is_recorded(node: ConfigDict, name: str) -> bool:
    records = _records(node)
    return name in records and records[name][0] == node[name]
