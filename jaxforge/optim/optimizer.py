"""AdamW with clipping by global norm (Optax)."""

import jax
import optax

from jaxforge.config.schema import OptimizerConfig
from jaxforge.optim.paths import Tree, check_patterns, decays, matches, parameter_paths
from jaxforge.optim.schedule import learning_rate_schedule


def make_optimizer(config: OptimizerConfig, train_steps: int, trainable: Tree) -> optax.GradientTransformation:
    """The update rule for the fp32 masters `trainable` (arrays or shapes): clip, Adam, decay, learning rate.

    (Loshchilov and Hutter 2017, arXiv:1711.05101.)  Raises ConfigError for an `lr_scale` pattern without effect.
    """
    check_patterns(tuple(pattern for pattern, _ in config.lr_scale), trainable, "optimizer.lr_scale")
    paths = parameter_paths(trainable)

    def scale_of(path):
        return next((scale for pattern, scale in config.lr_scale if matches(path, pattern)), 1.0)

    scales = jax.tree.map(scale_of, paths)
    schedule = learning_rate_schedule(config, train_steps)
    return optax.chain(
        optax.clip_by_global_norm(config.clip_grad) if config.clip_grad else optax.identity(),
        optax.scale_by_adam(config.adam_beta1, config.adam_beta2, config.adam_eps),
        optax.add_decayed_weights(config.weight_decay, mask=jax.tree.map(decays, paths)),
        optax.stateless(lambda updates, _: jax.tree.map(lambda u, s: u * s, updates, scales)),
        optax.scale_by_learning_rate(schedule),
    )
