"""Runs and blocks of a tensor that became one value: zeroed pages, NaN, a constant.

::

    · · · · · ·      all elements from the first to the last changed one are zero: a run, in row-major order
    · · · 0 0 0      of the tensor or of the chunk that holds it,
    0 0 0 0 · ·      as a lost page of the file would be

    file  ┊ 4096 ┊ 4096 ┊ 4096 ┊       a run that begins and ends on multiples of 4,096 bytes, or with the payload,
             ░░░░ ░░░░░░ ░░░░          was lost by storage or a copy, not by a computation
"""

from __future__ import annotations

from math import log2, prod
from typing import Any

import numpy as np

from workbench.analysis.patterns.evidence import MARGIN, entropy, pairs
from workbench.analysis.patterns.flips import number_text
from workbench.analysis.patterns.found import Pattern, box_text
from workbench.analysis.patterns.local import KEPT, Difference
from workbench.analysis.patterns.read import bits, runs_of
from workbench.core import codecs
from workbench.core.arrays import Array
from workbench.core.words import plural
from workbench.tensor import LazyTensor

PAGE = 4096
Box = tuple[tuple[int, ...], tuple[int, ...]]


def filled(seen: Difference) -> Pattern | None:
    """Return a pattern if all changed elements became one value that fills the run or block between them."""
    if not seen.complete or seen.constant is None or not seen.count:
        return None
    value = seen.constant
    boxes = [((0,) * len(seen.shape), seen.shape), *chunk_boxes(seen.b, tuple(seen.low), tuple(seen.high))]
    for low, sizes in boxes:
        found = _run(seen, value, low, sizes)
        if found is not None:
            return found
    return _filled_box(seen, value)


def _run(seen: Difference, value: Any, low: tuple[int, ...], sizes: tuple[int, ...]) -> Pattern | None:
    """Return a pattern if all elements from the first to the last changed one, in a box's order, are ``value``."""
    a, b = seen.a, seen.b
    box = tuple(slice(k, k + n) for k, n in zip(low, sizes, strict=True))
    whole = sizes == seen.shape
    inner = b if whole else b.lazy[box]
    first, last = (seen.first, seen.last) if whole else _ends(a.lazy[box], inner)
    start, stop = _grown(inner, first, last, value)
    if stop <= start:
        return None
    zero = int(value) == 0
    length = stop - start
    surprise = seen.count * (log2(a.numel() / (last + 1 - first)) + _rarity(seen, value)) - 2 * log2(a.numel())
    if surprise < MARGIN:
        return None
    text = number_text(a.element, int(value))
    detail: dict[str, Any] = {"start": start, "length": length, "changed": seen.count, "value": text}
    detail |= {} if whole else {"offsets": list(low), "sizes": list(sizes)}
    place = place_of(b, low, sizes, start, length)
    region = f"{plural(length, 'element')} from flat position {start:,}"
    region += "" if whole else f" of the stored chunk {box_text(low, _far(low, sizes), seen.shape)}"
    if length == a.numel():
        region = f"all {plural(length, 'element')}"
    sentence = f"{region} {'became zero' if zero else f'became {text}'}"
    if seen.count < length:
        sentence += f" ({length - seen.count:,} already were)"
    if place is not None:
        detail |= place
        sentence += f"; in the file: bytes {place['byte_start']:,}:{place['byte_stop']:,} of {place['file']!r}"
        sentence += ", whole 4,096-byte pages" if place["aligned"] else ""

    def make(array: Array, rest: Array | None) -> Array:
        out = array.copy()
        part = np.ascontiguousarray(out.view(seen.a.element.raw)[box])
        part.reshape(-1)[start:stop] = value
        out.view(seen.a.element.raw)[box] = part
        return out

    return Pattern("zero_run" if zero else "fill", sentence, detail, evidence=surprise, make=make)


