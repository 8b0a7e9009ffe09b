"""The config: its schema, recipes and overrides, and the rules it must keep."""

from jaxforge.config.defaults import encoder_defaults
from jaxforge.config.errors import ConfigError
from jaxforge.config.hf_config import hf_model
from jaxforge.config.load import default_config, load_config, model_config
from jaxforge.config.resolve import resolve, value_origins
from jaxforge.config.run_yaml import from_yaml, to_yaml
from jaxforge.config.schema import Config
from jaxforge.config.validate import validate

__all__ = [
    "Config",
    "ConfigError",
    "default_config",
    "encoder_defaults",
    "from_yaml",
    "hf_model",
    "load_config",
    "model_config",
    "resolve",
    "to_yaml",
    "validate",
    "value_origins",
]
