"""What one device computes, without any shard_map, and how far a layout may be from it, in fp32."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxforge.config.schema import Config
from jaxforge.models.moe import ExpertsRun
from jaxforge.ops.cross_entropy import IGNORE
from jaxforge.training.program import make_model

LOSS_TOLERANCE, GRADIENT_TOLERANCE = 1e-6, 1e-5


def deviation_table(path: str | None, markdown: Callable[[dict], str]) -> Iterator[dict]:
    """Layouts and their deviations, for a fixture: written to `path` at the end, if there is one."""
    deviations: dict[Any, Deviation] = {}
    yield deviations
    if path:
        Path(path).write_text(markdown(deviations))


@dataclasses.dataclass(frozen=True)
class Deviation:
    """Of the loss, relative; and of the gradient that deviates most, relative to its largest entry."""

    loss: float
    gradient: float
    worst: str

    def assert_small(self, layout: object) -> None:
        assert self.loss <= LOSS_TOLERANCE, f"{layout}: {self}"
        assert self.gradient <= GRADIENT_TOLERANCE, f"{layout}: {self}"


def loss_and_gradients(
    config: Config, parameters: dict, rows: dict[str, np.ndarray], experts: ExpertsRun | None = None
) -> tuple[float, dict]:
    """Loss with z-loss over all rows [R, ...] at once, and its gradients."""
    loss, gradients = _objective(config, experts)(parameters, rows, num_targets(rows))
    return float(loss), jax.tree.map(np.asarray, gradients)


@functools.cache
def _objective(config: Config, experts: ExpertsRun | None):
    """Compiled once for rows of one shape."""
    graph = nnx.graphdef(nnx.eval_shape(lambda: make_model(config, "xla", nnx.Rngs(params=0), experts=experts)))

    @jax.jit
    @jax.value_and_grad
    def objective(parameters, rows, num_targets):
        losses = nnx.merge(graph, parameters).loss(rows)
        return losses.objective(config.loss.z_loss_coefficient) / num_targets

    return objective


def num_targets(rows: dict[str, np.ndarray]) -> int:
    return int(np.sum(rows["targets"] != IGNORE))


def loss_of(config: Config, sums: dict) -> float:
    """The same loss, from the sums that a program gives."""
    total = float(sums["loss"]) + config.loss.z_loss_coefficient * float(sums["z"]) + float(np.sum(sums["mtp_J"]))
    return total / int(sums["target_tokens"])


def deviation(loss: float, gradients: dict, expected_loss: float, expected: dict) -> Deviation:
    """Of a loss and the gradients of some parameters, from those of all parameters on one device."""
    relative = {}
    for path, gradient in jax.tree_util.tree_leaves_with_path(gradients):
        reference = expected
        for key in path:
            reference = reference[key.key]
        name, largest = jax.tree_util.keystr(path, simple=True, separator="/"), np.abs(reference).max()
        assert largest > 0, f"the reference gives {name} no gradient"
        relative[name] = np.abs(np.asarray(gradient) - reference).max() / largest
    worst = max(relative, key=relative.__getitem__)
    return Deviation(abs(loss / expected_loss - 1), float(relative[worst]), worst)
