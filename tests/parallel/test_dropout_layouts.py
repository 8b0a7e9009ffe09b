"""With dropout too, every layout gives the loss and the gradient norm of one device."""

import jax
import pytest
from tiny_models import microbatches, random_parameters, rows_of_many_kinds, tiny_config

from jaxforge.cluster.mesh import build_mesh, mesh_layout
from jaxforge.training.program import build_program


def first_step(dropout, *, tensor=1, data=1, sequence_parallel=False):
    config = tiny_config(
        None,
        decoder_changes=dict(hidden_dropout=dropout),
        parallel=dict(tensor_model_parallel_size=tensor, sequence_parallel=sequence_parallel),
    )
    num_devices = tensor * data
    program = build_program(
        config, build_mesh(mesh_layout(num_devices, tensor=tensor), jax.devices()[:num_devices]), "cpu"
    )
    state = program.initialise(0)
    parameters = random_parameters(config)
    shardings = jax.tree.map(lambda shape: shape.sharding, program.abstract_state["trainable"])
    state["trainable"] = jax.device_put(parameters, shardings)
    batch = jax.device_put(microbatches(rows_of_many_kinds(config), 4 // data), program.batch_sharding)
    _, metrics = program.train_step(state, batch)
    return [float(metrics["loss"]), float(metrics["grad_norm"])]


def test_dropout_is_the_same_at_every_layout():
    one_device = first_step(0.3)
    assert one_device != pytest.approx(first_step(0.0), rel=1e-3)
    assert first_step(0.3, tensor=4, data=2, sequence_parallel=True) == pytest.approx(one_device, rel=1e-5)
