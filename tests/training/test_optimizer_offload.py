"""Masters and moments in host memory: the same run to the last bit, its checkpoints and its weights."""

import dataclasses
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import RECIPES, rows
from hf_folders import assert_same_bits, tensors_of
from tiny_models import microbatches, rows_of_many_kinds, tiny_config

import jaxforge
from jaxforge.checkpoint import CheckpointManager
from jaxforge.checkpoint.arrays import flatten
from jaxforge.checkpoint.stored import LAYER_ORDER, described_order
from jaxforge.cluster.mesh import MeshLayout, build_mesh
from jaxforge.config import load_config
from jaxforge.config.schema import AdapterConfig, LoraConfig, MemoryConfig
from jaxforge.data.batches import BatchLayout
from jaxforge.optim import streaming
from jaxforge.optim.host_memory import is_in_host_memory
from jaxforge.parallel.pipeline.choice import layer_order
from jaxforge.training.program import build_program, bytes_per_device
from jaxforge.training.state import restored_state

ON_HOST = MemoryConfig(optimizer_cpu_offload=True)
MOST_ON_HOST = MemoryConfig(optimizer_cpu_offload=True, optimizer_offload_fraction=0.9)
HALF_ON_HOST = MemoryConfig(optimizer_cpu_offload=True, optimizer_offload_fraction=0.5)


@pytest.fixture(autouse=True)
def small_slices(monkeypatch):
    # so that tiny matrices have several, with a rest
    monkeypatch.setattr(streaming, "SLICE_BYTES", 700)


def program_of(config, num_devices):
    mesh = build_mesh(MeshLayout.from_config(config, num_devices), jax.devices()[:num_devices])
    return build_program(config, mesh, "cpu")


def where(tree):
    """Path to memory kind of the parameters of a tree."""
    return {path: leaf.sharding.memory_kind for path, leaf in flatten(tree).items()}


def assert_same(found, expected):
    for (path, leaf), other in zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(leaf, other, err_msg=jax.tree_util.keystr(path))


@pytest.mark.slow
def test_a_vision_model_trains_to_the_same_bits():
    # clipping, a rate of its own for the projector, a part frozen, and an update that isn't finite
    config = tiny_config(
        "qwen3_vit",
        parallel=dict(
            tensor_model_parallel_size=2, enable_encoder_hetero_dp=True, data_parallel_sharding_strategy="optim"
        ),
        optimizer=dict(
            learning_rate=1e-2, clip_grad=0.5, lr_scale=(("projector/**", 3.0),), freeze=("encoder/layers/**",)
        ),
        train=dict(global_batch_size=4),
    )
    num_rows = microbatches(rows_of_many_kinds(config), 2)

    def trained(memory):
        program = program_of(dataclasses.replace(config, memory=memory), 4)
        batch = BatchLayout.from_config(config, program.mesh, 2).batch(num_rows)
        poisoned = batch | {"patches": batch["patches"].at[...].set(jnp.nan)}
        state, history = program.initialise(0), []
        for one in (batch, batch, poisoned, batch):
            state, metrics = program.train_step(state, one)
            history.append(jax.tree.map(np.asarray, metrics))
        return state, history, program.score(state, batch)

    state, history, scores = trained(ON_HOST)
    assert [bool(metrics["is_finite"]) for metrics in history] == [True, True, False, True]
    assert all(metrics["grad_norm"] > 0.5 for metrics in history if metrics["is_finite"])
    assert set(where(state["trainable"]).values()) == {"pinned_host"}
    moments = state["optimizer"][1]
    assert set(where(moments.mu).values()) == set(where(moments.nu).values()) == {"pinned_host"}
    assert set(where(state["frozen"]).values()) == {"device"}
    assert state["optimizer"][-1].count == 3 and state["step"] == 4
    assert_same((state, history, scores), trained(MemoryConfig()))


