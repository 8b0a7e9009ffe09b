"""All tests run on eight simulated CPU devices, whatever the machine has."""

import os

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
