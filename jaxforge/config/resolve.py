"""From the mapping that a recipe filled to the frozen `Config`, and the origin of each of its values."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from ml_collections import ConfigDict

from jaxforge.config.defaults import complete_encoder, complete_projector, encoder_defaults
from jaxforge.config.origins import origin_of
from jaxforge.config.schema import Config, EncoderConfig, ModelConfig
from jaxforge.config.values import (
    annotations,
    as_mapping,
    check,
    check_choice,
    group_class,
    optional_inner,
    unknown_field,
)


def resolve(config: Mapping | ConfigDict) -> Config:
    """The typed, frozen config.

    Args:
      config: what `load_config` or `default_config` returns, or a mapping of the same shape.  Fields that it lacks have
        their defaults.

    Raises:
      ConfigError: for an unknown field, a value of the wrong type, or one that isn't among the field's choices.
    """
    return _build(Config, _completed(config), "")


def _completed(config: Mapping | ConfigDict) -> dict[str, Any]:
    """The groups of `config`, with the encoder and projector completed; `config` itself isn't changed."""
    groups = as_mapping(config, "config")
    if "model" in groups:
        model = as_mapping(groups["model"], "model")
        encoder = complete_encoder(model.get("encoder"))
        projector = complete_projector(model.get("projector"), encoder)
        groups["model"] = model | {"encoder": encoder, "projector": projector}
    return groups


def _build(cls: type, values: Any, path: str) -> Any:
    values = as_mapping(values, path or "config")
    known = annotations(cls)
    prefix = f"{path}." if path else ""
    for name in values:
        if name not in known:
            raise unknown_field(f"{prefix}{name}", cls)
    built = {}
    for name, value in values.items():
        group = group_class(known[name])
        if group is None:
            built[name] = check(value, known[name], prefix + name)
            check_choice(built[name], cls, name, prefix + name)
        elif value is None and optional_inner(known[name])[1]:
            built[name] = None
        else:
            built[name] = _build(group, value, prefix + name)
    return cls(**built)


def value_origins(config: ConfigDict) -> dict[str, str]:
    """Dotted path -> where the value comes from, for each value that isn't a default.

    Origins are a recipe's path, `command line`, an encoder's YAML file, or `set in Python`.
    """
    resolved = resolve(config)
    defaults = dict(_leaves(_defaults_of(resolved)))
    completed = _completed(config)
    found = {}
    for path, value in _leaves(resolved):
        if value != defaults[path]:
            node: Any = completed
            *groups, name = path.split(".")
            for group in groups:
                node = node[group]
            found[path] = origin_of(node, name)
    return found


def _defaults_of(config: Config) -> Config:
    """What the schema gives where an encoder of the same type and depth is present."""
    encoder = config.model.encoder
    if encoder is None:
        return Config(model=ModelConfig(projector=config.model.projector))
    from_type = dict(encoder_defaults(encoder.model_type, encoder.num_layers).items())
    from_schema = {"model_type": EncoderConfig.model_type, "num_layers": EncoderConfig.num_layers}
    projector = complete_projector(None, complete_encoder(dataclasses.asdict(encoder)))
    return resolve({"model": {"encoder": from_type | from_schema, "projector": projector}})


def _leaves(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from _leaves(value, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, value
