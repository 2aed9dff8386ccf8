"""Run the tasks of a pass in order: in threads of this process, or on an executor's workers.

::

    tasks       0   1   2   3   4   5   6   7   8  …       some 32 MiB each, cut by the data alone
    threads     a task each
    executor    └──── batch ────┘ └──── batch ────┘        256 MiB to 1 GiB each, sent to a worker that runs them alike
    caller      (task 0, result) (task 1, result) …        always in this order, so results are the same, bit for bit

A batch contains what its tasks read and the reducer, but no open files and no catalog. A checkpoint is sent as a
reference: its path or URL, and a digest of its catalog with the identity of every file. A worker opens it with its own
credentials, keeps it for later batches, and raises ChangedError if it is not what the caller opened.

:func:`using` sets where the passes of a call run; the functions between the call and its passes need not know.
"""

from __future__ import annotations

import io
import os
import pickle
import threading
import time
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import islice
from typing import Any, Generic, Protocol, TypeVar, cast

import numpy as np

from workbench.core.place import Place
from workbench.core.source import needs_descriptors
from workbench.core.stop import Stop
from workbench.errors import UsageError, WorkbenchError, WorkerError

T = TypeVar("T")
R = TypeVar("R")
Task = TypeVar("Task", contravariant=True)
Result = TypeVar("Result", covariant=True)

VERSION = "4"  #: version of the messages and of the meaning of results; increase it with every change of either
LEAST = 32 << 20  #: bytes of a pass below which sending it costs more than running it here
BATCH = 256 << 20  #: bytes of a batch …
BATCHES = 8  #: … until each worker has more batches than this; then they grow, as each costs Dask some 4 ms of CPU …
LARGEST = 1 << 30  #: … up to this size
AHEAD = 2  #: batches for each worker that are sent before they are needed
WORKERS = 64  #: … for an executor that does not report its number of workers
POLL = 2.0  #: seconds between two checks that the scheduler is alive and has workers
NO_WORKERS = "5 minutes"  #: how long a pass waits for a cluster without workers, unless Dask's configuration …
NO_WORKERS_KEY = "workbench.no-workers-timeout"  #: … sets another time under this name
KEPT = 4  #: checkpoints that a worker keeps open


class TaskRunner(Protocol[Task, Result]):
    """The work of a pass on its tasks. ``run(task)`` is called in several threads at a time."""

    def __call__(self, task: Task, /) -> Result:
        """Run a task."""

    def nbytes(self, task: Task, /) -> int:
        """Return about how many bytes a task reads."""

    def part(self, tasks: list[Any], /) -> tuple[Any, list[Any]]:
        """Return a runner that has what these tasks need and can be pickled, and the tasks as it numbers them."""

    def key(self, task: Task, /) -> bytes:
        """Return bytes that are equal for tasks that do the same with the same elements."""

    def close(self) -> None:
        """Withdraw announced reads of files when no task runs any more."""


class Ordering(ABC, Executor):
    """An executor that decides which tasks of a pass run, and what happens to their results."""

    @abstractmethod
    def ordered(self, run: TaskRunner[T, R], tasks: Iterable[T], threads: int, name: str) -> Iterator[tuple[T, R]]:
        """Yield tasks with their results."""


_executor: ContextVar[Executor | None] = ContextVar("workbench_executor", default=None)


@contextmanager
def using(executor: Executor | None) -> Iterator[None]:
    """Run the passes that are made inside this block on an executor; ``None`` changes nothing.

    Raises:
        UsageError: it is not a ``concurrent.futures.Executor``.
    """
    if executor is not None and not isinstance(executor, Executor):
        given = type(executor).__name__
        raise UsageError(f"executor= takes a concurrent.futures.Executor, not {given}: pass {_instead_of(executor)}")
    before = _executor.set(_executor.get() if executor is None else executor)
    try:
        yield
    finally:
        _executor.reset(before)


def _instead_of(given: Any) -> str:
    if hasattr(given, "get_executor"):  # of Dask, as are clusters
        return "client.get_executor()"
    if hasattr(given, "scheduler_address"):
        return "distributed.Client(cluster).get_executor()"
    return "a ProcessPoolExecutor, or get_executor() of a Dask client"


def ordered(
    run: TaskRunner[T, R], tasks: Iterable[T], total: int, *, threads: int, at_once: int | None, name: str
) -> Generator[tuple[T, R], None, None]:
    """Yield each task with its result, in the order of the tasks.

    Args:
        run: the function to call with each task.
        tasks: in order; they do not depend on where they run.
        total: about how many bytes all tasks read.
        threads: threads in this process.
        at_once: threads for each batch on an executor's worker.
        name: of the threads.

    Raises:
        WorkerError: the executor lost its workers or its scheduler.
        ChangedError: a worker finds another checkpoint than the caller opened.
        UsageError: the executor's processes are forked and the tasks read from a store.
    """
    executor = _executor.get()
    try:
        if isinstance(executor, Ordering):
            yield from executor.ordered(run, tasks, threads, name)
        elif executor is None or total < LEAST:
            with ThreadPoolExecutor(threads, thread_name_prefix=name) as pool:
                yield from in_order(pool, lambda task: (task, run(task)), tasks)
        else:
            yield from _sent(executor, run, tasks, total, at_once or 1)
    finally:
        run.close()


