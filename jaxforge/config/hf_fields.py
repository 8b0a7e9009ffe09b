"""The fields of a parsed config.json, checked one by one."""

from collections.abc import Mapping
from typing import Any

from jaxforge.config.errors import ConfigError
from jaxforge.config.values import as_mapping, check

_REQUIRED = object()


class Fields:
    """Values by name, from the first of several mappings that has them, checked for their type."""

    def __init__(self, where: str, mappings: tuple[Mapping[str, Any], ...]):
        self.where, self._mappings = where, mappings

    def get(self, kind: Any, *names: str, default: Any = _REQUIRED) -> Any:
        """The value of the first name that any mapping has, a `kind`; a number is above 0.

        Raises:
          ConfigError: if it is something else, or if none has it and there is no default.
        """
        for mapping in self._mappings:
            for name in names:
                if mapping.get(name) is not None:
                    value = check(mapping[name], kind, f"{self.where}: {name}")
                    if kind in (int, float) and value <= 0:
                        raise ConfigError(f"{self.where}: {name}={value} must be above 0")
                    return value
        if default is _REQUIRED:
            raise ConfigError(f"{self.where} has no {names[0]}; add it, from the model's own config.json")
        return default

    def count(self, *names: str, default: Any = _REQUIRED) -> int:
        """A whole number, which may be 0.  Raises ConfigError as `get` does, and where it is below."""
        for mapping in self._mappings:
            for name in names:
                if mapping.get(name) is not None:
                    value = check(mapping[name], int, f"{self.where}: {name}")
                    if value < 0:
                        raise ConfigError(f"{self.where}: {name}={value} must be at least 0")
                    return value
        return self.get(int, *names, default=default)

    def is_null(self, name: str) -> bool:
        """Whether the file says that there is none; it isn't silent then."""
        return any(name in mapping and mapping[name] is None for mapping in self._mappings)

    def mapping(self, name: str) -> dict[str, Any]:
        """An object of fields; empty where there is none."""
        for mapping in self._mappings:
            if mapping.get(name) is not None:
                return as_mapping(mapping[name], f"{self.where}: {name}")
        return {}

    def must_be(self, name: str, allowed: Any) -> None:
        """ConfigError where the value is there and isn't what the model computes."""
        value = next((mapping[name] for mapping in self._mappings if mapping.get(name) is not None), allowed)
        if value != allowed:
            raise ConfigError(f"{self.where}: {name}={value} isn't built; only {allowed} is")
