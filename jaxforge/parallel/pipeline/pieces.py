"""What the pipeline engine computes with: units of layers, weights, gradients, and the parts of a decoder."""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxforge.models.layer_order import FEED_FORWARDS
from jaxforge.models.multi_token import of_depths
from jaxforge.ops.cross_entropy import Losses
from jaxforge.ops.linear_cross_entropy import LinearCrossEntropy

Tree = Any
# The ends that multi-token prediction reads, where it has its own.
AHEAD = ("final_norm", "mtp")


class Kind(NamedTuple):
    """Units of a kind have residuals of the same shapes, and share a pool.  Attributes as of `Unit`."""

    num_layers: int
    is_recomputed: bool
    feed_forward: str
    is_ahead: bool = False


class Unit(NamedTuple):
    """Consecutive layers of a chunk that are computed together.

    Attributes:
      num_layers: more than one where a group is recomputed together.
      is_recomputed: whether the backward pass computes the unit again from its input.
      feature: number of the visual feature that is added to the unit's output, or None.
      feed_forward: of its layers, "mlp" or "moe".
      is_ahead: whether it is the final norm and all layers for multi-token prediction, recomputed one by one if at all.
    """

    num_layers: int
    is_recomputed: bool
    feature: int | None = None
    feed_forward: str = "mlp"
    is_ahead: bool = False

    @property
    def kind(self) -> Kind:
        return Kind(self.num_layers, self.is_recomputed, self.feed_forward, self.is_ahead)


@dataclasses.dataclass(frozen=True)
class Parts:
    """A decoder in the pieces that the pipeline calls, as pure functions of their parameters.

    Attributes:
      enter: (ends, visual, microbatch) -> x, what the first layer reads.
      shared: microbatch -> arrays that every layer reads and that have no gradient.
      layer: (layer parameters, with one feed-forward, x, shared, layer number) -> x.
      layers: (stacks, x, visual, microbatch) -> x, all layers in turn with their features; without a pipeline.
      add_feature: (visual, x, microbatch, number of the feature) -> x.
      normed: (ends, x) -> the states that the head reads, laid out as the residual stream; of the ends it reads the
        final norm alone.
      ahead: (depths, layers, states, embeddings of the tokens that each depth sees, shared) -> the states of each depth
        of multi-token prediction, as `normed` gives them; the first two are for each depth the parameters of its own,
        of the end "mtp", and of its layer.
      seen_ahead: microbatch -> for each depth what `look_up` and `fill` read of the tokens that it sees.
      layers_ahead: stacks of all layers in turn -> `layers` of `ahead`; without a pipeline.
      num_depths: of multi-token prediction.
      leave: (ends, states of the decoder and of each depth, microbatch) -> Losses.
      score: (ends, x, microbatch) -> sum of cross-entropy, predicted tokens [B, S] int32.
      look_up, fill: `enter` in two: (ends, microbatch, number of the table's first row) -> embeddings of the tokens
        that it has; (embeddings, visual, microbatch) -> x.
      head: the name of the head's table among the ends.
      fused: the loss fused with the head, which takes the place of `leave` and `score`; or None.

    `ends` are the decoder's parameters beside the layers, `visual` the encoder's output (or None), a microbatch the
    arrays of a batch without its first dimension.
    """

    enter: Callable[[Tree, Tree, Tree], jax.Array]
    shared: Callable[[Tree], Tree]
    layer: Callable[[Tree, jax.Array, Tree, jax.Array], jax.Array]
    layers: Callable[[Tree, jax.Array, Tree, Tree], jax.Array]
    add_feature: Callable[[Tree, jax.Array, Tree, int], jax.Array]
    leave: Callable[[Tree, Sequence[jax.Array], Tree], Losses]
    score: Callable[[Tree, jax.Array, Tree], tuple[jax.Array, jax.Array]]
    look_up: Callable[[Tree, Tree, jax.Array | int], jax.Array]
    fill: Callable[[jax.Array, Tree, Tree], jax.Array]
    normed: Callable[[Tree, jax.Array], jax.Array]
    ahead: Callable[[Sequence[Tree], Sequence[Tree], jax.Array, Sequence[jax.Array], Tree], list[jax.Array]]
    seen_ahead: Callable[[Tree], list[Tree]]
    layers_ahead: Callable[[Tree], list[Tree]]
    num_depths: int
    head: str
    fused: LinearCrossEntropy | None


class Weights(NamedTuple):
    """Parameters that train and parameters that don't, as two nested dicts of which either may be empty."""

    trainable: Tree
    frozen: Tree


class Gradients(NamedTuple):
    """fp32 sums over the microbatches of this data parallel rank; of `ends` and `visual`, this stage's part.

    That of `visual` is in the table's dtype: a row is read by one token, so nothing is summed in it.
    """

    layers: Tree
    ends: Tree
    visual: Tree
    losses: Losses


