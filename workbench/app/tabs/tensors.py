"""The *Tensors* tab: a table of all tensors, and the selected one in numbers and pictures."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
import panel as pn
import panel_material_ui as pmui

from workbench.app import style
from workbench.app.jobs import Job, Progress, Schedule
from workbench.app.paged import Paged
from workbench.app.rows import EVERY_ROLE, Positions, with_role
from workbench.app.save import csv_button
from workbench.app.search import LIMIT, Search
from workbench.app.state import WorkbenchState
from workbench.app.tabs.detail import Detail
from workbench.app.words import count, size
from workbench.errors import UsageError

if TYPE_CHECKING:
    import pandas as pd

PAGE = 10  #: rows per page of the table
QUICK = 0.1  #: seconds that a filter may block the page; longer searches continue in a job
#: Column → title, kind, pixels; in a narrow window, the last ones are hidden first.
COLUMNS: dict[str, tuple[str, str, int | None]] = {
    "name": ("Name", "text", None),
    "shape": ("Shape", "text", 130),
    "nbytes": ("Bytes", "bytes", 95),
    "dtype": ("Dtype", "text", 100),
    "role": ("Role", "text", 100),
    "numel": ("Elements", "count", 115),
    "chunks": ("Chunks", "count", 80),
    "files": ("Files", "count", 70),
}


class Tensors(pn.viewable.Viewer):
    """Table, filters and the detail of the selected tensor; selection is by key, in the state."""

    def __init__(self, state: WorkbenchState, schedule: Schedule | None = None, **params: Any) -> None:
        super().__init__(**params)
        self._state = state
        self._pattern = pmui.TextInput(
            label="Filter names",
            placeholder="regular expression, e.g. layers\\.\\d+\\.mlp",
            sizing_mode="stretch_width",
            size="small",
            margin=(10, 10, 5, 10),
        )
        self._role = pmui.Select(
            label="Role", options={"every role": EVERY_ROLE}, width=180, size="small", margin=(10, 10, 5, 10)
        )
        self.summary = style.pane("")
        self.table: Paged = style.table(None, COLUMNS, Paged, page_size=PAGE, selectable=1)
        self.table.on_click(self._clicked)
        self._save = csv_button("tensors", self._frame, "table CSV")
        self.search = Job(schedule)  # for the few slow patterns
        self.detail = Detail(state, schedule)
        self._filling = False
        self._pattern.param.watch(lambda event: self._set(pattern=event.new), "value")
        self._role.param.watch(lambda event: self._set(role=event.new), "value")
        self.search.param.watch(self._searched, "status")
        state.param.watch(self._fill, ["ckpt", "pattern", "role"])
        state.param.watch(self._select, "tensor")
        self._fill()

    def close(self) -> None:
        """End the session: stop reading."""
        self.search.reset()
        self.detail.close()

    def __panel__(self) -> pn.viewable.Viewable:
        filters = pn.Row(self._pattern, self._role, sizing_mode="stretch_width")
        above = pn.Row(self.summary, self._save, sizing_mode="stretch_width", margin=(0, 10, 0, 0))
        return pn.Column(filters, above, self.table, self.detail, sizing_mode="stretch_width")

    def _set(self, **values: str) -> None:
        if not self._filling:
            self._state.param.update(**values)

    def _fill(self, *_: Any) -> None:
        """Update filters and rows from the state."""
        ckpt, lease = self._state.ckpt, self._state.lease
        self.search.reset()
        if ckpt is None or lease is None:
            return
        self._filling = True  # the widgets' own events would only repeat the state
        try:
            roles = {"every role": EVERY_ROLE, **{role: role for role in sorted(set(ckpt.roles))}}
            self._role.param.update(
                options=roles, value=self._state.role if self._state.role in roles.values() else EVERY_ROLE
            )
            self._pattern.value = self._state.pattern
        finally:
            self._filling = False
        self._pattern.error_state = False
        if not self._state.pattern:
            self._show(np.arange(len(ckpt)))
            return
        try:
            search = Search(ckpt.catalog.keys, self._state.pattern)
        except UsageError as error:
            self._refuse(str(error))
            return
        if search.run(QUICK):
            self._show(search.positions())
        else:
            self.summary.object = '<p class="muted">Filtering …</p>'
            self.search.start(lambda progress: _search_on(search, progress))

    def _searched(self, *_: Any) -> None:
        if self.search.status == "failed":
            self._refuse(self.search.error)
        elif self.search.status == "done":
            self._show(self.search.result)

    def _refuse(self, why: str) -> None:
        self._pattern.error_state = True
        self._show(np.arange(len(self._state.ckpt or ())), style.message(why, "error"))

    def _show(self, found: Positions, words: str = "") -> None:
        """Show the rows at these positions that have the role."""
        ckpt, lease = self._state.ckpt, self._state.lease
        if ckpt is None or lease is None:
            return
        chosen = with_role(ckpt, found, self._role.value)
        nbytes = int(ckpt.catalog.tensor_nbytes[chosen].sum())
        which = f"{count(len(chosen))} of {count(len(ckpt))}" if len(chosen) < len(ckpt) else f"all {count(len(ckpt))}"
        hint = "Click one to look inside." if len(chosen) else "No name matches; clear the filter to see all."
        self.summary.object = words or f'<p class="muted">{which} tensors, {size(nbytes)}. {hint}</p>'
        self.table.fill(lease.rows, chosen, lease.ranks)
        self._select()

    def _frame(self) -> pd.DataFrame:
        """Return the rows of the table, in its order, for a file."""
        assert self._state.ckpt is not None
        return self._state.ckpt.tensors.iloc[self.table.order]

    def _clicked(self, event: Any) -> None:
        """Select a tensor: ``event.row`` is its position in the catalog, however the table is filtered and sorted."""
        ckpt = self._state.ckpt
        if ckpt is not None and event.row is not None:
            self._state.param.update(tensor=ckpt.catalog.keys[int(event.row)], place="")

    def _select(self, *_: Any) -> None:
        """Select the state's tensor in the table and go to its page; the detail stays even if it is filtered out."""
        ckpt = self._state.ckpt
        self.table.mark(None if ckpt is None else ckpt.catalog.index.get(self._state.tensor))


def _search_on(search: Search, progress: Progress) -> Positions:
    until = time.monotonic() + LIMIT
    while not search.run(QUICK * 4):
        progress(search.at / max(len(search), 1))
        if time.monotonic() > until:
            raise search.too_long()
    return search.positions()
