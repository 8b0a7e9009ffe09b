"""Embedding and loss shared by all stages: the vocabulary sharded over stage as well as tensor.

Each stage holds an equal part of the rows of embedding and head, so no stage carries them alone.  In the tick in which
a microbatch enters the first stage all stages look its tokens up, and in the tick in which it leaves the last stage all
compute their part of its logits; sums over stage put the parts together.  All stages do this in the same ticks, outside
of every branch that only some of them take.

The gradients of the loss are formed with it, so no logits are kept.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxforge.cluster.mesh import STAGE
from jaxforge.models.attention import RESIDUAL, WHOLE
from jaxforge.ops.cross_entropy import IGNORE, MASKED, Losses, score_in_chunks
from jaxforge.ops.linear_cross_entropy import LinearCrossEntropy
from jaxforge.ops.placement import Placement
from jaxforge.ops.sharded_weight import reduced
from jaxforge.parallel.microbatch_loss import Targets, add_head_gradient
from jaxforge.parallel.stage_sums import sum_over_stages

_LOGITS = (None, None, "vocab")


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """The loss over tables whose rows [V / stages, D] lie on the stages in turn.

    Attributes:
      size: true rows of the whole table; padded ones never enter the loss.
      placement: of the decoder, for the rows' layout over tensor.
      on_cpu: whether the program is for CPU devices.
      fused: the loss fused with the head, its rows over the stages too; or None.
    """

    size: int
    placement: Placement
    on_cpu: bool
    fused: LinearCrossEntropy | None = None

    def sum(self, x: jax.Array) -> jax.Array:
        """Over the stages."""
        return sum_over_stages(x, self.on_cpu)

    def first_row(self, table_vD: jax.Array) -> jax.Array:
        """The number of this stage's first row."""
        return lax.axis_index(STAGE) * table_vD.shape[0]

    def add_loss(
        self,
        states: Sequence[jax.Array],
        head_vD: jax.Array,
        targets: Sequence[Targets],
        table: Any,
        total: jax.Array | None,
        *,
        z_loss_coefficient: float,
    ) -> tuple[Losses, tuple[jax.Array, ...], jax.Array | None]:
        """Losses, and the gradients of their objective.

        Args:
          states, targets: as of `add_head_gradient`, but equal on all stages, and laid out as the residual stream.
          table, total: of the head, likewise.

        Returns:
          (losses, gradients of the states, laid out as these, the head's sum); the first two equal on all stages.
        """
        if self.fused is not None:
            losses, parts, total = add_head_gradient(self.fused, states, head_vD, targets, table, total)
            return losses, tuple(self.sum(part_BSD) for part_BSD in parts), total
        found, gradients = [], []
        for states_BSD, (targets_BS, weight) in zip(states, targets, strict=True):
            scale, coefficient = (1.0, z_loss_coefficient) if weight is None else (weight, 0.0)
            loss, z, gradient_BSD, total = self._add_one(
                states_BSD, head_vD, targets_BS, table, total, scale=scale, z_loss_coefficient=coefficient
            )
            found.append((loss, z))
            gradients.append(gradient_BSD)
        return Losses.joined(found), tuple(gradients), total

    def _add_one(
        self,
        hidden_BSD: jax.Array,
        head_vD: jax.Array,
        targets_BS: jax.Array,
        table: Any,
        total: jax.Array | None,
        *,
        scale: jax.Array | float,
        z_loss_coefficient: float,
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
        """(scale x loss, z, gradient of the hidden states, the head's sum) without a fused loss."""
        whole_BSD = self.placement.reshard(hidden_BSD, RESIDUAL, WHOLE)
        logits_BSv, ids_v = self._logits(whole_BSD, head_vD)
        loss, lse_BS, _ = self._loss(logits_BSv, ids_v, targets_BS)
        is_target_BSv = ids_v == targets_BS[..., None]
        counted_BS = targets_BS != IGNORE
        z = jnp.sum(jnp.where(counted_BS, jnp.square(lse_BS), 0))
        weight_BS1 = (1 + 2 * z_loss_coefficient * lse_BS)[..., None]
        dlogits_BSv = scale * (jnp.exp(logits_BSv - lse_BS[..., None]) * weight_BS1 - is_target_BSv)
        dlogits_BSv = jnp.where(counted_BS[..., None], dlogits_BSv, 0).astype(hidden_BSD.dtype)
        # summed over tensor into the residual stream's layout first: under sequence parallelism a part each
        dhidden_BSD = self.placement.constrain(jnp.einsum("BSv,vD->BSD", dlogits_BSv, head_vD), RESIDUAL)
        if total is not None:
            dhead_vD = jnp.einsum("BSv,BSD->vD", dlogits_BSv, whole_BSD)
            total = total + reduced(table, dhead_vD).astype(total.dtype)
        return scale * loss, z, self.sum(dhidden_BSD), total

    def score(
        self, hidden_BSD: jax.Array, head_vD: jax.Array, targets_BS: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """The sum of cross-entropy, and each token's most likely next token [B, S] int32 (the lowest id of a tie)."""

        if self.fused is not None:
            return self.fused.score(hidden_BSD, head_vD, targets_BS)

        def one(hidden_BSD, targets_BS):
            logits_BSv, ids_v = self._logits(hidden_BSD, head_vD)
            loss, _, max_BS = self._loss(logits_BSv, ids_v, targets_BS)
            best_BSv = jnp.where(logits_BSv == max_BS[..., None], ids_v, jnp.iinfo(jnp.int32).max)
            return loss, lax.pmin(best_BSv.min(-1), STAGE)

        return score_in_chunks(one, self.placement.reshard(hidden_BSD, RESIDUAL, WHOLE), targets_BS)

    def _loss(
        self, logits_BSv: jax.Array, ids_v: jax.Array, targets_BS: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The sum of cross-entropy; log-sum-exp and largest logit of each token [B, S].  Equal on all stages."""
        max_BS = lax.pmax(logits_BSv.max(-1), STAGE)
        lse_BS = max_BS + jnp.log(lax.psum(jnp.exp(logits_BSv - max_BS[..., None]).sum(-1), STAGE))
        target_BS = lax.psum(jnp.where(ids_v == targets_BS[..., None], logits_BSv, 0).sum(-1), STAGE)
        return jnp.sum(jnp.where(targets_BS != IGNORE, lse_BS - target_BS, 0)), lse_BS, max_BS

    def _logits(self, hidden_BSD: jax.Array, head_vD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """This stage's logits [B, S, V / stages] in fp32, padded rows masked, and the ids of its rows."""
        logits_BSv = jnp.einsum("BSD,vD->BSv", hidden_BSD, head_vD, preferred_element_type=jnp.float32)
        ids_v = self.first_row(head_vD) + jnp.arange(head_vD.shape[0])
        logits_BSv = self.placement.constrain(jnp.where(ids_v < self.size, logits_BSv, MASKED), _LOGITS)
        return logits_BSv, ids_v
