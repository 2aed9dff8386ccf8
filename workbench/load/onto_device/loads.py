"""The sink of devices: parts of regions that fit a buffer, and their place in a local tensor.

::

    chunk (row-major in its file)      wanted: columns 2:4           staged in the buffer
    ┌───────────────┐                  ┌───┐
    │ . . W W . . . │  W W . . . . . W W . . . . . W W             rows    the run of the file from first to last, cut
    │ . . W W . . . │                                                      out on the device, if most are wanted
    │ . . W W . . . │  W W W W W W                                 gather  assembled by a core
    └───────────────┘

A load is one *part* of a region. Its bytes in the buffer are elements at ``source`` strides; they go to elements at
``dest`` strides of the local tensor. If both are dense, it is a run of bytes, which is only copied to its place.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import prod
from typing import NamedTuple

from workbench.core import box
from workbench.core.arrays import Array
from workbench.core.catalog import row_major
from workbench.core.payload import Payloads
from workbench.core.read import read_selection
from workbench.core.region import Region
from workbench.core.runs import Runs
from workbench.core.select import Selection
from workbench.core.transfer.regions import BoxRequests, Regions, reach

Ints = tuple[int, ...]
Fetch = Callable[[Array], None]  #: writes a load's bytes into a given part of the buffer

RUN = 64 << 10  #: bytes from which on runs are read one by one


class Load(NamedTuple):
    """A part of a region.

    Attributes:
        local: position of the local tensor in the plan.
        nbytes: bytes in the buffer.
        file, start: location of these bytes, unless there is a ``fetch``.
        fetch: writes these bytes into the buffer.
        itemsize: bytes of an element (1 for packed types, whose elements share bytes).
        sizes: elements along each axis.
        source, dest: strides of the elements in the buffer and in the local tensor.
        at: element of the local tensor at which it begins.
    """

    local: int
    nbytes: int
    file: int
    start: int
    fetch: Fetch | None
    itemsize: int
    sizes: Ints
    source: Ints
    dest: Ints
    at: int

    @property
    def dense(self) -> bool:
        """Whether it is one run of bytes, in the buffer and in the local tensor."""
        return _dense(self.sizes, self.source) and _dense(self.sizes, self.dest)

    @property
    def wanted(self) -> int:
        """Bytes of its elements."""
        return prod(self.sizes) * self.itemsize


def loads(payloads: Payloads, boxes: BoxRequests, regions: Regions, most: int) -> Iterator[Load]:
    """Yield every region in parts of up to ``most`` bytes (16 or more), in the files' order.

    Args:
        payloads: payloads of the catalog that was planned for.
        boxes, regions: the local tensors are the destinations.

    Raises:
        CorruptError, TruncatedError, ChangedError, MissingFileError: as :meth:`Payloads.straight`, or from ``fetch``.
            Chunks that overlap and hold different values are a CorruptError of ``fetch``.
    """
    catalog = payloads.catalog
    first, _, near = reach(catalog, regions.row, regions.source, regions.sizes)
    columns = regions.into, regions.row, catalog.tensor[regions.row], first, near, regions.at, regions.twice
    rows = zip(*(column.tolist() for column in columns), strict=True)
    for number, (local, row, tensor, begin, together, at, twice) in enumerate(rows):
        if twice:
            continue
        dtype, dims = catalog.dtype_of(tensor), int(catalog.ndim[tensor])
        if dtype.packed:
            yield from _packed(payloads, local, row, most)
            continue
        part = [tuple(one[number, :dims].tolist()) for one in (regions.source, regions.sizes, regions.strides)]
        yield from _copy(payloads, local, row, part, begin, at // dtype.itemsize, most, together=together)
    for request in box.distinct(regions.request[regions.twice]).tolist():
        yield from _compared(payloads, boxes, request, most)


def _copy(
    payloads: Payloads, local: int, row: int, part: list[Ints], begin: int, at: int, most: int, *, together: bool
) -> Iterator[Load]:
    """Yield a part of a chunk: directly from its file if its bytes are in order and not too many.

    Args:
        part: where the part begins in the chunk, its sizes, and the strides of its elements in the local tensor.
        begin: bytes of the chunk's elements before it.
        at: element of the local tensor at which it begins.
        together: whether most bytes between its ends are wanted.
    """
    (low, sizes, dest), catalog = part, payloads.catalog
    itemsize = catalog.dtype_of(int(catalog.tensor[row])).itemsize
    strides = row_major(catalog.sizes[row, : len(sizes)].tolist())
    limit, start = most // itemsize, payloads.straight(row)
    if together:
        limit = max(limit * prod(sizes) // _span(sizes, strides), 1)  # no part of the box is more spread than the box
    elif start is not None:
        run = _run(sizes, strides)
        if run * itemsize < RUN:
            start = None
        limit = min(limit, run)
    if start is None:
        chunk = _Chunk(payloads, row)
        for one in Runs(sizes, most // itemsize):
            key = tuple(slice(a + b, a + b + n) for a, b, n in zip(low, one.low, one.sizes, strict=True))
            yield _gathered(partial(chunk.fetch, key), local, itemsize, one.sizes, dest, at + _dot(one.low, dest))
        return
    file = int(catalog.file[row])
    for one in Runs(sizes, limit):
        place, nbytes = start + begin + _dot(one.low, strides) * itemsize, _span(one.sizes, strides) * itemsize
        yield Load(local, nbytes, file, place, None, itemsize, one.sizes, strides, dest, at + _dot(one.low, dest))


def _compared(payloads: Payloads, boxes: BoxRequests, request: int, most: int) -> Iterator[Load]:
    """Read a box with elements that several chunks hold, as slices are read, which compares the copies."""
    tensor, local, at = int(boxes.tensor[request]), int(boxes.into[request]), int(boxes.at[request])
    dims, itemsize = int(payloads.catalog.ndim[tensor]), payloads.catalog.dtype_of(tensor).itemsize
    low, sizes, dest = (
        tuple(column[request, :dims].tolist()) for column in (boxes.offsets, boxes.sizes, boxes.strides)
    )
    for one in Runs(sizes, most // itemsize):
        axes = tuple(range(a + b, a + b + n) for a, b, n in zip(low, one.low, one.sizes, strict=True))
        fetch = partial(_read_box, payloads, tensor, Selection(axes))
        yield _gathered(fetch, local, itemsize, one.sizes, dest, at + _dot(one.low, dest))


def _packed(payloads: Payloads, local: int, row: int, most: int) -> Iterator[Load]:
    """Yield a whole chunk of elements that share bytes, as bytes."""
    chunk, nbytes = _Chunk(payloads, row), int(payloads.catalog.chunk_nbytes[row])
    for at in range(0, nbytes, most):
        size = min(most, nbytes - at)
        yield _gathered(partial(chunk.fetch, (slice(at, at + size),)), local, 1, (size,), (1,), at)


def _gathered(fetch: Fetch, local: int, itemsize: int, sizes: Ints, dest: Ints, at: int) -> Load:
    return Load(local, prod(sizes) * itemsize, -1, 0, fetch, itemsize, sizes, row_major(sizes), dest, at)


class _Chunk:
    """A chunk that has to be decoded or reordered; it is decoded once, by the thread that needs it first."""

    def __init__(self, payloads: Payloads, row: int) -> None:
        self._payloads, self._row = payloads, row
        self._lock = threading.Lock()
        self._region: Region | None = None

    def fetch(self, key: tuple[slice, ...], out: Array) -> None:
        with self._lock:
            if self._region is None:
                self._region = self._payloads.region(self._row)
        part = self._region[key]
        part.into(out.view(part.raw).reshape(part.shape))


def _read_box(payloads: Payloads, tensor: int, selection: Selection, out: Array) -> None:
    part = read_selection(payloads, tensor, selection)
    out.view(part.dtype).reshape(part.shape)[...] = part


# ---- boxes of one region, in Python's integers ----


def _span(sizes: Ints, strides: Ints) -> int:
    """Return the number of elements from a box's first to its last."""
    return 1 + sum((n - 1) * step for n, step in zip(sizes, strides, strict=True))


def _run(sizes: Ints, strides: Ints) -> int:
    """Return how many elements of a box follow each other without a gap."""
    run = 1
    for n, step in zip(reversed(sizes), reversed(strides), strict=True):
        if n > 1 and step != run:
            break
        run *= n
    return run


def _dense(sizes: Ints, strides: Ints) -> bool:
    return _run(sizes, strides) == prod(sizes)


def _dot(position: Sequence[int], strides: Ints) -> int:
    return sum(a * b for a, b in zip(position, strides, strict=True))
