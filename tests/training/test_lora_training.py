"""Training adapters: what trains, what stays as it was, and what a checkpoint needs to hold."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import microbatches, rows_of_many_kinds, tiny_config

from jaxforge.cluster.mesh import build_mesh, mesh_layout
from jaxforge.config.errors import ConfigError
from jaxforge.config.schema import AdapterConfig, LoraConfig
from jaxforge.optim.paths import parameter_paths
from jaxforge.training.program import build_program

RANK_2 = AdapterConfig(rank=2)


def program_of(lora, encoder=None, **groups):
    config = dataclasses.replace(tiny_config(encoder, **groups), lora=lora)
    return build_program(config, build_mesh(mesh_layout(1), jax.devices()[:1]), "cpu")


def paths(tree):
    return sorted(jax.tree.leaves(parameter_paths(tree)))


def leaves(tree):
    """Copies, which donating the state leaves alone."""
    return [np.array(leaf) for leaf in jax.tree.leaves(tree)]


def assert_equal(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for one, other in zip(leaves(left), leaves(right), strict=True):
        assert one.dtype == other.dtype and np.array_equal(one, other)


@pytest.fixture(scope="module")
def half_precision():
    """A language model in bfloat16 that trains its final norm and adapters on attention, and a batch."""
    lora = LoraConfig(decoder=AdapterConfig(rank=2, targets=("**/attention/*",)), train_also=("decoder/final_norm/*",))
    optimizer = dict(learning_rate=2e-2, lr_decay_style="constant", weight_decay=0.5)
    program = program_of(lora, optimizer=optimizer, train=dict(compute_dtype="bfloat16"))
    batch = microbatches(rows_of_many_kinds(tiny_config(None)), 2)
    return program, batch


def test_adapters_learn_and_the_base_does_not_change_by_one_bit(half_precision):  # F54
    program, batch = half_precision
    state = program.initialise(0)
    frozen, trainable = leaves(state["frozen"]), leaves(state["trainable"])
    losses = []
    for _ in range(20):
        state, metrics = program.train_step(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0] - 0.1
    assert all(np.array_equal(*pair) for pair in zip(frozen, leaves(state["frozen"]), strict=True))
    assert not any(np.array_equal(*pair) for pair in zip(trainable, leaves(state["trainable"]), strict=True))


def test_a_frozen_weight_takes_two_bytes_and_has_no_optimizer_state(half_precision):
    program, _ = half_precision
    state = program.abstract_state
    assert {leaf.dtype for leaf in jax.tree.leaves(state["frozen"])} == {jnp.dtype(jnp.bfloat16)}
    assert {leaf.dtype for leaf in jax.tree.leaves(state["trainable"])} == {jnp.dtype(jnp.float32)}
    # Two layers, width 16, rank 2.  64 features of queries, 32 of keys and of values, 64 go into the output; the norm.
    trained = 2 * 2 * ((16 + 64) + 2 * (16 + 32) + (64 + 16)) + 16
    assert sum(leaf.size for leaf in jax.tree.leaves(state["trainable"])) == trained
    moments = [leaf.size for leaf in jax.tree.leaves(state["optimizer"]) if leaf.shape]
    assert sum(moments) == 2 * trained


def random_base(program, seed, dtype_of):
    """Base parameters as a loader brings them."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda shape: jnp.asarray(rng.normal(size=shape.shape), dtype_of(shape)), program.abstract_base)


