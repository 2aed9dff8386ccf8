"""A table of any length: the browser gets one page at a time, and a session stores only positions.

::

    frame (shared)    chosen (filter)        order (sorted)          page 2
    0 wq  64 × 64     [0, 2, 3, 7, …]  ──►   [7, 0, 3, 2, …]  ──►   rows order[10:20] of the frame
    1 wk  64 × 64

Panel's own remote paging (1.9.4, ``widgets/tables.py``) copies the frame to sort it, sorts it again for every page, and
keeps a dictionary of all rows: 0.2 s per page of 100,000 sorted rows, and about 20 MB per session.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import panel as pn

from workbench.app.rows import Positions, RowOrder


class Paged(pn.widgets.Tabulator):
    """A read-only table with remote paging over a frame with a range index.

    Attributes:
        chosen: positions of the rows in the table, ascending.
        order: the same positions in the order of the table, across all pages.
    """

    value: Any
    page: Any
    selection: Any

    def __init__(self, value: Any = None, **params: Any) -> None:
        self.chosen: Positions = np.arange(0 if value is None else len(value))
        self.order = self.chosen
        self._ranks: RowOrder | None = None if value is None else RowOrder(value)
        super().__init__(value=value, **{**params, "pagination": "remote"})

    def fill(self, frame: Any, chosen: Positions, ranks: RowOrder) -> None:
        """Show these rows of a frame from the first page, keeping the sort order and clearing the selection."""
        self.chosen, self._ranks, self.selection = chosen, ranks, []
        if self.page != 1:
            self.page = 1
        if frame is self.value:
            self._update_cds()
        else:
            self.value = frame

    def mark(self, position: int | None) -> None:
        """Select a row by its position in the frame and go to its page; select none if it is not in the table."""
        at = [] if position is None else np.flatnonzero(self.order == position).tolist()
        if position is None or not at:
            self.selection = []
        elif self.selection != [position]:
            self.page = at[0] // self._rows + 1
            self.selection = [position]

    @property
    def _rows(self) -> int:
        return int(self.page_size or self.initial_page_size)

    # ---- what Panel calls ----------------------------------------------------------------------------------------

    def _get_data(self) -> tuple[Any, dict[str, Any]]:
        import pandas as pd
        from bokeh.models import ColumnDataSource

        if self.value is None:
            return super()._get_data()
        sorters = [(str(one["field"]), one["dir"] == "asc") for one in self.sorters]
        self.order = self._ranks.order(self.chosen, sorters) if self._ranks and sorters else self.chosen
        page = self.value.iloc[self._shown()]
        data = ColumnDataSource.from_df(page)
        # Panel asks the shown frame for its length and for the labels of a page
        return pd.DataFrame(index=self.order), {k: self._process_column(v, k, page) for k, v in data.items()}

    def _shown(self) -> Positions:
        return self.order[(self.page - 1) * self._rows : self.page * self._rows]

    def _update_index_mapping(self) -> None:
        self._index_mapping = _RowAt(self.order)

    def _update_selected(self, *events: Any, indices: Any = None) -> None:
        super(pn.widgets.Tabulator, self)._update_selected(*events, indices=self._marked())

    def _get_properties(self, doc: Any = None) -> dict[str, Any]:
        properties = super()._get_properties(doc)
        properties["source"].selected.indices = self._marked()  # Panel sends row numbers of the frame
        return properties

    def _marked(self) -> list[int]:
        """Return the selected rows of the page."""
        page = self._shown().tolist()
        return [page.index(one) for one in self.selection if one in page]

    def _get_style_data(self, recompute: bool = True) -> dict[str, Any]:
        return {}


class _RowAt:
    """Row of the table → label of the frame, without a dictionary of all rows."""

    def __init__(self, order: Positions) -> None:
        self._order = order

    def get(self, row: int, default: Any = None) -> Any:
        return int(self._order[row]) if 0 <= row < len(self._order) else default
