"""What a unit keeps from its forward to its backward."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from jaxforge.memory.policy import KEEP_ALL, make_policies
from jaxforge.parallel.pipeline.engine import Pipeline
from jaxforge.parallel.pipeline.layout import PipelineLayout
from jaxforge.parallel.pipeline.pieces import Place, Unit, Weights, take
from jaxforge.parallel.pipeline.residuals import Residuals
from jaxforge.parallel.pipeline.schedule import make_schedule

WIDTH, INNER, ROWS = 3, 5, 2


class LayerAlone:
    """The part of `Parts` that a unit calls: tanh(x up) down + shift."""

    @staticmethod
    def layer(weights, x_BD, shared, number):
        up_BF = checkpoint_name(x_BD @ weights["up_DF"], "mlp_up")
        return jnp.tanh(up_BF) @ weights["down_FD"] + shared * number


def unit_of(num_layers, is_recomputed, policies=KEEP_ALL):
    unit = Unit(num_layers, is_recomputed)
    layout, schedule = PipelineLayout(1, (num_layers,), (0,)), make_schedule(1, 1, 1)
    return unit.kind, Pipeline(LayerAlone, layout, schedule, [(unit,)], policies=policies, z_loss_coefficient=0.0)


def arrays(num_layers):
    rng = np.random.default_rng(0)
    shapes = {"up_DF": (num_layers, WIDTH, INNER), "down_FD": (num_layers, INNER, WIDTH)}
    weights = {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in shapes.items()}
    x_BD, dy_BD = (jnp.asarray(rng.normal(size=(ROWS, WIDTH)), jnp.float32) for _ in range(2))
    return weights, x_BD, dy_BD


def assert_close(found, expected):
    # fp32, a few sums of a few terms that partly cancel
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("frozen", [(), ("up_DF",), ("up_DF", "down_FD")], ids=str)
@pytest.mark.parametrize("num_layers, is_recomputed", [(1, False), (1, True), (3, True)])
def test_parameters_are_not_kept(num_layers, is_recomputed, frozen):
    weights, x_BD, dy_BD = arrays(num_layers)
    parts = Weights({n: w for n, w in weights.items() if n not in frozen}, {n: weights[n] for n in frozen})
    kind, pipeline = unit_of(num_layers, is_recomputed)
    kept = []

    @jax.jit
    def there_and_back(parts, x_BD, dy_BD, shared, number):
        unit = Weights(*(take(tree, Place(0, 0), kind) for tree in parts))
        y_BD, residuals = pipeline.unit_forward(kind, unit, x_BD, shared, number)
        kept.extend(residual.shape for residual in residuals)
        return y_BD, pipeline.unit_backward(kind, unit, residuals, shared, number, dy_BD)

    y_BD, (dweights, dx_BD) = there_and_back(parts, x_BD, dy_BD, jnp.float32(0.5), 4)
    # activations alone: the input, and without recompute what tanh reads
    assert set(kept) <= {(ROWS, WIDTH)} | (set() if is_recomputed else {(ROWS, INNER)})

    def plain(weights, x_BD):
        for i in range(num_layers):
            x_BD = LayerAlone.layer({n: w[i] for n, w in weights.items()}, x_BD, 0.5, 4 + i)
        return x_BD

    expected_BD, vjp = jax.vjp(plain, weights, x_BD)
    expected_weights, expected_dx_BD = vjp(dy_BD)
    assert_close(y_BD, expected_BD)
    assert_close(dx_BD, expected_dx_BD)
    for name, gradient in dweights.items():
        expected = expected_weights[name][0] if num_layers == 1 else expected_weights[name]
        assert_close(gradient, expected)
    assert dweights.keys() == parts.trainable.keys()


@pytest.mark.parametrize(
    "num_layers, is_recomputed, actions, kept_on_device, kept_in_host_memory",
    [
        (1, False, {"mlp_up": "offload"}, [(ROWS, WIDTH)], [(ROWS, INNER)]),
        (1, False, {"mlp_up": "recompute", "layer_input": "offload"}, [], [(ROWS, WIDTH)]),
        (3, True, {"layer_input": "offload"}, [], [(ROWS, WIDTH)]),
    ],
)
def test_what_is_offloaded_is_kept_in_host_memory(
    num_layers, is_recomputed, actions, kept_on_device, kept_in_host_memory
):
    weights, x_BD, _ = arrays(num_layers)
    kind, pipeline = unit_of(num_layers, is_recomputed, make_policies(actions))
    kept = {jax.memory.Space.Device: [], jax.memory.Space.Host: []}

    @jax.jit
    def forward(weights, x_BD):
        unit = Weights(take(weights, Place(0, 0), kind), {})
        y_BD, residuals = pipeline.unit_forward(kind, unit, x_BD, jnp.float32(0.5), 4)
        for residual in residuals:
            kept[jax.typeof(residual).memory_space].append(residual.shape)
        return y_BD

    forward(weights, x_BD)
    assert kept == {jax.memory.Space.Device: kept_on_device, jax.memory.Space.Host: kept_in_host_memory}


def test_arrays_that_are_known_are_told_from_equal_ones_by_identity():
    residuals = Residuals()

    @jax.jit
    def check(a, b):
        _, vjp = jax.vjp(lambda x: x * a * b, jnp.float32(2))
        kept = residuals.split(vjp, [a])
        assert len(kept) == len(jax.tree.leaves(vjp)) - 1
        return residuals.rebuild(kept, [a])(jnp.float32(1))

    # d(x a b) / dx
    assert float(check(jnp.float32(3), jnp.float32(3))[0]) == 9
