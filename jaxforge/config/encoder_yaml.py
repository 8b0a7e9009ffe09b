"""Reads a vision encoder from a YAML file in LoongForge's form (vit.yaml).

The keys are the fields of `EncoderConfig`, and `_target_`, which names LoongForge's class and must agree with
`model_type`.  `${act:NAME}` names an activation of LoongForge's registry.  For qwen3_vit `${act:gelu}` is the tanh
form, because that is what the released Qwen3-VL weights were trained with; for qwen2_5_vit it is the exact form.  A
plain `gelu` or `gelu_tanh` is taken literally.
"""

import re
from pathlib import Path
from typing import Any

import yaml

from jaxforge.config.errors import ConfigError
from jaxforge.config.schema import EncoderConfig
from jaxforge.config.values import annotations, check, close_names, optional_inner, parse

TARGETS = {
    "loongforge.models.encoder.Qwen2VisionRMSNormConfig": "qwen2_5_vit",
    "loongforge.models.encoder.Qwen3VisionModelConfig": "qwen3_vit",
}
_ACTIVATIONS = {
    "qwen2_5_vit": {"silu": "silu", "gelu": "gelu"},
    "qwen3_vit": {"silu": "silu", "gelu": "gelu_tanh"},
}


def read_encoder_yaml(path: Path) -> dict[str, Any]:
    """The fields that the file gives, typed as in `EncoderConfig`, always with `model_type`.

    Raises:
      ConfigError: for an unreadable file, an unknown key or target, or a value of the wrong type, with file and line.
    """
    values, lines = _read_mapping(path)
    model_type = _model_type(values, lines, path)
    known = annotations(EncoderConfig)
    encoder = {"model_type": model_type}
    for name, value in values.items():
        if name == "_target_":
            continue
        where = f"{path}, line {lines[name]}"
        if name not in known:
            raise ConfigError(f"{where}: unknown key {name!r} in a vision encoder{close_names(str(name), known)}")
        if isinstance(value, str) and "${" in value:
            value = _interpolate(value, name, model_type, where)
        if isinstance(value, str) and optional_inner(known[name])[0] is float:
            # YAML 1.1 reads 1e-6, without a dot, as a string
            encoder[name] = parse(value, known[name], f"{where}: {name}")
        else:
            encoder[name] = check(value, known[name], f"{where}: {name}")
    return encoder


def _read_mapping(path: Path) -> tuple[dict[Any, Any], dict[Any, int]]:
    """The file's top-level mapping, and the line of each key."""
    try:
        text = path.read_text(encoding="utf-8")
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        values = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"model.encoder={path} cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"model.encoder={path} is not valid YAML: {error}") from error
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"model.encoder={path} must hold `field: value` lines, as num_layers: 32")
    lines: dict[Any, int] = {}
    for key, _ in node.value:
        line = key.start_mark.line + 1
        if key.value in lines:
            raise ConfigError(f"{path}, line {line}: {key.value!r} is already given in line {lines[key.value]}")
        lines[key.value] = line
    if set(lines) != set(values):
        raise ConfigError(f"model.encoder={path} has keys that aren't plain names; write each as `name: value`")
    return values, lines


def _model_type(values: dict, lines: dict, path: Path) -> str:
    target, model_type = values.get("_target_"), values.get("model_type")
    if target is not None and target not in TARGETS:
        known = ", ".join(TARGETS)
        raise ConfigError(f"{path}, line {lines['_target_']}: _target_={target} is unknown; the encoders are {known}")
    if model_type is None:
        if target is None:
            raise ConfigError(f"{path} says neither model_type nor _target_; add model_type: qwen2_5_vit or qwen3_vit")
        return TARGETS[target]
    if model_type not in _ACTIVATIONS:
        known = " or ".join(_ACTIVATIONS)
        raise ConfigError(f"{path}, line {lines['model_type']}: model_type={model_type} is unknown; use {known}")
    if target is not None and TARGETS[target] != model_type:
        raise ConfigError(
            f"{path}, line {lines['_target_']}: _target_={target} is {TARGETS[target]}, but model_type={model_type}"
            f" (line {lines['model_type']}); make them agree"
        )
    return model_type


def _interpolate(value: str, name: str, model_type: str, where: str) -> str:
    match = re.fullmatch(r"\$\{act:(\w+)\}", value.strip())
    known = _ACTIVATIONS[model_type]
    if match is None or name != "activation_func":
        raise ConfigError(f"{where}: {name}={value} can't be resolved; only activation_func: ${{act:NAME}} is known")
    if match[1] not in known:
        names = " or ".join(f"${{act:{activation}}}" for activation in known)
        raise ConfigError(f"{where}: {name}={value} is unknown; use {names}")
    return known[match[1]]
