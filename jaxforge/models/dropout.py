"""Dropout whose masks depend on the row and the place in the model alone, so that every layout drops the same."""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxforge.models.attention import RESIDUAL
from jaxforge.ops.placement import Placement


def dropout(
    x_BSD: jax.Array, keys_B2: jax.Array | None, site: int | jax.Array, rate: float, placement: Placement
) -> jax.Array:
    """Zeroes each number with probability `rate` and scales the rest by 1 / (1 - rate).

    Args:
      keys_B2: a random key for each row, uint32 as `jax.random.key_data` gives it; None (evaluation) drops nothing.
      site: number of this place in the model.
    """
    if keys_B2 is None or rate == 0:
        return x_BSD

    def keep_row(key_2):
        key = jax.random.fold_in(jax.random.wrap_key_data(key_2), site)
        return jax.random.bernoulli(key, 1 - rate, x_BSD.shape[1:])

    keep_BSD = checkpoint_name(placement.constrain(jax.vmap(keep_row)(keys_B2), RESIDUAL), "dropout")
    return jnp.where(keep_BSD, x_BSD / (1 - rate), 0)
