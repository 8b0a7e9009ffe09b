"""One optimizer step: gradients summed over microbatches and data parallel ranks, then one update."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jaxforge.cluster.mesh import DATA_AXES, MANUAL_AXES, large_axes
from jaxforge.models.moe import is_statistics
from jaxforge.ops.cross_entropy import IGNORE
from jaxforge.ops.sharded_weight import differentiable
from jaxforge.optim.optimizer import Optimizer
from jaxforge.optim.paths import join, parameter_paths
from jaxforge.parallel.data import DataSharding, whole_but_layers
from jaxforge.parallel.microbatch_loss import FusedLoss, PlainLoss, step_sums

Tree = Any
ROWS = PartitionSpec(None, DATA_AXES)


def make_gradients(loss: PlainLoss | FusedLoss, mesh: Mesh, sharding: DataSharding) -> Callable:
    """(trainable, frozen, batch) -> (gradients, sums), for parameters in the compute dtype and a batch [M, B, ...].

    The gradients are fp32, of (cross-entropy + z-loss) summed over target tokens and divided once by their number in
    the whole step: microbatches, ranks, packing and padding don't enter.  Data parallel axes are manual, so that
    gradients are reduced when and how `sharding` says; `sums` are global.
    """

    data_axes = large_axes(mesh, DATA_AXES)

    def local(trainable, frozen, batch):
        trainable, frozen = sharding.trained(trainable), sharding.frozen(frozen)
        counts = lax.psum(count_tokens(batch), data_axes)
        batch = with_targets_per_token(batch, trainable, counts)

        def parameters_of(trainable):
            return whole_but_layers(join(trainable, frozen))

        zeros = jax.tree.map(lambda v: jnp.zeros_like(v, jnp.float32), differentiable(trainable))
        with_pending = sharding.with_pending if sharding.scatters_with_last else None
        grads, (loss_sum, z_sum) = step_sums(loss, trainable, parameters_of, batch, zeros, with_pending)
        sums = lax.psum({"loss": loss_sum, "z": z_sum}, data_axes) | counts
        return per_target(sharding.reduced(grads), counts), sums

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


def with_targets_per_token(batch: Tree, trained: Tree, counts: dict[str, jax.Array]) -> Tree:
    """The batch [M, B, ...] with what routers need of the whole step (`StepTokens`), where something is a router's."""
    if not any(map(is_statistics, jax.tree.leaves(parameter_paths(trained)))):
        return batch
    ratio = counts["target_tokens"] / jnp.maximum(counts["tokens"], 1)
    return batch | {"targets_per_token": jnp.full(batch["tokens"].shape[:1], ratio, jnp.float32)}


def count_tokens(batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Counts over the rows of this rank, int32: target_tokens, tokens, and with an encoder images (video frames)."""

    def count(mask):
        return jnp.sum(mask, dtype=jnp.int32)

    counts = {"target_tokens": count(batch["targets"] != IGNORE), "tokens": count(batch["segment_ids"] > 0)}
    if "patch_segments" in batch:
        # every frame has exactly one patch at its corner
        counts["images"] = count((batch["patch_segments"] > 0) & jnp.all(batch["patch_positions"] == 0, axis=-1))
    return counts


def apply_gradients(optimizer: Optimizer, state: Tree, grads: Tree, sums: dict) -> tuple[Tree, dict]:
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
