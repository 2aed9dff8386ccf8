"""The boxes of one tensor on two of its axes, with who stores each: what the shard map is drawn from.

::

    (64, 8, 128) on 4 ranks            axis 2 ──►  ┌────────┬────────┐
    cut along axes 0 and 2        axis 0           │ rank 0 │ rank 1 │
    ──► axis 0 down, axis 2 across     │           ├────────┼────────┤
        (the two that are cut most)    ▼           │ rank 2 │ rank 3 │

Boxes that differ on the other axes alone lie on each other here: one box, of *several* ranks if they are not of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench.analysis.layout import Layout
from workbench.errors import UsageError
from workbench.views.layout_paint import Boxes

__all__ = ["BY", "SEVERAL", "Shards", "axes_of", "chunks_at", "shards"]

Array = np.ndarray[Any, Any]
BY = ("rank", "file")  #: what colours a box
SEVERAL = "several"


@dataclass(frozen=True, eq=False)
class Shards:
    """One tensor, flattened onto two axes.

    Attributes:
        key, shape: of the tensor.
        down, across: the axes that are shown; ``None`` where it has none left.
        boxes: distinct on these axes; ``code`` counts into ``names``.
        names: ranks or files that store it, in order; :data:`SEVERAL` last, where boxes of several lie on each other.
        chunks: of each box.
        holes, overlaps: boxes that nothing stores, and that two chunks do.
    """

    key: str
    shape: tuple[int, ...]
    down: int | None
    across: int | None
    boxes: Boxes
    names: list[str]
    chunks: Array
    holes: Boxes
    overlaps: Boxes

    @property
    def extent(self) -> tuple[int, int]:
        """Elements across and down."""
        across = 1 if self.across is None else self.shape[self.across]
        down = 1 if self.down is None else self.shape[self.down]
        return max(across, 1), max(down, 1)


def shards(found: Layout, key: str, axes: tuple[int | None, int | None] | None = None, by: str = "rank") -> Shards:
    """The boxes of a tensor.

    Args:
        axes: down and across; ``None`` for the two that are cut most.
        by: one of :data:`BY`.

    Raises:
        TensorNotFoundError: no tensor of that name.
    """
    found.placed(key)
    catalog = found.catalog
    tensor = catalog.index[key]
    shape = catalog.shape_of(tensor)
    span = catalog.rows_of(tensor)
    offsets, sizes = catalog.offsets[span], catalog.sizes[span]
    down, across = _most_cut(offsets, len(shape)) if axes is None else axes
    owner = found.holders.of_chunk[span] if by == "rank" else catalog.file[span].astype(np.int64)
    used, code = np.unique(owner, return_inverse=True)
    label: Sequence[str] = found.holders.label if by == "rank" else catalog.files
    names = [label[k] for k in used.tolist()]
    every = _projected(offsets, sizes, down, across, code.astype(np.int32))
    boxes, chunks = every, np.ones(len(every), np.int64)
    if len(shape) > 2 or catalog.replica[span].any():
        boxes, chunks, mixed = _distinct(every, len(names))
        names += [SEVERAL] if mixed else []
    holes = [(low, size) for t, low, size in found.covered.holes if t == tensor]
    twice = [(low, size) for t, low, size, *_ in found.covered.overlaps if t == tensor]
    return Shards(
        key, shape, down, across, boxes, names, chunks, _listed(holes, len(shape), down, across),
        _listed(twice, len(shape), down, across),
    )  # fmt: skip


def axes_of(text: str, ndim: int) -> tuple[int | None, int | None] | None:
    """Down and across from ``"0,2"``; ``None`` for an empty text or a tensor of less than two axes.

    Raises:
        UsageError: they are no two different axes of the tensor.
    """
    if not text or ndim < 2:
        return None
    parts = [part.strip() for part in text.split(",")]
    if len(parts) == 2 and all(part.isdecimal() and len(part) < 4 for part in parts):
        down, across = (int(part) for part in parts)
        if down != across and max(down, across) < ndim:
            return down, across
    raise UsageError(f"axes {text!r} are no two different axes of a tensor of {ndim}; 0,1 would be")


def chunks_at(found: Layout, shown: Shards, x: float, y: float) -> Array:
    """Chunk rows that a point of the map lies in."""
    catalog = found.catalog
    span = catalog.rows_of(catalog.index[shown.key])
    inside = np.ones(span.stop - span.start, bool)
    for axis, at in ((shown.across, x), (shown.down, y)):
        if axis is not None:
            low = catalog.offsets[span, axis]
            inside &= (low <= at) & (at < low + catalog.sizes[span, axis])
    return span.start + np.flatnonzero(inside)


def _most_cut(offsets: Array, ndim: int) -> tuple[int | None, int | None]:
    if ndim == 0:
        return None, None
    if ndim == 1:
        return None, 0
    cuts = [len(np.unique(offsets[:, axis])) for axis in range(ndim)]
    order = sorted(range(ndim), key=lambda axis: (-cuts[axis], -axis if cuts[axis] == 1 else axis))
    first, second = sorted(order[:2])
    return first, second


def _projected(offsets: Array, sizes: Array, down: int | None, across: int | None, code: Array) -> Boxes:
    none = np.zeros(len(offsets), np.int64)
    left, width = (none, none + 1) if across is None else (offsets[:, across], sizes[:, across])
    top, height = (none, none + 1) if down is None else (offsets[:, down], sizes[:, down])
    return Boxes(left, left + width, top, top + height, code)


def _distinct(every: Boxes, several: int) -> tuple[Boxes, Array, bool]:
    """Boxes that are not alike, the chunks of each, and whether any has several owners: its code is ``several``."""
    if not len(every):
        return every, np.zeros(0, np.int64), False
    columns = (every.right, every.left, every.bottom, every.top)
    order = np.lexsort(columns)
    new = np.ones(len(order), bool)
    new[1:] = np.any([np.diff(column[order]) != 0 for column in columns], axis=0)
    starts = np.flatnonzero(new)
    code = every.code[order]
    low, high = np.minimum.reduceat(code, starts), np.maximum.reduceat(code, starts)
    mine = every.take(order[starts])
    mixed = low != high
    code = np.where(mixed, several, low).astype(np.int32)
    made = Boxes(mine.left, mine.right, mine.top, mine.bottom, code)
    return made, np.diff(np.append(starts, len(order))), bool(mixed.any())


def _listed(
    boxes: Sequence[tuple[tuple[int, ...], tuple[int, ...]]], ndim: int, down: int | None, across: int | None
) -> Boxes:
    offsets = np.array([low for low, _ in boxes], np.int64).reshape(len(boxes), ndim)
    sizes = np.array([size for _, size in boxes], np.int64).reshape(len(boxes), ndim)
    return _projected(offsets, sizes, down, across, np.zeros(len(boxes), np.int32))
