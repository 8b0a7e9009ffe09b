"""Process start-up: joining the processes of a run, and simulated devices on the CPU."""

import os
import socket
import time

import jax

from jaxforge.cluster.launchers import ProcessSpec, detect
from jaxforge.config.errors import ConfigError

__all__ = ["ProcessSpec", "detect", "initialize", "simulate_devices"]

_GO = b"jaxforge go\n"


def initialize(spec: ProcessSpec | None, timeout_seconds: int = 300) -> None:
    """Join the processes of the run; call before anything starts a JAX backend.  None does nothing.

    Raises ConfigError, naming the coordinator's address and where it came from, when the processes can't meet within
    the timeout.  In these cases JAX's own client aborts the process, and a port in use makes it crash: so the
    processes meet over plain TCP first, and call JAX once all of them are there.
    """
    if spec is None:
        return
    deadline = time.monotonic() + timeout_seconds
    if spec.process_id == 0:
        _await_others(spec, deadline)
    else:
        _reach_coordinator(spec, deadline)
    _bypass_proxy(spec)
    if jax.config.jax_cpu_collectives_implementation is None:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        coordinator_address=spec.coordinator_address,
        num_processes=spec.num_processes,
        process_id=spec.process_id,
        local_device_ids=spec.local_device_ids,
        # JAX's own detection would replace local_device_ids=None by the local rank under SLURM.
        cluster_detection_method="deactivate",
        initialization_timeout=timeout_seconds,
    )


def simulate_devices(n: int) -> None:
    """Make JAX run on `n` simulated CPU devices in this process; call before anything starts a JAX backend.

    Does nothing when JAX already runs so.  Raises ConfigError when it runs otherwise, or when JAX_PLATFORMS asks for
    another platform.
    """
    if n < 1:
        raise ConfigError(f"train.simulated_devices={n} is not a number of devices; use 1 or more, or None")
    platforms = jax.config.jax_platforms
    if platforms and platforms.split(",")[0] != "cpu":
        raise ConfigError(
            f"train.simulated_devices={n} runs on the CPU, but JAX_PLATFORMS={platforms};"
            " unset JAX_PLATFORMS, or set train.simulated_devices=None to run on the real devices"
        )
    try:
        jax.config.update("jax_num_cpu_devices", n)
    except RuntimeError as error:  # the backend has started with another setting
        present, platform = jax.local_device_count(), jax.default_backend()
        if (present, platform) == (n, "cpu"):
            return
        there = f"train.simulated_devices={present if platform == 'cpu' else None}"
        raise ConfigError(
            f"train.simulated_devices={n}, but JAX already runs on {present} {platform} device(s) in this process;"
            f" start a new process (in a notebook: restart the kernel), or set {there}"
        ) from error
    # Beside a GPU the simulated devices would not be the default ones.
    jax.config.update("jax_platforms", "cpu")


def _await_others(spec: ProcessSpec, deadline: float) -> None:
    """Process 0: listen at the coordinator's port until every other process has called, then let all of them go."""
    port = int(spec.coordinator_address.rpartition(":")[2])
    absent = set(range(1, spec.num_processes))
    connections = []
    try:
        server = _listen(port, backlog=spec.num_processes)
    except OSError as error:
        raise ConfigError(
            f"process 0 can't listen on port {port} of coordinator {spec.coordinator_address} (from {spec.source}):"
            f" {error.strerror}; set JAXFORGE_COORDINATOR=host:port with a free port"
        ) from error
    with server:
        while absent:
            server.settimeout(max(deadline - time.monotonic(), 0.01))
            try:
                connection, _ = server.accept()
            except TimeoutError as error:
                raise ConfigError(
                    f"{len(absent)} of {spec.num_processes} processes did not reach coordinator"
                    f" {spec.coordinator_address} (from {spec.source}) in time: process"
                    f" {', '.join(str(rank) for rank in sorted(absent)[:8])}{', ...' if len(absent) > 8 else ''};"
                    " check that they started, or set JAXFORGE_COORDINATOR=host:port to an address of process 0"
                    " that they can reach"
                ) from error
            rank = _caller(connection)
            if rank in absent:
                absent.remove(rank)
                connections.append(connection)
            else:
                connection.close()
    for connection in connections:
        with connection:
            connection.sendall(_GO)
            # The caller closes first, so that no socket of ours lingers on the port that JAX binds next.
            connection.settimeout(5)
            try:
                connection.recv(1)
            except OSError:
                pass


def _reach_coordinator(spec: ProcessSpec, deadline: float) -> None:
    """Another process: call process 0 until it answers, then wait until it says that everybody is there."""
    host, _, port = spec.coordinator_address.rpartition(":")
    reason = "no answer"
    while (left := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection((host.strip("[]"), int(port)), timeout=min(left, 5)) as connection:
                connection.sendall(f"jaxforge {spec.process_id}\n".encode())
                connection.settimeout(max(deadline - time.monotonic(), 0.01))
                if connection.recv(len(_GO)) == _GO:
                    return
                reason = "process 0 left, or another program listens there"
        except OSError as error:  # not listening yet, host name not known, no route: process 0 may still be starting
            reason = error.strerror or str(error)
        time.sleep(0.2)
    raise ConfigError(
        f"process {spec.process_id} can't reach coordinator {spec.coordinator_address} (from {spec.source}): {reason};"
        " check that process 0 runs there, or set JAXFORGE_COORDINATOR=host:port to an address that every node reaches"
    )


def _bypass_proxy(spec: ProcessSpec) -> None:
    """Keep gRPC, which reads only the environment, from sending the coordinator's traffic to a site's web proxy."""
    if any(name in os.environ for name in ("grpc_proxy", "https_proxy", "http_proxy")):
        exceptions = os.environ.get("no_grpc_proxy") or os.environ.get("no_proxy")
        host = spec.coordinator_address.rpartition(":")[0].strip("[]")
        os.environ["no_grpc_proxy"] = f"{exceptions},{host}" if exceptions else host
        jax.config.update("jax_check_proxy_envs", False)  # its warning is about what the line above settles


def _listen(port: int, backlog: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog)
    return socket.create_server(("", port), backlog=backlog)


def _caller(connection: socket.socket) -> int | None:
    """The process id that a caller states; None for whatever else connects to the port."""
    connection.settimeout(5)
    try:
        words = connection.recv(64).split()
    except OSError:
        return None
    return int(words[1]) if len(words) == 2 and words[0] == b"jaxforge" and words[1].isdigit() else None
