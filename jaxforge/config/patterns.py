"""Patterns on paths, as config fields have them."""

import fnmatch
import re


def matches(path: str, pattern: str) -> bool:
    """Shell-style matching on the whole path; a pattern that names a folder takes all below it."""
    return fnmatch.fnmatchcase(path, pattern) or fnmatch.fnmatchcase(path, pattern.removesuffix("/**") + "/*")


def takes_all(patterns: tuple[str, ...], module: str) -> bool:
    """Whether one pattern takes all of a module: it then also matches a name that no parameter has."""
    return any(matches(f"{module}/ /any", pattern) for pattern in patterns)


def takes_some(patterns: tuple[str, ...], module: str) -> bool:
    """Whether a pattern may take something of a module: they agree up to its first wildcard."""
    plain = [re.split(r"[*?[]", pattern)[0] for pattern in patterns]
    return any(prefix.startswith(f"{module}/") or f"{module}/".startswith(prefix) for prefix in plain)
