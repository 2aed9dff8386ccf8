"""The sink of arrays: bytes go from the files directly to their place in buffers of the caller.

::

    regions   file 0: │ q 0:512 │ k 0:128 │ up 0:1408 │ …     file 1: │ q 512:1024 │ …      in the files' order
    parts     ├────── 32 MiB ──────┤├───── 32 MiB ─────┤…     threads take the next one when they have done one
    buffers   q [ 0:512 │ 512:1024 │ … ]    k [ 0:128 │ … ]

If a region is one run of bytes in its file and in its buffer (row-major, little endian), or a few long ones, it is
read there in pieces. Other regions are read like any slice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import numpy as np

from workbench.core import memory
from workbench.core.arrays import Array, Ints
from workbench.core.executors import in_order
from workbench.core.payload import Payloads
from workbench.core.plan import slices
from workbench.core.region import Region
from workbench.core.transfer.regions import BoxRequests, Regions, ahead, portions

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
    regions = planned(payloads, BoxRequests.whole(catalog, tensors))
    out = [memory.empty(catalog.shape_of(tensor), catalog.dtype_of(tensor).raw) for tensor in tensors.tolist()]
    flat = [array.reshape(-1).view(np.uint8) for array in out]
    total = max(sum(array.nbytes for array in out), 1)
    report = None if progress is None else lambda done: progress(min(done / total, 1.0))
    transfer(payloads, regions, flat, threads=threads, progress=report)
    return out


def planned(payloads: Payloads, boxes: BoxRequests) -> Regions:
    """Plan reads of boxes into buffers; nothing is read. Boxes of packed types are not supported.

    Raises:
        HoleError: an element is not stored.
        UnsafeError: far more bytes of elements than are stored.
    """
    regions = Regions.of(payloads.catalog, boxes)
    payloads.check_expanded(regions.row)
    return regions


def transfer(
    payloads: Payloads,
    regions: Regions,
    buffers: Sequence[Array],
    *,
    threads: int = 1,
    progress: Callable[[int], None] | None = None,
) -> int:
    """Read regions to their places.

    Args:
        payloads: the chunks, and where archives keep theirs.
        regions: in the files' order.
        buffers: the destinations, flat ``uint8`` arrays.
        threads: number of threads.
        progress: called in the caller's thread with the bytes requested so far; raise an exception to cancel.

    Returns:
        bytes requested from the files: those of the elements, or of whole chunks if the codec must decode them whole.

    Raises:
        CorruptError, TruncatedError, ChangedError, MissingFileError: of a chunk, the first in the files' order. Chunks
            that overlap and hold different values are a CorruptError.
    """
    catalog, pool = payloads.catalog, payloads.pool
    once = regions.take(~regions.twice) if regions.twice.any() else regions
    run = ((once.run == once.nbytes) | (once.run >= RUN)) & ~once.decoded
    readers = threads if pool.at_once == 1 else -(-threads // REQUESTS)
    size = min(max(int(once.nbytes.sum()) // (readers * ROUNDS), MIN_PIECE), PIECE)
    of, parts = once.cut(catalog, np.where(run, np.minimum(once.run, size), once.nbytes))
    first = np.diff(of, prepend=-1) > 0  # of its region

    def read(task: range) -> int:
        key, count = slice(task.start, task.stop), 0
        some = parts.take(key)
        columns = (of[key], first[key], some.row, some.into, some.begin, some.at, some.nbytes)
        with ahead(payloads, some.row, some.source, some.sizes):
            for region, whole, row, into, begin, at, nbytes in zip(*(c.tolist() for c in columns), strict=True):
                start = payloads.straight(row) if run[region] else None
                if start is not None:
                    source = pool.source(int(catalog.file[row]))
                    source.read_into(buffers[into][at : at + nbytes], start + begin)
                    count += nbytes
                elif whole:  # with the first part: elements that are not in order are read together
                    found = _region(payloads, once, region)
                    found.into(once.view(region, found, buffers[into]))
                    count += int(catalog.stop[row] - catalog.start[row]) if once.decoded[region] else found.nbytes
        return count

    tasks, count = portions(parts.nbytes, size), 0
    with pool.keeping(), ThreadPoolExecutor(max(1, min(threads, len(tasks)))) as workers:  # reading releases the GIL
        alone = threads == 1 or len(tasks) == 1
        with closing((read(task) for task in tasks) if alone else in_order(workers, read, tasks)) as done:
            for nbytes in done:
                count += nbytes
                if progress is not None:
                    progress(count)
        return count + _compared(payloads, regions.take(regions.twice), buffers)


def _compared(payloads: Payloads, regions: Regions, buffers: Sequence[Array]) -> int:
    """Read regions that overlap, check that elements stored twice are equal, and return the bytes of all."""
    seen: dict[int, Array] = {}
    for number, (row, into) in enumerate(zip(regions.row.tolist(), regions.into.tolist(), strict=True)):
        found = _region(payloads, regions, number)
        if into not in seen:
            seen[into] = np.zeros(len(buffers[into]) // found.raw.itemsize, bool)
        out, marks = (regions.view(number, found, memory[into]) for memory in (buffers, seen))
        payloads.compare(row, found, out, marks)
    return int(regions.nbytes.sum())


def _region(payloads: Payloads, regions: Regions, number: int) -> Region:
    row = int(regions.row[number])
    dims = int(payloads.catalog.ndim[payloads.catalog.tensor[row]])
    return payloads.region(row)[slices(regions.source[number, :dims].tolist(), regions.sizes[number, :dims].tolist())]
