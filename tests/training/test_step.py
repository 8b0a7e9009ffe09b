"""The optimizer step: what a batch's loss and gradients are, and what an update does to the state."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny_models import (
    ENCODERS,
    document,
    image,
    microbatches,
    model_function,
    random_parameters,
    row,
    rows_of_many_kinds,
    tiny_config,
)

from jaxforge.cluster.mesh import build_mesh, mesh_layout
from jaxforge.config.schema import OptimizerConfig
from jaxforge.ops.cross_entropy import Losses
from jaxforge.optim import make_optimizer
from jaxforge.parallel.data import data_sharding
from jaxforge.parallel.microbatch_loss import PlainLoss
from jaxforge.parallel.rules import replicated
from jaxforge.training.program import build_program, make_model
from jaxforge.training.step import apply_gradients, make_gradients

IGNORE = -100


def program_on(config, *, tensor=1, encoder_tensor=None, data=1):
    size = tensor * data
    mesh = build_mesh(mesh_layout(size, tensor=tensor, encoder_tensor=encoder_tensor), jax.devices()[:size])
    return build_program(config, mesh, "cpu")


def place(program, parameters, batch):
    """Parameters and batch on the program's devices."""
    state = program.abstract_state
    shardings = jax.tree.map(lambda shape: shape.sharding, state["trainable"])
    return jax.device_put(parameters, shardings), jax.device_put(batch, program.batch_sharding)


def state_of(program, parameters):
    """A fresh state that holds copies of `parameters`; nothing is frozen, and nothing drawn."""
    shardings = jax.tree.map(lambda shape: shape.sharding, program.abstract_base)
    return program.initialise_from(jax.device_put(jax.tree.map(jnp.array, parameters), shardings), 0)


def plain_loss_and_gradients(config, parameters, rows):
    """Mean loss over targets and its gradients, of all rows at once on one device."""
    graph = nnx.graphdef(nnx.eval_shape(lambda: make_model(config, "xla", nnx.Rngs(params=0))))
    count = np.sum(rows["targets"] != IGNORE)
    loss, gradients = jax.jit(jax.value_and_grad(lambda p: nnx.merge(graph, p).loss(rows)[0] / count))(parameters)
    return float(loss), gradients


def assert_gradients_close(gradients, expected):
    for (path, gradient), reference in zip(
        jax.tree_util.tree_leaves_with_path(gradients), jax.tree.leaves(expected), strict=True
    ):
        atol = 1e-5 * np.abs(reference).max()  # the project's limit for any two layouts
        np.testing.assert_allclose(gradient, reference, atol=atol, rtol=0, err_msg=jax.tree_util.keystr(path))


def stacked(*rows):
    return {key: np.stack([one[key] for one in rows]) for key in rows[0]}


def all_leaves(tree):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


@pytest.fixture(scope="module")
def uneven():
    """Rows of 64 tokens, one with 4 targets and one with 60, and their loss and gradients on one device."""
    config = tiny_config(None, train=dict(seq_length=64))
    rows = stacked(row(config, document(config, 60, after=4)), row(config, document(config, 4, after=60, seed=1)))
    parameters = random_parameters(config)
    return config, parameters, rows, plain_loss_and_gradients(config, parameters, rows)


@pytest.mark.parametrize("data, num_microbatches", [(1, 1), (1, 2), (2, 1)])
def test_every_target_weighs_the_same_wherever_its_row_is_computed(uneven, data, num_microbatches):  # F1
    config, parameters, rows, (expected_loss, expected) = uneven
    program = program_on(config, data=data)
    gradients, sums = program.gradients(*place(program, parameters, microbatches(rows, num_microbatches)))
    assert sums["target_tokens"] == 64
    assert float(sums["loss"]) / 64 == pytest.approx(expected_loss, rel=1e-6)
    assert_gradients_close(gradients, expected)


@pytest.fixture(scope="module")
def text():
    """A text model, its parameters, rows with 26 targets, and the sum of their losses on one device."""
    config = tiny_config(None)
    parameters, rows = random_parameters(config), rows_of_many_kinds(config)
    return config, parameters, rows, float(model_function(config, "loss")(parameters, rows)[0])


