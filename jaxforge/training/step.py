"""One optimizer step: gradients summed over microbatches and data parallel ranks, then one update."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jaxforge.cluster.mesh import DATA_AXES, MANUAL_AXES, large_axes
from jaxforge.config.schema import Config
from jaxforge.models.moe import is_statistics
from jaxforge.models.multi_token import TARGETS, WEIGHTS, ahead
from jaxforge.ops.cross_entropy import IGNORE, Losses
from jaxforge.ops.sharded_weight import differentiable
from jaxforge.optim.optimizer import Optimizer
from jaxforge.optim.paths import join, parameter_paths
from jaxforge.parallel.data import DataSharding, whole_but_layers
from jaxforge.parallel.microbatch_loss import FusedLoss, PlainLoss, step_sums

Tree = Any
ROWS = PartitionSpec(None, DATA_AXES)


@dataclasses.dataclass(frozen=True)
class DepthLosses:
    """How the losses of multi-token prediction are weighed: the mean over their depths of each one's mean, by a factor.

    Attributes:
      num_depths: layers for multi-token prediction.
      factor: `loss.mtp_loss_scaling_factor`.
    """

    num_depths: int = 0
    factor: float = 0.0

    @classmethod
    def from_config(cls, config: Config) -> "DepthLosses":
        return cls(config.model.decoder.mtp_num_layers, config.loss.mtp_loss_scaling_factor)

    @property
    def weight(self) -> float:
        """Of the mean cross-entropy of a depth, in the loss."""
        return self.factor / max(self.num_depths, 1)


def make_gradients(
    loss: PlainLoss | FusedLoss, mesh: Mesh, sharding: DataSharding, depths: DepthLosses = DepthLosses()
) -> Callable:
    """(trainable, frozen, batch) -> (gradients, sums), for parameters in the compute dtype and a batch [M, B, ...].

    The gradients are fp32, of (cross-entropy + z-loss) summed over target tokens and divided once by their number in
    the whole step: microbatches, ranks, packing and padding don't enter.  Data parallel axes are manual, so that
    gradients are reduced when and how `sharding` says; `sums` are global.
    """

    data_axes = large_axes(mesh, DATA_AXES)

    def local(trainable, frozen, batch):
        trainable, frozen = sharding.trained(trainable), sharding.frozen(frozen)
        counts = lax.psum(count_tokens(batch, depths), data_axes)
        batch = with_counts(batch, trainable, counts, depths)

        def parameters_of(trainable):
            return whole_but_layers(join(trainable, frozen))

        zeros = jax.tree.map(lambda v: jnp.zeros_like(v, jnp.float32), differentiable(trainable))
        with_pending = sharding.with_pending if sharding.scatters_with_last else None
        no_losses = Losses.zeros(depths.num_depths)
        grads, losses = step_sums(loss, trainable, parameters_of, batch, (zeros, no_losses), with_pending)
        return per_target(sharding.reduced(grads), counts), lax.psum(losses, data_axes)._asdict() | counts

    def gradients(trainable, frozen, batch):
        mapped = jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(sharding.weight_specs(trainable), sharding.weight_specs(frozen), ROWS),
            out_specs=(sharding.gradient_specs(trainable), PartitionSpec()),
            axis_names=set(MANUAL_AXES),
            check_vma=False,
        )
        return mapped(trainable, frozen, batch)

    return gradients


def per_target(gradients: Tree, counts: dict[str, jax.Array]) -> Tree:
    """Sums over the step's tokens, divided by its target tokens; statistics of routers stay sums."""
    targets = jnp.maximum(counts["target_tokens"], 1)
    return jax.tree.map(
        lambda path, g: g if is_statistics(path) else g / targets, parameter_paths(gradients), gradients
    )


