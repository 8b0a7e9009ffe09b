"""What a launcher left in the environment: how many processes the run has, which one this is, and its GPUs.

Everything here is pure: it reads a mapping of variables and starts nothing.
"""

import dataclasses
import re
import zlib
from collections.abc import Mapping, Sequence

from jaxforge.config.errors import ConfigError

# Coordinator ports that are derived rather than given: below Linux's ephemeral range (from 32768), above the ports
# that SLURM's daemons and common services listen on.
FIRST_PORT = 20000
NUM_PORTS = 8192

_EXPLICIT = ("JAXFORGE_COORDINATOR", "JAXFORGE_NUM_PROCESSES", "JAXFORGE_PROCESS_ID")
_TORCHRUN = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")
_OPEN_MPI = ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")


@dataclasses.dataclass(frozen=True)
class ProcessSpec:
    """One process of a run of several.

    `local_device_ids` are indexes among the GPUs that the launcher left visible; None takes all of them.
    `source` is the setting that the coordinator's address came from, for messages.
    """

    coordinator_address: str
    num_processes: int
    process_id: int
    local_device_ids: tuple[int, ...] | None
    source: str


def detect(
    environ: Mapping[str, str],
    *,
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
) -> ProcessSpec | None:
    """The process that the launcher's variables describe, or None for a run of one process.

    The first that applies: the arguments or JAXFORGE_COORDINATOR (host:port), JAXFORGE_NUM_PROCESSES and
    JAXFORGE_PROCESS_ID; torchrun's variables; Open MPI's; SLURM's.  Open MPI comes before SLURM because `mpirun`
    inside a SLURM job starts its daemons through SLURM, whose variables then count daemons.  A coordinator given
    alone replaces the address that a launcher implies.  Raises ConfigError for partial or contradictory variables.
    """
    address, source = coordinator, f"coordinator={coordinator}"
    if address is None and _EXPLICIT[0] in environ:
        address, source = environ[_EXPLICIT[0]], f"{_EXPLICIT[0]}={environ[_EXPLICIT[0]]}"
    count = _optional(environ, _EXPLICIT[1]) if num_processes is None else num_processes
    rank = _optional(environ, _EXPLICIT[2]) if process_id is None else process_id

    if count is not None or rank is not None:
        return _explicit(address, count, rank, source)
    spec = _launched(environ)
    if spec is None and address is not None:
        raise ConfigError(f"{source} is set without {_EXPLICIT[1]} and {_EXPLICIT[2]}; set all three or none")
    if spec is None or spec.num_processes == 1:
        return None
    if address is not None:
        spec = dataclasses.replace(spec, coordinator_address=address, source=source)
    if not spec.coordinator_address:
        raise ConfigError(
            f"OMPI_COMM_WORLD_SIZE={spec.num_processes} spans several nodes and this Open MPI doesn't say where rank 0"
            f" runs; give its host to every process: mpirun -x JAXFORGE_COORDINATOR=host:{FIRST_PORT}"
        )
    return _with_valid_address(spec)


def expand_nodelist(text: str) -> list[str]:
    """Host names of a SLURM node list: `gpu[001-003,007],login1` gives 5 names.  Raises ConfigError if malformed."""
    if not re.fullmatch(r"(?:[^\[\],\s]|\[[^\[\]]+\])+(?:,(?:[^\[\],\s]|\[[^\[\]]+\])+)*", text):
        raise ConfigError(f"cannot read the SLURM node list {text!r}; set JAXFORGE_COORDINATOR=host:port")
    names: list[str] = []
    for item in re.findall(r"(?:[^\[\],]|\[[^\[\]]+\])+", text):
        expanded = [""]
        for literal, ranges in re.findall(r"([^\[\]]+)|\[([^\[\]]+)\]", item):
            choices = [literal] if literal else _expand_ranges(ranges)
            expanded = [head + tail for head in expanded for tail in choices]
        names += expanded
    return names


def _explicit(address: str | None, count: int | None, rank: int | None, source: str) -> ProcessSpec | None:
    values = dict(zip(_EXPLICIT, (address, count, rank), strict=True))
    needed = _EXPLICIT[1:] if count == 1 else _EXPLICIT  # one process coordinates with nobody
    missing = [name for name in needed if values[name] is None]
    if missing or count is None or rank is None:
        given = [name for name in _EXPLICIT if values[name] is not None]
        raise ConfigError(f"{' and '.join(given)} set without {' and '.join(missing)}; set all three or none")
    _check_rank(_EXPLICIT[2], rank, _EXPLICIT[1], count)
    if count == 1:
        return None
    return _with_valid_address(ProcessSpec(str(address), count, rank, None, source))


