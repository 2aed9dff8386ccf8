"""Work that takes longer than a click: a thread, progress, cancel, and results published on the page's own thread.

::

    page thread   start(work) ─────────────────────────────► progress, status, result  (params; panes listen)
                     │                                              ▲ schedule(callback)
    pool thread      └──► work(tick)  tick(0.3) … tick(0.6) … ──────┘

What reads every byte (``long``) has a pool of its own, so that nobody waits for it to open a checkpoint or a tensor.

A Bokeh document may only be touched on its own thread, so a worker hands everything over through ``schedule``
(``doc.add_next_tick_callback`` when served). Starting again, or cancelling, makes the running work stop at its next
``tick``; what it still publishes is dropped.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import param

from workbench.errors import WorkbenchError

__all__ = ["Cancelled", "Job", "Tick"]

Tick = Callable[[float], None]
Schedule = Callable[[Callable[[], None]], None]

PERIOD = 0.1  #: seconds between two progress messages
WORKERS = 4  #: jobs of each kind, long or not, that run at once in this process; the others wait
#: Seconds that a job may hold the interpreter's lock while the page waits for it. An answer takes the lock some ten
#: times; with Python's own 5 ms half of them took 24 ms while a million chunks were verified, with this 6 ms.
SWITCH = 0.0002
_log = logging.getLogger(__name__)
sys.setswitchinterval(SWITCH)
_pools = {
    long: ThreadPoolExecutor(WORKERS, thread_name_prefix=f"workbench-{name}")
    for long, name in ((False, "job"), (True, "long"))
}


class Cancelled(Exception):
    """Raised by a tick inside the work when nobody wants its result any more."""


class Job(param.Parameterized):
    """One slot for background work; a new start supersedes what runs.

    Args:
        schedule: runs a callback on the page's thread.
        long: it may take minutes, and waits for others of its kind only.
    """

    status = param.Selector(default="idle", objects=["idle", "running", "done", "failed", "cancelled"])
    progress = param.Number(default=0.0, bounds=(0.0, 1.0))
    result = param.Parameter(default=None)
    error = param.String(default="", doc="Why it failed, in words.")

    def __init__(self, schedule: Schedule | None = None, *, long: bool = False, **params: Any) -> None:
        super().__init__(**params)
        self._pool = _pools[long]
        self._schedule = schedule or (lambda callback: callback())
        self._turn = 0
        self._running = threading.Event()
        self._running.set()

    def start(self, work: Callable[[Tick], Any]) -> None:
        """Run ``work(tick)`` in the pool; call it on the page's thread."""
        self._turn += 1
        turn = self._turn
        self._running.clear()
        self.param.update(status="running", progress=0.0, result=None, error="")
        self._pool.submit(self._run, work, turn)

    def cancel(self) -> None:
        """Stop the work at its next tick; the status says so at once."""
        self._turn += 1
        self._running.set()
        if self.status == "running":
            self.param.update(status="cancelled", progress=0.0)

    def reset(self) -> None:
        """Forget result and error, stopping what runs."""
        self._turn += 1
        self._running.set()
        self.param.update(status="idle", progress=0.0, result=None, error="")

    def wait(self, timeout: float | None = None) -> bool:
        """Block until the latest work has ended; for scripts and tests, never on a page's thread."""
        return self._running.wait(timeout)

    def _run(self, work: Callable[[Tick], Any], turn: int) -> None:
        last = 0.0

        def tick(fraction: float) -> None:
            nonlocal last
            if turn != self._turn:
                raise Cancelled
            now = time.monotonic()
            if now - last >= PERIOD:
                last = now
                self._publish(turn, progress=min(max(float(fraction), 0.0), 1.0))

        try:
            tick(0.0)
            self._publish(turn, result=work(tick), status="done", progress=1.0)
        except Cancelled:
            pass  # whoever cancelled has set the status
        except WorkbenchError as error:
            self._publish(turn, status="failed", error=str(error))
        except Exception as error:
            _log.exception("a job of the dashboard failed")
            words = f"this should not happen: {type(error).__name__}; the server's log has the details"
            self._publish(turn, status="failed", error=words)
        finally:
            if turn == self._turn:
                self._running.set()

    def _publish(self, turn: int, **values: Any) -> None:
        def apply() -> None:
            if turn == self._turn:
                self.param.update(**values)

        self._schedule(apply)
