"""From a checkpoint to the other steps of its run: neighbours in the folder whose names differ only by a number."""

from __future__ import annotations

import posixpath
import re
from functools import cached_property
from typing import Any

import panel as pn
import panel_material_ui as pmui

from workbench.app import style
from workbench.app.jail import BucketJail, Jail
from workbench.app.jobs import Progress, Schedule
from workbench.app.state import WorkbenchState
from workbench.app.work import JobButton
from workbench.core.remote.url import is_url
from workbench.core.words import plural
from workbench.errors import WorkbenchError
from workbench.runs import Found, discover

_NUMBER = re.compile(r"\d+")


class RunTab(pn.viewable.Viewer):
    """Where in its run a checkpoint is, found in a job; buttons open its neighbours and the run's page."""

    def __init__(self, state: WorkbenchState, schedule: Schedule | None = None, **params: Any) -> None:
        super().__init__(**params)
        self._state = state
        self.steps: list[Found] = []
        self.work = JobButton("Find other steps", self._find, self._done, verb="searching", schedule=schedule)
        self._body = pn.Column(sizing_mode="stretch_width")
        state.param.watch(self._listed, "listed")

    def __panel__(self) -> pn.viewable.Viewable:
        return self._body

    @cached_property
    def _turn(self) -> list[pmui.Button]:
        return [style.button("Earlier step", self._turner(-1)), style.button("Later step", self._turner(1))]

    @cached_property
    def _page(self) -> pmui.Button:
        return style.button("Curves and layers of the run", self._whole)

    def look(self) -> None:
        """Find the neighbours of the open checkpoint."""
        self.steps, self._body[:] = [], []
        self.work.start()

    def _listed(self, *_: Any) -> None:
        """Find them again: checkpoints were added or removed."""
        if self._state.status == "open" and self.work.job.status == "done":
            self.work.start()

    def _find(self, progress: Progress) -> list[Found]:
        ckpt, jail = self._state.ckpt, self._state.jail
        if ckpt is not None and is_url(ckpt.path) != isinstance(jail, BucketJail):
            return []  # of a store, in a notebook's cell: the jail there is the working directory
        return siblings(jail, _here(self._state))

    def _done(self, steps: list[Found]) -> None:
        if steps == self.steps:
            return
        if len(steps) < 2:
            self.steps, self._body[:] = [], []
            return  # no run: nothing to show
        self.steps, here = steps, _here(self._state)
        at = next((i for i, one in enumerate(steps) if one.path == here), -1)
        for button, by in zip(self._turn, (-1, 1), strict=True):
            button.disabled = not 0 <= at + by < len(steps)
        words = f"Checkpoint {at + 1:,} of {len(steps):,} in its run" if at >= 0 else plural(len(steps), "checkpoint")
        buttons = [*self._turn, *([self._page] if self._state.served else [])]
        self._body[:] = [style.pane(f"<h3>{words}</h3>"), pn.FlexBox(*buttons)]

    def _whole(self, _: Any) -> None:
        """Show the page of the run."""
        folder = posixpath.dirname(_here(self._state)) or "."
        self._state.restore({"run": folder})

    def _turner(self, by: int) -> Any:
        def turn(_: Any) -> None:
            here = _here(self._state)
            at = next((i for i, one in enumerate(self.steps) if one.path == here), None)
            if at is not None and 0 <= at + by < len(self.steps):
                self._go(at + by)

        return turn

    def _go(self, at: int) -> None:
        """Open another step, keeping the selected tensor and filter."""
        if self.steps[at].path != _here(self._state):
            self._state.show(self.steps[at].path, tensor=self._state.tensor, role=self._state.role)


def siblings(jail: Jail, path: str) -> list[Found]:
    """Return the checkpoints next to one whose names differ from its own only by a number, in order of steps."""
    folder, name = posixpath.split(path)
    if not _NUMBER.search(name):
        return []
    root = jail.resolve(folder or ".")
    shape, found = _NUMBER.sub("#", name), []
    for one in discover(root, depth=1):
        if one.step is not None and _NUMBER.sub("#", one.path) == shape:
            fields = {field: getattr(one, field) for field in ("format", "step", "nbytes", "mtime", "complete", "why")}
            found.append(Found(path=posixpath.join(folder, one.path), **fields))
    return sorted(found, key=lambda one: (one.step or 0, one.path))


def _here(state: WorkbenchState) -> str:
    """Return the path under ROOT of the open checkpoint; for a run's folder, that of the step opened."""
    ckpt = state.ckpt
    try:
        return state.path if ckpt is None else state.jail.show(ckpt.path)
    except (ValueError, WorkbenchError):
        return state.path