def _far(low: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the far corner."""
    return tuple(k + n for k, n in zip(low, sizes, strict=True))


def _ends(a: LazyTensor, b: LazyTensor) -> tuple[int, int]:
    first, last = a.numel(), -1
    for run in runs_of(a.shape, a.element.itemsize):
        hits = np.flatnonzero((bits(a, run.key) != bits(b, run.key)).reshape(-1))
        if len(hits):
            first, last = min(first, run.start + int(hits[0])), run.start + int(hits[-1])
    return first, last


def _grown(b: LazyTensor, first: int, last: int, value: Any) -> tuple[int, int]:
    """Return the longest run of ``value`` around ``[first, last]``; empty if the range has other values."""
    start, stop, inside = first, last + 1, False
    other_before, other_after = -1, b.numel()
    for run in runs_of(b.shape, b.element.itemsize):
        others = np.flatnonzero(bits(b, run.key).reshape(-1) != value) + run.start
        if not len(others):
            continue
        at = int(np.searchsorted(others, first))
        if at:
            other_before = int(others[at - 1])
        if at < len(others):
            inside = int(others[at]) <= last
            other_after = int(others[at])
            break
    start, stop = other_before + 1, other_after
    return (0, 0) if inside else (start, stop)


def _filled_box(seen: Difference, value: Any) -> Pattern | None:
    low, high = tuple(seen.low), tuple(seen.high)
    box = tuple(slice(*ends) for ends in zip(low, high, strict=True))
    inner = seen.b.lazy[box]
    for run in runs_of(inner.shape, inner.element.itemsize):
        if (bits(inner, run.key) != value).any():
            return None
    surprise = seen.count * (log2(seen.a.numel() / inner.numel()) + _rarity(seen, value))
    surprise -= sum(pairs(n) for n in seen.shape)
    if surprise < MARGIN:
        return None
    text = number_text(seen.a.element, int(value))
    sentence = (
        f"{box_text(low, high, seen.shape)}: {plural(inner.numel(), 'element')} became {text}; all others are equal"
    )
    detail = {"offsets": list(low), "sizes": list(inner.shape), "changed": seen.count, "value": text}

    def make(array: Array, rest: Array | None) -> Array:
        out = array.copy()
        out.view(seen.a.element.raw)[box] = value
        return out

    return Pattern("fill", sentence, detail, evidence=surprise, make=make)


def _rarity(seen: Difference, value: Any) -> float:
    """Return the bits of evidence in one element that becomes ``value``: the rarer the value, the more."""
    known = seen.before[:KEPT]
    # changed elements were not ``value``: unchanged elements show how common it is
    first = bits(seen.a, runs_of(seen.shape, seen.a.element.itemsize, 1 << 16)[0].key).reshape(-1)
    share = (np.count_nonzero(first == value) + 1) / (len(first) + 2)
    return min(-log2(share), entropy(known))  # one constant can become another in many ways


# ---- where a run is in its file --------------------------------------------------------------------------------------


def chunk_boxes(tensor: LazyTensor, low: tuple[int, ...], high: tuple[int, ...]) -> list[Box]:
    """Return offsets and sizes of the stored chunks that contain a box, for a tensor in several chunks."""
    rows = _rows(tensor)
    if len(rows) < 2:
        return []
    catalog, ndim = tensor._payloads.catalog, len(low)
    offsets, sizes = catalog.offsets[rows, :ndim], catalog.sizes[rows, :ndim]
    inside = (offsets <= np.array(low)).all(1) & (offsets + sizes >= np.array(high)).all(1)
    return [(tuple(offsets[k].tolist()), tuple(sizes[k].tolist())) for k in np.flatnonzero(inside).tolist()]


def place_of(
    tensor: LazyTensor, low: tuple[int, ...], sizes: tuple[int, ...], start: int, length: int
) -> dict[str, Any] | None:
    """Return ``file``, ``byte_start``, ``byte_stop`` of a run of elements, and whether it is ``aligned`` to pages.

    Args:
        low, sizes: the box whose row-major order counts the run's elements.

    Returns:
        ``None`` if the run is not one byte range of a file (several chunks, compressed or strided ones).
    """
    payloads, itemsize = tensor._payloads, tensor.element.itemsize
    catalog = payloads.catalog
    for row in _rows(tensor).tolist():
        offsets = tuple(catalog.offsets[row, : len(low)].tolist())
        extent, codec = tuple(catalog.sizes[row, : len(low)].tolist()), catalog.codec[row]
        if offsets[1:] != low[1:] or extent[1:] != sizes[1:] or codec not in (codecs.RAW, codecs.TORCH_ZIP):
            continue  # its order differs
        skipped = (offsets[0] - low[0]) * prod(extent[1:]) if low else 0
        if not 0 <= start - skipped <= start - skipped + length <= prod(extent):
            continue
        base = payloads.straight(row)
        if base is None:
            continue
        first, last = base + (start - skipped) * itemsize, base + (start - skipped + length) * itemsize
        ends = base, base + int(catalog.chunk_nbytes[row])
        aligned = (first % PAGE == 0 or first == ends[0]) and (last % PAGE == 0 or last == ends[1])
        aligned &= first % PAGE == 0 or last % PAGE == 0
        name = catalog.files[int(catalog.file[row])]
        return {"file": name, "byte_start": first, "byte_stop": last, "aligned": bool(aligned)}
    return None


def _rows(tensor: LazyTensor) -> np.ndarray[Any, Any]:
    """Return chunk rows of the copy that the tensor is read from; none for a slice, whose positions differ."""
    catalog = tensor._payloads.catalog
    if not tensor._selection.is_whole or tensor.shape != catalog.shape_of(tensor._tensor):
        return np.empty(0, np.int64)
    rows = np.arange(*catalog.rows_of(tensor._tensor).indices(catalog.chunks))
    return rows[catalog.replica[rows] == tensor._replica]
