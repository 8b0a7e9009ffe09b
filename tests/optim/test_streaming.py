"""Updates and casts slice by slice: every number once, and never more than a slice at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxforge.config.schema import OptimizerConfig
from jaxforge.optim import make_optimizer, streaming
from jaxforge.optim.host_memory import in_host_memory, is_in_host_memory
from jaxforge.optim.optimizer import moments, with_moments
from jaxforge.optim.streaming import streamed_casts, streamed_updates

# shape, and how the last but one dimension and the last lie over the devices; as slices of 64 bytes and less:
PARAMETERS = {
    "layers": ((3, 10, 8), PartitionSpec(None, None, "b")),  # 30 rows of 4 numbers on a device: 7 slices of 4, and 2
    "heads": ((4, 4, 2, 4), PartitionSpec("a", "b")),  # 8 rows of 4: two slices
    "vocabulary": ((22, 40), PartitionSpec("a")),  # 11 rows, one in a slice: a row alone is more than 64 bytes
    "scale": ((24,), PartitionSpec()),  # one row
}
SHAPES = {path: shape for path, (shape, _) in PARAMETERS.items()}


@pytest.fixture(autouse=True)
def small_slices(monkeypatch):
    monkeypatch.setattr(streaming, "SLICE_BYTES", 64)


@pytest.fixture(scope="module")
def layouts():
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"))
    return {path: NamedSharding(mesh, spec) for path, (_, spec) in PARAMETERS.items()}


def numbers(seed):
    rng = np.random.default_rng(seed)
    return {path: rng.normal(size=shape).astype(np.float32) for path, shape in SHAPES.items()}


def test_every_number_is_updated_once_in_slices_of_bounded_size(layouts):
    in_host = {path: in_host_memory(layout) for path, layout in layouts.items()}
    first, second = numbers(0), numbers(1)
    arrays = {path: jax.device_put((first[path], second[path]), in_host[path]) for path in SHAPES}
    gradients = jax.device_put(numbers(2), layouts)
    seen = []

    def rule(path, arrays, gradient, scalars):
        seen.append((path, gradient.shape))
        one, two = arrays
        return one + gradient * scalars["factor"], two + 1

    found = jax.jit(
        lambda arrays, gradients, factor: streamed_updates(
            rule, layouts, {path: (arrays[path], gradients[path]) for path in arrays}, {"factor": factor}
        ),
        out_shardings={path: (layout, layout) for path, layout in in_host.items()},
    )(arrays, gradients, 2.0)
    for path in SHAPES:
        # a product and a sum in one rounding or in two
        np.testing.assert_allclose(found[path][0], first[path] + 2 * numbers(2)[path], rtol=1e-6, atol=1e-6)
        np.testing.assert_array_equal(found[path][1], second[path] + 1)
        assert all(is_in_host_memory(array) for array in found[path])
    assert set(seen) == {
        ("layers", (4, 4)), ("layers", (2, 4)), ("heads", (4, 4)), ("vocabulary", (1, 40)), ("scale", (1, 24)),
    }  # fmt: skip


def test_a_cast_gives_weights_on_the_device(layouts):
    masters = jax.device_put(numbers(0), {path: in_host_memory(layout) for path, layout in layouts.items()})
    weights = jax.jit(lambda masters: streamed_casts(masters, layouts, jnp.dtype(jnp.bfloat16)))(masters)
    for path, master in numbers(0).items():
        assert not is_in_host_memory(weights[path]) and weights[path].sharding.spec == layouts[path].spec
        np.testing.assert_array_equal(weights[path], master.astype(jnp.bfloat16))


def test_what_is_streamed_comes_out_as_what_is_not_to_the_last_bit(layouts):
    config = OptimizerConfig(
        learning_rate=0.1, adam_eps=1e-3, weight_decay=0.5, clip_grad=1.0, lr_scale=(("heads", 0.3),), lr_warmup_iters=2
    )

    def trained(in_host):
        where = {path: in_host_memory(layout) if path in in_host else layout for path, layout in layouts.items()}
        parameters = jax.device_put(numbers(0), where)
        optimizer = make_optimizer(config, 10, parameters)
        state = optimizer.init(parameters)
        state = with_moments(state, *(jax.device_put(moment, where) for moment in moments(state)))

        @jax.jit
        def update(gradients, state, parameters):
            norm = optax.tree.norm(gradients)
            return optimizer.update(gradients, state, parameters, norm, jnp.isfinite(norm))

        for seed in (3, 4, 5):
            parameters, state = update(jax.device_put(numbers(seed), layouts), state, parameters)
        return parameters, state

    some, everything, nothing = trained({"layers", "vocabulary"}), trained(set(SHAPES)), trained(set())
    assert nothing[1][-1].count == 3
    for found in (some, everything):
        for leaf, expected in zip(jax.tree.leaves(found), jax.tree.leaves(nothing), strict=True):
            np.testing.assert_array_equal(leaf, expected)
