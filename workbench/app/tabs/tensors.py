"""The *Tensors* tab: a table of all tensors, and the selected one in numbers and pictures."""

from __future__ import annotations

from typing import Any

import numpy as np
import panel as pn
import panel_material_ui as pmui

from workbench.app import style
from workbench.app.jobs import Schedule
from workbench.app.rows import EVERY_ROLE, choose_rows
from workbench.app.state import WorkbenchState
from workbench.app.tabs.detail import Detail
from workbench.app.words import count, size
from workbench.errors import UsageError

__all__ = ["Tensors"]

PAGE = 10  #: rows of a page of the table
#: Column → title, kind, pixels; those further down go first where the window is narrow.
COLUMNS: dict[str, tuple[str, str, int | None]] = {
    "name": ("Name", "text", None),
    "shape": ("Shape", "text", 130),
    "nbytes": ("Bytes", "bytes", 95),
    "dtype": ("Type", "text", 100),
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
        self._said = style.pane("")
        self.table = style.table(None, COLUMNS, page_size=PAGE, selectable=1)
        self.table.on_click(self._clicked)
        self.detail = Detail(state, schedule)
        self._filling = False
        self._pattern.param.watch(lambda event: self._set(pattern=event.new), "value")
        self._role.param.watch(lambda event: self._set(role=event.new), "value")
        state.param.watch(self._fill, ["ckpt", "pattern", "role"])
        state.param.watch(self._select, "tensor")
        self._fill()

    def close(self) -> None:
        """The session is over: stop reading."""
        self.detail.job.reset()

    def __panel__(self) -> pn.viewable.Viewable:
        filters = pn.Row(self._pattern, self._role, sizing_mode="stretch_width")
        return pn.Column(filters, self._said, self.table, self.detail, sizing_mode="stretch_width")

    def _set(self, **values: str) -> None:
        if not self._filling:
            self._state.param.update(**values)

    def _fill(self, *_: Any) -> None:
        """Bring filters and rows in line with the state."""
        ckpt, lease = self._state.ckpt, self._state.lease
        if ckpt is None or lease is None:
            return
        self._filling = True  # the widgets' own events would only say what the state knows
        try:
            roles = {"every role": EVERY_ROLE, **{role: role for role in sorted(set(ckpt.roles))}}
            self._role.param.update(
                options=roles, value=self._state.role if self._state.role in roles.values() else EVERY_ROLE
            )
            self._pattern.value = self._state.pattern
        finally:
            self._filling = False
        self._pattern.error_state, words = False, ""
        try:
            chosen = choose_rows(ckpt, self._state.pattern, self._role.value)
        except UsageError as error:
            self._pattern.error_state, words = True, style.message(str(error), "error")
            chosen = choose_rows(ckpt, "", self._role.value)
        nbytes = int(ckpt.catalog.tensor_nbytes[chosen].sum())
        which = f"{count(len(chosen))} of {count(len(ckpt))}" if len(chosen) < len(ckpt) else f"all {count(len(ckpt))}"
        self._said.object = words or f'<p class="muted">{which} tensors, {size(nbytes)}. Click one to look inside.</p>'
        rows = lease.rows
        self.table.param.update(value=rows if len(chosen) == len(rows) else rows.iloc[chosen], selection=[])
        self._select()

    def _clicked(self, event: Any) -> None:
        """``event.row`` is a row of ``value``, however the table is sorted; its label is the catalog's position."""
        ckpt = self._state.ckpt
        if ckpt is not None and event.row is not None:
            self._state.tensor = ckpt.catalog.keys[int(self.table.value.index[event.row])]

    def _select(self, *_: Any) -> None:
        """Mark the state's tensor in the table, and turn to its page when it is not sorted otherwise."""
        ckpt = self._state.ckpt
        position = None if ckpt is None else ckpt.catalog.index.get(self._state.tensor)
        if position is None or self.table.value is None:
            self.table.selection = []
            return
        row = int(np.searchsorted(self.table.value.index, position))
        if row >= len(self.table.value) or self.table.value.index[row] != position:
            self.table.selection = []  # filtered out; the detail stays
            return
        if self.table.selection != [row]:
            if not self.table.sorters:
                self.table.page = row // PAGE + 1
            self.table.selection = [row]
