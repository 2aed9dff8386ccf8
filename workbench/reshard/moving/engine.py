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
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from workbench.core.dtypes import ALL
from workbench.core.fingerprint import BLOCK
from workbench.core.payload import Payloads
from workbench.core.scan import Announcer, Tick, cores, in_order
from workbench.core.stream import WHOLE
from workbench.errors import WriteError
from workbench.reshard.atomic.syscalls import allocate
from workbench.reshard.atomic.writing import write_all, writing
from workbench.reshard.moving.copies import Copies
from workbench.reshard.moving.filemap import FileMap
from workbench.reshard.moving.journal import Journal, Kept, Written, plan_of
from workbench.reshard.moving.kept import kept_pieces, said
from workbench.reshard.moving.results import Results
from workbench.reshard.moving.units import MOST, Filler

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
        units = _Units.of(self, kept)
        results = Results(self.maps, self.copies.code, kept, units.file, units.piece)
        total = max(self.read_nbytes, 1)
        done = total - int(units.nbytes.sum())
        filler = Filler(self.maps, self.copies, self.payloads, Announcer(), list(paths))
        syncs: list[Future[None]] = []
        with (
            ThreadPoolExecutor(count, thread_name_prefix="workbench-export") as pool,
            ThreadPoolExecutor(1, thread_name_prefix="workbench-sync") as syncer,
        ):

            def sync(file: int) -> None:
                crcs = [crc for _, crc in results.of_file(file)] if results.is_full(file) else None
                syncs.append(syncer.submit(_sync, self.maps[file], paths[file], crcs, journal, results.take(file)))

            try:
                for file in filter(results.is_full, range(len(self.maps))):
                    sync(file)
                for batch in in_order(pool, filler, units.tasks()):
                    for unit in batch:
                        results.add(unit)
                        done += unit.nbytes
                        large = journal is not None and results.unrecorded[unit.file] >= RECORD
                        if large or results.is_full(unit.file):
                            sync(unit.file)
                    if syncs and syncs[-1].done():
                        syncs[-1].result()  # a disk that fails ends the pass
                    if tick is not None and done < total:
                        tick(done / total)
                for waiting in syncs:
                    waiting.result()
            finally:
                pool.shutdown(wait=True, cancel_futures=True)
                filler.announcer.restore()
        if tick is not None:
            tick(1.0)
        return [[written for written, _ in results.of_file(file)] for file in range(len(self.maps))]


def prepare(payloads: Payloads, maps: Sequence[FileMap]) -> Job:
    """Plan the pass over all maps.

    Raises:
        HoleError: an element that is wanted is stored nowhere; names the box.
        UnsupportedFormatError: elements that cannot be cast, or put together.
        UsageError: maps that contradict themselves.
    """
    for one in maps:
        one.check()
    copies = Copies.of(payloads.catalog, [one.pieces for one in maps])
    return Job(tuple(maps), copies, payloads)


@dataclass(frozen=True, eq=False)
class _Units:
    """Parts of pieces, in the order in which they are worked on: elements ``[first, stop)`` of a piece's stream."""

    file: Ints
    piece: Ints
    first: Ints
    stop: Ints
    nbytes: Ints

    @classmethod
    def of(cls, job: Job, kept: Kept) -> _Units:
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
        base = np.cumsum([0, *count])
        parts[[base[one] + at for one, pieces in kept.items() for at in pieces]] = 0
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


def _sync(
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
