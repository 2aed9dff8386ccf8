"""The pass that fills target files: read, cast, hash and write each byte once, with a few MB of memory per thread.

::

    units    parts of pieces, at most 32 MiB, cut where blocks of fingerprints end, in the order of the targets
             (of the sources, where these are very many files)
    thread   ┌ 1 MiB of the piece's stream: pread from the source directly into the buffer, or gathered ┐
             │   xxh3 of it · cast · xxh3 and CRC-32 of what is written · pwrite at its place           │ repeated
             └───────────────── the buffer stays in a core's cache between these steps ─────────────────┘
    file     allocated in full first; written back while others are still filled; synced when it is full

Nothing is written before everything is planned: a hole, a type that cannot be cast, or a wrong map raises in
:func:`prepare`.
"""

from __future__ import annotations

import os
import zlib
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench.core.arrays import Ints
from workbench.core.crc32 import crc32_of_two
from workbench.core.dtypes import ALL, DType
from workbench.core.executors import cores, ordered
from workbench.core.fingerprint import BlockDigests, combine
from workbench.core.payload import Payloads
from workbench.core.scan import Progress
from workbench.core.transfer.streams import MOST, Streams, tasks
from workbench.errors import WriteError
from workbench.export.atomic.journal import Journal, Kept, Written
from workbench.export.atomic.syscalls import allocate
from workbench.export.atomic.writing import write_all, writing
from workbench.export.casts import CastError
from workbench.export.filemap import FileMap
from workbench.export.moving.kept import kept_notes, kept_pieces
from workbench.export.moving.plan import plan_of, streams_of
from workbench.export.moving.units import Done, Filler

RECORD = 1 << 30  #: bytes after which the finished part of a file is synced and recorded
MANY_FILES = 64  #: from this many source files on, they are read one after the other, wherever their bytes go


@dataclass(frozen=True, eq=False)
class ExportJob:
    """Everything planned; :meth:`run` moves the bytes."""

    maps: tuple[FileMap, ...]
    streams: Streams  #: the pieces of all files
    payloads: Payloads  #: through maps

    @property
    def nbytes(self) -> int:
        """Bytes of all target files."""
        return sum(one.size for one in self.maps)

    @property
    def read_nbytes(self) -> int:
        """Bytes of elements that will be read."""
        return int(self.streams.nbytes.sum())

    def plan(self, source: str) -> str:
        """Return the identity of the job, used to resume a temp: equal for the same bytes at the same places.

        Args:
            source: real path of the checkpoint.
        """
        return plan_of(source, self.payloads.catalog, self.streams, self.maps)

    def peak_nbytes(self, threads: int | None = None) -> int:
        """Return an upper bound on the anonymous memory of a pass: buffers, and chunks that are decoded whole."""
        catalog = self.payloads.catalog
        code, rows = self.streams.code, self.streams.regions.row[self.streams.regions.decoded]
        written = np.concatenate([code[:0], *(one.pieces.dtype for one in self.maps)])
        # values that change are widened, changed, narrowed and compared
        changed = bool((written != code).any()) or any(one.pieces.change for one in self.maps)
        return (threads or cores()) * (MOST * (8 if changed else 1) + int(catalog.chunk_nbytes[rows].max(initial=0)))

    def run(
        self,
        paths: Sequence[str],
        *,
        threads: int | None = None,
        progress: Progress | None = None,
        journal: Journal | None = None,
    ) -> list[list[Written]]:
        """Write and sync every file; the caller must sync the folders.

        Args:
            paths: path of each map's file; existing files are overwritten.
            threads: number of threads; by default the cores available to this process, up to 8.
            progress: called with the fraction of bytes done, in the caller's thread; raise an exception to cancel.
            journal: pieces that an earlier run recorded are read back and kept if intact; written pieces are recorded.

        Returns:
            for each map, the result of each of its pieces.

        Raises:
            WriteError: there is not enough space, or the disk failed; the message names the file.
            CorruptError: two chunks contain different values for one element.
            OpenError: a chunk cannot be read.
        """
        count = threads or cores()
        kept: Kept = {}
        if journal is not None:
            journal.tidy(paths)
            kept = kept_pieces(self.maps, paths, journal.recorded, threads=count, progress=progress)
            journal.notes += kept_notes(kept, self.maps)
        for file, (one, path) in enumerate(zip(self.maps, paths, strict=True)):
            _create(one, path, go_on=file in kept)
        units = piece, first, stop = _ordered(self, kept)
        results = ExportResults(self.maps, self.streams.code, kept, piece)
        total = max(self.read_nbytes, 1)
        done = total - int((stop - first).sum())
        filler = Filler(self.maps, self.streams, self.payloads, paths)
        batches = ordered(
            filler,
            tasks(*units),
            total,
            threads=count,
            at_once=threads or self.payloads.pool.at_once,
            name="workbench-export",
        )
        syncs: list[Future[None]] = []
        with ThreadPoolExecutor(1, thread_name_prefix="workbench-sync") as syncer, closing(batches):

            def sync(file: int) -> None:
                crcs = [crc for _, crc in results.of_file(file)] if results.is_full(file) else None
                syncs.append(syncer.submit(_sync, self.maps[file], paths[file], crcs, journal, results.take(file)))

            for file in filter(results.is_full, range(len(self.maps))):
                sync(file)
            for task, batch in batches:
                for part, unit in zip(task, batch, strict=True):
                    unit.file, unit.piece = filler.file_of(part), part.stream  # a worker numbers what it was sent
                    results.add(unit)
                    done += unit.nbytes
                    large = journal is not None and results.unrecorded[unit.file] >= RECORD
                    if large or results.is_full(unit.file):
                        sync(unit.file)
                if syncs and syncs[-1].done():
                    syncs[-1].result()  # a failing disk ends the pass
                if progress is not None and done < total:
                    progress(done / total)
            for waiting in syncs:
                waiting.result()
        if progress is not None:
            progress(1.0)
        return [[written for written, _ in results.of_file(file)] for file in range(len(self.maps))]


