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
from collections.abc import Callable, Iterator
from functools import partial
from math import prod
from typing import NamedTuple

import numpy as np

from workbench.core import box
from workbench.core.arrays import Array
from workbench.core.catalog import row_major
from workbench.core.dtypes import PACKED
from workbench.core.payload import Payloads
from workbench.core.plan import slices
from workbench.core.read import read_box
from workbench.core.region import Region
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
        return _span(self.sizes, self.source) == _span(self.sizes, self.dest) == prod(self.sizes)

    @property
    def wanted(self) -> int:
        """Bytes of its elements."""
        return prod(self.sizes) * self.itemsize


def loads(payloads: Payloads, boxes: BoxRequests, regions: Regions, most: int) -> Iterator[Load]:
    """Yield every region in parts of up to ``most`` bytes (16 or more).

    Parts of elements in a type that shares no bytes come in the files' order; chunks of other types follow, and boxes
    in which chunks overlap are the last.

    Args:
        payloads: payloads of the catalog that was planned for.
        boxes, regions: the local tensors are the destinations.

    Raises:
        CorruptError, TruncatedError, ChangedError, MissingFileError: as :meth:`Payloads.straight`, or from ``fetch``.
            Chunks that overlap and hold different values are a CorruptError of ``fetch``.
    """
    catalog = payloads.catalog
    packed = PACKED[catalog.dtype[catalog.tensor[regions.row]]]
    yield from _copies(payloads, regions.take(~packed & ~regions.twice), most)
    for local, row in zip(regions.into[packed].tolist(), regions.row[packed].tolist(), strict=True):
        chunk = _Opened(partial(payloads.region, row))  # whole, as bytes
        yield from chunk.loads(local, 1, (int(catalog.chunk_nbytes[row]),), (1,), 0, most)
    for request in box.distinct(regions.request[regions.twice]).tolist():
        tensor = int(boxes.tensor[request])
        dims, itemsize = int(catalog.ndim[tensor]), catalog.dtype_of(tensor).itemsize
        low, sizes, dest = (tuple(one[request, :dims].tolist()) for one in (boxes.offsets, boxes.sizes, boxes.strides))
        compared = _Opened(partial(_compared, payloads, tensor, slices(low, sizes)))
        yield from compared.loads(int(boxes.into[request]), itemsize, sizes, dest, int(boxes.at[request]), most)


def _copies(payloads: Payloads, regions: Regions, most: int) -> Iterator[Load]:
    """Yield parts of regions: directly from the file if a chunk's bytes are in order and not too many are between those
    of a part.
    """
    catalog = payloads.catalog
    first, last, near = reach(catalog, regions.row, regions.source, regions.sizes)
    columns = [column.tolist() for column in (regions.nbytes, last - first, regions.run, near)]
    limit = [  # no part of a box is more spread than the box
        most * nbytes // span if close else min(run, most) if run >= RUN else most
        for nbytes, span, run, close in zip(*columns, strict=True)
    ]
    of, parts = regions.cut(catalog, np.array(limit, np.int64))
    first, last, _ = reach(catalog, parts.row, parts.source, parts.sizes)
    direct = (near | (regions.run >= RUN))[of]
    strides = box.row_major(catalog.sizes[parts.row])
    columns = [column.tolist() for column in (of, parts.into, parts.row, first, last - first, parts.at, direct)]
    region = -1
    for number, (one, local, row, begin, span, at, straight) in enumerate(zip(*columns, strict=True)):
        if one != region:
            region, chunk = one, _Opened(partial(payloads.region, row))
            start = payloads.straight(row) if straight else None
        tensor = int(catalog.tensor[row])
        dims, itemsize = int(catalog.ndim[tensor]), catalog.dtype_of(tensor).itemsize
        low, sizes, source, dest = (
            tuple(column[number, :dims].tolist()) for column in (parts.source, parts.sizes, strides, parts.strides)
        )
        if start is None:
            yield chunk.load(low, sizes, local, itemsize, dest, at // itemsize)
        else:
            file = int(catalog.file[row])
            yield Load(local, span, file, start + begin, None, itemsize, sizes, source, dest, at // itemsize)


class _Opened:
    """Elements that a core has to decode, reorder or compare; opened once, by the thread that needs them first."""

    def __init__(self, opened: Callable[[], Region]) -> None:
        self._open, self._lock = opened, threading.Lock()
        self._region: Region | None = None

    def load(self, low: Ints, sizes: Ints, local: int, itemsize: int, dest: Ints, at: int) -> Load:
        """Return the load of one part of them."""
        fetch, nbytes = partial(self._fetch, slices(low, sizes)), prod(sizes) * itemsize
        return Load(local, nbytes, -1, 0, fetch, itemsize, sizes, row_major(sizes), dest, at)

    def loads(self, local: int, itemsize: int, sizes: Ints, dest: Ints, at: int, most: int) -> Iterator[Load]:
        """Yield all of them in parts of up to ``most`` bytes."""
        _, low, extent = box.cut(np.array([sizes], np.int64), np.array([most // itemsize]))
        places = at + box.dot(low, np.broadcast_to(np.array(dest, np.int64), low.shape))
        for part, size, place in zip(low.tolist(), extent.tolist(), places.tolist(), strict=True):
            yield self.load(tuple(part), tuple(size), local, itemsize, dest, place)

    def _fetch(self, key: tuple[slice, ...], out: Array) -> None:
        with self._lock:
            if self._region is None:
                self._region = self._open()
        part = self._region[key]
        part.into(out.view(part.raw).reshape(part.shape))


def _compared(payloads: Payloads, tensor: int, key: tuple[slice, ...]) -> Region:
    """Read a box with elements that several chunks hold, as slices are read, which compares the copies."""
    return Region.of(read_box(payloads, tensor, key))


def _span(sizes: Ints, strides: Ints) -> int:
    """Return the number of elements from a box's first to its last."""
    return 1 + sum((n - 1) * step for n, step in zip(sizes, strides, strict=True))
