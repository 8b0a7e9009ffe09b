"""A step in phases: all images encoded, then the decoder, then the gradient back through the encoder.

The decoder goes through the pipeline, or without one through the microbatches in turn.  This is the way of every step
with a pipeline, and of every step whose devices encode different images; other steps have no phases
(`jaxforge.training.step.make_gradients`).
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jaxforge.cluster.mesh import DATA_AXES, MANUAL_AXES, STAGE, large_axes
from jaxforge.data.rows import PATCH_KEYS
from jaxforge.models.multi_token import of_depths
from jaxforge.ops.cross_entropy import Losses
from jaxforge.ops.sharded_weight import differentiable, whole
from jaxforge.optim.paths import join
from jaxforge.parallel.data import DataSharding
from jaxforge.parallel.encoder import ENCODER_MODULES, EncoderPhase
from jaxforge.parallel.microbatch_loss import FusedLoss, PlainLoss, step_sums
from jaxforge.parallel.pipeline.engine import Pipeline
from jaxforge.parallel.pipeline.pieces import Gradients, Parts, Weights, no_gradient

Tree = Any


@dataclasses.dataclass(frozen=True)
class Phases:
    """What a step in phases consists of.

    Attributes:
      mesh: the devices.
      sharding: what is sharded over data parallel ranks.
      parts: the decoder's pieces.
      pipeline: number of microbatches -> the engine; None without a pipeline, where `parts.layers` runs all layers.
      encoder: the encoder's phase, or None for a language model.
      count: patch and text arrays of this rank's rows -> counts to be summed over data parallel ranks; of these,
        "images" differ between stages where these encode different ones.
      with_counts: (text arrays, trainable parameters, global counts) -> text arrays with what layers and loss need of
        them.
      per_target: (gradients, global counts) -> gradients of the mean loss.
      z_loss_coefficient: weight of the squared log-sum-exp.
    """

    mesh: Mesh
    sharding: DataSharding
    parts: Parts
    pipeline: Callable[[int], Pipeline] | None
    encoder: EncoderPhase | None
    count: Callable[[Tree], dict[str, jax.Array]]
    with_counts: Callable[[Tree, Tree, dict[str, jax.Array]], Tree]
    per_target: Callable[[Tree, dict[str, jax.Array]], Tree]
    z_loss_coefficient: float

    def gradients(self, trainable: Tree, frozen: Tree, batch: Tree) -> tuple[Tree, dict[str, jax.Array]]:
        """(gradients, sums) as `make_gradients` gives them; parameters are in the compute dtype."""
        specs = self.sharding.weight_specs
        in_specs = (specs(trainable), specs(frozen), self._batch_specs(batch))
        out_specs = (self.sharding.gradient_specs(trainable), PartitionSpec())
        return self._over_mesh(self._gradients, in_specs, out_specs)(trainable, frozen, batch)

    def scores(self, parameters: Tree, batch: Tree) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(loss sum, target tokens, predicted tokens [M, B, S]) as `make_scoring` gives them."""
        in_specs = (self.sharding.weight_specs(parameters), self._batch_specs(batch))
        out_specs = (PartitionSpec(), PartitionSpec(), PartitionSpec(None, DATA_AXES))
        return self._over_mesh(self._scores, in_specs, out_specs)(parameters, batch)

    def _gradients(self, trainable: Tree, frozen: Tree, batch: Tree) -> tuple[Tree, dict[str, jax.Array]]:
        trainable, frozen = self.sharding.trained(trainable), self.sharding.frozen(frozen)
        layers, ends = _decoder_weights(trainable, frozen)
        encoder = Weights(*(_encoder_modules(tree) for tree in (trainable, frozen)))
        text, patches = self._text_and_patches(batch)
        counts = self._counts(batch)
        text = self.with_counts(text, trainable, counts)
        visual = self.encoder.forward(join(*encoder), patches) if self.encoder else None
        found = self._decoder_gradients(layers, ends, visual, text)
        decoder = found.ends | ({"layers": found.layers} if layers.trainable else {})
        sums = {"decoder": decoder} if decoder else {}
        if self.encoder and encoder.trainable:
            sums = sums | self.encoder.backward(*encoder, patches, found.visual)
        losses = self._sum(found.losses, (STAGE, *DATA_AXES))
        return self.per_target(self.sharding.reduced(sums), counts), losses._asdict() | counts

    def _scores(self, parameters: Tree, batch: Tree) -> tuple[jax.Array, jax.Array, jax.Array]:
        parameters = self.sharding.frozen(parameters)
        layers, ends = _decoder_weights({}, parameters)
        text, patches = self._text_and_patches(batch)
        visual = self.encoder.forward(_encoder_modules(parameters), patches) if self.encoder else None
        if self.pipeline is not None:
            loss, tokens_MBS = self.pipeline(text["tokens"].shape[0]).score(layers, ends, visual, text)
        else:

            def one(total, microbatch):
                whole_ends = whole(ends.frozen)
                x_BSD = self._last(layers.frozen, whole_ends, visual, microbatch)
                loss, tokens_BS = self.parts.score(whole_ends, x_BSD, microbatch)
                return total + loss, tokens_BS

            loss, tokens_MBS = lax.scan(one, jnp.zeros((), jnp.float32), text)
        # the last stage has the loss and the tokens, the others have zeros
        loss, tokens_MBS = self._sum(loss, (STAGE, *DATA_AXES)), self._sum(tokens_MBS, (STAGE,))
        return loss, self._counts(batch)["target_tokens"], tokens_MBS

    def _decoder_gradients(self, layers: Weights, ends: Weights, visual: Tree, batch: Tree) -> Gradients:
        if self.pipeline is not None:
            return self.pipeline(batch["tokens"].shape[0]).gradients(layers, ends, visual, batch)

        trained = {"layers": layers.trainable, "ends": ends.trainable, "visual": visual}

        def parameters_of(trained):
            return trained | {
                "layers": join(trained["layers"], layers.frozen), "ends": whole(join(trained["ends"], ends.frozen))
            }

        def states_of(parameters, microbatch):
            return self._states(parameters["layers"], parameters["ends"], parameters["visual"], microbatch)

        def loss_of(parameters, microbatch):
            return self.parts.leave(parameters["ends"], states_of(parameters, microbatch), microbatch)

        loss: PlainLoss | FusedLoss = PlainLoss(loss_of, self.z_loss_coefficient)
        if self.parts.fused is not None:
            loss = FusedLoss(states_of, self.parts.fused, ("ends", self.parts.head))

        zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), differentiable(trained))
        zeros = zeros | {"visual": no_gradient(visual)}
        no_losses = Losses.zeros(self.parts.num_depths)
        gradients, losses = step_sums(loss, trained, parameters_of, batch, (zeros, no_losses))
        return Gradients(**gradients, losses=losses)

    def _states(self, layers: Tree, ends: Tree, visual: Tree, microbatch: Tree) -> list[jax.Array]:
        """The states that the head reads: the decoder's, and those of each depth of multi-token prediction."""
        parts = self.parts
        states_BSD = parts.normed(ends, self._last(layers, ends, visual, microbatch))
        if not parts.num_depths:
            return [states_BSD]
        embedded = [parts.fill(parts.look_up(ends, one, 0), visual, one) for one in parts.seen_ahead(microbatch)]
        shared = parts.shared(microbatch)
        depths = of_depths(ends["mtp"], parts.num_depths)
        return [states_BSD, *parts.ahead(depths, parts.layers_ahead(layers), states_BSD, embedded, shared)]

    def _last(self, layers: Tree, ends: Tree, visual: Tree, microbatch: Tree) -> jax.Array:
        """What the last layer gives."""
        x_BSD = self.parts.enter(ends, visual, microbatch)
        return self.parts.layers(layers, x_BSD, visual, microbatch)

    def _text_and_patches(self, batch: Tree) -> tuple[Tree, Tree]:
        """The arrays of the decoder, whose visual_index counts through the table, and those of the encoder."""
        text = {key: array for key, array in batch.items() if key not in PATCH_KEYS}
        patches = {key: array for key, array in batch.items() if key in PATCH_KEYS}
        if self.encoder and not self.encoder.divided_axes:
            # the loader counts through a row's own visual tokens; the table has those of all rows in turn
            num_microbatches, num_rows, _ = text["visual_index"].shape
            index_MBS = text["visual_index"]
            first_MB = jnp.arange(num_microbatches * num_rows, dtype=jnp.int32).reshape(num_microbatches, num_rows)
            offset_MB1 = first_MB[..., None] * self.encoder.visual_tokens(patches)
            text = text | {"visual_index": jnp.where(index_MBS >= 0, index_MBS + offset_MB1, -1)}
        return text, patches

    def _counts(self, batch: Tree) -> dict[str, jax.Array]:
        counts = self.count(batch)
        if self.encoder and "images" in counts and STAGE in self.encoder.divided_axes:
            counts["images"] = self._sum(counts["images"], (STAGE,))
        return self._sum(counts, DATA_AXES)

    def _sum(self, tree: Tree, axes: tuple[str, ...]) -> Tree:
        large = large_axes(self.mesh, axes)
        return lax.psum(tree, large) if large else tree

    def _batch_specs(self, batch: Tree) -> dict[str, PartitionSpec]:
        divided = self.encoder.divided_axes if self.encoder else ()
        patch_axes = (*DATA_AXES, STAGE) if STAGE in divided else DATA_AXES
        return {key: PartitionSpec(None, patch_axes if key in PATCH_KEYS else DATA_AXES) for key in batch}

    def _over_mesh(self, f: Callable, in_specs: tuple, out_specs: tuple) -> Callable:
        return jax.shard_map(
            f, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, axis_names=set(MANUAL_AXES), check_vma=False
        )


def _encoder_modules(tree: Tree) -> Tree:
    return {name: tree[name] for name in ENCODER_MODULES if name in tree}


def _decoder_weights(trainable: Tree, frozen: Tree) -> tuple[Weights, Weights]:
    """The decoder's layers, and its other parameters."""
    parts = [_layers_apart(tree.get("decoder", {})) for tree in (trainable, frozen)]
    return Weights(*(layers for layers, _ in parts)), Weights(*(ends for _, ends in parts))


def _layers_apart(decoder: Mapping[str, Tree]) -> tuple[Tree, Tree]:
    return decoder.get("layers", {}), {name: tree for name, tree in decoder.items() if name != "layers"}
