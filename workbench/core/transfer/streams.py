"""The sink of streams: bytes come in the order of a destination, a buffer at a time, to be hashed, cast or written.

::

    stored   file 0: rows 0:4        straight: the chunks, one after the other, are the stream
             file 1: rows 4:8
    stored   file 0: columns 0:2     not straight: each step of the stream has to be gathered from both
             file 1: columns 2:4
    units    0 … 32 MiB │ 32 … 64 MiB │ …     what a thread reads in one go; small streams several in one task

A stream is a tensor, or a piece of a file: row-major, little endian, whatever its chunks.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from workbench.core import box
from workbench.core.arrays import Array, Ints
from workbench.core.box import row_major
from workbench.core.catalog import Catalog
from workbench.core.dtypes import ALL, ITEMSIZE, nbytes_of_codes
from workbench.core.payload import Payloads
from workbench.core.plan import placed, slices
from workbench.core.region import Region
from workbench.core.storage import Announcer
from workbench.core.transfer.regions import BoxRequests, Regions, portions, reach
from workbench.core.words import plural
from workbench.errors import CorruptError, UnsupportedFormatError, WorkbenchError

BLOCK = 4 << 20  #: bytes of a block; part of the definition of fingerprints, so fixed in version 1
TASK = 32 << 20  #: bytes in one task of a thread
UNIT_COST = 64 << 10  #: bytes whose reading costs as much as one more unit
STEP = 1 << 20  #: bytes read at a time: they are still in a core's cache when they are hashed and written
MOST = 8 << 20  #: … if a step contains very many chunks
PIECE = 64 << 10  #: minimum bytes of a copy from one chunk
MAX_OPEN = 32  #: files that a thread keeps open
NOTHING = Region.of(np.empty(0))


class StreamUnit(NamedTuple):
    """Bytes ``[first, stop)`` of a stream: what one thread reads in one go."""

    stream: int
    first: int
    stop: int


@dataclass(frozen=True, eq=False)
class Streams:
    """``P`` streams, and the regions that they consist of, in their order.

    Attributes:
        code: ``(P,)`` element type.
        shape: ``(P, D)``.
        ptr: ``(P+1,)`` CSR over the regions.
        regions: ``M`` regions.
        stop: ``(M,)`` the byte after each region's last element (its bytes are exactly those before it if it is a run).
        straight: ``(P,)`` whether the regions are runs that follow each other.
    """

    code: Ints
    shape: Ints
    ptr: Ints
    regions: Regions
    stop: Ints
    straight: Array

    @classmethod
    def of(
        cls,
        catalog: Catalog,
        code: Ints,
        shape: Ints,
        boxes: BoxRequests,
        *,
        replica: int = 0,
        holes: dict[int, WorkbenchError] | None = None,
    ) -> Streams:
        """Plan the streams that boxes make up; raises as :meth:`Regions.of`."""
        regions = Regions.of(catalog, boxes, replica=replica, holes=holes, by_file=False)
        order = np.lexsort((regions.at, regions.into))
        if (order[1:] < order[:-1]).any():  # chunk rows are mostly in this order already
            regions = regions.take(order)
        owner, at = regions.into, regions.at
        ptr = np.searchsorted(owner, np.arange(len(code) + 1))
        run = regions.run == regions.nbytes
        last = box.dot(regions.sizes - 1, regions.strides)
        stop = at + np.where(run, regions.nbytes, (last + 1) * ITEMSIZE[code[owner]])
        begins, ends = np.zeros(len(at) + 1, np.int64), nbytes_of_codes(code, box.volume(shape))
        begins[1:] = stop
        begins[ptr[:-1]] = 0
        good = run & (at == begins[:-1]) & ~regions.twice
        reached = np.where(ptr[1:] > ptr[:-1], np.append(stop, 0)[ptr[1:] - 1], 0)
        straight = (np.bincount(owner[~good], minlength=len(code)) == 0) & (reached == ends)
        return cls(code, shape, ptr, regions, stop, straight)

    def __len__(self) -> int:
        return len(self.code)

    @property
    def nbytes(self) -> Ints:
        """``(P,)`` bytes of each stream."""
        return nbytes_of_codes(self.code, box.volume(self.shape))

    def columns(self) -> list[Array]:
        """Return everything that determines the bytes."""
        return [self.code, self.shape, self.ptr, *self.regions.columns()]

    def take(self, index: Ints) -> Streams:
        """Return some of the streams, numbered in that order."""
        of, number = box.counted(self.ptr[index + 1] - self.ptr[index])
        rows = self.ptr[index][of] + number
        ptr = np.searchsorted(of, np.arange(len(index) + 1))
        code, shape, straight = self.code[index], self.shape[index], self.straight[index]
        return Streams(code, shape, ptr, self.regions.take(rows), self.stop[rows], straight)

    def units(self, catalog: Catalog, *, least: int = 0, done: Sequence[int] = ()) -> tuple[Ints, Ints, Ints]:
        """Cut streams into units, where blocks end: of elements as they are, and after a cast.

        A chunk that must be decoded whole is not decoded for each of several units.

        Args:
            least: units of a stream without elements.
            done: streams to leave out.

        Returns:
            stream, first and stop of each unit, by stream.
        """
        nbytes, size = self.nbytes, ITEMSIZE[self.code]
        aligned = BLOCK * np.maximum(size, 1)
        step = aligned * np.maximum(TASK // aligned, 1)
        step[self.regions.into[self.regions.decoded | catalog.inflated[self.regions.row]]] = 1 << 62
        count = np.maximum(-(-nbytes // step), least)
        count[list(done)] = 0
        stream, number = box.counted(count)
        first = number * step[stream]
        return stream, first, np.minimum(first + step[stream], nbytes[stream])


def tasks(stream: Ints, first: Ints, stop: Ints) -> Iterator[list[StreamUnit]]:
    """Yield runs of units of about :data:`TASK` bytes."""
    for task in portions(stop - first, TASK, UNIT_COST):
        columns = (column[task.start : task.stop].tolist() for column in (stream, first, stop))
        yield [StreamUnit(*unit) for unit in zip(*columns, strict=True)]


def renumbered(tasks: Sequence[Sequence[StreamUnit]]) -> tuple[Ints, list[list[StreamUnit]]]:
    """Return the streams of some tasks, ascending, and these tasks as :meth:`Streams.take` of them numbers streams."""
    streams = np.array(sorted({unit.stream for units in tasks for unit in units}), np.int64)
    number = {stream: at for at, stream in enumerate(streams.tolist())}
    return streams, [[unit._replace(stream=number[unit.stream]) for unit in units] for units in tasks]


class StreamReader:
    """Reads units of streams; one object for all threads."""

    def __init__(self, payloads: Payloads, streams: Streams) -> None:
        self.payloads, self.streams = payloads, streams
        self._announcer, self._own = Announcer(), threading.local()

    def close(self) -> None:
        """Withdraw announced reads of files."""
        self._announcer.restore()

    def reach(self, units: Sequence[StreamUnit]) -> tuple[Ints, Ints, Ints]:
        """Return the chunk rows that units are made of, and the byte ranges of their elements, to fetch these ahead.

        Regions that are not one run are included only if a unit needs all of them; of the others it reads a part.
        """
        if self.payloads.pool.at_once == 1:  # a disk reads on demand
            return (np.empty(0, np.int64),) * 3
        streams, every = self.streams, self.streams.regions
        stream, first, stop = np.array(units, np.int64).reshape(-1, 3).T
        unit, number = box.counted(streams.ptr[stream + 1] - streams.ptr[stream])
        number += streams.ptr[stream[unit]]
        kept = (every.at[number] < stop[unit]) & (first[unit] < streams.stop[number])
        mine, first, stop = number[kept], first[unit[kept]], stop[unit[kept]]
        at, end, begin, rows = every.at[mine], streams.stop[mine], every.begin[mine], every.row[mine]
        run = every.run[mine] == every.nbytes[mine]
        low, high, whole = reach(self.payloads.catalog, rows, every.source[mine], every.sizes[mine])
        low = np.where(run, begin + np.maximum(first - at, 0), low)
        high = np.where(run, begin + np.minimum(stop, end) - at, high)
        kept = run | (whole & (first <= at) & (end <= stop))
        return rows[kept], low[kept], high[kept]

    def read(self, unit: StreamUnit) -> Iterator[Array]:
        """Yield the bytes of a unit, valid until the next iteration.

        Raises:
            CorruptError: two chunks hold different values for one element.
            UnsupportedFormatError: elements share bytes and are not in order.
            OpenError: a chunk cannot be read.
        """
        stream, at, stop = unit
        if self.streams.straight[stream]:
            for flat in self._consecutive(unit):
                yield flat
                at += len(flat)
        if at < stop:
            yield from self._gathered(stream, at, stop)

    def _consecutive(self, unit: StreamUnit) -> Iterator[Array]:
        """Yield runs that follow each other, up to the first chunk whose elements do not follow each other."""
        streams, (stream, first, stop) = self.streams, unit
        a, b = streams.ptr[stream : stream + 2].tolist()
        b = a + int(np.searchsorted(streams.regions.at[a:b], stop))
        a += int(np.searchsorted(streams.stop[a:b], first, side="right"))
        columns = (streams.regions.row, streams.regions.at, streams.stop, streams.regions.begin)
        runs = zip(*(column[a:b].tolist() for column in columns), strict=True)
        step = self._aligned(stream, STEP)
        region, end = NOTHING, first
        for low in range(first, stop, step):
            high, place = min(low + step, stop), low
            out = self._buffer(high - low)
            while place < high:
                if place == end:
                    region = NOTHING  # memory of decoded chunks is freed first
                    row, at, end, begin = next(runs)
                    region = self._opened(row)
                    if not region.contiguous:
                        yield out[: place - low]
                        return
                    if begin + end - at > region.nbytes:
                        raise CorruptError(
                            f"{self.payloads.describe(row)} has {plural(region.nbytes, 'byte')} where "
                            f"{begin + end - at:,} are needed"
                        )
                size, until = region.raw.itemsize, min(end, high)
                part, begin_at = out[place - low : until - low], begin + place - at
                flat = region.flat(begin_at // size, (begin_at + until - place) // size, part).view(np.uint8)
                if len(flat) == high - low:
                    out = flat
                elif region.memory is not None:
                    part[:] = flat
                place = until
            yield out

    def _gathered(self, stream: int, first: int, stop: int) -> Iterator[Array]:
        """Gather boxes of chunks in the buffer, step by step."""
        streams, dtype = self.streams, ALL[self.streams.code[stream]]
        mine = slice(int(streams.ptr[stream]), int(streams.ptr[stream + 1]))
        every = streams.regions.take(mine)
        if dtype.packed:
            key = self.payloads.catalog.keys[self.payloads.catalog.tensor[every.row[0]]]
            raise UnsupportedFormatError(
                f"tensor {key!r}: its chunks of {dtype} elements, which share bytes, are not in order and cannot be "
                "joined; save it unsharded to fingerprint it"
            )
        shape, at, ends = streams.shape[stream], every.at // dtype.itemsize, streams.stop[mine] // dtype.itemsize
        corner = at[:, None] // row_major(shape[None]) % shape  # of each region in the stream
        step = STEP
        while step < MOST and step < PIECE * len(at):  # many chunks: fewer, larger copies
            step *= 2
        step = self._aligned(stream, step)
        held: dict[int, Region] = {}
        for low in range(first, stop, max(TASK // step, 1) * step):
            high = min(low + max(TASK // step, 1) * step, stop)
            cuts = np.append(np.arange(low, high, step), high) // dtype.itemsize
            near = np.flatnonzero((at < cuts[-1]) & (ends > cuts[0]))
            yield from self._joined(every.take(near), corner[near], shape, dtype.raw, cuts, held)

    def _joined(
        self, every: Regions, corner: Ints, shape: Ints, raw: np.dtype[Any], cuts: Ints, held: dict[int, Region]
    ) -> Iterator[Array]:
        """Yield the elements between consecutive cuts of a box, as bytes.

        Args:
            every: regions near them.
            corner: ``(M, D)`` where each region begins in the box.
            held: chunks that are open, by row.
        """
        step, offsets, sizes, _ = box.flat_ranges(np.repeat(shape[None], len(cuts) - 1, axis=0), cuts[:-1], cuts[1:])
        one = np.zeros(len(every) + len(step), np.int64)
        found, request = box.group_join(one[: len(every)], corner, every.sizes, one[: len(step)], offsets, sizes)
        low, _, extent = placed(corner, every.sizes, found, offsets, sizes, request)
        order = np.argsort(step[request], kind="stable")
        found, low, extent, step = found[order], low[order], extent[order], step[request[order]]
        parts = every.take(found)
        at = parts.at + (box.dot(low, parts.strides) - cuts[step]) * raw.itemsize
        parts = replace(parts, source=parts.source + low, sizes=extent, at=at)
        near = self._near(found, parts, held)
        volume = np.bincount(step, box.volume(extent), len(cuts) - 1)
        items = zip(step.tolist(), found.tolist(), parts.source.tolist(), extent.tolist(), strict=True)
        for number, some in groupby(enumerate(items), key=lambda item: item[1][0]):
            count = int(cuts[number + 1] - cuts[number])
            out = self._buffer(count * raw.itemsize)
            seen = np.zeros(count, bool) if volume[number] > count else None  # elements stored twice are compared
            for part, (_, of, source, size) in some:
                region, begin = near[of]
                region = region[slices([a - b for a, b in zip(source, begin, strict=True)], size)]
                into = parts.view(part, region, out)
                if seen is None:
                    region.into(into)
                else:
                    self.payloads.compare(int(parts.row[part]), region, into, parts.view(part, region, seen))
            yield out

    def _near(self, found: Ints, parts: Regions, held: dict[int, Region]) -> dict[int, tuple[Region, Sequence[int]]]:
        """Return what the parts of each region are read from, and where it begins in the chunk."""
        near, rows = dict[int, tuple[Region, Sequence[int]]](), parts.row.tolist()
        for row in held.keys() - set(rows):
            del held[row]
        for number, row in dict(zip(found.tolist(), rows, strict=True)).items():
            if row not in held:
                held[row] = self._opened(row).widened(parts.source.shape[1])
            mine = slice(0, 1) if held[row].ordered else found == number
            low, high = parts.source[mine].min(axis=0), (parts.source + parts.sizes)[mine].max(axis=0)
            near[number] = held[row].gathered(low.tolist(), high.tolist())
        return near

    def _opened(self, row: int) -> Region:
        if not hasattr(self._own, "sources"):
            self._own.sources = deque(maxlen=MAX_OPEN)
        file = int(self.payloads.catalog.file[row])
        self._own.sources.append(self._announcer.announce(self.payloads.pool, file))
        return self.payloads.region(row)

    def _aligned(self, stream: int, step: int) -> int:
        """Return ``step`` bytes as whole elements of a stream."""
        size = max(int(ITEMSIZE[self.streams.code[stream]]), 1)
        return max(step // size, 1) * size

    def _buffer(self, nbytes: int) -> Array:
        """Return ``(nbytes,) uint8`` of this thread; the previous ones are overwritten."""
        memory: Array = getattr(self._own, "memory", np.empty(0, np.uint8))
        if len(memory) < nbytes:
            memory = self._own.memory = np.empty(max(nbytes, 1 << 20), np.uint8)
        return memory[:nbytes]