@pytest.mark.parametrize(
    "dtype_of", [lambda shape: shape.dtype, lambda shape: jnp.float32], ids=["the state's dtypes", "all fp32"]
)
def test_a_state_of_given_weights_has_them_and_the_adapters_of_its_seed(half_precision, dtype_of):
    program, _ = half_precision
    base = random_base(program, 1, dtype_of)
    # in NumPy, since the base is given away
    frozen = jax.tree.map(lambda array: np.array(array).astype(jnp.bfloat16), base)
    frozen["decoder"].pop("final_norm")
    norm = np.array(base["decoder"]["final_norm"]["scale"])
    state, own = program.initialise_from(base, 7), program.initialise(7)
    assert_equal(state["frozen"], frozen)
    assert np.array_equal(state["trainable"]["decoder"]["final_norm"]["scale"], norm)
    assert base["decoder"]["final_norm"]["scale"].is_deleted()
    assert_equal(state["trainable"]["decoder"]["layers"], own["trainable"]["decoder"]["layers"])
    assert_equal(state["optimizer"], own["optimizer"])
    assert not np.array_equal(
        own["trainable"]["decoder"]["layers"]["attention"]["query_DHK_lora_a"],
        program.initialise(8)["trainable"]["decoder"]["layers"]["attention"]["query_DHK_lora_a"],
    )


def test_a_checkpoint_needs_no_base(half_precision):
    program, batch = half_precision
    # the base of a seed comes again from it
    state, _ = program.train_step(program.initialise(3), batch)
    saved = program.saved(state)
    assert paths(saved["frozen"]) == []
    assert_equal(program.with_frozen_base(saved, program.initial_frozen_base(3)), state)
    assert jax.tree.structure(saved) == jax.tree.structure(program.saved(program.abstract_state))
    # and a given one from where it was
    state, _ = program.train_step(program.initialise_from(random_base(program, 2, lambda shape: shape.dtype), 3), batch)
    again = random_base(program, 2, lambda shape: jnp.float32)
    assert_equal(program.with_frozen_base(program.saved(state), program.frozen_base(again)), state)


def test_a_checkpoint_holds_adapters_that_are_frozen():
    program = program_of(LoraConfig(decoder=RANK_2), optimizer=dict(freeze=("*_lora_a",)))
    saved = paths(program.saved(program.abstract_state)["frozen"])
    assert len(saved) == 7 and all(path.endswith("_lora_a") for path in saved)


def test_without_adapters_a_checkpoint_holds_the_frozen_parameters():
    program = program_of(LoraConfig(), optimizer=dict(freeze=("decoder/layers/**",)))
    assert program.saved(program.abstract_state) is program.abstract_state
    state = program.abstract_state
    assert paths(program.abstract_base) == sorted(paths(state["trainable"]) + paths(state["frozen"]))


def test_what_trains_are_the_adapters_and_what_the_config_names_beside_them():
    lora = LoraConfig(
        decoder=AdapterConfig(rank=2, targets=("**/query_*",)),
        encoder=AdapterConfig(rank=2, targets=("**/down_*",)),
        train_also=("decoder/final_norm/*", "projector/merger/norm/**"),
    )
    state = program_of(lora, "qwen3_vit").abstract_state
    assert paths(state["trainable"]) == [
        "decoder/final_norm/scale",
        "decoder/layers/attention/query_DHK_lora_a",
        "decoder/layers/attention/query_DHK_lora_b",
        "encoder/layers/mlp/down_FE_lora_a",
        "encoder/layers/mlp/down_FE_lora_b",
        "projector/merger/norm/bias",
        "projector/merger/norm/scale",
    ]
    plain = program_of(LoraConfig(), "qwen3_vit").abstract_state["trainable"]
    assert sorted(paths(state["trainable"]) + paths(state["frozen"])) == sorted(
        paths(plain) + [path for path in paths(state["trainable"]) if "_lora_" in path]
    )


def test_freezing_works_beside_adapters_and_must_have_an_effect():
    lora = LoraConfig(decoder=RANK_2)
    program = program_of(lora, optimizer=dict(freeze=("*_lora_a", "decoder/layers/mlp/*")))
    trainable = paths(program.abstract_state["trainable"])
    assert len(trainable) == 4 and all("/attention/" in path and path.endswith("_lora_b") for path in trainable)
    with pytest.raises(ConfigError, match=r"optimizer\.freeze has 'decoder/head_VD', which matches no parameter that"):
        program_of(lora, optimizer=dict(freeze=("decoder/head_VD",)))
