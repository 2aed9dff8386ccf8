"""The tensors of a diff arranged by layer and module, summarised in as many cells as a page can show.

::

    layers.3.attention.wq.weight    ──►  row attention.wq.weight, column 3
    layers.3.experts.17.w1.weight   ──►  row experts.*.w1.weight, column 3: one cell for all experts
    norm.weight                     ──►  row norm.weight, column "–"

A cell shows its most changed tensor. Beyond :data:`COLUMNS` layers, neighbouring layers share a column; beyond
:data:`ROWS` modules, modules that share a name prefix share a row.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from workbench.analysis.diff_result import Diff
from workbench.analysis.diff_rows import TensorDiff
from workbench.core.arrays import Array
from workbench.views.names import safe

COLUMNS, ROWS = 96, 48  #: maximum number of cells of a picture, each way
NO_LAYER = "–"
#: Kinds of cells, in rising order of precedence: a later kind hides an earlier one.
KINDS = ("equal", "not compared", "changed, not measured", "changed", "NaN in B only", "different shape")
_LAYER = re.compile(r"(?:^|\.)(\d+)(?=\.|$)")
_EXPERT = re.compile(r"\bexperts\.\d+(?=\.|$)")


@dataclass(frozen=True)
class GridCell:
    """One cell of a grid.

    Attributes:
        column, row: its position.
        kind: one of :data:`KINDS`.
        value: relative L2 change of the tensor that changed most; NaN if no tensor has one.
        at: that tensor's position in ``Diff.rows``.
        tensors, changed: number of tensors in the cell, and how many of them differ.
    """

    column: int
    row: int
    kind: str
    value: float
    at: int
    tensors: int
    changed: int


@dataclass(frozen=True, eq=False)
class Grid:
    """Cells with the names of their columns (layers) and rows (modules), safe to display."""

    layers: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    cells: tuple[GridCell, ...] = ()
    chosen: Array = field(default_factory=lambda: np.zeros(0, np.int64))  #: positions in ``Diff.rows``, ascending
    place: Array = field(default_factory=lambda: np.zeros(0, np.int64))  #: cell of each: row × columns + column

    def cell_of(self, at: int) -> GridCell | None:
        """Return the cell that contains a row of the diff."""
        n = int(np.searchsorted(self.chosen, at))
        if n == len(self.chosen) or self.chosen[n] != at:
            return None
        row, column = divmod(int(self.place[n]), len(self.layers))
        return next(cell for cell in self.cells if (cell.row, cell.column) == (row, column))


class Board:
    """The data of the pictures and tables of one diff; built once, which takes seconds at 100,000 tensors.

    Attributes:
        diff: the diff.
        listed: rows listed in a table: those that differ, most changed first, then those that were not compared;
            weights before other roles, except where a NaN appears or the shape differs.
        keys, roles: of all rows, as numpy arrays of text.
    """

    def __init__(self, diff: Diff) -> None:
        self.diff = diff
        at = {id(row): n for n, row in enumerate(diff.rows)}
        left = [row for row in diff.rows if row.status in ("unread", "unknown") and not row.differs]
        self.keys = [row.key_b for row in diff.rows]
        self.roles = np.array([row.role for row in diff.rows], object)
        first = self.pictured("")
        listed = sorted([*diff.changed_rows, *left], key=lambda row: row.role != first and not _is_urgent(row))
        self.listed = np.array([at[id(row)] for row in listed], np.int64)
        measured = [_kind(row) for row in diff.rows]
        self._kind = np.array([kind for kind, _ in measured], np.int64)
        self._value = np.array([value for _, value in measured], np.float64)
        self._differs = np.array([row.differs for row in diff.rows], bool)
        self._places = [layer_and_module(row.fqn or row.key_b) for row in diff.rows]
        self._at_b = {row.key_b: n for n, row in enumerate(diff.rows)}
        self._at_a: dict[str, int] = {}
        for n, row in enumerate(diff.rows):
            for key in row.keys_a:
                self._at_a.setdefault(key, n)

    def find(self, key: str) -> int | None:
        """Return the position of the row with this key in ``b``, or else in ``a``."""
        return self._at_b.get(key, self._at_a.get(key))

    def matching(self, pattern: str, role: str) -> Array:
        """Return ``(rows,) bool``: rows of a role whose key in ``b`` contains a match of a regular expression.

        Raises:
            re.error, OverflowError, RecursionError: it is not a valid regular expression.
        """
        keep = np.ones(len(self.keys), bool)
        if pattern:
            search = re.compile(pattern).search
            keep[:] = [search(key) is not None for key in self.keys]
        if role:
            keep &= self.roles == role
        return keep

    def pictured(self, role: str) -> str:
        """Return the role to show in the grid: the given one, else weights, else the role with the most tensors."""
        if role or not len(self.roles):
            return role
        names, counts = np.unique(self.roles.astype(str), return_counts=True)
        return "param" if "param" in names else str(names[counts.argmax()])

    def grid(self, keep: Array) -> Grid:
        """Arrange the chosen rows by layer and module."""
        chosen = np.flatnonzero(keep)
        places = [self._places[at] for at in chosen.tolist()]
        columns, layers = _columns([layer for layer, _, _ in places])
        rows, modules = _rows([(head, module) for _, head, module in places])
        place = rows * max(len(layers), 1) + columns
        order = np.lexsort((self._value[chosen], self._kind[chosen], place))
        last = np.flatnonzero(np.diff(place[order], append=-1))
        counts = np.bincount(place, minlength=1)
        changed = np.bincount(place, weights=self._differs[chosen], minlength=1)
        cells = []
        for n in order[last].tolist():
            at, where = int(chosen[n]), int(place[n])
            kind = KINDS[self._kind[at]]
            value = float(self._value[at]) if kind == "changed" else math.nan
            cells.append(
                GridCell(int(columns[n]), int(rows[n]), kind, value, at, int(counts[where]), int(changed[where]))
            )
        return Grid(tuple(layers), tuple(modules), tuple(cells), chosen, place)


@lru_cache(1 << 18)
def layer_and_module(name: str) -> tuple[int, str, str]:
    """Return ``(layer, text before it, text after it)``; the layer is −1 if the name has no layer number."""
    found = _LAYER.search(name)
    if found is None or found.end() == len(name) or len(found[1]) > 6:
        return -1, "", name
    return int(found[1]), name[: found.start()], _EXPERT.sub("experts.*", name[found.end() + 1 :])


def _is_urgent(row: TensorDiff) -> bool:
    return row.status == "shape" or (row.comparison is not None and bool(row.comparison.nan_new))


def _kind(row: TensorDiff) -> tuple[int, float]:
    c = row.comparison
    if row.status == "shape":
        return KINDS.index("different shape"), 0.0
    if c is not None and c.nan_new:
        return KINDS.index("NaN in B only"), 0.0
    if row.status in ("unread", "unknown"):
        return KINDS.index("not compared"), 0.0
    relative = None if c is None else c.rel_l2
    if row.status in ("equal", "rounded") or (relative is not None and c is not None and not c.changed):
        return KINDS.index("equal"), 0.0
    if not relative:
        return KINDS.index("changed, not measured"), 0.0
    return KINDS.index("changed"), relative


def _columns(found: Sequence[int]) -> tuple[Array, list[str]]:
    """Return the column of each tensor and the names of the columns; neighbours share one if there are too many."""
    numbers = np.asarray(found, np.int64)
    layers = np.unique(numbers[numbers >= 0])
    step = max(-(-len(layers) // COLUMNS), 1)
    first = int((numbers < 0).any())
    columns = np.where(numbers < 0, 0, first + np.searchsorted(layers, numbers) // step)
    names = [NO_LAYER] * first
    for start in range(0, len(layers), step):
        part = layers[start : start + step].tolist()
        names.append(str(part[0]) if len(part) == 1 else f"{part[0]}–{part[-1]}")
    return columns.astype(np.int64), names


def _rows(found: Sequence[tuple[str, str]]) -> tuple[Array, list[str]]:
    """Return the row of each tensor and the names of the rows; modules with a common prefix share one if too many."""
    places = list(dict.fromkeys(found))
    names: dict[tuple[str, str], str] = {}
    for depth in (99, 4, 3, 2, 1):
        names = {place: _cut(place[1], depth) for place in places}
        heads: dict[str, set[str]] = {}
        for (head, _), name in names.items():
            heads.setdefault(name, set()).add(head)
        names = {p: f"{p[0]}.{name}" if len(heads[name]) > 1 and p[0] else name for p, name in names.items()}
        if len(set(names.values())) <= ROWS:
            break
    else:
        kept = list(dict.fromkeys(names.values()))[: ROWS - 1]
        names = {place: name if name in kept else "others" for place, name in names.items()}
    order = {name: n for n, name in enumerate(dict.fromkeys(names.values()))}
    at = {place: order[name] for place, name in names.items()}
    return np.array([at[place] for place in found], np.int64), [safe(name) for name in order]


def _cut(name: str, depth: int) -> str:
    parts = name.split(".")
    return name if len(parts) <= depth else ".".join([*parts[:depth], "*"])