def test_the_loss_is_the_same_at_every_micro_batch_size(text):  # F3
    config, parameters, rows, expected = text
    program = program_on(config)
    for num_microbatches in (4, 2, 1):
        state = {"trainable": parameters, "frozen": {}}
        loss, targets, _ = program.score(state, microbatches(rows, num_microbatches))
        assert targets == 26
        assert float(loss) == pytest.approx(expected, rel=1e-6)


def test_scoring_returns_each_rows_predictions_in_its_place():
    config = tiny_config("qwen2_5_vit", parallel=dict(tensor_model_parallel_size=2, sequence_parallel=True))
    parameters, rows = random_parameters(config), rows_of_many_kinds(config)
    program = program_on(config, tensor=2, encoder_tensor=1, data=2)
    placed, batch = place(program, parameters, microbatches(rows, 2))
    loss, targets, tokens = program.score({"trainable": placed, "frozen": {}}, batch)
    logits = np.asarray(model_function(config, "logits")(parameters, rows))
    assert np.array_equal(np.asarray(tokens).reshape(4, -1), logits.argmax(-1))
    counted = rows["targets"] != IGNORE
    log_softmax = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    assert float(loss) == pytest.approx(-log_softmax[counted, rows["targets"][counted]].sum(), rel=1e-5)
    assert targets == 26


@pytest.mark.slow
@pytest.mark.parametrize("encoder", ENCODERS)
def test_a_rank_without_images_and_targets_takes_part(encoder):  # F9, F21, F40
    config = tiny_config(encoder)
    parameters = random_parameters(config)
    with_image = [row(config, document(config, 2, [image(8, 4, n), image(4, 4, 9 + n)], 3 + n)) for n in range(2)]
    without = [row(config, document(config, 5, after=4, seed=n)) for n in range(2)]
    for text in without:
        text["targets"][:] = IGNORE
    # rank 0 computes the first row of each microbatch, rank 1 the second
    rows = stacked(with_image[0], without[0], with_image[1], without[1])
    program = program_on(config, data=2)
    gradients, sums = program.gradients(*place(program, parameters, microbatches(rows, 2)))
    assert (sums["target_tokens"], sums["images"]) == (7, 4)
    expected_loss, expected = plain_loss_and_gradients(config, parameters, stacked(*with_image))
    assert float(sums["loss"]) / 7 == pytest.approx(expected_loss, rel=1e-6)
    assert np.any(gradients["encoder"]["patch_CD"])
    assert_gradients_close(gradients, expected)


@pytest.mark.slow
@pytest.mark.parametrize("tied, sequence_parallel", [(False, False), (True, True)])
def test_twenty_steps_are_the_same_over_two_devices(tied, sequence_parallel):  # F12, F53
    # a vocabulary of 250 padded to 256; clipping at every step, so that a wrong norm would change every update
    def run(tensor):
        config = tiny_config(
            None,
            decoder_changes=dict(
                vocab_size=250, make_vocab_size_divisible_by=128, untie_embeddings_and_output_weights=not tied
            ),
            parallel=dict(tensor_model_parallel_size=tensor, sequence_parallel=sequence_parallel and tensor > 1),
            optimizer=dict(learning_rate=1e-2, clip_grad=0.1, lr_warmup_iters=5),
            train=dict(steps=20),
        )
        program = program_on(config, tensor=tensor)
        rows, parameters = rows_of_many_kinds(config), random_parameters(config)
        state, history = state_of(program, parameters), []
        batch = jax.device_put(microbatches(rows, 2), program.batch_sharding)
        for _ in range(20):
            state, metrics = program.train_step(state, batch)
            history.append((float(metrics["loss"]), float(metrics["grad_norm"])))
        return config, parameters, rows, state, np.array(history)

    config, parameters, rows, state, history = run(tensor=2)
    *_, single_state, single_history = run(tensor=1)
    loss, gradients = plain_loss_and_gradients(config, parameters, rows)
    norm = np.sqrt(sum(np.sum(np.square(g, dtype=np.float64)) for g in all_leaves(gradients)))
    np.testing.assert_allclose(history[0], (loss, norm), rtol=1e-6)
    # differences of rounding grow from step to step, through Adam's division by small moments
    np.testing.assert_allclose(history, single_history, rtol=1e-4)
    assert history[-1, 0] < 0.8 * history[0, 0] and np.all(history[:, 1] > 0.1)
    assert state["step"] == 20
    padded = np.asarray(state["trainable"]["decoder"]["embedding_VD" if tied else "head_VD"])[250:]
    initial = parameters["decoder"]["embedding_VD" if tied else "head_VD"][250:]
    # without a gradient weight decay alone acts: the sum of the rates is that of the schedule
    rates = 1e-2 * np.array([0.2, 0.4, 0.6, 0.8, 1, *(0.5 * (1 + np.cos(np.pi * np.arange(15) / 15)))])
    np.testing.assert_allclose(padded, initial * np.prod(1 - 0.1 * rates), rtol=1e-5)


