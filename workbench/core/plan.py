"""Read plans: from wanted boxes to copies ``source byte range → destination box``.

A request is a box of one global tensor (a slice, a whole tensor, a rank's piece under another mesh). The plan joins
all requests with the chunks of their tensors at once and lists one :class:`ReadItem` row per intersection::

    stored: two chunks            wanted: rows 2:6        copies
    ┌────────┐ 0                                          chunk 0, rows 2:4 → wanted rows 0:2
    │ chunk 0│ 4                  ┌────────┐ 2            chunk 1, rows 0:2 → wanted rows 2:4
    ├────────┤                    │        │
    │ chunk 1│ 8                  └────────┘ 6

Coverage is exact: a request with an element that is not stored is an error that names the box, never zeros.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from workbench.core import box
from workbench.core.arrays import Array, Ints
from workbench.core.catalog import Catalog
from workbench.core.words import plural
from workbench.errors import CorruptError, HoleError, WorkbenchError


class ReadItem(NamedTuple):
    """One copy: a box of a stored chunk to a box of a request."""

    request: int
    row: int
    source: tuple[slice, ...]
    dest: tuple[slice, ...]


@dataclass(frozen=True, eq=False)
class ReadPlan:
    """Copies as columns, by default ordered by file and position in it.

    Attributes:
        request: ``(M,)`` which request.
        row: ``(M,)`` chunk row of the catalog.
        source: ``(M, D)`` first element of the copy inside the chunk.
        dest: ``(M, D)`` first element inside the request.
        sizes: ``(M, D)`` elements copied along each axis.
    """

    request: Ints
    row: Ints
    source: Ints
    dest: Ints
    sizes: Ints

    def __len__(self) -> int:
        return len(self.row)

    def take(self, index: Ints) -> ReadPlan:
        """Return some of the copies, in the order given."""
        return ReadPlan(self.request[index], self.row[index], self.source[index], self.dest[index], self.sizes[index])

    def twice(self, sizes: Ints) -> Array:
        """Return whether chunks overlap in each request of these ``sizes``: elements stored twice are compared."""
        return np.bincount(self.request, box.volume(self.sizes), len(sizes)) > box.volume(sizes)

    def items(self, ndim: int) -> Iterator[ReadItem]:
        """Yield the copies as slices of ``ndim`` axes (for tensors of the same number of axes)."""
        columns = (self.request, self.row, self.source[:, :ndim], self.dest[:, :ndim], self.sizes[:, :ndim])
        for request, row, source, dest, sizes in zip(*(column.tolist() for column in columns), strict=True):
            yield ReadItem(request, row, slices(source, sizes), slices(dest, sizes))


def slices(offsets: Iterable[int], sizes: Iterable[int]) -> tuple[slice, ...]:
    """Return a box as an index, one slice per axis."""
    return tuple(slice(a, a + n) for a, n in zip(offsets, sizes, strict=True))


def plan_reads(
    catalog: Catalog,
    tensors: Ints,
    offsets: Ints,
    sizes: Ints,
    *,
    replica: int = 0,
    holes: dict[int, WorkbenchError] | None = None,
    by_file: bool = True,
) -> ReadPlan:
    """Plan the reads of many boxes at once.

    Args:
        catalog: where everything is.
        tensors: ``(R,)`` tensor of each request.
        offsets, sizes: ``(R, D)`` the wanted boxes, inside the tensors' shapes.
        replica: which copy of replicated boxes to read.
        holes: filled with the error of each request that is not covered, instead of raising the first.
        by_file: order the copies by file and position in it, otherwise by chunk row.

    Raises:
        HoleError: some wanted element is stored in no chunk.
        CorruptError: chunks overlap in too many ways to examine.
    """
    tensors = np.asarray(tensors, np.int64)
    if (row := _only_chunk(catalog, tensors, replica)) is not None and sizes.all():
        return ReadPlan(np.arange(len(tensors)), np.full(len(tensors), row), offsets, np.zeros_like(offsets), sizes)
    rows = _rows_of(catalog, box.distinct(tensors))
    rows = rows[catalog.replica[rows] == replica]
    # Chunks go first, in the files' order: the join keeps it, and there are mostly fewer of them than copies.
    ordered = rows[_file_order(catalog, rows)] if by_file else rows
    chunks = catalog.offsets[ordered], catalog.sizes[ordered]
    found, request = box.group_join(catalog.tensor[ordered], *chunks, tensors, offsets, sizes)
    row = ordered[found]
    source, dest, extent = placed(*chunks, found, offsets, sizes, request)
    for position, error in _not_covered(catalog, rows, tensors, offsets, sizes, request, dest, extent):
        if holes is None:
            raise error
        holes[position] = error
    return ReadPlan(request, row, source, dest, extent)


def _only_chunk(catalog: Catalog, tensors: Ints, replica: int) -> int | None:
    """Return the row of the one chunk that holds the one tensor of all requests, or ``None``: joins cost more."""
    if not len(tensors) or (tensors != (tensor := tensors[0])).any():
        return None
    row, stop = catalog.row_ptr[tensor : tensor + 2].tolist()
    if stop - row != 1 or catalog.replica[row] != replica or (catalog.sizes[row] != catalog.shape[tensor]).any():
        return None
    return row


def _rows_of(catalog: Catalog, tensors: Ints) -> Ints:
    begin = catalog.row_ptr[tensors]
    return box.spans(begin, catalog.row_ptr[tensors + 1] - begin)


def _file_order(catalog: Catalog, rows: Ints) -> Ints:
    """Order of chunk rows by file and position in it."""
    file, start = catalog.file[rows], catalog.start[rows]
    order = np.argsort(start, kind="stable")
    if len(catalog.files) < 1 << 16:
        file = file.astype(np.uint16)  # numpy sorts these digit by digit
    return order[np.argsort(file[order], kind="stable")]


def placed(offsets_a: Ints, sizes_a: Ints, i: Ints, offsets_b: Ints, sizes_b: Ints, j: Ints) -> tuple[Ints, Ints, Ints]:
    """Intersect box ``i`` of chunks with box ``j`` of requests: its first element in each, and its size, column by
    column.
    """
    dims = offsets_a.shape[1]
    source, dest, extent = (np.zeros((dims, len(i)), np.int64).T for _ in range(3))
    for axis in range(dims):
        low_a, low_b = offsets_a[:, axis], offsets_b[:, axis]
        size_a, size_b = sizes_a[:, axis], sizes_b[:, axis]
        if not low_a.any() and not low_b.any():
            np.minimum(size_a[i], size_b[j], out=extent[:, axis])
            continue
        begin_a, begin_b = low_a[i], low_b[j]
        low = np.maximum(begin_a, begin_b)
        np.minimum((low_a + size_a)[i], (low_b + size_b)[j], out=extent[:, axis])
        extent[:, axis] -= low
        np.subtract(low, begin_a, out=source[:, axis])
        np.subtract(low, begin_b, out=dest[:, axis])
    return source, dest, extent


def _not_covered(
    catalog: Catalog, rows: Ints, tensors: Ints, offsets: Ints, sizes: Ints, request: Ints, dest: Ints, extent: Ints
) -> Iterator[tuple[int, WorkbenchError]]:
    """Yield the requests with elements that no chunk stores, and the error of each."""
    want = box.volume(sizes)
    have = box.sums(request, box.volume(extent), len(tensors))
    doubtful = have != want
    # Overlapping copies can hide a hole from the sum; chunks without overlap have no such copies.
    i, _ = box.overlapping(catalog.tensor[rows], catalog.offsets[rows], catalog.sizes[rows], limit=1)
    if len(i):
        shared = np.zeros(len(catalog), bool)
        shared[catalog.tensor[rows[i]]] = True
        copies = np.flatnonzero(shared[tensors[request]])
        i, _ = box.overlapping(request[copies], dest[copies], extent[copies], limit=1)
        doubtful[request[copies[i]]] = True
    for position in np.flatnonzero(doubtful).tolist():
        mine = request == position
        low = dest[mine] + offsets[position]
        try:
            holes = box.missing(offsets[position], sizes[position], low, extent[mine], limit=1)
        except box.Tangled:
            yield position, CorruptError(tangled(catalog, int(tensors[position])))
            continue
        if holes:
            lacking = int(want[position] - have[position])
            yield position, _hole(catalog, int(tensors[position]), *holes[0], lacking)


def tangled(catalog: Catalog, tensor: int) -> str:
    """Explain why a tensor for which `box.Tangled` is raised is not read."""
    count = int(np.count_nonzero(catalog.tensor == tensor))
    return (
        f"tensor {catalog.keys[tensor]!r}: its {plural(count, 'chunk', 'overlap')} in too many ways to check that "
        "they contain every element; its metadata is damaged or malicious, use another save"
    )


def _hole(catalog: Catalog, tensor: int, offset: Ints, size: Ints, lacking: int) -> HoleError:
    dims = int(catalog.ndim[tensor])
    where = ", ".join(f"{a}:{a + n}" for a, n in zip(offset[:dims].tolist(), size[:dims].tolist(), strict=True))
    count = plural(lacking, "requested element", "are") if lacking > 0 else "some requested elements are"
    return HoleError(
        f"tensor {catalog.keys[tensor]!r} {catalog.shape_of(tensor)} has a hole: [{where}] is not stored in any chunk "
        f"({count} missing); a shard of the save is lost: slice around it or restore the file"
    )
