"""A bar on a terminal while something long goes on; nothing in a pipe, nothing for what is over at once.

::

    stats step-48000  ▕█████████▌          ▏  48 %  1 min left
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from workbench.views import units
from workbench.views.names import columns, safe, shorten

__all__ = ["progress"]

PATIENCE = 0.4  #: seconds before anything is shown
EVERY = 0.1  #: seconds between two drawings
BAR = 24  #: cells of the bar
_PARTS = " ▏▎▍▌▋▊▉█"


@contextmanager
def progress(title: str, stream: TextIO | None = None) -> Iterator[Callable[[float], None]]:
    """Show how far something is, on stderr.

    Yields:
        ``tick(share)``, to be told the share that is done, 0 to 1, from one thread; the line is wiped at the end,
        also when the work raises. On anything but a terminal it does nothing.
    """
    out = sys.stderr if stream is None else stream
    if not _terminal(out):
        yield lambda share: None
        return
    line = _Line(safe(title), out)
    try:
        yield line.tick
    finally:
        line.wipe()


class _Line:
    """The line of a terminal that is drawn over and over."""

    def __init__(self, title: str, out: TextIO) -> None:
        self._title, self._out = title, out
        self._begin = self._drawn = time.monotonic()
        self._shown = False

    def tick(self, share: float) -> None:
        now = time.monotonic()
        if now - self._begin < PATIENCE or (self._shown and now - self._drawn < EVERY):
            return
        self._drawn, self._shown = now, True
        share = min(max(share, 0.0), 1.0)
        tail = f" ▕{_bar(share)}▏ {share:4.0%}  {_left(now - self._begin, share)}"
        width = shutil.get_terminal_size((80, 24)).columns - 1
        self._write("\r" + _fit(self._title, width - columns(tail)) + tail[: max(width, 0)] + "\x1b[K")

    def wipe(self) -> None:
        if self._shown:
            self._write("\r\x1b[K")

    def _write(self, text: str) -> None:
        try:
            self._out.write(text)
            self._out.flush()
        except (OSError, UnicodeError):  # a terminal that went away, or cannot draw blocks: the work matters more
            self._shown = False


def _terminal(out: TextIO) -> bool:
    return out.isatty() and os.environ.get("TERM") != "dumb"


def _bar(share: float) -> str:
    whole, part = divmod(round(share * BAR * 8), 8)
    return ("█" * whole + (_PARTS[part] if whole < BAR else "")).ljust(BAR)


def _left(spent: float, share: float) -> str:
    """What remains at the pace so far; nothing while that is a guess."""
    return f"{units.age(spent * (1 - share) / share)} left" if share > 0.02 else ""


def _fit(title: str, width: int) -> str:
    if width <= 0:
        return ""
    while columns(title) > width:  # wide characters take two columns
        title = shorten(title, min(len(title), width) - (1 if len(title) <= width else 0))
    return title
