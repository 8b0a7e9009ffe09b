"""Patterns on paths, as config fields have them."""

import fnmatch


def matches(path: str, pattern: str) -> bool:
    """Shell-style matching on the whole path; a pattern that names a folder takes all below it."""
    return fnmatch.fnmatchcase(path, pattern) or fnmatch.fnmatchcase(path, pattern.removesuffix("/**") + "/*")
