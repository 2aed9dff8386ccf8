"""Counts and lists of names in sentences."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from itertools import islice
from typing import Any


class Ordinary(str):
    """A note about a normal choice: reported, but nothing to worry about."""

    __slots__ = ()


#: What a message suggests for an incomplete checkpoint.
_PARTIAL = re.compile(r"[,;.]? (?:or )?open (?:the rest )?with partial=True(?: to read the rest)?", re.IGNORECASE)


def without_partial(message: str) -> str:
    """Return a message without the suggestion to open in part, where that was done or is not possible.

    >>> without_partial("restore it, or open with partial=True to read the rest")
    'restore it'
    """
    return _PARTIAL.sub("", message)


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
