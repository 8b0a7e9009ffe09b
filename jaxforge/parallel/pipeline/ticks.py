"""What one rank does in a tick of the schedule.

In a forward a chunk's units are computed in turn, and their residuals kept; in a backward they are read again.  What
embedding and head have to do then is in `ends.py`.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxforge.cluster.mesh import STAGE
from jaxforge.ops.sharded_weight import gathered
from jaxforge.optim.paths import join
from jaxforge.parallel.pipeline.ends import Ends
from jaxforge.parallel.pipeline.pieces import (
    Flow,
    Gradients,
    Kind,
    Place,
    Unit,
    UnitRun,
    Weights,
    add,
    add_ahead,
    add_at,
    take,
    unit_runs,
    weights_ahead,
    zeros_like,
)

if TYPE_CHECKING:
    from jaxforge.parallel.pipeline.engine import Pipeline

Tree = Any


class Ticks:
    """The ticks of one call.  Everything here is this rank's."""

    def __init__(self, pipeline: "Pipeline", layers: Weights, ends: Weights, visual: Tree, batch: Tree):
        self.pipeline, self.parts = pipeline, pipeline.parts
        self.layers, self.ends = layers, Ends(pipeline, ends, visual, batch)
        self.vocabulary = pipeline.vocabulary
        layout = pipeline.layout
        rank = lax.axis_index(STAGE)
        self.num_ranks, self.num_stages, self.rank = layout.pipeline_size, layout.num_stages, rank

        def mine(table_RV):
            return lax.dynamic_index_in_dim(jnp.asarray(table_RV), rank, 0, keepdims=False)

        self.makeup_V = mine(pipeline.makeup_RV)
        self.first_places_V = {name: mine(table_RV) for name, table_RV in pipeline.first_places_RV.items()}
        self.first_layer_V = mine(pipeline.first_layer_RV)

    def forward_only(self, carry: Tree, row: Tree) -> tuple[Tree, None]:
        # the last stage has no forward in these ticks
        flow = self.ends.entered_together(self._moved_on(carry["flow"]), row)
        flow, pools, _, _ = self._forward(carry["pools"], carry["sums"], flow, row, leaves=False)
        return carry | {"flow": self._sent(flow), "pools": pools}, None

    def both(self, carry: Tree, row: Tree) -> tuple[Tree, None]:
        flow, dflow = self.ends.entered_together(self._moved_on(carry["flow"]), row), self._moved_back(carry["dflow"])
        leaves = self.vocabulary is None
        flow, pools, sums, dlast = self._forward(carry["pools"], carry["sums"], flow, row, leaves=leaves)
        if self.vocabulary is not None:
            sums, dlast = self.ends.loss_together(sums, flow, row)
        dflow, sums = self._backward(pools, sums, dflow, dlast, row)
        sums = self.ends.back_together(sums, dflow.x, row)
        return {"flow": self._sent(flow), "dflow": self._sent(dflow), "pools": pools, "sums": sums}, None

    def backward_only(self, carry: Tree, row: Tree) -> tuple[Tree, None]:
        # nor has it a backward in these
        dflow, sums = self._backward(carry["pools"], carry["sums"], self._moved_back(carry["dflow"]), None, row)
        return carry | {"dflow": self._sent(dflow), "sums": self.ends.back_together(sums, dflow.x, row)}, None

    def score(self, carry: Tree, row: Tree) -> tuple[Tree, None]:
        """Layers for multi-token prediction are passed over."""
        flow = self.ends.entered_together(Flow(self._from_before(carry["flow"].x)), row)
        number, chunk = row["forward"][0], row["forward"][1]

        def compute(flow, loss, tokens):
            microbatch, stage = self.ends.microbatch(number), self._stage(chunk)
            flow = self.ends.enter(stage, flow, microbatch)
            shared = self.parts.shared(microbatch)

            def of_makeup(units, flow):
                return self._layers_forward(units, flow, None, (), None, chunk, shared, microbatch)[0]

            flow = self._by_makeup(chunk, of_makeup, flow)
            if self.vocabulary is not None:
                return flow, loss, tokens

            def leave(loss, tokens):
                one, predicted = self.parts.score(self.ends.parameters(), flow.x, microbatch)
                return loss + one, lax.dynamic_update_index_in_dim(tokens, predicted, number, 0)

            loss, tokens = lax.cond(stage == self.num_stages - 1, leave, lambda *a: a, loss, tokens)
            return flow, loss, tokens

        flow, loss, tokens = lax.cond(number >= 0, compute, lambda *a: a, flow, carry["loss"], carry["tokens"])
        if self.vocabulary is not None:
            loss, tokens = self.ends.score_together(loss, tokens, flow.x, row["leaving"])
        return {"flow": flow, "loss": loss, "tokens": tokens}, None


    def _from_before(self, tree: Tree) -> Tree:
        """What the rank before this one has just sent; the last rank's goes to the first, whose next chunk it is."""
        return lax.ppermute(tree, STAGE, [(rank, (rank + 1) % self.num_ranks) for rank in range(self.num_ranks)])

    def _moved_on(self, flow: Flow) -> Flow:
        return self._with_ahead(self._from_before(flow))

    def _moved_back(self, dflow: Flow) -> Flow:
        behind = [(rank, (rank - 1) % self.num_ranks) for rank in range(self.num_ranks)]
        return self._with_ahead(lax.ppermute(dflow, STAGE, behind))

    def _sent(self, flow: Flow) -> Flow:
        """What goes to the next rank: no states of depths, where the last stage makes them."""
        return flow if self.pipeline.sends_ahead else Flow(flow.x)

    def _with_ahead(self, flow: Flow) -> Flow:
        """With room for the states of depths where none were sent."""
        if self.pipeline.sends_ahead or not self.parts.num_depths:
            return flow
        return flow._replace(ahead=jnp.zeros((self.parts.num_depths, *flow.x.shape), flow.x.dtype))

    def _stage(self, chunk: jax.Array) -> jax.Array:
        return chunk * self.num_ranks + self.rank

    def _by_makeup(self, chunk: jax.Array, of_makeup: Callable, *operands: Any) -> Any:
        """`of_makeup(units, *operands)` for the units of this rank's chunk; no branch where all chunks are alike."""
        branches = [functools.partial(of_makeup, units) for units in self.pipeline.makeups]
        if len(branches) == 1:
            return branches[0](*operands)
        return lax.switch(lax.dynamic_index_in_dim(self.makeup_V, chunk, 0, False), branches, *operands)

    def _forward(
        self, pools: Tree, sums: Gradients, flow: Flow, row: Tree, *, leaves: bool
    ) -> tuple[Flow, Tree, Gradients, Flow]:
        """This tick's forward chunk: flow, pools, sums with the losses, and the gradient that the losses give."""
        number, chunk = row["forward"][0], row["forward"][1]
        looked_up = self.ends.looked_up_together(flow.x, row)

        def compute(flow, pools, sums):
            microbatch, stage = self.ends.microbatch(number), self._stage(chunk)
            flow = self.ends.enter(stage, flow, microbatch)
            shared = self.parts.shared(microbatch)

            def of_makeup(units, flow, pools):
                return self._layers_forward(units, flow, pools, looked_up, row["write"], chunk, shared, microbatch)

            flow, pools = self._by_makeup(chunk, of_makeup, flow, pools)
            if not leaves:
                return flow, pools, sums, zeros_like(flow)
            is_last = stage == self.num_stages - 1
            no_loss = lambda sums, flow, _: (sums, zeros_like(flow))  # noqa: E731
            sums, dlast = lax.cond(is_last, self.ends.loss, no_loss, sums, flow, microbatch)
            return flow, pools, sums, dlast

        def skip(flow, pools, sums):
            return flow, pools, sums, zeros_like(flow)

        return lax.cond(number >= 0, compute, skip, flow, pools, sums)

    def _layers_forward(
        self, units: tuple[Unit, ...], flow: Flow, pools: Tree, looked_up: tuple[jax.Array, ...], write: Tree,
        chunk: jax.Array, shared: Tree, microbatch: Tree,
    ) -> tuple[Flow, Tree]:  # fmt: skip
        """The units of a chunk in turn; where there are no pools, nothing is kept, and nothing predicted ahead.

        `looked_up` is what `Ends.looked_up_together` gives.
        """
        x, ahead = flow
        for run in unit_runs(units):
            if run.unit.is_ahead:
                if pools:
                    (x, ahead), pools = self._ahead_forward(run, x, pools, looked_up, write, chunk, shared, microbatch)
                continue
            first, layer = self._first(run, chunk), self.first_layer_V[chunk] + run.offset.layer
            kind, size = run.unit.kind, run.unit.num_layers

            def one(carry, i, kind=kind, size=size, first=first, layer=layer, run=run):
                x, pool = carry
                weights = self._weights(first.moved(i * size), kind)
                if pool is None:
                    parameters = gathered(join(*weights))
                    return (self.pipeline.apply_unit(kind, parameters, x, shared, layer + i * size), None), None
                y, kept = self.pipeline.unit_forward(kind, weights, x, shared, layer + i * size)
                place = write[kind][run.first_of_kind + i]
                pool = _with_slot(pool, place, kept)
                return (y, pool), None

            (x, pool), _ = lax.scan(one, (x, pools[kind] if pools else None), jnp.arange(run.length))
            pools = pools | {kind: pool} if pools else None
            if run.unit.feature is not None:
                x = self.parts.add_feature(self.ends.visual, x, microbatch, run.unit.feature)
        return Flow(x, ahead), pools

    def _ahead_forward(
        self, run: UnitRun, x: jax.Array, pools: Tree, looked_up: tuple[jax.Array, ...], write: Tree, chunk: jax.Array,
        shared: Tree, microbatch: Tree,
    ) -> tuple[Flow, Tree]:  # fmt: skip
        kind, seen = run.unit.kind, self.parts.seen_ahead(microbatch)
        if self.vocabulary is None:
            looked_up = tuple(self.parts.look_up(self.ends.parameters(), one, 0) for one in seen)
        embedded = [self.parts.fill(rows, self.ends.visual, one) for rows, one in zip(looked_up, seen, strict=True)]
        flow, kept = self.pipeline.ahead_forward(kind, self._weights_ahead(run, chunk), x, embedded, shared)
        place = write[kind][run.first_of_kind]
        pool = _with_slot(pools[kind], place, kept)
        return flow, pools | {kind: pool}

    def _ahead_backward(
        self, run: UnitRun, dflow: Flow, sums: Gradients, pools: Tree, read: Tree, chunk: jax.Array, shared: Tree,
        microbatch: Tree,
    ) -> tuple[jax.Array, Gradients, tuple[jax.Array, ...]]:  # fmt: skip
        """The gradients of what the unit read, the sums, and gradients of embeddings that all looked up together."""
        kind, seen = run.unit.kind, self.parts.seen_ahead(microbatch)
        place = read[kind][run.first_of_kind]
        kept = _slot(pools[kind], place)
        weights = self._weights_ahead(run, chunk)
        dweights, dx, dembedded = self.pipeline.ahead_backward(kind, weights, kept, shared, dflow)
        sums = add_ahead(sums, dweights, self._first(run, chunk), kind)

        def fill(looked_up, visual):
            return [self.parts.fill(rows, visual, one) for rows, one in zip(looked_up, seen, strict=True)]

        def look_up(variables):
            return tuple(self.parts.look_up(self.ends.parameters(variables), one, 0) for one in seen)

        # linear both, so that any embeddings will do
        dlooked_up, dvisual = jax.vjp(fill, tuple(map(jnp.zeros_like, dembedded)), self.ends.visual)[1](dembedded)
        sums = sums._replace(visual=add(sums.visual, dvisual))
        if self.vocabulary is None:
            [dends] = jax.vjp(look_up, self.ends.variables)[1](dlooked_up)
            sums, dlooked_up = sums._replace(ends=add(sums.ends, dends)), ()
        return dx, sums, dlooked_up

    def _weights_ahead(self, run: UnitRun, chunk: jax.Array) -> Weights:
        return weights_ahead(self.layers, self.ends.weights, self._first(run, chunk), run.unit.kind)

    def _backward(
        self, pools: Tree, sums: Gradients, dflow: Flow, dlast: Flow | None, row: Tree
    ) -> tuple[Flow, Gradients]:
        """This tick's backward chunk: the gradient of its input, and the sums with its gradients."""
        number, chunk = row["backward"][0], row["backward"][1]
        is_together = self.vocabulary is not None and self.parts.num_depths
        no_lookups = tuple(jnp.zeros_like(dflow.x) for _ in range(self.parts.num_depths)) if is_together else ()

        def compute(dflow, sums):
            microbatch, stage = self.ends.microbatch(number), self._stage(chunk)
            if dlast is not None:
                is_last = stage == self.num_stages - 1
                dflow = jax.tree.map(lambda last, dx: jnp.where(is_last, last, dx), dlast, dflow)
            shared = self.parts.shared(microbatch)

            def of_makeup(units, dflow, sums):
                return self._layers_backward(
                    units, dflow, sums, no_lookups, pools, row["read"], chunk, shared, microbatch
                )

            dflow, sums, dlooked_up = self._by_makeup(chunk, of_makeup, dflow, sums)
            if self.vocabulary is None:
                sums = lax.cond(stage == 0, self.ends.entered_back, lambda sums, *_: sums, sums, dflow.x, microbatch)
            return dflow, sums, dlooked_up

        dflow, sums, dlooked_up = lax.cond(number >= 0, compute, lambda *a: (*a, no_lookups), dflow, sums)
        return dflow, self.ends.looked_up_back_together(sums, dlooked_up, row)

    def _layers_backward(
        self, units: tuple[Unit, ...], dflow: Flow, sums: Gradients, no_lookups: tuple[jax.Array, ...], pools: Tree,
        read: Tree, chunk: jax.Array, shared: Tree, microbatch: Tree,
    ) -> tuple[Flow, Gradients, tuple[jax.Array, ...]]:  # fmt: skip
        """The last is as of `_ahead_backward`, `no_lookups` where the chunk predicts nothing ahead."""
        (dx, dahead), dlooked_up = dflow, no_lookups
        for run in reversed(unit_runs(units)):
            if run.unit.is_ahead:
                dx, sums, dlooked_up = self._ahead_backward(
                    run, Flow(dx, dahead), sums, pools, read, chunk, shared, microbatch
                )
                continue
            if run.unit.feature is not None:
                # adding is linear in the feature, and the identity in x
                def place(visual, run=run, dx=dx):
                    return self.parts.add_feature(visual, jnp.zeros_like(dx), microbatch, run.unit.feature)

                [dvisual] = jax.vjp(place, self.ends.visual)[1](dx)
                sums = sums._replace(visual=add(sums.visual, dvisual))
            first, layer = self._first(run, chunk), self.first_layer_V[chunk] + run.offset.layer
            kind, size = run.unit.kind, run.unit.num_layers

            def one(carry, i, kind=kind, size=size, first=first, layer=layer, run=run):
                dx, dlayers = carry
                weights = self._weights(first.moved(i * size), kind)
                place = read[kind][run.first_of_kind + i]
                kept = _slot(pools[kind], place)
                dweights, dx = self.pipeline.unit_backward(kind, weights, kept, shared, layer + i * size, dx)
                return (dx, add_at(dlayers, dweights, first.moved(i * size), kind)), None

            (dx, dlayers), _ = lax.scan(one, (dx, sums.layers), jnp.arange(run.length - 1, -1, -1))
            sums = sums._replace(layers=dlayers)
        return Flow(dx, dahead), sums, dlooked_up

    def _first(self, run: UnitRun, chunk: jax.Array) -> Place:
        """Where the first unit of a run lies among this rank's parameters."""
        of_all, of_kind = (self.first_places_V[name][chunk] for name in ("layers", run.unit.feed_forward))
        return Place(of_all + run.offset.layer, of_kind + run.offset.feed_forward)

    def _weights(self, place: Place, kind: Kind) -> Weights:
        return Weights(*(take(tree, place, kind) for tree in self.layers))


def _with_slot(pool: list[jax.Array], place: jax.Array, kept: list[jax.Array]) -> list[jax.Array]:
    """The buffers of a pool with what a unit keeps in one slot of each."""
    return [lax.dynamic_update_index_in_dim(b, a, place, 0) for b, a in zip(pool, kept, strict=True)]


def _slot(pool: list[jax.Array], place: jax.Array) -> list[jax.Array]:
    return [lax.dynamic_index_in_dim(buffer, place, 0, keepdims=False) for buffer in pool]
