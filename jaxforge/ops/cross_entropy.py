"""Vocabulary-parallel cross-entropy and greedy prediction.

The head is a [V, D] table whose rows may be sharded and are padded past the true vocabulary: padded rows are masked
before any maximum or sum, so they never enter the loss and their gradient is 0.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxforge.ops.placement import Placement

IGNORE = -100
MASKED = -1e30
# Tokens scored at a time, so that evaluation never holds [tokens, vocabulary] in fp32.
SCORE_CHUNK = 1024


class Losses(NamedTuple):
    """fp32 sums over the target tokens of a microbatch, or of more.

    Attributes:
      loss: cross-entropy of the next token.
      z: squared log-sum-exp.
      mtp_J: for each depth of multi-token prediction, its cross-entropy times its weight.
    """

    loss: jax.Array
    z: jax.Array
    mtp_J: jax.Array

    @classmethod
    def zeros(cls, num_depths: int) -> "Losses":
        return cls(jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32), jnp.zeros(num_depths, jnp.float32))

    @classmethod
    def joined(cls, found: Sequence[tuple[jax.Array, jax.Array]]) -> "Losses":
        """Of (cross-entropy, squared log-sum-exp) of the next token and of each depth."""
        (loss, z), *ahead = found
        return cls(loss, z, jnp.stack([loss for loss, _ in ahead]) if ahead else jnp.zeros(0, jnp.float32))

    def objective(self, z_loss_coefficient: float) -> jax.Array:
        """What gradients are taken of."""
        return self.loss + z_loss_coefficient * self.z + jnp.sum(self.mtp_J)


def cross_entropy(
    hidden_BSD: jax.Array, head_VD: jax.Array, targets_BS: jax.Array, *, vocab_size: int, placement: Placement
) -> tuple[jax.Array, jax.Array]:
    """Sums over the targets that aren't IGNORE: of -log p(target), and of the squared log-sum-exp (z-loss).

    fp32 scalars, whatever the input dtype; the same on every device of the tensor group.
    """
    axes = placement.axes("vocab")

    def local(hidden_BSD, head_vD, targets_BS):
        loss_BS, lse_BS, _ = _token_losses(hidden_BSD, head_vD, targets_BS, vocab_size, axes)
        counted_BS = targets_BS != IGNORE
        z_BS = jnp.where(counted_BS, jnp.square(lse_BS), 0)
        return jnp.sum(jnp.where(counted_BS, loss_BS, 0)), jnp.sum(z_BS)

    in_names = [(None, None, None), ("vocab", None), (None, None)]
    return placement.island(local, in_names, [(), ()])(hidden_BSD, head_VD, targets_BS)


def score_tokens(
    hidden_BSD: jax.Array,
    head_VD: jax.Array,
    targets_BS: jax.Array,
    *,
    vocab_size: int,
    placement: Placement,
    chunk: int = SCORE_CHUNK,
) -> tuple[jax.Array, jax.Array]:
    """For evaluation: the loss sum, and each token's most likely next token [B, S] int32 (the lowest id of a tie).

    Works through `chunk` tokens at a time, so that [tokens, vocabulary] never exists in fp32.
    """
    axes = placement.axes("vocab")

    def local(hidden_BSD, head_vD, targets_BS):
        def one(hidden_BSD, targets_BS):
            loss, _, logits = _token_losses(hidden_BSD, head_vD, targets_BS, vocab_size, axes)
            best = lax.pmax(logits.max(-1), axes)
            first = lax.axis_index(axes) * head_vD.shape[0]
            here = jnp.where(logits.max(-1) == best, first + logits.argmax(-1), jnp.iinfo(jnp.int32).max)
            return jnp.sum(jnp.where(targets_BS != IGNORE, loss, 0)), lax.pmin(here.astype(jnp.int32), axes)

        return score_in_chunks(one, hidden_BSD, targets_BS, chunk)

    in_names = [(None, None, None), ("vocab", None), (None, None)]
    return placement.island(local, in_names, [(), (None, None)])(hidden_BSD, head_VD, targets_BS)


def score_in_chunks(
    score: Callable, hidden_BSD: jax.Array, targets_BS: jax.Array, chunk: int = SCORE_CHUNK
) -> tuple[jax.Array, jax.Array]:
    """What `score` gives, `chunk` tokens at a time: the loss sum, and a number for each token [B, S].

    `score`: (hidden [1, chunk, D], targets [1, chunk]) -> (loss sum, [1, chunk]).
    """
    B, S, D = hidden_BSD.shape
    T = B * S
    size = min(chunk, T)
    padding = -T % size
    hidden = jnp.pad(hidden_BSD.reshape(T, D), ((0, padding), (0, 0))).reshape(-1, 1, size, D)
    targets = jnp.pad(targets_BS.reshape(T), (0, padding), constant_values=IGNORE).reshape(-1, 1, size)
    losses, tokens = lax.map(lambda args: score(*args), (hidden, targets))
    return losses.sum(), tokens.reshape(-1)[:T].reshape(B, S)


def _token_losses(hidden_BSD, head_vD, targets_BS, vocab_size, axes):
    """-log p(target) and log-sum-exp per token [B, S], and this shard's masked logits [B, S, v], all fp32."""
    num_rows = head_vD.shape[0]
    first = lax.axis_index(axes) * num_rows
    # each device's part of the hidden state's cotangent differs; the transpose of this cast sums them
    logits_BSv = _project(lax.pcast(hidden_BSD, axes, to="varying"), head_vD)
    logits_BSv = jnp.where(first + jnp.arange(num_rows) < vocab_size, logits_BSv, MASKED)
    max_BS = lax.pmax(lax.stop_gradient(logits_BSv.max(-1)), axes)
    lse_BS = max_BS + jnp.log(lax.psum(jnp.exp(logits_BSv - max_BS[..., None]).sum(-1), axes))
    local_BS = targets_BS - first
    inside_BS = (local_BS >= 0) & (local_BS < num_rows)
    index_BS1 = jnp.where(inside_BS, local_BS, 0)[..., None]
    target_BS = lax.psum(jnp.where(inside_BS, jnp.take_along_axis(logits_BSv, index_BS1, -1)[..., 0], 0), axes)
    return lse_BS - target_BS, lse_BS, logits_BSv


@jax.custom_vjp
def _project(hidden_BSD, head_VD):
    """Logits in fp32 from operands of the compute dtype."""
    return jnp.einsum("BSD,VD->BSV", hidden_BSD, head_VD, preferred_element_type=jnp.float32)


def _project_forward(hidden_BSD, head_VD):
    return _project(hidden_BSD, head_VD), (hidden_BSD, head_VD)


def _project_backward(residuals, dlogits_BSV):
    # the derived rule would multiply fp32 by bf16, that is in fp32, off the tensor cores
    hidden_BSD, head_VD = residuals
    dlogits_BSV = dlogits_BSV.astype(hidden_BSD.dtype)
    dhidden_BSD = jnp.einsum("BSV,VD->BSD", dlogits_BSV, head_VD)
    return dhidden_BSD, jnp.einsum("BSV,BSD->VD", dlogits_BSV, hidden_BSD)


_project.defvjp(_project_forward, _project_backward)
