"""Kernels for GPUs, interpreted where the program is compiled for a CPU."""

import functools
from collections.abc import Callable
from typing import Any

from jax import lax


def interpreted_on_cpu(run: Callable, *arguments: Any) -> Any:
    """`run(*arguments, interpret=...)`, by the platform that the program is compiled for."""
    interpreted, compiled = (functools.partial(run, interpret=interpret) for interpret in (True, False))
    return lax.platform_dependent(*arguments, cpu=interpreted, default=compiled)
