"""The list of checkpoints under ROOT in the sidebar: their descriptions, and whether they are complete."""

from __future__ import annotations

from typing import Any

import panel as pn
import panel_material_ui as pmui

from workbench.app import style
from workbench.app.found import checkpoints, found_before
from workbench.app.jobs import Job, Schedule
from workbench.app.state import WorkbenchState
from workbench.app.words import count, html

PAGE = 10
CELL = (
    '<div class="ckpt" title="<%- value %>"><b><%- value %></b><br><small><%- about %></small>'
    '<% if (state) { %><br><small class="bad" title="<%- state %>">incomplete: <%- state %></small><% } %></div>'
)
SHEET = """
.tabulator .tabulator-header { display: none; }
.tabulator .tabulator-row .tabulator-cell { white-space: normal; overflow-wrap: anywhere; height: auto !important;
  padding: 6px 8px !important; line-height: 1.3; }
.tabulator .tabulator-row { cursor: pointer; height: auto !important; }
small { opacity: .85; } .bad { font-style: italic; }
"""


class Picker(pn.viewable.Viewer):
    """Lists the checkpoints under ROOT, in a job; a click opens one.

    Attributes:
        listing: the checkpoints found; until a session's first search has ended, those of the process's last search.
    """

    def __init__(self, state: WorkbenchState, schedule: Schedule | None = None, **params: Any) -> None:
        super().__init__(**params)
        self._state = state
        self._later = schedule or (lambda callback: callback())
        self.listing = found_before(state.jail)
        self.job = Job(schedule)
        self._words = style.pane("")
        self._refresh = pmui.Button(
            label="Refresh", variant="outlined", color="primary", size="small", on_click=lambda _: self.refresh()
        )
        self._narrow = pmui.TextInput(label="Find a checkpoint", size="small", sizing_mode="stretch_width")
        self.table = style.table(
            None,  # rows are sent to a table that is drawn
            {"path": ("Checkpoint", CELL, None)},
            page_size=PAGE,
            selectable=1,
            hidden_columns=["about", "state"],
            stylesheets=[style.TABLE, SHEET],
        )
        self.table.on_click(self._clicked)
        self._narrow.param.watch(self._fill, "value_input")
        self.job.param.watch(self._fill, "status")
        state.param.watch(self._mark, "path")
        self.refresh()

    def __panel__(self) -> pn.viewable.Viewable:
        return pn.Column(self._words, self._narrow, self.table, self._refresh, sizing_mode="stretch_width")

    def refresh(self) -> None:
        """List again; checkpoints come and go while a run writes them."""
        jail = self._state.jail
        self.job.start(lambda progress: checkpoints(jail))

    def _fill(self, *_: Any) -> None:
        if self.job.status == "failed":
            self._words.object = style.message(self.job.error, "error")
        elif self.job.status == "running":
            self._words.object = '<p class="muted">Searching for checkpoints …</p>'
        elif self.job.result is not None:
            self.listing = self.job.result
            frame = self.listing.frame
            wanted = self._narrow.value_input.casefold()
            if wanted:
                frame = frame[frame["path"].str.casefold().str.contains(wanted, regex=False)]
            self.table.param.update(value=frame, selection=[])
            number = _number(len(self.listing.found))
            self._words.object = f'<p class="muted">{number} in {html(self._state.jail.name)}</p>'
            self._later(self._mark)  # a selection sent together with its rows is lost

    def _clicked(self, event: Any) -> None:
        if event.row is not None:
            self._state.show(self._paths[int(self.table.value.index[event.row])])

    @property
    def _paths(self) -> list[str]:
        return [] if self.listing is None else self.listing.paths

    def _mark(self, *_: Any) -> None:
        frame, paths = self.table.value, self._paths
        if frame is None or self._state.path not in paths:
            self.table.selection = []
            return
        label = paths.index(self._state.path)
        if label not in frame.index:
            self.table.selection = []
            return
        row = int(frame.index.get_loc(label))
        if self.table.selection != [row]:
            self.table.param.update(page=row // PAGE + 1, selection=[row])


def _number(n: int) -> str:
    return "no checkpoint" if n == 0 else f"{count(n)} checkpoint{'s' if n > 1 else ''}"