def in_order(pool: ThreadPoolExecutor, run: Callable[[T], R], tasks: Iterable[T]) -> Generator[R, None, None]:
    """Yield results in the order of the tasks; only a few run at a time so that finished states do not pile up."""
    ahead, stop = 2 * pool._max_workers, Stop()
    rest = iter(tasks)
    under_way: deque[Future[R]] = deque()
    try:
        under_way.extend(pool.submit(stop.run, run, task) for task in islice(rest, ahead))
        while under_way:
            result = under_way.popleft().result()
            under_way.extend(pool.submit(stop.run, run, task) for task in islice(rest, 1))
            yield result
    finally:  # the pool may be shared: cancel tasks whose results are no longer needed, and wait for the running ones
        stop.set()
        wait([future for future in under_way if not future.cancel()])


class SharedThreads(Ordering):
    """One thread per core, shared by concurrent calls, as in a server; passes over a store have their own.

    If each call had its own threads, concurrent calls would compete for the cores and, worse, for the GIL.
    """

    def __init__(self, name: str, initializer: Callable[[], None]) -> None:
        """Create the threads.

        Args:
            name: of the threads.
            initializer: is called by each thread when it starts.
        """
        self._pool = ThreadPoolExecutor(cores(), thread_name_prefix=name, initializer=initializer)

    def submit(self, *_: Any, **__: Any) -> Future[Any]:
        raise UsageError("these threads run the tasks of passes only")

    def ordered(self, run: TaskRunner[T, R], tasks: Iterable[T], threads: int, name: str) -> Iterator[tuple[T, R]]:
        if threads <= cores():
            yield from in_order(self._pool, lambda task: (task, run(task)), tasks)
            return
        with ThreadPoolExecutor(threads, thread_name_prefix=name) as pool:
            yield from in_order(pool, lambda task: (task, run(task)), tasks)


