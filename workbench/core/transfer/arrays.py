"""The sink of arrays: bytes go from the files directly to their place in buffers of the caller.

::

    regions   file 0: │ q 0:512 │ k 0:128 │ up 0:1408 │ …     file 1: │ q 512:1024 │ …      in the files' order
    parts     ├────── 32 MiB ──────┤├───── 32 MiB ─────┤…     threads take the next one when they have done one
    buffers   q [ 0:512 │ 512:1024 │ … ]    k [ 0:128 │ … ]

If a region is one run of bytes in its file and in its buffer (row-major, little endian), or a few long ones, it is
read there in pieces. Other regions are read like any slice.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench.core import box, memory
from workbench.core.arrays import Array, Ints
from workbench.core.build import row_major
from workbench.core.catalog import Catalog
from workbench.core.dtypes import ITEMSIZE
from workbench.core.executors import in_order
from workbench.core.payload import Payloads
from workbench.core.plan import slices
from workbench.core.read import read_box
from workbench.core.transfer.regions import BoxRequests, Regions, counted, portions, reach

PIECE = 32 << 20  #: bytes a thread reads before it takes the next piece
MIN_PIECE = 1 << 20  #: bytes below which handing a piece to a thread costs more than reading it
ROUNDS = 8  #: pieces per thread in a small job, so all threads end together
REQUESTS = 3  #: requests of one portion that run at once in a remote store
RUN = 64 << 10  #: bytes from which one of several runs of a region is worth a separate call


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
    regions: Regions

    @classmethod
    def plan(cls, payloads: Payloads, boxes: BoxRequests) -> Filling:
        """Plan everything; nothing is read. Boxes of packed types are not supported.

        Raises:
            HoleError: an element is not stored.
            UnsafeError: far more bytes of elements than are stored.
        """
        regions = Regions.of(payloads.catalog, boxes)
        payloads.check_expanded(regions.row)
        return cls(payloads, boxes, regions)

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
        twice = self.regions.twice
        once = self.regions.take(~twice) if twice.any() else self.regions
        near = self.payloads.pool.at_once == 1  # a disk reads on demand
        alone = threads if near else -(-threads // REQUESTS)
        parts = _RunParts.of(self.payloads.catalog, once, alone)

        def portion(part: range) -> int:
            with self.payloads.ahead(*parts.reach(self.payloads.catalog, once, part[:0] if near else part)):
                return sum(self._read(once, one, buffers) for one in parts.items(part))

        def read(pool: ThreadPoolExecutor) -> Generator[int, None, None]:
            if threads == 1 or len(parts.portions) == 1:
                yield from map(portion, parts.portions)
            else:
                yield from in_order(pool, portion, parts.portions)

        count = 0
        workers = ThreadPoolExecutor(max(1, min(threads, len(parts.portions))))
        with self.payloads.pool.keeping(), workers as pool:  # reading releases the GIL
            with closing(read(pool)) as done:
                for nbytes in done:
                    count += nbytes
                    if progress is not None:
                        progress(count)
            return count + sum(
                self._compared(request, buffers) for request in box.distinct(self.regions.request[twice]).tolist()
            )

    def _read(self, once: Regions, part: tuple[int, int, bool, int, int, int], buffers: Sequence[Array]) -> int:
        """Read one part of a region (if it must be decoded, all of it with its first part) and return the number of
        bytes read.
        """
        at, number, run, source, dest, nbytes = part
        catalog, row, into = self.payloads.catalog, int(once.row[at]), int(once.into[at])
        start = self.payloads.straight(row) if run else None
        if start is not None:
            file = self.payloads.pool.source(int(catalog.file[row]))
            file.read_into(buffers[into][dest : dest + nbytes], start + source)
            return nbytes
        if number:
            return 0
        dims = int(catalog.ndim[catalog.tensor[row]])
        begin, size = once.source[at, :dims].tolist(), once.sizes[at, :dims].tolist()
        found = self.payloads.region(row)[slices(begin, size)]
        found.into(_view(buffers[into], found.shape, found.raw, int(once.at[at]), once.strides[at]))
        return int(catalog.stop[row] - catalog.start[row]) if once.decoded[at] else found.nbytes

    def _compared(self, request: int, buffers: Sequence[Array]) -> int:
        """Fill a box in which chunks overlap, and check that elements stored twice are equal."""
        boxes, tensor = self.boxes, int(self.boxes.tensor[request])
        dims = int(self.payloads.catalog.ndim[tensor])
        low, size = (column[request, :dims].tolist() for column in (boxes.offsets, boxes.sizes))
        found = read_box(self.payloads, tensor, slices(low, size))
        buffer, at = buffers[int(boxes.into[request])], int(boxes.at[request]) * found.itemsize
        _view(buffer, found.shape, found.dtype, at, boxes.strides[request])[...] = found
        return int(self.regions.nbytes[self.regions.request == request].sum())


def _view(buffer: Array, shape: tuple[int, ...], raw: np.dtype[Any], at: int, strides: Ints) -> Array:
    """Return elements of a buffer, from byte ``at`` on, at ``strides`` elements."""
    steps = [step * raw.itemsize for step in strides[: len(shape)].tolist()]
    return np.ndarray(shape, raw, buffer.data, at, steps)


@dataclass(frozen=True, eq=False)
class _RunParts:
    """Regions in the files' order: runs of bytes, long ones cut; ``(N,)`` each.

    ``number`` counts the parts of a region, ``run`` is whether it can be read by runs at all (else it is one part).
    ``source`` and ``dest`` are byte offsets in the chunk's elements and in the buffer.
    """

    region: Ints
    number: Ints
    run: Array
    source: Ints
    dest: Ints
    nbytes: Ints
    portions: list[range]

    @classmethod
    def of(cls, catalog: Catalog, regions: Regions, threads: int) -> _RunParts:
        rows, sizes = regions.row, regions.sizes
        run = ((regions.run == regions.nbytes) | (regions.run >= RUN)) & ~regions.decoded
        length = np.where(run, regions.run, regions.nbytes)
        region, number = counted(regions.nbytes // length)
        source, dest = regions.begin[region], regions.at[region]
        if len(several := np.flatnonzero(length[region] < regions.nbytes[region])):
            of = region[several]  # the axes of a run are inside it; the others are walked
            extent, itemsize = sizes[of], ITEMSIZE[catalog.dtype[catalog.tensor[rows[of]]]]
            walked = np.where(row_major(extent) * extent * itemsize[:, None] <= length[of, None], 1, extent)
            index = number[several, None] // row_major(walked) % walked
            source[several] += box.dot(index, row_major(catalog.sizes[rows[of]])) * itemsize
            dest[several] += box.dot(index, regions.strides[of]) * itemsize

        size = int(np.clip(length[region].sum() // (threads * ROUNDS), MIN_PIECE, PIECE))
        of, piece = counted(np.where(run, -(-length // size), 1)[region])
        low = piece * size
        region = region[of]
        nbytes = np.where(run[region], np.minimum(length[region] - low, size), length[region])
        source, dest = source[of] + low, dest[of] + low
        return cls(region, number[of] + piece, run[region], source, dest, nbytes, portions(nbytes, size))

    def reach(self, catalog: Catalog, regions: Regions, part: range) -> tuple[Ints, Ints, Ints]:
        """Return the chunk rows that are fetched as a whole, and the byte ranges of their elements."""
        at = self.region[part.start : part.stop]
        run, low, nbytes = (column[part.start : part.stop] for column in (self.run, self.source, self.nbytes))
        first, last, whole = reach(catalog, regions.row[at], regions.source[at], regions.sizes[at])
        keep = run | whole
        return regions.row[at][keep], np.where(run, low, first)[keep], np.where(run, low + nbytes, last)[keep]

    def items(self, part: range) -> Iterator[tuple[int, int, bool, int, int, int]]:
        columns = (self.region, self.number, self.run, self.source, self.dest, self.nbytes)
        return zip(*(column[part.start : part.stop].tolist() for column in columns), strict=True)
