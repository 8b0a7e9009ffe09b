"""Multi-token prediction: layers behind the decoder's, each of which predicts one token further ahead.

Depth j = 1, 2, ... has, at each token, the states of depth j - 1, which for j = 1 are the decoder's after its final
norm, and the embedding of the token j further on.  A decoder layer on a projection of both, each normed, and a final
norm give its states, from which the shared head predicts the token j + 1 further on.  (DeepSeek-V3, arXiv:2412.19437,
2.2.)  Tokens ahead are those of the same document; where it ends before, there is neither an embedding nor a target.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxforge.config.schema import DecoderConfig
from jaxforge.models.attention import RESIDUAL, WHOLE
from jaxforge.models.norm import RMSNorm
from jaxforge.models.parameters import normal
from jaxforge.ops.cross_entropy import IGNORE
from jaxforge.ops.placement import Placement

Batch = Mapping[str, jax.Array]
# Keys of a batch.
TOKENS, VISUAL_INDEX, TARGETS, WEIGHTS = "mtp_tokens", "mtp_visual_index", "mtp_targets", "mtp_weights"
_NO_TOKEN = -1


class Depth(nnx.Module):
    """What a depth has beside its decoder layer."""

    def __init__(self, config: DecoderConfig, *, placement: Placement, rngs: nnx.Rngs):
        width = config.hidden_size
        self.embedding_norm = RMSNorm(width, config.norm_epsilon)
        self.states_norm = RMSNorm(width, config.norm_epsilon)
        # of the embedding, and of the states
        self.projection_2DE = normal(rngs, (2, width, width), (None, "embed", "width"), config.init_method_std)
        self.final_norm = RMSNorm(width, config.norm_epsilon)
        self.placement = placement

    def enter(self, embedded_BSD: jax.Array, states_BSD: jax.Array) -> jax.Array:
        """What the decoder layer reads, [B, S, D]; all are laid out as the residual stream."""
        normed = (self.embedding_norm(embedded_BSD), self.states_norm(states_BSD))
        embedded_BSD, states_BSD = (self.placement.reshard(x_BSD, RESIDUAL, WHOLE) for x_BSD in normed)
        from_embedding_DE, from_states_DE = self.projection_2DE[...]
        x_BSE = jnp.einsum("BSD,DE->BSE", embedded_BSD, from_embedding_DE)
        x_BSE = x_BSE + jnp.einsum("BSD,DE->BSE", states_BSD, from_states_DE)
        by_width = (None, None, "width")
        return self.placement.reshard(self.placement.constrain(x_BSE, by_width), by_width, RESIDUAL)


def of_depths(tree: Any, num_depths: int) -> list[Any]:
    """Stacked parameters as those of each depth."""
    return [jax.tree.map(lambda a, i=i: a[i], tree) for i in range(num_depths)]


def ahead(batch: Batch, num_depths: int) -> dict[str, jax.Array]:
    """What each depth sees and predicts, of a batch [..., B, S]: arrays [..., J, B, S] int32.

    mtp_tokens and with an encoder mtp_visual_index, those of the token that it sees, -1 where the document has none;
    mtp_targets, the token after that, or IGNORE.  Found for all microbatches at once, where all devices are: left to
    XLA's partitioner, a shift may take an exchange.
    """
    found = {}
    for key, name, missing in (
        (TOKENS, "tokens", _NO_TOKEN), (VISUAL_INDEX, "visual_index", _NO_TOKEN), (TARGETS, "targets", IGNORE)
    ):  # fmt: skip
        if name in batch and num_depths:
            shifted = [_ahead(batch[name], batch["segment_ids"], depth, missing) for depth in range(1, num_depths + 1)]
            found[key] = jnp.stack(shifted, axis=-3)
    return found


def seen(batch: Batch, num_depths: int) -> list[dict[str, jax.Array]]:
    """Of a microbatch that has what `ahead` gives, for each depth what a lookup reads: tokens, visual_index."""
    keys = [(name, key) for name, key in (("tokens", TOKENS), ("visual_index", VISUAL_INDEX)) if key in batch]
    return [{name: batch[key][i] for name, key in keys} for i in range(num_depths)]


def targets_and_weights(batch: Batch, num_depths: int) -> list[tuple[jax.Array, jax.Array | None]]:
    """Of such a microbatch the targets [B, S] and their weight, of the next token and of each depth; None is 1."""
    return [(batch["targets"], None), *((batch[TARGETS][i], batch[WEIGHTS][i]) for i in range(num_depths))]


def _ahead(values: jax.Array, segment_ids: jax.Array, by: int, missing: int) -> jax.Array:
    """values[..., s + by] where that token is of the same document, else `missing`."""

    def moved(array, filling):
        widths = [(0, 0)] * (array.ndim - 1) + [(0, by)]
        return jnp.pad(array, widths, constant_values=filling)[..., by:]

    is_same = (moved(segment_ids, 0) == segment_ids) & (segment_ids > 0)
    return jnp.where(is_same, moved(values, missing), missing)
