"""In the hetero DP modes each device computes its share of the encoder's matrix products, forward and backward.

They are counted in the jaxpr of the step's encoder phase.  All matrix products stand where every axis of the mesh is
manual, so shapes are a device's own, and the device computes what stands there.
"""

import math

import jax
import jax.numpy as jnp
import pytest
from encoder_cases import ENCODER_HETERO_DP, FULL_HETERO_DP, Case, rows_with_images, vision_config
from flax import nnx
from jax.extend.core import Jaxpr, JaxprEqn, jaxprs_in_params
from jax.sharding import PartitionSpec
from tiny_models import ENCODERS, random_parameters

from jaxforge.cluster.mesh import AXES, DATA_AXES, MANUAL_AXES
from jaxforge.data.batches import BatchLayout
from jaxforge.data.rows import PATCH_KEYS
from jaxforge.parallel.encoder import ENCODER_MODULES, STAGE
from jaxforge.training.phases import make_phases
from jaxforge.training.program import make_model

NUM_ROWS = 8


@pytest.mark.parametrize("encoder", ENCODERS)
@pytest.mark.parametrize(
    "mode, tensor, stages, data, devices",
    [
        (FULL_HETERO_DP, 2, 2, 1, 4),
        (FULL_HETERO_DP, 2, 2, 2, 8),
        (FULL_HETERO_DP, 4, 2, 1, 8),
        (FULL_HETERO_DP, 1, 4, 1, 4),
        # each stage encodes all images
        (ENCODER_HETERO_DP, 4, 2, 1, 4),
        (ENCODER_HETERO_DP, 2, 1, 2, 4),
    ],
)
def test_a_device_computes_its_share_of_the_encoder(encoder, mode, tensor, stages, data, devices):
    case = Case(encoder, mode, stages, tensor=tensor, data=data, num_rows=NUM_ROWS)
    forward, backward = flops_of_a_device(case)
    all_forward, all_backward = flops_of_one_device(encoder)
    assert forward == pytest.approx(all_forward / devices, rel=0.1)
    assert backward == pytest.approx(all_backward / devices, rel=0.1)


def test_matrix_products_are_counted_as_often_as_they_run():
    def f(a, b):
        return jax.lax.scan(lambda a, _: (a @ b, None), a, length=5)[0] @ b

    # 2 x 3 x 3 x 3 for each of 6
    assert matrix_flops(jax.make_jaxpr(f)(*jnp.ones((2, 3, 3))).jaxpr) == 6 * 54


def flops_of_a_device(case: Case) -> tuple[int, int]:
    """Of the encoder's phases of a step: forward; forward once more, and backward."""
    config = case.config()
    program = case.program(config)
    mesh = program.mesh
    # in these modes the encoder is placed as on one device
    model = nnx.eval_shape(lambda: make_model(config, "xla", nnx.Rngs(params=0)))
    phase = make_phases(config, model, mesh, program.sharding).encoder
    batch = BatchLayout.from_config(config, mesh, case.num_microbatches).shapes()
    parameters, patches = encoder_and_patches(random_parameters(config), batch)
    rows = PartitionSpec(None, (*DATA_AXES, STAGE) if STAGE in phase.divided_axes else DATA_AXES)

    def jaxpr_of(f, *arguments):
        specs = (*(PartitionSpec() for _ in arguments[1:]), rows)
        mapped = jax.shard_map(
            f, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), axis_names=set(MANUAL_AXES), check_vma=False
        )
        return jax.make_jaxpr(mapped, return_shape=True)(*arguments)

    def backward(table, parameters, patches):
        return phase.backward(parameters, {}, patches, table)

    forward, table = jaxpr_of(phase.forward, parameters, patches)
    backward, _ = jaxpr_of(backward, table, parameters, patches)
    return matrix_flops(forward.jaxpr, frozenset(AXES)), matrix_flops(backward.jaxpr, frozenset(AXES))


def flops_of_one_device(encoder: str) -> tuple[int, int]:
    """The same, of all rows at once."""
    config = vision_config(encoder)
    graph = nnx.graphdef(nnx.eval_shape(lambda: make_model(config, "xla", nnx.Rngs(params=0))))
    everything = random_parameters(config)
    parameters, patches = encoder_and_patches(everything, rows_with_images(config, NUM_ROWS))

    def forward(parameters):
        return nnx.merge(graph, everything | parameters).encode(patches)

    def backward(parameters):
        tokens, vjp = jax.vjp(forward, parameters)
        return vjp(tokens)

    return tuple(matrix_flops(jax.make_jaxpr(f)(parameters).jaxpr) for f in (forward, backward))


def encoder_and_patches(parameters: dict, batch: dict) -> tuple[dict, dict]:
    return {name: parameters[name] for name in ENCODER_MODULES}, {key: batch[key] for key in PATCH_KEYS}


def matrix_flops(jaxpr: Jaxpr, automatic: frozenset[str] = frozenset()) -> int:
    """Of all matrix products, as often as they run; `automatic` are the mesh axes that aren't manual here."""
    return sum(_flops_of(eqn, automatic) for eqn in jaxpr.eqns)


def _flops_of(eqn: JaxprEqn, automatic: frozenset[str]) -> int:
    name = eqn.primitive.name
    if name == "dot_general":
        assert not automatic, f"these shapes are not a device's own along {automatic}"
        (contracted, _), _ = eqn.params["dimension_numbers"]
        shape = eqn.invars[0].aval.shape
        return 2 * math.prod(eqn.outvars[0].aval.shape) * math.prod(shape[dim] for dim in contracted)
    inside = automatic - eqn.params["newly_manual_axes"] if name == "shard_map" else automatic
    flops = sum(matrix_flops(jaxpr, inside) for jaxpr in jaxprs_in_params(eqn.params))
    assert not flops or name not in ("while", "cond"), "how often these run isn't known here"
    return flops * eqn.params["length"] if name == "scan" else flops