def test_without_any_target_the_step_counts_and_nothing_breaks():  # F4
    config = tiny_config(None, optimizer=dict(weight_decay=0.0))
    parameters, rows = random_parameters(config), rows_of_many_kinds(config)
    rows["targets"] = np.full_like(rows["targets"], IGNORE)
    program = program_on(config)
    state, metrics = program.train_step(state_of(program, parameters), microbatches(rows, 2))
    assert (metrics["loss"], metrics["grad_norm"], metrics["target_tokens"]) == (0, 0, 0)
    assert metrics["is_finite"] and state["step"] == 1
    for leaf, initial in zip(all_leaves(state["trainable"]), all_leaves(parameters), strict=True):
        assert np.array_equal(leaf, initial)
    assert all(np.all(np.isfinite(leaf)) for leaf in all_leaves(state))


@pytest.fixture(scope="module")
def partly_frozen():
    """A program that trains the decoder's attention, norms and tables and the projector, and a batch.

    On TP 4, encoder TP 2 and DP 2.
    """
    config = partly_frozen_config()
    program = program_on(config, tensor=4, encoder_tensor=2, data=2)
    batch = jax.device_put(microbatches(rows_of_many_kinds(config), 2), program.batch_sharding)
    return program, batch


def partly_frozen_config():
    return tiny_config(
        "qwen3_vit",
        parallel=dict(tensor_model_parallel_size=4),
        optimizer=dict(freeze=("encoder/**", "decoder/layers/mlp/*"), weight_decay=0.5, learning_rate=1e-2),
    )


@pytest.mark.slow
def test_frozen_parameters_do_not_change_by_one_bit_and_hold_no_optimizer_state(partly_frozen):  # F54
    program, batch = partly_frozen
    state = program.initialise(0)
    frozen, trainable = (jax.tree.map(np.array, state[part]) for part in ("frozen", "trainable"))
    assert sorted(frozen) == ["decoder", "encoder"] and list(frozen["decoder"]["layers"]) == ["mlp"]
    for _ in range(10):
        state, _ = program.train_step(state, batch)
    for before, after in zip(all_leaves(frozen), all_leaves(state["frozen"]), strict=True):
        assert np.array_equal(before, after)
    for before, after in zip(all_leaves(trainable), all_leaves(state["trainable"]), strict=True):
        assert not np.array_equal(before, after)
    numbers = sum(leaf.size for leaf in all_leaves(trainable))
    moments = [leaf for leaf in all_leaves(state["optimizer"]) if leaf.ndim]
    assert sum(leaf.size for leaf in moments) == 2 * numbers


def test_counts_are_those_of_the_rows(partly_frozen):
    program, batch = partly_frozen
    _, metrics = program.train_step(program.initialise(0), batch)
    # rows of 16, 14, 9 and 16 tokens, with 6, 11, 3 and 6 targets and 2, 0, 1 and 2 images
    assert (metrics["tokens"], metrics["target_tokens"], metrics["images"]) == (55, 26, 5)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_an_update_that_is_not_finite_leaves_the_state_as_it_was(partly_frozen, poison):
    program, batch = partly_frozen
    # moments that aren't 0, so that nothing is equal by chance
    state, _ = program.train_step(program.initialise(0), batch)
    before = jax.tree.map(np.array, state)
    patches = np.array(batch["patches"])
    patches[0, 0, 0, 0] = poison
    poisoned = batch | {"patches": jax.device_put(patches, program.batch_sharding)}
    state, metrics = program.train_step(state, poisoned)
    assert not metrics["is_finite"]
    assert state["step"] == 2
    for part in ("trainable", "frozen", "optimizer"):
        for old, new in zip(all_leaves(before[part]), all_leaves(state[part]), strict=True):
            assert np.array_equal(old, new)
    _, metrics = program.train_step(state, batch)
    assert metrics["is_finite"]


