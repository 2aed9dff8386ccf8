"""The view of one diff; the *Diff* tab connects it to the page, a notebook shows it directly.

::

    headline, sides
    filter · role · tensor
    ┌ layer × module ┐ ┌ the selected pair: numbers, pattern, histograms, tail ┐
    table of tensors that differ
    objects · only in A · only in B · renamed · checked        downloads
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import holoviews as hv
import numpy as np
import panel as pn
import panel_material_ui as pmui
import param

from workbench.analysis.comparison import Comparison
from workbench.analysis.diff_pairs import RENAMED
from workbench.analysis.diff_result import Diff
from workbench.analysis.diff_rows import TensorDiff
from workbench.analysis.pair_histogram import PairHistogram, pair_histogram
from workbench.app import style
from workbench.app.jail import relative_html
from workbench.app.jobs import Progress, Schedule
from workbench.app.save import csv_button, json_button
from workbench.app.words import count, html, safe
from workbench.app.work import JobButton
from workbench.core.words import plural
from workbench.views.diff import headline
from workbench.views.diff_grid import Board, Grid, GridCell
from workbench.views.diff_pictures import Frame, band_picture, heat_picture, side_names, tail_picture, value_picture
from workbench.views.diff_words import lists_html, objects_html, sides_html, tensor_html

if TYPE_CHECKING:
    import pandas as pd

PAGE = 10
AT_ONCE = 256 << 20  #: bytes of a tensor up to which it is read automatically
OFFERED = 500  #: tensors in the drop-down list; the table has all
NUMBER = (
    "<% var v = value == null || value === '' ? NaN : Number(value), t = Math.abs(v); %>"
    "<%= v !== v ? '–' : v === 0 ? '0' : t === Infinity ? '∞' : "
    "(t >= 0.001 && t < 1000 ? v.toPrecision(3) : v.toExponential(1)).replaceAll('-', '−') %>"
)
SHARE = (
    "<% var v = value == null || value === '' ? NaN : 100 * Number(value); %>"
    "<%= v !== v ? '–' : (v > 0 && v < 1 ? '<1' : v.toFixed(0)) + '\u2009%' %>"
)
COLUMNS: dict[str, tuple[str, str, int | None]] = {
    "name": ("Tensor", "text", None),
    "rel": ("Relative change", NUMBER, 125),
    "share": ("Changed", SHARE, 85),
    "max": ("Max |Δ|", NUMBER, 85),
    "status": ("Status", "text", 110),
    "pattern": ("Pattern", "text", 110),
    "role": ("Role", "text", 95),
    "ulp": ("Max ULPs", NUMBER, 120),
}
NUMBERS = ("rel", "share", "max", "ulp")


class DiffView(pn.viewable.Viewer):
    """Pictures, tables and lists of a diff; ``tensor`` is the key in ``b`` of the selected pair.

    Args:
        diff: the diff; ``board``, ``rows``: data derived from it, if a job has computed them already.
        file: base name of downloads; ``names``: of both sides, instead of their paths.
        schedule: runs a callback on the page's thread.
    """

    tensor = param.String(default="", doc="Key in b of the selected pair; empty for the most changed one.")
    pattern = param.String(default="", doc="Regular expression on keys.")
    role = param.String(default="", doc="Only this role; empty for all.")

    def __init__(
        self,
        diff: Diff,
        board: Board | None = None,
        rows: pd.DataFrame | None = None,
        *,
        file: str = "diff",
        names: tuple[str, str] | None = None,
        schedule: Schedule | None = None,
        **params: Any,
    ) -> None:
        super().__init__(**params)
        self.diff, self._later = diff, schedule or (lambda callback: callback())
        self.board = Board(diff) if board is None else board
        self._grid = Grid()
        self._cells: dict[tuple[int, int], GridCell] = {}
        self._frame = Frame()
        roles = {"every role": "", **{safe(role): role for role in sorted(set(self.board.roles.tolist()))}}
        wide: dict[str, Any] = {"size": "small", "margin": (10, 10, 5, 10)}
        self._pattern = pmui.TextInput(
            label="Filter names",
            placeholder="regular expression, e.g. layers\\.\\d+\\.mlp",
            value=self.pattern,
            sizing_mode="stretch_width",
            **wide,
        )
        self._role = pmui.Select(label="Role", options=roles, value=self._known(self.role), width=150, **wide)
        self._pick = pmui.AutocompleteInput(
            label="Show a tensor",
            options=list(self._offered()),
            min_characters=0,
            sizing_mode="stretch_width",
            **wide,
        )
        self._summary = style.pane("")
        self._plot: pn.pane.HoloViews | None = None
        self._heat = pn.Column(sizing_mode="stretch_width")
        self.detail = PairDetail(side_names(diff), schedule)
        self.rows = table_rows(self.board) if rows is None else rows
        self.table = style.table(
            self.rows,
            COLUMNS,
            page_size=PAGE,
            selectable=1,
            pagination="remote",
            text_align=dict.fromkeys(NUMBERS, "right"),
            header_align=dict.fromkeys(NUMBERS, "right"),
        )
        self.table.on_click(self._clicked)
        self._pattern.param.watch(lambda event: self.param.update(pattern=event.new), "value")
        self._role.param.watch(lambda event: self.param.update(role=event.new), "value")
        self._pick.param.watch(self._picked, "value")
        self.param.watch(self._fill, ["pattern", "role"])
        self.param.watch(self._select, "tensor")
        self._body = pn.Column(*self._parts(file, names), sizing_mode="stretch_width")
        self._fill()

    def __panel__(self) -> pn.viewable.Viewable:
        return self._body

    def close(self) -> None:
        """Stop reading."""
        self.detail.close()

    def find(self, key: str) -> str:
        """Return the key in ``b`` of the pair that a key of either side belongs to; ``""`` if there is none."""
        at = self.board.find(key) if key else None
        return "" if at is None else self.diff.rows[at].key_b

    def _parts(self, file: str, names: tuple[str, str] | None) -> list[Any]:
        diff = self.diff
        kind = "info" if diff.exit_code == 0 else "warning"
        words = headline(diff)
        head = style.pane(style.message(f"{words[:1].upper()}{words[1:]}.", kind) + sides_html(diff, names))
        saves = pn.Row(csv_button(file, lambda: diff.tensors, "CSV of tensors"), json_button(file, diff.to_dict))
        found: list[Any] = [head]
        if diff.rows:
            found += [
                pn.Row(self._pattern, self._role, sizing_mode="stretch_width"),
                style.two_columns(self._heat, pn.Column(self._pick, self.detail.words, sizing_mode="stretch_width")),
                self.detail.pictures,
                style.pane("<h3>Tensors that differ</h3>"),
                self._summary,
                *([self.table] if len(self.rows) else []),
            ]
        objects = f"<h3>Non-tensor state</h3>{objects_html(diff.objects)}" if "objects" in diff.checked else ""
        return [*found, *(style.pane(relative_html(words)) for words in (objects, lists_html(diff))), saves]

    # ---- filters and pictures ----------------------------------------------------------------------------------------

    def _fill(self, *_: Any) -> None:
        """Update widgets, picture and rows for the filters."""
        self._pattern.param.update(value=self.pattern, error_state=False)
        role = self._known(self.role)
        self._role.value = role
        words, board = "", self.board
        try:
            keep = board.matching(self.pattern, role)
        except (re.error, OverflowError, RecursionError) as error:
            keep = board.matching("", role)
            problem = f"the pattern is not a valid regular expression: {error}; every row is shown"
            self._pattern.error_state, words = True, style.message(problem, "error")
        listed = keep[board.listed] if len(board.listed) else np.zeros(0, bool)
        many, of = int(listed.sum()), len(board.listed)
        some = f"{count(many)} of {count(of)}" if many < of else count(many)
        mixed = not role and len(set(board.roles[board.listed].tolist())) > 1 and board.pictured("") == "param"
        order = "weights first, then the other roles, each by relative change" if mixed else "largest change first"
        self._summary.object = words + f'<p class="muted">{some}, {order}.</p>'
        self.table.param.update(value=self.rows if many == of else self.rows[listed], selection=[])
        self._draw(keep, role)
        self._select()

    def _draw(self, keep: Any, role: str) -> None:
        board, shown = self.board, self.board.pictured(role)
        mapped = keep & (board.roles == shown)
        left = int(keep.sum()) - int(mapped.sum())
        self._grid = board.grid(mapped)
        self._cells = {(cell.column, cell.row): cell for cell in self._grid.cells}
        name = "weights" if shown == "param" else html(shown)
        words = f'<p class="muted">{plural(int(mapped.sum()), "tensor")}'
        words += f"; {count(left)} of other roles: choose a role above" if left else ""
        parts: list[Any] = [
            style.pane(f"<h3>Where it changed: {name} by layer and module</h3>{words}. Click a cell.</p>")
        ]
        if self._grid.cells:
            self._frame = Frame()
            cells = heat_picture(self._grid, self.diff.rows, self._frame)
            hv.streams.Tap(source=next(iter(cells))).add_subscriber(self._tapped)
            self._plot = pn.pane.HoloViews(cells, linked_axes=False, sizing_mode="stretch_width")
            parts.append(self._plot)
        else:
            parts = [style.pane('<p class="muted">No tensor matches this name and role.</p>')]
        self._heat[:] = parts

    # ---- selection ---------------------------------------------------------------------------------------------------

    def _tapped(self, x: float | None = None, y: float | None = None) -> None:
        cell = None if x is None or y is None else self._cells.get((int(np.floor(x)), int(np.floor(y))))
        if cell is not None:
            # HoloViews reports taps outside the document's lock
            key = self.diff.rows[cell.at].key_b
            self._later(lambda: self.param.update(tensor=key))

    def _clicked(self, event: Any) -> None:
        if event.row is not None:
            self.tensor = self.diff.rows[int(self.table.value.index[event.row])].key_b

    def _picked(self, event: Any) -> None:
        at = self._offered().get(event.new)
        if at is not None:
            self.tensor = self.diff.rows[at].key_b

    def _select(self, *_: Any) -> None:
        """Show the selected pair, or else the most changed of the pairs on display."""
        rows, board = self.diff.rows, self.board
        at = board.find(self.tensor) if self.tensor else None
        lead = ""
        if at is None:
            differing = [cell for cell in self._grid.cells if rows[cell.at].differs]
            most = max(differing, key=lambda cell: rows[cell.at].weight(), default=None)
            at = None if most is None else most.at
            lead = '<p class="muted">The most changed tensor; click a cell or a row to see another.</p>'
            lead = lead if at is not None else '<p class="muted">None of these tensors differ.</p>'
        self.detail.show(None if at is None else rows[at], lead)
        self._frame.show(None if at is None else self._grid.cell_of(at))
        if self._plot is not None and pn.state.curdoc is None:
            pn.io.push_notebook(self._plot)  # changes below Panel must be pushed to a notebook explicitly
        selected = at is not None and bool(self.tensor)
        chosen = np.flatnonzero(self.table.value.index == at)[:1].tolist() if selected else []
        if self.table.selection != chosen:
            if chosen and not self.table.sorters:
                self.table.page = chosen[0] // PAGE + 1
            self.table.selection = chosen

    def _known(self, role: str) -> str:
        return role if role in self.board.roles else ""

    def _offered(self) -> dict[str, int]:
        """Return safe names to choose from, most changed first → position of the row."""
        if not hasattr(self, "_offers"):
            found = (self.board.listed[:OFFERED]).tolist() or list(range(min(len(self.diff.rows), OFFERED)))
            self._offers = {safe(self.diff.rows[at].key_b): at for at in found}
        return self._offers


def table_rows(board: Board) -> pd.DataFrame:
    """Return a row per listed pair, by position in ``Diff.rows``: name rel share max status pattern role ulp."""
    import pandas as pd

    found = []
    for at in board.listed.tolist():
        row = board.diff.rows[at]
        c = row.comparison
        name = f"{safe(row.key_a)} → {safe(row.key_b)}" if row.by == RENAMED else safe(row.key_b)
        numbers = (None,) * 3 if c is None else (c.rel_l2, c.max_abs, c.ulp_max)
        rel, largest, ulp = (np.nan if value is None else float(value) for value in numbers)
        share = np.nan if row.share is None else row.share
        status = "NaN appears" if c is not None and c.nan_new else "renamed" if row.status == "equal" else row.status
        kind = "" if row.pattern is None else safe(row.pattern.name)
        found.append((name, rel, share, largest, status, kind, safe(row.role), ulp))
    frame = pd.DataFrame(found, columns=list(COLUMNS), index=board.listed)
    return frame.astype(dict.fromkeys(NUMBERS, "float64") | {n: "str" for n in COLUMNS if n not in NUMBERS})


# ---- one pair of tensors ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PairRead:
    """The data read from a pair."""

    row: TensorDiff
    comparison: Comparison | None
    values: PairHistogram | None


def see(row: TensorDiff, progress: Progress) -> PairRead:
    """Read both tensors: histograms of their difference, then of their values.

    Raises:
        HoleError, OpenError: an element is stored nowhere or cannot be read.
    """
    found = row.look(lambda share: progress(0.5 * share))
    progress(0.5)
    values = None
    if row.sides is not None:
        values = pair_histogram(*row.sides(), progress=lambda share: progress(0.5 + 0.5 * share))
    return PairRead(row, found, values)


class PairDetail:
    """The selected pair; a bitwise equal pair is reported as such and not read.

    Attributes:
        words: its numbers and pattern.
        pictures: of its values and their change, once read.

    Args:
        names: of the two sides.
    """

    def __init__(self, names: tuple[str, str], schedule: Schedule | None = None) -> None:
        self._names = names
        self._row: TensorDiff | None = None
        self._lead, self._description = style.pane(""), style.pane("")
        self.words = pn.Column(self._lead, self._description, sizing_mode="stretch_width")
        self.pictures = pn.Column(sizing_mode="stretch_width")
        self.work = JobButton("Read both tensors", self._see, self._seen, schedule=schedule)

    def show(self, row: TensorDiff | None, lead: str = "") -> None:
        """Show a pair; ``lead`` is an HTML sentence above it."""
        self._lead.object = lead
        if row is self._row:
            return
        self.work.reset()
        self._row = row
        self._description.object = "" if row is None else tensor_html(row)
        readable = row is not None and row.sides is not None and row.status not in ("equal", "unread", "unknown")
        self.pictures[:] = [self.work] if readable else []
        if readable and row is not None and row.nbytes <= AT_ONCE:
            self.work.start()

    def close(self) -> None:
        """Stop reading."""
        self.work.reset()

    def _see(self, progress: Progress) -> PairRead:
        assert self._row is not None
        return see(self._row, progress)

    def _seen(self, found: PairRead) -> None:
        self.pictures[:] = [style.two_columns(*_pictures(found, self._names))]


def _pictures(found: PairRead, names: tuple[str, str]) -> list[Any]:
    shown: list[Any] = []
    if (values := found.values) is not None:
        some = "" if values.exact else f" ({count(values.summaries[0].seen)} sampled elements)"
        shown.append(_plot(f"Values before and after{some}", value_picture(values, names)))
    c = found.comparison
    if c is not None and (tail := tail_picture(c)) is not None:
        shown.append(_plot("Distribution of changes", tail))
    if c is not None and (bands := band_picture(c, found.row.shape_b)) is not None:
        shown.append(_plot("Where the changed elements are", bands))
    return shown


def _plot(title: str, picture: Any) -> pn.Column:
    plot = pn.pane.HoloViews(picture, linked_axes=False, sizing_mode="stretch_width")
    return pn.Column(style.pane(f"<h3>{title}</h3>"), plot, sizing_mode="stretch_width")
