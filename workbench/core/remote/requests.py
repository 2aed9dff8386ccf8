"""Requests to stores: how many run at once, how many there were, and why one must not run in a forked process."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from workbench.errors import UsageError

IN_FLIGHT = 32  #: requests that run at the same time
AHEAD = 192 << 20  #: bytes that all passes of the process together fetch before they are read
ASKING = 8  #: threads in which callers wait for several of them
T = TypeVar("T")
R = TypeVar("R")


@dataclass
class Traffic:
    """Requests to a store since the checkpoint was opened, and the bytes received, needed, and read from a cache."""

    requests: int = 0
    received: int = 0
    needed: int = 0
    cached: int = 0
    _lock: Any = field(default_factory=threading.Lock, repr=False, compare=False)

    def count(self, *, requests: int = 0, received: int = 0, needed: int = 0, cached: int = 0) -> None:
        """Add to the counts; safe from several threads."""
        with self._lock:
            self.requests += requests
            self.received += received
            self.needed += needed
            self.cached += cached

    def __getstate__(self) -> dict[str, int]:
        return {
            "requests": self.requests,
            "received": self.received,
            "needed": self.needed,
            "cached": self.cached,
        }

    def __setstate__(self, state: dict[str, int]) -> None:
        self.__init__(**state)  # type: ignore[misc]


class _Threads:
    """The threads of this process that wait for stores.

    A call runs in one of them, never in the caller's thread: a call into obstore cannot be interrupted, so Ctrl-C would
    otherwise wait for its end.
    """

    def __init__(self) -> None:
        self._pools: dict[int, ThreadPoolExecutor] = {}
        self._process = 0
        self._lock = threading.Lock()

    def pool(self, count: int) -> ThreadPoolExecutor:
        with self._lock:
            if not self._pools:
                self._process = os.getpid()
            elif self._process != os.getpid():  # obstore's own threads are not in the child: a call would never end
                raise UsageError(
                    "this process was forked after a store had been used, so it cannot reach the store; start it with "
                    "multiprocessing's 'spawn' or 'forkserver' method (for DataLoader: multiprocessing_context='spawn')"
                )
            if count not in self._pools:
                self._pools[count] = ThreadPoolExecutor(count, thread_name_prefix="workbench-store")
            return self._pools[count]


class _Ahead:
    """Memory for what is fetched before it is read, shared by the threads of all passes."""

    def __init__(self) -> None:
        self._free, self._room, self._own = AHEAD, threading.Condition(), threading.local()

    @contextmanager
    def take(self, nbytes: int) -> Iterator[None]:
        """Wait for room, but not while holding some: two threads would wait for each other."""
        held = getattr(self._own, "held", 0)
        with self._room:
            self._room.wait_for(lambda: held or self._free >= min(nbytes, AHEAD))
            self._free -= nbytes
        self._own.held = held + nbytes
        try:
            yield
        finally:
            self._own.held = held
            with self._room:
                self._free += nbytes
                self._room.notify_all()


_threads = _Threads()
_ahead = _Ahead()


def ahead(nbytes: int) -> AbstractContextManager[None]:
    """Wait until ``nbytes`` may be fetched ahead; what they are fetched into must be dropped inside."""
    return _ahead.take(nbytes)


def together(call: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Call a function for each item, up to :data:`IN_FLIGHT` at a time, and return the results in order.

    The first error is raised once the calls that have begun are over; those that have not are dropped.
    """
    pool = _threads.pool(IN_FLIGHT)
    futures: list[Future[R]] = [pool.submit(call, item) for item in items]
    try:
        return [future.result() for future in futures]
    except BaseException:
        for future in futures:
            future.cancel()
        raise


def alone(call: Callable[[], R]) -> Future[R]:
    """Begin a call that may itself make calls :func:`together`: it waits in a thread of another pool."""
    return _threads.pool(ASKING).submit(call)
