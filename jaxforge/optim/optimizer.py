"""AdamW with clipping by global norm, for one parameter, or slice of one, at a time."""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import NamedSharding

from jaxforge.config.schema import OptimizerConfig
from jaxforge.optim.host_memory import is_in_host_memory
from jaxforge.optim.paths import Tree, check_patterns, decays, matches, parameter_paths
from jaxforge.optim.schedule import learning_rate_schedule
from jaxforge.optim.streaming import Arrays, streamed_casts, streamed_updates

# Of the state's links, the one that holds Adam's moments.
_ADAM = 1


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """The update rule for fp32 masters: clip, Adam, decay, learning rate (Loshchilov and Hutter, arXiv:1711.05101).

    What joins numbers of different places, or depends on the step alone, is found once (`_scalars`); the rest is the
    same for each number (`_updated`).  So parameters are updated one by one, those in host memory slice by slice, by
    the same rule and to the same bits.  For the latter no array is divided by a scalar, which XLA may turn into a
    product, or join with another division; and products are rounded before they are added, which compilers else do or
    leave, as the code around suggests.

    Its state has the structure of Optax's chain of clip_by_global_norm, scale_by_adam, add_decayed_weights, a factor
    for each parameter and scale_by_learning_rate, as checkpoints do.

    Attributes:
      config: its numbers, and the dtypes that moments are stored in; updates are computed in fp32.
      schedule: the learning rate of update number `count`.
      in_host_memory: by path, how those masters and their moments are laid out that lie in host memory.
    """

    config: OptimizerConfig
    schedule: optax.Schedule
    in_host_memory: Mapping[str, NamedSharding]

    def init(self, trainable: Tree) -> Tree:
        """The state before the first update of `trainable`."""

        def zeros(dtype: str) -> Tree:
            return jax.tree.map(lambda parameter: jnp.zeros(parameter.shape, dtype), trainable)

        nothing = optax.EmptyState()
        return (
            nothing,
            optax.ScaleByAdamState(
                jnp.zeros((), jnp.int32), zeros(self.config.exp_avg_dtype), zeros(self.config.exp_avg_sq_dtype)
            ),
            optax.MaskedState(inner_state=nothing),
            nothing,
            optax.ScaleByScheduleState(jnp.zeros((), jnp.int32)),
        )

    def update(
        self, gradients: Tree, state: Tree, trainable: Tree, norm: jax.Array, is_finite: jax.Array
    ) -> tuple[Tree, Tree]:
        """The next (trainable, state).

        Args:
          gradients: fp32, laid out as the masters.
          norm: of all gradients together, fp32.
          is_finite: where it is false nothing changes.
        """
        paths = parameter_paths(trainable)
        leaves = [jax.tree.leaves(tree) for tree in (paths, gradients, trainable, *moments(state))]
        scalars = self._scalars(state, norm, is_finite)
        done: dict[str, Arrays] = {}
        streamed: dict[str, tuple[Arrays, jax.Array]] = {}
        for path, gradient, *arrays in zip(*leaves, strict=True):
            if path in self.in_host_memory:
                streamed[path] = tuple(arrays), gradient
            else:
                done[path] = self._updated(path, tuple(arrays), gradient, scalars)
        if streamed:
            done |= streamed_updates(self._updated, self.in_host_memory, streamed, scalars)
        trainable, mu, nu = (jax.tree.map(lambda path, i=i: done[path][i], paths) for i in range(3))
        counted = jax.tree.map(lambda count: jnp.where(is_finite, count + 1, count), with_moments(state, {}, {}))
        return trainable, with_moments(counted, mu, nu)

    def cast_from_host(self, trainable: Tree, dtype: jnp.dtype) -> Tree:
        """`trainable`, with the masters in host memory replaced by their weights in `dtype` on the device."""
        if not self.in_host_memory:
            return trainable
        paths = parameter_paths(trainable)
        masters = dict(zip(jax.tree.leaves(paths), jax.tree.leaves(trainable), strict=True))
        weights = streamed_casts({path: masters[path] for path in self.in_host_memory}, self.in_host_memory, dtype)
        return jax.tree.map(lambda path, master: weights.get(path, master), paths, trainable)

    def learning_rate(self, state: Tree) -> jax.Array:
        """Of the next update."""
        return self.schedule(state[-1].count)

    def _scalars(self, state: Tree, norm: jax.Array, is_finite: jax.Array) -> dict[str, jax.Array]:
        config, count = self.config, state[_ADAM].count + 1
        limit = config.clip_grad
        return {
            "is_finite": is_finite,
            "zero": jnp.asarray(count < 0, jnp.int32),
            "clip": jnp.where(norm < limit, 1.0, limit / norm) if limit else jnp.ones(()),
            # of moments that start at 0 (Kingma and Ba, arXiv:1412.6980, 3)
            "mu_correction": 1 / (1 - config.adam_beta1**count),
            "nu_correction": 1 / (1 - config.adam_beta2**count),
            "learning_rate": self.learning_rate(state),
        }

    def _updated(self, path: str, kept: Arrays, gradient: jax.Array, scalars: dict[str, jax.Array]) -> Arrays:
        """The next (parameter, first moment, second moment) of a parameter, or of the same slice of the three."""
        config = self.config
        parameter, mu, nu = kept[0], kept[1].astype(jnp.float32), kept[2].astype(jnp.float32)

        def times(factor: float | jax.Array, values: jax.Array) -> jax.Array:
            """The product, rounded: a compiler doesn't know that what is added to its bits is 0."""
            bits = lax.bitcast_convert_type(factor * values, jnp.int32) + scalars["zero"]
            return lax.bitcast_convert_type(bits, jnp.float32)

        gradient = gradient * scalars["clip"]
        mu = times(config.adam_beta1, mu) + times(1 - config.adam_beta1, gradient)
        nu = times(config.adam_beta2, nu) + times(1 - config.adam_beta2, gradient * gradient)
        direction = mu * scalars["mu_correction"] / (jnp.sqrt(nu * scalars["nu_correction"]) + config.adam_eps)
        if decays(path):
            direction = direction + times(config.weight_decay, parameter)
        scale = next((scale for pattern, scale in config.lr_scale if matches(path, pattern)), 1.0)
        parameter = parameter - times(scalars["learning_rate"] * scale, direction)
        return tuple(
            jnp.where(scalars["is_finite"], new.astype(old.dtype), old)
            for new, old in zip((parameter, mu, nu), kept, strict=True)
        )


def make_optimizer(config: OptimizerConfig, train_steps: int, trainable: Tree) -> Optimizer:
    """For `trainable`: arrays, or shapes with the shardings that say which lie in host memory.

    Raises ConfigError for an `lr_scale` pattern without effect.
    """
    check_patterns(tuple(pattern for pattern, _ in config.lr_scale), trainable, "optimizer.lr_scale")
    leaves = zip(jax.tree.leaves(parameter_paths(trainable)), jax.tree.leaves(trainable), strict=True)
    in_host_memory = {path: leaf.sharding for path, leaf in leaves if is_in_host_memory(leaf)}
    return Optimizer(config, learning_rate_schedule(config, train_steps), in_host_memory)


def moments(state: Tree) -> tuple[Tree, Tree]:
    """Adam's first and second moments, each a tree like the parameters."""
    return state[_ADAM].mu, state[_ADAM].nu


def with_moments(state: Tree, mu: Tree, nu: Tree) -> Tree:
    """The state with other moments."""
    return (*state[:_ADAM], state[_ADAM]._replace(mu=mu, nu=nu), *state[_ADAM + 1 :])
