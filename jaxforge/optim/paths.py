"""Parameters by path: which train, which decay, and which learn at another rate."""

import fnmatch
from typing import Any

import jax

from jaxforge.config.errors import ConfigError

Tree = Any


def parameter_paths(parameters: Tree) -> Tree:
    """The tree with each leaf replaced by its path, such as "decoder/layers/mlp/up_DF"."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: "/".join(str(key.key) for key in path), parameters, is_leaf=lambda x: not isinstance(x, dict)
    )


def matches(path: str, pattern: str) -> bool:
    """Shell-style matching on the whole path; a pattern that names a folder takes all below it."""
    return fnmatch.fnmatchcase(path, pattern) or fnmatch.fnmatchcase(path, pattern.removesuffix("/**") + "/*")


def check_patterns(patterns: tuple[str, ...], parameters: Tree, field: str) -> None:
    """ConfigError where a pattern takes no parameter: a setting without effect."""
    paths = jax.tree.leaves(parameter_paths(parameters))
    for pattern in patterns:
        if not any(matches(path, pattern) for path in paths):
            folders = sorted({path.rsplit("/", 1)[0] for path in paths})
            raise ConfigError(f"{field} has {pattern!r}, which matches no parameter; folders are {', '.join(folders)}")


def split_trainable(parameters: Tree, freeze: tuple[str, ...]) -> tuple[Tree, Tree]:
    """(trainable, frozen) nested dicts whose union is `parameters`; empty folders are left out."""
    check_patterns(freeze, parameters, "optimizer.freeze")

    def keep(tree, prefix, frozen):
        kept = {}
        for key, child in tree.items():
            path = f"{prefix}{key}"
            if isinstance(child, dict):
                below = keep(child, f"{path}/", frozen)
                if below:
                    kept[key] = below
            elif any(matches(path, pattern) for pattern in freeze) == frozen:
                kept[key] = child
        return kept

    trainable = keep(parameters, "", False)
    if not trainable:
        raise ConfigError(f"optimizer.freeze={freeze} leaves nothing to train; freeze fewer parameters")
    return trainable, keep(parameters, "", True)


def join(left: Tree, right: Tree) -> Tree:
    """The union of two nested dicts without a path in common."""
    joined = dict(left)
    for key, child in right.items():
        joined[key] = join(joined[key], child) if key in joined else child
    return joined


def decays(path: str) -> bool:
    """Whether weight decay applies: not to norms and biases."""
    name = path.rsplit("/", 1)[-1]
    return name != "scale" and "bias" not in name
