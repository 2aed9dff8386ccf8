"""Requests to stores: how many run at once, how many there were, and why one must not run in a forked process."""

from __future__ import annotations

import os
import threading
from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, TypeVar

import numpy as np

from workbench.core import memory
from workbench.core.arrays import Array
from workbench.core.stop import Stop
from workbench.errors import UsageError

IN_FLIGHT = 32  #: requests that run at the same time
BUFFER = (5 << 20) + (512 << 10)  #: bytes of the largest request made ahead: a sixth of a task and some headers
SKIPPED = 64 << 10  #: bytes of headers between two payloads that a reader may skip
AHEAD = 30 * BUFFER  #: bytes that all passes of the process together fetch before they are read
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


class Arriving:
    """Bytes ``[start, stop)`` that are fetched, for one thread that reads them once and goes forward.

    Attributes:
        turn: of the thread, in :class:`_Ahead`.
        needed: the thread waits for it.
    """

    def __init__(self, turn: int, start: int, stop: int) -> None:
        self.turn, self.start, self.stop = turn, start, stop
        # any buffer for a request of full size will do
        self.cost = BUFFER if BUFFER // 2 <= stop - start <= BUFFER else stop - start
        self.buffer: Array | None = None
        self.job: Future[object]
        self.begun, self.needed = threading.Event(), False
        self._read = start

    def copy(self, begin: int, end: int, into: Array) -> bool:
        """Copy bytes ``[begin, end)`` once they have arrived; ``False`` if they were not fetched, or were dropped."""
        if not self.begun.is_set():
            _ahead.need(self)
            self.begun.wait()
        if self.buffer is None or self.job.exception() is not None:
            return False
        into[...] = self.buffer[begin - self.start : end - self.start]
        return True

    def passed(self, begin: int, end: int) -> None:
        """Free the memory once all of it was read, except for headers that were skipped."""
        if begin <= self._read + SKIPPED:
            self._read = max(self._read, end)
            if self._read >= self.stop:
                _ahead.drop(self)


class _Ahead:
    """Memory for bytes fetched before they are read, shared by the threads of all passes: first come, first served.

    A request begins when there is memory for it. If the thread that came first waits for one, that begins at once: the
    others may all be waiting, too, while holding all of the memory. Buffers are reused, since the first touch
    of fresh memory costs as much as a copy into it.
    """

    def __init__(self) -> None:
        self.free, self._lock, self._own = AHEAD, threading.Lock(), threading.local()
        self._turns: dict[int, int] = {}  # of threads that hold or want memory: for how many files
        self._waiting: list[tuple[int, int, Arriving, Callable[[Array], Future[object]]]] = []
        self._spare: list[Array] = []
        self._count = count()

    @contextmanager
    def turn(self) -> Iterator[int]:
        """Give this thread its turn, the same one for everything that it reads at the same time."""
        with self._lock:
            if (turn := getattr(self._own, "turn", None)) is None:
                turn = self._own.turn = next(self._count)
            self._turns[turn] = self._turns.get(turn, 0) + 1
        try:
            yield turn
        finally:
            with self._lock:
                self._turns[turn] -= 1
                if not self._turns[turn]:
                    del self._turns[turn]
                    self._own.turn = None
                self._begin()

    def add(self, one: Arriving, begin: Callable[[Array], Future[object]]) -> None:
        """Call ``begin`` with a buffer of ``one.cost`` bytes once there is room for it."""
        with self._lock:
            insort(self._waiting, (one.turn, next(self._count), one, begin))
            self._begin()

    def need(self, one: Arriving) -> None:
        """Note that a thread waits for this request to begin."""
        with self._lock:
            one.needed = True
            self._begin()

    def drop(self, one: Arriving) -> None:
        """Free memory, or stop waiting for it."""
        with self._lock:
            if not one.begun.is_set():
                self._waiting = [waiting for waiting in self._waiting if waiting[2] is not one]
                one.begun.set()
            elif one.buffer is not None:
                if (one.job.cancel() or one.job.done()) and one.cost == BUFFER:  # otherwise it is still written to
                    self._spare.append(one.buffer)
                one.buffer = None
                self.free += one.cost
                self._begin()
                if self.free == AHEAD:  # no pass is under way
                    self._spare.clear()

    def _begin(self) -> None:
        """Begin the requests that fit into memory, in order, and the one that the first thread waits for."""
        first, room, left = min(self._turns, default=None), True, []
        for k, waiting in enumerate(self._waiting):
            _, _, one, begin = waiting
            room = room and one.cost <= self.free
            if room or (one.turn == first and one.needed):
                if one.cost != BUFFER:
                    one.buffer = np.empty(one.cost, np.uint8)
                else:
                    one.buffer = self._spare.pop() if self._spare else memory.empty((BUFFER,), np.dtype(np.uint8))
                self.free -= one.cost
                one.job = begin(one.buffer)
                one.begun.set()
            elif one.turn == first:
                left.append(waiting)
            else:
                left += self._waiting[k:]
                break
        self._waiting = left


_threads = _Threads()
_ahead = _Ahead()


@contextmanager
def ahead(call: Callable[[int, int, Array], object], parts: Sequence[tuple[int, int]]) -> Iterator[list[Arriving]]:
    """Begin to fetch byte ranges ``[start, stop)``, each as soon as there is room for it.

    Args:
        call: fetches bytes ``[start, stop)`` into a ``uint8`` buffer of that size.
    """
    pool, over = _threads.pool(IN_FLIGHT), Stop()

    def begin(one: Arriving, buffer: Array) -> Future[object]:
        return pool.submit(over.run, call, one.start, one.stop, buffer[: one.stop - one.start])

    with _ahead.turn() as turn:
        found = [Arriving(turn, start, stop) for start, stop in parts]
        try:
            for one in found:
                _ahead.add(one, partial(begin, one))
            yield found
        finally:
            over.set()
            for one in found:
                _ahead.drop(one)


def together(call: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Call a function for each item, up to :data:`IN_FLIGHT` at a time, and return the results in order.

    The first error is raised once all running calls have ended or given up; calls that have not begun are dropped.
    """
    pool, stop = _threads.pool(IN_FLIGHT), Stop()
    futures: list[Future[R]] = [pool.submit(stop.run, call, item) for item in items]
    try:
        return [future.result() for future in futures]
    except BaseException as error:
        stop.set()
        begun = [future for future in futures if not future.cancel()]
        if isinstance(error, Exception):  # Ctrl-C does not wait
            wait(begun)
        raise


def alone(call: Callable[[], R]) -> Future[R]:
    """Begin a call that may itself make calls :func:`together`: it waits in a thread of another pool."""
    return _threads.pool(ASKING).submit(call)
