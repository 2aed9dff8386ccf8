"""Fingerprints: 128 bits that name a tensor's content, whatever the format and the sharding it is stored in.

::

    tensor (any chunks, any files)   row-major, little endian    ▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓
    blocks of 4 MiB                                              └──── 0 ────┘└──── 1 ────┘└── 2 ──┘
    digests         xxh3_128 of each block                          d0            d1           d2
    fingerprint     xxh3_128 of "workbench tensor 1\\nbfloat16[8192,4096]\\n" + d0 + d1 + d2      32 hex digits

Tensors are read as streams (:mod:`workbench.core.transfer.streams`). Packed elements (F4, F6) are taken as the bytes in
which they are stored.

xxHash is not a cryptographic hash: equal fingerprints prove equality against accidents, not against an adversary.
Source: xxHash 0.8 (``XXH3_128bits``, canonical big-endian digests), python package ``xxhash`` 4.1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import xxhash

from workbench.core import box
from workbench.core.arrays import Array, Ints
from workbench.core.catalog import Catalog
from workbench.core.dtypes import DType
from workbench.core.executors import ordered
from workbench.core.payload import Payloads
from workbench.core.scan import Progress, workers
from workbench.core.source import Source
from workbench.core.transfer.regions import BoxRequests, portions
from workbench.core.transfer.streams import BLOCK, STEP, StreamReader, Streams, StreamUnit, renumbered, tasks
from workbench.errors import WorkbenchError

OnError = Callable[[int, WorkbenchError], None]  #: tensor, why

PLANNED = 1 << 19  #: chunks that are planned at a time, with some 160 bytes of memory for each


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

    Anonymous memory is a few MiB a thread; zstd, text and big-endian chunks are undone one chunk at a time (those
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
    total = max(int(catalog.tensor_nbytes[wanted].sum()), 1)
    done = 0
    for batch in _batches(catalog, wanted):
        run = _HashRun.of(payloads, batch, replica)
        nbytes = run.streams.nbytes
        unfinished: dict[int, list[bytes]] = {}
        failed: set[int] = set()
        hashed = ordered(
            run,
            run.tasks(),
            total,
            threads=workers(payloads.pool, threads),
            at_once=threads or payloads.pool.at_once,
            name="workbench-hash",
        )
        with closing(hashed):
            for units, results in hashed:
                for (stream, first, stop), found in zip(units, results, strict=True):
                    tensor = int(batch[stream])
                    if isinstance(found, WorkbenchError):
                        if stream not in failed:
                            if on_error is None:
                                raise found
                            failed.add(stream)
                            on_error(tensor, found)
                    else:
                        unfinished.setdefault(stream, []).extend(found)
                    done += stop - first
                    if stop == nbytes[stream]:
                        blocks = unfinished.pop(stream, [])
                        if stream not in failed:
                            yield tensor, combine(catalog.dtype_of(tensor), catalog.shape_of(tensor), blocks)
                if progress is not None:
                    progress(done / total if done < total else 1.0)


def _batches(catalog: Catalog, tensors: Ints) -> Iterator[Ints]:
    """Yield the tensors that are planned together: about :data:`PLANNED` chunks, by file."""
    first, counts = catalog.row_ptr[tensors], np.diff(catalog.row_ptr)[tensors]
    if counts.sum() <= PLANNED:
        yield tensors
        return
    some = counts > 0
    file, start = (np.zeros(len(tensors), np.int64) for _ in range(2))
    file[some], start[some] = catalog.file[first[some]], catalog.start[first[some]]
    order = np.lexsort((start, file))
    for part in portions(counts[order], PLANNED):
        yield np.sort(tensors[order[part.start : part.stop]])


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


@dataclass(frozen=True, eq=False)
class _HashRun:
    """The work of a thread on the units of a task.

    Attributes:
        tensors: ``(P,)`` the tensor of each stream.
        errors: by stream, why it cannot be read.
    """

    payloads: Payloads
    tensors: Ints
    replica: int
    streams: Streams
    errors: dict[int, WorkbenchError]
    reader: StreamReader

    @classmethod
    def of(cls, payloads: Payloads, tensors: Ints, replica: int) -> _HashRun:
        catalog, errors = payloads.catalog, dict[int, WorkbenchError]()
        boxes = BoxRequests.whole(catalog, tensors)
        streams = Streams.of(catalog, catalog.dtype[tensors], boxes.sizes, boxes, replica=replica, holes=errors)
        return cls(payloads, tensors, replica, streams, errors, StreamReader(payloads, streams))

    def __reduce__(self) -> tuple[Any, ...]:
        return _HashRun.of, (self.payloads, self.tensors, self.replica)  # all else follows from the catalog

    def tasks(self) -> Iterator[list[StreamUnit]]:
        """Yield units in the order in which their tensors' files are read."""
        catalog, ptr, rows = self.payloads.catalog, self.streams.ptr, self.streams.regions.row
        stream, first, stop = self.streams.units(catalog, least=1)
        some = ptr[1:] > ptr[:-1]
        row = np.append(rows, 0)[ptr[:-1]]
        file, start = np.where(some, catalog.file[row], -1), np.where(some, catalog.start[row], self.tensors)
        order = np.lexsort((first, stream, start[stream], file[stream]))
        return tasks(stream[order], first[order], stop[order])

    def __call__(self, units: list[StreamUnit]) -> list[list[bytes] | WorkbenchError]:
        with self.payloads.ahead(*self.reader.reach(units)):
            return [self._digests(unit) for unit in units]

    def nbytes(self, units: list[StreamUnit]) -> int:
        return sum(stop - first for _, first, stop in units)

    def part(self, tasks: list[list[StreamUnit]]) -> tuple[_HashRun, list[list[StreamUnit]]]:
        streams, local = renumbered(tasks)
        return _HashRun.of(self.payloads, self.tensors[streams], self.replica), local

    def key(self, units: list[StreamUnit]) -> bytes:
        parts = [(int(self.tensors[stream]), first, stop) for stream, first, stop in units]
        return f"fingerprints {self.replica} {parts}".encode()

    def close(self) -> None:
        self.reader.close()

    def _digests(self, unit: StreamUnit) -> list[bytes] | WorkbenchError:
        if unit.stream in self.errors:
            return self.errors[unit.stream]
        hasher = BlockDigests()
        try:
            for flat in self.reader.read(unit):
                hasher.update(flat)
        except WorkbenchError as error:
            return error
        return hasher.digests()


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
