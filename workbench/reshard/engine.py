"""The pass that fills target files: read, cast, hash and write each byte once, in memory of a few MB a thread.

::

    units    parts of pieces, at most 32 MiB, cut where blocks of fingerprints end, in the order of the targets
             (of the sources, where these are very many files)
    thread   ┌ 1 MiB of the piece's stream: pread from the source straight into the buffer, or gathered ┐
             │   xxh3 of it · cast · xxh3 and CRC-32 of what is written · pwrite at its place           │ repeated
             └───────────────── the buffer stays in a core's cache between these steps ─────────────────┘
    file     room for all of it first; written back while others are still filled; synced when it is full

Nothing is written before everything is planned: a hole, a type that cannot be cast and a wrong map raise in
:func:`prepare`.
"""

from __future__ import annotations

import os
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from workbench.core.crc32 import crc32_of_two
from workbench.core.dtypes import ALL, DType
from workbench.core.fingerprint import BLOCK, BlockDigests, combine
from workbench.core.payload import Payloads
from workbench.core.scan import Announcer, Tick, cores, in_order
from workbench.core.storage import SourcePool
from workbench.core.stream import WHOLE
from workbench.errors import WriteError
from workbench.reshard.casts import CastError
from workbench.reshard.copies import Copies
from workbench.reshard.filemap import FileMap
from workbench.reshard.journal import Journal, Kept, Written, plan_of
from workbench.reshard.kept import kept_pieces, said
from workbench.reshard.syscalls import allocate
from workbench.reshard.units import MOST, Done, Filler
from workbench.reshard.writing import write_all, writing

__all__ = ["Job", "Written", "prepare"]

Array = np.ndarray[Any, Any]
Ints = np.ndarray[Any, np.dtype[np.int64]]

TASK = 32 << 20  #: bytes that a thread takes at a time
UNIT_COST = 64 << 10  #: bytes that one more unit is worth
RECORD = 1 << 30  #: bytes after which what a file has so far is synced and recorded
MANY_FILES = 64  #: source files from which on they are read one after the other, wherever their bytes go


