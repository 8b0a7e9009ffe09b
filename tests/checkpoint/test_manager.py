"""The checkpoint manager: layouts, retention, damage (F65), other models, and kills."""

import logging
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxforge.checkpoint import CheckpointManager
from jaxforge.config.errors import ConfigError

SPECS = {"params": {"w": ("a", "b"), "bias": (None,)}, "opt": {"mu": (None, "b"), "count": ()}}
# Random bits don't compress, so that their file is the largest of the checkpoint, and a flipped bit in it is data.
VALUES = {
    "params": {
        "w": np.random.default_rng(0).standard_normal((64, 32)).astype(np.float32),
        "bias": np.arange(8).astype(jnp.bfloat16),
    },
    "opt": {"mu": np.random.default_rng(1).standard_normal((16, 8)).astype(np.float32), "count": np.int32(3)},
}


def shardings(shape: tuple[int, int]):
    """The shardings of SPECS on a mesh of this shape (a, b), over the first devices."""
    devices = np.array(jax.devices()[: shape[0] * shape[1]]).reshape(shape)
    mesh = jax.sharding.Mesh(devices, ("a", "b"))
    is_spec = lambda node: isinstance(node, tuple)  # noqa: E731
    return jax.tree.map(lambda spec: NamedSharding(mesh, PartitionSpec(*spec)), SPECS, is_leaf=is_spec)


def make_state(shape=(1, 1), add=0):
    return jax.device_put(jax.tree.map(lambda value: (value + add).astype(value.dtype), VALUES), shardings(shape))


def abstract(shape=(1, 1)):
    make = lambda value, sharding: jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)  # noqa: E731
    return jax.tree.map(make, VALUES, shardings(shape))


def save_steps(directory: Path, *steps: int, keep=3):
    """Checkpoints whose params/w is VALUES' plus the step."""
    manager = CheckpointManager(directory, keep=keep, save_every_steps=1)
    for step in steps:
        manager.save(step, make_state(add=step), {"step": step})
    manager.close()


def restore(directory: Path, shape=(1, 1)):
    manager = CheckpointManager(directory, keep=3, save_every_steps=1)
    try:
        return manager.restore(abstract(shape))
    finally:
        manager.close()


def assert_is_step(restored, step: int):
    found, state, metadata = restored
    assert found == step and metadata == {"step": step}
    np.testing.assert_array_equal(state["params"]["w"], VALUES["params"]["w"] + np.float32(step))
    assert int(state["opt"]["count"]) == 3 + step