def prepare(payloads: Payloads, maps: Sequence[FileMap]) -> ExportJob:
    """Plan the pass over all maps.

    Raises:
        HoleError: a requested element is not stored; the message names the box.
        UnsupportedFormatError: elements cannot be cast or joined.
        UsageError: a map is inconsistent.
    """
    for one in maps:
        one.check()
    return ExportJob(tuple(maps), streams_of(payloads.catalog, [one.pieces for one in maps]), payloads)


def _ordered(job: ExportJob, kept: Kept) -> tuple[Ints, Ints, Ints]:
    """Return the units of all pieces except those that an earlier run already wrote, in the order of processing."""
    streams, catalog = job.streams, job.payloads.catalog
    count = np.array([len(one.pieces) for one in job.maps], np.int64)
    base = np.cumsum([0, *count])
    done = [base[one] + at for one, pieces in kept.items() for at in pieces]
    piece, first, stop = streams.units(catalog, done=done)
    start = np.concatenate([np.empty(0, np.int64), *(one.start for one in job.maps)])
    order = np.lexsort((first, start[piece], np.repeat(np.arange(len(job.maps)), count)[piece]))
    regions, ptr = streams.regions, streams.ptr
    if len(np.bincount(catalog.file[regions.row]).nonzero()[0]) > MANY_FILES:
        span = int(streams.nbytes.max(initial=0)) + 1
        scaled = piece.astype(float) * span + first  # 53 bits: only an order
        region = np.searchsorted(regions.into.astype(float) * span + regions.at, scaled, side="right") - 1
        row = regions.row[np.clip(region, ptr[piece], ptr[piece + 1] - 1)]
        order = np.lexsort((first, catalog.start[row], catalog.file[row]))
    return piece[order], first[order], stop[order]


def _create(one: FileMap, path: str, *, go_on: bool) -> None:
    """Create the file at its full size with its literals; otherwise empty, unless it is resumed."""
    with writing(one.name):
        how = os.O_WRONLY | os.O_CREAT | (0 if go_on else os.O_TRUNC) | getattr(os, "O_CLOEXEC", 0)
        fd = os.open(path, how, 0o666)
        try:
            allocate(fd, one.size)
            known = [(int(one.start[piece]), data) for piece, data in one.pieces.literal.items()]
            for at, data in (*one.literals, *known):
                write_all(fd, memoryview(data), at)
        finally:
            os.close(fd)


