"""Boxes: axis-aligned pieces of n-d tensors, many at a time.

A set of N boxes of up to D dimensions is two ``int64`` arrays ``offsets`` and ``sizes`` of shape ``(N, D)``. Tensors
with fewer dimensions are padded on the right with offset 0 and size 1, so a scalar is a box of volume 1 and all of
the arithmetic below is the same for every rank of tensor::

            0      4      8                 offsets  sizes
          0 ┌──────┬──────┐            a    (0, 0)   (3, 4)
            │  a   │  b   │            b    (0, 4)   (3, 4)
          3 ├──────┴──────┤            c    (3, 0)   (2, 8)
            │      c      │
          5 └─────────────┘
"""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["distinct", "flat_ranges", "group_join", "intersect", "missing", "overlapping", "volume"]

Ints = np.ndarray[Any, np.dtype[np.int64]]


def volume(sizes: Ints) -> Ints:
    """Elements in each box: ``(N,)`` for sizes of shape ``(N, D)``."""
    return np.prod(sizes, axis=-1, dtype=np.int64)


def intersect(offsets_a: Ints, sizes_a: Ints, offsets_b: Ints, sizes_b: Ints) -> tuple[Ints, Ints]:
    """Common part of boxes, pairwise with broadcasting; a size of 0 somewhere means there is none."""
    low = np.maximum(offsets_a, offsets_b)
    high = np.minimum(offsets_a + sizes_a, offsets_b + sizes_b)
    return low, np.maximum(high - low, 0)


def group_join(
    group_a: Ints, offsets_a: Ints, sizes_a: Ints, group_b: Ints, offsets_b: Ints, sizes_b: Ints
) -> tuple[Ints, Ints]:
    """All pairs ``(i, j)`` of the same group whose boxes share at least one element.

    An interval join on one axis (the one that tells the boxes of ``b`` apart best, chosen per group), then a filter
    on the others: O((N + M + pairs) log M), where the usual nested loop is O(N·M). Chunks of a tensor almost always
    form a grid, on which the axis chosen leaves few pairs to filter.

    Returns:
        two index arrays into ``a`` and ``b``; ordered by ``i``, then by position along the axis.
    """
    keep_a, keep_b = np.flatnonzero(volume(sizes_a) > 0), np.flatnonzero(volume(sizes_b) > 0)
    if not len(keep_a) or not len(keep_b):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    groups = distinct(group_b[keep_b])
    ga, gb = np.searchsorted(groups, group_a[keep_a]), np.searchsorted(groups, group_b[keep_b])
    known = (ga < len(groups)) & (groups[np.minimum(ga, len(groups) - 1)] == group_a[keep_a])
    keep_a, ga = keep_a[known], ga[known]
    axis = _best_axis(gb, offsets_b[keep_b], len(groups))

    rows_a, rows_b = np.arange(len(keep_a)), np.arange(len(keep_b))
    low_a, low_b = offsets_a[keep_a][rows_a, axis[ga]], offsets_b[keep_b][rows_b, axis[gb]]
    high_a, high_b = low_a + sizes_a[keep_a][rows_a, axis[ga]], low_b + sizes_b[keep_b][rows_b, axis[gb]]
    low_a, low_b, high_a, high_b, span = _fit(low_a, low_b, high_a, high_b, len(groups))

    # group · span + coordinate keeps the groups apart on one number line
    order = np.argsort(gb * span + low_b, kind="stable")
    starts = (gb * span + low_b)[order]
    ends = np.maximum.accumulate((gb * span + high_b)[order])
    first = np.searchsorted(ends, ga * span + low_a, side="right")
    last = np.searchsorted(starts, ga * span + high_a, side="left")
    counts = np.maximum(last - first, 0)

    i = np.repeat(rows_a, counts)
    within = np.arange(len(i)) - np.repeat(np.cumsum(counts) - counts, counts)
    j = order[np.repeat(first, counts) + within]
    i, j = keep_a[i], keep_b[j]
    _, sizes = intersect(offsets_a[i], sizes_a[i], offsets_b[j], sizes_b[j])
    real = (sizes > 0).all(axis=1)
    return i[real], j[real]


def overlapping(group: Ints, offsets: Ints, sizes: Ints) -> tuple[Ints, Ints]:
    """Pairs ``i < j`` of boxes of the same group that share elements."""
    i, j = group_join(group, offsets, sizes, group, offsets, sizes)
    keep = i < j
    return i[keep], j[keep]


def missing(offset: Ints, size: Ints, offsets: Ints, sizes: Ints, *, limit: int = 8) -> list[tuple[Ints, Ints]]:
    """Parts of one box that no box of a set covers, as at most ``limit`` disjoint boxes.

    Args:
        offset, size: the wanted box, ``(D,)`` each.
        offsets, sizes: the boxes that are there, ``(N, D)`` each; they may overlap.
    """
    found: list[tuple[Ints, Ints]] = []
    if volume(size) > 0:
        low, extent = intersect(offset, size, offsets, sizes)
        real = (extent > 0).all(axis=1)
        low, extent = low[real], extent[real]
        _slabs(offset, offset + size, low, low + extent, 0, [], found, limit)
    return found


