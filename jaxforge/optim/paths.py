"""Parameters by path: which train, which decay, and which learn at another rate."""

from collections.abc import Callable
from typing import Any

import jax

from jaxforge.config.errors import ConfigError
from jaxforge.config.patterns import matches

Tree = Any


def parameter_paths(parameters: Tree) -> Tree:
    """The tree with each leaf replaced by its path, such as "decoder/layers/mlp/up_DF"."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: "/".join(str(key.key) for key in path), parameters, is_leaf=lambda x: not isinstance(x, dict)
    )


def check_patterns(patterns: tuple[str, ...], parameters: Tree, field: str, what: str = "parameter") -> None:
    """ConfigError where a pattern takes none of `parameters`, which are `what`: a setting without effect."""
    paths = jax.tree.leaves(parameter_paths(parameters))
    for pattern in patterns:
        if not any(matches(path, pattern) for path in paths):
            folders = sorted({path.rsplit("/", 1)[0] for path in paths})
            raise ConfigError(f"{field} has {pattern!r}, which matches no {what}; folders are {', '.join(folders)}")


def split(parameters: Tree, is_taken: Callable[[str], bool], prefix: str = "") -> tuple[Tree, Tree]:
    """(taken, left) nested dicts whose union is `parameters`, by path; empty folders are left out."""
    taken: Tree = {}
    left: Tree = {}
    for key, child in parameters.items():
        path = f"{prefix}{key}"
        if isinstance(child, dict):
            for part, below in zip((taken, left), split(child, is_taken, f"{path}/"), strict=True):
                if below:
                    part[key] = below
        else:
            (taken if is_taken(path) else left)[key] = child
    return taken, left


def split_trainable(parameters: Tree, freeze: tuple[str, ...], only: tuple[str, ...] = ()) -> tuple[Tree, Tree]:
    """(trainable, frozen) nested dicts whose union is `parameters`.

    Args:
      freeze: optimizer.freeze: patterns of what doesn't train.
      only: where it isn't empty, what no pattern of these takes doesn't train either.

    Raises:
      ConfigError: for a pattern of `freeze` without effect, or if nothing is left to train.
    """

    def any_of(patterns):
        return lambda path: any(matches(path, pattern) for pattern in patterns)

    candidates, others = split(parameters, any_of(only)) if only else (parameters, {})
    what = "parameter that trains with lora (adapters, and lora.train_also)" if only else "parameter"
    check_patterns(freeze, candidates, "optimizer.freeze", what)
    frozen, trainable = split(candidates, any_of(freeze))
    if not trainable:
        raise ConfigError(f"optimizer.freeze={freeze} leaves nothing to train; freeze fewer parameters")
    return trainable, join(frozen, others)


def join(left: Tree, right: Tree) -> Tree:
    """The union of two nested dicts without a path in common."""
    joined = dict(left)
    for key, child in right.items():
        joined[key] = join(joined[key], child) if key in joined else child
    return joined


def decays(path: str) -> bool:
    """Whether weight decay applies: to matrices, adapters' included, and not to norms and biases."""
    name = path.rsplit("/", 1)[-1]
    return name != "scale" and "bias" not in name
