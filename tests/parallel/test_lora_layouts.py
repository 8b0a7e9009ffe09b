"""With adapters too, tensor parallelism gives the loss and gradients of one device."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx
from tiny_models import microbatches, random_parameters, rows_of_many_kinds, tiny_config

from jaxforge.cluster.mesh import build_mesh, mesh_layout
from jaxforge.config.schema import AdapterConfig, LoraConfig
from jaxforge.optim.paths import join
from jaxforge.training.program import build_program, make_model

# Scales of 1.  With the default alpha these random adapters would dwarf the weights, and make attention so steep that
# one device's fp32 gradients are themselves 1e-5 away from float64's.
LORA = LoraConfig(
    decoder=AdapterConfig(rank=3, alpha=3.0),
    encoder=AdapterConfig(rank=2, alpha=2.0),
    projector=AdapterConfig(rank=2, alpha=2.0),
    train_also=("projector/**",),
)


@pytest.mark.parametrize(
    "encoder, tensor, encoder_tensor, sequence_parallel",
    [("qwen3_vit", 2, 1, True), pytest.param("qwen2_5_vit", 4, 2, False, marks=pytest.mark.slow)],
)
def test_adapters_have_the_loss_and_gradients_of_one_device(encoder, tensor, encoder_tensor, sequence_parallel):
    parallel = dict(tensor_model_parallel_size=tensor, sequence_parallel=sequence_parallel)
    config = dataclasses.replace(tiny_config(encoder, parallel=parallel), lora=LORA)
    parameters, rows = random_parameters(config), rows_of_many_kinds(config)
    num_targets = np.sum(rows["targets"] != -100)
    graph = nnx.graphdef(nnx.eval_shape(lambda: make_model(config, "xla", nnx.Rngs(params=0))))
    plain = jax.jit(jax.value_and_grad(lambda p: nnx.merge(graph, p).loss(rows)[0] / num_targets))
    expected_loss, expected = plain(parameters)

    mesh = build_mesh(
        mesh_layout(tensor * 2, tensor=tensor, encoder_tensor=encoder_tensor), jax.devices()[: 2 * tensor]
    )
    program = build_program(config, mesh, "cpu")
    abstract = join(program.abstract_state["trainable"], program.abstract_state["frozen"])
    placed = jax.device_put(parameters, jax.tree.map(lambda shape: shape.sharding, abstract))
    batch = jax.device_put(microbatches(rows, 2), program.batch_sharding)
    gradients, sums = program.gradients(placed, batch)

    assert float(sums["loss"]) / num_targets == pytest.approx(float(expected_loss), rel=1e-6)
    found = jax.tree_util.tree_leaves_with_path(gradients)
    # both of each of 7 projections in the decoder, 6 or 7 in the encoder, 2 in each of its mergers; and the mergers
    assert len(found) == {"qwen3_vit": 14 + 12 + 8 + 12, "qwen2_5_vit": 14 + 14 + 4 + 5}[encoder]
    for path, gradient in found:
        reference = expected
        for key in path:
            reference = reference[key.key]
        reference = np.asarray(reference)
        assert np.any(reference)
        atol = 1e-5 * np.abs(reference).max()  # the project's limit for any two layouts
        np.testing.assert_allclose(gradient, reference, atol=atol, rtol=0, err_msg=jax.tree_util.keystr(path))
