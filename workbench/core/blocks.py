"""Digests of blocks of files, read plainly: every byte of a file, whatever it means.

Reads are ``pread`` into a small buffer that is used again, not a map: a file that is shortened meanwhile, or a sector
that the disk cannot give back, is then an answer about that block instead of the end of the process.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import xxhash

from workbench.core.place import Place
from workbench.core.scan import Tick, cores, in_order
from workbench.core.source import cannot_open
from workbench.errors import WorkbenchError

__all__ = ["DIGEST", "Blocks", "file_digests"]

Array = np.ndarray[Any, Any]
Ints = np.ndarray[Any, np.dtype[np.int64]]

DIGEST = 16  #: bytes of a digest
WINDOW = 1 << 20  #: bytes read at a time: they are still in a core's cache when they are hashed
TASK = 32 << 20  #: bytes that a thread takes at a time
TASK_BLOCKS = 8192  #: … and blocks


class Blocks(NamedTuple):
    """Blocks of one file: ``(N,)`` bytes where each begins and ends, in ascending order."""

    file: str
    starts: Ints
    stops: Ints


def file_digests(
    place: Place, files: Sequence[Blocks], *, threads: int | None = None, tick: Tick | None = None
) -> Iterator[tuple[int, Array, dict[int, str]]]:
    """The xxh3_128 digest of every block, file by file.

    Yields:
        the position in ``files``; ``(N, 16) uint8`` digests; and the blocks that could not be read, with the reason
        (their digests are zeros).
    """
    total, done = max(sum(int((one.stops - one.starts).sum()) for one in files), 1), 0
    last = {number: at for at, (number, *_) in enumerate(_tasks(files))}
    digests: list[Array] = []
    failed: dict[int, str] = {}
    with ThreadPoolExecutor(threads or cores(), thread_name_prefix="workbench-blocks") as pool:
        try:
            run = _Run(place, files)
            for at, (number, first, nbytes, found, errors) in enumerate(in_order(pool, run, _tasks(files))):
                digests.append(found)
                failed |= {first + k: why for k, why in errors.items()}
                done += nbytes
                if tick is not None:
                    tick(done / total)
                if last[number] == at:
                    yield number, np.concatenate(digests), failed
                    digests, failed = [], {}
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _tasks(files: Sequence[Blocks]) -> Iterator[tuple[int, int, int]]:
    """``(file, first block, stop)``: about :data:`TASK` bytes of one file."""
    for number, one in enumerate(files):
        first, ends = 0, np.cumsum(one.stops - one.starts)
        while first < len(ends) or first == 0:
            before = int(ends[first - 1]) if first else 0
            stop = max(int(np.searchsorted(ends, before + TASK, side="right")), first + 1)
            stop = min(stop, first + TASK_BLOCKS, len(ends))
            yield number, first, stop
            first = max(stop, first + 1)


class _Run:
    """What a thread does with a task."""

    def __init__(self, place: Place, files: Sequence[Blocks]) -> None:
        self._place, self._files = place, files
        self._own = threading.local()

    def __call__(self, task: tuple[int, int, int]) -> tuple[int, int, int, Array, dict[int, str]]:
        number, first, stop = task
        one = self._files[number]
        starts, stops = one.starts[first:stop].tolist(), one.stops[first:stop].tolist()
        out = np.zeros((len(starts), DIGEST), np.uint8)
        nbytes = sum(stops) - sum(starts)
        if not hasattr(self._own, "buffer"):
            self._own.buffer = memoryview(bytearray(WINDOW))
        try:
            fd = os.open(self._place.resolve(one.file), os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        except (WorkbenchError, OSError) as error:
            why = str(cannot_open("the file", error) if isinstance(error, OSError) else error)
            return number, first, nbytes, out, dict.fromkeys(range(len(starts)), why)
        try:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            errors = _hash(fd, starts, stops, self._own.buffer, out)
        finally:
            os.close(fd)
        return number, first, nbytes, out, errors


def _hash(fd: int, starts: list[int], stops: list[int], buffer: memoryview, out: Array) -> dict[int, str]:
    """Fill in the digests of blocks; small ones that lie together are read together."""
    errors: dict[int, str] = {}
    low = high = 0  # what the buffer holds
    for k, (start, stop) in enumerate(zip(starts, stops, strict=True)):
        try:
            if stop - start > len(buffer):
                digest = _long(fd, start, stop, buffer)
                low = high = 0
            else:
                if not low <= start <= stop <= high:
                    try:
                        low, high = start, start + os.preadv(fd, [buffer], start)
                    except OSError:  # perhaps only the blocks behind this one are unreadable
                        low = high = 0
                        low, high = start, start + os.preadv(fd, [buffer[: stop - start]], start)
                if high < stop:
                    raise EOFError(f"the file ends at byte {high:,}")
                digest = xxhash.xxh3_128_digest(buffer[start - low : stop - low])
            out[k] = np.frombuffer(digest, np.uint8)
        except OSError as error:
            errors[k] = error.strerror or str(error)
        except EOFError as error:
            errors[k] = str(error)
    return errors


def _long(fd: int, start: int, stop: int, buffer: memoryview) -> bytes:
    hasher = xxhash.xxh3_128()
    while start < stop:
        count = os.preadv(fd, [buffer[: stop - start]], start)
        if count == 0:
            raise EOFError(f"the file ends at byte {start:,}")
        hasher.update(buffer[:count])
        start += count
    return hasher.digest()
