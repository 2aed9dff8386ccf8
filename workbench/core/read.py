"""Carry out the reads of one tensor: plan the selection's box, then copy from the chunks that it meets.

Bits are moved, never numbers: arrays have the unsigned type of the element's size, so NaN payloads and negative zero
survive and every dtype takes the same path.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from workbench.core import box, memory
from workbench.core import catalog as cat
from workbench.core.payload import Payloads
from workbench.core.plan import ReadItem, ReadPlan, plan_reads
from workbench.core.select import Selection, whole

__all__ = ["read_boxes", "read_selection", "single_chunk"]

Array = np.ndarray[Any, Any]
Ints = np.ndarray[Any, np.dtype[np.int64]]
_VIEWS = (cat.RAW, cat.TORCH_ZIP, cat.TORCH_PART)  # codecs whose chunk is a view of a mapped file


def read_selection(payloads: Payloads, tensor: int, selection: Selection, *, replica: int = 0) -> Array:
    """The selected elements in the raw type, contiguous, in memory of their own.

    Raises:
        HoleError: some element of the selection's box is stored nowhere.
        CorruptError: two chunks hold different values for one element.
    """
    catalog = payloads.catalog
    dtype, ndim = catalog.dtype_of(tensor), int(catalog.ndim[tensor])
    offsets, sizes = _padded(selection, catalog.shape.shape[1])
    shape = tuple(1 if isinstance(axis, int) else len(axis) for axis in selection.axes)
    out = memory.empty(shape, dtype.raw)
    if out.size:
        plan = plan_reads(catalog, np.array([tensor]), offsets, sizes, replica=replica)
        if int(box.volume(plan.sizes).sum()) > int(box.volume(sizes)[0]):
            _copy_overlapping(payloads, plan, ndim, selection, offsets[0], out, tensor)
        else:
            _copy_all(payloads, plan, ndim, selection, offsets[0], out)
    return out.reshape(selection.shape)


def read_boxes(payloads: Payloads, tensor: int, offsets: Ints, sizes: Ints, *, replica: int = 0) -> Iterator[Array]:
    """Boxes of one tensor, one after the other in the raw type: planned together, for that is what small ones cost.

    Each array is read-only and good until the next one: a view of the mapped file where one chunk holds the box in
    order and aligned, else a buffer that is used again.

    Args:
        offsets, sizes: ``(R, ndim)`` boxes inside the tensor's shape.

    Raises:
        as :func:`read_selection`; a hole in any box before the first is read.
    """
    catalog = payloads.catalog
    dtype, ndim, count = catalog.dtype_of(tensor), int(catalog.ndim[tensor]), len(offsets)
    pad = ((0, 0), (0, catalog.shape.shape[1] - ndim))
    low, extent = np.pad(offsets, pad), np.pad(sizes, pad, constant_values=1)
    plan = plan_reads(catalog, np.full(count, tensor), low, extent, replica=replica)
    volumes, copied = box.volume(extent), box.volume(plan.sizes)
    stored = np.bincount(plan.request, weights=copied, minlength=count)
    by_request = plan.take(np.argsort(plan.request, kind="stable"))
    items = list(by_request.items(ndim))
    bounds = np.searchsorted(by_request.request, np.arange(count + 1)).tolist()
    buffer = np.empty(int(volumes.max(initial=0)), dtype.raw)
    known: dict[int, Array] = {}
    for at, (first, stop) in enumerate(pairwise(bounds)):
        shape = tuple(sizes[at].tolist())
        if stored[at] > volumes[at]:  # chunks overlap: what is stored twice must be stored alike
            part = whole(catalog.shape_of(tensor)).compose(
                tuple(slice(a, a + n) for a, n in zip(offsets[at].tolist(), shape, strict=True))
            )
            yield _frozen(read_selection(payloads, tensor, part, replica=replica).reshape(shape))
            continue
        out = buffer[: int(volumes[at])].reshape(shape)
        for item in items[first:stop]:
            found = np.asarray(_box_of(payloads, item, known))  # of no axes it is a scalar
            if stop - first == 1 and found.flags.c_contiguous and found.flags.aligned:
                out = found
            else:
                out[item.dest] = found
        yield _frozen(out)


def single_chunk(payloads: Payloads, tensor: int, replica: int = 0) -> int | None:
    """The row of the one chunk that holds a whole tensor, or ``None``."""
    catalog = payloads.catalog
    rows = np.arange(*catalog.rows_of(tensor).indices(catalog.chunks))
    rows = rows[catalog.replica[rows] == replica]
    if len(rows) == 1 and (catalog.sizes[rows[0]] == catalog.shape[tensor]).all():
        return int(rows[0])
    return None


def _box_of(payloads: Payloads, item: ReadItem, known: dict[int, Array]) -> Array:
    """What a copy takes from its chunk; chunks that are views of a map are kept in ``known``."""
    if not payloads.pool.mapped or payloads.catalog.codec[item.row] not in _VIEWS:
        return payloads.part(item.row, item.source)
    if item.row not in known:
        known[item.row] = payloads.array(item.row)
    return known[item.row][item.source]


def _frozen(array: Array) -> Array:
    seen = array.view()
    seen.flags.writeable = False
    return seen


def _padded(selection: Selection, dims: int) -> tuple[Array, Array]:
    offsets, sizes = selection.box()
    pad = dims - len(offsets)
    return np.array([offsets + [0] * pad], np.int64), np.array([sizes + [1] * pad], np.int64)


def _copy_all(payloads: Payloads, plan: ReadPlan, ndim: int, selection: Selection, origin: Array, out: Array) -> None:
    for item in plan.items(ndim):
        wanted = _within(selection, item, origin)
        if wanted is not None:
            source, dest = wanted
            out[dest] = payloads.part(item.row, item.source)[source]


def _copy_overlapping(
    payloads: Payloads,
    plan: ReadPlan,
    ndim: int,
    selection: Selection,
    origin: Array,
    out: Array,
    tensor: int,
) -> None:
    """As :func:`_copy_all` where chunks overlap: what is stored twice must be stored alike."""
    filled = np.zeros(out.shape, bool)
    for item in plan.items(ndim):
        wanted = _within(selection, item, origin)
        if wanted is None:
            continue
        source, dest = wanted
        new = payloads.part(item.row, item.source)[source]
        payloads.check_overlap(item.row, out[dest], new, filled[dest])
        out[dest], filled[dest] = new, True


def _within(selection: Selection, item: ReadItem, origin: Array) -> tuple[tuple[Any, ...], tuple[Any, ...]] | None:
    """Which elements of a copy are selected: an index into the copied box, and one into the result.

    ``None`` when steps or an index array pass over the box entirely.
    """
    source: list[Any] = []
    dest: list[Any] = []
    for axis, part, start in zip(selection.axes, item.dest, origin.tolist(), strict=False):
        low, high = start + part.start, start + part.stop  # the box, in positions of the global tensor
        if isinstance(axis, int):
            source.append(slice(axis - low, axis - low + 1))
            dest.append(slice(0, 1))
        elif isinstance(axis, range):
            first, last = _inside(axis, low, high)
            if first >= last:
                return None
            ends = axis[first] - low, axis[last - 1] - low
            source.append(_span(*ends, axis.step))
            dest.append(slice(first, last))
        else:
            hits = np.flatnonzero((axis >= low) & (axis < high))
            if not len(hits):
                return None
            source.append(axis[hits] - low)
            dest.append(hits)
    return tuple(source), tuple(dest)


def _inside(axis: range, low: int, high: int) -> tuple[int, int]:
    """Indices ``[first, last)`` of a range whose values lie in ``[low, high)``."""
    if axis.step < 0:
        first, last = _inside(axis[::-1], low, high)
        return len(axis) - last, len(axis) - first
    first = max(0, -(-(low - axis.start) // axis.step))
    last = min(len(axis), -(-(high - axis.start) // axis.step))
    return first, last


def _span(first: int, last: int, step: int) -> slice:
    """The slice from ``first`` to ``last`` inclusive; ``None`` ends a downward slice at 0."""
    stop = last + (1 if step > 0 else -1)
    return slice(first, None if stop < 0 else stop, step)
