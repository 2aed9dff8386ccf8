"""Locate a run of a tensor's elements in its file, which identifies lost pages.

::

    file  ┊ 4096 ┊ 4096 ┊ 4096 ┊       a run that begins and ends on multiples of 4,096 bytes, or with the payload,
             ░░░░ ░░░░░░ ░░░░          was lost by storage or a copy, not by a computation
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from workbench.core import codecs
from workbench.tensor import LazyTensor

PAGE = 4096

Box = tuple[tuple[int, ...], tuple[int, ...]]


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