@dataclass(frozen=True, eq=False)
class Job:
    """Everything planned; :meth:`run` moves the bytes."""

    maps: tuple[FileMap, ...]
    copies: Copies
    payloads: Payloads  #: through maps
    direct: SourcePool  #: the same files, read by ``pread``

    @property
    def nbytes(self) -> int:
        """Bytes of all target files."""
        return sum(one.size for one in self.maps)

    @property
    def read_nbytes(self) -> int:
        """Bytes of elements that will be read."""
        return int(((self.copies.numel * _BITS[self.copies.code] + 7) // 8).sum())

    def plan(self, source: str) -> str:
        """What names the job, for a temp to be gone on with: the same for the same bytes at the same places.

        Args:
            source: real path of the checkpoint.
        """
        return plan_of(source, self.payloads.catalog, self.copies, self.maps)

    def peak_nbytes(self, threads: int | None = None) -> int:
        """Anonymous memory that a pass of so many threads takes at most: buffers, and chunks that are decoded whole."""
        catalog = self.payloads.catalog
        rows = self.copies.row[np.isin(catalog.codec[self.copies.row], WHOLE)]
        written = np.concatenate([self.copies.code[:0], *(one.pieces.dtype for one in self.maps)])
        # values that change are widened, changed, narrowed and compared
        changed = bool((written != self.copies.code).any()) or any(one.pieces.change for one in self.maps)
        return (threads or cores()) * (MOST * (8 if changed else 1) + int(catalog.chunk_nbytes[rows].max(initial=0)))

    def run(
        self,
        paths: Sequence[str],
        *,
        threads: int | None = None,
        tick: Tick | None = None,
        journal: Journal | None = None,
    ) -> list[list[Written]]:
        """Write and sync every file; folders are the caller's to sync.

        Args:
            paths: where each map's file goes; one that exists is overwritten.
            threads: how many work side by side; by default as many as this process may use cores, at most 8.
            tick: told the share of bytes that is done, in the caller's thread; raising there ends the pass.
            journal: what an earlier run recorded is read again and kept where it is whole; what is written is recorded.

        Returns:
            for each map, what became of each of its pieces.

        Raises:
            WriteError: no room, or the disk failed; says which file.
            CorruptError: two chunks hold other values for one element.
            OpenError: a chunk cannot be read.
        """
        count = threads or cores()
        kept: Kept = {}
        if journal is not None:
            journal.tidy(paths)
            kept = kept_pieces(self.maps, paths, journal.recorded, threads=count, tick=tick)
            journal.notes += said(kept, self.maps)
        for file, (one, path) in enumerate(zip(self.maps, paths, strict=True)):
            _create(one, path, go_on=file in kept)
        bases = np.cumsum([0, *(len(one.pieces) for one in self.maps)]).tolist()
        results = {bases[file] + at: one for file, pieces in kept.items() for at, one in pieces.items()}
        units = _Units.of(self, list(results))
        left = np.bincount(units.file, minlength=len(self.maps))
        left_of_piece = np.bincount(units.piece, minlength=bases[-1])
        found: dict[int, list[Done]] = defaultdict(list)
        fresh: dict[int, list[int]] = defaultdict(list)  # pieces of a file that are written and not recorded
        unrecorded = [0] * len(self.maps)  # their bytes
        total = max(self.read_nbytes, 1)
        done = total - int(units.nbytes.sum())
        filler = Filler(self.maps, self.copies, self.payloads, self.direct, Announcer(), list(paths))
        syncs: list[Future[None]] = []
        with (
            ThreadPoolExecutor(count, thread_name_prefix="workbench-export") as pool,
            ThreadPoolExecutor(1, thread_name_prefix="workbench-sync") as syncer,
        ):

            def complete(file: int, *, last: bool) -> None:
                one, base = self.maps[file], bases[file]
                crcs = None
                if last:
                    for at in range(base, bases[file + 1]):
                        if at not in results:  # without elements
                            results[at] = self._result(file, at, at - base, [])
                    crcs = [results[at][1] for at in range(base, bases[file + 1])]
                new = [(at - base, results[at][0]) for at in fresh.pop(file, [])]
                unrecorded[file] = 0
                syncs.append(syncer.submit(_finish, one, paths[file], crcs, journal, new))

            try:
                for file in np.flatnonzero(left == 0).tolist():
                    complete(file, last=True)
                for batch in in_order(pool, filler, units.tasks()):
                    for unit in batch:
                        found[unit.piece].append(unit)
                        done += unit.nbytes
                        left[unit.file] -= 1
                        left_of_piece[unit.piece] -= 1
                        if not left_of_piece[unit.piece]:
                            piece = unit.piece - bases[unit.file]
                            results[unit.piece] = self._result(unit.file, unit.piece, piece, found.pop(unit.piece))
                            fresh[unit.file].append(unit.piece)
                            unrecorded[unit.file] += int(self.maps[unit.file].pieces.nbytes[piece])
                        if not left[unit.file]:
                            complete(unit.file, last=True)
                        elif journal is not None and unrecorded[unit.file] >= RECORD:
                            complete(unit.file, last=False)
                    if syncs and syncs[-1].done():
                        syncs[-1].result()  # a disk that fails ends the pass
                    if tick is not None and done < total:
                        tick(done / total)
                for sync in syncs:
                    sync.result()
            finally:
                pool.shutdown(wait=True, cancel_futures=True)
                filler.announcer.restore()
        if tick is not None:
            tick(1.0)
        return [[results[at][0] for at in range(a, b)] for a, b in pairwise(bases)]

    def _result(self, file: int, at: int, piece: int, parts: list[Done]) -> tuple[Written, int]:
        """Fingerprints and CRC-32 of a piece from those of its units."""
        pieces = self.maps[file].pieces
        shape, new = pieces.shape_of(piece), pieces.dtype_of(piece)
        old = ALL[self.copies.code[at]]
        parts.sort(key=lambda part: part.first)
        if piece in pieces.literal:
            return _literal(new, shape, pieces.literal[piece])
        crc, error = 0, CastError() if pieces.change_of(piece, old) is not None else None
        for part in parts:
            crc = crc32_of_two(crc, part.crc, part.written)
            if error is not None and part.cast is not None:
                error.merge(part.cast)
        source = combine(old, shape, [digest for part in parts for digest in part.source])
        if error is None:
            return Written(source, source, None), crc
        return Written(source, combine(new, shape, [digest for part in parts for digest in part.target]), error), crc


def prepare(payloads: Payloads, maps: Sequence[FileMap], direct: SourcePool) -> Job:
    """Plan the pass over all maps.

    Args:
        direct: the files of ``payloads``, read by ``pread``.

    Raises:
        HoleError: an element that is wanted is stored nowhere; names the box.
        UnsupportedFormatError: elements that cannot be cast, or put together.
        UsageError: maps that contradict themselves.
    """
    for one in maps:
        one.check()
    copies = Copies.of(payloads.catalog, [one.pieces for one in maps])
    mapped = payloads if payloads.pool.mapped else Payloads(payloads.catalog, payloads.pool.maps())
    return Job(tuple(maps), copies, mapped, direct)


@dataclass(frozen=True, eq=False)
class _Units:
    """Parts of pieces, in the order in which they are worked on: elements ``[first, stop)`` of a piece's stream."""

    file: Ints
    piece: Ints
    first: Ints
    stop: Ints
    nbytes: Ints

    @classmethod
    def of(cls, job: Job, kept: Sequence[int]) -> _Units:
        """Of all pieces but those that are kept."""
        copies, catalog = job.copies, job.payloads.catalog
        count = np.array([len(one.pieces) for one in job.maps], np.int64)
        file = np.repeat(np.arange(len(job.maps)), count)
        start = np.concatenate([np.empty(0, np.int64), *(one.start for one in job.maps)])
        bits = _BITS[copies.code]
        # units end where blocks end, of elements before and after a cast: multiples of BLOCK elements do
        step = BLOCK * np.maximum(TASK * 8 // (BLOCK * bits), 1)
        undone = np.isin(catalog.codec[copies.row], WHOLE)  # chunks undone whole: not once for each unit
        pieces = np.repeat(np.arange(len(copies.numel)), np.diff(copies.ptr))
        step[np.isin(np.arange(len(step)), pieces[undone]) | (bits % 8 != 0)] = 1 << 62
        parts = -(-copies.numel // step)
        parts[list(kept)] = 0
        piece = np.repeat(np.arange(len(parts)), parts)
        first = (np.arange(len(piece)) - np.repeat(np.cumsum(parts) - parts, parts)) * step[piece]
        stop = np.minimum(first + np.minimum(step[piece], copies.numel[piece]), copies.numel[piece])
        nbytes = ((stop - first) * bits[piece] + 7) // 8
        order = np.lexsort((first, start[piece], file[piece]))
        sources = catalog.file[copies.row]
        if len(np.bincount(sources).nonzero()[0]) > MANY_FILES:
            span = int(copies.numel.max(initial=0)) + 1
            scaled = piece.astype(float) * span + first  # 53 bits: only an order
            copy = np.searchsorted(pieces.astype(float) * span + copies.lo, scaled, side="right") - 1
            row = copies.row[np.clip(copy, copies.ptr[piece], copies.ptr[piece + 1] - 1)]
            order = np.lexsort((first, catalog.start[row], catalog.file[row]))
        return cls(*(column[order] for column in (file[piece], piece, first, stop, nbytes)))

    def tasks(self) -> Iterator[list[tuple[int, int, int, int]]]:
        """Runs of units of about :data:`TASK` bytes: ``(file, piece, first, stop)``."""
        turn = np.cumsum(self.nbytes + UNIT_COST) // (TASK + UNIT_COST)
        cuts = [0, *(np.flatnonzero(np.diff(turn)) + 1).tolist(), len(turn)]
        columns = [column.tolist() for column in (self.file, self.piece, self.first, self.stop)]
        for a, b in pairwise(cuts):
            if b > a:
                yield list(zip(*(column[a:b] for column in columns), strict=True))


def _create(one: FileMap, path: str, *, go_on: bool) -> None:
    """The file at its size, with its literals; empty but for these, unless it is gone on with."""
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


def _literal(dtype: DType, shape: tuple[int, ...], data: bytes | Array) -> tuple[Written, int]:
    """What becomes of a literal: it is its own source."""
    digests = BlockDigests()
    digests.update(np.frombuffer(data, np.uint8))
    found = combine(dtype, shape, digests.digests())
    return Written(found, found, None), zlib.crc32(data)


def _finish(
    one: FileMap, path: str, crcs: list[int] | None, journal: Journal | None, new: list[tuple[int, Written]]
) -> None:
    """The bytes that depend on checksums, once these are known; everything on the disk; then what is new recorded."""
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


_BITS = np.array([dtype.bits for dtype in ALL], np.int64)
