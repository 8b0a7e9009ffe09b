"""Loads recipes and model files, and applies the command line's overrides."""

import importlib.util
import inspect
import re
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from jaxforge.config.defaults import CONFIGS, complete_encoder, encoder_from_yaml, find_file, group_defaults, locked
from jaxforge.config.errors import ConfigError
from jaxforge.config.hf_config import hf_model
from jaxforge.config.origins import record_origins, set_value
from jaxforge.config.schema import Config
from jaxforge.config.values import annotations, close_names, group_class, parse, schema_paths, unknown_field

COMMAND_LINE = "command line"


def default_config() -> ConfigDict:
    """Every field of the schema at its default; a field that doesn't exist can't be set."""
    return locked(group_defaults(Config))


def model_config(name: str) -> ConfigDict:
    """What `configs/models/<name>.py` gives for `config.model`.

    Raises:
      ConfigError: if there is no such file, naming those there are.
    """
    file = CONFIGS / "models" / f"{name}.py"
    known = sorted(path.stem for path in file.parent.glob("*.py") if path.stem != "__init__")
    if name not in known:
        raise ConfigError(f"no model {name!r}{close_names(name, known)} (known: {', '.join(known)})")
    model = _run_get_config(file, None)
    record_origins(model, f"configs/models/{name}.py")
    return model


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> ConfigDict:
    """Runs a recipe's `get_config()` and applies overrides to what it returns.

    Args:
      path: a recipe's path, from the working directory or else from the packaged configs; `path:argument` calls
        `get_config(argument)`.
      overrides: such as `train.steps=20` or `--config.train.steps=20`.  They win over the recipe and over an encoder's
        YAML file, wherever in the list the file is named.

    Raises:
      ConfigError: if the recipe isn't there, or names an unknown field, or an override can't be applied.
    """
    recipe, separator, argument = str(path).partition(".py:")
    recipe += ".py" if separator else ""
    file = find_file(recipe)
    if file is None:
        known = sorted(f"configs/{found.name}" for found in CONFIGS.glob("*.py") if found.stem != "__init__")
        raise ConfigError(f"no recipe at {recipe}{close_names(recipe, known)} (known: {', '.join(known)})")
    config = _run_get_config(file, argument if separator else None)
    missing = [group for group in annotations(Config) if group not in config]
    if missing:
        raise ConfigError(f"{file}: get_config() returned no {', '.join(missing)}; start it from default_config()")
    record_origins(config, recipe)
    # a whole encoder before its fields, so that the order on the command line doesn't matter
    for field, text in sorted(map(_split_override, overrides), key=lambda item: item[0].count(".")):
        _apply_override(config, field, text)
    config.model.encoder = complete_encoder(config.model.encoder)
    return config


def _run_get_config(file: Path, argument: str | None) -> ConfigDict:
    spec = importlib.util.spec_from_file_location(f"jaxforge_config_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{file} isn't a Python file; a recipe is one with a get_config() function")
    module = importlib.util.module_from_spec(spec)
    arguments = () if argument is None else (argument,)
    try:
        spec.loader.exec_module(module)
        get_config = getattr(module, "get_config", None)
        if get_config is None:
            raise ConfigError(f"{file} has no get_config(); define it to return the config")
        try:
            inspect.signature(get_config).bind(*arguments)
        except TypeError as error:
            call = f"get_config({argument!r})" if arguments else "get_config()"
            raise ConfigError(f"{file} can't be called as {call}: {error}") from error
        config = get_config(*arguments)
    except (AttributeError, KeyError) as error:
        raise _unknown_field_in_recipe(error, file) from error
    if not isinstance(config, ConfigDict):
        raise ConfigError(f"{file}: get_config() returned {type(config).__name__}; return a ConfigDict")
    return config


def _unknown_field_in_recipe(error: Exception, file: Path) -> Exception:
    """A ConfigError for a field that ml_collections refused; any other error as it is."""
    frames = traceback.extract_tb(error.__traceback__)
    in_file = [frame for frame in frames if Path(frame.filename).resolve() == file.resolve()]
    if "ml_collections" not in frames[-1].filename or not in_file:
        return error
    # ml_collections quotes the name, in one or more layers: 'Key "x" does not exist' where it was set, "'x'" where read
    message = str(error.args[0])
    quoted = re.search(r"Key \W*(\w+)\W* does not exist", message) or re.search(r"(\w+)", message)
    name = quoted[1] if quoted else message
    fields = {path.rpartition(".")[2] for path in schema_paths()} | set(annotations(Config))
    where = f"{file}, line {in_file[-1].lineno}: {in_file[-1].line}"
    return ConfigError(f"{where}\n  no such field {name!r}{close_names(name, fields - {name})}")


def _split_override(override: str) -> tuple[str, str]:
    field, separator, text = override.removeprefix("--").partition("=")
    field = field.removeprefix("config.")
    if not separator or not field:
        raise ConfigError(f"override {override!r} has no value; write it as --config.train.steps=20")
    return field, text


def _apply_override(config: ConfigDict, path: str, text: str) -> None:
    *groups, name = path.split(".")
    node: Any = config
    cls: type = Config
    for depth, group in enumerate(groups):
        parent = ".".join(groups[: depth + 1])
        if group not in annotations(cls):
            raise unknown_field(parent, cls)
        inner = group_class(annotations(cls)[group])
        if inner is None:
            raise ConfigError(f"{parent} is a field, it has no field {'.'.join([*groups[depth + 1 :], name])!r}")
        node, cls = _descend(node, group, path, text), inner
    if name not in annotations(cls):
        raise unknown_field(path, cls)
    annotation = annotations(cls)[name]
    if path == "model.encoder":
        node.encoder = None if text.lower() == "none" else encoder_from_yaml(text)
    elif path == "model.projector" and text.lower() == "none":
        node.projector = None
    elif path == "model":
        node.model = hf_model(text, node.model)
    elif group_class(annotation) is not None:
        raise ConfigError(f"{path}={text}: {path} is a group of fields; set one of them, as --config.{path}.NAME=VALUE")
    else:
        set_value(node, name, parse(text, annotation, path), COMMAND_LINE)


def _descend(node: Any, group: str, path: str, text: str) -> ConfigDict:
    """The group inside `node`; an encoder's YAML file is read, and a projector is made where it is None."""
    child = getattr(node, group, None)
    if group == "encoder" and isinstance(child, (str, Path)):
        child = encoder_from_yaml(str(child))
    elif group == "projector" and child is None:
        child = ConfigDict(type_safe=False)
    elif group == "encoder" and child is None:
        raise ConfigError(
            f"{path}={text}: model.encoder is None, so it has no fields;"
            " give one first, as --config.model.encoder=vit.yaml"
        )
    if not isinstance(child, ConfigDict):
        raise ConfigError(f"{path}={text}: {path.rpartition('.')[0]}={child!r} is not a group of fields")
    setattr(node, group, child)
    return child