@pytest.mark.slow
def test_adapters_and_a_table_in_a_pipeline_train_to_the_same_bits():
    # some of the state stays on the device; the base is given
    config = tiny_config(
        None,
        decoder_changes=dict(num_layers=4),
        parallel=dict(
            pipeline_model_parallel_size=2, pipeline_model_parallel_layout="Et|tttL",
            data_parallel_sharding_strategy="optim_grads_params",
        ),
        optimizer=dict(learning_rate=1e-2, clip_grad=0.1, exp_avg_dtype="bfloat16"),
    )  # fmt: skip
    config = dataclasses.replace(
        config, lora=LoraConfig(decoder=AdapterConfig(rank=3), train_also=("decoder/head_VD",))
    )

    def trained(memory):
        program = program_of(dataclasses.replace(config, memory=memory), 4)
        batch = jax.device_put(microbatches(rows_of_many_kinds(config), 2), program.batch_sharding)
        rng = np.random.default_rng(0)
        base = jax.tree.map(
            lambda shape: jax.device_put(rng.normal(size=shape.shape).astype(shape.dtype), shape.sharding),
            program.abstract_base,
        )
        state, history = program.initialise_from(base, 0), []
        for _ in range(3):
            state, metrics = program.train_step(state, batch)
            history.append(jax.tree.map(np.asarray, metrics))
        return program, state, history

    program, state, history = trained(HALF_ON_HOST)
    assert set(where(state["trainable"]).values()) == {"pinned_host", "device"}
    held = [bytes_per_device(program.abstract_state["trainable"], in_host=there) for there in (True, False)]
    assert 1 <= held[0] / held[1] < 1.5
    _, expected, expected_history = trained(MemoryConfig())
    assert_same((state, history), (expected, expected_history))
    assert history[-1]["loss"] != history[0]["loss"]


OFFLOADED = ("memory.optimizer_cpu_offload=true", "memory.optimizer_offload_fraction=0.9")
RUN = ("checkpoint.save_every_steps=2", "checkpoint.keep=3", "checkpoint.export_hf_every_steps=2",
       "optimizer.lr_decay_iters=6", "parallel.data_parallel_sharding_strategy=optim_grads")  # fmt: skip


def train(workdir, steps, *overrides):
    overrides = [*RUN, *overrides, f"train.steps={steps}"]
    return jaxforge.train(load_config(RECIPES / "tiny_text.py", overrides), workdir)


@pytest.mark.slow
def test_a_run_goes_on_where_its_optimizer_lies_elsewhere(tmp_path, capsys):
    plain, changed = tmp_path / "plain", tmp_path / "changed"
    train(plain, 6)
    shutil.copytree(plain / "checkpoints" / "2", changed / "checkpoints" / "2")
    for steps, overrides in ((4, OFFLOADED), (6, ())):  # to the host, and from there
        capsys.readouterr()
        result = train(changed, steps, *overrides)
        output = capsys.readouterr().out
        assert f"resuming from step {steps - 2}" in output and "changed since: memory.optimizer_cpu_offload" in output
        assert any(is_in_host_memory(leaf) for leaf in jax.tree.leaves(result.state)) == bool(overrides)
        assert_same_bits(tensors_of(changed / "hf" / str(steps)), tensors_of(plain / "hf" / str(steps)))
    for one, other in zip(rows(changed), rows(plain)[2:], strict=True):
        for name in ("step", "loss", "grad_norm", "learning_rate"):
            assert one[name] == other[name]


# Of two layouts of a pipeline, the layer in each place of a stack, by hand; unused places are -1.
PLACES = {"Ettt|tL": (0, 1, 2, 3, -1, -1), "Et|tttL": (0, -1, -1, 1, 2, 3)}


def test_layers_of_a_checkpoint_go_to_other_places_in_host_memory(tmp_path):
    def run(layout):
        config = tiny_config(
            None,
            decoder_changes=dict(num_layers=4),
            parallel=dict(pipeline_model_parallel_size=2, pipeline_model_parallel_layout=layout),
        )
        config = dataclasses.replace(config, memory=MOST_ON_HOST)
        manager = CheckpointManager(tmp_path / "checkpoints", keep=3, save_every_steps=1)
        return config, program_of(config, 2), manager

    def by_path(tree):
        return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}

    config, program, manager = run("Ettt|tL")
    rng = np.random.default_rng(0)
    state = jax.tree.map(
        lambda shape: jax.device_put((99 * rng.normal(size=shape.shape)).astype(shape.dtype), shape.sharding),
        program.abstract_state,
    )
    order = {LAYER_ORDER: described_order(layer_order(config))}
    manager.save(3, state, {"config": dataclasses.asdict(config)} | order)
    manager.close()

    config, program, manager = run("Et|tttL")
    step, restored, _ = restored_state(config, program, manager)
    manager.close()
    assert step == 3
    assert is_in_host_memory(restored["trainable"]["decoder"]["layers"]["mlp"]["up_DF"])
    assert where(restored["trainable"]) == where(program.abstract_state["trainable"])
    saved, found = by_path(state), by_path(restored)
    assert saved.keys() == found.keys()
    for path in saved:
        before, after = np.asarray(saved[path]), np.asarray(found[path])
        if "layers" in path:
            before, after = (
                array[[places.index(layer) for layer in range(4)]]
                for array, places in zip((before, after), PLACES.values(), strict=True)
            )
        np.testing.assert_array_equal(after, before, err_msg=path)
