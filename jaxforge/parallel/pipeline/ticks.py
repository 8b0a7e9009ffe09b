"""What one rank does in a tick of the schedule.

In a forward a chunk's units are computed in turn, and their residuals kept; in a backward they are read again.  The
first stage looks the tokens up, the last computes the loss; where the vocabulary lies over the stages, all do both
together, in the ticks in which a microbatch enters, leaves, or is back at the first stage.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxforge.cluster.mesh import STAGE
from jaxforge.ops.sharded_weight import differentiable, gathered, whole, with_differentiable
from jaxforge.optim.paths import join
from jaxforge.parallel.microbatch_loss import add_head_gradient
from jaxforge.parallel.pipeline.pieces import (
    Gradients,
    Kind,
    Place,
    Unit,
    UnitRun,
    Weights,
    add,
    add_at,
    take,
    unit_runs,
)

if TYPE_CHECKING:
    from jaxforge.parallel.pipeline.engine import Pipeline

Tree = Any


class Ticks:
    """The ticks of one call.  Everything here is this rank's."""

    def __init__(self, pipeline: "Pipeline", layers: Weights, ends: Weights, visual: Tree, batch: Tree):
        self.pipeline, self.parts = pipeline, pipeline.parts
        self.layers, self.ends, self.visual, self.batch = layers, ends, visual, batch
        self.variables = differentiable(ends.trainable)
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
        x = self._entered_together(self._moved_on(carry["x"]), row)
        x, pools, _, _ = self._forward(carry["pools"], carry["sums"], x, row, leaves=False)
        return carry | {"x": x, "pools": pools}, None

    def both(self, carry: Tree, row: Tree) -> tuple[Tree, None]:
        x, dx = self._entered_together(self._moved_on(carry["x"]), row), self._moved_back(carry["dx"])
        x, pools, sums, dlast = self._forward(carry["pools"], carry["sums"], x, row, leaves=self.vocabulary is None)
        if self.vocabulary is not None:
            sums, dlast = self._loss_together(sums, x, row)
        dx, sums = self._backward(pools, sums, dx, dlast, row)
        return {"x": x, "dx": dx, "pools": pools, "sums": self._back_together(sums, dx, row)}, None

    def backward_only(self, carry: Tree, row: Tree) -> tuple[Tree, None]:
        # nor has it a backward in these
        dx, sums = self._backward(carry["pools"], carry["sums"], self._moved_back(carry["dx"]), None, row)
        return carry | {"dx": dx, "sums": self._back_together(sums, dx, row)}, None

    def score(self, carry: Tree, row: Tree) -> tuple[Tree, None]:
        x = self._entered_together(self._moved_on(carry["x"]), row)
        number, chunk = row["forward"][0], row["forward"][1]

        def compute(x, loss, tokens):
            microbatch, stage = self._microbatch(number), self._stage(chunk)
            x = self._enter(stage, x, microbatch)
            shared = self.parts.shared(microbatch)

            def of_makeup(units, x):
                return self._layers_forward(units, x, None, None, chunk, shared, microbatch)[0]

            x = self._by_makeup(chunk, of_makeup, x)
            if self.vocabulary is not None:
                return x, loss, tokens

            def leave(loss, tokens):
                one, predicted = self.parts.score(self._ends(), x, microbatch)
                return loss + one, lax.dynamic_update_index_in_dim(tokens, predicted, number, 0)

            loss, tokens = lax.cond(stage == self.num_stages - 1, leave, lambda *a: a, loss, tokens)
            return x, loss, tokens

        x, loss, tokens = lax.cond(number >= 0, compute, lambda *a: a, x, carry["loss"], carry["tokens"])
        if self.vocabulary is not None:
            loss, tokens = self._score_together(loss, tokens, x, row["leaving"])
        return {"x": x, "loss": loss, "tokens": tokens}, None

    # What all stages do together, where the vocabulary lies over them; all take the same branch in a tick.

    def _entered_together(self, x: jax.Array, row: Tree) -> jax.Array:
        """x, on the first stage what enters it; as it is where the vocabulary is no matter of all stages."""
        vocabulary = self.vocabulary
        if vocabulary is None:
            return x

        def enter(x):
            microbatch = self._microbatch(row["entering"])
            embedded = vocabulary.sum(self._look_up(self._ends(), microbatch))
            return lax.cond(
                self.rank == 0, lambda x: self.parts.fill(embedded, self.visual, microbatch), lambda x: x, x
            )

        return lax.cond(row["entering"] >= 0, enter, lambda x: x, x)

    def _look_up(self, ends: Tree, microbatch: Tree) -> jax.Array:
        assert self.vocabulary is not None
        return self.parts.look_up(ends, microbatch, self.vocabulary.first_row(ends["embedding_VD"]))

    def _loss_together(self, sums: Gradients, x: jax.Array, row: Tree) -> tuple[Gradients, jax.Array]:
        """The loss of the microbatch on the last stage with its gradients; that of x is the last stage's."""
        is_last, vocabulary = self.rank == self.num_ranks - 1, self.vocabulary
        assert vocabulary is not None

        def compute(sums, x):
            def normed(variables, x):
                return self.parts.normed(self._ends(variables), x)

            own_hidden, vjp = jax.vjp(normed, self.variables, x)
            hidden = vocabulary.sum(jnp.where(is_last, own_hidden, 0))
            targets = self._microbatch(row["leaving"])["targets"]
            loss, z, dhidden, ends = self._with_head_gradient(
                functools.partial(vocabulary.add_loss, z_loss_coefficient=self.pipeline.z), sums.ends, hidden, targets
            )
            dends, dx = vjp(jnp.where(is_last, dhidden, 0))
            # every stage has the sums: one counts them
            loss, z = jnp.where(is_last, loss, 0), jnp.where(is_last, z, 0)
            return sums._replace(ends=add(ends, dends), loss=sums.loss + loss, z=sums.z + z), dx

        return lax.cond(row["leaving"] >= 0, compute, lambda sums, x: (sums, jnp.zeros_like(x)), sums, x)

    def _back_together(self, sums: Gradients, dx: jax.Array, row: Tree) -> Gradients:
        """The gradients of embedding and visual tokens, of the microbatch that is back at the first stage."""
        vocabulary = self.vocabulary
        if vocabulary is None:
            return sums

        def compute(sums, dx):
            microbatch = self._microbatch(row["back"])

            def fill(embedded, visual):
                return self.parts.fill(embedded, visual, microbatch)

            def look_up(variables):
                return self._look_up(self._ends(variables), microbatch)

            # linear both, so that any embeddings will do
            first_dx = jnp.where(self.rank == 0, dx, 0)
            dembedded, dvisual = jax.vjp(fill, jnp.zeros_like(dx), self.visual)[1](first_dx)
            [dends] = jax.vjp(look_up, self.variables)[1](vocabulary.sum(dembedded))
            return sums._replace(ends=add(sums.ends, dends), visual=add(sums.visual, dvisual))

        return lax.cond(row["back"] >= 0, compute, lambda sums, dx: sums, sums, dx)

    def _score_together(
        self, loss: jax.Array, tokens: jax.Array, x: jax.Array, number: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Adds the loss and the predictions of the microbatch on the last stage, there."""
        is_last, vocabulary = self.rank == self.num_ranks - 1, self.vocabulary
        assert vocabulary is not None

        def compute(loss, tokens):
            ends = self._ends()
            hidden = vocabulary.sum(jnp.where(is_last, self.parts.normed(ends, x), 0))
            targets = self._microbatch(number)["targets"]
            one, predicted = vocabulary.score(hidden, ends[self.parts.head], targets)
            predicted = jnp.where(is_last, predicted, 0)
            return loss + jnp.where(is_last, one, 0), lax.dynamic_update_index_in_dim(tokens, predicted, number, 0)

        return lax.cond(number >= 0, compute, lambda *a: a, loss, tokens)

    def _moved_on(self, x: jax.Array) -> jax.Array:
        """What the rank before this one has just sent; the last rank's goes to the first, whose next chunk it is."""
        return lax.ppermute(x, STAGE, [(rank, (rank + 1) % self.num_ranks) for rank in range(self.num_ranks)])

    def _moved_back(self, dx: jax.Array) -> jax.Array:
        return lax.ppermute(dx, STAGE, [(rank, (rank - 1) % self.num_ranks) for rank in range(self.num_ranks)])

    def _microbatch(self, number: jax.Array) -> Tree:
        return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, number, 0, keepdims=False), self.batch)

    def _stage(self, chunk: jax.Array) -> jax.Array:
        return chunk * self.num_ranks + self.rank

    def _enter(self, stage: jax.Array, x: jax.Array, microbatch: Tree) -> jax.Array:
        if self.vocabulary is not None:
            return x  # it has entered already
        return lax.cond(
            stage == 0, lambda x: self.parts.enter(self._ends(), self.visual, microbatch), lambda x: x, x
        )

    def _by_makeup(self, chunk: jax.Array, of_makeup: Callable, *operands: Any) -> Any:
        """`of_makeup(units, *operands)` for the units of this rank's chunk; no branch where all chunks are alike."""
        branches = [functools.partial(of_makeup, units) for units in self.pipeline.makeups]
        if len(branches) == 1:
            return branches[0](*operands)
        return lax.switch(lax.dynamic_index_in_dim(self.makeup_V, chunk, 0, False), branches, *operands)

    def _forward(
        self, pools: Tree, sums: Gradients, x: jax.Array, row: Tree, *, leaves: bool
    ) -> tuple[jax.Array, Tree, Gradients, jax.Array]:
        """This tick's forward chunk: x, pools, sums with the loss, and the gradient that the loss gives."""
        number, chunk = row["forward"][0], row["forward"][1]

        def compute(x, pools, sums):
            microbatch, stage = self._microbatch(number), self._stage(chunk)
            x = self._enter(stage, x, microbatch)
            shared = self.parts.shared(microbatch)

            def of_makeup(units, x, pools):
                return self._layers_forward(units, x, pools, row["write"], chunk, shared, microbatch)

            x, pools = self._by_makeup(chunk, of_makeup, x, pools)
            if not leaves:
                return x, pools, sums, jnp.zeros_like(x)
            is_last = stage == self.num_stages - 1
            no_loss = lambda sums, x, _: (sums, jnp.zeros_like(x))  # noqa: E731
            sums, dlast = lax.cond(is_last, self._loss, no_loss, sums, x, microbatch)
            return x, pools, sums, dlast

        def skip(x, pools, sums):
            return x, pools, sums, jnp.zeros_like(x)

        return lax.cond(number >= 0, compute, skip, x, pools, sums)

    def _loss(self, sums: Gradients, x: jax.Array, microbatch: Tree) -> tuple[Gradients, jax.Array]:
        """Loss of a microbatch with its gradients; on the last stage."""
        if self.parts.fused is not None:
            add_loss = functools.partial(add_head_gradient, self.parts.fused)
            hidden, vjp = jax.vjp(lambda variables, x: self.parts.normed(self._ends(variables), x), self.variables, x)
            loss, z, dhidden, ends = self._with_head_gradient(add_loss, sums.ends, hidden, microbatch["targets"])
            dends, dx = vjp(dhidden)
            return sums._replace(ends=add(ends, dends), loss=sums.loss + loss, z=sums.z + z), dx

        def leave(variables, x):
            return self.parts.leave(self._ends(variables), x, microbatch)

        (loss, z), vjp = jax.vjp(leave, self.variables, x)
        dends, dx = vjp((jnp.ones_like(loss), jnp.full_like(z, self.pipeline.z)))
        return sums._replace(ends=add(sums.ends, dends), loss=sums.loss + loss, z=sums.z + z), dx

    def _with_head_gradient(
        self, add_loss: Callable, sums: Tree, hidden: jax.Array, targets: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array, Tree]:
        """(loss, z, gradient of hidden, sums of the ends with the head's), by (hidden, head, targets, table, sum)."""
        name = self.parts.head
        table, total = self.ends.trainable.get(name), sums.get(name)
        loss, z, dhidden, total = add_loss(hidden, self._ends()[name], targets, table, total)
        return loss, z, dhidden, sums | {name: total} if total is not None else sums

    def _layers_forward(
        self, units: tuple[Unit, ...], x: jax.Array, pools: Tree, write: Tree, chunk: jax.Array, shared: Tree,
        microbatch: Tree,
    ) -> tuple[jax.Array, Tree]:  # fmt: skip
        """The units of a chunk in turn; where there are no pools, nothing is kept."""
        for run in unit_runs(units):
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
                pool = [lax.dynamic_update_index_in_dim(b, a, place, 0) for b, a in zip(pool, kept, strict=True)]
                return (y, pool), None

            (x, pool), _ = lax.scan(one, (x, pools[kind] if pools else None), jnp.arange(run.length))
            pools = pools | {kind: pool} if pools else None
            if run.unit.feature is not None:
                x = self.parts.add_feature(self.visual, x, microbatch, run.unit.feature)
        return x, pools

    def _backward(
        self, pools: Tree, sums: Gradients, dx: jax.Array, dlast: jax.Array | None, row: Tree
    ) -> tuple[jax.Array, Gradients]:
        """This tick's backward chunk: the gradient of its input, and the sums with its gradients."""
        number, chunk = row["backward"][0], row["backward"][1]

        def compute(dx, sums):
            microbatch, stage = self._microbatch(number), self._stage(chunk)
            if dlast is not None:
                dx = jnp.where(stage == self.num_stages - 1, dlast, dx)
            shared = self.parts.shared(microbatch)

            def of_makeup(units, dx, sums):
                return self._layers_backward(units, dx, sums, pools, row["read"], chunk, shared, microbatch)

            dx, sums = self._by_makeup(chunk, of_makeup, dx, sums)
            if self.vocabulary is None:
                sums = lax.cond(stage == 0, self._entered, lambda sums, *_: sums, sums, dx, microbatch)
            return dx, sums

        return lax.cond(number >= 0, compute, lambda dx, sums: (dx, sums), dx, sums)

    def _entered(self, sums: Gradients, dx: jax.Array, microbatch: Tree) -> Gradients:
        """The gradients of embedding and visual tokens; on the first stage.  A lookup needs no residuals."""

        def enter(variables, visual):
            return self.parts.enter(self._ends(variables), visual, microbatch)

        dends, dvisual = jax.vjp(enter, self.variables, self.visual)[1](dx)
        return sums._replace(ends=add(sums.ends, dends), visual=add(sums.visual, dvisual))

    def _layers_backward(
        self, units: tuple[Unit, ...], dx: jax.Array, sums: Gradients, pools: Tree, read: Tree, chunk: jax.Array,
        shared: Tree, microbatch: Tree,
    ) -> tuple[jax.Array, Gradients]:  # fmt: skip
        for run in reversed(unit_runs(units)):
            if run.unit.feature is not None:
                # adding is linear in the feature, and the identity in x
                def place(visual, run=run, dx=dx):
                    return self.parts.add_feature(visual, jnp.zeros_like(dx), microbatch, run.unit.feature)

                [dvisual] = jax.vjp(place, self.visual)[1](dx)
                sums = sums._replace(visual=add(sums.visual, dvisual))
            first, layer = self._first(run, chunk), self.first_layer_V[chunk] + run.offset.layer
            kind, size = run.unit.kind, run.unit.num_layers

            def one(carry, i, kind=kind, size=size, first=first, layer=layer, run=run):
                dx, dlayers = carry
                weights = self._weights(first.moved(i * size), kind)
                place = read[kind][run.first_of_kind + i]
                kept = [lax.dynamic_index_in_dim(buffer, place, 0, keepdims=False) for buffer in pools[kind]]
                dweights, dx = self.pipeline.unit_backward(kind, weights, kept, shared, layer + i * size, dx)
                return (dx, add_at(dlayers, dweights, first.moved(i * size), kind)), None

            (dx, dlayers), _ = lax.scan(one, (dx, sums.layers), jnp.arange(run.length - 1, -1, -1))
            sums = sums._replace(layers=dlayers)
        return dx, sums

    def _ends(self, variables: Tree | None = None) -> Tree:
        """The decoder's parameters beside its layers, whole; as a function of what is differentiated."""
        trained = self.variables if variables is None else variables
        return whole(join(with_differentiable(self.ends.trainable, trained), self.ends.frozen))

    def _first(self, run: UnitRun, chunk: jax.Array) -> Place:
        """Where the first unit of a run lies among this rank's parameters."""
        of_all, of_kind = (self.first_places_V[name][chunk] for name in ("layers", run.unit.feed_forward))
        return Place(of_all + run.offset.layer, of_kind + run.offset.feed_forward)

    def _weights(self, place: Place, kind: Kind) -> Weights:
        return Weights(*(take(tree, place, kind) for tree in self.layers))
