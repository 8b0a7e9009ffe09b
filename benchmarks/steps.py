"""Times a train step on simulated CPU devices: what the benchmarks of layouts share."""

import dataclasses
import os
import time

# before JAX is imported
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax  # noqa: E402

from jaxforge.cluster import MeshLayout, build_mesh
from jaxforge.config.derived import num_microbatches
from jaxforge.config.schema import Config
from jaxforge.data.loader import Loader
from jaxforge.data.sources import train_source
from jaxforge.training.program import build_program


def seconds_per_step(config: Config, num_devices: int, steps: int = 6) -> float:
    """The shortest of `steps` steps after a first one that isn't counted."""
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, steps=steps + 1))
    mesh = build_mesh(MeshLayout.from_config(config, num_devices), jax.devices()[:num_devices])
    program = build_program(config, mesh, "cpu")
    state = program.initialise(0)
    times = []
    with Loader(train_source(config), config, mesh, num_microbatches(config, num_devices)) as loader:
        for batch, _ in loader:
            jax.block_until_ready(batch)
            began = time.perf_counter()
            state, metrics = program.train_step(state, batch)
            jax.block_until_ready(metrics)
            times.append(time.perf_counter() - began)
    return min(times[1:])
