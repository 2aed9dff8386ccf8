"""Requests to stores: how many run at once, how many there were, and why one must not run in a forked process."""

from __future__ import annotations

import os
import threading
import time
from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

import numpy as np

from workbench.core import memory
from workbench.core.arrays import Array
from workbench.core.stop import Stop, going_on
from workbench.errors import OpenError, UsageError

IN_FLIGHT = 32  #: requests that run at the same time
BUFFER = (5 << 20) + (512 << 10)  #: bytes of the largest request made ahead: a sixth of a task and some headers
SKIPPED = 64 << 10  #: bytes of headers between two payloads that a reader may skip
AHEAD = 30 * BUFFER  #: bytes that all passes of the process together fetch before they are read
ASKING = 8  #: threads in which callers wait for several of them
POLL = 0.1  #: seconds after which a thread that waits for a store looks whether its result is still needed
GRACE = 0.5  #: seconds in which a call whose result is not needed may end by itself
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


class UnansweredError(OpenError):
    """A store did not answer, or answered only that it is overloaded, for as long as requests are tried again."""


_own = threading.local()  # .call: the call that a thread makes


class StoreCall(Future[R], Generic[R]):
    """A call in a thread that may wait for a store, and may be left behind.

    Attributes:
        stop: ends the call, at its next :func:`~workbench.core.stop.going_on`.
        due: the time (``time.monotonic()``) by which an answer has to come, and the error if not; if it waits for one.
    """

    def __init__(self, pool: _StoreThreads, call: Callable[[], R], stop: Stop) -> None:
        super().__init__()
        self._pool, self._call, self.stop, self._left = pool, call, Stop(stop), False
        self.due: tuple[float, str] | None = None

    def run(self) -> None:
        """Make the call, in this thread."""
        if not self.set_running_or_notify_cancel():
            return
        _own.call = self
        try:
            self.set_result(self.stop.run(self._call))
        except BaseException as error:
            if type(error).__name__ == "PanicException":  # of a library in Rust: no Exception, so nothing handles it
                error = OpenError(f"the library that talks to the store failed: {' '.join(str(error).split())[:300]}")
            self.set_exception(error)
        finally:
            _own.call = None
            del self._call  # and what it holds

    def wanted(self, within: float | None = None) -> R:
        """Wait for the result, unless this thread's own result is no longer needed: then the call is left behind.

        Args:
            within: maximum seconds to wait.

        Raises:
            UnansweredError: the store does not answer in time.
        """
        last = None if within is None else time.monotonic() + within
        try:
            while not self.done():
                try:
                    return self.result(POLL)
                except TimeoutError:
                    going_on()
                now, due = time.monotonic(), self.due
                if due is not None and now > due[0]:
                    raise UnansweredError(due[1])
                if last is not None and now > last and not self.done():
                    raise UnansweredError(f"the store has not answered for {within:g} s; try again later")
        except BaseException:
            self.leave()
            raise
        return self.result()

    def leave(self) -> None:
        """Do not wait for the call any more: another thread takes the place of the one that makes it."""
        self.stop.set()
        if not self.cancel() and not self._left:
            self._left = True
            self._pool.replace(self)


class _StoreThreads:
    """Threads that wait for stores, up to ``count`` of them besides those that were left behind.

    They are daemons: a call into obstore cannot be interrupted, and the end of the process does not wait for it.
    """

    def __init__(self, count: int) -> None:
        self._count, self._threads, self._open = count, 0, 0  # threads wanted and started, calls not ended
        self._calls: SimpleQueue[StoreCall[Any]] = SimpleQueue()
        self._lock = threading.Lock()

    def submit(self, stop: Stop, call: Callable[..., R], *given: Any) -> StoreCall[R]:
        """Begin a call that ``stop`` ends."""
        made = StoreCall(self, partial(call, *given), stop)
        with self._lock:
            self._start(self._open + 1)
            self._open += 1
            self._calls.put(made)
        return made

    def replace(self, left: StoreCall[Any]) -> None:
        """Have one thread more until this call has ended."""
        with self._lock:
            self._count += 1
            self._start(self._open)
        left.add_done_callback(self._replaced)

    def _replaced(self, _: object) -> None:
        with self._lock:
            self._count -= 1

    def _start(self, calls: int) -> None:
        if self._threads < min(calls, self._count):
            threading.Thread(target=self._work, name="workbench-store", daemon=True).start()
            self._threads += 1

    def _work(self) -> None:
        while True:
            call = self._calls.get()
            call.run()
            del call  # and its result, while this thread waits for the next one
            with self._lock:
                self._open -= 1
                if self._threads > self._count:
                    self._threads -= 1
                    return


