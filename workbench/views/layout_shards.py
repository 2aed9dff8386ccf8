"""The boxes of one tensor on two of its axes, with the rank or file that stores each: the data of the shard map.

::

    (64, 8, 128) on 4 ranks            axis 2 ──►  ┌────────┬────────┐
    cut along axes 0 and 2        axis 0           │ rank 0 │ rank 1 │
    ──► axis 0 down, axis 2 across     │           ├────────┼────────┤
        (the two that are cut most)    ▼           │ rank 2 │ rank 3 │

Boxes that differ only on other axes coincide here: they are shown as one box, of *several* ranks if owners differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from workbench.analysis.layout import Layout
from workbench.core.arrays import Array
from workbench.errors import UsageError
from workbench.views.layout_canvas import PaintBoxes

BY = ("rank", "file")  #: meanings of a box's colour
SEVERAL = "several"


@dataclass(frozen=True, eq=False)
class TensorShards:
    """One tensor, projected onto two axes.

    Attributes:
        key, shape: of the tensor.
        down, across: the axes shown; ``None`` if the tensor has too few.
        boxes: distinct on these axes; ``code`` is an index into ``names``.
        names: ranks or files that store it, in order; :data:`SEVERAL` last, for coinciding boxes of several owners.
        chunks: number of chunks of each box.
        holes, overlaps: boxes that are stored in no chunk, and in more than one.
    """

    key: str
    shape: tuple[int, ...]
    down: int | None
    across: int | None
    boxes: PaintBoxes
    names: list[str]
    chunks: Array
    holes: PaintBoxes
    overlaps: PaintBoxes

    @property
    def extent(self) -> tuple[int, int]:
        """Number of elements across and down."""
        across = 1 if self.across is None else self.shape[self.across]
        down = 1 if self.down is None else self.shape[self.down]
        return max(across, 1), max(down, 1)


def shards(
    found: Layout, key: str, axes: tuple[int | None, int | None] | None = None, by: str = "rank"
) -> TensorShards:
    """Return the boxes of a tensor.

    Args:
        axes: down and across; ``None`` for the two that are split most.
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
    return TensorShards(
        key,
        shape,
        down,
        across,
        boxes,
        names,
        chunks,
        _listed(holes, len(shape), down, across),
        _listed(twice, len(shape), down, across),
    )


def axes_of(text: str, ndim: int) -> tuple[int | None, int | None] | None:
    """Parse ``"0,2"`` as the axes down and across; return ``None`` for an empty text or fewer than two axes.

    Raises:
        UsageError: these are not two different axes of the tensor.
    """
    if not text or ndim < 2:
        return None
    parts = [part.strip() for part in text.split(",")]
    if len(parts) == 2 and all(part.isdecimal() and len(part) < 4 for part in parts):
        down, across = (int(part) for part in parts)
        if down != across and max(down, across) < ndim:
            return down, across
    raise UsageError(f"axes {text!r} are not two different axes of a tensor with {ndim} axes; write, for example, 0,1")


def chunks_at(found: Layout, shown: TensorShards, x: float, y: float) -> Array:
    """Return the chunk rows whose boxes contain a point of the map."""
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


def _projected(offsets: Array, sizes: Array, down: int | None, across: int | None, code: Array) -> PaintBoxes:
    none = np.zeros(len(offsets), np.int64)
    left, width = (none, none + 1) if across is None else (offsets[:, across], sizes[:, across])
    top, height = (none, none + 1) if down is None else (offsets[:, down], sizes[:, down])
    return PaintBoxes(left, left + width, top, top + height, code)


def _distinct(every: PaintBoxes, several: int) -> tuple[PaintBoxes, Array, bool]:
    """Return distinct boxes, the chunks of each, and whether any has several owners (code ``several``)."""
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
    made = PaintBoxes(mine.left, mine.right, mine.top, mine.bottom, code)
    return made, np.diff(np.append(starts, len(order))), bool(mixed.any())


def _listed(
    boxes: Sequence[tuple[tuple[int, ...], tuple[int, ...]]], ndim: int, down: int | None, across: int | None
) -> PaintBoxes:
    offsets = np.array([low for low, _ in boxes], np.int64).reshape(len(boxes), ndim)
    sizes = np.array([size for _, size in boxes], np.int64).reshape(len(boxes), ndim)
    return _projected(offsets, sizes, down, across, np.zeros(len(boxes), np.int32))