def cores() -> int:
    """Return the number of cores available to this process, up to 8."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(8, usable))


# ---- in the caller's process -----------------------------------------------------------------------------------------


def _sent(
    executor: Executor, run: TaskRunner[T, R], tasks: Iterable[T], total: int, threads: int
) -> Iterator[tuple[T, R]]:
    workers, ahead = _workers(executor)
    size = min(max(BATCH, total // (BATCHES * workers)), LARGEST)
    rest = ((batch, _submitted(executor, run, batch, threads)) for batch in _batches(run, tasks, size))
    under_way: deque[tuple[list[T], Future[_BatchResults[R]]]] = deque()
    try:
        under_way.extend(islice(rest, ahead))
        while under_way:
            batch, future = under_way[0]
            results = _received(executor, future)
            if results is None:
                under_way[0] = batch, _submitted(executor, run, batch, threads)
                continue
            under_way.popleft()
            under_way.extend(islice(rest, 1))
            yield from zip(batch, results, strict=True)
    finally:
        for _, future in under_way:
            future.cancel()


def _batches(run: TaskRunner[T, R], tasks: Iterable[T], size: int) -> Iterator[list[T]]:
    batch: list[T] = []
    weight = 0
    for task in tasks:
        nbytes = run.nbytes(task)
        if batch and weight + nbytes > size:
            yield batch
            batch, weight = [], 0
        batch.append(task)
        weight += nbytes
    if batch:
        yield batch


def _workers(executor: Executor) -> tuple[int, int]:
    """Return how many batches an executor runs at a time, as far as it states that, and how many are sent ahead."""
    threads = _threads(executor)
    if threads is None:
        workers = int(getattr(executor, "_max_workers", WORKERS))
        return workers, AHEAD * workers
    return threads or WORKERS, AHEAD * max(threads, WORKERS)  # a cluster that adapts starts with none


def _submitted(executor: Executor, run: TaskRunner[T, R], batch: list[T], threads: int) -> Future[_BatchResults[R]]:
    data, remote = _dumps((*run.part(batch), threads))
    context = getattr(executor, "_mp_context", None)
    if remote and context is not None and context.get_start_method() == "fork":
        raise UsageError(
            "this executor forks its processes, and a forked process cannot reach a store that was used before: "
            "create it with mp_context=multiprocessing.get_context('spawn')"
        )
    # Dask takes equal calls for one, and an earlier one may be cancelled
    options = {} if getattr(executor, "_client", None) is None else {"pure": False}
    try:
        return executor.submit(_run, _version(), data, **options)
    except (RuntimeError, OSError) as error:  # broken, shut down, or no connection
        raise _lost(error) from None


def _received(executor: Executor, future: Future[_BatchResults[R]]) -> list[R] | None:
    """Return the results of a batch, or ``None`` if they were lost with their worker."""
    seen = time.monotonic()  # the last time at which the executor had workers
    try:
        while not wait([future], timeout=POLL).done:
            if _threads(executor) != 0:
                seen = time.monotonic()
            elif time.monotonic() - seen >= (limit := _no_workers_timeout()):
                raise WorkerError(
                    f"the Dask cluster has had no workers for {limit:g} s; start workers and run it again, or set "
                    f"{NO_WORKERS_KEY} in Dask's configuration to wait longer"
                )
        return future.result().each
    except (BrokenExecutor, CancelledError) as error:
        raise _lost(error) from None
    except WorkbenchError:
        raise
    except Exception as error:
        if isinstance(error, TypeError) and _BatchResults.__name__ in str(error):
            return None
        if type(error).__module__.split(".")[0] == "distributed" or isinstance(error, (ImportError, OSError)):
            raise _lost(error) from None
        raise


def _threads(executor: Executor) -> int | None:
    """Return the number of threads of a Dask cluster's workers; ``None`` for other executors.

    Without a scheduler or without workers, the futures of a cluster stay pending for ever.

    Raises:
        WorkerError: the client lost its scheduler, or the scheduler does not answer.
    """
    client = getattr(executor, "_client", None)
    if client is None:
        return None
    if client.status != "running":
        raise WorkerError(f"the executor lost its Dask scheduler (the client is {client.status}); run it again")
    limit = _no_workers_timeout()
    try:
        return sum(client.nthreads(callback_timeout=limit).values())
    except TimeoutError:
        raise WorkerError(f"the Dask scheduler has not answered for {limit:g} s; run it again") from None
    except Exception as error:  # whatever the connection raises
        raise _lost(error) from None


def _no_workers_timeout() -> float:
    """Return how long a pass waits for a cluster without workers, in seconds."""
    from dask import config
    from dask.utils import parse_timedelta

    return float(parse_timedelta(config.get(NO_WORKERS_KEY, NO_WORKERS)))


def _lost(error: BaseException) -> WorkerError:
    message = " ".join(str(error).split())
    why = f"{type(error).__name__}: {message}" if message else type(error).__name__
    if isinstance(error, CancelledError):
        why = "its tasks were cancelled: it was shut down, or the connection to its scheduler was lost"
    return WorkerError(f"the executor did not finish the tasks ({why}); run it again")


def _version() -> tuple[str, str]:
    return VERSION, np.__version__


# ---- what is sent ----------------------------------------------------------------------------------------------------


class Reference(Protocol):
    """A checkpoint as it is sent to workers.

    Attributes:
        key: text that names its place and content.
    """

    key: str

    def opened(self) -> Any:
        """Open the checkpoint; raises ChangedError if it is another one now."""


class _TaskPickler(pickle.Pickler):
    """Objects with a ``_reference`` are sent as that: a :class:`Reference`, and which part of it they are."""

    remote = False

    def persistent_id(self, obj: Any) -> Any:
        if type(obj) is Place and not obj.local:
            self.remote = True
        if getattr(type(obj), "_by_reference", False):
            return obj._reference
        return None


class _TaskUnpickler(pickle.Unpickler):
    def persistent_load(self, pid: Any) -> Any:
        reference, part = cast(tuple[Reference, str], pid)
        found = _opened(reference)
        return getattr(found, part) if part else found


def _dumps(value: Any) -> tuple[bytes, bool]:
    out = io.BytesIO()
    pickler = _TaskPickler(out, protocol=5)
    pickler.dump(value)
    return out.getvalue(), pickler.remote


# ---- in a worker -----------------------------------------------------------------------------------------------------

_held: OrderedDict[str, Any] = OrderedDict()
_lock = threading.Lock()


def _opened(reference: Reference) -> Any:
    """Return the checkpoint of a reference, opened once for all batches of this process."""
    with _lock:  # held while it is opened: other threads want the same one
        found = _held.get(reference.key)
        if found is None:
            found = _held[reference.key] = reference.opened()
        _held.move_to_end(reference.key)
        while len(_held) > KEPT:
            _held.popitem(last=False)
        return found


class _BatchResults(Generic[R]):
    """The results of a batch, which cannot be unpacked.

    If a worker of distributed's (2026.8) is lost just after its result arrived, the executor takes this result for an
    error and unpacks it as one. That fails, always, and the batch runs again.
    """

    __slots__ = ("each",)

    def __init__(self, each: list[R]) -> None:
        self.each = each


@needs_descriptors()
def _run(version: tuple[str, str], data: bytes) -> _BatchResults[Any]:
    """Run a batch, in a worker."""
    if (here := _version()) != version:  # results could differ in their last bits
        raise WorkerError(
            f"a worker has workbench's tasks of version {here[0]} and numpy {here[1]}, the caller {version[0]} and "
            f"{version[1]}; install the same versions"
        )
    run, tasks, threads = _TaskUnpickler(io.BytesIO(data)).load()
    try:
        if threads == 1:
            return _BatchResults([run(task) for task in tasks])
        with ThreadPoolExecutor(threads, thread_name_prefix="workbench-batch") as pool:
            return _BatchResults(list(in_order(pool, run, tasks)))
    finally:
        run.close()
