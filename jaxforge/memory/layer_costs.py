"""What a layer's activations cost: bytes where they are kept, products where they are computed again.

Read from the layer's jaxpr: differentiated with every named activation kept, its residuals are these activations, and
the products between one name and those before it are what computing it again takes.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name, name_p
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from jax.extend.core.primitives import dot_general_p, reduce_precision_p

from jaxforge.config.activations import LAYER_INPUT
from jaxforge.memory.policy import KEEP_ALL, KERNELS

Tree = Any


class KeptArray(NamedTuple):
    """One array of an activation, by its logical shape.

    Attributes:
      flops: of the matrix products from other activations to this one, 2 for each multiply-add; kernels count as none.
    """

    name: str
    shape: tuple[int, ...]
    itemsize: int
    flops: int

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.itemsize


def kept_arrays(
    layer: Callable[[Tree, jax.Array, Tree], jax.Array], trainable: Tree, x: Any, others: Tree
) -> list[KeptArray]:
    """The arrays that the backward pass of `layer` keeps beside parameters, in the order in which they are computed.

    Args:
      layer: (trainable parameters, x, others) -> y, on one device; the others have no gradient.
      trainable, x, others: shapes and dtypes.
    """

    def differentiated(trainable, x, others):
        def named(trainable, x):
            return layer(trainable, checkpoint_name(x, LAYER_INPUT), others)

        return jax.tree.leaves(jax.vjp(KEEP_ALL.checkpoint(named, is_recomputed=False), trainable, x)[1])

    jaxpr = jax.make_jaxpr(differentiated)(trainable, x, others).jaxpr
    producers = {variable: equation for equation in jaxpr.eqns for variable in equation.outvars}
    residuals = {_unrounded(variable, producers) for variable in jaxpr.outvars if not isinstance(variable, Literal)}
    kept = []
    for equation in jaxpr.eqns:
        name = _name(equation)
        for array in equation.outvars:
            if name is not None and array in residuals:
                aval: Any = array.aval
                flops = _flops_since_names(equation, producers)
                kept.append(KeptArray(name, aval.shape, aval.dtype.itemsize, flops))
    return kept


def _name(equation: Any) -> str | None:
    return equation.params["name"] if equation.primitive is name_p else KERNELS.get(equation.primitive.name)


def _unrounded(variable: Any, producers: dict) -> Any:
    """Residuals pass through a rounding to their own dtype."""
    while variable in producers and producers[variable].primitive is reduce_precision_p:
        [variable] = producers[variable].invars
    return variable


def _flops_since_names(equation: Any, producers: dict) -> int:
    """FLOPs of the products that lead from named arrays to the inputs of `equation`."""
    seen, waiting, flops = set(), [equation], 0
    while waiting:
        for variable in waiting.pop().invars:
            before = None if isinstance(variable, Literal) else producers.get(variable)
            if before is not None and id(before) not in seen and _name(before) is None:
                seen.add(id(before))
                waiting.append(before)
                flops += _flops(before)
    return flops


def _flops(equation: Any) -> int:
    """Of the products in an equation; a kernel's body says little of them."""
    if equation.primitive.name == "pallas_call":
        return 0
    if equation.primitive is dot_general_p:
        (contracted, _), _ = equation.params["dimension_numbers"]
        left = equation.invars[0].aval.shape
        return 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[dim] for dim in contracted)
    return sum(_flops(inner) for jaxpr in _jaxprs(equation) for inner in jaxpr.eqns)


def _jaxprs(equation: Any) -> Iterator[Jaxpr]:
    def is_jaxpr(node):
        return isinstance(node, (Jaxpr, ClosedJaxpr))

    for node in filter(is_jaxpr, jax.tree.leaves(list(equation.params.values()), is_leaf=is_jaxpr)):
        yield node.jaxpr if isinstance(node, ClosedJaxpr) else node
