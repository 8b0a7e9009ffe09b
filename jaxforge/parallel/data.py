"""What is sharded over data parallel ranks: `parallel.data_parallel_sharding_strategy`.

Each strategy shards what the one before it does, and more (ZeRO 1, 2 and 3; Rajbhandari et al. 2019, arXiv:1910.02054):

| strategy | sharded | reductions of gradients | gathers of weights |
|---|---|---|---|
| no_shard | nothing | one all-reduce a step | none |
| optim | fp32 masters, optimizer state | one reduce-scatter a step | one a step, in the compute dtype |
| optim_grads | sums of gradients too | a reduce-scatter for each layer and microbatch | one a step |
| optim_grads_params | compute weights too, frozen ones as well | the same | each layer, forward and backward |

Experts that are shared out over data parallel ranks are whole at each of them: what is said of the ranks holds, for
their weights, of the others, which have the same experts.

A matrix is cut along one of its dimensions; along its stack of layers only with optim, because with the others a layer
is gathered, or its gradient scattered, by itself.
Norms, biases and adapters are small, and stay whole.  What all stages share, and sum their gradients of, is cut over
the stages as well, but not while the step computes: its masters, optimizer state and reduced gradients.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxforge.cluster.mesh import DATA_AXES, MANUAL_AXES, STAGE, TENSOR_AXES, large_axes
from jaxforge.config.errors import ConfigError
from jaxforge.models.lora import is_adapter
from jaxforge.models.moe import is_router_state
from jaxforge.ops.sharded_weight import ShardedWeight, differentiable, scatter, whole
from jaxforge.optim.paths import decays, join, parameter_paths, split

Tree = Any
# Parts of the paths of parameters that are stacked, and whose layers, or depths, are taken one by one.
_STACKS = ("/layers/", "/mtp/")
# The share of all numbers that may stay whole because no dimension divides: tables of positions, for example.
_MOST_UNCUT = 0.05


@dataclasses.dataclass(frozen=True)
class Cut:
    """How a parameter is divided.

    Attributes:
      dim: the dimension of its array, whose number of dimensions is `ndim`.
      axes: the mesh axes, the outermost first; stage, where it is one of them, is the last.
    """

    dim: int
    ndim: int
    axes: tuple[str, ...]

    def spec(self, spec: PartitionSpec, axes: tuple[str, ...]) -> PartitionSpec:
        """`spec` with the dimension over `axes`."""
        entries = [*spec, *(None,) * (self.ndim - len(spec))]
        entries[self.dim] = axes or None
        return PartitionSpec(*entries)


@dataclasses.dataclass(frozen=True)
class DataSharding:
    """A strategy for the parameters of a model on a mesh.

    Attributes:
      strategy: the config's word.
      scatters_with_last: whether the sums of all microbatches are reduced and scattered layer by layer in the backward
        pass of the last one, instead of after it; with optim.
      data_axes: the data parallel axes of more than one device, over which all have different rows.
      stage_axes: ("stage",), or () without a pipeline.
      is_summed_over_stages: whether each stage finds a part of a parameter's gradient, by the parameter's path.
      cuts: by path; a parameter without one stays whole.
      layouts: of each parameter, by path, where nothing is sharded over data parallel ranks.
    """

    strategy: str
    scatters_with_last: bool
    data_axes: tuple[str, ...]
    stage_axes: tuple[str, ...]
    is_summed_over_stages: Callable[[str], bool]
    cuts: Mapping[str, Cut]
    layouts: Mapping[str, NamedSharding]

    def axes_of(self, path: str) -> tuple[str, ...]:
        """Those of the data axes along which a parameter is the same, and its gradients are summed."""
        own = {axis for entry in self.layouts[path].spec for axis in _axes_of(entry)}
        return tuple(axis for axis in self.data_axes if axis not in own)

    @property
    def scatters_at_once(self) -> bool:
        """Whether the gradients of each layer and microbatch are reduced and scattered when they are found."""
        return self.strategy in ("optim_grads", "optim_grads_params") and bool(self.data_axes)

    @property
    def gathers_layers(self) -> bool:
        """Whether the step is given parts of the compute weights, and gathers each where it is used."""
        return self.strategy == "optim_grads_params" and bool(self.data_axes)

    # Outside of the region that computes gradients.

    def trainable_shardings(self, tree: Tree) -> Tree:
        """NamedShardings of masters, optimizer state and reduced gradients: a tree like `tree`, by its paths."""
        return jax.tree.map(lambda path: self._laid_out(path, self._gradient_spec), parameter_paths(tree))

    def frozen_shardings(self, tree: Tree) -> Tree:
        """NamedShardings of parameters that don't train."""
        return jax.tree.map(lambda path: self._laid_out(path, self._weight_spec), parameter_paths(tree))

    def cast(self, trainable: Tree, dtype: jnp.dtype) -> Tree:
        """Compute weights of fp32 masters.  What is gathered afterwards is gathered in `dtype`."""
        weights = jax.tree.map(lambda master: master.astype(dtype), trainable)
        return lax.with_sharding_constraint(weights, self.trainable_shardings(weights)) if self.cuts else weights

    def weight_specs(self, tree: Tree) -> Tree:
        """Over which manual axes compute weights enter the region: a tree like `tree`, by its paths."""
        return jax.tree.map(lambda path: self._weight_spec(path, self._manual_spec(path)), parameter_paths(tree))

    def gradient_specs(self, tree: Tree) -> Tree:
        """Over which their gradients leave it, likewise."""
        return jax.tree.map(lambda path: self._gradient_spec(path, self._manual_spec(path)), parameter_paths(tree))

    def _weight_spec(self, path: str, spec: PartitionSpec) -> PartitionSpec:
        """A compute weight's, from what it would be if nothing were sharded over data parallel ranks."""
        cut = self.cuts.get(path)
        return cut.spec(spec, self.axes_of(path)) if cut and self.gathers_layers else spec

    def _gradient_spec(self, path: str, spec: PartitionSpec) -> PartitionSpec:
        cut = self.cuts.get(path)
        return cut.spec(spec, cut.axes) if cut else spec

    def _manual_spec(self, path: str) -> PartitionSpec:
        entries = map(_axes_of, self.layouts[path].spec)
        manual = (tuple(axis for axis in entry if axis in MANUAL_AXES) for entry in entries)
        return PartitionSpec(*(axes or None for axes in manual))

    def loop_layout(self, path: str) -> NamedSharding:
        """How a gradient that is scattered at once is summed: over the data parallel axes alone."""
        layout, cut = self.layouts[path], self.cuts.get(path)
        data = self.axes_of(path) if self.scatters_at_once else ()
        return NamedSharding(layout.mesh, cut.spec(layout.spec, data)) if cut and data else layout

    # Inside of it.

    def trained(self, weights: Tree) -> Tree:
        """Weights that train, with carriers for gradients that are scattered at once."""
        if not self.scatters_at_once:
            return weights
        return self._sharded(weights, self._carrier)

    def with_pending(self, weights: Tree, gradients: Tree) -> tuple[Tree, Tree]:
        """Weights that train and sums of gradients, for the microbatch that takes the sums with it.

        Args:
          gradients: whole, of the microbatches before it.
        """

        sharded = self._sharded(weights, self._carrier, gradients)
        rest = jax.tree.map(
            lambda path, gradient, variable: variable if path in self.cuts else gradient,
            parameter_paths(gradients), gradients, differentiable(sharded),
        )  # fmt: skip
        return sharded, rest

    def frozen(self, weights: Tree) -> Tree:
        """Weights that don't."""
        return self._sharded(weights, lambda path, weight, cut: None) if self.gathers_layers else weights

    def reduced(self, gradients: Tree) -> Tree:
        """Gradients summed over all that found a part of them, laid out by `gradient_spec`.

        Args:
          gradients: this device's, of what `differentiable` gives of `trained` weights.
        """
        return jax.tree.map(self._reduced, parameter_paths(gradients), gradients)

    def _reduced(self, path: str, gradient: jax.Array) -> jax.Array:
        stages = self.stage_axes if self.is_summed_over_stages(path) else ()
        cut = self.cuts.get(path)
        data_axes = self.axes_of(path)
        if cut is None:
            axes = stages + data_axes
            return lax.psum(gradient, axes) if axes else gradient
        if data_axes and not (self.scatters_at_once or self.scatters_with_last):
            gradient = scatter(gradient, data_axes, cut.dim - cut.ndim, self._automatic(path, cut))
        if not stages:
            return gradient
        if STAGE in cut.axes:
            return scatter(gradient, stages, cut.dim - cut.ndim, self._automatic(path, cut))
        return lax.psum(gradient, stages)

    def _automatic(self, path: str, cut: Cut) -> PartitionSpec:
        """How a parameter lies over the tensor axes; the dimension of a stack of layers is left out."""
        layout = self.layouts[path]
        tensor = [axis for axis in TENSOR_AXES if layout.mesh.shape[axis] > 1]
        entries = [*layout.spec, *(None,) * (cut.ndim - len(layout.spec))]
        kept = [tuple(axis for axis in _axes_of(entry) if axis in tensor) or None for entry in entries]
        return PartitionSpec(*(kept[1:] if _is_stacked(path) else kept))

    def _laid_out(self, path: str, spec_of: Callable[[str, PartitionSpec], PartitionSpec]) -> NamedSharding:
        layout = self.layouts[path]
        return NamedSharding(layout.mesh, spec_of(path, layout.spec))

    def _sharded(
        self, weights: Tree, carrier_of: Callable[[str, jax.Array, Cut], jax.Array | None], pending: Tree = None
    ) -> Tree:
        """Sharded weights in the place of those that are cut; `pending`, if it is given, is a tree like `weights`."""

        def one(path, weight, pending=None):
            cut = self.cuts.get(path)
            if cut is None:
                return weight
            carrier, dim = carrier_of(path, weight, cut), cut.dim - cut.ndim
            automatic = self._automatic(path, cut)
            return ShardedWeight(weight, carrier, self.axes_of(path), dim, self.gathers_layers, automatic, pending)

        trees = (weights,) if pending is None else (weights, pending)
        return jax.tree.map(one, parameter_paths(weights), *trees)

    def _carrier(self, path: str, weight: jax.Array, cut: Cut) -> jax.Array:
        parts = 1 if self.gathers_layers else lax.axis_size(self.axes_of(path))
        shape = (size // parts if dim == cut.dim else size for dim, size in enumerate(weight.shape))
        return jnp.zeros(tuple(shape), jnp.float32)


def whole_but_layers(parameters: Tree) -> Tree:
    """What a model is given: whole weights, but for the stacks, whose layers are gathered one by one."""
    layers, others = split(parameters, lambda path: "/layers/" in path)
    return join(layers, whole(others))


def data_sharding(
    strategy: str,
    mesh: Mesh,
    shapes: Tree,
    is_summed_over_stages: Callable[[str], bool],
    overlap_grad_reduce: bool = False,
) -> DataSharding:
    """Cuts for all parameters, `shapes` with the shardings that no_shard has.

    `overlap_grad_reduce` reduces the gradients of optim in the backward pass of the last microbatch.

    Raises:
      ConfigError: where matrices that can't be divided are more than a little.
    """
    leaves = dict(zip(jax.tree.leaves(parameter_paths(shapes)), jax.tree.leaves(shapes), strict=True))
    data_axes, stage_axes = large_axes(mesh, DATA_AXES), large_axes(mesh, (STAGE,))
    layouts = {path: leaf.sharding for path, leaf in leaves.items()}
    cuts: dict[str, Cut] = {}
    if strategy != "no_shard":
        choices = {}
        for path, leaf in leaves.items():
            if decays(path) and not is_adapter(path) and not is_router_state(path):
                own = {axis for entry in leaf.sharding.spec for axis in _axes_of(entry)}
                axes = tuple(axis for axis in data_axes if axis not in own)
                choices[path] = (axes + stage_axes, axes) if is_summed_over_stages(path) else (axes,)
        cuts_stacks = strategy == "optim" and not overlap_grad_reduce
        found = {path: _cut(leaves[path], mesh, axes, _first(path, cuts_stacks)) for path, axes in choices.items()}
        cuts = {path: cut for path, cut in found.items() if cut is not None}
        if data_axes:
            # of experts that all data parallel ranks share out, each has one
            _check(strategy, mesh, leaves, [path for path in found if path not in cuts and any(choices[path])])
    with_last = overlap_grad_reduce and strategy == "optim" and bool(data_axes)
    return DataSharding(strategy, with_last, data_axes, stage_axes, is_summed_over_stages, cuts, layouts)


def _axes_of(entry: Any) -> tuple[str, ...]:
    """The mesh axes of an entry of a PartitionSpec."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _first(path: str, cuts_stacks: bool) -> int:
    """The first dimension that may be cut."""
    return 1 if _is_stacked(path) and not cuts_stacks else 0


def _is_stacked(path: str) -> bool:
    return any(name in path for name in _STACKS)


def _cut(leaf: Any, mesh: Mesh, choices: tuple[tuple[str, ...], ...], first: int) -> Cut | None:
    """Over the first choice of axes, along the first dimension that they divide: XLA moves whole first dimensions, and
    transposes a copy for any other."""
    free = leaf.sharding.shard_shape(leaf.shape)
    for axes in choices:
        parts = math.prod(mesh.shape[axis] for axis in axes)
        for dim in range(first, leaf.ndim):
            if free[dim] == leaf.shape[dim] and leaf.shape[dim] % parts == 0 and parts > 1:
                return Cut(dim, leaf.ndim, axes)
    return None


def _check(strategy: str, mesh: Mesh, leaves: Mapping[str, Any], uncut: list[str]) -> None:
    if sum(leaves[path].size for path in uncut) <= _MOST_UNCUT * sum(leaf.size for leaf in leaves.values()):
        return
    path = max(uncut, key=lambda path: leaves[path].size)
    parts = math.prod(mesh.shape[axis] for axis in DATA_AXES)
    raise ConfigError(
        f"parallel.data_parallel_sharding_strategy={strategy} cuts matrices into {parts} parts, one for each data"
        f" parallel rank, along a dimension that tensor parallelism doesn't cut; {path} of shape {leaves[path].shape}"
        f" has none that {parts} divides; use no_shard, or other parallel sizes"
    )
