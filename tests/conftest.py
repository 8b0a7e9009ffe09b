"""All tests run on eight simulated CPU devices, whatever the machine has."""

import functools
import gc
import os
from collections import Counter
from pathlib import Path

import pytest

# Before jax is imported.  No compilation cache: a multi-device CPU program that comes from it may wait for ever in its
# collectives.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"


def add_xla_flag(name: str, value: int) -> None:
    """Sets a flag that the user hasn't set."""
    flags = os.environ.get("XLA_FLAGS", "")
    if name not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {name}={value}".strip()


add_xla_flag("--xla_force_host_platform_device_count", 8)


def pytest_configure(config):
    # Tiny programs take their time in LLVM: unoptimised machine code compiles in half of the CPU time.  The flag binds
    # GPU code too, so the folder that compiles for GPUs is left as it is.
    if not any("gpu_compile" in argument for argument in config.args):
        add_xla_flag("--xla_backend_optimization_level", 0)


def pytest_collection_modifyitems(items):
    """Files with many slow tests come first: at the end no process should be left alone with one of them."""
    num_slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -num_slow[item.path])


@pytest.fixture(autouse=True, scope="module")
def few_memory_maps(request):
    """Frees the programs of a module where there are many.

    A compiled program of eight devices takes up to 2,000 of the 65,530 memory maps that Linux gives a process; XLA's
    compiler ends the process when there are no more.
    """
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 25_000:
        import jax

        for function in vars(request.module).values():
            if hasattr(function, "cache_clear"):
                function.cache_clear()
        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope="module")
def shared_programs():
    """Runs of a module that have the same config share a program, which is traced and compiled once."""
    from jaxforge.training import loop, program

    build = functools.cache(program.build_program)
    with pytest.MonkeyPatch.context() as patch:
        for module in (loop, program):
            patch.setattr(module, "build_program", build)
        yield
    build.cache_clear()
