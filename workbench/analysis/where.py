"""Count changed elements in up to 64 bands along every axis of a tensor, from the masks of its pieces.

::

    axis 1   0    64   128  …           a piece is a run of elements of a box, in row-major order:
    axis 0 ┌────┬────┬────┐  bands      ragged rows at its ends, whole rows between them
      0    │ 12 │  0 │  0 │  12
      16   │  9 │  0 │  0 │   9         mask (0 or 1 a byte), eight columns at a time in one 64-bit word:
      …    └────┴────┴────┘             255 rows are added before a byte can overflow
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from workbench.core.arrays import Array, Ints

BANDS = 64  #: maximum bands along an axis
WIDE = 256  #: minimum elements of a row; shorter inner axes are flattened together


def band_width(size: int) -> int:
    """Return the elements of one band of an axis of ``size``."""
    return max(-(-size // BANDS), 1)


def add_bands(bands: Ints, shape: Ints, mask: Array, offsets: Ints, sizes: Ints, start: int) -> None:
    """Count the marked elements of a piece.

    Args:
        bands: ``(D, BANDS) int64`` to add to.
        shape: ``(D,)`` of the global tensor.
        mask: ``(N,) uint8`` of 0 and 1, contiguous.
        offsets, sizes: ``(D,)`` the box that the piece is part of; ``start``: its first element in the box.
    """
    dims = len(shape)
    inner, row = dims - 1, int(sizes[-1])
    while inner > 0 and row < WIDE:
        inner -= 1
        row *= int(sizes[inner])
    width = np.array([band_width(n) for n in shape.tolist()], np.int64)
    for at, first, rows, length in _rectangles(start, len(mask), row):
        part = mask[at : at + rows * length].reshape(rows, length)
        lead = np.arange((start + at) // row, (start + at) // row + rows)
        _outer(bands, width, part, lead, offsets, sizes, inner)
        _inner(bands, width, part, first, offsets, sizes, inner)


def _rectangles(start: int, count: int, row: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield ragged head, whole rows and ragged tail as position in the piece, first column, rows, columns."""
    at = 0
    first = start % row
    if first:
        length = min(row - first, count)
        yield 0, first, 1, length
        at = length
    if rows := (count - at) // row:
        yield at, 0, rows, row
        at += rows * row
    if at < count:
        yield at, 0, 1, count - at


def _outer(bands: Ints, width: Ints, part: Array, lead: Ints, offsets: Ints, sizes: Ints, inner: int) -> None:
    """Count along the axes outside a row; rows of the same bands are counted together."""
    if inner == 0:
        return
    places = np.unravel_index(lead, tuple(sizes[:inner].tolist()))
    bins = np.stack([(place + offsets[axis]) // width[axis] for axis, place in enumerate(places)])
    marks = part.view(np.bool_)  # counted many times faster than bytes
    cuts = np.flatnonzero((bins[:, 1:] != bins[:, :-1]).any(axis=0)) + 1
    for a, b in zip([0, *cuts.tolist()], [*cuts.tolist(), len(lead)], strict=True):
        found = np.count_nonzero(marks[a:b])
        for axis in range(inner):
            bands[axis, bins[axis, a]] += found


def _inner(bands: Ints, width: Ints, part: Array, first: int, offsets: Ints, sizes: Ints, inner: int) -> None:
    """Count along the axes inside a row."""
    last = len(sizes) - 1
    if len(part) == 1 and inner == last:  # a part of one long axis: its bands are runs
        low = first + int(offsets[last])
        step = int(width[last])
        for band in range(low // step, (low + part.shape[1] - 1) // step + 1):
            bands[last, band] += np.count_nonzero(
                part.view(np.bool_)[0, max(band * step - low, 0) : (band + 1) * step - low]
            )
        return
    columns = _columns(part)
    if inner == last:  # bands are runs of columns
        low, step = first + int(offsets[last]), int(width[last])
        bands_here = np.arange(low // step, (low + len(columns) - 1) // step + 1)
        starts = np.maximum(bands_here * step - low, 0)
        bands[last, bands_here] += np.add.reduceat(columns, starts)
        return
    places = np.unravel_index(np.arange(first, first + part.shape[1]), tuple(sizes[inner:].tolist()))
    for k, place in enumerate(places):
        axis = inner + k
        band = (place + offsets[axis]) // width[axis]
        bands[axis] += np.bincount(band, columns, BANDS).astype(np.int64)


def _columns(part: Array) -> Array:
    """Return the ``(C,)`` marked elements of each column."""
    rows, length = part.shape
    if length % 8 or rows < 8:
        return part.sum(axis=0, dtype=np.int64)
    words, found = part.view(np.uint64), np.zeros(length, np.int64)
    for at in range(0, rows, 255):
        found += np.add.reduce(words[at : at + 255], axis=0).view(np.uint8)
    return found