def largest_file(folder: Path) -> Path:
    return max((file for file in folder.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)


def test_without_checkpoints_there_is_nothing_to_restore(tmp_path):
    assert restore(tmp_path / "checkpoints") is None


@pytest.mark.parametrize("saved, loaded", [((4, 2), (2, 4)), ((4, 2), (1, 1)), ((1, 1), (2, 2)), ((2, 1), (1, 8))])
def test_a_checkpoint_loads_at_any_other_layout(tmp_path, saved, loaded):
    manager = CheckpointManager(tmp_path, keep=1, save_every_steps=5)
    manager.save(5, make_state(saved), {"config": {"train.steps": 5}})
    manager.wait()
    step, state, metadata = manager.restore(abstract(loaded))
    manager.close()
    assert step == 5 and metadata == {"config": {"train.steps": 5}}
    jax.tree.map(np.testing.assert_array_equal, state, VALUES)
    assert jax.tree.map(lambda array: array.sharding, state) == shardings(loaded)
    assert jax.tree.map(lambda array: array.dtype, state) == jax.tree.map(lambda value: value.dtype, VALUES)


def test_it_saves_every_n_steps_and_keeps_the_newest(tmp_path):
    manager = CheckpointManager(tmp_path, keep=2, save_every_steps=2)
    saved = [step for step in range(1, 8) if manager.maybe_save(step, make_state(add=step), {})]
    manager.wait()
    assert saved == [2, 4, 6]
    assert manager.latest_step() == 6
    manager.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["4", "6"]


def test_save_every_zero_steps_saves_only_when_told_to(tmp_path):
    manager = CheckpointManager(tmp_path, keep=2, save_every_steps=0)
    assert not manager.maybe_save(10, make_state(), {})
    assert manager.save(11, make_state(), {})
    assert not manager.save(11, make_state(), {}), "the last step was saved already"
    manager.close()
    assert [path.name for path in tmp_path.iterdir()] == ["11"]


def test_donating_the_state_after_a_save_does_not_change_what_is_saved(tmp_path):
    manager = CheckpointManager(tmp_path, keep=1, save_every_steps=1)
    step = jax.jit(lambda state: jax.tree.map(lambda array: array * 0, state), donate_argnums=0)
    state = make_state((4, 2))
    manager.save(1, state, {})
    for _ in range(5):
        state = step(state)
    jax.block_until_ready(state)
    manager.wait()
    _, restored, _ = manager.restore(abstract())
    manager.close()
    jax.tree.map(np.testing.assert_array_equal, restored, VALUES)


def truncate(folder: Path):
    file = largest_file(folder)
    os.truncate(file, file.stat().st_size // 2)


def truncate_by_one_byte(folder: Path):
    file = largest_file(folder)
    os.truncate(file, file.stat().st_size - 1)


def flip_one_bit(folder: Path):
    file = largest_file(folder)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def delete_largest_file(folder: Path):
    largest_file(folder).unlink()


def empty_metadata(folder: Path):
    (folder / "metadata" / "metadata").write_bytes(b"")


def delete_checksums(folder: Path):
    (folder / "checksums.json").unlink()


@pytest.mark.parametrize(
    "harm", [truncate, truncate_by_one_byte, flip_one_bit, delete_largest_file, empty_metadata, delete_checksums]
)
def test_f65_a_damaged_newest_checkpoint_falls_back_to_the_one_before(tmp_path, caplog, harm):
    save_steps(tmp_path, 10, 20)
    harm(tmp_path / "20")
    with caplog.at_level(logging.WARNING, logger="jaxforge"):
        assert_is_step(restore(tmp_path), 10)
    (message,) = [record.getMessage() for record in caplog.records if record.name.startswith("jaxforge")]
    assert "step 20 is damaged" in message and "resuming from step 10" in message and "\n" not in message
    # Nothing is lost, and the run can save that step again.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["10", "20.broken"]
    save_steps(tmp_path, 20)
    assert_is_step(restore(tmp_path), 20)


def test_f65_a_step_damaged_twice_is_kept_twice(tmp_path):
    save_steps(tmp_path, 10, 20)
    truncate(tmp_path / "20")
    restore(tmp_path)
    save_steps(tmp_path, 20)
    truncate(tmp_path / "20")
    assert_is_step(restore(tmp_path), 10)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["10", "20.broken", "20.broken2"]


def test_if_no_checkpoint_is_whole_the_error_says_why_and_nothing_is_touched(tmp_path):
    save_steps(tmp_path, 10, 20)
    delete_largest_file(tmp_path / "10")
    truncate(tmp_path / "20")
    files = {path: path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()}
    whole_message = "no checkpoint in .* is whole(.|\n)*step 20: .*bytes(.|\n)*step 10: .*missing"
    with pytest.raises(ConfigError, match=whole_message):
        restore(tmp_path)
    assert {path: path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()} == files


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda tree: tree["params"].pop("bias"), r"params/bias: saved bfloat16\[8\], the config makes nothing"),
        (
            lambda tree: tree["params"].update(v=tree["params"]["w"]),
            r"params/v: saved nothing, the config makes float32\[64, 32\]",
        ),
        (
            lambda tree: tree["opt"].update(mu=jax.ShapeDtypeStruct((16, 9), jnp.float32)),
            r"opt/mu: saved float32\[16, 8\], the config makes float32\[16, 9\]",
        ),
        (
            lambda tree: tree["opt"].update(mu=jax.ShapeDtypeStruct((16, 8), jnp.bfloat16)),
            r"opt/mu: saved float32\[16, 8\], the config makes bfloat16\[16, 8\]",
        ),
    ],
)
def test_a_checkpoint_of_another_model_is_an_error_and_stays_where_it_is(tmp_path, change, message):
    save_steps(tmp_path, 10, 20)
    tree = abstract()
    change(tree)
    manager = CheckpointManager(tmp_path, keep=2, save_every_steps=1)
    with pytest.raises(ConfigError, match=message):
        manager.restore(tree)
    manager.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["10", "20"]


