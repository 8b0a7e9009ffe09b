"""Low-rank adapters (LoRA) on the projections of a model.  (Hu et al. 2021, arXiv:2106.09685)

A projection W [in..., out...] with an adapter of rank R computes x W + scale (x A) B, where A is [in..., R] and
B [R, out...]: no matrix of W's size is formed, and none has a gradient.  A and B are parameters beside W, under its
name and a suffix, and stacked over layers like it.  A lies over the mesh as the inputs of W do and B as its outputs, so
that tensor parallelism splits an adapter where it splits W; the rank is never split.
"""

import functools
import math
import re
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxforge.config.errors import ConfigError
from jaxforge.config.lora_rules import COMPONENTS, has_adapters
from jaxforge.config.patterns import matches
from jaxforge.config.schema import AdapterConfig, LoraConfig
from jaxforge.models.parameters import layer_keys

Tree = Any

A_SUFFIX, B_SUFFIX = "_lora_a", "_lora_b"


def project(module: nnx.Module, x: jax.Array, **equations: str) -> list[jax.Array]:
    """Projections of one x: einsum(equation, x, W) for each name, plus scale (x A) B where W has an adapter.

    `equations` are such as out_HKD="BSHK,HKD->BSD"; the letter R is the adapter's.  What reads the same x belongs in
    one call: adapters come before weights, so that the weights' cotangents of x are summed first.  Under tensor
    parallelism these are partial sums, which then need one reduction together, and else one each.
    """
    adapted = [_adapted(module, name, equation, x) for name, equation in equations.items()]
    projected = [jnp.einsum(equation, x, getattr(module, name)[...]) for name, equation in equations.items()]
    return [y if added is None else y + added for y, added in zip(projected, adapted, strict=True)]


def _adapted(module: nnx.Module, name: str, equation: str, x: jax.Array) -> jax.Array | None:
    """scale (x A) B, or None without an adapter."""
    a = getattr(module, name + A_SUFFIX, None)
    if a is None:
        return None
    b = getattr(module, name + B_SUFFIX)
    x_dims, weight_dims, y_dims = re.split(",|->", equation)
    in_dims = "".join(dim for dim in weight_dims if dim not in y_dims)
    out_dims = weight_dims.removeprefix(in_dims)
    low_dims = y_dims.removesuffix(out_dims) + "R"
    low = jnp.einsum(f"{x_dims},{in_dims}R->{low_dims}", x, a[...])
    low = checkpoint_name(low, "adapter")
    return jnp.einsum(f"{low_dims},R{out_dims}->{y_dims}", a.get_metadata("scale") * low, b[...])


def add_adapters(model: nnx.Module, config: LoraConfig, rngs: nnx.Rngs) -> None:
    """Gives the projections that the config targets their adapters: A random, B zero, so that nothing changes at first.

    A is uniform within 1 / sqrt(inputs), as in the method's reference implementation.  Without adapters in the config
    this does nothing, and draws nothing from `rngs`.

    Raises:
      ConfigError: for a target that matches no projection, or a rank that a target is too narrow for.
    """
    for component in COMPONENTS:
        adapter = getattr(config, component)
        if adapter.rank:
            _adapt(getattr(model, component), component, adapter, rngs)


def _adapt(module: nnx.Module, component: str, config: AdapterConfig, rngs: nnx.Rngs) -> None:
    projections = {
        "/".join((*map(str, path), name)): (owner, name, weight)
        for path, owner in nnx.iter_modules(module)
        for name, weight in vars(owner).items()
        if isinstance(weight, nnx.Param) and weight.get_metadata("num_inputs", None)
    }
    # not every component has what the default names: it is there to serve them all
    for pattern in config.targets if config.targets != AdapterConfig.targets else ():
        if not any(matches(path, pattern) for path in projections):
            raise ConfigError(
                f"lora.{component}.targets has {pattern!r}, which matches no projection of the {component}; there are"
                f" {', '.join(sorted(projections))}"
            )
    for path in sorted(projections):
        if any(matches(path, pattern) for pattern in config.targets):
            _add_adapter(*projections[path], f"{component}/{path}", component, config, rngs)


