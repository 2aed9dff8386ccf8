"""The steps of a checkpoint's run: neighbours in the folder whose names differ only by a number.

::

    run/step-2   6.1 MiB   complete
    run/step-4   6.1 MiB   complete      ◄ this one
    run/step-6   2.0 MiB   .metadata is missing
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import panel as pn
import panel_material_ui as pmui

from workbench.app import plots, style
from workbench.app.jail import BucketJail, Jail
from workbench.app.jobs import Progress, Schedule
from workbench.app.save import csv_button
from workbench.app.state import WorkbenchState
from workbench.app.words import safe
from workbench.app.work import JobButton
from workbench.core.remote.url import is_url
from workbench.errors import WorkbenchError
from workbench.runs import Found, discover

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["RunTab", "siblings", "step_rows"]

COLUMNS: dict[str, tuple[str, str, int | None]] = {
    "step": ("Step", "count", 110),
    "path": ("Checkpoint", "text", None),
    "nbytes": ("Size", "bytes", 110),
    "complete": ("State", "text", 220),
}
PAGE = 8
_NUMBER = re.compile(r"\d+")


class RunTab(pn.viewable.Viewer):
    """The steps of the run as a picture and a table, found in a job; clicking a step opens it."""

    def __init__(self, state: WorkbenchState, schedule: Schedule | None = None, **params: Any) -> None:
        super().__init__(**params)
        self._state = state
        self.steps: list[Found] = []
        self.work = JobButton("Find other steps", self._find, self._done, verb="searching", schedule=schedule)
        self.table: pn.widgets.Tabulator | None = None
        self._turn = [
            pmui.Button(label=label, variant="outlined", color="primary", size="small", on_click=self._turner(by))
            for label, by in (("Earlier step", -1), ("Later step", 1))
        ]
        self._page = pmui.Button(
            label="Curves and layers of the run",
            variant="outlined",
            color="primary",
            size="small",
            on_click=self._whole,
        )
        self._body = pn.Column(sizing_mode="stretch_width")

    def __panel__(self) -> pn.viewable.Viewable:
        return self._body

    def look(self) -> None:
        """Find the neighbours of the open checkpoint."""
        self.steps, self._body[:] = [], []
        self.work.start()

    def _find(self, progress: Progress) -> list[Found]:
        ckpt, jail = self._state.ckpt, self._state.jail
        if ckpt is not None and is_url(ckpt.path) != isinstance(jail, BucketJail):
            return []  # of a store, in a notebook's cell: the jail there is the working directory
        return siblings(jail, _here(self._state))

    def _done(self, steps: list[Found]) -> None:
        if len(steps) < 2:
            return  # no run: nothing to show
        self.steps, here = steps, _here(self._state)
        at = next((i for i, one in enumerate(steps) if one.path == here), -1)
        frame = step_rows(steps, at)
        for button, by in zip(self._turn, (-1, 1), strict=True):
            button.disabled = not 0 <= at + by < len(steps)
        picture = plots.steps_line([(one.step or 0, one.nbytes, one.complete) for one in steps], at)
        self.table = style.table(frame, COLUMNS, page_size=PAGE)
        if len(frame) > PAGE:
            self.table.page = max(at, 0) // PAGE + 1
        self.table.on_click(self._clicked)
        self._body[:] = [
            style.pane(f"<h3>The run: {len(steps)} steps</h3>"),
            pn.pane.HoloViews(picture, linked_axes=False, sizing_mode="stretch_width"),
            self.table,
            pn.FlexBox(*self._turn, self._page, csv_button("run-steps", lambda: frame, "steps CSV")),
        ]

    def _whole(self, _: Any) -> None:
        """Show the page of the run."""
        folder = posixpath.dirname(_here(self._state)) or "."
        self._state.restore({"run": folder})

    def _clicked(self, event: Any) -> None:
        if event.row is not None:
            self._go(int(event.row))

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


def step_rows(steps: Sequence[Found], here: int = -1) -> pd.DataFrame:
    """Return one row per step: step path nbytes complete, the last as text; row ``here`` is marked as the one shown."""
    import pandas as pd

    rows = []
    for at, one in enumerate(steps):
        words = "complete" if one.complete else safe(one.why or "incomplete")
        rows.append((one.step, safe(one.path), one.nbytes, f"shown here; {words}" if at == here else words))
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _here(state: WorkbenchState) -> str:
    """Return the path under ROOT of the open checkpoint; for a run's folder, that of the step opened."""
    ckpt = state.ckpt
    try:
        return state.path if ckpt is None else state.jail.show(ckpt.path)
    except (ValueError, WorkbenchError):
        return state.path
