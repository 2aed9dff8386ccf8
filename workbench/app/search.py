"""A regular expression over all names, that ends when its time is up, whoever wrote it.

::

    pattern ──► Search ──► run(0.1)   on the page's thread: enough for nearly all
                     └───► run(5.0)   in a job, where the first was not; it goes on where that one stopped
                              └────► UsageError: it takes too long

Python's own ``re`` cannot be stopped: ``(a+)+$`` on one name of 60 letters runs for years, and holds the interpreter's
lock meanwhile, so that the server is dead to everyone. Here ``re`` only says whether a pattern is one, in its words;
``regex`` (2026.11) matches, within a time limit and without the lock. What ``regex`` does without a limit is to
compile, and there it writes out repeats: ``a{4000000000}`` takes 16 GB. So these are multiplied first.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import regex

from workbench.errors import UsageError
from workbench.views.names import safe, shorten

__all__ = ["LIMIT", "Search"]

LIMIT = 5.0  #: seconds that a search may take altogether
REPEATS = 20_000  #: what the counts in a pattern's braces may multiply to
BLOCK = 64  #: names between two looks at the clock
_COUNT = re.compile(r"\{(\d*),?(\d*)\}")


class Search:
    """The names that a pattern matches somewhere; stopped and taken up again.

    Attributes:
        hits: positions found so far.
        at: names that were looked at.

    Raises:
        UsageError: no valid regular expression, with the character; or one whose repeats multiply beyond reason.
    """

    def __init__(self, names: Sequence[str], pattern: str) -> None:
        self._names, self._search = names, _compiled(pattern).search
        self.hits: list[int] = []
        self.at = 0

    def __len__(self) -> int:
        return len(self._names)

    def run(self, seconds: float) -> bool:
        """Search on for so long; whether all names were looked at."""
        names, search, hits = self._names, self._search, self.hits
        until = time.monotonic() + seconds
        while self.at < len(names):
            left = until - time.monotonic()
            if left <= 0:
                return False
            for at in range(self.at, min(self.at + BLOCK, len(names))):
                try:
                    found = search(names[at], timeout=left, concurrent=True)
                except TimeoutError:
                    return False
                if found is not None:
                    hits.append(at)
                self.at = at + 1
        return True

    def positions(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """What was found."""
        return np.array(self.hits, np.int64)

    def too_long(self) -> UsageError:
        """The sentence for a search that did not end."""
        name = shorten(safe(self._names[self.at]), 60) if self.at < len(self._names) else ""
        return UsageError(
            f"the pattern takes too long: {LIMIT:g} s went by and it is at name {self.at + 1:,} of "
            f"{len(self._names):,}, {name!r}. Repeats inside repeats, as in (a+)+, are what makes it slow; say it "
            "without them. Every row is shown"
        )


def _compiled(pattern: str) -> Any:
    counts = [max(int(high or 0), int(low or 0), 1) for low, high in _COUNT.findall(pattern)]
    if math.prod(counts) > REPEATS:
        raise UsageError(
            f"the counts in the pattern's braces multiply to more than {REPEATS:,}; names are not that long. "
            "Every row is shown"
        )
    try:
        re.compile(pattern)
        return regex.compile(pattern, cache_pattern=False)
    except (re.error, regex.error, OverflowError, RecursionError) as error:
        at = getattr(error, "pos", None)
        words = error.msg if isinstance(error, (re.error, regex.error)) else "it is too large"
        where = "" if at is None else f" (character {at + 1})"
        raise UsageError(f"the pattern is not a valid regular expression: {words}{where}; every row is shown") from None
