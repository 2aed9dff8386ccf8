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


_SINGULAR = {"are": "is", "have": "has", "were": "was", "do": "does"}


def plural(count: int, noun: str, verb: str = "") -> str:
    """Format as ``1 chunk``, ``2,000 chunks``, or with a verb in the plural, which is adapted.

    >>> plural(1, "chunk", "are"), plural(2000, "chunk", "are"), plural(2, "copy"), plural(3, "box")
    ('1 chunk is', '2,000 chunks are', '2 copies', '3 boxes')
    """
    if count == 1:
        return f"1 {noun} {_SINGULAR.get(verb, f'{verb}s')}" if verb else f"1 {noun}"
    ending = "es" if noun.endswith(("x", "s", "ch", "sh")) else "s"
    many = f"{noun[:-1]}ies" if noun.endswith("y") and noun[-2] not in "aeiou" else f"{noun}{ending}"
    return f"{count:,} {many} {verb}".rstrip()


def some_of(names: Collection[Any], most: int = 4, show: Callable[[Any], str] = repr, between: str = ", ") -> str:
    """Return the first names and the number of the others.

    >>> some_of(["a", "b", "c"], 1)
    "'a' and 2 more"
    """
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return between.join(map(show, islice(names, most))) + more
