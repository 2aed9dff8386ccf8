"""A regular expression search over all names, with a time limit on any pattern.

::

    pattern ──► Search ──► run(0.1)   on the page's thread: enough for nearly all
                     └───► run(5.0)   in a job, if the first was not enough; resumes where it stopped
                              └────► UsageError: it takes too long

Python's own ``re`` cannot be interrupted: ``(a+)+$`` on one name of 60 letters runs for years and holds the GIL
meanwhile, which blocks the server for everyone. Here, ``re`` only validates a pattern and supplies the error message;
``regex`` (2026.11) matches, within a time limit and without the GIL. Compiling in ``regex`` has no limit, and expands
repeats: ``a{4000000000}`` takes 16 GB. Repeat counts are therefore multiplied and checked first.
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

LIMIT = 5.0  #: seconds that a search may take in total
REPEATS = 20_000  #: maximum product of the counts in a pattern's braces
BLOCK = 64  #: names between two checks of the clock
_COUNT = re.compile(r"\{(\d*),?(\d*)\}")


class Search:
    """A search for names that contain a match of a pattern; can be suspended and resumed.

    Attributes:
        hits: positions found so far.
        at: number of names searched.

    Raises:
        UsageError: the expression is invalid (the message gives the position), or its repeats multiply beyond a limit.
    """

    def __init__(self, names: Sequence[str], pattern: str) -> None:
        self._names, self._search = names, _compiled(pattern).search
        self.hits: list[int] = []
        self.at = 0

    def __len__(self) -> int:
        return len(self._names)

    def run(self, seconds: float) -> bool:
        """Continue for the given time; return whether all names were searched."""
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
        """Return the positions found."""
        return np.array(self.hits, np.int64)

    def too_long(self) -> UsageError:
        """Return the message for a search that did not finish."""
        name = shorten(safe(self._names[self.at]), 60) if self.at < len(self._names) else ""
        return UsageError(
            f"the pattern takes too long: after {LIMIT:g} s it is at name {self.at + 1:,} of "
            f"{len(self._names):,}, {name!r}. Nested repeats such as (a+)+ make it slow; write it without them. "
            "Every row is shown"
        )


def _compiled(pattern: str) -> Any:
    counts = [max(int(high or 0), int(low or 0), 1) for low, high in _COUNT.findall(pattern)]
    if math.prod(counts) > REPEATS:
        raise UsageError(
            f"the counts in the pattern's braces multiply to more than {REPEATS:,}, longer than any name. "
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
