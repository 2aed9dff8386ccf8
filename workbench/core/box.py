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

import itertools
from typing import Any

import numpy as np

from workbench.core.arrays import Array, Ints

JOIN = 4_000_000  #: pairs examined at a time if not all are needed
REGION = 400  #: boxes tested in the time that a region itself costs
REGIONS = 20  #: regions examined per box: a millisecond per box; a grid with holes needs two
MOST = 50_000  #: regions examined for one box: two seconds


def volume(sizes: Ints) -> Ints:
    """Return the number of elements in each box: ``(N,)`` for sizes of shape ``(N, D)``."""
    found = np.ones(sizes.shape[:-1], np.int64)
    for axis in range(sizes.shape[-1]):  # one pass per column is several times as fast as np.prod over short rows
        found *= sizes[..., axis]
    return found


def dot(position: Ints, strides: Ints) -> Ints:
    """Return ``(position · strides).sum()`` of each row: ``(N,)`` for two arrays of shape ``(N, D)``."""
    found = np.zeros(len(position), np.int64)
    for axis in range(position.shape[1]):  # as in `volume`
        found += position[:, axis] * strides[:, axis]
    return found


def row_major(sizes: Ints) -> Ints:
    """Return the strides ``(N, D)``, in elements, of contiguous boxes of these sizes."""
    steps = np.ones(sizes.shape, np.int64)
    for axis in range(sizes.shape[1] - 1, 0, -1):  # one pass per column is faster than np.cumprod over short rows
        np.multiply(steps[:, axis], np.maximum(sizes[:, axis], 1), out=steps[:, axis - 1])
    return steps


def intersect(offsets_a: Ints, sizes_a: Ints, offsets_b: Ints, sizes_b: Ints) -> tuple[Ints, Ints]:
    """Return the intersection of boxes, pairwise with broadcasting; a size of 0 on an axis means it is empty."""
    low = np.maximum(offsets_a, offsets_b)
    high = np.minimum(offsets_a + sizes_a, offsets_b + sizes_b)
    return low, np.maximum(high - low, 0)


def spans(starts: Ints, counts: Ints) -> Ints:
    """Concatenate the ranges ``starts[k], starts[k] + 1, …`` of ``counts[k]`` numbers each."""
    return np.repeat(starts - (np.cumsum(counts) - counts), counts) + np.arange(int(counts.sum()))