def _sync(
    one: FileMap, path: str, crcs: list[int] | None, journal: Journal | None, new: list[tuple[int, Written]]
) -> None:
    """Write the bytes that depend on checksums once these are known, sync everything, then record what is new."""
    with writing(one.name):
        fd = os.open(path, os.O_WRONLY | getattr(os, "O_CLOEXEC", 0))
        try:
            for at, data in one.finish(crcs) if one.finish is not None and crcs is not None else ():
                if at < 0 or at + len(data) > one.size:
                    raise WriteError(f"file {one.name!r}: its directory would end at byte {at + len(data):,}")
                write_all(fd, memoryview(data), at)
            os.fsync(fd)
        finally:
            os.close(fd)
    if journal is not None and new:
        journal.record(one.name, new)


# ---- progress of a pass ----------------------------------------------------------------------------------------------


class ExportResults:
    """The results so far. Pieces of all files are numbered consecutively, as in units.

    Attributes:
        unrecorded: by file, bytes of the pieces that :meth:`take` has not returned yet.
    """

    def __init__(self, maps: Sequence[FileMap], code: Ints, kept: Kept, piece: Ints) -> None:
        """Create the results of pieces, complete once all their units are added.

        Args:
            code: ``(P,)`` element type of each piece's source.
            kept: pieces that an earlier run wrote.
            piece: the piece of each expected unit; pieces without units have no elements to read.
        """
        self._maps, self._code = maps, code
        self._base = np.cumsum([0, *(len(one.pieces) for one in maps)]).tolist()
        file = np.searchsorted(self._base, piece, side="right") - 1
        self._units_of_file = np.bincount(file, minlength=len(maps)).tolist()
        self._units_of_piece = np.bincount(piece, minlength=self._base[-1]).tolist()
        self._parts: dict[int, list[Done]] = defaultdict(list)
        self._new: dict[int, list[tuple[int, Written]]] = defaultdict(list)
        self.unrecorded = [0] * len(maps)
        self._found = {self._base[one] + at: found for one, pieces in kept.items() for at, found in pieces.items()}
        for one, base in enumerate(self._base[:-1]):
            for at in range(base, self._base[one + 1]):
                if at not in self._found and not self._units_of_piece[at]:
                    self._found[at] = self._result(one, at - base, at, [])

    def add(self, unit: Done) -> None:
        """Add a unit that was written."""
        self._parts[unit.piece].append(unit)
        self._units_of_file[unit.file] -= 1
        self._units_of_piece[unit.piece] -= 1
        if not self._units_of_piece[unit.piece]:
            at = unit.piece - self._base[unit.file]
            found = self._result(unit.file, at, unit.piece, self._parts.pop(unit.piece))
            self._found[unit.piece] = found
            self._new[unit.file].append((at, found[0]))
            self.unrecorded[unit.file] += int(self._maps[unit.file].pieces.nbytes[at])

    def is_full(self, file: int) -> bool:
        """Return whether every piece of a file is written."""
        return not self._units_of_file[file]

    def take(self, file: int) -> list[tuple[int, Written]]:
        """Return the pieces of a file written since the last call, by their numbers in the file."""
        self.unrecorded[file] = 0
        return self._new.pop(file, [])

    def of_file(self, file: int) -> list[tuple[Written, int]]:
        """Return the result of each piece of a full file, and its CRC-32 as written."""
        return [self._found[at] for at in range(self._base[file], self._base[file + 1])]

    def _result(self, file: int, piece: int, at: int, parts: list[Done]) -> tuple[Written, int]:
        """Combine the fingerprints and CRC-32s of a piece's units."""
        pieces = self._maps[file].pieces
        shape, new = pieces.shape_of(piece), pieces.dtype_of(piece)
        old = ALL[self._code[at]]
        if piece in pieces.literal:
            return _literal(new, shape, pieces.literal[piece])
        parts.sort(key=lambda part: part.first)
        crc, error = 0, CastError() if pieces.change_of(piece, old) is not None else None
        for part in parts:
            crc = crc32_of_two(crc, part.crc, part.written)
            if error is not None and part.cast is not None:
                error.merge(part.cast)
        source = combine(old, shape, [digest for part in parts for digest in part.source])
        if error is None:
            return Written(source, source, None), crc
        return Written(source, combine(new, shape, [digest for part in parts for digest in part.target]), error), crc


def _literal(dtype: DType, shape: tuple[int, ...], data: bytes | np.ndarray[Any, Any]) -> tuple[Written, int]:
    """Return the result of a literal, which is its own source."""
    digests = BlockDigests()
    digests.update(np.frombuffer(data, np.uint8))
    found = combine(dtype, shape, digests.digests())
    return Written(found, found, None), zlib.crc32(data)
