"""Carry out the reads of one tensor: plan the selection's box, then copy from the chunks that it meets.

Bits are moved, never numbers: arrays have the unsigned type of the element's size, so NaN payloads and negative zero
survive and every dtype takes the same path.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np

from workbench.core import box, memory
from workbench.core.arrays import Array, Ints
from workbench.core.catalog import row_major
from workbench.core.executors import in_order
from workbench.core.payload import Payloads
from workbench.core.plan import ReadItem, ReadPlan, plan_reads, slices
from workbench.core.region import Axis, Region
from workbench.core.select import Selection

TOGETHER = 1 << 20  #: bytes of boxes that are read at once


def read_selection(payloads: Payloads, tensor: int, selection: Selection, *, replica: int = 0) -> Array:
    """Read the selected elements in the raw type, contiguous, into memory of their own.

    Raises:
        HoleError: some element of the selection's box is stored nowhere.
        CorruptError: two chunks hold different values for one element.
        UnsafeError: far more bytes of elements than are stored.
    """
    catalog = payloads.catalog
    dtype, ndim = catalog.dtype_of(tensor), int(catalog.ndim[tensor])
    if selection.is_whole and selection.shape == (full := catalog.shape_of(tensor)):
        whole = _together(payloads, tensor, np.zeros((1, ndim), np.int64), np.array([full], np.int64), replica)
        if whole is not None:
            return whole[0]
    repeated: dict[int, Array] = {}
    axes = list(selection.axes)
    for at, axis in enumerate(axes):
        if isinstance(axis, np.ndarray) and (np.diff(axis) <= 0).any():  # read in the order of the file, once each
            axes[at], repeated[at] = np.unique(axis, return_inverse=True)
    ordered = Selection(tuple(axes))
    offsets, sizes = _padded(ordered, catalog.shape.shape[1])
    shape = tuple(1 if isinstance(axis, int) else len(axis) for axis in axes)
    if 0 in shape:
        return np.empty(selection.shape, dtype.raw)
    plan = plan_reads(catalog, np.array([tensor]), offsets, sizes, replica=replica)
    payloads.check_expanded(plan.row)
    out = memory.empty(shape, dtype.raw)
    with payloads.pool.keeping():
        filled = np.zeros(shape, bool) if plan.twice(sizes)[0] else None
        _copy(payloads, plan, ndim, ordered, offsets[0], out, filled)
    for at, inverse in repeated.items():
        out = out.take(inverse, axis=at)
    return out.reshape(selection.shape)


def read_box(payloads: Payloads, tensor: int, key: tuple[slice, ...], *, replica: int = 0) -> Array:
    """Read one box of a tensor, as :func:`read_selection`."""
    return read_selection(payloads, tensor, Selection(tuple(range(a.start, a.stop) for a in key)), replica=replica)


def read_boxes(payloads: Payloads, tensor: int, offsets: Ints, sizes: Ints, *, replica: int = 0) -> Iterator[Array]:
    """Yield boxes of one tensor in the raw type; they are planned together, because planning dominates small boxes.

    Each array is read-only and valid until the next one, because its memory is reused.

    Args:
        offsets, sizes: ``(R, ndim)`` boxes inside the tensor's shape.

    Raises:
        as :func:`read_selection`; a hole in any box before the first is read.
    """
    if (found := _together(payloads, tensor, offsets, sizes, replica)) is not None:
        yield from map(_frozen, found)
        return
    catalog = payloads.catalog
    dtype, ndim, count = catalog.dtype_of(tensor), int(catalog.ndim[tensor]), len(offsets)
    pad = ((0, 0), (0, catalog.shape.shape[1] - ndim))
    low, extent = np.pad(offsets, pad), np.pad(sizes, pad, constant_values=1)
    plan = plan_reads(catalog, np.full(count, tensor), low, extent, replica=replica)
    volumes, twice = box.volume(extent), plan.twice(extent)
    by_request = plan.take(np.argsort(plan.request, kind="stable"))
    items = list(by_request.items(ndim))
    bounds = np.searchsorted(by_request.request, np.arange(count + 1)).tolist()
    buffer = np.empty(int(volumes.max(initial=0)), dtype.raw)
    known: dict[int, Region] = {}
    with payloads.pool.keeping():
        for at, (first, stop) in enumerate(pairwise(bounds)):
            shape = tuple(sizes[at].tolist())
            if twice[at]:
                yield _frozen(read_box(payloads, tensor, slices(offsets[at].tolist(), shape), replica=replica))
                continue
            out = buffer[: int(volumes[at])].reshape(shape)
            for item in items[first:stop]:
                if item.row not in known:
                    known[item.row] = payloads.region(item.row)
                dest: tuple[Any, ...] = (*item.dest, ...)  # a view, also without axes
                known[item.row][item.source].into(out[dest])
            yield _frozen(out)


def _together(payloads: Payloads, tensor: int, offsets: Ints, sizes: Ints, replica: int) -> Array | None:
    """Read small boxes of one shape at once if one chunk stores them as in row-major memory; otherwise return ``None``.

    A plan would cost more than the read, also for a single box.

    Returns:
        ``(R, *size)`` elements.
    """
    catalog, count = payloads.catalog, len(offsets)
    raw, shape = catalog.dtype_of(tensor).raw, catalog.shape_of(tensor)
    if not count or not shape or (sizes != sizes[0]).any():
        return None
    if not 0 < count * sizes[0].prod() * raw.itemsize <= TOGETHER:
        return None
    row = single_chunk(payloads, tensor, replica)
    if row is None or catalog.inflated[row] or (start := payloads.straight(row)) is None:
        return None
    size, steps = tuple(sizes[0].tolist()), np.array(row_major(shape)) * raw.itemsize
    cut = [axis for axis, (part, full) in enumerate(zip(size, shape, strict=True)) if part < full]
    apart = size[: cut[-1]] if cut else ()  # bytes follow each other along the last axis that is cut, and behind it
    starts = start + offsets @ steps
    if apart:
        runs = np.indices(apart).reshape(len(apart), -1)
        starts = (starts[:, None] + steps[: len(apart)] @ runs).reshape(-1)
    out = np.empty((count, *size), raw)
    with payloads.pool.keeping():
        source = payloads.pool.source(int(catalog.file[row]))
        source.read_runs(out.reshape(len(starts), -1).view(np.uint8), starts)
    return out


def single_chunk(payloads: Payloads, tensor: int, replica: int = 0) -> int | None:
    """Return the row of the one chunk that holds a whole tensor, or ``None``."""
    catalog = payloads.catalog
    of = catalog.rows_of(tensor)
    rows = of.start + np.flatnonzero(catalog.replica[of] == replica)
    if len(rows) == 1 and (catalog.sizes[rows[0]] == catalog.shape[tensor]).all():
        return int(rows[0])
    return None


def _frozen(array: Array) -> Array:
    seen = array.view()
    seen.flags.writeable = False
    return seen


def _padded(selection: Selection, dims: int) -> tuple[Array, Array]:
    offsets, sizes = selection.box()
    pad = dims - len(offsets)
    return np.array([offsets + [0] * pad], np.int64), np.array([sizes + [1] * pad], np.int64)


def _copy(
    payloads: Payloads,
    plan: ReadPlan,
    ndim: int,
    selection: Selection,
    origin: Array,
    out: Array,
    filled: Array | None,
) -> None:
    """Copy the selected elements of every chunk.

    Args:
        filled: which elements of ``out`` have been read, if chunks overlap: elements stored twice are compared.
    """

    def copy(item: ReadItem) -> None:
        wanted = _within(selection, item, origin)
        if wanted is None:
            return
        (source, dest), region = wanted, payloads.region(item.row)[item.source]
        if filled is None:
            region.into(out[dest], source)
        else:
            payloads.compare(item.row, region, out[dest], filled[dest], source)

    if filled is not None or payloads.pool.at_once == 1 or len(plan) == 1:
        for item in plan.items(ndim):
            copy(item)
        return
    with ThreadPoolExecutor(min(len(plan), payloads.pool.at_once)) as threads:
        for _ in in_order(threads, copy, plan.items(ndim)):
            pass


def _within(selection: Selection, item: ReadItem, origin: Array) -> tuple[list[Axis], tuple[Any, ...]] | None:
    """Return which elements of a copy are selected: positions in the copied box, and an index into the result.

    ``None`` when steps or an index array pass over the box entirely.
    """
    source: list[Axis] = []
    dest: list[Any] = []
    for axis, part, start in zip(selection.axes, item.dest, origin.tolist(), strict=False):
        low, high = start + part.start, start + part.stop  # the box, in positions of the global tensor
        if isinstance(axis, int):
            source.append(range(axis - low, axis - low + 1))
            dest.append(slice(0, 1))
            continue
        if isinstance(axis, range):
            first, last = _inside(axis, low, high)
        else:  # ascending
            first, last = np.searchsorted(axis, (low, high)).tolist()
        if first >= last:
            return None
        chosen = axis[first:last]
        if isinstance(chosen, range):
            source.append(range(chosen.start - low, chosen.stop - low, chosen.step))
        else:
            source.append(chosen - low)
        dest.append(slice(first, last))
    return source, (*dest, ...)


def _inside(axis: range, low: int, high: int) -> tuple[int, int]:
    """Return indices ``[first, last)`` of a range whose values are in ``[low, high)``."""
    if axis.step < 0:
        first, last = _inside(axis[::-1], low, high)
        return len(axis) - last, len(axis) - first
    first = max(0, -(-(low - axis.start) // axis.step))
    last = min(len(axis), -(-(high - axis.start) // axis.step))
    return first, last