class _Threads:
    """The threads of this process that wait for stores.

    A call runs in one of them, never in the caller's thread: a call into obstore cannot be interrupted, so Ctrl-C would
    otherwise wait for its end.
    """

    def __init__(self) -> None:
        self._pools: dict[int, _StoreThreads] = {}
        self._process = 0
        self._lock = threading.Lock()

    def pool(self, count: int) -> _StoreThreads:
        with self._lock:
            if not self._pools:
                self._process = os.getpid()
            elif self._process != os.getpid():  # obstore's own threads are not in the child: a call would never end
                raise UsageError(
                    "this process was forked after a store had been used, so it cannot reach the store; start it with "
                    "multiprocessing's 'spawn' or 'forkserver' method (for DataLoader: multiprocessing_context='spawn')"
                )
            if count not in self._pools:
                self._pools[count] = _StoreThreads(count)
            return self._pools[count]


@contextmanager
def unless_unanswered() -> Iterator[None]:
    """Leave errors to a later read; only that of a store that does not answer is raised, as that takes long."""
    try:
        yield
    except UnansweredError:
        raise
    except OpenError:
        pass


@contextmanager
def answered(within: float | None, error: str) -> Iterator[None]:
    """Bound the time of a request: the thread that waits for this thread's call raises ``error`` unless the block ends,
    or comes to :func:`arrived`, in that many seconds.
    """
    call: StoreCall[Any] | None = getattr(_own, "call", None)
    if call is None or within is None:
        yield
        return
    before, call.due = call.due, (time.monotonic() + within, error)
    _own.within = within
    try:
        yield
    finally:
        call.due = before


def arrived() -> None:
    """Note that a part of an answer has come; raise GivenUp if it is no longer needed."""
    going_on()
    call: StoreCall[Any] | None = getattr(_own, "call", None)
    if call is not None and (due := call.due) is not None:
        call.due = time.monotonic() + _own.within, due[1]


def pause(seconds: float) -> None:
    """Wait; raise GivenUp as soon as the result of this thread's call is no longer needed."""
    last = time.monotonic() + seconds
    while (left := last - time.monotonic()) > 0:
        going_on()
        time.sleep(min(left, POLL))


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
        self.job: StoreCall[object]
        self.begun, self.needed = threading.Event(), False
        self._read = start

    def copy(self, begin: int, end: int, into: Array) -> bool:
        """Copy bytes ``[begin, end)`` once they have arrived; ``False`` if they were not fetched, or were dropped."""
        if not self.begun.is_set():
            _ahead.need(self)
            while not self.begun.wait(POLL):
                going_on()
        if self.buffer is None:
            return False
        try:
            self.job.wanted()
        except UnansweredError:
            raise  # asking again would take as long again
        except Exception:
            return False  # the read itself meets the error
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
        self._waiting: list[tuple[int, int, Arriving, Callable[[Array], StoreCall[object]]]] = []
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

    def add(self, one: Arriving, begin: Callable[[Array], StoreCall[object]]) -> None:
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
                if not one.job.done():
                    one.job.leave()
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

    def begin(one: Arriving, buffer: Array) -> StoreCall[object]:
        return pool.submit(over, call, one.start, one.stop, buffer[: one.stop - one.start])

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

    The first error is raised once all running calls have ended or given up, or after :data:`GRACE` seconds; calls that
    have not begun are dropped.
    """
    pool, stop = _threads.pool(IN_FLIGHT), Stop()
    calls: list[StoreCall[R]] = [pool.submit(stop, call, item) for item in items]
    try:
        return [one.wanted() for one in calls]
    except BaseException as error:
        stop.set()
        begun = [one for one in calls if not one.cancel()]
        if isinstance(error, Exception):  # Ctrl-C does not wait
            wait(begun, GRACE)
        for one in begun:
            if not one.done():
                one.leave()
        raise


def alone(call: Callable[[], R]) -> StoreCall[R]:
    """Begin a call that may itself make calls :func:`together`: it waits in a thread of another pool."""
    return _threads.pool(ASKING).submit(Stop(), call)