def counted(counts: Ints) -> tuple[Ints, Ints]:
    """Return ``0, 0, 0, 1, …`` with ``counts[k]`` times ``k``, and beside it ``0, 1, 2, 0, …``."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)


def sums(group: Ints, values: Ints, count: int) -> Ints:
    """Return the exact sum of the values of each of ``count`` groups."""
    found = np.zeros(count, np.int64)
    np.add.at(found, group, values)
    return found


def padded(columns: Array, dims: int, fill: int) -> Array:
    """Return columns ``(N, D)`` with ``dims`` axes, those added filled with ``fill``; themselves if none are."""
    more = dims - columns.shape[1]
    return np.pad(columns, ((0, 0), (0, more)), constant_values=fill) if more else columns


def group_join(
    group_a: Ints, offsets_a: Ints, sizes_a: Ints, group_b: Ints, offsets_b: Ints, sizes_b: Ints
) -> tuple[Ints, Ints]:
    """Return all pairs ``(i, j)`` of the same group whose boxes share one element or more.

    This is an interval join on one axis (the one on which the fewest pairs should meet, chosen per group), followed by
    a filter on the others: O((N + M + pairs) log M), while a nested loop is O(N·M). Chunks of a tensor almost always
    form a grid, for which the chosen axis leaves few pairs to filter.

    Returns:
        two index arrays into ``a`` and ``b``; ordered by ``i``, then by position along the axis.
    """
    keep_a, keep_b = _full(sizes_a), _full(sizes_b)
    ga, gb = np.asarray(group_a)[keep_a].astype(np.int64), np.asarray(group_b)[keep_b].astype(np.int64)
    if not len(ga) or not len(gb):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    low_a, low_b, size_a, size_b = offsets_a[keep_a], offsets_b[keep_b], sizes_a[keep_a], sizes_b[keep_b]
    ga, gb, groups = _numbered(ga, gb)
    axis = _best_axis(ga, low_a, size_a, gb, low_b, size_b, groups)
    i, j, exact = _sweep(ga, low_a, size_a, gb, low_b, size_b, groups, axis)
    real = np.ones(len(i), bool)
    for k in _cut_axes(low_a, low_b):
        if not (exact and (axis == k).all()):
            begin_a, begin_b = low_a[:, k], low_b[:, k]
            real &= (begin_a[i] < (begin_b + size_b[:, k])[j]) & (begin_b[j] < (begin_a + size_a[:, k])[i])
    if not real.all():
        i, j = i[real], j[real]
    rows_a = i if isinstance(keep_a, slice) else keep_a[i]
    return rows_a, j if isinstance(keep_b, slice) else keep_b[j]


def overlapping(group: Ints, offsets: Ints, sizes: Ints, *, limit: int | None = None) -> tuple[Ints, Ints]:
    """Return the pairs ``i < j`` of boxes of the same group that share elements.

    Args:
        limit: maximum number of pairs per group, among its first boxes. A group of N boxes may have N²/2 pairs; with a
            limit only a few million are ever held.
    """
    full = _full(sizes)
    rows = np.arange(len(group))[full][_doubtful(group[full], offsets[full], sizes[full])]
    if limit is None:
        return _pairs(rows, rows, group, offsets, sizes)
    rows = rows[np.argsort(group[rows], kind="stable")]
    _, first, counts = np.unique(group[rows], return_index=True, return_counts=True)
    found = [(np.empty(0, np.int64), np.empty(0, np.int64))]
    batch: list[Ints] = []
    room = JOIN
    for start, count in zip(first.tolist(), counts.tolist(), strict=True):
        mine = rows[start : start + count]
        if count * count > JOIN:
            found += _first_pairs(mine, group, offsets, sizes, limit)
            continue
        if count * count > room:
            found.append(_capped(np.concatenate(batch), group, offsets, sizes, limit))
            batch, room = [], JOIN
        batch.append(mine)
        room -= count * count
    if batch:
        found.append(_capped(np.concatenate(batch), group, offsets, sizes, limit))
    return np.concatenate([i for i, _ in found]), np.concatenate([j for _, j in found])


def missing(offset: Ints, size: Ints, offsets: Ints, sizes: Ints, *, limit: int = 8) -> list[tuple[Ints, Ints]]:
    """Return the parts of one box that no box of a set covers, as up to ``limit`` disjoint boxes.

    The result is empty if everything is covered.

    Args:
        offset, size: the requested box, ``(D,)`` each.
        offsets, sizes: the existing boxes, ``(N, D)`` each; they may overlap.

    Raises:
        Tangled: see :func:`owned`.
    """
    found = (part for part in owned(offset, size, offsets, sizes) if part[0] < 0)
    return [(low, extent) for _, low, extent in itertools.islice(found, limit)]


def owned(offset: Ints, size: Ints, offsets: Ints, sizes: Ints) -> list[tuple[int, Ints, Ints]]:
    """Split one box into disjoint boxes, each with the first box of a set that covers it, or −1 if none does.

    The box is halved at the median of the edges inside it until one box, or none, covers the rest: O(N^(D/2)) parts at
    worst and O(N) for a grid, while splitting every axis at every edge makes N^D. Halves with the same owner are joined
    again.

    Args:
        offset, size: the box, ``(D,)`` each.
        offsets, sizes: the boxes of the set, ``(N, D)`` each, the first first; they may overlap.

    Returns:
        owner, offsets and sizes of each part.

    Raises:
        Tangled: the boxes overlap in too many ways to examine (:data:`REGIONS`, :data:`MOST`).
    """
    if volume(size) <= 0:
        return []
    low, extent = intersect(offset, size, offsets, sizes)
    rows = np.flatnonzero((extent > 0).all(axis=1))
    disjoint = not _doubtful(np.zeros(len(rows), np.int64), low[rows], extent[rows]).any()
    halving = _Halving(disjoint, REGION * min(1000 + REGIONS * len(rows), MOST))
    parts = halving.parts(offset.astype(np.int64), offset + size, rows, low[rows], (low + extent)[rows])
    return [(owner, np.array(a, np.int64), np.array(b, np.int64) - a) for owner, a, b in parts]


class Tangled(Exception):
    """Boxes overlap in too many ways to examine. Those of a real save do not overlap at all."""


def flat_ranges(shapes: Ints, starts: Ints, stops: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Return the boxes that make up ranges ``[start, stop)`` of row-major tensors: up to ``2·D − 1`` per range.

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


def cut(sizes: Ints, most: Ints) -> tuple[Ints, Ints, Ints]:
    """Cut boxes into parts that follow each other in row-major order, each of them a box.

    A part has one position on the axes before the one that it is cut along, and is complete on those after it::

        sizes (2, 6, 4), at most 8 elements     [0, 0:2, :]  [0, 2:4, :]  [0, 4:6, :]  [1, 0:2, :] …

    Args:
        sizes: ``(N, D)``.
        most: ``(N,)`` elements of a part; an element is not cut.

    Returns:
        ``(index, offsets, sizes)``: which box a part belongs to, its offset inside that box, and its size.
    """
    step = np.clip(most[:, None] // row_major(sizes), 1, np.maximum(sizes, 1))
    turns = -(-sizes // step)
    index, number = counted(volume(turns))
    offsets = number[:, None] // row_major(turns)[index] % turns[index] * step[index]
    return index, offsets, np.minimum(sizes[index] - offsets, step[index])


def distinct(values: Ints) -> Ints:
    """Return sorted distinct values; ``np.unique`` would import ``numpy.ma``, 20 ms at the first slice of a session."""
    ordered = np.sort(values)
    return ordered[np.concatenate([[True], ordered[1:] != ordered[:-1]])] if len(ordered) else ordered


def _box_of(shapes: Ints, index: Ints, start: Ints, stop: Ints, row: Ints, axis: int) -> tuple[Ints, Ints, Ints, Ints]:
    """Return one box for each range that starts and stops on multiples of ``row`` inside one row of the next outer
    axis.
    """
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


def _full(sizes: Ints) -> Any:
    """Return the boxes that are not empty as an index: a slice if no box is empty."""
    return slice(None) if (sizes > 0).all() else np.flatnonzero(volume(sizes) > 0)


def _numbered(ga: Ints, gb: Ints) -> tuple[Ints, Ints, int]:
    """Renumber groups with small numbers; positions in a catalog, the usual case, mostly are small already."""
    low, high = int(min(ga.min(), gb.min())), int(max(ga.max(), gb.max()))
    if high - low < 4 * (len(ga) + len(gb)) + 1000:
        return ga - low, gb - low, high - low + 1
    groups = distinct(np.concatenate([ga, gb]))
    return np.searchsorted(groups, ga), np.searchsorted(groups, gb), len(groups)


def _cut_axes(*offsets: Ints) -> list[int]:
    """Return the axes on which some box does not begin at 0; on all others, the (non-empty) boxes share elements."""
    return [axis for axis in range(offsets[0].shape[1]) if any(one[:, axis].any() for one in offsets)]


def _best_axis(ga: Ints, low_a: Ints, size_a: Ints, gb: Ints, low_b: Ints, size_b: Ints, groups: int) -> Ints:
    """Return for each group the axis on which the fewest pairs meet if boxes are random: (size a + size b) / span."""
    axes = _cut_axes(low_a, low_b)
    if len(axes) < 2:
        return np.full(groups, axes[0] if axes else 0)
    count_a, count_b = (np.maximum(np.bincount(g, minlength=groups), 1) for g in (ga, gb))
    meet = np.full((groups, low_a.shape[1]), np.inf)
    for axis in axes:
        span = np.ones(groups, np.int64)
        np.maximum.at(span, ga, low_a[:, axis] + size_a[:, axis])
        np.maximum.at(span, gb, low_b[:, axis] + size_b[:, axis])
        mean_a, mean_b = (
            np.bincount(ga, size_a[:, axis], groups) / count_a,
            np.bincount(gb, size_b[:, axis], groups) / count_b,
        )
        meet[:, axis] = (mean_a + mean_b) / span
    return np.argmin(meet, axis=1)


def _sweep(
    ga: Ints, low_a: Ints, size_a: Ints, gb: Ints, low_b: Ints, size_b: Ints, groups: int, axis: Ints
) -> tuple[Ints, Ints, bool]:
    """Return pairs whose intervals on their group's axis may meet; if ``exact`` is true, they do meet."""
    begin_a, begin_b, end_a, end_b = (
        _pick(column, axis, g) for column, g in ((low_a, ga), (low_b, gb), (size_a, ga), (size_b, gb))
    )
    end_a, end_b = end_a + begin_a, end_b + begin_b
    begin_a, begin_b, end_a, end_b, span = _fit(begin_a, begin_b, end_a, end_b, groups)
    # group · span + coordinate keeps the groups apart on one number line
    base_a, base_b = ga * span, gb * span
    starts = base_b + begin_b
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], (base_b + end_b)[order]
    reach = np.maximum.accumulate(ends)
    first = np.searchsorted(reach, base_a + begin_a, side="right")
    last = np.searchsorted(starts, base_a + end_a, side="left")
    counts = np.maximum(last - first, 0)
    i = np.repeat(np.arange(len(ga)), counts)
    return i, order[spans(first, counts)], bool((reach == ends).all())


