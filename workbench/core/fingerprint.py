"""Fingerprints: 128 bits that name a tensor's content, whatever the format and the sharding it is stored in.

::

    tensor (any chunks, any files)   row-major, little endian    ▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓
    blocks of 4 MiB                                              └──── 0 ────┘└──── 1 ────┘└── 2 ──┘
    digests         xxh3_128 of each block                          d0            d1           d2
    fingerprint     xxh3_128 of "workbench tensor 1\\nbfloat16[8192,4096]\\n" + d0 + d1 + d2      32 hex digits

Where the chunks are, in order, flat ranges of the tensor (one chunk, or rows cut between ranks), blocks are views of
the mapped file and nothing is copied; else each block is gathered into a buffer that is used again. Packed elements
(F4, F6) are taken as the bytes in which they are stored.

xxHash is no cryptographic hash: equal fingerprints prove equality against accidents, not against an adversary.
Source: xxHash 0.8 (``XXH3_128bits``, canonical big-endian digests), python package ``xxhash`` 4.1.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import xxhash

from workbench.core import box
from workbench.core import catalog as cat
from workbench.core.dtypes import DType
from workbench.core.payload import Payloads
from workbench.core.plan import plan_reads
from workbench.core.scan import Announcer, Tick, cores, in_order
from workbench.core.storage import Source
from workbench.core.stream import BLOCK, WHOLE, Layout, Part, runs
from workbench.errors import CorruptError, UnsupportedFormatError, WorkbenchError

__all__ = ["BLOCK", "Fingerprint", "combine", "range_digests", "tensor_fingerprints"]

Array = np.ndarray[Any, Any]
Ints = np.ndarray[Any, np.dtype[np.int64]]
OnError = Callable[[int, WorkbenchError], None]  #: tensor, why

GATHER = 10  #: blocks gathered at a time, over all threads: with views of the rest, memory stays under 64 MB


class Fingerprint(NamedTuple):
    """What names a tensor's content.

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
    tick: Tick | None = None,
    on_error: OnError | None = None,
) -> Iterator[tuple[int, Fingerprint]]:
    """The fingerprint of each tensor, in the order in which their files are read.

    Anonymous memory is a few blocks a thread; zstd, text and big-endian chunks are undone one chunk at a time (those
    of one tensor together where they are not cut along its first axis).

    Args:
        payloads: the catalog and its files.
        tensors: which ones; all by default.
        replica: read every element from this copy.
        threads: how many work side by side; by default as many as this process may use cores, at most 8.
        tick: told the share of bytes that is done, in the caller's thread; raising there ends the pass.
        on_error: called in the caller's thread with the tensor and why it has no fingerprint; without it the first
            such error is raised.

    Raises:
        HoleError: an element is stored nowhere; the message names the box.
        CorruptError: two chunks hold other values for one element.
        OpenError: a chunk cannot be read.
    """
    catalog = payloads.catalog
    wanted = np.arange(len(catalog)) if tensors is None else box.distinct(np.asarray(tensors, np.int64))
    layout = Layout.of(catalog, wanted, replica)
    total = max(int(catalog.tensor_nbytes[wanted].sum()), 1)
    count = threads or cores()
    announcer, done = Announcer(), 0
    unfinished: dict[int, list[bytes]] = {}
    failed: dict[int, WorkbenchError] = {}
    with ThreadPoolExecutor(count, thread_name_prefix="workbench-hash") as pool:
        run = _Run(payloads, layout, announcer, max(1, min(4, GATHER // count)))
        try:
            for results in in_order(pool, run, runs(payloads, layout)):
                for part, found in results:
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
                if tick is not None:
                    tick(done / total if done < total else 1.0)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
            announcer.restore()


def combine(dtype: DType, shape: tuple[int, ...], blocks: Iterable[bytes]) -> Fingerprint:
    """The fingerprint of a tensor of which the blocks' digests are known."""
    blocks = list(blocks)
    head = f"workbench tensor 1\n{dtype.name}[{','.join(map(str, shape))}]\n".encode()
    return Fingerprint(xxhash.xxh3_128_hexdigest(head + b"".join(blocks)), blocks)


def range_digests(source: Source, start: int, stop: int) -> list[bytes]:
    """The xxh3_128 digest of each block of at most 4 MiB of a file's bytes ``[start, stop)``."""
    return [xxhash.xxh3_128_digest(source.view(at, min(at + BLOCK, stop))) for at in range(start, stop, BLOCK)]


# ---- in a thread -----------------------------------------------------------------------------------------------------


class _Strided(Exception):
    """A chunk's elements do not lie one after the other, so its tensor has to be gathered."""


class _Run:
    """What a thread does with the parts of a task."""

    def __init__(self, payloads: Payloads, layout: Layout, announcer: Announcer, window: int) -> None:
        self._payloads, self._layout, self._announcer, self._window = payloads, layout, announcer, window
        self._own = threading.local()
        self._covered: set[int] = set()

    def __call__(self, parts: list[Part]) -> list[tuple[Part, list[bytes] | WorkbenchError]]:
        results: list[tuple[Part, list[bytes] | WorkbenchError]] = []
        for part in parts:
            try:
                results.append((part, self._digests(part)))
            except WorkbenchError as error:
                results.append((part, error))
        return results

    def _digests(self, part: Part) -> list[bytes]:
        if part.tensor in self._layout.straight:
            try:
                return self._straight(part)
            except _Strided:
                pass
        return self._gathered(part)

    # ---- chunks one after the other ----

    def _straight(self, part: Part) -> list[bytes]:
        layout, digests = self._layout, []
        begin, end = layout.ptr.get(part.tensor, (0, 0))
        at = layout.at[begin:end]
        start, stop = part.first * BLOCK, part.first * BLOCK + part.nbytes
        number = int(np.searchsorted(at, start, side="right")) - 1
        hasher, filled = xxhash.xxh3_128(), 0
        while start < stop:
            low = int(at[number])
            high = min(int(at[number + 1]), stop) if number + 1 < len(at) else stop
            view = self._bytes(int(layout.rows[begin + number]), start - low, high - low)
            for piece in _pieces(view, BLOCK - filled):
                if len(piece) == BLOCK:
                    digests.append(xxhash.xxh3_128_digest(piece))
                    continue
                hasher.update(piece)
                filled += len(piece)
                if filled == BLOCK:
                    digests.append(hasher.digest())
                    hasher, filled = xxhash.xxh3_128(), 0
            start += len(view)
            number += start == high
        return [*digests, hasher.digest()] if filled else digests

    def _bytes(self, row: int, low: int, high: int) -> Array:
        """Bytes of a chunk's own stream, or the first of them; raises _Strided where a copy is needed."""
        payloads = self._payloads
        catalog = payloads.catalog
        self._announcer.announce(payloads.pool, int(payloads.catalog.file[row]))
        if not payloads.pool.mapped and catalog.codec[row] == cat.RAW and catalog.strides is None:
            return self._read(row, low, min(high, low + BLOCK))
        array = payloads.array(row)
        if not array.flags.c_contiguous:
            raise _Strided
        flat = array.reshape(-1).view(np.uint8)
        if high > len(flat):
            raise CorruptError(f"{payloads.describe(row)} has {len(flat):,} bytes where {high:,} are needed")
        return flat[low:high]

    def _read(self, row: int, low: int, high: int) -> Array:
        catalog = self._payloads.catalog
        source = self._payloads.pool.source(int(catalog.file[row]))
        if catalog.stop[row] > source.size:
            raise catalog.truncated(row)
        start = int(catalog.start[row]) + (0 if catalog.inner is None else int(catalog.inner[row]))
        out = self._buffer(high - low)
        source.read_into(out, start + low)
        return out

    # ---- any boxes ----

    def _gathered(self, part: Part) -> list[bytes]:
        catalog, tensor = self._payloads.catalog, part.tensor
        dtype = catalog.dtype_of(tensor)
        self._check_coverage(tensor)
        if dtype.packed:
            raise UnsupportedFormatError(
                f"tensor {catalog.keys[tensor]!r}: chunks of {dtype} elements that share bytes are not in order, so "
                "that they cannot be put together; save it unsharded to fingerprint it"
            )
        held: dict[int, Array] = {}
        digests: list[bytes] = []
        for first in range(part.first, part.stop, self._window):
            stop = min(first + self._window, part.stop)
            size = min(stop * BLOCK, int(catalog.tensor_nbytes[tensor])) - first * BLOCK
            flat = self._fill(tensor, first * BLOCK // dtype.itemsize, size // dtype.itemsize, held)
            digests += [xxhash.xxh3_128_digest(block) for block in _pieces(flat, BLOCK)]
        return digests

    def _check_coverage(self, tensor: int) -> None:
        """Name the whole of a hole, not the part of it in a block."""
        if tensor not in self._covered:
            catalog, one = self._payloads.catalog, np.array([tensor])
            whole = catalog.shape[one]
            plan_reads(catalog, one, np.zeros_like(whole), whole, replica=self._layout.replica)
            self._covered.add(tensor)

    def _fill(self, tensor: int, start: int, count: int, held: dict[int, Array]) -> Array:
        """Elements ``[start, start + count)`` of the flattened tensor as bytes, valid until the next call."""
        payloads = self._payloads
        catalog = payloads.catalog
        ndim, raw = max(int(catalog.ndim[tensor]), 1), catalog.dtype_of(tensor).raw
        out = self._buffer(count * raw.itemsize).view(raw)
        _, offsets, sizes, at = box.flat_ranges(catalog.shape[[tensor]], np.array([start]), np.array([start + count]))
        owner = np.full(len(at), tensor)
        plan = plan_reads(catalog, owner, offsets, sizes, replica=self._layout.replica)
        twice = int(box.volume(plan.sizes).sum()) > count
        seen = np.zeros(count, bool) if twice else None
        places = [slice(a, a + n) for a, n in zip((at - start).tolist(), box.volume(sizes).tolist(), strict=True)]
        shapes = [tuple(row[:ndim]) for row in sizes.tolist()]
        rows = set(plan.row.tolist())
        for row in [row for row in held if row not in rows]:
            del held[row]
        last: tuple[int, Array] | None = None
        for item in plan.items(ndim):
            if last is None or last[0] != item.row:
                last = item.row, self._held(item.row, held)
            new = last[1][item.source]
            place, shape = places[item.request], shapes[item.request]
            dest = out[place].reshape(shape)[item.dest]
            if seen is not None:
                marks = seen[place].reshape(shape)[item.dest]
                if (dest[marks] != new[marks]).any():
                    raise CorruptError(
                        f"{payloads.describe(item.row)} overlaps another chunk and holds other values; which one is "
                        "meant is unknown"
                    )
                marks[...] = True
            dest[...] = new
        return out.view(np.uint8)

    def _held(self, row: int, held: dict[int, Array]) -> Array:
        """The chunk's array; what took work to undo is kept for the next window."""
        payloads = self._payloads
        if row in held:
            return held[row]
        self._announcer.announce(payloads.pool, int(payloads.catalog.file[row]))
        array = np.atleast_1d(payloads.array(row))
        if payloads.catalog.codec[row] in WHOLE or not payloads.pool.mapped:
            held[row] = array
        return array

    def _buffer(self, nbytes: int) -> Array:
        found: Array | None = getattr(self._own, "buffer", None)
        if found is None or len(found) < nbytes:
            found = self._own.buffer = np.empty(max(nbytes, 1 << 20), np.uint8)
        return found[:nbytes]


def _pieces(flat: Array, first: int) -> Iterator[Array]:
    """Views of a flat array: up to the end of the block that is under way, then block by block."""
    yield flat[:first]
    for at in range(first, len(flat), BLOCK):
        yield flat[at : at + BLOCK]
