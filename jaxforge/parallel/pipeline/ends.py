"""What a stage does with embedding and head in a tick: what enters the first, and the losses of the last.

The two stages do it alone; or, where the vocabulary lies over the stages, all do it together, in the ticks in which a
microbatch enters, leaves, or is back at the first stage.  The stage with the layers for multi-token prediction looks up
the tokens that these see in the same ways.
"""

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxforge.cluster.mesh import STAGE
from jaxforge.models.multi_token import targets_and_weights
from jaxforge.ops.cross_entropy import Losses
from jaxforge.ops.sharded_weight import differentiable, whole, with_differentiable
from jaxforge.optim.paths import join
from jaxforge.parallel.microbatch_loss import add_head_gradient
from jaxforge.parallel.pipeline.pieces import Flow, Gradients, Weights, add, zeros_like

if TYPE_CHECKING:
    from jaxforge.parallel.pipeline.engine import Pipeline

Tree = Any


class Ends:
    """Embedding, visual tokens and head, in the ticks of one call.  Everything here is this rank's."""

    def __init__(self, pipeline: "Pipeline", weights: Weights, visual: Tree, batch: Tree):
        self.parts, self.vocabulary, self.z = pipeline.parts, pipeline.vocabulary, pipeline.z
        self.weights, self.visual, self.batch = weights, visual, batch
        self.variables = differentiable(weights.trainable)
        self.num_ranks, self.rank = pipeline.layout.pipeline_size, lax.axis_index(STAGE)

    def parameters(self, variables: Tree | None = None) -> Tree:
        """The decoder's parameters beside its layers, whole; as a function of what is differentiated."""
        trained = self.variables if variables is None else variables
        return whole(join(with_differentiable(self.weights.trainable, trained), self.weights.frozen))

    def microbatch(self, number: jax.Array) -> Tree:
        return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, number, 0, keepdims=False), self.batch)

    def enter(self, stage: jax.Array, flow: Flow, microbatch: Tree) -> Flow:
        """The flow, on the first stage what enters it, where that stage finds this alone."""
        if self.vocabulary is not None:
            return flow  # it has entered already

        def enter(x):
            return self.parts.enter(self.parameters(), self.visual, microbatch)

        return flow._replace(x=lax.cond(stage == 0, enter, lambda x: x, flow.x))

    def entered_back(self, sums: Gradients, dx: jax.Array, microbatch: Tree) -> Gradients:
        """The gradients of embedding and visual tokens; on the first stage.  A lookup needs no residuals."""

        def enter(variables, visual):
            return self.parts.enter(self.parameters(variables), visual, microbatch)

        dends, dvisual = jax.vjp(enter, self.variables, self.visual)[1](dx)
        return sums._replace(ends=add(sums.ends, dends), visual=add(sums.visual, dvisual))

    def _states(self, variables: Tree, flow: Flow) -> tuple[jax.Array, ...]:
        """What the head reads, on the last stage: the decoder's states, and those of each depth."""
        if not self.parts.num_depths:
            return (self.parts.normed(self.parameters(variables), flow.x),)
        return (flow.x, *(flow.ahead[i] for i in range(self.parts.num_depths)))

    def loss(self, sums: Gradients, flow: Flow, microbatch: Tree) -> tuple[Gradients, Flow]:
        """Losses of a microbatch with their gradients; on the last stage."""
        if self.parts.fused is not None:
            add_loss = functools.partial(add_head_gradient, self.parts.fused)
            states, vjp = jax.vjp(self._states, self.variables, flow)
            losses, dstates, ends = self._with_head_gradient(add_loss, sums.ends, states, microbatch)
            dends, dflow = vjp(dstates)
            return sums._replace(ends=add(ends, dends), losses=add(sums.losses, losses)), dflow

        def objective(variables, flow):
            losses = self.parts.leave(self.parameters(variables), self._states(variables, flow), microbatch)
            return losses.objective(self.z), losses

        (_, losses), (dends, dflow) = jax.value_and_grad(objective, (0, 1), has_aux=True)(self.variables, flow)
        return sums._replace(ends=add(sums.ends, dends), losses=add(sums.losses, losses)), dflow

    def _with_head_gradient(
        self, add_loss: Callable, sums: Tree, states: Sequence[jax.Array], microbatch: Tree
    ) -> tuple[Losses, tuple[jax.Array, ...], Tree]:
        """(losses, gradients of the states, sums of the ends with the head's), by what gives the first two."""
        name = self.parts.head
        table, total = self.weights.trainable.get(name), sums.get(name)
        targets = targets_and_weights(microbatch, self.parts.num_depths)
        losses, dstates, total = add_loss(states, self.parameters()[name], targets, table, total)
        return losses, dstates, sums | {name: total} if total is not None else sums

    # What all stages do together, where the vocabulary lies over them; all take the same branch in a tick.

    def entered_together(self, flow: Flow, row: Tree) -> Flow:
        """The flow, on the first stage what enters it; as it is where the vocabulary is no matter of all stages."""
        vocabulary = self.vocabulary
        if vocabulary is None:
            return flow

        def enter(x):
            microbatch = self.microbatch(row["entering"])
            embedded = vocabulary.sum(self._look_up(self.parameters(), microbatch))
            return lax.cond(
                self.rank == 0, lambda x: self.parts.fill(embedded, self.visual, microbatch), lambda x: x, x
            )

        return flow._replace(x=lax.cond(row["entering"] >= 0, enter, lambda x: x, flow.x))

    def looked_up_together(self, x: jax.Array, row: Tree) -> tuple[jax.Array, ...]:
        """For each depth of multi-token prediction the embeddings of the tokens that it sees, where all look up.

        They are of the microbatch that enters their stage; () where that stage looks them up alone.
        """
        vocabulary, num_depths = self.vocabulary, self.parts.num_depths
        if vocabulary is None or not num_depths:
            return ()

        def look_up():
            ends, seen = self.parameters(), self.parts.seen_ahead(self.microbatch(row["entering_ahead"]))
            return tuple(vocabulary.sum(self._look_up(ends, one)) for one in seen)

        return lax.cond(row["entering_ahead"] >= 0, look_up, lambda: (jnp.zeros_like(x),) * num_depths)

    def _look_up(self, ends: Tree, microbatch: Tree) -> jax.Array:
        assert self.vocabulary is not None
        return self.parts.look_up(ends, microbatch, self.vocabulary.first_row(ends["embedding_VD"]))

    def loss_together(self, sums: Gradients, flow: Flow, row: Tree) -> tuple[Gradients, Flow]:
        """The losses of the microbatch on the last stage, with gradients; that of the flow is the last stage's."""
        is_last, vocabulary = self.rank == self.num_ranks - 1, self.vocabulary
        assert vocabulary is not None

        def of_last(tree):
            return jax.tree.map(lambda a: jnp.where(is_last, a, 0), tree)

        def compute(sums, flow):
            own_states, vjp = jax.vjp(self._states, self.variables, flow)
            states = [vocabulary.sum(one) for one in of_last(own_states)]
            losses, dstates, ends = self._with_head_gradient(
                functools.partial(vocabulary.add_loss, z_loss_coefficient=self.z),
                sums.ends, states, self.microbatch(row["leaving"]),
            )  # fmt: skip
            dends, dflow = vjp(of_last(dstates))
            # every stage has the losses: one counts them
            return sums._replace(ends=add(ends, dends), losses=add(sums.losses, of_last(losses))), dflow

        return lax.cond(row["leaving"] >= 0, compute, lambda sums, flow: (sums, zeros_like(flow)), sums, flow)

    def back_together(self, sums: Gradients, dx: jax.Array, row: Tree) -> Gradients:
        """The gradients of embedding and visual tokens, of the microbatch that is back at the first stage."""
        vocabulary = self.vocabulary
        if vocabulary is None:
            return sums

        def compute(sums, dx):
            microbatch = self.microbatch(row["back"])

            def fill(embedded, visual):
                return self.parts.fill(embedded, visual, microbatch)

            def look_up(variables):
                return self._look_up(self.parameters(variables), microbatch)

            # linear both, so that any embeddings will do
            first_dx = jnp.where(self.rank == 0, dx, 0)
            dembedded, dvisual = jax.vjp(fill, jnp.zeros_like(dx), self.visual)[1](first_dx)
            [dends] = jax.vjp(look_up, self.variables)[1](vocabulary.sum(dembedded))
            return sums._replace(ends=add(sums.ends, dends), visual=add(sums.visual, dvisual))

        return lax.cond(row["back"] >= 0, compute, lambda sums, dx: sums, sums, dx)

    def looked_up_back_together(self, sums: Gradients, dembedded: tuple[jax.Array, ...], row: Tree) -> Gradients:
        """The gradients of the embeddings that `looked_up_together` gave, of the microbatch that is back there."""
        vocabulary = self.vocabulary
        if vocabulary is None or not self.parts.num_depths:
            return sums

        def compute(sums, dembedded):
            seen = self.parts.seen_ahead(self.microbatch(row["back_ahead"]))

            def look_up(variables):
                ends = self.parameters(variables)
                return tuple(self._look_up(ends, one) for one in seen)

            # those of other ranks are zeros
            summed = tuple(vocabulary.sum(one) for one in dembedded)
            [dends] = jax.vjp(look_up, self.variables)[1](summed)
            return sums._replace(ends=add(sums.ends, dends))

        return lax.cond(row["back_ahead"] >= 0, compute, lambda sums, _: sums, sums, dembedded)

    def score_together(
        self, loss: jax.Array, tokens: jax.Array, x: jax.Array, number: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Adds the loss and the predictions of the microbatch on the last stage, there."""
        is_last, vocabulary = self.rank == self.num_ranks - 1, self.vocabulary
        assert vocabulary is not None

        def compute(loss, tokens):
            ends = self.parameters()
            hidden = vocabulary.sum(jnp.where(is_last, self.parts.normed(ends, x), 0))
            targets = self.microbatch(number)["targets"]
            one, predicted = vocabulary.score(hidden, ends[self.parts.head], targets)
            predicted = jnp.where(is_last, predicted, 0)
            return loss + jnp.where(is_last, one, 0), lax.dynamic_update_index_in_dim(tokens, predicted, number, 0)

        return lax.cond(number >= 0, compute, lambda *a: a, loss, tokens)
