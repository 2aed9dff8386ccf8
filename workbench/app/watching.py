"""The watch of a server: a thread that checks every step under ROOT when it is saved.

::

    thread "workbench-watch"   Watcher(ROOT).events() ─┬► recent ───────► the last findings, on the first page
                                                       └► shared_runs ──► the health of steps, on all pages
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

from workbench.analysis.watch import Watcher, WatchEvent
from workbench.app.jobs import NICE, Cancelled
from workbench.app.run_cache import shared_runs
from workbench.errors import WorkbenchError

KEPT = 200  #: events
_log = logging.getLogger(__name__)


#: The last events of this process's watch, newest last.
recent: deque[WatchEvent] = deque(maxlen=KEPT)


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
                recent.append(event)
                if event.found is not None and event.health is not None and event.check:
                    shared_runs.keep(event.found, event.path, event.health)
        except Cancelled:
            pass
        except WorkbenchError as error:
            _log.warning("the watch has ended: %s", error)
        except Exception:
            _log.exception("the watch has failed")
