"""``ckpt.view()``: the tabs for one checkpoint in a notebook cell, without a ROOT to choose from.

::

    ckpt.view()   Overview │ Tensors │ Layout │ Integrity       the tabs of the served page, created when first shown
                  ─────────┴─────────┴────────┴──────────
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import panel as pn

from workbench.analysis.run import Run, RunComparison
from workbench.app import style
from workbench.app.jail import Jail
from workbench.app.jobs import Schedule, at_once
from workbench.app.page import MAKERS
from workbench.app.registry import Lease, OpenCheckpoint, Registry
from workbench.app.run_cache import RunCache
from workbench.app.run_page import RunPage
from workbench.app.state import TABS, WorkbenchState, joined
from workbench.app.tabs.tab import LazyTabs
from workbench.checkpoint import Checkpoint
from workbench.core.remote.url import is_url
from workbench.errors import UsageError
from workbench.notebook import enabled

#: Tabs that need only one checkpoint.
ALONE = tuple(name for name in TABS if name in ("overview", "tensors", "layout", "integrity") and name in MAKERS)


def view(ckpt: Checkpoint, tab: str = "overview") -> Cell:
    """Return a checkpoint's tabs as a ``panel.viewable.Viewer``, which a notebook displays.

    Raises:
        UsageError: there is no such tab.
    """
    if tab not in ALONE:
        raise UsageError(f"there is no tab {tab!r} for one checkpoint; choose one of {', '.join(ALONE)}")
    enabled()
    return Cell(ckpt, tab)


def view_run(run: Run) -> RunCell:
    """Return a run's page as a ``panel.viewable.Viewer``, which a notebook displays."""
    return view_runs(RunComparison((run,)))


def view_runs(comparison: RunComparison) -> RunCell:
    """Return the first run's page, with the others drawn over it."""
    enabled()
    return RunCell(comparison)


class RunCell(pn.viewable.Viewer):
    """A run's page in a cell. A click on a checkpoint shows its tabs beneath the page.

    Attributes:
        page: the page.
    """

    def __init__(self, comparison: RunComparison, schedule: Schedule | None = None, **params: Any) -> None:
        super().__init__(**params)
        schedule = schedule or _on_this_loop()
        held = RunCache()
        paths = []
        for run in comparison.runs:
            place = run.root if is_url(run.root) else os.path.realpath(run.root)
            held.keep_run(place, run)
            paths.append(place)
        self.state = WorkbenchState(_AnyPlace(), None, schedule)
        self.state.param.update(run=paths[0], versus=joined(paths[1:]))
        with at_once():
            self.page = RunPage(self.state, None, schedule, held)
        self._below = pn.Column(sizing_mode="stretch_width")
        self.state.param.watch(self._opened, "status")
        self._body = pn.Column(self.page, self._below, sizing_mode="stretch_width")

    def __panel__(self) -> pn.viewable.Viewable:
        return self._body

    def close(self) -> None:
        """Stop the jobs and close the opened checkpoints."""
        self.page.close()
        self.state.close()

    def _opened(self, event: Any) -> None:
        if event.new == "open":
            tab = self.state.tab if self.state.tab in ALONE else ALONE[0]
            self._below[:] = [Cell(self.state.ckpt, tab)]
        elif event.new == "failed":
            self._below[:] = [style.pane(style.message(self.state.error, "error"))]


class _AnyPlace(Jail):
    """The replacement of ROOT in a notebook's cell: the run's own paths, as the caller named them."""

    def __init__(self) -> None:
        super().__init__(".")
        self.name = "run"

    def resolve(self, relative: str) -> Path | str:
        return relative if is_url(relative) else Path(relative)

    def show(self, path: str | os.PathLike[str]) -> str:
        return os.fspath(path)

    def title(self, relative: str) -> str:
        return os.path.basename(relative.rstrip("/")) or relative


class Cell(pn.viewable.Viewer):
    """The tabs of one open checkpoint, which the caller must close.

    Attributes:
        state: the selection; ``state.tensor = "…"`` selects a tensor.
        made: the tabs shown so far, by name.
    """

    def __init__(
        self, ckpt: Checkpoint, tab: str = "overview", schedule: Schedule | None = None, **params: Any
    ) -> None:
        super().__init__(**params)
        self._schedule = schedule or _on_this_loop()
        folder, name = os.path.split(os.path.realpath(ckpt.path))
        held = _FixedCheckpoint(ckpt)
        self.state = WorkbenchState(Jail(folder if os.path.isdir(folder) else "."), held, self._schedule)
        self.state.lease = held.acquire(Path(ckpt.path))
        self.state.param.update(path=name, ckpt=ckpt, status="open", tab=tab)
        with at_once():
            self._lazy = LazyTabs(self.state, MAKERS, ALONE, self._schedule)
        self.tabs, self.made = self._lazy.tabs, self._lazy.made

    def __panel__(self) -> pn.viewable.Viewable:
        return self.tabs

    def close(self) -> None:
        """Stop the jobs; the checkpoint stays open."""
        self._lazy.close()
        self.state.close()


class _FixedCheckpoint(Registry):
    """A registry with one checkpoint that it neither opens nor closes; other paths (steps of the run) open as usual."""

    def __init__(self, ckpt: Checkpoint) -> None:
        super().__init__()
        self._path = os.path.realpath(ckpt.path)
        self._ckpt = ckpt

    def acquire(self, path: Path | str) -> Lease:
        if os.path.realpath(path) == self._path:
            return Lease(self, OpenCheckpoint(path), self._ckpt)
        return super().acquire(path)

    def _release(self, entry: OpenCheckpoint) -> None:
        if os.path.realpath(entry.path) != self._path:
            super()._release(entry)


def _on_this_loop() -> Schedule | None:
    """Schedule callbacks on the event loop that runs this cell; without one, run them in the calling thread."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return None

    def later(callback: Callable[[], None]) -> None:
        loop.call_soon_threadsafe(callback)

    return later
