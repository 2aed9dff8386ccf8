"""Signals that would end the process, as exceptions: unfinished work can be cleaned up, or completed first."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

GRACE = 1.0  #: seconds that work which is not to be interrupted gets once a signal has arrived, if it is limited


class Signals:
    """Signals that would end the process raise instead, so the temp is removed; only in the main thread."""

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}
        self._waiting: int | None = None
        self._deferred = self._limited = False

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for name in ("SIGINT", "SIGTERM", "SIGHUP"):
                number = getattr(signal, name, None)
                usual = signal.default_int_handler if name == "SIGINT" else signal.SIG_DFL
                if number is not None and signal.getsignal(number) == usual:
                    self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        self._before = {}

    @contextmanager
    def deferred(self, *, limited: bool = False) -> Iterator[None]:
        """Defer signals until the end of the block, then raise.

        Args:
            limited: raise in the block after :data:`GRACE` seconds, or at a second signal: it waits for a store.
        """
        self._deferred, self._limited = True, limited
        try:
            yield
        finally:
            self._deferred = False
        if self._waiting is not None:
            number, self._waiting = self._waiting, None
            self._raise(number)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._deferred or (self._limited and self._waiting is not None):
            self._deferred, self._waiting = False, None
            self._raise(number)
        if self._limited and self._waiting is None:
            timer = threading.Timer(GRACE, self._again, (number,))
            timer.daemon = True
            timer.start()
        self._waiting = number

    def _again(self, number: int) -> None:
        if self._deferred and self._waiting is not None:
            os.kill(os.getpid(), number)

    def _raise(self, number: int) -> None:
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)
