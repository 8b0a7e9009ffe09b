"""Cross-entropy straight from the hidden states, without logits of all tokens.

A chunk of tokens at a time: its logits [V, T] in fp32, their statistics, and the gradients, which are formed at once,
so that there are three matmuls in all and nothing is computed again.  The backward pass only multiplies by the
objective's own gradient.  (Liger Kernel's fused linear cross-entropy: Hsu et al. 2024, arXiv:2410.10989.)

The head's rows may be sharded: each device has the logits of its rows, and the devices exchange three numbers a token.
Rows that pad the vocabulary never enter a sum and get gradient 0.

Logits are vocabulary-major, and tiles of the vocabulary start at multiples of a loop's counter: so XLA's GPU compiler
lets the matmuls read and write tiles where they lie, and adds the head's gradient in place.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxforge.config.errors import ConfigError
from jaxforge.ops.cross_entropy import IGNORE, MASKED
from jaxforge.ops.placement import Placement
from pallas_kernels.linear_cross_entropy import dlogits_in_place, token_statistics

DEFAULT_SPLIT = 3072
CHUNK_BYTES = 9 * 2**27
FORWARD_SPLIT_VARIABLE = "LCE_GENERIC_FWD_VOCAB_SPLIT_SIZE"
BACKWARD_SPLIT_VARIABLE = "LCE_GENERIC_BWD_VOCAB_SPLIT_SIZE"
# Tokens of a chunk at the most: with more, the matmuls don't gain (the head's gradient, read and written once in a
# chunk, is 2 x 4096 FLOPs for 8 bytes).  And what a chunk's size is a multiple of, where it is larger.
_MOST_TOKENS, _TOKENS_MULTIPLE = 4096, 128
_NO_TOKEN = jnp.iinfo(jnp.int32).max
_WHOLE, _TOKENS, _ROWS = (None, None, None), (None, None), ("vocab", None)
_RESIDUAL = (None, "residual_sequence", None)


class LossAndGradients(NamedTuple):
    """fp32 sums of cross-entropy and squared log-sum-exp, and the gradients of (cross-entropy + coefficient x squares).

    `dhidden_BSD` is laid out as the residual stream, in the dtype of the hidden states; `dhead_sum_VD` fp32, or None.
    """

    loss: jax.Array
    z: jax.Array
    dhidden_BSD: jax.Array
    dhead_sum_VD: jax.Array | None


def vocab_splits(environment: Mapping[str, str]) -> tuple[int, int]:
    """The forward and the backward split that environment variables ask for, else 3072 rows each.

    Raises ConfigError for what isn't a positive whole number.
    """
    splits = []
    for name in (FORWARD_SPLIT_VARIABLE, BACKWARD_SPLIT_VARIABLE):
        text = environment.get(name, str(DEFAULT_SPLIT))
        if not text.strip().isdecimal() or int(text) < 1:
            raise ConfigError(
                f"environment variable {name}={text!r} is not a number of vocabulary rows; use a positive whole number,"
                f" or unset it for {DEFAULT_SPLIT}"
            )
        splits.append(int(text))
    return splits[0], splits[1]


@dataclasses.dataclass(frozen=True)
class LinearCrossEntropy:
    """The loss of one head, over targets that aren't IGNORE; per-token weights multiply a token's loss and z-loss.

    Hidden states [B, S, D] may be laid out as the residual stream or whole: they are gathered once.  The head is
    [V, D], its rows sharded over the placement's "vocab".  Both are of one dtype, targets [B, S] are int32.

    Attributes:
      vocab_size: true rows of the whole table; those after them pad it.
      placement: of the decoder.
      z_loss_coefficient: weight of the squared log-sum-exp in the objective.
      softcap: logits become softcap * tanh(logits / softcap); None for no cap.
      outer_axes: manual axes over which the rows are cut before they are cut over "vocab", outermost first: the stages
        of a pipeline.  Each has more than one device.
      backend: "reference", jax.numpy; "triton", Pallas kernels for a GPU; "interpret", these kernels on a CPU, slowly.
      forward_split: rows of the vocabulary whose logits are formed at a time.
      backward_split: rows whose gradients are.
      chunk_bytes: what a chunk of tokens may take: its logits, and the gradient of its hidden states, both fp32.
        1.125 GiB makes chunks of 2048 tokens at a vocabulary of 129280 and a width of 7168.
    """

    vocab_size: int
    placement: Placement
    z_loss_coefficient: float = 0.0
    softcap: float | None = None
    outer_axes: tuple[str, ...] = ()
    backend: str = "reference"
    forward_split: int = DEFAULT_SPLIT
    backward_split: int = DEFAULT_SPLIT
    chunk_bytes: int = CHUNK_BYTES

    def __call__(
        self,
        hidden_BSD: jax.Array,
        head_VD: jax.Array,
        targets_BS: jax.Array,
        weights_BS: jax.Array | None = None,
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """(objective, (loss, z)): fp32 sums; only the objective, loss + coefficient * z, has gradients.

        They go to hidden and head, each in its own dtype; none goes to the weights.  Where the head isn't
        differentiated its gradient isn't formed.  Raises ValueError where rows lie over `outer_axes`: see `gradients`.
        """
        if self.outer_axes:
            raise ValueError(f"rows lie over outer_axes={self.outer_axes}: call gradients, and sum dhidden over them")
        weights_BS = lax.stop_gradient(_weights(targets_BS, weights_BS))
        objective, sums = _objective(self, hidden_BSD, head_VD, targets_BS, weights_BS)
        return objective, lax.stop_gradient(sums)

    def gradients(
        self,
        hidden_BSD: jax.Array,
        head_VD: jax.Array,
        targets_BS: jax.Array,
        dhead_sum_VD: jax.Array | None,
        weights_BS: jax.Array | None = None,
    ) -> LossAndGradients:
        """Loss and gradients without autodiff; the head's gradient is added to an fp32 sum that is laid out as it.

        Args:
          dhead_sum_VD: the sum so far, updated in place where XLA may; None for a head that isn't trained.
          weights_BS: fp32.

        Returns:
          All but `dhead_sum_VD` are equal on all devices of the "vocab" axes.  Over `outer_axes` loss and z are equal,
          and `dhidden_BSD` is a part that is still to be summed.
        """
        names = [_WHOLE, _ROWS, _TOKENS, _TOKENS, _ROWS]
        island = self.placement.island(self._gradients_of_rows, names, [(), (), _RESIDUAL, _ROWS], check_vma=False)
        weights_BS = _weights(targets_BS, weights_BS)
        return LossAndGradients(*island(hidden_BSD, head_VD, targets_BS, weights_BS, dhead_sum_VD))

    def score(
        self, hidden_BSD: jax.Array, head_VD: jax.Array, targets_BS: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """For evaluation: the loss sum, and each token's most likely next token [B, S] int32 (the lowest id of a tie).

        Equal on all devices of the "vocab" axes and `outer_axes`.
        """
        loss, _, tokens_BS = self._losses(hidden_BSD, head_VD, targets_BS, _weights(targets_BS, None))
        return loss, tokens_BS

    def _losses(self, hidden_BSD, head_VD, targets_BS, weights_BS):
        names = [_WHOLE, _ROWS, _TOKENS, _TOKENS]
        island = self.placement.island(self._losses_of_rows, names, [(), (), _TOKENS], check_vma=False)
        return island(hidden_BSD, head_VD, targets_BS, weights_BS)

    # Inside of the island, for this device's rows of the head: V counts those, N all tokens, T those of a chunk.

    def _gradients_of_rows(self, hidden_BSD, head_VD, targets_BS, weights_BS, dhead_sum_VD):
        B, S, D = hidden_BSD.shape
        V, axes = head_VD.shape[0], self.placement.axes("vocab")
        hidden_ND, target_rows_N, weights_N = self._flat(hidden_BSD, V, targets_BS, weights_BS)
        num_rows = self._num_rows(V)
        size = self._chunk_size(B * S, 4 * (V + D))

        def chunk(start, is_new_T, carry):
            sums, dhidden_ND, dhead_sum_VD, logits_VT = carry
            hidden_TD, targets_T = (_part(x, start, size) for x in (hidden_ND, target_rows_N))
            weights_T = jnp.where(is_new_T, _part(weights_N, start, size), 0)

            def form(first, count, logits_VT):
                return _put(logits_VT, _logits(_part(head_VD, first, count), hidden_TD), first)

            logits_VT = _by_tiles(form, V, self.forward_split, logits_VT)
            lse_T, target_T = self._combined(self._statistics(logits_VT, targets_T, num_rows))
            scale_T = weights_T * (1 + 2 * self.z_loss_coefficient * lse_T)
            dlogits_VT = self._dlogits(logits_VT, targets_T, num_rows, jnp.stack((lse_T, scale_T, weights_T)))

            def back(first, count, carry):
                dhidden_TD, dhead_sum_VD = carry
                # rounded once, for both matmuls; without the barrier XLA may round the whole chunk and cut afterwards
                tile_VT = lax.optimization_barrier(_part(dlogits_VT, first, count).astype(hidden_TD.dtype))
                dhidden_TD = dhidden_TD + _einsum("VT,VD->TD", tile_VT, _part(head_VD, first, count))
                if dhead_sum_VD is not None:
                    dtile_VD = _einsum("VT,TD->VD", tile_VT, hidden_TD)
                    dhead_sum_VD = _put(dhead_sum_VD, _part(dhead_sum_VD, first, count) + dtile_VD, first)
                return dhidden_TD, dhead_sum_VD

            zeros_TD = jnp.zeros((size, D), jnp.float32)
            dhidden_TD, dhead_sum_VD = _by_tiles(back, V, self.backward_split, (zeros_TD, dhead_sum_VD))
            # tokens that an earlier chunk had get 0 here
            dhidden_TD = _part(dhidden_ND, start, size) + dhidden_TD.astype(dhidden_ND.dtype)
            sums = _add_losses(sums, lse_T, target_T, weights_T)
            return sums, _put(dhidden_ND, dhidden_TD, start), dhead_sum_VD, dlogits_VT

        # the logits' buffer goes from chunk to chunk, each of which writes over it
        carry = (_no_losses(), jnp.zeros_like(hidden_ND), dhead_sum_VD, jnp.zeros((V, size), jnp.float32))
        (loss, z), dhidden_ND, dhead_sum_VD, _ = _by_chunks(chunk, B * S, size, carry)
        dhidden_BSD = dhidden_ND.reshape(B, S, D)
        if self.placement.axes("residual_sequence"):
            dhidden_BSD = lax.psum_scatter(dhidden_BSD, axes, scatter_dimension=1, tiled=True)
        else:
            dhidden_BSD = lax.psum(dhidden_BSD, axes)
        return loss, z, dhidden_BSD, dhead_sum_VD

    def _losses_of_rows(self, hidden_BSD, head_VD, targets_BS, weights_BS):
        V, num_tokens, axes = head_VD.shape[0], targets_BS.size, self._axes()
        hidden_ND, target_rows_N, weights_N = self._flat(hidden_BSD, V, targets_BS, weights_BS)
        num_rows = self._num_rows(V)
        size = self._chunk_size(num_tokens, 4 * min(V, self.forward_split))

        def chunk(start, is_new_T, carry):
            sums, tokens_N = carry
            hidden_TD, targets_T = (_part(x, start, size) for x in (hidden_ND, target_rows_N))
            weights_T = jnp.where(is_new_T, _part(weights_N, start, size), 0)

            def tile(first, count, carry):
                statistics_3T, best_T, row_T = carry
                logits_VT = _logits(_part(head_VD, first, count), hidden_TD)
                num_here = jnp.clip(num_rows - first, 0, count)
                parts_N3T = self._statistics(logits_VT, targets_T - first, num_here)
                largest_T, first_T = _largest(logits_VT, num_here, self.softcap)
                row_T = jnp.where(largest_T > best_T, first + first_T, row_T)
                statistics_3T = _merged(jnp.concatenate((statistics_3T[None], parts_N3T)))
                return statistics_3T, jnp.maximum(largest_T, best_T), row_T

            nothing = (jnp.full((3, size), MASKED).at[1:].set(0), jnp.full(size, -jnp.inf), jnp.zeros(size, jnp.int32))
            statistics_3T, best_T, row_T = _by_tiles(tile, V, self.forward_split, nothing)
            lse_T, target_T = self._combined(statistics_3T[None])
            sums = _add_losses(sums, lse_T, target_T, weights_T)
            is_best_T = best_T == lax.pmax(best_T, axes)
            tokens_T = lax.pmin(jnp.where(is_best_T, self._first_row(V) + row_T, _NO_TOKEN), axes)
            return sums, _put(tokens_N, tokens_T, start)

        (loss, z), tokens_N = _by_chunks(chunk, num_tokens, size, (_no_losses(), jnp.zeros(num_tokens, jnp.int32)))
        return loss, z, tokens_N.reshape(targets_BS.shape)

    def _axes(self) -> tuple[str, ...]:
        """Those over which the rows lie, outermost first."""
        return (*self.outer_axes, *self.placement.axes("vocab"))

    def _first_row(self, V):
        return lax.axis_index(self._axes()) * V

    def _num_rows(self, V):
        """How many of this device's V rows are tokens."""
        return jnp.clip(self.vocab_size - self._first_row(V), 0, V)

    def _flat(self, hidden_BSD, V, targets_BS, weights_BS):
        """Hidden states, targets counted from this device's first row, and weights, of all tokens in turn."""
        rows_BS = targets_BS.astype(jnp.int32) - self._first_row(V)
        return hidden_BSD.reshape(-1, hidden_BSD.shape[-1]), rows_BS.reshape(-1), weights_BS.reshape(-1)

    def _chunk_size(self, num_tokens: int, bytes_per_token: int) -> int:
        """Tokens of a chunk: as few chunks as `chunk_bytes` allows, of about the same size."""
        largest = max(min(self.chunk_bytes // bytes_per_token, _MOST_TOKENS), 1)
        multiple = _TOKENS_MULTIPLE if largest >= _TOKENS_MULTIPLE else 1
        num_chunks = -(-num_tokens // (largest // multiple * multiple))
        return min(-(-num_tokens // (num_chunks * multiple)) * multiple, num_tokens)

    def _statistics(self, logits_VT, targets_T, num_rows):
        if self.backend == "reference":
            return reference_statistics(logits_VT, targets_T, num_rows, self.softcap)[None]
        interpret = self.backend == "interpret"
        return token_statistics(logits_VT, targets_T, num_rows, softcap=self.softcap, interpret=interpret)

    def _dlogits(self, logits_VT, targets_T, num_rows, coefficients_3T):
        arguments = (logits_VT, targets_T, num_rows, coefficients_3T)
        if self.backend == "reference":
            return reference_dlogits(*arguments, self.softcap)
        return dlogits_in_place(*arguments, softcap=self.softcap, interpret=self.backend == "interpret")

    def _combined(self, parts_N3T):
        """Log-sum-exp over the whole vocabulary and the target's logit of each token, from statistics of parts."""
        statistics_3T, axes = _merged(parts_N3T), self._axes()
        if axes:
            statistics_3T = _merged(lax.all_gather(statistics_3T, axes))
        max_T, sum_T, target_T = statistics_3T
        return max_T + jnp.log(sum_T), target_T


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _objective(fused, hidden_BSD, head_VD, targets_BS, weights_BS):
    loss, z, _ = fused._losses(hidden_BSD, head_VD, targets_BS, weights_BS)
    return loss + fused.z_loss_coefficient * z, (loss, z)


def _objective_forward(fused, hidden_BSD, head_VD, targets_BS, weights_BS):
    head = head_VD.value
    sum_VD = jnp.zeros(head.shape, jnp.float32) if head_VD.perturbed else None
    found = fused.gradients(hidden_BSD.value, head, targets_BS.value, sum_VD, weights_BS.value)
    dhead_VD = None if found.dhead_sum_VD is None else found.dhead_sum_VD.astype(head.dtype)
    objective = found.loss + fused.z_loss_coefficient * found.z
    return (objective, (found.loss, found.z)), (found.dhidden_BSD, dhead_VD)


def _objective_backward(fused, gradients, cotangents):
    def scaled(gradient):
        return None if gradient is None else (gradient.astype(jnp.float32) * cotangents[0]).astype(gradient.dtype)

    return *(scaled(gradient) for gradient in gradients), None, None


_objective.defvjp(_objective_forward, _objective_backward, symbolic_zeros=True)


def reference_statistics(logits_VT, targets_T, num_rows, softcap: float | None) -> jax.Array:
    """What `token_statistics` gives, of all rows in one block: [3, T]."""
    logits_VT = _masked(logits_VT, num_rows, softcap)
    max_T = logits_VT.max(0)
    sum_T = jnp.exp(logits_VT - max_T).sum(0)
    is_target_VT = _is_target(logits_VT, targets_T, num_rows)
    return jnp.stack((max_T, sum_T, jnp.where(is_target_VT, logits_VT, 0).sum(0)))


def reference_dlogits(logits_VT, targets_T, num_rows, coefficients_3T, softcap: float | None) -> jax.Array:
    """What `dlogits_in_place` gives."""
    lse_T, scale_T, weight_T = coefficients_3T
    capped_VT = _masked(logits_VT, num_rows, softcap)
    d_VT = jnp.exp(capped_VT - lse_T) * scale_T
    d_VT = d_VT - jnp.where(_is_target(logits_VT, targets_T, num_rows), weight_T, 0)
    if softcap is not None:
        d_VT = d_VT * (1 - jnp.square(capped_VT / softcap))
    return jnp.where(_counts(logits_VT, num_rows), d_VT, 0)


def _counts(logits_VT, num_rows):
    return (jnp.arange(logits_VT.shape[0]) < num_rows)[:, None]


def _is_target(logits_VT, targets_T, num_rows):
    return (jnp.arange(logits_VT.shape[0])[:, None] == targets_T) & _counts(logits_VT, num_rows)


def _masked(logits_VT, num_rows, softcap):
    capped_VT = logits_VT if softcap is None else softcap * jnp.tanh(logits_VT / softcap)
    return jnp.where(_counts(logits_VT, num_rows), capped_VT, MASKED)


def _largest(logits_VT, num_rows, softcap):
    """Each token's largest logit, and the first row that has it."""
    logits_VT = _masked(logits_VT, num_rows, softcap)
    return logits_VT.max(0), logits_VT.argmax(0).astype(jnp.int32)


def _merged(parts_N3T):
    """Statistics of all parts from those of each: the largest logit, the sum of exponentials, the target's logit."""
    max_T = parts_N3T[:, 0].max(0)
    sum_T = (parts_N3T[:, 1] * jnp.exp(parts_N3T[:, 0] - max_T)).sum(0)
    return jnp.stack((max_T, sum_T, parts_N3T[:, 2].sum(0)))


def _weights(targets_BS, weights_BS):
    """fp32, 0 for a target that isn't counted."""
    return jnp.where(targets_BS == IGNORE, 0, 1 if weights_BS is None else weights_BS).astype(jnp.float32)


def _no_losses():
    return jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32)


def _add_losses(sums, lse_T, target_T, weights_T):
    # weight 0 is no part of the sum even where the loss isn't finite
    counted_T = weights_T != 0
    loss_T, z_T = (lse_T - target_T) * weights_T, jnp.square(lse_T) * weights_T
    return tuple(total + jnp.sum(jnp.where(counted_T, x_T, 0)) for total, x_T in zip(sums, (loss_T, z_T), strict=True))


def _logits(head_VD, hidden_TD):
    return _einsum("VD,TD->VT", head_VD, hidden_TD)


def _einsum(dimensions, x, y):
    """In fp32, from operands of the compute dtype."""
    return jnp.einsum(dimensions, x, y, preferred_element_type=jnp.float32)


def _part(x, start, size):
    return lax.dynamic_slice_in_dim(x, start, size)


def _put(x, part, start):
    return lax.dynamic_update_slice_in_dim(x, part, start, 0)


def _by_tiles(one: Callable, num_rows: int, size: int, carry: Any) -> Any:
    """`one(first row, number of rows, carry)` for tiles of `size` rows in turn, and for what remains."""
    size = min(size, num_rows)
    num_tiles, rest = divmod(num_rows, size)
    carry = lax.fori_loop(0, num_tiles, lambda i, carry: one(i * size, size, carry), carry)
    return one(num_tiles * size, rest, carry) if rest else carry


def _by_chunks(one: Callable, num_tokens: int, size: int, carry: Any) -> Any:
    """`one(first token, is_new_T, carry)` for chunks of `size` tokens in turn.

    The last chunk may begin with tokens that the one before it had: they aren't new.
    """

    def step(i, carry):
        start = jnp.minimum(i * size, num_tokens - size)
        return one(start, start + jnp.arange(size) >= i * size, carry)

    return lax.fori_loop(0, -(-num_tokens // size), step, carry)
