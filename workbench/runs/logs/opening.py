"""The lines that a program prints when it starts. Where they are printed again, it was started again.

::

    using world size: 8 …          the opening: lines before the third row
    hidden_size ......... 24
    iteration     1/ 120 | …       rows
    using world size: 8 …          again, between two rows: a restart
    hidden_size ......... 24

Digits do not count, so times, hosts' numbers and values may differ. Lines about warnings, evaluations, epochs and saves
are left out: they are printed again without a restart.
"""

from __future__ import annotations

import re

LINES = 200  #: lines of the opening that are kept
ROWS = 3  #: rows in whose course the opening is printed, as other ranks are late
SHARE, ENOUGH = 1 / 3, 8  #: of the opening's lines that have to be printed again, and how many are enough
_DIGITS = b"0123456789"
_REPEATED = re.compile(
    r"warn|deprecat|eval|valid|epoch|\bsav(?:e|ed|ing)\b|wr(?:ite|iting|ote)|stag(?:ed|ing)|error|exception|traceback"
    r"|it/s|\bstep|sampl|generat|garbage|memory|dataset|dataload|shard|progress|upload|download",
    re.IGNORECASE,
)
#: An opening of a single line has to say that something is set up.
_SET_UP = re.compile(
    r"parameters|world[ _]size|\bdevices?\b|namespace\(|\bargs\b|arguments|configuration|\bseed\b|initiali[sz]|compil"
    r"|starting|version|running training",
    re.IGNORECASE,
)


class OpeningLines:
    """Follows the lines of a text between its rows."""

    def __init__(self) -> None:
        self._opening: set[bytes] = set()
        self._set_up = False  # whether one of the lines says that something is set up
        self._again: set[bytes] = set()
        self._rows = 0

    def line(self, text: str) -> None:
        """Take a line that is not a row."""
        plain = text.encode("utf-8", "surrogatepass").translate(None, _DIGITS)  # of str, it is ten times as slow
        if self._rows >= ROWS:
            if plain in self._opening:
                self._again.add(plain)
        elif len(self._opening) < LINES and any(map(str.isalpha, text)) and not _REPEATED.search(text):
            self._opening.add(plain)
            self._set_up = self._set_up or _SET_UP.search(text) is not None

    @property
    def known(self) -> bool:
        """Whether the lines are such that a start of the program prints them."""
        return len(self._opening) > 1 or self._set_up

    def row(self) -> str:
        """Take a row; return a sentence if the program was started again before it, or else nothing."""
        self._rows += 1
        if not self._again:
            return ""
        again, self._again = self._again, set()
        all_of_it = len(self._opening)
        if len(again) < min(max(2, SHARE * all_of_it), ENOUGH) and not (all_of_it == 1 and self._set_up):
            return ""
        return (
            f"{len(again)} of the {all_of_it} lines that the program printed first are printed again"
            if (all_of_it > 1)
            else "the line that the program printed first is printed again"
        )
