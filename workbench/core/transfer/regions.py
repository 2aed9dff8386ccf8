"""Regions: boxes of chunks, each with its place, for many destinations at once.

::

    request 0 ─┐ chunk 0, rows 2:4 → destination 0      region 0    read in the files' order into arrays,
               └ chunk 1, rows 0:2 → destination 0      region 1    or in a destination's order as a stream
    request 1 ── chunk 1, rows 2:9 → destination 1      region 2

A destination is a run of bytes: an array, a tensor as a stream, a piece of a file. Element ``x`` of a region is at byte
``at + (x · strides).sum() · itemsize`` of it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from itertools import pairwise

import numpy as np

from workbench.core import box, codecs
from workbench.core.arrays import Array, Ints
from workbench.core.catalog import Catalog
from workbench.core.dtypes import BLOCK, ITEMSIZE, nbytes_of_codes
from workbench.core.payload import Payloads
from workbench.core.plan import plan_reads
from workbench.core.region import Region
from workbench.errors import WorkbenchError

SPREAD = 2  #: bytes between the ends of a box for each byte of its elements, up to which everything is fetched


@dataclass(frozen=True, eq=False)
class BoxRequests:
    """``R`` boxes of tensors, and their destinations.

    Element ``x`` of a box (counted from its first) is element ``at + (x · strides).sum()`` of the destination ``into``.

    Attributes:
        tensor: ``(R,)`` positions in the catalog.
        offsets, sizes: ``(R, D)`` inside the tensors' shapes.
        into: ``(R,)`` which destination.
        at: ``(R,)`` elements.
        strides: ``(R, D)`` elements.
    """

    tensor: Ints
    offsets: Ints
    sizes: Ints
    into: Ints
    at: Ints
    strides: Ints

    @classmethod
    def whole(cls, catalog: Catalog, tensors: Ints) -> BoxRequests:
        """Request whole tensors, each as a destination of its own."""
        shapes, number = catalog.shape[tensors].astype(np.int64), np.arange(len(tensors))
        return cls(tensors, np.zeros_like(shapes), shapes, number, np.zeros_like(number), box.row_major(shapes))


@dataclass(frozen=True, eq=False)
class Regions:
    """``M`` regions, in the files' order unless they were taken in another one.

    Attributes:
        request: ``(M,)`` which request.
        into: ``(M,)`` which destination.
        row: ``(M,)`` chunk row of the catalog.
        source, sizes: ``(M, D)`` the box in the chunk.
        at: ``(M,)`` byte of the destination at which its first element is.
        strides: ``(M, D)`` elements of the destination.
        begin: ``(M,)`` bytes of the chunk's elements, in row-major order, before its first.
        nbytes: ``(M,)`` bytes of its elements.
        run: ``(M,)`` bytes from the first on that follow each other on both sides; 0 if they begin inside a byte.
        decoded: ``(M,)`` whether the chunk has to be decoded whole to read any of it.
        twice: ``(M,)`` whether chunks overlap in its request: elements stored twice have to be compared.
    """

    request: Ints
    into: Ints
    row: Ints
    source: Ints
    sizes: Ints
    at: Ints
    strides: Ints
    begin: Ints
    nbytes: Ints
    run: Ints
    decoded: Array
    twice: Array

    @classmethod
    def of(
        cls,
        catalog: Catalog,
        boxes: BoxRequests,
        *,
        replica: int = 0,
        holes: dict[int, WorkbenchError] | None = None,
        by_file: bool = True,
    ) -> Regions:
        """Plan everything. Raises as :func:`plan_reads`, which also explains the other arguments."""
        where = boxes.tensor, boxes.offsets, boxes.sizes
        reads = plan_reads(catalog, *where, replica=replica, holes=holes, by_file=by_file)
        request = reads.request
        code = catalog.dtype[boxes.tensor][request]
        stored, strides = box.row_major(catalog.sizes[reads.row]), boxes.strides[request]
        begin, at = box.dot(reads.source, stored), boxes.at[request] + box.dot(reads.dest, strides)
        # from the last axis on, elements adjacent on both sides form one run
        length, adjacent = np.ones(len(reads), np.int64), np.ones(len(reads), bool)
        for axis in range(strides.shape[1] - 1, -1, -1):
            adjacent &= (reads.sizes[:, axis] == 1) | ((stored[:, axis] == length) & (strides[:, axis] == length))
            np.multiply(length, reads.sizes[:, axis], out=length, where=adjacent)
        length[(begin % BLOCK[code] != 0) | (at % BLOCK[code] != 0)] = 0
        return cls(
            request,
            boxes.into[request],
            reads.row,
            reads.source,
            reads.sizes,
            nbytes_of_codes(code, at),
            strides,
            nbytes_of_codes(code, begin),
            nbytes_of_codes(code, box.volume(reads.sizes)),
            nbytes_of_codes(code, length),
            codecs.UNDONE_WHOLE[catalog.codec[reads.row]],
            reads.twice(boxes.sizes)[request],
        )

    def __len__(self) -> int:
        return len(self.row)

    def take(self, index: Array | slice) -> Regions:
        """Return some of the regions, in the order given."""
        return Regions(*(column[index] for column in self.columns()))

    def cut(self, catalog: Catalog, most: Ints) -> tuple[Ints, Regions]:
        """Cut regions into parts, as :func:`box.cut`; not those of packed types.

        Args:
            most: ``(M,)`` bytes of a part.

        Returns:
            which region each part belongs to, and the parts.
        """
        if (self.nbytes <= most).all():
            return np.arange(len(self)), self
        itemsize = ITEMSIZE[catalog.dtype[catalog.tensor[self.row]]]
        index, low, sizes = box.cut(self.sizes, most // itemsize)
        of, itemsize = self.take(index), itemsize[index]
        nbytes = box.volume(sizes) * itemsize
        return index, replace(
            of,
            source=of.source + low,
            sizes=sizes,
            at=of.at + box.dot(low, of.strides) * itemsize,
            begin=of.begin + box.dot(low, box.row_major(catalog.sizes[of.row])) * itemsize,
            nbytes=nbytes,
            run=np.minimum(of.run, nbytes),  # parts are cut along a run's axes, or along those before them
        )

    def uncut(self, catalog: Catalog, shape: Ints) -> Array:
        """Return ``(P,)`` whether each destination of a ``shape`` is exactly one chunk, stored whole: the only ones to
        which elements that share bytes can be copied.
        """
        cut = ((self.sizes != catalog.sizes[self.row]) | (self.sizes != shape[self.into])).any(axis=1)
        found = np.bincount(self.into, minlength=len(shape)) == 1
        found[self.into[cut]] = False
        return found

    def view(self, number: int, elements: Region, memory: Array) -> Array:
        """Return the place of a region's elements in a destination: in its bytes, or in an array with a mark for each
        of its elements.
        """
        raw = elements.raw if memory.dtype == np.uint8 else memory.dtype
        at = int(self.at[number]) // elements.raw.itemsize * raw.itemsize
        steps = [step * raw.itemsize for step in self.strides[number, : len(elements.shape)].tolist()]
        return np.ndarray(elements.shape, raw, memory.data, at, steps)

    def columns(self) -> list[Array]:
        """Return all columns."""
        return [getattr(self, field.name) for field in fields(self)]


def reach(catalog: Catalog, rows: Ints, source: Ints, sizes: Ints) -> tuple[Ints, Ints, Array]:
    """Return the bytes of each chunk's elements at which a box ``source``, ``sizes`` begins and ends, and whether most
    bytes between these are in the box: then one request for all of them costs less than many small ones.
    """
    steps = box.row_major(catalog.sizes[rows])[:, : sizes.shape[1]]
    itemsize = ITEMSIZE[catalog.dtype[catalog.tensor[rows]]]
    first = box.dot(source, steps) * itemsize
    last = first + (box.dot(sizes - 1, steps) + 1) * itemsize
    return first, last, last - first <= SPREAD * box.volume(sizes) * itemsize


def ahead(payloads: Payloads, rows: Ints, source: Ints, sizes: Ints) -> AbstractContextManager[None]:
    """Fetch boxes of chunks from a store before they are read, if most bytes between their ends are wanted."""
    if payloads.pool.at_once == 1:  # a disk reads on demand
        return nullcontext()
    first, last, whole = reach(payloads.catalog, rows, source, sizes)
    return payloads.ahead(rows[whole], first[whole], last[whole])


def ahead_of(
    payloads: Payloads, tensors: Ints, offsets: Ints, sizes: Ints, *, replica: int = 0
) -> AbstractContextManager[None]:
    """Fetch ``(R, D)`` boxes of tensors, as :func:`ahead` those of chunks; errors are left to the reads."""
    try:
        plan = plan_reads(payloads.catalog, tensors, offsets, sizes, replica=replica, holes={})
    except WorkbenchError:
        return nullcontext()
    return ahead(payloads, plan.row, plan.source, plan.sizes)


def portions(nbytes: Ints, size: int, cost: int = 0) -> list[range]:
    """Cut a list of reads into runs of about ``size`` bytes, one for each task of a thread.

    Args:
        nbytes: ``(N,)`` bytes of each read.
        cost: bytes whose reading takes as long as beginning one more read.
    """
    turn = np.cumsum(nbytes + cost) // max(size, 1)
    cuts = [0, *(np.flatnonzero(turn[1:] != turn[:-1]) + 1).tolist(), len(turn)]
    return [range(a, b) for a, b in pairwise(cuts) if b > a]