def chunk_units(
    feed_forwards: tuple[str, ...],
    first_layer: int,
    *,
    recompute: tuple[tuple[int, int], ...],
    num_features: int,
) -> tuple[Unit, ...]:
    """The units of a chunk.

    Args:
      feed_forwards: "mlp" or "moe", of each layer of the chunk; layers of a unit have the same.
      first_layer: the chunk's first layer, counted over the decoder.
      recompute: (layers, unit) runs, as `recompute_segments` gives for a chunk of this size.
      num_features: visual features, which are added after the first layers of the decoder, one each: those layers are
        units of their own.
    """
    units: list[Unit] = []
    layer = first_layer
    for count, unit in recompute:
        left = count
        while left:
            is_tapped = layer < num_features
            following = feed_forwards[layer - first_layer :]
            alike = next((i for i, name in enumerate(following) if name != following[0]), len(following))
            size = 1 if unit <= 1 or is_tapped else min(unit, left, alike)
            units.append(Unit(size, unit > 0, layer if is_tapped else None, following[0]))
            layer, left = layer + size, left - size
    assert layer == first_layer + len(feed_forwards)
    return tuple(units)


class Flow(NamedTuple):
    """What goes from stage to stage: [B, S, D] behind a layer or, behind the final norm, the decoder's states.

    `ahead` are the states of each depth of multi-token prediction, [J, B, S, D], or () where none go along.
    """

    x: jax.Array
    ahead: Any = ()


class Place(NamedTuple):
    """Where the first layer of a unit lies: in stacks of all layers, and of those with its feed-forward."""

    layer: Any
    feed_forward: Any

    def of(self, name: str) -> Any:
        """In a stack, by its name among the layers' parameters."""
        return self.feed_forward if name in FEED_FORWARDS else self.layer

    def moved(self, count: Any) -> "Place":
        return Place(self.layer + count, self.feed_forward + count)


def take(tree: Tree, place: Place, kind: Kind) -> Tree:
    """The layers of a unit, [num_layers, ...]; a single one without that dimension.  Of the feed-forwards, theirs."""

    def below(tree, first):
        if kind.num_layers == 1:
            return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, first, 0, keepdims=False), tree)
        return jax.tree.map(lambda a: lax.dynamic_slice_in_dim(a, first, kind.num_layers), tree)

    names = [name for name in tree if name not in FEED_FORWARDS or name == kind.feed_forward]
    return {name: below(tree[name], place.of(name)) for name in names}


def weights_ahead(layers: Weights, ends: Weights, place: Place, kind: Kind) -> Weights:
    """What multi-token prediction computes with: of the ends those of `AHEAD`, and "layers", the layer of each depth.

    `place` is that of the first of these.
    """

    def of(layers, ends):
        one, depths = kind._replace(num_layers=1), range(kind.num_layers)
        found = {name: ends[name] for name in AHEAD if name in ends}
        # each apart, so that what a backward pass needs of them is recognised as theirs
        found["mtp"] = dict(zip(map(str, depths), of_depths(ends.get("mtp", {}), len(depths)), strict=True))
        return found | {"layers": {str(depth): take(layers, place.moved(depth), one) for depth in depths}}

    return Weights(*map(of, layers, ends))


def add_ahead(sums: Gradients, more: Tree, place: Place, kind: Kind) -> Gradients:
    """Adds the gradients of `weights_ahead`."""
    layers = sums.layers
    for depth, of_layer in enumerate(more["layers"].values()):
        layers = add_at(layers, of_layer, place.moved(depth), kind._replace(num_layers=1))
    depths = list(more["mtp"].values())
    found = {name: more[name] for name in AHEAD if name in more}
    found["mtp"] = jax.tree.map(lambda *of_depths: jnp.stack(of_depths), *depths)
    ends = sums.ends | {name: add(sums.ends[name], tree) for name, tree in found.items() if name in sums.ends}
    return sums._replace(layers=layers, ends=ends)


class UnitRun(NamedTuple):
    """Equal units in a row.

    Attributes:
      length: how many.
      offset: the layer of its chunk that the first one begins with; and that layer's number among those of the chunk
        with the same feed-forward.
      first_of_kind: number of the first one among the chunk's units of its kind.
    """

    unit: Unit
    length: int
    offset: Place
    first_of_kind: int


def unit_runs(units: tuple[Unit, ...]) -> list[UnitRun]:
    """The units of a chunk, equal ones together: each run is computed by one loop."""
    runs, offset = [], 0
    of_kind: Counter[Kind] = Counter()
    of_feed_forward: Counter[str] = Counter()
    for unit, group in itertools.groupby(units):
        count = len(list(group))
        place = Place(offset, of_feed_forward[unit.feed_forward])
        runs.append(UnitRun(unit, count, place, of_kind[unit.kind]))
        of_kind[unit.kind] += count
        of_feed_forward[unit.feed_forward] += count * unit.num_layers
        offset += count * unit.num_layers
    return runs


def no_gradient(visual: Tree) -> Tree:
    """What the gradient of a table of visual tokens is summed in."""
    return jax.tree.map(jnp.zeros_like, visual)


def zeros_like(tree: Tree) -> Tree:
    return jax.tree.map(jnp.zeros_like, tree)


def add(sums: Tree, more: Tree) -> Tree:
    """The sums with more gradients added, in the dtype of the sums."""
    return jax.tree.map(lambda a, b: a + b.astype(a.dtype), sums, more)


def add_at(sums: Tree, more: Tree, place: Place, kind: Kind) -> Tree:
    """Adds the gradients of a unit's layers, as `take` would give them, at their place in the stacks."""

    def below(sums, more, first):
        def one(a, b):
            old = lax.dynamic_slice_in_dim(a, first, kind.num_layers)
            return lax.dynamic_update_slice_in_dim(a, old + b.astype(a.dtype).reshape(old.shape), first, 0)

        return jax.tree.map(one, sums, more)

    return sums | {name: below(sums[name], found, place.of(name)) for name, found in more.items()}
