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
from workbench.core.plan import slices
from workbench.core.read import read_box
from workbench.core.region import Region
from workbench.core.runs import ElementRun, Runs
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
        return _run(self.sizes, self.source) == _run(self.sizes, self.dest) == prod(self.sizes)

    @property
    def wanted(self) -> int:
        """Bytes of its elements."""
        return prod(self.sizes) * self.itemsize


class _PlacedBox(NamedTuple):
    """A region, or a box in which chunks overlap, in Python's integers: where it is, and where its elements go."""

    local: int
    itemsize: int
    low: Ints
    sizes: Ints
    dest: Ints
    at: int

    def loads(self, fetch: Callable[[tuple[slice, ...], Array], None], most: int) -> Iterator[Load]:
        """Yield parts of up to ``most`` bytes that a core assembles."""
        for one in Runs(self.sizes, most // self.itemsize):
            key = slices([a + b for a, b in zip(self.low, one.low, strict=True)], one.sizes)
            yield self.load(one, prod(one.sizes), -1, 0, partial(fetch, key), row_major(one.sizes))

    def load(self, one: ElementRun, span: int, file: int, start: int, fetch: Fetch | None, source: Ints) -> Load:
        """Return one part, which takes ``span`` elements in the buffer."""
        at = self.at + _dot(one.low, self.dest)
        return Load(
            self.local, span * self.itemsize, file, start, fetch, self.itemsize, one.sizes, source, self.dest, at
        )


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
        dtype, dims = catalog.dtype_of(tensor), int(catalog.ndim[tensor])
        if twice:
            continue
        if dtype.packed:  # a whole chunk, as bytes
            part = _PlacedBox(local, 1, (0,), (int(catalog.chunk_nbytes[row]),), (1,), 0)
            yield from part.loads(_Chunk(payloads, row).fetch, most)
            continue
        low, sizes, dest = (
            tuple(one[number, :dims].tolist()) for one in (regions.source, regions.sizes, regions.strides)
        )
        part = _PlacedBox(local, dtype.itemsize, low, sizes, dest, at // dtype.itemsize)
        yield from _copy(payloads, row, part, begin, most, together)
    for request in box.distinct(regions.request[regions.twice]).tolist():
        tensor = int(boxes.tensor[request])
        dims, itemsize = int(catalog.ndim[tensor]), catalog.dtype_of(tensor).itemsize
        low, sizes, dest = (tuple(one[request, :dims].tolist()) for one in (boxes.offsets, boxes.sizes, boxes.strides))
        wanted = _PlacedBox(int(boxes.into[request]), itemsize, low, sizes, dest, int(boxes.at[request]))
        yield from wanted.loads(partial(_fetch_box, payloads, tensor), most)


def _copy(payloads: Payloads, row: int, part: _PlacedBox, begin: int, most: int, together: bool) -> Iterator[Load]:
    """Yield a part of a chunk: directly from its file if its bytes are in order and not too many.

    Args:
        begin: bytes of the chunk's elements before it.
        together: whether most bytes between its ends are wanted.
    """
    sizes, itemsize, catalog = part.sizes, part.itemsize, payloads.catalog
    strides = row_major(catalog.sizes[row, : len(sizes)].tolist())
    limit, run, start = most // itemsize, _run(sizes, strides), payloads.straight(row)
    if start is None or not (together or run * itemsize >= RUN):
        yield from part.loads(_Chunk(payloads, row).fetch, most)
        return
    # no part of the box is more spread than the box
    limit = max(limit * prod(sizes) // _span(sizes, strides), 1) if together else min(limit, run)
    for one in Runs(sizes, limit):
        place = start + begin + _dot(one.low, strides) * itemsize
        yield part.load(one, _span(one.sizes, strides), int(catalog.file[row]), place, None, strides)


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


def _fetch_box(payloads: Payloads, tensor: int, key: tuple[slice, ...], out: Array) -> None:
    """Read a box with elements that several chunks hold, as slices are read, which compares the copies."""
    part = read_box(payloads, tensor, key)
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


def _dot(position: Sequence[int], strides: Ints) -> int:
    return sum(a * b for a, b in zip(position, strides, strict=True))