def _add_adapter(
    owner: nnx.Module, name: str, weight: nnx.Param, path: str, component: str, config: AdapterConfig, rngs: nnx.Rngs
) -> None:
    axes, rank = weight.get_metadata("axes"), config.rank
    first = int(axes[0] == "layers")
    last = first + weight.get_metadata("num_inputs")
    layers, inputs, outputs = weight.shape[:first], weight.shape[first:last], weight.shape[last:]
    narrow = min(math.prod(inputs), math.prod(outputs))
    if rank > narrow:
        raise ConfigError(
            f"lora.{component}.rank={rank} is more than the smaller side of {path}, {math.prod(inputs)} x"
            f" {math.prod(outputs)}; use at most {narrow}, or leave it out of lora.{component}.targets"
        )
    bound = 1 / math.sqrt(math.prod(inputs))
    if layers:
        keys = layer_keys(rngs, weight.get_metadata("num_layers"), weight.get_metadata("layer_order"))
        a = jax.vmap(lambda key: jax.random.uniform(key, (*inputs, rank), jnp.float32, -bound, bound))(keys)
    else:
        a = jax.random.uniform(rngs.params(), (*inputs, rank), jnp.float32, -bound, bound)
    b = jnp.zeros((*layers, rank, *outputs), jnp.float32)
    setattr(owner, name + A_SUFFIX, nnx.Param(a, axes=(*axes[:last], None), scale=adapter_scale(config)))
    setattr(owner, name + B_SUFFIX, nnx.Param(b, axes=(*axes[:first], None, *axes[last:])))


def adapter_scale(config: AdapterConfig) -> float:
    """What the adapters of a component are multiplied with."""
    return config.alpha / (math.sqrt(config.rank) if config.use_rslora else config.rank)


def is_adapter(path: str) -> bool:
    """Whether a parameter's path, or its name, is an adapter's."""
    return path.endswith((A_SUFFIX, B_SUFFIX))


def trained_patterns(config: LoraConfig, freeze: tuple[str, ...], base_paths: Iterable[str]) -> tuple[str, ...]:
    """Patterns of what alone trains beside adapters, these included; () where there are none, and all may train.

    Args:
      freeze: optimizer.freeze.
      base_paths: of all parameters that aren't adapters.

    Raises:
      ConfigError: for a pattern of `lora.train_also` without effect.
    """
    if not has_adapters(config):
        return ()
    paths = sorted(base_paths)
    for pattern in config.train_also:
        taken = [path for path in paths if matches(path, pattern)]
        if not taken:
            folders = sorted({path.rsplit("/", 1)[0] for path in paths})
            raise ConfigError(
                f"lora.train_also has {pattern!r}, which matches no parameter beside the adapters; folders are"
                f" {', '.join(folders)}"
            )
        if all(any(matches(path, frozen) for frozen in freeze) for path in taken):
            raise ConfigError(
                f"lora.train_also has {pattern!r}, but optimizer.freeze={freeze} freezes all that it matches; take it"
                " out of one of them"
            )
    return (f"*{A_SUFFIX}", f"*{B_SUFFIX}", *config.train_also)


def merge(parameters: Tree, config: LoraConfig) -> Tree:
    """The parameters of the model without adapters that computes the same: W + scale A B in fp32, others as they are.

    `parameters` is the nested dict of the whole model, trained and frozen ones; under jit any sharding serves.
    """

    def below(tree, adapter):
        merged = {}
        for name, child in tree.items():
            if isinstance(child, dict):
                merged[name] = below(child, adapter)
            elif name + A_SUFFIX in tree:
                a, b = tree[name + A_SUFFIX], tree[name + B_SUFFIX]
                merged[name] = merged_weight(child, a, b, adapter_scale(adapter))
            elif not is_adapter(name):
                merged[name] = child
        return merged

    return {component: below(tree, getattr(config, component)) for component, tree in parameters.items()}


def merged_weight(weight: jax.Array, a: jax.Array, b: jax.Array, scale: float) -> jax.Array:
    """W + scale A B in fp32, for one weight [(layers,) in..., out...] or a stack of them."""
    # full precision on GPUs too, which would round the operands to tf32
    product = functools.partial(jnp.tensordot, axes=1, precision=jax.lax.Precision.HIGHEST)
    if a.ndim + b.ndim - 2 > weight.ndim:  # all three are stacked
        product = jax.vmap(product)
    return weight.astype(jnp.float32) + scale * product(a.astype(jnp.float32), b.astype(jnp.float32))
