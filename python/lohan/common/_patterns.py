"""Patterns of module names, as in fnmatch."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable


def first_match(name: str, patterns: Iterable[str]) -> str | None:
    """Return the first pattern that matches a module's name or that of an enclosing module."""
    parts = name.split(".")
    around = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
    for pattern in patterns:
        if any(fnmatch.fnmatchcase(each, pattern) for each in around):
            return pattern
    return None