def _launched(environ: Mapping[str, str]) -> ProcessSpec | None:
    """What the innermost launcher says; its address is empty where it can't be derived."""
    if any(name in environ for name in _TORCHRUN):
        return _torchrun(environ)
    if "OMPI_COMM_WORLD_SIZE" in environ:
        return _open_mpi(environ)
    # Only srun sets SLURM_STEP_ID: a shell under salloc, or a batch script, has the job's variables and one process.
    if "SLURM_JOB_ID" in environ and "SLURM_STEP_ID" in environ:
        return _slurm(environ)
    return None


def _torchrun(environ: Mapping[str, str]) -> ProcessSpec:
    _require(environ, _TORCHRUN, "torchrun")
    rank, count = _rank(environ, "RANK", "WORLD_SIZE")
    port = _number(environ, "MASTER_PORT")
    if "TORCHELASTIC_RUN_ID" in environ:
        port += 1  # torchrun's own store listens on MASTER_PORT
    return ProcessSpec(
        f"{environ['MASTER_ADDR']}:{port}",
        count,
        rank,
        _local_devices(environ, "LOCAL_RANK", "LOCAL_WORLD_SIZE", _optional(environ, "LOCAL_WORLD_SIZE")),
        f"MASTER_ADDR={environ['MASTER_ADDR']}, MASTER_PORT={environ['MASTER_PORT']}",
    )


def _open_mpi(environ: Mapping[str, str]) -> ProcessSpec:
    _require(environ, _OPEN_MPI, "Open MPI")
    rank, count = _rank(environ, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    size_name = "OMPI_COMM_WORLD_LOCAL_SIZE"
    local_count = _optional(environ, size_name)
    uri = environ.get("OMPI_MCA_orte_hnp_uri", "")
    # Open MPI 4 gives mpirun's host: 1531576320.0;tcp://10.96.0.1,10.148.0.1:34911.  PMIX_SERVER_URI* of later
    # versions is no substitute: it is each node's own daemon, so ranks on different nodes would disagree.
    match = re.search(r"tcp://([^,:]+)|tcp6://\[([^,\]]+)", uri)
    port = _port(zlib.crc32((uri or environ.get("PMIX_NAMESPACE", "")).encode()))
    address, source = "", ""
    if local_count == count:
        address, source = f"127.0.0.1:{port}", f"{size_name}={local_count}"
    elif match:
        host = match[1] or f"[{match[2]}]"
        address, source = f"{host}:{port}", f"OMPI_MCA_orte_hnp_uri={uri}"
    devices = _local_devices(environ, "OMPI_COMM_WORLD_LOCAL_RANK", size_name, local_count)
    return ProcessSpec(address, count, rank, devices, source)


def _slurm(environ: Mapping[str, str]) -> ProcessSpec:
    # The step's variables rather than the job's: a step may have a part of the job's nodes and tasks.
    count_name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    nodes_name = "SLURM_STEP_NODELIST" if "SLURM_STEP_NODELIST" in environ else "SLURM_JOB_NODELIST"
    _require(environ, (count_name, "SLURM_PROCID"), "SLURM")
    rank, count = _rank(environ, "SLURM_PROCID", count_name)
    if count == 1:  # `srun --pty bash`, notebooks: nothing to join, so nothing more is needed
        return ProcessSpec("", 1, 0, None, count_name)
    _require(environ, (nodes_name, "SLURM_LOCALID"), "SLURM")
    job, step = _number(environ, "SLURM_JOB_ID"), _number(environ, "SLURM_STEP_ID")
    host = expand_nodelist(environ[nodes_name])[0]
    tasks_name, tasks = _tasks_on_this_node(environ)
    return ProcessSpec(
        f"{host}:{_port(job + 1009 * step)}",  # steps of a job, and neighbouring jobs on a shared node, differ
        count,
        rank,
        _local_devices(environ, "SLURM_LOCALID", tasks_name, tasks),
        f"{nodes_name}={environ[nodes_name]}",
    )


def _tasks_on_this_node(environ: Mapping[str, str]) -> tuple[str, int]:
    """The variable, and from its `8(x2),3` 8 tasks on each of the first two nodes, 3 on the third."""
    name = "SLURM_STEP_TASKS_PER_NODE" if "SLURM_STEP_TASKS_PER_NODE" in environ else "SLURM_TASKS_PER_NODE"
    _require(environ, (name,), "SLURM")
    tasks: list[int] = []
    for item in environ[name].split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item.strip())
        if not match:
            raise ConfigError(f"{name}={environ[name]} is not a list like 8(x2),3; start the processes with srun")
        tasks += [int(match[1])] * int(match[2] or 1)
    if len(set(tasks)) == 1:
        return name, tasks[0]
    _require(environ, ("SLURM_NODEID",), "SLURM")
    node = _number(environ, "SLURM_NODEID")
    if node >= len(tasks):
        raise ConfigError(
            f"SLURM_NODEID={node}, but {name}={environ[name]} lists {len(tasks)} nodes; start the processes with srun"
        )
    return name, tasks[node]


