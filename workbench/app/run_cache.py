"""Runs and the health of their steps, known to this process: read once, shared by all sessions.

::

    Home, run page ──► runs.open(jail, path)          reads the logs again if a checkpoint or a log has changed
                   ──► runs.known(jail, path)         the run as last read, without looking
                   ──► runs.answer(run, question, …)  a diagnosis, the layers: computed once
                   ──► runs.health(found, place)      the known health of a step, without looking
                   ──► runs.check(found, place)       a verification, kept until the step's files change
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

from workbench.analysis.health import StepHealth, check_step, unseen
from workbench.analysis.run import Run, open_run
from workbench.app.jail import Jail
from workbench.core.remote.url import is_url
from workbench.core.scan import Progress
from workbench.errors import NotACheckpointError, OpenError
from workbench.runs import Found, discover
from workbench.runs.logs import ABOVE, GrownLogs

KEPT = 200  #: runs in memory
ANSWERS = 8  #: of each run: the diagnoses last asked for, and its layers
FAR = 60  #: seconds after which the logs of a run in a store are read again
CHECKED = 20_000  #: steps whose health is in memory
T = TypeVar("T")


class RunCache:
    """Runs by path and health by step. Thread-safe; call it in jobs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._grown = GrownLogs()
        self._runs: OrderedDict[str, tuple[Any, Run]] = OrderedDict()
        self._health: OrderedDict[tuple[str, int, float], StepHealth] = OrderedDict()
        self._answers: WeakKeyDictionary[Run, OrderedDict[tuple[Any, ...], Any]] = WeakKeyDictionary()

    def open(self, jail: Jail, path: str) -> Run:
        """Open a run, or return the open one if neither its checkpoints nor its logs have changed.

        Logs are looked for beside and above it, but never outside ROOT.

        Raises:
            OpenError: it leaves ROOT, cannot be listed, or has neither steps nor logs.
        """
        place = str(jail.resolve(path))
        with self._lock:
            known = self._runs.get(place)
        if known is not None and known[0] == _stamp(place, known[1]):
            return known[1]
        depth = 0 if path == "." else len(path.strip("/").split("/"))
        made = open_run(place, above=min(ABOVE, depth), known=self._grown)
        self.keep_run(place, made)
        return made

    def known(self, jail: Jail, path: str) -> Run | None:
        """Return a run as it was last read, without looking at its files; ``None`` if it was not, or leaves ROOT."""
        try:
            place = str(jail.resolve(path))
        except OpenError:
            return None
        with self._lock:
            held = self._runs.get(place)
        return None if held is None else held[1]

    def keep_run(self, place: str, made: Run) -> None:
        """Keep a run that was opened elsewhere, until its files change."""
        stamp = _stamp(place, made)
        with self._lock:
            self._runs[place] = stamp, made
            self._runs.move_to_end(place)
            while len(self._runs) > KEPT:
                self._runs.popitem(last=False)

    def answer(self, run: Run, question: tuple[Any, ...], ask: Callable[[], T]) -> T:
        """Return a result computed for a run by any page; it is computed again once the run's files change."""
        with self._lock:
            held = self._answers.setdefault(run, OrderedDict())
            if question in held:
                held.move_to_end(question)
                return cast(T, held[question])
        made = ask()
        with self._lock:
            held[question] = made
            while len(held) > ANSWERS:
                held.popitem(last=False)
        return made

    def health(self, found: Found, place: str) -> StepHealth:
        """Return the known health of a step."""
        with self._lock:
            known = self._health.get((place, found.nbytes, found.mtime))
        return known if known is not None and found.complete else unseen(found)

    def check(self, found: Found, place: str, *, values: bool = False, progress: Progress | None = None) -> StepHealth:
        """Verify a step, unless that was done to this depth and its files have not changed since."""
        known = self.health(found, place)
        if known.state != "unseen" and (known.values or not values):
            return known
        made = check_step(found, place, values=values, progress=progress)
        self.keep(found, place, made)
        return made

    def keep(self, found: Found, place: str, made: StepHealth) -> None:
        """Keep a step's health; of several checks the worst, and of those that found nothing the deepest."""
        key = (place, found.nbytes, found.mtime)
        with self._lock:
            self._health[key] = max((self._health.get(key, made), made), key=_weight)
            while len(self._health) > CHECKED:
                self._health.popitem(last=False)


def _weight(health: StepHealth) -> tuple[int, bool]:
    return ("", "warn", "error").index(health.severity), health.values


def _stamp(place: str, run: Run) -> Any:
    try:
        steps = tuple((one.path, one.nbytes, one.mtime, one.complete) for one in discover(place, depth=4))
    except NotACheckpointError:
        steps = ()
    return steps, _logs(place, run)


def _logs(place: str, run: Run) -> tuple[tuple[str, int, int], ...]:
    """Return name, size and time of the run's logs and of the files beside them: a restart begins a new one."""
    if is_url(place):
        return (("", 0, int(time.time() // FAR)),)
    found = []
    for folder in {place, *(os.path.dirname(path) for path in run.log_files)}:
        try:
            with os.scandir(folder) as entries:
                stats = [(one.path, one.stat()) for one in entries if one.is_file(follow_symlinks=False)]
        except OSError:
            continue
        found += [(path, stat.st_size, stat.st_mtime_ns) for path, stat in stats]
    return tuple(sorted(found))


#: Of the served dashboard.
shared_runs = RunCache()
