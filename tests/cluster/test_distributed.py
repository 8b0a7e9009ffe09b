import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from jaxforge.cluster.distributed import ProcessSpec, initialize, simulate_devices
from jaxforge.config.errors import ConfigError

ROOT = Path(__file__).parents[2]

SUM_OVER_ALL_DEVICES = """
import os
import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxforge.cluster import build_mesh, detect, initialize, mesh_layout, simulate_devices

simulate_devices(4)
initialize(detect(os.environ), timeout_seconds=30)
mesh = build_mesh(mesh_layout(8, tensor=2))
rows, spec = np.arange(1.0, 9.0, dtype=np.float32), PartitionSpec(("replica", "tensor_inner"))
x = jax.make_array_from_callback((8,), NamedSharding(mesh, spec), lambda index: rows[index])
def sum_all(x):
    return jax.lax.psum(x, ("replica", "tensor_inner"))
total = jax.jit(jax.shard_map(sum_all, mesh=mesh, in_specs=spec, out_specs=PartitionSpec()))(x)
counts = jax.local_device_count(), jax.device_count()
print("result:", jax.process_index(), *counts, jax.default_backend(), float(total[0]))
"""


@pytest.fixture
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.fixture
def start():
    """Starts a Python program in a process of its own; whatever still runs at the end of the test is killed."""
    processes = []

    def start_process(code: str, **variables: str) -> subprocess.Popen:
        kept = {name: value for name, value in os.environ.items() if name not in ("JAX_PLATFORMS", "XLA_FLAGS")}
        processes.append(
            subprocess.Popen(
                [sys.executable, "-c", code],
                cwd=ROOT,
                env=kept | variables,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        )
        return processes[-1]

    yield start_process
    for process in processes:
        process.kill()
        process.communicate()


def test_two_processes_sum_over_their_eight_devices_even_with_a_web_proxy_set(start, free_port):
    shared = {"JAXFORGE_COORDINATOR": f"127.0.0.1:{free_port}", "JAXFORGE_NUM_PROCESSES": "2"}
    # Compute nodes often have a proxy in their environment, and gRPC would send the coordinator's traffic there.
    shared |= {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
    processes = [start(SUM_OVER_ALL_DEVICES, **shared, JAXFORGE_PROCESS_ID=str(rank)) for rank in range(2)]
    for rank, process in enumerate(processes):
        output, errors = process.communicate(timeout=50)
        assert process.returncode == 0, errors
        # Gloo's threads write to the same pipe, so a line of ours may follow a part of theirs.
        assert re.findall("result: (.*)", output) == [f"{rank} 4 8 cpu 36.0"]  # 1 + ... + 8


# F62


def test_a_coordinator_that_cannot_be_reached_is_named_with_its_setting(free_port):
    address = f"127.0.0.1:{free_port}"
    with pytest.raises(ConfigError) as error:
        initialize(ProcessSpec(address, 2, 1, None, f"JAXFORGE_COORDINATOR={address}"), timeout_seconds=1)
    assert f"process 1 can't reach coordinator {address} (from JAXFORGE_COORDINATOR={address})" in str(error.value)
    assert "Connection refused" in str(error.value)


def test_a_coordinator_whose_name_does_not_resolve_is_named_with_its_setting():
    spec = ProcessSpec("gpu001.invalid:20000", 2, 1, None, "SLURM_STEP_NODELIST=gpu001.invalid")
    with pytest.raises(ConfigError, match=r"gpu001.invalid:20000 \(from SLURM_STEP_NODELIST=gpu001.invalid\)"):
        initialize(spec, timeout_seconds=1)


def test_another_program_at_the_coordinators_port_is_not_taken_for_it():
    with socket.create_server(("127.0.0.1", 0)) as other:
        spec = ProcessSpec(f"127.0.0.1:{other.getsockname()[1]}", 2, 1, None, "MASTER_ADDR=127.0.0.1")
        with pytest.raises(ConfigError, match="can't reach coordinator"):
            initialize(spec, timeout_seconds=1)


def test_processes_that_do_not_come_are_named(free_port):
    with pytest.raises(ConfigError) as error:
        initialize(ProcessSpec(f"127.0.0.1:{free_port}", 3, 0, None, "MASTER_ADDR=127.0.0.1"), timeout_seconds=1)
    assert "2 of 3 processes did not reach coordinator" in str(error.value)
    assert "process 1, 2;" in str(error.value)


def test_a_coordinator_port_in_use_is_named():
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"can't listen on port {port} .*from MASTER_ADDR=127.0.0.1"):
            initialize(ProcessSpec(f"127.0.0.1:{port}", 2, 0, None, "MASTER_ADDR=127.0.0.1"), timeout_seconds=1)


# Simulated devices


def test_devices_that_are_already_simulated_are_left_alone():
    simulate_devices(jax.local_device_count())


def test_another_number_of_devices_than_jax_runs_on_is_refused_with_the_way_out():
    there = jax.local_device_count()
    with pytest.raises(ConfigError) as error:
        simulate_devices(there + 1)
    assert f"train.simulated_devices={there + 1}, but JAX already runs on {there} cpu device" in str(error.value)
    assert f"restart the kernel), or set train.simulated_devices={there}" in str(error.value)


def test_simulated_devices_on_another_platform_are_refused():
    before = jax.config.jax_platforms
    jax.config.update("jax_platforms", "cuda")
    try:
        with pytest.raises(ConfigError, match="train.simulated_devices=4 runs on the CPU, but JAX_PLATFORMS=cuda"):
            simulate_devices(4)
    finally:
        jax.config.update("jax_platforms", before)


def test_no_simulated_device_is_refused():
    with pytest.raises(ConfigError, match="train.simulated_devices=0"):
        simulate_devices(0)
