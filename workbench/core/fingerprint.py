"""Fingerprints: 128 bits that name a tensor's content, whatever the format and the sharding it is stored in.

::

    tensor (any chunks, any files)   row-major, little endian    ▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓
    blocks of 4 MiB                                              └──── 0 ────┘└──── 1 ────┘└── 2 ──┘
    digests         xxh3_128 of each block                          d0            d1           d2
    fingerprint     xxh3_128 of "workbench tensor 1\\nbfloat16[8192,4096]\\n" + d0 + d1 + d2      32 hex digits

If the chunks are, in order, flat ranges of the tensor (one chunk, or rows cut between ranks), they are read one
after the other; otherwise each block is gathered. Both use a buffer that is reused. Packed elements
(F4, F6) are taken as the bytes in which they are stored.

xxHash is not a cryptographic hash: equal fingerprints prove equality against accidents, not against an adversary.
Source: xxHash 0.8 (``XXH3_128bits``, canonical big-endian digests), python package ``xxhash`` 4.1.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import xxhash

from workbench.core import box
from workbench.core.arrays import Array, Ints
from workbench.core.build import row_major
from workbench.core.dtypes import DType
from workbench.core.executors import ordered
from workbench.core.payload import Payloads
from workbench.core.plan import plan_reads
from workbench.core.region import Region
from workbench.core.scan import Announcer, Progress, workers
from workbench.core.source import Source
from workbench.core.stream import BLOCK, TASK, BoxStream, StreamLayout, StreamPart, ThreadBuffer, runs
from workbench.errors import CorruptError, UnsupportedFormatError, WorkbenchError

OnError = Callable[[int, WorkbenchError], None]  #: tensor, why

STEP = 1 << 20  #: bytes gathered, or read, at a time: they are still in a core's cache when they are hashed
PIECE = 64 << 10  #: minimum bytes of a copy from one chunk
MAX_OPEN = 32  #: files that a thread keeps open while it gathers
GATHER = 10  #: blocks gathered at a time, over all threads, if there are very many chunks: 40 MB of buffers


class Fingerprint(NamedTuple):
    """The digests that identify a tensor's content.

    Attributes:
        hex: 32 hex digits over dtype, shape and the blocks.
        blocks: the 16-byte digest of each block of 4 MiB; none for a tensor without elements.
    """

    hex: str
    blocks: list[bytes]


def tensor_fingerprints(
    payloads: Payloads,
    *,
    tensors: Ints | None = None,
    replica: int = 0,
    threads: int | None = None,
    progress: Progress | None = None,
    on_error: OnError | None = None,
) -> Iterator[tuple[int, Fingerprint]]:
    """Yield the fingerprint of each tensor, in the order in which their files are read.

    Anonymous memory is a few blocks a thread; zstd, text and big-endian chunks are undone one chunk at a time (those
    of one tensor together where they are not cut along its first axis).

    Args:
        payloads: the catalog and its files.
        tensors: which ones; all by default.
        replica: read every element from this copy.
        threads: number of threads; by default the cores available to this process, up to 8.
        progress: called with the fraction of bytes done, in the caller's thread; raise an exception to cancel.
        on_error: called in the caller's thread with the tensor and the reason why it has no fingerprint; without it,
            the first such error is raised.

    Raises:
        HoleError: an element is not stored; the message names the box.
        CorruptError: two chunks contain different values for one element.
        OpenError: a chunk cannot be read.
    """
    catalog = payloads.catalog
    wanted = np.arange(len(catalog)) if tensors is None else box.distinct(np.asarray(tensors, np.int64))
    layout = StreamLayout.of(catalog, wanted, replica)
    total = max(int(catalog.tensor_nbytes[wanted].sum()), 1)
    count = workers(payloads.pool, threads)
    done = 0
    unfinished: dict[int, list[bytes]] = {}
    failed: dict[int, WorkbenchError] = {}
    tasks = ordered(
        _HashRun(payloads, layout, max(1, min(4, GATHER // count))),
        runs(payloads, layout),
        total,
        threads=count,
        at_once=threads or payloads.pool.at_once,
        name="workbench-hash",
    )
    with closing(tasks):
        for parts, results in tasks:
            for part, found in zip(parts, results, strict=True):
                if isinstance(found, WorkbenchError):
                    if part.tensor not in failed:
                        if on_error is None:
                            raise found
                        failed[part.tensor] = found
                        on_error(part.tensor, found)
                else:
                    unfinished.setdefault(part.tensor, []).extend(found)
                done += part.nbytes
                if part.last:
                    blocks = unfinished.pop(part.tensor, [])
                    if part.tensor not in failed:
                        yield part.tensor, combine(catalog.dtype_of(part.tensor), part.shape, blocks)
            if progress is not None:
                progress(done / total if done < total else 1.0)


def combine(dtype: DType, shape: tuple[int, ...], blocks: Iterable[bytes]) -> Fingerprint:
    """Return the fingerprint of a tensor from the digests of its blocks."""
    blocks = list(blocks)
    head = f"workbench tensor 1\n{dtype.name}[{','.join(map(str, shape))}]\n".encode()
    return Fingerprint(xxhash.xxh3_128_hexdigest(head + b"".join(blocks)), blocks)


def range_digests(source: Source, start: int, stop: int) -> list[bytes]:
    """Return the xxh3_128 digest of each block of up to 4 MiB of a file's bytes ``[start, stop)``."""
    hasher, buffer = BlockDigests(), np.empty(min(STEP, max(stop - start, 0)), np.uint8)
    for at in range(start, stop, STEP):
        flat = buffer[: min(STEP, stop - at)]
        source.read_into(flat, at)
        hasher.update(flat)
    return hasher.digests()


