"""Steps of a model with experts: router state and metrics at a layout as on one device, and in a checkpoint."""

import dataclasses

import jax
import numpy as np
import pytest
from expert_cases import KINDS, Case
from pipeline_cases import Case as Layout
from pipeline_cases import placed, twelve_rows, unplaced
from tiny_models import microbatches, random_parameters

from jaxforge.checkpoint import CheckpointManager
from jaxforge.config.schema import OptimizerConfig, TrainConfig
from jaxforge.optim.paths import split
from jaxforge.parallel.pipeline.choice import layer_order

STEPS = 2
ALONE = Case("sigmoid", Layout(1))
SHARED_OUT = Case("sigmoid", Layout(2, 2, tensor=2, data=2, sharding="optim"), experts=2)


def program_of(case: Case):
    config = case.config()
    config = dataclasses.replace(
        config,
        optimizer=OptimizerConfig(learning_rate=1e-3),
        train=TrainConfig(seq_length=config.train.seq_length, steps=STEPS, global_batch_size=12),
    )
    return config, case.layout.program(config)


def run(case: Case):
    """The state after two steps, by path in the order without a pipeline, and each step's metrics."""
    config, program = program_of(case)
    parameters = random_parameters(ALONE.layout.config(decoder_changes=KINDS["sigmoid"]))
    parameters["decoder"]["layers"]["moe"]["statistics_5E"][:] = 0
    initial = placed(config, parameters)
    state = program.initialise(0)
    trainable, _ = split(initial, lambda path: not path.endswith(("statistics_5E", "expert_bias_E")))
    router, _ = split(initial, lambda path: path.endswith(("statistics_5E", "expert_bias_E")))
    given = {"trainable": trainable, "router": router}
    for name, tree in given.items():
        state[name] = jax.tree.map(lambda a, old: jax.device_put(np.nan_to_num(a), old.sharding), tree, state[name])
    batch = microbatches(twelve_rows(config), case.layout.num_microbatches)
    batch = jax.device_put(batch, program.batch_sharding)
    metrics = []
    for _ in range(STEPS):
        state, found = program.train_step(state, batch)
        metrics.append({name: float(value) for name, value in found.items()})
    return config, program, state, metrics


@pytest.fixture(scope="module")
def shared_out():
    return run(SHARED_OUT)


def test_steps_at_a_layout_are_those_of_one_device(shared_out):
    _, _, expected, expected_metrics = run(ALONE)
    config, _, state, metrics = shared_out
    for found, wanted in zip(metrics, expected_metrics, strict=True):
        for name in wanted:
            np.testing.assert_allclose(found[name], wanted[name], rtol=2e-5, atol=1e-6, err_msg=name)
    assert metrics[0]["moe/bias_max"] != metrics[1]["moe/bias_max"]
    for kind in ("trainable", "router"):
        found = unplaced(config, jax.tree.map(np.asarray, state[kind]))
        # Adam divides by the root of a moment, so that small gradients' errors count like large ones'
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, expected[kind])


def test_a_checkpoint_holds_the_router_state_and_is_read_at_another_layout(shared_out, tmp_path):
    config, program, state, _ = shared_out
    manager = CheckpointManager(tmp_path, keep=1, save_every_steps=1)
    order = layer_order(config)
    manager.save(STEPS, state, {"layer_order": {name: list(places) for name, places in order._asdict().items()}})
    manager.wait()
    other_config, other = program_of(Case("sigmoid", Layout(4, 1, data=2), experts=2))
    step, restored, _ = manager.restore(other.abstract_state, layer_order(other_config))
    manager.close()
    assert step == STEPS
    for kind in ("trainable", "router"):
        before = unplaced(config, jax.tree.map(np.asarray, state[kind]))
        after = unplaced(other_config, jax.tree.map(np.asarray, restored[kind]))
        jax.tree.map(np.testing.assert_array_equal, before, after)
