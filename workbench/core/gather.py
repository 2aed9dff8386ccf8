"""Whole tensors, many at once: one plan, then bytes go from the files straight to where they belong.

::

    plan      file 0: │ q 0:512 │ k 0:128 │ up 0:1408 │ …     file 1: │ q 512:1024 │ …      in the files' order
    pieces    ├────── 32 MiB ──────┤├───── 32 MiB ─────┤…     threads take the next piece when they have done one
    result    q [ 0:512 │ 512:1024 │ … ]    k [ 0:128 │ … ]   memory of its own a tensor

A chunk that lies in its file as it lies in the result (row-major, little endian, a run of whole rows) is read there by
``pread``, whatever the checkpoint's ``io``: a copy from a map faults on every 64 KiB of the map besides, ~30,000 faults
for 2 GB, and threads that fault in one process wait for each other. Other chunks take the path of every slice.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench.core import box, memory
from workbench.core.payload import Payloads
from workbench.core.plan import Ints, ReadPlan, plan_reads
from workbench.core.read import read_selection
from workbench.core.select import whole
from workbench.core.storage import SourcePool

__all__ = ["PIECE", "gather"]

Array = np.ndarray[Any, Any]
PIECE = 32 << 20  #: bytes a thread reads before it takes the next piece
MIN_PIECE = 1 << 20  #: bytes below which handing a piece over costs more than reading it
ROUNDS = 8  #: pieces a thread of a small job, so that all threads end together


def gather(payloads: Payloads, tensors: Ints, direct: SourcePool, *, threads: int = 1) -> list[Array]:
    """Whole tensors in their raw types, contiguous, each in memory of its own; no packed types.

    Args:
        payloads: the chunks, and where archives keep theirs.
        tensors: ``(R,)`` positions in the catalog, distinct.
        direct: the same files, read by ``pread``.
        threads: how many read side by side.

    Raises:
        HoleError: some element is stored nowhere; before any byte is read.
        CorruptError, TruncatedError, ChangedError, MissingFileError: as :meth:`Payloads.array`, the first in the files'
            order.
    """
    catalog = payloads.catalog
    positions = tensors.tolist()
    shapes = catalog.shape[tensors]
    plan = plan_reads(catalog, tensors, np.zeros_like(shapes), shapes)
    have = np.zeros(len(tensors), np.int64)
    np.add.at(have, plan.request, box.volume(plan.sizes))
    twice = have > box.volume(shapes)  # chunks overlap, and have to be compared
    out = [_empty(payloads, tensor) for tensor in positions]
    pieces = _Pieces.of(payloads, plan, shapes, threads, ~twice[plan.request])
    _run(pieces, payloads, direct, out, positions, threads)
    for request in np.flatnonzero(twice).tolist():
        tensor = positions[request]
        out[request] = read_selection(payloads, tensor, whole(catalog.shape_of(tensor)))
    return out


@dataclass(frozen=True, eq=False)
class _Pieces:
    """Copies in the files' order, long ones cut; ``(M,)`` each. Bytes are of the chunk's elements.

    ``straight`` is whether the chunk is one run of bytes of its result, from byte ``at`` on; a piece of it is its bytes
    ``[low, high)``. ``cuts`` are where a thread's portions begin and end.
    """

    request: Ints
    row: Ints
    straight: Array
    at: Ints
    low: Ints
    high: Ints
    dest: Ints
    sizes: Ints
    cuts: list[int]

    @classmethod
    def of(cls, payloads: Payloads, plan: ReadPlan, shapes: Ints, threads: int, keep: Array) -> _Pieces:
        request, row, dest, sizes = (column[keep] for column in (plan.request, plan.row, plan.dest, plan.sizes))
        nbytes = payloads.catalog.chunk_nbytes[row]
        shape = shapes[request]
        steps = np.ones_like(shape)  # elements from one index of an axis to the next
        steps[:, :-1] = np.cumprod(shape[:, :0:-1], axis=1)[:, ::-1]
        # one run: along the first axis of more than one element any part will do, further in only all of it
        inner = np.cumsum(sizes > 1, axis=1) - (sizes > 1) > 0
        straight = ((sizes == shape) | ~inner).all(axis=1)
        at = (dest * steps).sum(axis=1) * (nbytes // np.maximum(box.volume(sizes), 1))

        size = int(np.clip(nbytes.sum() // (threads * ROUNDS), MIN_PIECE, PIECE))
        parts = np.where(straight, -(-nbytes // size), 1)
        of = np.repeat(np.arange(len(row)), parts)
        low = (np.arange(len(of)) - np.repeat(np.cumsum(parts) - parts, parts)) * size
        high = np.where(straight[of], np.minimum(low + size, nbytes[of]), nbytes[of])
        portion = np.cumsum(high - low) // size
        cuts = [0, *(np.flatnonzero(np.diff(portion)) + 1).tolist(), len(of)]
        return cls(request[of], row[of], straight[of], at[of], low, high, dest[of], sizes[of], cuts)

    def items(self, first: int, last: int) -> Iterator[tuple[int, int, bool, int, int, int]]:
        columns = (self.request, self.row, self.straight, self.at, self.low, self.high)
        return zip(*(column[first:last].tolist() for column in columns), strict=True)


def _empty(payloads: Payloads, tensor: int) -> Array:
    return memory.empty(payloads.catalog.shape_of(tensor), payloads.catalog.dtype_of(tensor).raw)


def _run(
    pieces: _Pieces, payloads: Payloads, direct: SourcePool, out: list[Array], tensors: list[int], threads: int
) -> None:
    flat = [array.reshape(-1).view(np.uint8) for array in out]

    def portion(first: int, last: int) -> None:
        for step, (request, row, straight, at, low, high) in enumerate(pieces.items(first, last), first):
            start = payloads.straight(row) if straight else None
            if start is not None:
                source = direct.source(int(payloads.catalog.file[row]))
                source.read_into(flat[request][at + low : at + high], start + low)
            elif low == 0:  # decoded whole, by whoever has its beginning
                dims = int(payloads.catalog.ndim[tensors[request]])
                begin, size = pieces.dest[step, :dims].tolist(), pieces.sizes[step, :dims].tolist()
                out[request][tuple(slice(a, a + n) for a, n in zip(begin, size, strict=True))] = payloads.array(row)

    spans = list(zip(pieces.cuts[:-1], pieces.cuts[1:], strict=True))
    if threads == 1 or len(spans) == 1:
        for span in spans:
            portion(*span)
        return
    with ThreadPoolExecutor(min(threads, len(spans))) as pool:  # reading lets go of the interpreter
        for _ in pool.map(portion, *zip(*spans, strict=True)):
            pass
