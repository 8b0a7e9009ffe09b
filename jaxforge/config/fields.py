"""What a config field says of itself."""

import dataclasses
from typing import Any


def field(default: Any, meaning: str, *, unit: str = "", flag: str = "", choices: tuple = (), planned: str = ""):
    """A dataclass field with what docs/config.md and the validator need to know about it."""
    metadata = {"meaning": meaning, "unit": unit, "flag": flag, "choices": choices, "planned": planned}
    return dataclasses.field(default=default, metadata=metadata)
