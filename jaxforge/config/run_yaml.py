"""The resolved config as a file that a person reads and that loads back: config.yml of a run directory."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from jaxforge.config.errors import ConfigError
from jaxforge.config.resolve import resolve
from jaxforge.config.schema import Config


def to_yaml(config: Config, origins: Mapping[str, str]) -> str:
    """The whole config as YAML, with `# from <origin>` behind each value that isn't a default."""
    return "\n".join(_yaml_lines(config, origins, "", 0)) + "\n"


def _yaml_lines(config: Any, origins: Mapping[str, str], prefix: str, depth: int) -> Iterator[str]:
    for field in dataclasses.fields(config):
        value, path, indent = getattr(config, field.name), prefix + field.name, "  " * depth
        if dataclasses.is_dataclass(value):
            yield f"{indent}{field.name}:"
            yield from _yaml_lines(value, origins, f"{path}.", depth + 1)
        else:
            comment = f"  # from {origins[path]}" if path in origins else ""
            yield f"{indent}{field.name}: {_yaml_value(value)}{comment}"


def _yaml_value(value: Any) -> str:
    as_lists = (
        [list(item) if isinstance(item, tuple) else item for item in value] if isinstance(value, tuple) else value
    )
    text = yaml.safe_dump(as_lists, default_flow_style=True, width=2**31)
    return text.removesuffix("\n").removesuffix("\n...")


def from_yaml(text: str) -> Config:
    """The config that `to_yaml` wrote."""
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"not valid YAML: {error}") from error
    return resolve(values)
