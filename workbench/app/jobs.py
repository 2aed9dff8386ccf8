"""Work that takes longer than a click: a thread, progress, cancel, and results published on the page's thread.

::

    page thread   start(work) ─────────────────────────────► progress, status, result  (params; panes listen)
                     │                                              ▲ schedule(callback)
    pool thread      └──► work(progress)  progress(0.3) … progress(0.6) … ──┘

Jobs that read every byte (``long``) have a pool of their own; opening a checkpoint or a tensor never waits for them.
A Bokeh document may only be accessed on its own thread, so workers publish everything through ``schedule``
(``doc.add_next_tick_callback`` when served). Restarting or cancelling stops the running work at its next ``progress``;
anything it still publishes is dropped.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import param

from workbench.core.executors import SharedThreads, using
from workbench.errors import WorkbenchError
from workbench.views.progress import time_left

Progress = Callable[[float], None]
Schedule = Callable[[Callable[[], None]], None]

PERIOD = 0.25  #: seconds between two progress messages
PATIENCE = 2.0  #: seconds of work after which the remaining time is shown
WORKERS = 4  #: jobs of each kind, long or not, that run concurrently in this process; the others wait
#: Seconds that a job may hold the GIL while the page waits for it. A response takes the GIL about ten times; with
#: Python's default of 5 ms, the median was 24 ms while a million chunks were verified; with this value, 6 ms.
SWITCH = 0.0002
NICE = 10  #: of the threads that read every byte (nice(2)); the page's has 0
_log = logging.getLogger(__name__)
sys.setswitchinterval(SWITCH)


def _yield_to_others() -> None:
    """Lower the priority of this thread and of those it starts: serving pages comes before reading bytes."""
    if sys.platform == "linux":  # elsewhere, a priority belongs to the process
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)


_pools = {
    False: ThreadPoolExecutor(WORKERS, thread_name_prefix="workbench-job"),
    True: ThreadPoolExecutor(WORKERS, thread_name_prefix="workbench-long", initializer=_yield_to_others),
}
_threads = SharedThreads("workbench-scan", _yield_to_others)
_scans: Executor = _threads  #: where the passes of all long jobs run
_ending = threading.Event()  #: the process is ending, and with it the threads that the work needs


def end_all(ending: bool = True) -> None:
    """Stop all jobs at their next progress call, because the server has stopped; with ``False``, let them run again."""
    (_ending.set if ending else _ending.clear)()


# At the end of a script the interpreter waits for the threads of every pool, and `atexit` comes after that: without
# this, the work would go on until it needs another thread, and fail.
threading._register_atexit(end_all)  # type: ignore[attr-defined]


_at_once: ContextVar[bool] = ContextVar("workbench_jobs_at_once", default=False)


@contextmanager
def at_once() -> Iterator[None]:
    """Run jobs that start in this block in the calling thread: a notebook keeps the output as it is at its end."""
    token = _at_once.set(True)
    try:
        yield
    finally:
        _at_once.reset(token)


def scan_on(executor: Executor | None) -> None:
    """Run the passes of long jobs on an executor; with ``None``, in threads of this process, one per core."""
    global _scans
    _scans = executor or _threads


def steady(progress: Progress, share: float) -> Progress:
    """Return the progress function for a part of a job, which can be cancelled in it; the whole stays at ``share``."""
    return lambda _: progress(share)


class Cancelled(Exception):
    """Raised by a progress call inside the work when its result is no longer wanted."""


class Job(param.Parameterized):
    """One slot for background work; a new start supersedes the running work.

    Args:
        schedule: runs a callback on the page's thread.
        long: the work may take minutes and waits only for other long jobs.
    """

    status = param.Selector(default="idle", objects=["idle", "running", "done", "failed", "cancelled"])
    progress = param.Number(default=0.0, bounds=(0.0, 1.0))
    result = param.Parameter(default=None)
    error = param.String(default="", doc="Why it failed, as a sentence.")

    def __init__(self, schedule: Schedule | None = None, *, long: bool = False, **params: Any) -> None:
        super().__init__(**params)
        self._pool, self._long = _pools[long], long
        self._schedule = schedule or (lambda callback: callback())
        self._turn = 0
        self._began = time.monotonic()
        self._running = threading.Event()
        self._running.set()

    def start(self, work: Callable[[Progress], Any], *, later: bool = False) -> None:
        """Run ``work(progress)`` in the pool, with ``later`` even in :func:`at_once`. Call it on the page's thread."""
        self._turn += 1
        turn = self._turn
        self._running.clear()
        self.param.update(status="running", progress=0.0, result=None, error="")
        if _at_once.get() and not later:
            self._run(work, turn)
        else:
            self._pool.submit(self._run, work, turn)

    def cancel(self) -> None:
        """Stop the work at its next progress call; the status changes immediately."""
        self._turn += 1
        self._running.set()
        if self.status == "running":
            self.param.update(status="cancelled", progress=0.0)

    @property
    def left(self) -> str:
        """The remaining time in words, such as ``2 min left``; empty at the beginning and for short work."""
        spent = time.monotonic() - self._began
        return time_left(spent, self.progress) if spent >= PATIENCE else ""

    def reset(self) -> None:
        """Stop the running work, and forget result and error."""
        self._turn += 1
        self._running.set()
        self.param.update(status="idle", progress=0.0, result=None, error="")

    def wait(self, timeout: float | None = None) -> bool:
        """Block until the latest work has ended; for scripts and tests, never on the page's thread."""
        return self._running.wait(timeout)

    def _run(self, work: Callable[[Progress], Any], turn: int) -> None:
        last = 0.0
        if turn == self._turn:
            self._began = time.monotonic()  # it may have waited for other jobs

        def progress(fraction: float) -> None:
            nonlocal last
            if turn != self._turn or _ending.is_set():
                raise Cancelled
            now = time.monotonic()
            if now - last >= PERIOD:
                last = now
                self._publish(turn, progress=min(max(float(fraction), 0.0), 1.0))

        try:
            progress(0.0)
            with using(_scans if self._long else None):
                result = work(progress)
            self._publish(turn, result=result, status="done", progress=1.0)
        except Cancelled:
            pass  # the canceller has set the status
        except WorkbenchError as error:
            self._publish(turn, status="failed", error=str(error))
        except Exception as error:
            if _ending.is_set() or not threading.main_thread().is_alive():
                return
            _log.exception("a job of the dashboard failed")
            words = f"internal error: {type(error).__name__}; see the server log for details"
            self._publish(turn, status="failed", error=words)
        finally:
            if turn == self._turn:
                self._running.set()

    def _publish(self, turn: int, **values: Any) -> None:
        def apply() -> None:
            if turn == self._turn:
                self.param.update(**values)

        if _at_once.get():
            apply()
        else:
            self._schedule(apply)
