"""Boxes of many tensors at once: one plan, then bytes go from the files directly to their destination.

::

    plan      file 0: │ q 0:512 │ k 0:128 │ up 0:1408 │ …     file 1: │ q 512:1024 │ …      in the files' order
    parts     ├────── 32 MiB ──────┤├───── 32 MiB ─────┤…     threads take the next one when they have done one
    buffers   q [ 0:512 │ 512:1024 │ … ]    k [ 0:128 │ … ]

If a copy is one run of bytes in its file and in its buffer (row-major, little endian), or a few long ones, it is
read there in pieces. Other copies are read like any slice.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench.core import box, codecs, memory
from workbench.core.arrays import Array
from workbench.core.build import row_major
from workbench.core.catalog import Catalog
from workbench.core.dtypes import ITEMSIZE
from workbench.core.executors import in_order
from workbench.core.payload import Payloads
from workbench.core.plan import Ints, ReadPlan, plan_reads
from workbench.core.read import read_selection
from workbench.core.select import Selection
from workbench.errors import UnsafeError

PIECE = 32 << 20  #: bytes a thread reads before it takes the next piece
MIN_PIECE = 1 << 20  #: bytes below which handing a piece to a thread costs more than reading it
ROUNDS = 8  #: pieces per thread in a small job, so all threads end together
REQUESTS = 3  #: requests of one portion that run at once in a remote store
RUN = 64 << 10  #: bytes from which one of several runs of a copy is worth a separate call


@dataclass(frozen=True, eq=False)
class BoxRequests:
    """``R`` boxes of tensors, and their destinations.

    Element ``x`` of a box (counted from its first) is element ``at + (x · strides).sum()`` of the buffer ``into``.

    Attributes:
        tensor: ``(R,)`` positions in the catalog; no packed types.
        offsets, sizes: ``(R, D)`` inside the tensors' shapes.
        into: ``(R,)`` which buffer.
        at: ``(R,)`` elements.
        strides: ``(R, D)`` elements.
    """

    tensor: Ints
    offsets: Ints
    sizes: Ints
    into: Ints
    at: Ints
    strides: Ints


def gather(
    payloads: Payloads, tensors: Ints, *, threads: int = 1, progress: Callable[[float], None] | None = None
) -> list[Array]:
    """Read whole tensors in their raw types, contiguous, each into its own memory; no packed types.

    Args:
        payloads: the chunks, and where archives keep theirs.
        tensors: ``(R,)`` positions in the catalog, distinct.
        threads: number of reading threads.
        progress: called with the fraction of bytes done, in the caller's thread; raise an exception to cancel.

    Raises:
        HoleError: an element is not stored; raised before any byte is read.
        CorruptError, TruncatedError, ChangedError, MissingFileError: of a chunk, the first in the files' order.
    """
    catalog = payloads.catalog
    shapes, number = catalog.shape[tensors], np.arange(len(tensors))
    wholes = BoxRequests(tensors, np.zeros_like(shapes), shapes, number, np.zeros_like(number), row_major(shapes))
    filling = Filling.plan(payloads, wholes)
    out = [memory.empty(catalog.shape_of(tensor), catalog.dtype_of(tensor).raw) for tensor in tensors.tolist()]
    flat = [array.reshape(-1).view(np.uint8) for array in out]
    total = max(sum(array.nbytes for array in out), 1)
    filling.run(
        flat, threads=threads, progress=None if progress is None else lambda done: progress(min(done / total, 1.0))
    )
    return out


@dataclass(frozen=True, eq=False)
class Filling:
    """Planned reads of boxes into buffers."""

    payloads: Payloads
    boxes: BoxRequests
    reads: ReadPlan
    twice: Array  #: ``(R,)`` whether chunks overlap in a box and have to be compared

    @classmethod
    def plan(cls, payloads: Payloads, boxes: BoxRequests) -> Filling:
        """Plan everything; nothing is read.

        Raises:
            HoleError: an element is not stored.
            UnsafeError: far more bytes of elements than are stored.
        """
        catalog = payloads.catalog
        reads = plan_reads(catalog, boxes.tensor, boxes.offsets, boxes.sizes)
        if len(refused := reads.row[catalog.inflated[reads.row]]):  # before memory is allocated
            raise UnsafeError(catalog.not_checked(int(refused[0])))
        have = np.zeros(len(boxes.tensor), np.int64)
        np.add.at(have, reads.request, box.volume(reads.sizes))
        return cls(payloads, boxes, reads, have > box.volume(boxes.sizes))

    def run(self, buffers: Sequence[Array], *, threads: int = 1, progress: Callable[[int], None] | None = None) -> int:
        """Read everything.

        Args:
            buffers: flat ``uint8`` arrays.
            threads: number of threads.
            progress: called in the caller's thread with the bytes requested so far; raise an exception to cancel.

        Returns:
            bytes requested from the files: those of the elements, or of whole chunks if the codec must decode them
                whole.

        Raises:
            CorruptError, TruncatedError, ChangedError, MissingFileError: of a chunk, the first in the files' order.
        """
        once = self.reads.take(np.flatnonzero(~self.twice[self.reads.request]))
        alone = threads if self.payloads.pool.at_once == 1 else -(-threads // REQUESTS)
        parts = _CopyParts.of(self.payloads.catalog, once, self.boxes, alone)
        spans = list(zip(parts.cuts[:-1], parts.cuts[1:], strict=True))

        def portion(span: tuple[int, int]) -> int:
            with self.payloads.ahead(*parts.reach(once, *span)):
                return sum(self._read(once, part, buffers) for part in parts.items(*span))

        def portions(pool: ThreadPoolExecutor) -> Generator[int, None, None]:
            if threads == 1 or len(spans) == 1:
                yield from map(portion, spans)
            else:
                yield from in_order(pool, portion, spans)

        count = 0
        workers = ThreadPoolExecutor(max(1, min(threads, len(spans))))
        with self.payloads.pool.keeping(), workers as pool:  # reading releases the GIL
            with closing(portions(pool)) as done:
                for nbytes in done:
                    count += nbytes
                    if progress is not None:
                        progress(count)
            return count + sum(self._compared(request, buffers) for request in np.flatnonzero(self.twice).tolist())

    def _read(self, once: ReadPlan, part: tuple[int, int, bool, int, int, int], buffers: Sequence[Array]) -> int:
        """Read one part of a copy (if it must be decoded, all of it with its first part) and return the number of bytes
        read.
        """
        copy, number, run, source, dest, nbytes = part
        catalog, row = self.payloads.catalog, int(once.row[copy])
        into = int(self.boxes.into[once.request[copy]])
        start = self.payloads.straight(row) if run else None
        if start is not None:
            file = self.payloads.pool.source(int(catalog.file[row]))
            file.read_into(buffers[into][dest : dest + nbytes], start + source)
            return nbytes
        if number:
            return 0
        dims = int(catalog.ndim[catalog.tensor[row]])
        begin, size = once.source[copy, :dims].tolist(), once.sizes[copy, :dims].tolist()
        found = self.payloads.region(row)[tuple(slice(a, a + n) for a, n in zip(begin, size, strict=True))]
        found.into(self._place(int(once.request[copy]), once.dest[copy], found.shape, found.raw, buffers))
        return int(catalog.stop[row] - catalog.start[row]) if codecs.UNDONE_WHOLE[catalog.codec[row]] else found.nbytes

    def _compared(self, request: int, buffers: Sequence[Array]) -> int:
        """Fill a box in which chunks overlap, and check that elements stored twice are equal."""
        tensor = int(self.boxes.tensor[request])
        dims = int(self.payloads.catalog.ndim[tensor])
        low, size = (column[request, :dims].tolist() for column in (self.boxes.offsets, self.boxes.sizes))
        wanted = Selection(tuple(range(a, a + n) for a, n in zip(low, size, strict=True)))
        found = read_selection(self.payloads, tensor, wanted)
        first = np.zeros_like(self.boxes.offsets[request])
        self._place(request, first, found.shape, found.dtype, buffers)[...] = found
        return int(box.volume(self.reads.sizes[self.reads.request == request]).sum()) * found.itemsize

    def _place(
        self, request: int, dest: Ints, shape: tuple[int, ...], raw: np.dtype[Any], buffers: Sequence[Array]
    ) -> Array:
        """Return the view of a box's elements in its buffer, from ``dest`` on."""
        boxes, itemsize = self.boxes, raw.itemsize
        steps = boxes.strides[request]
        first = int(boxes.at[request] + (dest * steps).sum())
        buffer = buffers[int(boxes.into[request])]
        strides = [step * itemsize for step in steps[: len(shape)].tolist()]
        return np.ndarray(shape, raw, buffer.data, first * itemsize, strides)