# ---- in a thread -----------------------------------------------------------------------------------------------------


class _Strided(Exception):
    """A chunk's elements are not contiguous, so its tensor has to be gathered."""


class _HashRun:
    """The work of a thread on the parts of a task."""

    def __init__(self, payloads: Payloads, layout: StreamLayout, window: int) -> None:
        self._payloads, self._layout, self._window = payloads, layout, window
        self._announcer = Announcer()
        self._own, self._buffer = threading.local(), ThreadBuffer()

    def __call__(self, parts: list[StreamPart]) -> list[list[bytes] | WorkbenchError]:
        results: list[list[bytes] | WorkbenchError] = []
        with self._payloads.ahead(*self._reach(parts)):
            for part in parts:
                try:
                    results.append(self._digests(part))
                except WorkbenchError as error:
                    results.append(error)
        return results

    def nbytes(self, parts: list[StreamPart]) -> int:
        return sum(part.nbytes for part in parts)

    def part(self, tasks: list[list[StreamPart]]) -> tuple[_PartialHash, list[list[StreamPart]]]:
        tensors = {part.tensor for parts in tasks for part in parts}
        return _PartialHash(self._payloads, sorted(tensors), self._layout.replica, self._window), tasks

    def key(self, parts: list[StreamPart]) -> bytes:
        return f"fingerprints {self._layout.replica} {[tuple(part) for part in parts]}".encode()

    def close(self) -> None:
        self._announcer.restore()

    def _digests(self, part: StreamPart) -> list[bytes]:
        if part.tensor in self._layout.straight:
            try:
                return self._straight(part)
            except _Strided:
                pass
        return self._gathered(part)

    def _reach(self, parts: list[StreamPart]) -> tuple[Ints, Ints, Ints]:
        """Return the chunk rows that the parts are made of, and the byte ranges of their elements.

        If the chunks do not follow each other, only those of whole tensors: a part of a tensor reads a part of each.
        """
        layout, catalog = self._layout, self._payloads.catalog
        found = [np.empty((3, 0), np.int64)]
        for part in parts if self._payloads.pool.at_once > 1 else ():  # nothing is fetched ahead from a disk
            begin, end = layout.ptr.get(part.tensor, (0, 0))
            rows = layout.rows[begin:end]
            low, high = np.zeros(len(rows), np.int64), catalog.chunk_nbytes[rows]
            if part.tensor in layout.straight:
                at, start = layout.at[begin:end], part.first * BLOCK
                low, high = np.maximum(start - at, 0), np.minimum(start + part.nbytes - at, high)
            elif part.first or not part.last:
                continue
            found.append(np.stack([rows, low, high])[:, low < high])
        rows, low, high = np.concatenate(found, axis=1)
        return rows, low, high

    # ---- chunks one after the other ----

    def _straight(self, part: StreamPart) -> list[bytes]:
        layout, hasher = self._layout, BlockDigests()
        begin, end = layout.ptr.get(part.tensor, (0, 0))
        at = layout.at[begin:end]
        start, stop = part.first * BLOCK, part.first * BLOCK + part.nbytes
        number = int(np.searchsorted(at, start, side="right")) - 1
        while start < stop:
            low = int(at[number])
            high = min(int(at[number + 1]), stop) if number + 1 < len(at) else stop
            flat = self._next(int(layout.rows[begin + number]), start - low, high - low)
            hasher.update(flat)
            start += len(flat)
            number += start == high
        return hasher.digests()

    def _next(self, row: int, low: int, high: int) -> Array:
        """Return bytes of a chunk's own stream from ``low`` to ``high`` or less; raise _Strided if it has none."""
        known: tuple[int, Region] | None = getattr(self._own, "region", None)  # the last: its file stays open
        if known is None or known[0] != row:
            self._own.region = None  # memory of decoded chunks is freed first
            self._own.source = self._announcer.announce(self._payloads.pool, int(self._payloads.catalog.file[row]))
            known = self._own.region = row, self._payloads.region(row)
        region, itemsize = known[1], known[1].raw.itemsize
        if not region.contiguous:
            raise _Strided
        if high > region.nbytes:
            raise CorruptError(f"{self._payloads.describe(row)} has {region.nbytes:,} bytes where {high:,} are needed")
        first, stop = low // itemsize, min(-(-high // itemsize), low // itemsize + max(STEP // itemsize, 1))
        flat = region.flat(first, stop, self._buffer(max(STEP, itemsize))).view(np.uint8)
        return flat[low - first * itemsize : high - first * itemsize]

    # ---- any boxes ----

    def _gathered(self, part: StreamPart) -> list[bytes]:
        catalog, tensor = self._payloads.catalog, part.tensor
        dtype = catalog.dtype_of(tensor)
        stream = self._stream(tensor)
        if dtype.packed:
            raise UnsupportedFormatError(
                f"tensor {catalog.keys[tensor]!r}: its chunks of {dtype} elements, which share bytes, are not in order "
                "and cannot be joined; save it unsharded to fingerprint it"
            )
        a, b = self._layout.ptr[tensor]
        step = max(min(STEP, BLOCK), dtype.itemsize)
        while step < self._window * BLOCK and step < PIECE * (b - a):  # many chunks: fewer, larger copies
            step *= 2
        window = max(TASK, step)
        hasher = BlockDigests()
        begin, end = part.first * BLOCK, part.first * BLOCK + part.nbytes
        opened = partial(self._opened, len(stream.shape))
        for first in range(begin, end, window):
            cuts = np.append(np.arange(first, min(first + window, end), step), min(first + window, end))
            for flat in stream.read(self._payloads, cuts // dtype.itemsize, opened, self._buffer):
                hasher.update(flat)
        return hasher.digests()

    def _stream(self, tensor: int) -> BoxStream:
        """Plan a whole tensor: an error then names the whole hole, not only its part in a block."""
        catalog, one = self._payloads.catalog, np.array([tensor])
        whole = catalog.shape[one].astype(np.int64)
        plan = plan_reads(catalog, one, np.zeros_like(whole), whole, replica=self._layout.replica)
        dims, steps = max(int(catalog.ndim[tensor]), 1), row_major(whole)
        lo = (plan.dest * steps).sum(axis=1)
        hi = ((plan.dest + plan.sizes - 1) * steps).sum(axis=1) + 1
        boxes = (column[:, :dims] for column in (plan.source, plan.dest, plan.sizes))
        return BoxStream(whole[0, :dims], catalog.dtype_of(tensor).raw, plan.row, lo, hi, *boxes)

    def _opened(self, dims: int, row: int) -> Region:
        if not hasattr(self._own, "sources"):
            self._own.sources = deque(maxlen=MAX_OPEN)
        file = int(self._payloads.catalog.file[row])
        self._own.sources.append(self._announcer.announce(self._payloads.pool, file))
        return self._payloads.region(row).widened(dims)


class _PartialHash(NamedTuple):
    """The run of some tensors, as it is sent: their layout follows from the catalog."""

    payloads: Payloads
    tensors: list[int]
    replica: int
    window: int

    def __reduce__(self) -> tuple[Any, ...]:
        return _of_tensors, tuple(self)


def _of_tensors(payloads: Payloads, tensors: list[int], replica: int, window: int) -> _HashRun:
    return _HashRun(payloads, StreamLayout.of(payloads.catalog, np.array(tensors, np.int64), replica), window)


class BlockDigests:
    """Digests of a stream's blocks, however it comes; it begins where a block begins."""

    def __init__(self) -> None:
        self._done: list[bytes] = []
        self._open, self._filled = xxhash.xxh3_128(), 0

    def update(self, flat: Array) -> None:
        """Add more of the stream: up to the end of the current block, then block by block."""
        at = 0
        while at < len(flat):
            piece = flat[at : at + BLOCK - self._filled]
            at += len(piece)
            if len(piece) == BLOCK:
                self._done.append(xxhash.xxh3_128_digest(piece))
                continue
            self._open.update(piece)
            self._filled += len(piece)
            if self._filled == BLOCK:
                self._done.append(self._open.digest())
                self._open, self._filled = xxhash.xxh3_128(), 0

    def digests(self) -> list[bytes]:
        """Return the digests of all blocks; the last block may be incomplete."""
        return [*self._done, self._open.digest()] if self._filled else self._done
