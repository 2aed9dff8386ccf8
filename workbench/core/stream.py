"""A tensor as one stream of bytes: row-major, little endian, whatever its chunks; and who reads which part of it.

::

    stored   file 0: rows 0:4        straight: the chunks, one after the other, are the stream
             file 1: rows 4:8
    stored   file 0: columns 0:2     not straight: each block of the stream has to be gathered from both
             file 1: columns 2:4
    parts    blocks 0 … 7 │ 8 … 15 │ …     32 MB each for a thread; small tensors several at a time
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from workbench.core import box, codecs, dtypes
from workbench.core.arrays import Array, Ints
from workbench.core.catalog import Catalog
from workbench.core.payload import Payloads

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