@dataclass(frozen=True, eq=False)
class _CopyParts:
    """Copies in the files' order: runs of bytes, long ones cut; ``(M,)`` each.

    ``number`` counts the parts of a copy, ``run`` is whether it can be read by runs at all (else it is one part).
    ``source`` and ``dest`` are byte offsets in the chunk's elements and in the buffer. ``cuts`` are where portions
    of a thread begin and end.
    """

    copy: Ints
    number: Ints
    run: Array
    source: Ints
    dest: Ints
    nbytes: Ints
    cuts: list[int]

    @classmethod
    def of(cls, catalog: Catalog, reads: ReadPlan, boxes: BoxRequests, threads: int) -> _CopyParts:
        request, itemsize = reads.request, ITEMSIZE[catalog.dtype[catalog.tensor[reads.row]]]
        stored, wanted = row_major(catalog.sizes[reads.row]), boxes.strides[request]
        # from the last axis on, elements adjacent on both sides form one run; outer axes are iterated
        length, side_by_side, walked = np.ones(len(reads), np.int64), np.ones(len(reads), bool), reads.sizes.copy()
        for axis in range(walked.shape[1] - 1, -1, -1):
            side_by_side &= (reads.sizes[:, axis] == 1) | ((stored[:, axis] == length) & (wanted[:, axis] == length))
            length[side_by_side] *= reads.sizes[side_by_side, axis]
            walked[side_by_side, axis] = 1
        runs = box.volume(walked)
        run = (runs == 1) | (length * itemsize >= RUN)
        runs, length = np.where(run, runs, 1), np.where(run, length, box.volume(reads.sizes)) * itemsize

        copy, number = _counted(runs)
        index = number[:, None] // row_major(walked)[copy] % walked[copy]
        source = ((reads.source[copy] + index) * stored[copy]).sum(axis=1) * itemsize[copy]
        dest = (boxes.at[request[copy]] + ((reads.dest[copy] + index) * wanted[copy]).sum(axis=1)) * itemsize[copy]

        size = int(np.clip(length[copy].sum() // (threads * ROUNDS), MIN_PIECE, PIECE))
        of, piece = _counted(np.where(run, -(-length // size), 1)[copy])
        low = piece * size
        copy = copy[of]
        nbytes = np.where(run[copy], np.minimum(length[copy] - low, size), length[copy])
        portion = np.cumsum(nbytes) // size
        cuts = [0, *(np.flatnonzero(np.diff(portion)) + 1).tolist(), len(of)]
        return cls(copy, number[of] + piece, run[copy], source[of] + low, dest[of] + low, nbytes, cuts)

    def reach(self, reads: ReadPlan, first: int, last: int) -> tuple[Ints, Ints, Ints]:
        """Return the chunk rows that are read as runs, and the byte ranges of their elements."""
        run = self.run[first:last]
        copy, source, nbytes = (column[first:last][run] for column in (self.copy, self.source, self.nbytes))
        return reads.row[copy], source, source + nbytes

    def items(self, first: int, last: int) -> Iterator[tuple[int, int, bool, int, int, int]]:
        columns = (self.copy, self.number, self.run, self.source, self.dest, self.nbytes)
        return zip(*(column[first:last].tolist() for column in columns), strict=True)


def _counted(counts: Ints) -> tuple[Ints, Ints]:
    """Return ``0, 0, 0, 1, …`` with ``counts[k]`` times ``k``, and beside it ``0, 1, 2, 0, …``."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