def _pick(columns: Ints, axis: Ints, group: Ints) -> Ints:
    """Return, for each row, the column of its group's axis."""
    if (axis == axis[0]).all():
        return columns[:, axis[0]]
    return columns[np.arange(len(columns)), axis[group]]


def _pairs(some: Ints, every: Ints, group: Ints, offsets: Ints, sizes: Ints) -> tuple[Ints, Ints]:
    """Return pairs of overlapping boxes: first the lower row, from ``some``, then the other, from ``every``."""
    i, j = group_join(group[some], offsets[some], sizes[some], group[every], offsets[every], sizes[every])
    i, j = some[i], every[j]
    keep = i < j
    return i[keep], j[keep]


def _first_pairs(rows: Ints, group: Ints, offsets: Ints, sizes: Ints, limit: int) -> list[tuple[Ints, Ints]]:
    """Return up to ``limit`` overlapping pairs of one large group, joined some rows at a time."""
    found: list[tuple[Ints, Ints]] = []
    step = max(JOIN // len(rows), 1)
    for start in range(0, len(rows), step):
        i, j = _pairs(rows[start : start + step], rows, group, offsets, sizes)
        found.append((i[:limit], j[:limit]))
        limit -= len(found[-1][0])
        if limit <= 0:
            break
    return found


def _capped(rows: Ints, group: Ints, offsets: Ints, sizes: Ints, limit: int) -> tuple[Ints, Ints]:
    """Return up to ``limit`` pairs of each group; the rows are ordered by group."""
    i, j = _pairs(rows, rows, group, offsets, sizes)
    mine = group[i]
    starts = np.flatnonzero(np.diff(mine, prepend=mine[:1] - 1)) if len(mine) else np.empty(0, np.int64)
    place = np.arange(len(mine)) - np.repeat(starts, np.diff(np.append(starts, len(mine))))
    return i[place < limit], j[place < limit]


def _doubtful(group: Ints, offsets: Ints, sizes: Ints) -> Any:
    """Return which boxes (none empty) are in a group that comparing neighbours does not prove disjoint.

    Boxes ordered by offsets are disjoint if each begins where its neighbour ends, on the first axis on which their
    intervals differ: disjoint slabs, each of them split in the same way. This covers all grids and most other
    shardings.
    """
    if len(group) < 2:
        return np.zeros(len(group), bool)
    axes = _cut_axes(offsets)
    lows = [offsets[:, axis] for axis in axes]
    highs = [low + sizes[:, axis] for low, axis in zip(lows, axes, strict=True)]
    if (group[1:] >= group[:-1]).all() and not _clashes(group, lows, highs).any():
        return np.zeros(len(group), bool)  # in this order already, as in every catalog
    order = np.lexsort([*lows[::-1], group])
    ordered = group[order]
    clash = _clashes(ordered, [low[order] for low in lows], [high[order] for high in highs])
    return np.isin(group, ordered[1:][clash])


def _clashes(group: Ints, lows: list[Ints], highs: list[Ints]) -> Any:
    """Return, for each box except the first, whether it fails to follow on the one before it."""
    undecided = group[1:] == group[:-1]
    clash = np.zeros(len(undecided), bool)
    for low, high in zip(lows, highs, strict=True):
        alike = (low[1:] == low[:-1]) & (high[1:] == high[:-1])
        clash |= undecided & ~alike & (low[1:] < high[:-1])
        undecided &= alike
    return clash | undecided


def _fit(low_a: Ints, low_b: Ints, high_a: Ints, high_b: Ints, groups: int) -> tuple[Ints, Ints, Ints, Ints, int]:
    """Return coordinates so small that ``group · span + coordinate`` fits 63 bits: their ranks, if they are not."""
    span = int(max(high_a.max(initial=0), high_b.max(initial=0))) + 1
    if groups * span < 1 << 62:
        return low_a, low_b, high_a, high_b, span
    values, inverse = np.unique(np.concatenate([low_a, low_b, high_a, high_b]), return_inverse=True)
    cuts = np.cumsum([len(low_a), len(low_b), len(high_a)])
    a, b, c, d = np.split(inverse.astype(np.int64), cuts)
    return a, b, c, d, len(values) + 1


_Part = tuple[int, tuple[int, ...], tuple[int, ...]]  # owner, lows, highs


class _Halving:
    """The recursion of :func:`owned`; a region's boxes are clipped to it and ordered by rank."""

    def __init__(self, disjoint: bool, left: int) -> None:
        self.disjoint = disjoint
        self.left = left

    def parts(self, low: Ints, high: Ints, rows: Ints, lows: Ints, highs: Ints) -> list[_Part]:
        self.left -= REGION + len(rows)
        if self.left < 0:
            raise Tangled
        spans = (lows == low) & (highs == high)
        whole = np.flatnonzero(spans.all(axis=1))
        if len(whole):  # boxes that come later are hidden here
            end = int(whole[0]) + 1
            rows, lows, highs, spans = rows[:end], lows[:end], highs[:end], spans[:end]
        if len(rows) <= bool(len(whole)):
            return [(int(rows[0]) if len(rows) else -1, tuple(low.tolist()), tuple(high.tolist()))]
        if self.disjoint and int(volume(highs - lows).sum()) == int(volume(high - low)):
            return list(zip(rows.tolist(), map(tuple, lows.tolist()), map(tuple, highs.tolist()), strict=True))
        axis = int((~spans).sum(axis=0).argmax())
        edges = np.concatenate([lows[:, axis], highs[:, axis]])
        edges = np.sort(edges[(edges > low[axis]) & (edges < high[axis])])
        at = int(edges[len(edges) // 2])
        below, above = lows[:, axis] < at, highs[:, axis] > at
        middle_high, middle_low = high.copy(), low.copy()
        middle_high[axis] = middle_low[axis] = at
        ends, begins = highs[below], lows[above]
        ends[:, axis] = np.minimum(ends[:, axis], at)
        begins[:, axis] = np.maximum(begins[:, axis], at)
        first = self.parts(low, middle_high, rows[below], lows[below], ends)
        return _joined(first, self.parts(middle_low, high, rows[above], begins, highs[above]), axis, at)


def _joined(first: list[_Part], second: list[_Part], axis: int, at: int) -> list[_Part]:
    """Join the parts of two halves; parts of one owner on both sides of the cut become one."""

    def across(part: _Part) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        owner, low, high = part
        return owner, low[:axis] + low[axis + 1 :], high[:axis] + high[axis + 1 :]

    ending = {across(part): k for k, part in enumerate(first) if part[2][axis] == at}
    rest: list[_Part] = []
    for part in second:
        k = ending.get(across(part)) if part[1][axis] == at else None
        if k is None:
            rest.append(part)
        else:
            first[k] = (part[0], first[k][1], part[2])
    return first + rest