def with_counts(batch: Tree, trained: Tree, counts: dict[str, jax.Array], depths: DepthLosses) -> Tree:
    """The batch [M, B, ...] with what routers need of the whole step (`StepTokens`), where something is a router's.

    Where there are depths of multi-token prediction, also with what they see and predict, and the weights of their
    losses: by them a sum over the targets of a depth becomes what, divided by the step's target tokens, is their mean
    times its weight in the loss.
    """
    num_microbatches = batch["tokens"].shape[0]
    if any(map(is_statistics, jax.tree.leaves(parameter_paths(trained)))):
        ratio = counts["target_tokens"] / jnp.maximum(counts["tokens"], 1)
        batch = batch | {"targets_per_token": jnp.full(num_microbatches, ratio, jnp.float32)}
    if depths.num_depths:
        weights_J = depths.weight * counts["target_tokens"] / jnp.maximum(counts["mtp_targets_J"], 1)
        batch = batch | ahead(batch, depths.num_depths) | {WEIGHTS: jnp.tile(weights_J, (num_microbatches, 1))}
    return batch


def count_tokens(batch: dict[str, jax.Array], depths: DepthLosses = DepthLosses()) -> dict[str, jax.Array]:
    """Counts over the rows of this rank, int32: target_tokens, tokens, and with an encoder images (video frames).

    With multi-token prediction also mtp_targets_J, the targets of each depth.
    """

    def count(mask):
        return jnp.sum(mask, dtype=jnp.int32)

    counts = {"target_tokens": count(batch["targets"] != IGNORE), "tokens": count(batch["segment_ids"] > 0)}
    if "patch_segments" in batch:
        # every frame has exactly one patch at its corner
        counts["images"] = count((batch["patch_segments"] > 0) & jnp.all(batch["patch_positions"] == 0, axis=-1))
    if depths.num_depths:
        targets = jnp.moveaxis(ahead(batch, depths.num_depths)[TARGETS], -3, 0)
        counts["mtp_targets_J"] = jnp.sum(targets != IGNORE, axis=(1, 2, 3), dtype=jnp.int32)
    return counts


def apply_gradients(
    optimizer: Optimizer, state: Tree, grads: Tree, sums: dict, depths: DepthLosses = DepthLosses()
) -> tuple[Tree, dict]:
    """The next state and the step's metrics.  An update that isn't finite leaves parameters and optimizer as they were.

    The step counts in any case: it is also the position in the data.
    """
    count = jnp.maximum(sums["target_tokens"], 1)
    loss = sums["loss"] / count
    grad_norm = optax.tree.norm(grads)
    is_finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    trainable, optimizer_state = optimizer.update(grads, state["optimizer"], state["trainable"], grad_norm, is_finite)
    next_state = {
        "trainable": trainable,
        "frozen": state["frozen"],
        "optimizer": optimizer_state,
        "step": state["step"] + 1,
    }
    metrics = {
        "loss": loss,
        "z_loss": sums["z"] / count,
        "grad_norm": grad_norm,
        "target_tokens": sums["target_tokens"],
        "tokens": sums["tokens"],
        "images": sums.get("images", jnp.zeros((), jnp.int32)),
        "is_finite": is_finite,
    }
    for depth in range(1, depths.num_depths + 1):
        metrics[f"mtp_loss/{depth}"] = sums["mtp_J"][depth - 1] / count / depths.weight
    return next_state, metrics


def make_scoring(score_of: Callable, mesh: Mesh, sharding: DataSharding) -> Callable:
    """(parameters, batch [M, B, ...]) -> (loss sum, target tokens, predicted next tokens [M, B, S] int32).

    Parameters are in the compute dtype.  Sums are global; predictions are sharded like the batch.
    """

    data_axes = large_axes(mesh, DATA_AXES)

    def local(parameters, batch):
        sharded = sharding.frozen(parameters)

        def one(total, microbatch):
            loss_sum, tokens_BS = score_of(whole_but_layers(sharded), microbatch)
            return total + loss_sum, tokens_BS

        total, tokens_MBS = lax.scan(one, jnp.zeros((), jnp.float32), batch)
        return *lax.psum((total, count_tokens(batch)["target_tokens"]), data_axes), tokens_MBS

    def scores(parameters, batch):
        mapped = jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(sharding.weight_specs(parameters), ROWS),
            out_specs=(PartitionSpec(), PartitionSpec(), ROWS),
            axis_names=set(MANUAL_AXES),
            check_vma=False,
        )
        return mapped(parameters, batch)

    return scores


def cast(tree: Tree, dtype: jnp.dtype) -> Tree:
    return jax.tree.map(lambda a: a.astype(dtype), tree)
