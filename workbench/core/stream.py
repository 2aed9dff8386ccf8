"""A tensor as one stream of bytes: row-major, little endian, whatever its chunks; and who reads which part of it.

::

    stored   file 0: rows 0:4        straight: the chunks, one after the other, are the stream
             file 1: rows 4:8
    stored   file 0: columns 0:2     not straight: each block of the stream has to be gathered from both
             file 1: columns 2:4
    parts    blocks 0 … 7 │ 8 … 15 │ …     32 MB each for a thread; small tensors several at a time
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from workbench.core import box, codecs, dtypes
from workbench.core.arrays import Array, Ints
from workbench.core.catalog import Catalog
from workbench.core.payload import Payloads
from workbench.core.plan import ReadPlan, placed
from workbench.core.region import Region

BLOCK = 4 << 20  #: bytes of a block; part of the definition of fingerprints, so fixed in version 1
TASK = 32 << 20  #: bytes in one task of a thread
PART_COST = 64 << 10  #: bytes whose reading costs as much as one more tensor


class StreamPart(NamedTuple):
    """Blocks ``[first, stop)`` of a tensor: what one thread hashes in one go."""

    tensor: int
    shape: tuple[int, ...]
    first: int
    stop: int
    nbytes: int
    last: bool


@dataclass(frozen=True, eq=False)
class StreamLayout:
    """Chunk rows of the wanted tensors in the order of their elements.

    Attributes:
        tensors: ``(T,)`` in the order in which their files are read.
        ptr: tensor → range of ``rows``.
        rows: chunk rows of one replica that hold elements, by tensor and flat position.
        at: ``(R,)`` byte of the tensor's stream at which each row begins, where ``straight``.
        straight: tensors whose rows, one after the other, are the stream.
    """

    tensors: list[int]
    ptr: dict[int, tuple[int, int]]
    rows: Ints
    at: Ints
    straight: set[int]
    replica: int

    @classmethod
    def of(cls, catalog: Catalog, wanted: Ints, replica: int) -> StreamLayout:
        keep = (catalog.replica == replica) & (box.volume(catalog.sizes) > 0)
        if len(wanted) < len(catalog):
            keep &= np.isin(catalog.tensor, wanted)
        rows = np.flatnonzero(keep)
        owner = catalog.tensor[rows].astype(np.int64)
        flat = _flat_start(catalog.shape[owner], catalog.offsets[rows])
        order = np.lexsort((flat, owner))
        rows, owner, flat = rows[order], owner[order], flat[order]
        ends = flat + box.volume(catalog.sizes[rows])
        new = np.concatenate([[True], owner[1:] != owner[:-1]])[: len(rows)]
        begins = np.flatnonzero(new)
        stops = np.append(begins, len(rows))[1:]
        # a row continues the one before it, the first begins at 0 and the last ends the tensor
        good = _is_range(catalog.shape[owner], catalog.sizes[rows])
        good &= flat == np.where(new, 0, np.concatenate([[0], ends])[:-1])
        good &= (ends == catalog.numel[owner]) | ~np.concatenate([new, [True]])[1:]
        good &= flat % dtypes.BLOCK[catalog.dtype[owner]] == 0
        whole = np.logical_and.reduceat(good, begins) if len(begins) else np.empty(0, bool)
        names = owner[begins]
        ptr = dict(zip(names.tolist(), zip(begins.tolist(), stops.tolist(), strict=True), strict=True))
        first = {t: (int(catalog.file[rows[a]]), int(catalog.start[rows[a]])) for t, (a, _) in ptr.items()}
        tensors = sorted(wanted.tolist(), key=lambda t: first.get(t, (-1, t)))
        empty = np.flatnonzero(catalog.numel == 0).tolist()
        at = dtypes.nbytes_of_codes(catalog.dtype[owner], flat)
        return cls(tensors, ptr, rows, at, {*names[whole].tolist(), *empty}, replica)


def _flat_start(shapes: Ints, offsets: Ints) -> Ints:
    steps = np.cumprod(np.concatenate([np.ones((len(shapes), 1), np.int64), shapes[:, :0:-1]], axis=1), axis=1)[:, ::-1]
    return np.asarray((offsets * steps).sum(axis=1), np.int64)


def _is_range(shapes: Ints, sizes: Ints) -> Array:
    """Return, for each box, whether it is a flat range of its tensor: single steps before the last axis that is cut."""
    dims = shapes.shape[1]
    cut = sizes != shapes
    last = np.where(cut.any(axis=1), dims - 1 - np.argmax(cut[:, ::-1], axis=1), 0)
    single = (sizes == 1) | (np.arange(dims) >= last[:, None])
    return np.asarray(single.all(axis=1))


def runs(payloads: Payloads, layout: StreamLayout) -> Iterator[list[StreamPart]]:
    """Yield runs of blocks of about :data:`TASK` bytes; small tensors are combined."""
    catalog = payloads.catalog
    task: list[StreamPart] = []
    weight = 0
    for tensor in layout.tensors:
        nbytes, shape = int(catalog.tensor_nbytes[tensor]), catalog.shape_of(tensor)
        blocks = -(-nbytes // BLOCK)
        step = TASK // BLOCK if _divisible(payloads, layout, tensor) else blocks
        for first in range(0, max(blocks, 1), max(step, 1)):
            stop = min(first + step, blocks)
            size = min(stop * BLOCK, nbytes) - first * BLOCK
            if task and weight + size > TASK:
                yield task
                task, weight = [], 0
            task.append(StreamPart(tensor, shape, first, stop, size, stop == blocks))
            weight += size + PART_COST
    if task:
        yield task


def _divisible(payloads: Payloads, layout: StreamLayout, tensor: int) -> bool:
    """Return whether parts of a tensor can be read without reading or decoding whole chunks again for each part."""
    catalog = payloads.catalog
    a, b = layout.ptr.get(tensor, (0, 0))
    rows = layout.rows[a:b]
    return not (codecs.UNDONE_WHOLE[catalog.codec[rows]] | catalog.inflated[rows]).any()


class ThreadBuffer(threading.local):
    """Memory of each thread that is used again."""

    _memory = np.empty(0, np.uint8)

    def __call__(self, nbytes: int) -> Array:
        """Return ``(nbytes,) uint8``; the previous ones are overwritten."""
        if len(self._memory) < nbytes:
            self._memory = np.empty(max(nbytes, 1 << 20), np.uint8)
        return self._memory[:nbytes]


@dataclass(frozen=True, eq=False)
class BoxStream:
    """A box in row-major order, gathered from parts of chunks.

    Attributes:
        shape: ``(D,)`` of the box.
        raw: the element type.
        row: ``(M,)`` chunk row of each part.
        lo, hi: ``(M,)`` its elements are in ``[lo, hi)`` of the stream.
        source, dest, sizes: ``(M, D)`` its first element in the chunk and in the box, and its size.
        held: chunks that are open, by row.
    """

    shape: Ints
    raw: np.dtype[Any]
    row: Ints
    lo: Ints
    hi: Ints
    source: Ints
    dest: Ints
    sizes: Ints
    held: dict[int, Region] = field(default_factory=dict, init=False)

    def read(
        self, payloads: Payloads, cuts: Ints, opened: Callable[[int], Region], scratch: ThreadBuffer
    ) -> Iterator[Array]:
        """Yield the bytes of the elements between consecutive cuts, valid until the next iteration.

        Args:
            opened: opens a chunk, with as many axes as the box.

        Raises:
            CorruptError: two parts hold different values for one element.
            OpenError: a chunk cannot be read.
        """
        shapes = np.repeat(self.shape[None], len(cuts) - 1, axis=0)
        step, offsets, sizes, at = box.flat_ranges(shapes, cuts[:-1], cuts[1:])
        mine = np.flatnonzero((self.lo < cuts[-1]) & (self.hi > cuts[0]))
        boxes, one = (self.dest[mine], self.sizes[mine]), np.zeros(len(mine) + len(at), np.int64)
        found, request = box.group_join(one[: len(mine)], *boxes, one[: len(at)], offsets, sizes)
        source, dest, extent = placed(*boxes, found, offsets, sizes, request)
        plan = ReadPlan(request, mine[found], source + self.source[mine[found]], dest, extent)
        near = self._near(plan, opened)
        counts, volume = box.volume(sizes), np.bincount(step[request], box.volume(extent), len(cuts) - 1)
        by_step = plan.take(np.argsort(step[request], kind="stable"))
        for number, items in groupby(by_step.items(len(self.shape)), key=lambda item: step[item.request]):
            start, count = int(cuts[number]), int(cuts[number + 1] - cuts[number])
            out = scratch(count * self.raw.itemsize).view(self.raw)
            seen = np.zeros(count, bool) if volume[number] > count else None  # elements stored twice are compared
            for item in items:
                region, first = near[item.row]
                key = tuple(slice(axis.start - a, axis.stop - a) for axis, a in zip(item.source, first, strict=True))
                low = int(at[item.request]) - start
                place, shape = slice(low, low + int(counts[item.request])), tuple(sizes[item.request].tolist())
                into = out[place].reshape(shape)[item.dest]
                if seen is not None:
                    marks, both = seen[place].reshape(shape)[item.dest], np.empty_like(into)
                    region[key].into(both)
                    payloads.check_overlap(int(self.row[item.row]), into, both, marks)
                    marks[...] = True
                region[key].into(into)
            yield out.view(np.uint8)

    def _near(self, plan: ReadPlan, opened: Callable[[int], Region]) -> dict[int, tuple[Region, Sequence[int]]]:
        """Return, by part, the region that its elements are read from, and where it begins in the chunk."""
        parts, found = box.distinct(plan.row), dict[int, tuple[Region, Sequence[int]]]()
        rows = self.row[parts].tolist()
        for row in self.held.keys() - set(rows):
            del self.held[row]
        for part, row in zip(parts.tolist(), rows, strict=True):
            if row not in self.held:
                self.held[row] = opened(row)
            mine = slice(0, 1) if self.held[row].ordered else plan.row == part
            low, high = plan.source[mine].min(axis=0), (plan.source + plan.sizes)[mine].max(axis=0)
            found[part] = self.held[row].gathered(low.tolist(), high.tolist())
        return found
