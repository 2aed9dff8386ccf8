"""Counts and lists of names in sentences."""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import islice
from typing import Any


class Ordinary(str):
    """A note about a normal choice: reported, but nothing to worry about."""

    __slots__ = ()


def plural(count: int, noun: str) -> str:
    """Format as ``1 chunk``, ``2,000 chunks``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def some_of(names: Collection[Any], most: int = 4, show: Callable[[Any], str] = repr, between: str = ", ") -> str:
    """Return the first names and the number of the others.

    >>> some_of(["a", "b", "c"], 1)
    "'a' and 2 more"
    """
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return between.join(map(show, islice(names, most))) + more
