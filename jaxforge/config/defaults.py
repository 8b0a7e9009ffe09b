"""The values that a recipe doesn't give: the schema's defaults, and those that follow the vision encoder's type."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from jaxforge.config.encoder_yaml import read_encoder_yaml
from jaxforge.config.errors import ConfigError
from jaxforge.config.origins import copy_records, record_origins
from jaxforge.config.schema import EncoderConfig, ProjectorConfig
from jaxforge.config.values import as_mapping, check_choice, unknown_field

CONFIGS = Path(__file__).parents[2] / "configs"

_FULL_ATTENTION_LAYERS = (7, 15, 23, 31)  # Qwen2.5-VL, all sizes
_QWEN3_VIT = {"activation_func": "gelu_tanh", "swiglu": False, "normalization": "LayerNorm"}


def find_file(path: str) -> Path | None:
    """`path` from the working directory, else from where the packaged `configs` folder lies."""
    for candidate in (Path(path), CONFIGS.parent / path, CONFIGS / path):
        if candidate.is_file():
            return candidate
    return None


def group_defaults(cls: type) -> dict[str, Any]:
    """The schema's defaults as a nested dict; optional groups are None."""
    values = {}
    for field in dataclasses.fields(cls):
        is_group = dataclasses.is_dataclass(field.default)
        values[field.name] = group_defaults(type(field.default)) if is_group else field.default
    return values


def locked(values: Mapping) -> ConfigDict:
    """A ConfigDict that takes no new fields.  ml_collections' type safety is off: `resolve` checks all types."""
    config = ConfigDict(values, type_safe=False)
    config.lock()
    return config


def encoder_defaults(model_type: str, num_layers: int | None = None) -> ConfigDict:
    """An encoder of this type with the schema's defaults and those of its type, for a recipe to fill.

    Args:
      model_type: `qwen2_5_vit` or `qwen3_vit`.
      num_layers: the full-attention layers of qwen2_5_vit default to 7, 15, 23 and 31 where the encoder has them.

    Raises:
      ConfigError: if the type is unknown.
    """
    values = group_defaults(EncoderConfig) | {"model_type": model_type}
    check_choice(model_type, EncoderConfig, "model_type", "model.encoder.model_type")
    if num_layers is not None:
        values["num_layers"] = num_layers
    if model_type == "qwen3_vit":
        values |= _QWEN3_VIT
    elif isinstance(values["num_layers"], int):
        values["fullatt_block_indexes"] = tuple(i for i in _FULL_ATTENTION_LAYERS if i < values["num_layers"])
    return locked(values)


def encoder_from_yaml(path: str) -> ConfigDict:
    """The fields that the YAML file gives, and no defaults."""
    file = find_file(path)
    if file is None:
        raise ConfigError(f"model.encoder={path} doesn't exist; give the path of a YAML file")
    encoder = ConfigDict(read_encoder_yaml(file), type_safe=False)
    record_origins(encoder, path)
    return encoder


def complete_encoder(encoder: Any) -> ConfigDict | None:
    """`config.model.encoder`, which may be a YAML file's path or hold some fields alone, with all its fields."""
    if encoder is None:
        return None
    if isinstance(encoder, (str, Path)):
        encoder = encoder_from_yaml(str(encoder))
    given = as_mapping(encoder, "model.encoder")
    defaults = encoder_defaults(given.get("model_type", EncoderConfig.model_type), given.get("num_layers"))
    complete = _complete(given, defaults, "model.encoder", EncoderConfig)
    copy_records(encoder, complete)
    return complete


def complete_projector(projector: Any, encoder: ConfigDict | None) -> ConfigDict | None:
    """`config.model.projector` with all its fields; those that aren't given follow the encoder."""
    if projector is None and encoder is None:
        return None
    given = {} if projector is None else as_mapping(projector, "model.projector")
    defaults = group_defaults(ProjectorConfig)
    if encoder is not None:
        # the patch mergers of Qwen2.5-VL and Qwen3-VL normalise as their encoders do
        defaults |= {"normalization": encoder.normalization, "norm_epsilon": encoder.norm_epsilon}
    complete = _complete(given, defaults, "model.projector", ProjectorConfig)
    copy_records(projector, complete)
    return complete


def _complete(given: dict, defaults: Mapping, path: str, cls: type) -> ConfigDict:
    for name in given:
        if name not in defaults:
            raise unknown_field(f"{path}.{name}", cls)
    return locked(dict(defaults) | given)