def _local_devices(
    environ: Mapping[str, str], rank_name: str, count_name: str, count: int | None
) -> tuple[int, ...] | None:
    """Which of the visible GPUs this process takes, None for all: an equal share of them for each local process.

    `count` is the number of processes on this node, from variable `count_name`; None if the launcher doesn't say.
    """
    rank = _optional(environ, rank_name)
    if rank is None or count == 1:
        return None
    if count is not None:
        _check_rank(rank_name, rank, count_name, count)
    visible = _visible_gpus(environ)
    per_task = _gpus_per_task(environ)
    if visible in (0, 1) or (per_task is not None and visible in (None, per_task)):
        return None  # the launcher already left this process its own GPUs alone, or there are none
    if visible is None or count is None:
        return (rank,)
    share = per_task or visible // count
    if share * count > visible or (per_task is None and visible % count):
        raise ConfigError(
            f"{count_name} gives {count} processes on this node, which can't share the {visible} GPUs of"
            f" CUDA_VISIBLE_DEVICES={environ['CUDA_VISIBLE_DEVICES']}; start one process per node or one per GPU"
        )
    return tuple(range(rank * share, (rank + 1) * share))


def _visible_gpus(environ: Mapping[str, str]) -> int | None:
    if "CUDA_VISIBLE_DEVICES" not in environ:
        return None
    entries = [entry.strip() for entry in environ["CUDA_VISIBLE_DEVICES"].split(",")]
    return len([entry for entry in entries if entry not in ("", "-1", "NoDevFiles")])


def _gpus_per_task(environ: Mapping[str, str]) -> int | None:
    """What `--gpus-per-task` leaves: `2` or `h100:2`, and in newer SLURM `cpu=8,gres/gpu:h100=2`."""
    match = re.fullmatch(r"(?:[^,]*:)?(\d+)", environ.get("SLURM_GPUS_PER_TASK", ""))
    match = match or re.search(r"gres/gpu[^,]*[=:](\d+)", environ.get("SLURM_TRES_PER_TASK", ""))
    return int(match[1]) if match else None


def _with_valid_address(spec: ProcessSpec) -> ProcessSpec:
    host, _, port = spec.coordinator_address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"{spec.source} is not a host and a port; use for example gpu001:{FIRST_PORT}")
    return spec


def _require(environ: Mapping[str, str], names: Sequence[str], launcher: str) -> None:
    missing = [name for name in names if name not in environ]
    if missing:
        given = [name for name in names if name in environ] or [f"a process started by {launcher}"]
        raise ConfigError(
            f"{', '.join(given)} set without {', '.join(missing)}; set all of {launcher}'s variables or unset them all"
        )


def _rank(environ: Mapping[str, str], rank_name: str, count_name: str) -> tuple[int, int]:
    rank, count = _number(environ, rank_name), _number(environ, count_name)
    _check_rank(rank_name, rank, count_name, count)
    return rank, count


def _check_rank(rank_name: str, rank: int, count_name: str, count: int) -> None:
    if not 0 <= rank < count:
        raise ConfigError(f"{rank_name}={rank} must be from 0 to {count_name} - 1, and {count_name} is {count}")


def _optional(environ: Mapping[str, str], name: str) -> int | None:
    return _number(environ, name) if name in environ else None


def _number(environ: Mapping[str, str], name: str) -> int:
    if not environ[name].strip().isdecimal():
        raise ConfigError(f"{name}={environ[name]!r} is not a whole number; set it to 0 or more, or unset it")
    return int(environ[name])


def _port(seed: int) -> int:
    return FIRST_PORT + seed % NUM_PORTS


def _expand_ranges(text: str) -> list[str]:
    """`001-003,007` gives 001, 002, 003, 007."""
    numbers: list[str] = []
    for item in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", item)
        if not match:
            raise ConfigError(f"cannot read the SLURM node range [{text}]; set JAXFORGE_COORDINATOR=host:port")
        first, last = match[1], match[2] or match[1]
        numbers += [f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1)]
    return numbers