def test_an_unfinished_folder_of_a_killed_run_is_removed_and_its_step_can_be_saved(tmp_path):
    save_steps(tmp_path, 10)
    unfinished = tmp_path / "20.orbax-checkpoint-tmp" / "state"
    unfinished.mkdir(parents=True)
    (unfinished / "manifest.ocdbt").write_bytes(b"half")
    assert_is_step(restore(tmp_path), 10)
    save_steps(tmp_path, 20)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["10", "20"]


def start_process(code: str, *arguments: object, num_devices: int) -> subprocess.Popen:
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={num_devices}",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), str(Path(__file__).parent)]),
    }
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_kill_9_in_the_middle_of_a_save_leaves_the_checkpoint_before(tmp_path):
    # The second state is large enough (256 MB that don't compress) for its files to take a while.
    process = start_process(
        """
        import sys, numpy as np, jax
        from jaxforge.checkpoint import CheckpointManager
        manager = CheckpointManager(sys.argv[1], keep=2, save_every_steps=1)
        manager.save(1, {"x": jax.numpy.ones(8)}, {})
        manager.wait()
        manager.save(2, {"x": jax.numpy.asarray(np.random.default_rng(0).random(2**26, np.float32))}, {})
        print("saving", flush=True)
        manager.wait()
        print("saved", flush=True)
        """,
        tmp_path,
        num_devices=1,
    )
    try:
        assert process.stdout.readline() == "saving\n"
        # Orbax makes the folder in the background
        deadline = time.monotonic() + 60
        while not (tmp_path / "2.orbax-checkpoint-tmp").exists() and time.monotonic() < deadline:
            time.sleep(0.001)
    finally:
        process.send_signal(signal.SIGKILL)
        output, _ = process.communicate()
    assert output == "", "the save had ended before the kill, so that nothing was tested"
    assert (tmp_path / "2.orbax-checkpoint-tmp").exists()
    manager = CheckpointManager(tmp_path, keep=2, save_every_steps=1)
    step, state, _ = manager.restore({"x": jax.ShapeDtypeStruct((8,), jnp.float32, sharding=make_one_device())})
    manager.close()
    assert step == 1 and state["x"].tolist() == [1.0] * 8
    assert [path.name for path in tmp_path.iterdir()] == ["1"]


def make_one_device():
    return jax.sharding.SingleDeviceSharding(jax.devices()[0])


PROCESS_OF_TWO = """
    import sys, jax
    directory, port, index = sys.argv[1:]
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=int(index))
    import test_manager as t
    from jaxforge.checkpoint import CheckpointManager
    manager = CheckpointManager(directory, keep=3, save_every_steps=1)
    step, state, metadata = manager.restore(t.abstract((4, 2)))
    assert step == 1 and metadata == {"step": 1}
    add = jax.jit(lambda s: jax.tree.map(lambda a: a + 1, s), out_shardings=t.shardings((4, 2)), donate_argnums=0)
    state = add(state)
    manager.save(2, state, {"step": 2})
    state = add(state)
    manager.save(3, state, {"step": 3})
    manager.close()
    if index == "0":
        t.flip_one_bit(t.Path(directory) / "3")
    jax.experimental.multihost_utils.sync_global_devices("damaged")
    manager = CheckpointManager(directory, keep=3, save_every_steps=1)
    step, state, _ = manager.restore(t.abstract((2, 4)))
    manager.save(3, add(jax.device_put(state, t.shardings((4, 2)))), {"step": 3})
    manager.close()
    print(step)
    """


@pytest.mark.slow
def test_two_processes_save_and_restore_together_and_one_process_reads_it(tmp_path):
    save_steps(tmp_path, 1)
    port = 20000 + os.getpid() % 20000
    processes = [start_process(PROCESS_OF_TWO, tmp_path, port, index, num_devices=4) for index in (0, 1)]
    deadline = time.monotonic() + 100
    try:
        outputs = [process.communicate(timeout=deadline - time.monotonic())[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0]
    assert [output.splitlines()[-1] for output in outputs] == ["2", "2"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2", "3", "3.broken"]
    found, state, _ = restore(tmp_path, (4, 2))
    assert found == 3
    # Step 1 was saved with 1 added to each value, and each step adds 1.
    np.testing.assert_allclose(state["params"]["w"], VALUES["params"]["w"] + 3, rtol=1e-6, atol=1e-6)
