"""What a server's watch has found of the steps under its ROOT: kept in memory, where pages look it up.

::

    thread "workbench-watch"   Watcher(ROOT).events() ─┬► watched ──────► watched.health(path), watched.events()
                                                       └► shared_runs ──► the health of steps on pages
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

from workbench.analysis.health import StepHealth
from workbench.analysis.watch import Watcher, WatchEvent
from workbench.app.jobs import NICE, Cancelled
from workbench.app.run_cache import shared_runs
from workbench.core.remote.url import is_url
from workbench.errors import WorkbenchError

__all__ = ["Watched", "Watching", "watched"]

KEPT = 200  #: events
_log = logging.getLogger(__name__)


class Watched:
    """The health of steps by path or URL, and the last events; safe for use by several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[str, dict[str, StepHealth]] = {}
        self._events: deque[WatchEvent] = deque(maxlen=KEPT)

    def add(self, event: WatchEvent) -> None:
        """Keep an event, and what it says of a step's health."""
        path = _real(event.path)
        with self._lock:
            self._events.append(event)
            if event.kind in ("step", "rewritten", "removed", "incomplete"):
                self._found.pop(path, None)  # what was known is of other files
            if event.health is not None:
                self._found.setdefault(path, {})[event.check] = event.health

    def health(self, path: str | os.PathLike[str]) -> StepHealth | None:
        """Return what is known of a step: the worst that its checks found; of sound ones, that which read most.
        ``None`` if it was not seen.

        Args:
            path: absolute path or URL of the step.
        """
        with self._lock:
            found = list(self._found.get(_real(os.fsdecode(path)), {}).values())
        return max(found, key=_weight, default=None)

    def events(self) -> list[WatchEvent]:
        """Return the last events, newest last."""
        with self._lock:
            return list(self._events)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._found.clear()
            self._events.clear()


#: Of this process; empty if no server watches.
watched = Watched()


class Watching:
    """A thread that watches a server's ROOT until it is stopped."""

    def __init__(self, root: str | os.PathLike[str], checks: Sequence[str], **options: Any) -> None:
        """Prepare; raises and takes ``options`` as :class:`~workbench.analysis.watch.Watcher`."""
        self._stop = threading.Event()
        self._watcher = Watcher(
            root,
            checks=checks,
            above=0,  # nothing outside ROOT is read
            progress=self._progress,
            sleep=self._stop.wait,
            **options,
        )
        self._thread = threading.Thread(target=self._run, name="workbench-watch", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self, timeout: float = 5.0) -> None:
        """End at the next opportunity: between two looks, or within a check."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout)

    def _progress(self, fraction: float) -> None:
        if self._stop.is_set():
            raise Cancelled

    def _run(self) -> None:
        if sys.platform == "linux":  # also that of the threads that read; serving pages comes first
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        try:
            for event in self._watcher.events():
                watched.add(event)
                if event.found is not None and event.health is not None and event.check in ("verify", "deep"):
                    shared_runs.keep(event.found, event.path, event.health)
        except Cancelled:
            pass
        except WorkbenchError as error:
            _log.warning("the watch has ended: %s", error)
        except Exception:
            _log.exception("the watch has failed")


def _real(path: str) -> str:
    return path.rstrip("/") if is_url(path) else os.path.realpath(path)


def _weight(found: StepHealth) -> tuple[int, int, bool]:
    severity = ("", "warn", "error").index(found.severity)
    return severity, ("unseen", "sound", "finding", "incomplete").index(found.state), found.values
