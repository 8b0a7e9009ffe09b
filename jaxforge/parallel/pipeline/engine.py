"""Interleaved 1F1B in one program: every rank runs this, at its own place in the tables of the schedule.

A tick moves activations one rank on and gradients one rank back, then computes at most one chunk forward and one
backward.  The grain is the unit: one layer, or a group that is recomputed together.  A unit's forward pass takes its
`jax.vjp` and keeps the residuals in a pool until the backward pass of the same (microbatch, chunk); the slots are given
out by lifetime (`buffers.py`), so memory doesn't grow with the number of microbatches.  Embedding and loss are computed
by the ranks of the first and the last stage alone.  The last stage goes backward in the tick of its forward.

All of it is manual over "stage" and the data axes, automatic over tensor.  A branch that only some ranks take may hold
collectives over tensor, never over stage: the two permutes stay outside of every branch.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxforge.cluster.mesh import STAGE
from jaxforge.config.activations import LAYER_INPUT
from jaxforge.memory.policy import Policies
from jaxforge.ops.cross_entropy import Losses
from jaxforge.ops.sharded_weight import differentiable, gathered, reduced
from jaxforge.optim.paths import join
from jaxforge.parallel.pipeline.buffers import unit_slots
from jaxforge.parallel.pipeline.choice import first_places
from jaxforge.parallel.pipeline.layout import PipelineLayout
from jaxforge.parallel.pipeline.pieces import (
    Flow,
    Gradients,
    Kind,
    Parts,
    Place,
    Unit,
    Weights,
    no_gradient,
    take,
    weights_ahead,
)
from jaxforge.parallel.pipeline.residuals import Residuals
from jaxforge.parallel.pipeline.schedule import Schedule
from jaxforge.parallel.pipeline.ticks import Ticks
from jaxforge.parallel.pipeline.vocabulary import Vocabulary

Tree = Any


class Pipeline:
    """The engine for one layout and number of microbatches; called inside of a region that is manual over stage.

    Args:
      units_by_stage: the units of every stage.
      has_experts: of each layer of the decoder's stack, whether it has; () where none has.
      policies: what units keep of their activations, and where.
      z_loss_coefficient: weight of the squared log-sum-exp in the gradients.
      vocabulary: where embedding and head lie over the stages, and all stages share their work; None where the first
        and the last stage do it alone.
    """

    def __init__(
        self,
        parts: Parts,
        layout: PipelineLayout,
        schedule: Schedule,
        units_by_stage: Sequence[tuple[Unit, ...]],
        *,
        has_experts: tuple[bool, ...] = (),
        policies: Policies,
        z_loss_coefficient: float,
        vocabulary: Vocabulary | None = None,
    ):
        self.parts, self.layout, self.schedule = parts, layout, schedule
        self.z, self.vocabulary, self.policies = z_loss_coefficient, vocabulary, policies
        self.makeups = list(dict.fromkeys(units_by_stage))
        shape = (layout.virtual_stages, layout.pipeline_size)
        makeup_S = np.array([self.makeups.index(units) for units in units_by_stage], np.int32)
        self.makeup_RV = makeup_S.reshape(shape).T
        self.first_layer_RV = np.array([s.first_layer for s in layout.stages], np.int32).reshape(shape).T
        num_layers = layout.num_layers + sum(layout.num_mtp_layers_by_stage)
        self.first_places_RV = first_places(layout, has_experts or (False,) * num_layers)
        # the states of multi-token prediction go along where a later stage has the loss
        self.sends_ahead = layout.mtp_stage is not None and layout.mtp_stage < layout.num_stages - 1
        self._slots = unit_slots(schedule, units_by_stage)
        self._residuals = {kind: Residuals() for kind in self._slots}

    def gradients(self, layers: Weights, ends: Weights, visual: Tree, batch: Tree) -> Gradients:
        """The whole schedule, forward and backward.

        Args:
          layers: stacks [slots of this rank, ...].
          ends: the decoder's other parameters, equal on all stages.
          visual: what the encoder gave for all microbatches, or None.
          batch: arrays [M, B, ...], equal on all stages.
        """
        tables = self._tables_of_this_rank()
        x = self._abstract_activation(ends, visual, batch)
        zeros = functools.partial(jax.tree.map, lambda a: jnp.zeros(a.shape, jnp.float32))
        nothing = Flow(jnp.zeros(x.shape, x.dtype))
        if self.sends_ahead:
            nothing = nothing._replace(ahead=jnp.zeros((self.parts.num_depths, *x.shape), x.dtype))
        carry = {
            "flow": nothing,
            "dflow": nothing,
            "pools": self._empty_pools(layers, ends, x, batch),
            "sums": Gradients(
                zeros(differentiable(layers.trainable)),
                zeros(differentiable(ends.trainable)),
                no_gradient(visual),
                Losses.zeros(self.parts.num_depths),
            ),
        }
        run = Ticks(self, layers, ends, visual, batch)
        steps = (run.forward_only, run.both, run.backward_only)
        for phase, step in zip(self.schedule.phases, steps, strict=True):
            if phase.stop > phase.start:
                rows = jax.tree.map(lambda table, phase=phase: table[phase], tables)
                carry, _ = lax.scan(step, carry, rows)
        return carry["sums"]

    def score(self, layers: Weights, ends: Weights, visual: Tree, batch: Tree) -> tuple[jax.Array, jax.Array]:
        """The forwards alone: this stage's part of the loss sum, and of the predicted tokens [M, B, S] int32."""
        tables = self._tables_of_this_rank()
        x = self._abstract_activation(ends, visual, batch)
        carry: Tree = {
            "flow": Flow(jnp.zeros(x.shape, x.dtype)),
            "loss": jnp.zeros((), jnp.float32),
            "tokens": jnp.zeros(batch["tokens"].shape, jnp.int32),
        }
        rows = jax.tree.map(lambda table: table[: self.schedule.forward_ticks], tables)
        carry, _ = lax.scan(Ticks(self, layers, ends, visual, batch).score, carry, rows)
        return carry["loss"], carry["tokens"]

    def _tables_of_this_rank(self) -> Tree:
        """This rank's columns of the schedule's tables, [T, ...] each."""
        rank = lax.axis_index(STAGE)
        tables = {
            "forward": self.schedule.forward,
            "backward": self.schedule.backward,
            "write": {kind: slots.write for kind, slots in self._slots.items()},
            "read": {kind: slots.read for kind, slots in self._slots.items()},
        }
        mine = jax.tree.map(lambda table: lax.dynamic_index_in_dim(jnp.asarray(table), rank, 1, False), tables)
        return mine | {name: jnp.asarray(table_T) for name, table_T in self._ends_of_the_pipeline().items()}

    def _ends_of_the_pipeline(self) -> dict[str, np.ndarray]:
        """The microbatch, or -1, that enters the first stage in each tick, leaves the last, is back at the first.

        Where there is multi-token prediction, also the one that enters its stage, and is back there.
        """

        def microbatch_at(stage, table):
            chunk, rank = divmod(stage, self.layout.pipeline_size)
            of_rank = table[:, rank]
            return np.where(of_rank[:, 1] == chunk, of_rank[:, 0], -1)

        forward, backward, last = self.schedule.forward, self.schedule.backward, self.layout.num_stages - 1
        found = {
            "entering": microbatch_at(0, forward),
            "leaving": microbatch_at(last, forward),
            "back": microbatch_at(0, backward),
        }
        if (stage := self.layout.mtp_stage) is not None:
            found |= {"entering_ahead": microbatch_at(stage, forward), "back_ahead": microbatch_at(stage, backward)}
        return found

    def _abstract_activation(self, ends: Weights, visual: Tree, batch: Tree) -> jax.ShapeDtypeStruct:
        def enter(ends, visual, microbatch):
            return self.parts.enter(gathered(join(*ends)), visual, microbatch)

        return jax.eval_shape(enter, ends, visual, jax.tree.map(lambda a: a[0], batch))  # of any rows

    def _empty_pools(self, layers: Weights, ends: Weights, x: jax.ShapeDtypeStruct, batch: Tree) -> Tree:
        """A buffer [slots, ...] for each residual of each kind of unit, in the memory where that lies."""
        pools = {}
        for kind in self._slots:

            spaces: list[Any] = []

            def probe(layers, ends, x, embedded, microbatch, layer, kind=kind, spaces=spaces):
                shared = self.parts.shared(microbatch)
                if kind.is_ahead:
                    weights = weights_ahead(layers, ends, Place(0, 0), kind)
                    kept = self.ahead_forward(kind, weights, x, embedded, shared)[1]
                else:
                    weights = Weights(*(take(tree, Place(0, 0), kind) for tree in layers))
                    kept = self.unit_forward(kind, weights, x, shared, layer)[1]
                spaces.extend(jax.typeof(array).memory_space for array in kept)
                return kept

            microbatch = jax.tree.map(lambda a: a[0], batch)
            embedded = [x] * self.parts.num_depths
            kept = jax.eval_shape(probe, layers, ends, x, embedded, microbatch, jax.ShapeDtypeStruct((), jnp.int32))
            # Filled with different numbers: of equal buffers XLA would make one, and then copies of it.  What is read
            # was written before.
            shapes = [(self._slots[kind].num_slots, *one.shape) for one in kept]
            pools[kind] = [
                jax.device_put(jnp.full(shape, number, one.dtype), space)
                for number, (shape, one, space) in enumerate(zip(shapes, kept, spaces, strict=True))
            ]
        return pools

    def apply_unit(self, kind: Kind, weights: Tree, x: jax.Array, shared: Tree, layer: Any) -> jax.Array:
        """A unit's layers, the first of which is number `layer`; `weights` are as `take` gives them."""
        num_layers = kind.num_layers

        def several(weights, x):
            x = checkpoint_name(x, LAYER_INPUT)
            if num_layers == 1:
                return self.parts.layer(weights, x, shared, layer)

            def one(x, weights_and_number):
                weights, number = weights_and_number
                return self.parts.layer(weights, x, shared, number), None

            return lax.scan(one, x, (weights, layer + jnp.arange(num_layers)))[0]

        return self.policies.checkpoint(several, is_recomputed=kind.is_recomputed)(weights, x)

    def unit_forward(
        self, kind: Kind, weights: Weights, x: jax.Array, shared: Tree, layer: Any
    ) -> tuple[jax.Array, list[jax.Array]]:
        """The unit's output, and the residuals that must be kept."""
        whole = gathered(weights)

        def apply(trainable, x):
            return self.apply_unit(kind, join(trainable, whole.frozen), x, shared, layer)

        y, vjp = jax.vjp(apply, whole.trainable, x)
        return y, self._residuals[kind].split(vjp, jax.tree.leaves((whole, shared, layer)))

    def unit_backward(
        self, kind: Kind, weights: Weights, kept: list[jax.Array], shared: Tree, layer: Any, dy: jax.Array
    ) -> tuple[Tree, jax.Array]:
        """Gradients of the unit's trainable parameters, and of its input."""
        known = jax.tree.leaves((gathered(weights), shared, layer))
        dweights, dx = self._residuals[kind].rebuild(kept, known)(dy)
        return reduced(weights.trainable, dweights), dx

    def ahead_forward(
        self, kind: Kind, weights: Weights, x: jax.Array, embedded: Sequence[jax.Array], shared: Tree
    ) -> tuple[Flow, list[jax.Array]]:
        """The states of decoder and depths, and the residuals that must be kept.

        Args:
          weights: as `weights_ahead` gives them.
          embedded: for each depth the embeddings of the tokens that it sees, [B, S, D].
        """
        whole = gathered(weights)

        def apply(trainable, x, embedded):
            parameters = join(trainable, whole.frozen)
            # a norm is elementwise: found again from x
            states = jax.checkpoint(self.parts.normed, prevent_cse=False)(parameters, x)
            depths, layers = (list(parameters[name].values()) for name in ("mtp", "layers"))
            return Flow(states, jnp.stack(self.parts.ahead(depths, layers, states, embedded, shared)))

        flow, vjp = jax.vjp(apply, whole.trainable, x, list(embedded))
        return flow, self._residuals[kind].split(vjp, jax.tree.leaves((whole, shared)))

    def ahead_backward(
        self, kind: Kind, weights: Weights, kept: list[jax.Array], shared: Tree, dflow: Flow
    ) -> tuple[Tree, jax.Array, list[jax.Array]]:
        """Gradients of what trains of the weights, of x, and of the embeddings."""
        known = jax.tree.leaves((gathered(weights), shared))
        dweights, dx, dembedded = self._residuals[kind].rebuild(kept, known)(dflow)
        return reduced(weights.trainable, dweights), dx, dembedded
