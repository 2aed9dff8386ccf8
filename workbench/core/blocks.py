"""Digests of blocks of files: every byte of a file, independent of its meaning.

Blocks are read with ``pread`` into a small reusable buffer, not through a map: a file truncated meanwhile, or a sector
that the disk cannot read, then gives an error for that block instead of killing the process.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from typing import Any, NamedTuple

import numpy as np
import xxhash

from workbench.core.arrays import Array, Ints
from workbench.core.executors import cores, ordered
from workbench.core.place import Place, stat_or_absent
from workbench.core.scan import Progress
from workbench.core.source import Source
from workbench.errors import OpenError, WorkbenchError

DIGEST = 16  #: bytes of a digest
WINDOW = 1 << 20  #: bytes read at a time: they are still in a core's cache when they are hashed
TASK = 32 << 20  #: bytes in one task of a thread
TASK_BLOCKS = 8192  #: … and blocks


class FileBlocks(NamedTuple):
    """Blocks of one file: ``(N,)`` bytes where each begins and ends, in ascending order."""

    file: str
    starts: Ints
    stops: Ints


def file_digests(
    place: Place, files: Sequence[FileBlocks], *, threads: int | None = None, progress: Progress | None = None
) -> Iterator[tuple[int, Array, dict[int, str]]]:
    """Yield the xxh3_128 digest of every block, file by file.

    Yields:
        the position in ``files``; ``(N, 16) uint8`` digests; and the blocks that could not be read, with the reason
        (their digests are zeros).
    """
    total, done = max(sum(int((one.stops - one.starts).sum()) for one in files), 1), 0
    digests: list[Array] = []
    failed: dict[int, str] = {}
    run = _HashBlocks(place, files)
    results = ordered(
        run,
        _tasks(files),
        total,
        threads=threads or max(cores(), place.at_once),
        at_once=threads or place.at_once,
        name="workbench-blocks",
    )
    with closing(results):
        for task, (found, errors) in results:
            number, first, stop = task
            digests.append(found)
            failed |= {first + k: why for k, why in errors.items()}
            done += run.nbytes(task)
            if progress is not None:
                progress(done / total)
            if stop == len(files[number].starts):
                yield number, np.concatenate(digests), failed
                digests, failed = [], {}


def _tasks(files: Sequence[FileBlocks]) -> Iterator[tuple[int, int, int]]:
    """Yield ``(file, first block, stop)``, each about :data:`TASK` bytes of one file."""
    for number, one in enumerate(files):
        first, ends = 0, np.cumsum(one.stops - one.starts)
        while first < len(ends) or first == 0:
            before = int(ends[first - 1]) if first else 0
            stop = max(int(np.searchsorted(ends, before + TASK, side="right")), first + 1)
            stop = min(stop, first + TASK_BLOCKS, len(ends))
            yield number, first, stop
            first = max(stop, first + 1)


_Task = tuple[int, int, int]
_Found = tuple[Array, dict[int, str]]


class _HashBlocks:
    """The work of a thread on one task."""

    def __init__(self, place: Place, files: Sequence[FileBlocks]) -> None:
        self._place, self._files = place, files
        self._own = threading.local()

    def __reduce__(self) -> tuple[Any, ...]:
        return _HashBlocks, (self._place, self._files)

    def __call__(self, task: _Task) -> _Found:
        number, first, stop = task
        one = self._files[number]
        starts, stops = one.starts[first:stop].tolist(), one.stops[first:stop].tolist()
        out = np.zeros((len(starts), DIGEST), np.uint8)
        if not hasattr(self._own, "buffer"):
            self._own.buffer = np.empty(WINDOW, np.uint8)
        try:
            source = self._place.source(one.file)
        except WorkbenchError as error:
            return out, dict.fromkeys(range(len(starts)), str(error))
        source.advise("sequential")
        with ExitStack() as held:
            with suppress(WorkbenchError):  # the reads themselves meet the error, and know which block it concerns
                held.enter_context(source.ahead(list(zip(starts, stops, strict=True))))
            return out, _hash(source, starts, stops, self._own.buffer, out)

    def nbytes(self, task: _Task) -> int:
        one, blocks = self._files[task[0]], slice(*task[1:])
        return int((one.stops[blocks] - one.starts[blocks]).sum())

    def part(self, tasks: list[_Task]) -> tuple[_HashBlocks, list[_Task]]:
        parts = [self._part(task) for task in tasks]
        known = {one.file: stat_or_absent(self._place, one.file) for one in parts}
        place = self._place.pinned({name: stat for name, stat in known.items() if stat.size >= 0})
        return _HashBlocks(place, parts), [(at, 0, len(one.starts)) for at, one in enumerate(parts)]

    def key(self, task: _Task) -> bytes:
        one = self._part(task)
        return f"blocks {one.file!r}".encode("utf-8", "surrogatepass") + one.starts.tobytes() + one.stops.tobytes()

    def close(self) -> None:
        pass

    def _part(self, task: _Task) -> FileBlocks:
        one, blocks = self._files[task[0]], slice(*task[1:])
        return FileBlocks(one.file, one.starts[blocks], one.stops[blocks])


def _hash(source: Source, starts: list[int], stops: list[int], buffer: Array, out: Array) -> dict[int, str]:
    """Fill in the digests of blocks; adjacent small ones are read together."""
    errors: dict[int, str] = {}
    low = high = 0  # what the buffer holds
    for k, (start, stop) in enumerate(zip(starts, stops, strict=True)):
        try:
            if stop - start > len(buffer):
                digest = _long(source, start, stop, buffer)
                low = high = 0
            else:
                if not low <= start <= stop <= high:
                    try:
                        low, high = start, max(min(start + len(buffer), source.size), stop)
                        source.read_into(buffer[: high - low], low)
                    except OpenError:  # perhaps only the blocks after this one are unreadable
                        low, high = start, stop
                        source.read_into(buffer[: high - low], low)
                digest = xxhash.xxh3_128_digest(buffer[start - low : stop - low])
            out[k] = np.frombuffer(digest, np.uint8)
        except OpenError as error:
            low = high = 0
            errors[k] = str(error)
    return errors


def _long(source: Source, start: int, stop: int, buffer: Array) -> bytes:
    hasher = xxhash.xxh3_128()
    for at in range(start, stop, len(buffer)):
        part = buffer[: min(len(buffer), stop - at)]
        source.read_into(part, at)
        hasher.update(part)
    return hasher.digest()
