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
from jaxforge.checkpoint.arrays import flatten
from jaxforge.cluster.mesh import MeshLayout, build_mesh
from jaxforge.config import load_config
from jaxforge.config.schema import AdapterConfig, LoraConfig, MemoryConfig
from jaxforge.data.batches import BatchLayout
from jaxforge.optim import streaming
from jaxforge.optim.host_memory import is_in_host_memory
from jaxforge.training.program import build_program, bytes_per_device

ON_HOST = MemoryConfig(optimizer_cpu_offload=True)
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
RUN = ("checkpoint.save_every_steps=2", "checkpoint.export_hf_every_steps=2", "optimizer.lr_decay_iters=4",
       "parallel.data_parallel_sharding_strategy=optim_grads")  # fmt: skip


def train(workdir, steps, *overrides):
    overrides = [*RUN, *overrides, f"train.steps={steps}"]
    return jaxforge.train(load_config(RECIPES / "tiny_text.py", overrides), workdir)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The run directory of four steps with everything on the device."""
    workdir = tmp_path_factory.mktemp("plain")
    train(workdir, 4)
    return workdir


@pytest.mark.slow
@pytest.mark.parametrize("first, second", [((), OFFLOADED), (OFFLOADED, ())], ids=["to the host", "from the host"])
def test_a_run_goes_on_where_its_optimizer_lies_elsewhere(plain, tmp_path, capsys, first, second):
    changed = tmp_path / "changed"
    train(changed, 2, *first)
    result = train(changed, 4, *second)
    assert "changed since: memory.optimizer_cpu_offload" in capsys.readouterr().out
    assert any(is_in_host_memory(leaf) for leaf in jax.tree.leaves(result.state)) == bool(second)
    for one, other in zip(rows(changed), rows(plain), strict=True):
        for name in ("loss", "grad_norm", "learning_rate"):
            assert one[name] == other[name]
    for step in ("2", "4"):
        assert_same_bits(tensors_of(changed / "hf" / step), tensors_of(plain / "hf" / step))


@pytest.mark.slow
def test_layers_of_a_checkpoint_go_to_other_places_in_host_memory(tmp_path):
    pipeline = ("parallel.tensor_model_parallel_size=1", "model.decoder.num_layers=4",
                "parallel.pipeline_model_parallel_size=2", *OFFLOADED)  # fmt: skip
    train(tmp_path, 2, *pipeline, "parallel.pipeline_model_parallel_layout=Ettt|tL")
    before = shutil.move(tmp_path / "hf" / "2", tmp_path / "before")
    # all its steps are done: the run restores, and exports what it has restored
    result = train(tmp_path, 2, *pipeline, "parallel.pipeline_model_parallel_layout=Et|tttL")
    assert is_in_host_memory(result.state["trainable"]["decoder"]["layers"]["mlp"]["up_DF"])
    assert_same_bits(tensors_of(tmp_path / "hf" / "2"), tensors_of(before))
