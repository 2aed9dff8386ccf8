"""``ckpt.view()``: the tabs for one checkpoint in a notebook cell, without a ROOT to choose from.

::

    ckpt.view()   Overview │ Tensors │ Layout │ Integrity       the tabs of the served page, created when first shown
                  ─────────┴─────────┴────────┴──────────
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import panel as pn
import panel_material_ui as pmui

from workbench.app.jail import Jail
from workbench.app.jobs import Schedule
from workbench.app.page import MAKERS
from workbench.app.registry import Lease, OpenCheckpoint, Registry
from workbench.app.state import TABS, WorkbenchState
from workbench.checkpoint import Checkpoint
from workbench.errors import UsageError
from workbench.notebook import enabled

__all__ = ["Cell", "view"]

#: Tabs that need nothing but one checkpoint.
ALONE = tuple(name for name in TABS if name in ("overview", "tensors", "layout", "integrity") and name in MAKERS)


def view(ckpt: Checkpoint, tab: str = "overview") -> Cell:
    """Return a checkpoint's tabs as a Panel object, which a notebook displays.

    Raises:
        UsageError: there is no such tab.
    """
    if tab not in ALONE:
        raise UsageError(f"there is no tab {tab!r} for one checkpoint; choose one of {', '.join(ALONE)}")
    enabled()
    return Cell(ckpt, tab)


class Cell(pn.viewable.Viewer):
    """The tabs of one open checkpoint, which the caller must close.

    Attributes:
        state: what is shown; ``state.tensor = "…"`` selects a tensor.
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
        self.made: dict[str, Any] = {}
        self._frames = {name: pn.Column(sizing_mode="stretch_width") for name in ALONE}
        self.tabs = pmui.Tabs(
            *((MAKERS[name][0], frame) for name, frame in self._frames.items()),
            active=ALONE.index(tab),
            sizing_mode="stretch_width",
        )
        self.tabs.param.watch(lambda event: self.state.param.update(tab=ALONE[event.new]), "active")
        self.state.param.watch(self._turn, "tab")
        self._turn()

    def __panel__(self) -> pn.viewable.Viewable:
        return self.tabs

    def close(self) -> None:
        """Stop the jobs; the checkpoint stays open."""
        for tab in self.made.values():
            tab.close()
        self.state.close()

    def _turn(self, *_: Any) -> None:
        name = self.state.tab
        if name not in ALONE:
            return
        self.tabs.active = ALONE.index(name)
        if name not in self.made:
            module, kind = MAKERS[name][1:]
            self.made[name] = getattr(import_module(module), kind)(self.state, self._schedule)
            self._frames[name][:] = [self.made[name]]


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
