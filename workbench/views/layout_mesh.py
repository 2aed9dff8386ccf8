"""The position of each holder of a layout on the page: its coordinates as rows and columns.

::

    dp=2, tp=4              tp 0  1  2  3
                   dp=0        0  1  2  3        the innermost axis across, the others down;
                   dp=1        4  5  6  7        more than WIDEST are wrapped
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from workbench.analysis.layout import Layout
from workbench.core.arrays import Array

__all__ = ["Standing", "standing"]

WIDEST = 32
GAP = 0.35  #: of a row, between blocks of the outer axes


@dataclass(frozen=True, eq=False)
class Standing:
    """Unit cells, one for each holder.

    Attributes:
        x, y: ``(H,)`` left and upper edges.
        empty: ``(E, 2)`` cells of the mesh whose rank stored nothing.
        rows: middle of each row and its label: the coordinates that its holders share.
        across: label of the axis that goes across.
        columns, height: of the whole picture.
    """

    x: Array
    y: Array
    empty: Array
    rows: list[tuple[float, str]]
    across: str
    columns: int
    height: float

    def at(self, x: float, y: float) -> int | None:
        """Return the holder whose cell contains a point."""
        hit = np.flatnonzero((self.x <= x) & (x < self.x + 1) & (self.y <= y) & (y < self.y + 1))
        return int(hit[0]) if len(hit) else None


def standing(found: Layout) -> Standing:
    """Place the holders of a layout; those without coordinates follow below the others, in their order."""
    places, mesh = found.inferred.places, found.mesh
    count = len(found.holders)
    x, y = np.zeros(count), np.zeros(count)
    axes = [axis for axis, size in enumerate(mesh.shape) if size > 1]
    known = (places[:, axes] >= 0).all(axis=1) if axes else np.zeros(count, bool)
    rows: list[tuple[float, str]] = []
    empty = np.zeros((0, 2))
    across, width, top = "", 1, 0.0
    if axes and known.any():
        inner, outer = axes[-1], axes[:-1]
        size = mesh.shape[inner]
        width, lines = min(size, WIDEST), -(-size // WIDEST)
        across = "" if mesh.axes[inner] == "ranks" else mesh.axes[inner]
        blocks = int(np.prod([mesh.shape[axis] for axis in outer], dtype=np.int64))
        last = mesh.shape[outer[-1]] if outer else 1

        def high(block: Array, line: Array) -> Array:
            gaps = block // last if lines == 1 else block
            return np.asarray(block * lines + line + GAP * gaps)

        block = np.zeros(count, np.int64)
        for axis in outer:
            block = block * mesh.shape[axis] + places[:, axis]
        here = places[:, inner]
        x = np.where(known, here % WIDEST, 0).astype(np.float64)
        y = np.where(known, high(block, here // WIDEST), 0.0)
        if blocks * size <= 4096:
            every = np.arange(blocks * size)
            there = np.zeros(len(every), bool)
            there[(block * size + here)[known]] = True
            lack = every[~there]
            empty = np.stack([lack % size % WIDEST, high(lack // size, lack % size // WIDEST)], axis=1)
        for number in sorted(set(block[known].tolist())):
            rest, words = number, []
            for axis in reversed(outer):
                words.append(f"{mesh.axes[axis]}={rest % mesh.shape[axis]}")
                rest //= mesh.shape[axis]
            rows.append((float(high(np.array(number), np.array(0))) + 0.5 * lines, " ".join(reversed(words))))
        top = float(high(np.array(blocks - 1), np.array(lines - 1))) + 1 + GAP
    left = np.flatnonzero(~known)
    if len(left):
        wide = min(len(left), 16)
        width = max(width, wide)
        x[left], y[left] = np.arange(len(left)) % wide, top + np.arange(len(left)) // wide
        if known.any():
            rows.append((top + 0.5, "position not stored"))
        top += -(-len(left) // wide) + GAP
    return Standing(x, y, empty, rows, across, width, max(top - GAP, 1.0))
