"""What each launcher leaves in the environment, written out from its documentation, and what must follow."""

import pytest

from jaxforge.cluster.launchers import ProcessSpec, detect, expand_nodelist
from jaxforge.config.errors import ConfigError


def slurm(**changes: str) -> dict[str, str]:
    """Task 5 of 16: two nodes of 8 GPUs, one task per GPU, every task sees the GPUs of its node."""
    return {
        "SLURM_JOB_ID": "1000",
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": "16",
        "SLURM_STEP_NUM_TASKS": "16",
        "SLURM_PROCID": "5",
        "SLURM_LOCALID": "5",
        "SLURM_NODEID": "0",
        "SLURM_JOB_NODELIST": "gpu[003-004]",
        "SLURM_STEP_NODELIST": "gpu[003-004]",
        "SLURM_STEP_TASKS_PER_NODE": "8(x2)",
        "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7",
    } | changes


def per_node(**changes: str) -> dict[str, str]:
    """Task 1 of 2: two nodes, one task each."""
    tasks = {"SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
    return slurm(**tasks) | {"SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_NODEID": "1"} | changes


def open_mpi(**changes: str) -> dict[str, str]:
    """Rank 3 of 4: two nodes, two ranks each, Open MPI 4."""
    return {
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_RANK": "3",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
    } | changes


TORCHRUN = {"MASTER_ADDR": "node7", "MASTER_PORT": "29500", "WORLD_SIZE": "16", "RANK": "9"}
EXPLICIT = {"JAXFORGE_COORDINATOR": "10.0.0.1:1234", "JAXFORGE_NUM_PROCESSES": "4", "JAXFORGE_PROCESS_ID": "2"}


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


def local_devices(environ: dict[str, str]) -> tuple[int, ...] | None:
    spec = detect(environ)
    assert spec is not None
    return spec.local_device_ids


def test_no_launcher_is_one_process():
    assert detect({"HOME": "/root"}) is None


# SLURM (F61)


def test_slurm_with_one_process_per_node_takes_all_gpus_of_the_node():
    # port: 20000 + 1000 mod 8192
    assert detect(per_node()) == ProcessSpec("gpu003:21000", 2, 1, None, "SLURM_STEP_NODELIST=gpu[003-004]")


def test_slurm_with_one_process_per_gpu_takes_the_local_rank():
    assert detect(slurm()) == ProcessSpec("gpu003:21000", 16, 5, (5,), "SLURM_STEP_NODELIST=gpu[003-004]")


def test_slurm_without_visible_devices_takes_the_local_rank():
    assert local_devices(without(slurm(), "CUDA_VISIBLE_DEVICES")) == (5,)


def test_slurm_gpus_per_task_leaves_each_process_its_only_gpu():
    assert local_devices(slurm(CUDA_VISIBLE_DEVICES="5", SLURM_GPUS_PER_TASK="1")) is None
    assert local_devices(slurm(CUDA_VISIBLE_DEVICES="0")) is None  # bound by --gpu-bind alone


@pytest.mark.parametrize("setting", [{"SLURM_GPUS_PER_TASK": "h100:2"}, {"SLURM_TRES_PER_TASK": "cpu=8,gres/gpu=2"}])
def test_slurm_gpus_per_task_of_two_is_told_from_a_node_of_two_gpus(setting):
    two_tasks = slurm(SLURM_STEP_TASKS_PER_NODE="2(x8)", SLURM_LOCALID="1", CUDA_VISIBLE_DEVICES="2,3")
    assert local_devices(two_tasks | setting) is None
    assert local_devices(two_tasks) == (1,)


def test_slurm_gpus_per_task_without_binding_takes_its_block():
    unbound = slurm(SLURM_STEP_TASKS_PER_NODE="4(x4)", SLURM_LOCALID="3", SLURM_GPUS_PER_TASK="2")
    assert local_devices(unbound) == (6, 7)


def test_slurm_with_a_part_of_a_node_counts_from_its_first_visible_gpu():
    part = slurm(
        SLURM_STEP_NUM_TASKS="2", SLURM_STEP_TASKS_PER_NODE="2", SLURM_STEP_NODELIST="gpu003", SLURM_PROCID="1",
        SLURM_LOCALID="1", CUDA_VISIBLE_DEVICES="4,5",
    )  # fmt: skip
    assert detect(part) == ProcessSpec("gpu003:21000", 2, 1, (1,), "SLURM_STEP_NODELIST=gpu003")


def test_slurm_with_two_processes_of_four_gpus_each_splits_the_node():
    assert local_devices(slurm(SLURM_STEP_TASKS_PER_NODE="2(x8)", SLURM_LOCALID="1")) == (4, 5, 6, 7)


def test_slurm_with_uneven_nodes_looks_up_its_own_node():
    # nodes 0 and 1 have 7 tasks, node 2 has 1: its task takes both GPUs that it sees
    uneven = slurm(SLURM_STEP_NUM_TASKS="15", SLURM_STEP_TASKS_PER_NODE="7(x2),1", SLURM_PROCID="14")
    alone = uneven | {"SLURM_NODEID": "2", "SLURM_LOCALID": "0", "CUDA_VISIBLE_DEVICES": "0,1"}
    assert local_devices(alone) is None


def test_a_slurm_step_on_a_part_of_the_job_meets_on_its_own_first_node():
    spec = detect(per_node(SLURM_NTASKS="16", SLURM_JOB_NODELIST="gpu[001-009]", SLURM_STEP_ID="3"))
    assert spec is not None
    # 20000 + (1000 + 3 x 1009) mod 8192: another port than step 0
    assert (spec.coordinator_address, spec.num_processes) == ("gpu003:24027", 2)


def test_slurm_ports_stay_in_their_range_for_any_job():
    spec = detect(per_node(SLURM_JOB_ID="98765432"))
    assert spec is not None
    assert 20000 <= int(spec.coordinator_address.split(":")[1]) < 28192


@pytest.mark.parametrize(
    "environ",
    [
        without(slurm(), "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_LOCALID"),  # a shell under salloc
        without(slurm(SLURM_PROCID="0"), "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"),  # a batch script before srun
        slurm(SLURM_STEP_NUM_TASKS="1", SLURM_PROCID="0", SLURM_STEP_ID="4294967290"),  # salloc's interactive step
        {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "1", "SLURM_PROCID": "0"},
    ],
)
def test_slurm_without_several_tasks_is_one_process(environ):
    assert detect(environ) is None


def test_slurm_variables_that_are_missing_are_named():
    with pytest.raises(ConfigError, match="SLURM_STEP_NODELIST set without SLURM_LOCALID"):
        detect(without(slurm(), "SLURM_LOCALID"))
    with pytest.raises(ConfigError, match="without SLURM_TASKS_PER_NODE"):
        detect(without(slurm(), "SLURM_STEP_TASKS_PER_NODE"))


def test_slurm_variables_that_contradict_each_other_are_named():
    with pytest.raises(ConfigError, match="SLURM_PROCID=16 must be from 0 to SLURM_STEP_NUM_TASKS - 1"):
        detect(slurm(SLURM_PROCID="16"))
    with pytest.raises(ConfigError, match="SLURM_LOCALID=5 .* SLURM_STEP_TASKS_PER_NODE is 4"):
        detect(slurm(SLURM_STEP_TASKS_PER_NODE="4(x4)"))


def test_gpus_that_processes_cannot_share_equally_are_an_error():
    with pytest.raises(ConfigError, match="8 processes on this node, which can't share the 3 GPUs"):
        detect(slurm(CUDA_VISIBLE_DEVICES="0,1,2"))


@pytest.mark.parametrize(
    "text, names",
    [
        ("gpu[001-003,007],login1", ["gpu001", "gpu002", "gpu003", "gpu007", "login1"]),
        ("gpu7", ["gpu7"]),
        ("r[1-2]n[08-10]", ["r1n08", "r1n09", "r1n10", "r2n08", "r2n09", "r2n10"]),
        ("a-b[9-10]-ib", ["a-b9-ib", "a-b10-ib"]),
    ],
)
def test_node_lists_expand_to_names_with_their_zeros(text, names):
    assert expand_nodelist(text) == names


@pytest.mark.parametrize("text", ["", "gpu[001-", "gpu[a-b]", "gpu1,,gpu2"])
def test_a_malformed_node_list_is_an_error(text):
    with pytest.raises(ConfigError, match="JAXFORGE_COORDINATOR=host:port"):
        expand_nodelist(text)


# torchrun


def test_torchrun_takes_the_local_rank():
    environ = TORCHRUN | {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8"}
    assert detect(environ) == ProcessSpec("node7:29500", 16, 9, (1,), "MASTER_ADDR=node7, MASTER_PORT=29500")


def test_torchrun_with_one_process_per_node_takes_all_gpus():
    assert local_devices(TORCHRUN | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}) is None
    assert local_devices(TORCHRUN) is None


def test_torchrun_itself_keeps_master_port():
    spec = detect(TORCHRUN | {"TORCHELASTIC_RUN_ID": "none"})
    assert spec is not None and spec.coordinator_address == "node7:29501"


def test_torchrun_of_one_process_is_one_process():
    assert detect(TORCHRUN | {"WORLD_SIZE": "1", "RANK": "0"}) is None


@pytest.mark.parametrize(
    "environ, message",
    [
        (without(TORCHRUN, "RANK"), "MASTER_ADDR, MASTER_PORT, WORLD_SIZE set without RANK"),
        ({"RANK": "0"}, "RANK set without MASTER_ADDR, MASTER_PORT, WORLD_SIZE"),
        (TORCHRUN | {"RANK": "16"}, "RANK=16 must be from 0 to WORLD_SIZE - 1, and WORLD_SIZE is 16"),
        (TORCHRUN | {"WORLD_SIZE": "two"}, "WORLD_SIZE='two' is not a whole number"),
        (TORCHRUN | {"MASTER_PORT": "99999"}, "MASTER_PORT=99999 is not a host and a port"),
    ],
)
def test_torchrun_variables_that_do_not_fit_are_named(environ, message):
    with pytest.raises(ConfigError, match=message):
        detect(environ)


# Open MPI


def test_open_mpi_meets_on_the_host_of_mpirun():
    spec = detect(open_mpi())
    assert spec is not None
    host, port = spec.coordinator_address.split(":")
    assert host == "10.96.0.1" and 20000 <= int(port) < 28192
    assert (spec.num_processes, spec.process_id, spec.local_device_ids) == (4, 3, (1,))
    assert spec.source.startswith("OMPI_MCA_orte_hnp_uri=")


def test_open_mpi_on_one_node_meets_on_loopback():
    spec = detect(without(open_mpi(OMPI_COMM_WORLD_LOCAL_SIZE="4"), "OMPI_MCA_orte_hnp_uri"))
    assert spec is not None and spec.coordinator_address.startswith("127.0.0.1:")


def test_open_mpi_that_does_not_say_where_rank_0_runs_asks_for_the_coordinator():
    environ = without(open_mpi(PMIX_SERVER_URI41="prterun-a-1@0;tcp4://127.0.0.1:3"), "OMPI_MCA_orte_hnp_uri")
    with pytest.raises(ConfigError, match="JAXFORGE_COORDINATOR=host:20000"):
        detect(environ)
    given = environ | {"JAXFORGE_COORDINATOR": "node1:4000"}
    assert detect(given) == ProcessSpec("node1:4000", 4, 3, (1,), "JAXFORGE_COORDINATOR=node1:4000")


def test_mpirun_inside_a_slurm_job_counts_its_ranks_and_not_slurms_daemons():
    spec = detect(slurm(SLURM_STEP_NUM_TASKS="1", SLURM_PROCID="0") | open_mpi())
    assert spec is not None and (spec.num_processes, spec.process_id) == (4, 3)


# Explicit


def test_explicit_variables_come_before_every_launcher():
    spec = detect(EXPLICIT | TORCHRUN | slurm() | open_mpi())
    assert spec == ProcessSpec("10.0.0.1:1234", 4, 2, None, "JAXFORGE_COORDINATOR=10.0.0.1:1234")


def test_arguments_come_before_explicit_variables():
    spec = detect(EXPLICIT, coordinator="[::1]:99", num_processes=8, process_id=0)
    assert spec == ProcessSpec("[::1]:99", 8, 0, None, "coordinator=[::1]:99")


def test_torchrun_inside_a_slurm_step_comes_before_slurm():
    spec = detect(TORCHRUN | per_node())
    assert spec is not None and spec.num_processes == 16


def test_a_coordinator_alone_replaces_the_launchers_address():
    spec = detect(per_node(JAXFORGE_COORDINATOR="gpu003-ib:5000"))
    assert spec == ProcessSpec("gpu003-ib:5000", 2, 1, None, "JAXFORGE_COORDINATOR=gpu003-ib:5000")


def test_one_explicit_process_needs_no_coordinator():
    assert detect({}, num_processes=1, process_id=0) is None


@pytest.mark.parametrize(
    "environ, message",
    [
        (without(EXPLICIT, "JAXFORGE_PROCESS_ID"), "set without JAXFORGE_PROCESS_ID; set all three or none"),
        (without(EXPLICIT, "JAXFORGE_COORDINATOR"), "JAXFORGE_PROCESS_ID set without JAXFORGE_COORDINATOR"),
        ({"JAXFORGE_COORDINATOR": "a:1"}, "set without JAXFORGE_NUM_PROCESSES and JAXFORGE_PROCESS_ID"),
        (EXPLICIT | {"JAXFORGE_PROCESS_ID": "4"}, "JAXFORGE_PROCESS_ID=4 must be from 0 to JAXFORGE_NUM_PROCESSES - 1"),
        (EXPLICIT | {"JAXFORGE_COORDINATOR": "gpu001"}, "JAXFORGE_COORDINATOR=gpu001 is not a host and a port"),
    ],
)
def test_explicit_variables_that_do_not_fit_are_named(environ, message):
    with pytest.raises(ConfigError, match=message):
        detect(environ)
