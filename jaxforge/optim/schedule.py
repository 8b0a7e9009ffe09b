"""Learning-rate schedules: linear warm-up, then constant, cosine, linear or warm-up-stable-decay."""

import jax.numpy as jnp
import optax

from jaxforge.config.schema import OptimizerConfig


def learning_rate_schedule(config: OptimizerConfig, train_steps: int) -> optax.Schedule:
    """The learning rate of update number `count`, counted from 0.

    The warm-up reaches the peak at update `lr_warmup_iters`, starting from peak / lr_warmup_iters so that no update is
    wasted on a rate of 0; the decay reaches `min_lr` at `lr_decay_iters` and stays there.
    """
    peak, low = config.learning_rate, config.min_lr
    warmup = config.lr_warmup_iters
    end = config.lr_decay_iters or train_steps

    def schedule(count):
        count = jnp.asarray(count, jnp.float32)
        if config.lr_decay_style == "constant":
            decayed = jnp.full_like(count, peak)
        elif config.lr_decay_style == "WSD":
            assert config.lr_wsd_decay_iters is not None  # validate asks for it
            start = end - config.lr_wsd_decay_iters
            done = jnp.clip((count - start) / config.lr_wsd_decay_iters, 0, 1)
            decayed = peak + (low - peak) * done
        else:
            done = jnp.clip((count - warmup) / max(end - warmup, 1), 0, 1)
            weight = 0.5 * (1 + jnp.cos(jnp.pi * done)) if config.lr_decay_style == "cosine" else 1 - done
            decayed = low + (peak - low) * weight
        return jnp.where(count < warmup, peak * (count + 1) / max(warmup, 1), decayed)

    return schedule
