"""Suggestions for mistyped names, used wherever a name is looked up and not found.

::

    no tensor 'lm_head.weigt' among 162; did you mean 'model.lm_head.weight'?
"""

from __future__ import annotations

import difflib
import heapq
import os
from collections.abc import Collection

MOST = 2000  #: maximum number of names that are compared letter by letter, about 0.1 ms each
SHORT = 3  #: minimum letters; shorter text is contained in too many names


def near(name: str, known: Collection[str], count: int = 3) -> list[str]:
    """Return up to ``count`` known names: the closest in spelling, then the shortest that contain ``name``.

    Letter case is ignored. Fast for a million names, which are narrowed down first: a typo in one half of a name leaves
    the other half unchanged.
    """
    folded = name.casefold()
    pool: Collection[str] = known
    if len(known) > MOST:
        half = len(folded) // 2
        head, tail = folded[:half], folded[half:]
        similar = [one for one in known if (f := one.casefold()).startswith(head) or f.endswith(tail)] if half else []
        similar = heapq.nsmallest(10 * MOST, similar, key=lambda one: abs(len(one) - len(name)))
        pool = heapq.nlargest(MOST, similar, key=lambda one: _shared(one.casefold(), folded))
    by_casefold: dict[str, list[str]] = {}
    for one in pool:
        by_casefold.setdefault(one.casefold(), []).append(one)
    close = [one for f in difflib.get_close_matches(folded, by_casefold, n=count, cutoff=0.6) for one in by_casefold[f]]
    holding = (one for one in known if folded in one.casefold()) if len(name) >= SHORT else ()
    return list(dict.fromkeys([*close, *heapq.nsmallest(count, holding, key=len)]))[:count]


def did_you_mean(name: object, known: Collection[str]) -> str:
    """Return the end of a message about an unknown name, ``; did you mean 'b'?``; empty without similar names."""
    close = near(name, known) if isinstance(name, str) else []
    return f"; did you mean {', '.join(map(repr, close))}?" if close else ""


def no_such(name: object, known: Collection[str], what: str = "tensor") -> str:
    """Return the message for a name that is not among ``known``."""
    return f"no {what} {name!r} among {len(known):,}{did_you_mean(name, known)}"


def _shared(one: str, other: str) -> int:
    """Count the letters that two names have in common at both ends."""
    return sum(len(os.path.commonprefix(pair)) for pair in ([one, other], [one[::-1], other[::-1]]))  # noqa: RUF071