@pytest.mark.slow
def test_initial_weights_do_not_depend_on_the_layout(partly_frozen):
    one, (many, _) = program_on(partly_frozen_config()), partly_frozen
    alone, spread = one.initialise(7), many.initialise(7)
    for left, right in zip(all_leaves(alone), all_leaves(spread), strict=True):
        assert np.array_equal(left, right)
    other = one.initialise(8)
    assert not np.array_equal(alone["trainable"]["decoder"]["head_VD"], other["trainable"]["decoder"]["head_VD"])


def test_initial_weights_have_the_spread_that_the_config_asks_for():
    config = tiny_config(None, decoder_changes=dict(hidden_size=64, ffn_hidden_size=64, init_method_std=0.3))
    decoder = program_on(config).initialise(0)["trainable"]["decoder"]
    for name in ("up_DF", "gate_DF", "down_FE"):
        weights = np.asarray(decoder["layers"]["mlp"][name])  # 2 x 64 x 64 draws: the deviation is known to 1 %
        assert weights.std() == pytest.approx(0.3, rel=0.03) and abs(weights.mean()) < 0.01
        assert not np.array_equal(weights[0], weights[1])
    assert np.all(decoder["final_norm"]["scale"] == 1)


@pytest.mark.slow
def test_half_precision_computes_and_single_precision_remembers(text):
    _, parameters, rows, loss_sum = text
    config = tiny_config(None, train=dict(compute_dtype="bfloat16"), optimizer=dict(learning_rate=1e-3))
    program = program_on(config)
    state, metrics = program.train_step(state_of(program, parameters), microbatches(rows, 2))
    expected = loss_sum / 26
    # bf16 has 8 bits: close to fp32 and not equal to it
    assert float(metrics["loss"]) == pytest.approx(expected, rel=1e-2)
    assert float(metrics["loss"]) != pytest.approx(expected, rel=1e-6)
    kinds = {leaf.dtype for leaf in all_leaves(state)}
    assert kinds == {np.dtype(np.float32), np.dtype(np.int32)}


def test_a_thousand_small_updates_move_the_master_of_a_bf16_weight():  # F72
    # bf16's neighbour below 1 is 1 - 1/256: no single update of 1e-6 would be seen
    seen = []

    def loss_of(parameters, microbatch):
        seen.append(parameters["w"].dtype)
        return Losses.zeros(0)._replace(loss=parameters["w"].astype(jnp.float32).sum() * microbatch["tokens"].size)

    batch = {name: np.ones((1, 1, 4), np.int32) for name in ("tokens", "targets", "segment_ids")}
    mesh = build_mesh(mesh_layout(1), jax.devices()[:1])
    parameters = {"w": jax.device_put(jnp.ones(3), replicated(mesh))}
    sharding = data_sharding("no_shard", mesh, parameters, lambda path: False)
    gradients_of = make_gradients(PlainLoss(loss_of, 0.0), mesh, sharding)
    config = OptimizerConfig(learning_rate=1e-6, lr_decay_style="constant", weight_decay=0.0)
    optimizer = make_optimizer(config, 1000, parameters)

    @jax.jit
    def train(state):
        def one(state, _):
            weights = sharding.cast(state["trainable"], jnp.dtype(jnp.bfloat16))
            return apply_gradients(optimizer, state, *gradients_of(weights, {}, batch))

        return jax.lax.scan(one, state, length=1000)

    state = {"trainable": parameters, "frozen": {}, "step": jnp.zeros((), jnp.int32)}
    state, metrics = train(state | {"optimizer": optimizer.init(parameters)})
    assert set(seen) == {jnp.dtype(jnp.bfloat16)}
    # with a constant gradient each of Adam's updates is the learning rate; fp32 rounds it by up to 3 %
    np.testing.assert_allclose(1 - state["trainable"]["w"], 1e-3, rtol=0.03)
    assert metrics["loss"][0] == 3 and state["step"] == 1000
