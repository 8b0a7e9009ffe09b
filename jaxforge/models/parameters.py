"""Parameters with logical axis names, and stacks of layers."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxforge.config.activations import LAYER_INPUT
from jaxforge.memory.policy import Policies
from jaxforge.ops.sharded_weight import whole

Axes = tuple[str | None, ...]
Segments = Sequence[tuple[int, int]]


def normal(rngs: nnx.Rngs, shape: tuple[int, ...], axes: Axes, std: float) -> nnx.Param:
    """A normally distributed fp32 parameter; `axes` has one logical name per dimension."""
    return nnx.Param(std * jax.random.normal(rngs.params(), shape, jnp.float32), axes=axes)


def projection(rngs: nnx.Rngs, shape: tuple[int, ...], axes: Axes, std: float, *, num_inputs: int = 1) -> nnx.Param:
    """A `normal` parameter that is a linear map, from its first `num_inputs` dimensions to the others.

    Such parameters are applied by `jaxforge.models.lora.project`, and may have an adapter.
    """
    weight = normal(rngs, shape, axes, std)
    weight.set_metadata(num_inputs=num_inputs)
    return weight


def zeros(shape: tuple[int, ...], axes: Axes) -> nnx.Param:
    return nnx.Param(jnp.zeros(shape, jnp.float32), axes=axes)


def ones(shape: tuple[int, ...], axes: Axes) -> nnx.Param:
    return nnx.Param(jnp.ones(shape, jnp.float32), axes=axes)


def stack(
    make_layer: Callable[[nnx.Rngs], nnx.Module],
    keys: jax.Array,
    order: tuple[int, ...] | None = None,
    name: str | None = "layers",
) -> Any:
    """One module whose every parameter has a leading dimension of layers.

    Args:
      keys: random keys [layers], as `layer_keys` gives them.
      order: the layer in each place of that dimension, -1 for a place that no layer uses; by default all in turn.  A
        layer's initial values don't depend on its place.
      name: of that dimension.
    """

    def state_of(key):
        return nnx.split(make_layer(nnx.Rngs(params=key)))[1]

    graph = nnx.graphdef(nnx.eval_shape(lambda: make_layer(nnx.Rngs(params=0))))
    stacked = nnx.merge(graph, jax.vmap(state_of)(_in_order(keys, order)))
    for _, parameter in nnx.iter_graph(stacked):
        if isinstance(parameter, nnx.Param):
            axes = (name, *parameter.get_metadata("axes"))
            parameter.set_metadata(axes=axes, num_layers=len(keys), layer_order=order)
    return stacked


def layer_keys(rngs: nnx.Rngs, num_layers: int, order: tuple[int, ...] | None = None) -> jax.Array:
    """A random key for each place of a stack: a layer's is the same wherever it lies."""
    return _in_order(jax.random.split(rngs.params(), num_layers), order)


def _in_order(keys: jax.Array, order: tuple[int, ...] | None) -> jax.Array:
    return keys if order is None else keys[jnp.maximum(jnp.asarray(order), 0)]


def segments_between(segments: Segments, first: int, last: int) -> Segments:
    """Of segments as `scan_layers` takes them, those of the layers `first` to `last` - 1.

    A group that is recomputed together and would reach beyond them becomes smaller.
    """
    found: list[tuple[int, int]] = []
    start = 0
    for count, unit in segments:
        inside = min(last, start + count) - max(first, start)
        start += count
        if inside > 0:
            whole = inside // unit * unit if unit else inside
            found += [(whole, unit)] * (whole > 0) + [(inside - whole, inside - whole)] * (inside > whole)
    return tuple(found)


def scan_layers(
    stacked: nnx.Module,
    step: Callable[[nnx.Module, Any, Any], Any],
    carry: Any,
    xs: Any,
    segments: Segments,
    policies: Policies,
) -> Any:
    """carry = step(layer, carry, x) for every layer in turn, compiled once per segment.

    Args:
      stacked: a module made by `stack`; weights sharded over data parallel ranks are gathered layer by layer, in the
        backward pass again.
      step: what one layer does; `x` is this layer's slice of `xs`.
      xs: a pytree with a leading dimension of layers.
      segments: (number of layers, unit) of consecutive runs of layers.  Unit 0 keeps activations, by name; unit n
        recomputes n layers at a time in the backward pass, keeping only the input of each group.
      policies: what is kept, and where.
    """
    graph, parameters = nnx.split(stacked)

    def one(carry, parameters_and_x):
        parameters, x = parameters_and_x
        return step(nnx.merge(graph, whole(parameters)), carry, x), None

    def group(carry, parameters_and_xs):
        return jax.lax.scan(one, carry, parameters_and_xs)

    def unit_of(f, is_recomputed):
        return policies.checkpoint(
            lambda carry, run: f(checkpoint_name(carry, LAYER_INPUT), run), is_recomputed=is_recomputed
        )

    kept_one, recomputed_one, recomputed_group = unit_of(one, False), unit_of(one, True), unit_of(group, True)
    first = 0
    is_one_run = len(segments) == 1
    for num_layers, unit in segments:
        run = (parameters, xs)
        if not is_one_run:
            run = jax.tree.map(lambda a, first=first, last=first + num_layers: a[first:last], run)
        if unit <= 1:
            carry, _ = jax.lax.scan(recomputed_one if unit else kept_one, carry, run)
        else:
            grouped = jax.tree.map(lambda a, unit=unit: a.reshape(-1, unit, *a.shape[1:]), run)
            carry, _ = jax.lax.scan(recomputed_group, carry, grouped)
        first += num_layers
    return carry
