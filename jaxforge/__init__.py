"""Trains vision-language and language models in JAX, with separate layouts for the encoder and the decoder."""

import importlib
import sys
import types
from typing import Any

__version__ = "0.1.0"

# The public API, by the module that holds it.  Loaded when first asked for, so that `import jaxforge` stays quick
# and doesn't start JAX before the command line has chosen a platform and the number of devices.
_EXPORTS = {
    "train": "jaxforge.training.loop",
    "plan": "jaxforge.training.planning",
    "load_config": "jaxforge.config.load",
    "ConfigError": "jaxforge.config.errors",
}

__all__ = ["__version__", *_EXPORTS]


class _Package(types.ModuleType):
    """`jaxforge.train` and `jaxforge.plan` are functions here and modules on the command line: the functions stay."""

    def __setattr__(self, name: str, value: Any) -> None:
        # importing a submodule sets it as an attribute of its package
        if not (name in _EXPORTS and isinstance(value, types.ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'jaxforge' has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_EXPORTS])
