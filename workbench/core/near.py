"""What a mistyped name was meant to be, for every name that is looked up and is not there.

::

    no tensor 'lm_head.weigt' among 162; did you mean 'model.lm_head.weight'?
"""

from __future__ import annotations

import difflib
import heapq
import os
from collections.abc import Collection

__all__ = ["did_you_mean", "near", "no_such"]

MOST = 2000  #: names that are compared letter by letter, some 0.1 ms each
SHORT = 3  #: letters; what is shorter is contained in too many names to mean one of them


def near(name: str, known: Collection[str], count: int = 3) -> list[str]:
    """Up to ``count`` of the known names: the closest in spelling, then the shortest that contain ``name``; capital and
    small letters are alike.

    Quick for a million names, which are narrowed down first: a slip at one place leaves the other half as it was.
    """
    wanted = name.casefold()
    pool: Collection[str] = known
    if len(known) > MOST:
        half = len(wanted) // 2
        head, tail = wanted[:half], wanted[half:]
        alike = [one for one in known if (f := one.casefold()).startswith(head) or f.endswith(tail)] if half else []
        alike = heapq.nsmallest(10 * MOST, alike, key=lambda one: abs(len(one) - len(name)))
        pool = heapq.nlargest(MOST, alike, key=lambda one: _shared(one.casefold(), wanted))
    spelt: dict[str, list[str]] = {}
    for one in pool:
        spelt.setdefault(one.casefold(), []).append(one)
    close = [one for f in difflib.get_close_matches(wanted, spelt, n=count, cutoff=0.6) for one in spelt[f]]
    holding = (one for one in known if wanted in one.casefold()) if len(name) >= SHORT else ()
    return list(dict.fromkeys([*close, *heapq.nsmallest(count, holding, key=len)]))[:count]


def did_you_mean(name: object, known: Collection[str]) -> str:
    """The suggestion at the end of a message about an unknown name, ``; did you mean 'b'?``; empty if none is near."""
    close = near(name, known) if isinstance(name, str) else []
    return f"; did you mean {', '.join(map(repr, close))}?" if close else ""


def no_such(name: object, known: Collection[str], what: str = "tensor") -> str:
    """The sentence for a name that is not among ``known``."""
    return f"no {what} {name!r} among {len(known):,}{did_you_mean(name, known)}"


def _shared(one: str, other: str) -> int:
    """Letters that two names have in common at both ends."""
    return sum(len(os.path.commonprefix(pair)) for pair in ([one, other], [one[::-1], other[::-1]]))  # noqa: RUF071