def flat_ranges(shapes: Ints, starts: Ints, stops: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Boxes that make up ranges ``[start, stop)`` of row-major tensors: at most ``2·D − 1`` a range.

    Flat buffers (ZeRO, FSDP1, Megatron's distributed optimizer, Paddle's sharding stage) store such ranges::

        shape (4, 6), range [4, 17):     . . . . a a      a  (0, 4) (1, 2)   range starts at 4
                                         b b b b b b      b  (1, 0) (1, 6)                   6
                                         c c c c c .      c  (2, 0) (1, 5)                  12

    Args:
        shapes: ``(N, D)``, padded on the right with 1.
        starts, stops: ``(N,)``, element positions inside the flattened tensor; clipped to it.

    Returns:
        ``(index, offsets, sizes, at)``: which range a box belongs to, the box, and the flat position of its first
        element. Boxes of a range come in flat order.
    """
    shapes = np.asarray(shapes, np.int64)
    count, dims = shapes.shape
    total = volume(shapes)
    starts, stops = np.clip(starts, 0, total), np.clip(stops, 0, total)
    pieces: list[tuple[Ints, Ints, Ints, Ints, int]] = []
    index = np.arange(count)
    lead, tail = starts.astype(np.int64), stops.astype(np.int64)
    # From the innermost axis outwards, cut off the ragged ends that do not fill whole rows of that axis.
    row = np.ones(count, np.int64)  # elements of one step along `axis`
    for axis in range(dims - 1, -1, -1):
        whole = row * shapes[:, axis]
        up = np.minimum(-(-lead // np.maximum(whole, 1)) * whole, tail) if axis else tail
        up = np.maximum(up, lead)
        pieces.append((index, lead, up, row.copy(), axis))
        down = np.maximum(tail // np.maximum(whole, 1) * whole, up) if axis else tail
        pieces.append((index, down, tail, row.copy(), axis))
        lead, tail, row = up, down, whole
    parts = [_box_of(shapes, *piece) for piece in pieces]
    index, offsets, sizes, at = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.lexsort((at, index))
    return index[order], offsets[order], sizes[order], at[order]


def distinct(values: Ints) -> Ints:
    """Sorted distinct values; ``np.unique`` would import ``numpy.ma`` for 20 ms at the first slice of a session."""
    ordered = np.sort(values)
    return ordered[np.concatenate([[True], ordered[1:] != ordered[:-1]])] if len(ordered) else ordered


def _box_of(shapes: Ints, index: Ints, start: Ints, stop: Ints, row: Ints, axis: int) -> tuple[Ints, Ints, Ints, Ints]:
    """One box a range that starts and stops on multiples of ``row`` inside one row of the axis further out."""
    real = stop > start
    index, start, stop, row, shape = index[real], start[real], stop[real], row[real], shapes[index[real]]
    offsets, sizes = np.zeros_like(shape), np.ones_like(shape)
    rest = start // row
    offsets[:, axis] = rest % shape[:, axis] if axis else rest
    sizes[:, axis] = (stop - start) // row
    sizes[:, axis + 1 :] = shape[:, axis + 1 :]
    for outer in range(axis - 1, -1, -1):
        rest = rest // shape[:, outer + 1]
        offsets[:, outer] = rest % shape[:, outer] if outer else rest
    return index, offsets, sizes, start


def _best_axis(group: Ints, offsets: Ints, groups: int) -> Ints:
    """For each group, the axis along which its boxes have the most distinct offsets."""
    dims = offsets.shape[1]
    distinct = np.ones((groups, dims), np.int64)
    for axis in range(dims):
        column = offsets[:, axis]
        if column.any():
            order = np.lexsort((column, group))
            g, c = group[order], column[order]
            new = np.ones(len(g), bool)
            new[1:] = (g[1:] != g[:-1]) | (c[1:] != c[:-1])
            distinct[:, axis] = np.bincount(g[new], minlength=groups)
    return np.argmax(distinct, axis=1)


def _fit(low_a: Ints, low_b: Ints, high_a: Ints, high_b: Ints, groups: int) -> tuple[Ints, Ints, Ints, Ints, int]:
    """Coordinates small enough that ``group · span + coordinate`` fits 63 bits: ranks, where the numbers do not."""
    span = int(max(high_a.max(initial=0), high_b.max(initial=0))) + 1
    if groups * span < 1 << 62:
        return low_a, low_b, high_a, high_b, span
    values, inverse = np.unique(np.concatenate([low_a, low_b, high_a, high_b]), return_inverse=True)
    cuts = np.cumsum([len(low_a), len(low_b), len(high_a)])
    a, b, c, d = np.split(inverse.astype(np.int64), cuts)
    return a, b, c, d, len(values) + 1


def _slabs(
    low: Ints, high: Ints, lows: Ints, highs: Ints, axis: int, done: list[tuple[int, int]],
    found: list[tuple[Ints, Ints]], limit: int,
) -> None:  # fmt: skip
    """Cut along one axis at every edge, and look into each slab with the boxes that cross it whole."""
    if len(found) >= limit:
        return
    if axis == len(low):
        if not len(lows):
            found.append((np.array([a for a, _ in done], np.int64), np.array([b - a for a, b in done], np.int64)))
        return
    if not len(lows):  # nothing here at all: one box, not its slabs
        rest = [(int(low[k]), int(high[k])) for k in range(axis, len(low))]
        _slabs(low, high, lows, highs, len(low), done + rest, found, limit)
        return
    edges = distinct(np.concatenate([[low[axis], high[axis]], lows[:, axis], highs[:, axis]]))
    for a, b in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        inside = (lows[:, axis] <= a) & (highs[:, axis] >= b)
        _slabs(low, high, lows[inside], highs[inside], axis + 1, [*done, (a, b)], found, limit)
