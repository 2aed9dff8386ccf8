"""The reads of a pass: boxes of chunks, in the order of the bytes, each element once.

::

    chunks of a tensor       work (file order)                 large boxes cut     tasks for threads
    file 0 ┌────┐ rank 0     file 0  box (0, 0) (4, 8)         (0, 0) (2, 8)       ┐ 1
           └────┘                                              (2, 0) (2, 8)       ┘
    file 1 ┌────┐ rank 1     file 1  box (4, 0) (4, 8)         …                     2
           └────┘ replica 1: not read again

Two catalogs are joined box by box, whatever their shardings: the work is then the intersections, each with a chunk
row on both sides.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from workbench.core import box, codecs
from workbench.core.arrays import Array, Ints
from workbench.core.catalog import Catalog
from workbench.core.dtypes import PACKED, nbytes_of_codes
from workbench.core.payload import Payloads
from workbench.core.plan import tangled
from workbench.core.transfer.regions import portions
from workbench.errors import CorruptError

TASK = 32 << 20  #: bytes in one task of a thread; larger boxes are cut
BOX_COST = 64 << 10  #: bytes whose reading takes as long as finding one more box


@dataclass(frozen=True)
class Side:
    """One catalog of a pass, and the chunk row that holds each box: ``(N,) int64``."""

    payloads: Payloads
    row: Ints


@dataclass(frozen=True, eq=False)
class ReadWork:
    """Boxes to read, in the order of the pass, one row each.

    Attributes:
        group: ``(N,)`` the group into which the box's elements are folded (by default the tensor).
        offsets, sizes: ``(N, D)`` the box in the coordinates of the first catalog's global tensor.
        sides: one or two catalogs that hold the box.
    """

    group: Ints
    offsets: Ints
    sizes: Ints
    sides: tuple[Side, ...]

    def __len__(self) -> int:
        return len(self.group)

    @property
    def nbytes(self) -> Ints:
        """``(N,)`` bytes of each box on the first side."""
        catalog = self.sides[0].payloads.catalog
        return nbytes_of_codes(catalog.dtype[catalog.tensor[self.sides[0].row]], box.volume(self.sizes))

    def take(self, index: Array | slice) -> ReadWork:
        """Return some of the boxes, in the order given."""
        return replace(
            self,
            group=self.group[index],
            offsets=self.offsets[index],
            sizes=self.sizes[index],
            sides=tuple(Side(side.payloads, side.row[index]) for side in self.sides),
        )


def chunk_work(
    payloads: Payloads,
    *,
    tensors: Ints | None = None,
    replica: int | None = 0,
    group: Ints | None = None,
    order: str = "file",
) -> ReadWork:
    """Return the chunks of one catalog as work.

    Args:
        payloads: the catalog and its files.
        tensors: which ones; all by default.
        replica: read every element once, from this copy of it; or ``None`` for every chunk as it is stored.
        group: ``(chunks,)`` the group into which each chunk row's elements are folded; by default their tensor.
        order: ``file`` (the fastest way over a disk) or ``group`` (few groups unfinished at a time, for large states).

    Raises:
        CorruptError: chunks of a tensor overlap in too many ways to examine (with a ``replica``).
    """
    catalog = payloads.catalog
    wanted = np.ones(catalog.chunks, bool) if tensors is None else np.isin(catalog.tensor, tensors)
    rows = np.flatnonzero(wanted if replica is None else wanted & (catalog.replica == replica)).astype(np.int64)
    offsets, sizes = catalog.offsets[rows].astype(np.int64), catalog.sizes[rows].astype(np.int64)
    if replica is not None:
        rows, offsets, sizes = _each_once(catalog, rows, offsets, sizes)
    groups = (catalog.tensor if group is None else group)[rows].astype(np.int64)
    work = ReadWork(groups, offsets, sizes, (Side(payloads, rows),))
    keep = box.volume(sizes) > 0
    return _ordered(work.take(np.flatnonzero(keep)), order)


def pair_work(
    a: Payloads, b: Payloads, tensors_a: Ints, tensors_b: Ints, *, replicas: tuple[int, int] = (0, 0)
) -> ReadWork:
    """Pair two catalogs: boxes of ``tensors_a[k]`` and ``tensors_b[k]`` (of one shape) become group ``k``.

    Elements that one side stores nowhere are in no box: compare volumes to find them.
    """
    first, second = (
        chunk_work(a, tensors=tensors_a, replica=replicas[0]),
        chunk_work(b, tensors=tensors_b, replica=replicas[1]),
    )
    left, right = _renamed(first, tensors_a), _renamed(second, tensors_b)
    dims = max(left.offsets.shape[1], right.offsets.shape[1])
    low_a, size_a = box.padded(left.offsets, dims, 0), box.padded(left.sizes, dims, 1)
    low_b, size_b = box.padded(right.offsets, dims, 0), box.padded(right.sizes, dims, 1)
    i, j = box.group_join(left.group, low_a, size_a, right.group, low_b, size_b)
    low, size = box.intersect(low_a[i], size_a[i], low_b[j], size_b[j])
    sides = (Side(a, left.sides[0].row[i]), Side(b, right.sides[0].row[j]))
    return _ordered(ReadWork(left.group[i], low, size, sides), "file")


def tasks(work: ReadWork) -> list[range]:
    """Return runs of boxes of about :data:`TASK` bytes."""
    return portions(work.nbytes, TASK, BOX_COST)


def _ordered(work: ReadWork, order: str) -> ReadWork:
    catalog, rows = work.sides[0].payloads.catalog, work.sides[0].row
    keys = [*work.offsets.T[::-1], catalog.start[rows], catalog.file[rows]]
    if catalog.inner is not None:
        keys.insert(len(keys) - 2, catalog.inner[rows])
    if order == "group":
        keys.append(work.group)
    return work.take(np.lexsort(keys))


def cut(work: ReadWork) -> ReadWork:
    """Cut boxes larger than a task along their leading axes, which keeps them in the order of the bytes."""
    large = work.nbytes > TASK
    for side in work.sides:
        catalog = side.payloads.catalog
        large &= ~catalog.inflated[side.row]  # refused as a whole
        large &= codecs.IN_PLACE[catalog.codec[side.row]] & ~PACKED[catalog.dtype[catalog.tensor[side.row]]]
    if not large.any():
        return work
    volume = np.maximum(box.volume(work.sizes), 1)
    most = np.where(large, TASK // np.maximum(work.nbytes // volume, 1), volume)
    index, low, sizes = box.cut(work.sizes, most)
    made = work.take(index)
    return replace(made, offsets=made.offsets + low, sizes=sizes)


def _each_once(catalog: Catalog, rows: Ints, offsets: Ints, sizes: Ints) -> tuple[Ints, Ints, Ints]:
    """Remove from chunks the elements that an earlier chunk of their tensor also holds."""
    tensor = catalog.tensor[rows]
    i, _ = box.overlapping(tensor, offsets, sizes, limit=1)
    if not len(i):
        return rows, offsets, sizes
    twice = box.distinct(tensor[i])
    keep = ~np.isin(tensor, twice)
    kept = [(rows[keep], offsets[keep], sizes[keep])]
    for number in twice.tolist():
        mine = np.flatnonzero(tensor == number)
        shape = catalog.shape[number].astype(np.int64)
        try:
            parts = box.owned(np.zeros_like(shape), shape, offsets[mine], sizes[mine])
        except box.Tangled:
            raise CorruptError(tangled(catalog, number)) from None
        kept += [(rows[mine[owner]][None], low[None], size[None]) for owner, low, size in parts if owner >= 0]
    columns = [np.concatenate(column) for column in zip(*kept, strict=True)]
    return columns[0], columns[1], columns[2]


def _renamed(work: ReadWork, tensors: Ints) -> ReadWork:
    """Repeat the boxes of a tensor for each position ``k`` at which it is listed, in group ``k``."""
    order = np.argsort(tensors, kind="stable")
    listed = np.asarray(tensors)[order]
    first, last = np.searchsorted(listed, work.group), np.searchsorted(listed, work.group, side="right")
    counts = last - first
    index = np.repeat(np.arange(len(work)), counts)
    return replace(work.take(index), group=order[box.spans(first, counts)].astype(np.int64))
