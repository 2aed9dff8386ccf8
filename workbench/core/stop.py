"""Cancellation of threads: a request whose result is no longer needed ends with its next piece.

::

    pass      Stop ─┬─ task, in a thread ── Stop ─┬─ request, in a thread     going_on() at each piece
                    └─ task                       └─ request

A pass that is left before its end (Ctrl-C, an error, a progress bar that cancels) sets its stop, which ends the
requests of its tasks too; their results are dropped.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

R = TypeVar("R")
_own = threading.local()


class GivenUp(BaseException):  # not an Exception: no handler should report it
    """The result of this thread is no longer needed."""


class Stop:
    """Stops the calls that are made through it, and those through stops that they make themselves."""

    def __init__(self, above: Stop | None = None) -> None:
        """Create a stop below ``above``, by default below that of this thread's call."""
        self._above: Stop | None = above or getattr(_own, "stop", None)
        self._set = False

    def set(self) -> None:
        """Stop what runs, at its next :func:`going_on`."""
        self._set = True

    def is_set(self) -> bool:
        """Return whether this stop, or one above it, is set."""
        return self._set or (self._above is not None and self._above.is_set())

    def run(self, call: Callable[..., R], *given: object) -> R:
        """Make a call that this stop can end."""
        before = getattr(_own, "stop", None)
        _own.stop = self
        try:
            going_on()
            return call(*given)
        finally:
            _own.stop = before


def going_on() -> None:
    """Raise :class:`GivenUp` if the stop of this thread's call is set."""
    stop: Stop | None = getattr(_own, "stop", None)
    if stop is not None and stop.is_set():
        raise GivenUp
