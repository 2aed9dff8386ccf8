"""Logs that grow: of a file that was read before, only the part added since is read.

::

    first read   ├─────────── terminated lines ─────────────┤ half a line
    again        the same inode, not shorter, and the same head and tail digest before the mark:
                                                            ├── read from here on ──┤ half a line
                 anything else: the file was truncated, replaced or rewritten, and is read from its beginning

A number that is changed in place in the middle of a file, while it grows at its end, is not noticed. Files in a store
are always read as a whole.
"""

from __future__ import annotations

import copy
import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from workbench.core.source import PreadSource, Source
from workbench.runs.logs.lines import end_of_lines, stripped_lines
from workbench.runs.logs.record import LogFull, MetricLog

HEAD, TAIL = (
    4 << 10,
    64 << 10,
)  #: bytes at the beginning, and before the end of the last read, that have to be the same
KEPT = 8_000_000  #: values of all logs together that are kept: 192 MB


class LineTaker(Protocol):
    """Takes lines; see :class:`~workbench.runs.logs.tables.JsonRows`."""

    @property
    def kept(self) -> int: ...

    def feed(self, line: str) -> None: ...

    def done(self) -> list[MetricLog]: ...


class FileReading(Protocol):
    """A file that is being read."""

    @property
    def kept(self) -> int:
        """Values so far."""

    def read(self, source: Source, start: int) -> int:
        """Take the complete part from a byte on; return where it ends."""

    def rest(self, source: Source, start: int) -> None:
        """Take the unterminated rest."""

    def done(self) -> list[MetricLog]:
        """Return the logs that were read. Called once."""


class LinesReading:
    """A text file."""

    def __init__(self, reader: LineTaker, path: str) -> None:
        self._reader, self._path, self._full = reader, path, False

    def read(self, source: Source, start: int) -> int:
        stop = end_of_lines(source, start)
        self._take(source, start, stop)
        return stop

    def rest(self, source: Source, start: int) -> None:
        self._take(source, start, source.size)

    @property
    def kept(self) -> int:
        return self._reader.kept

    def _take(self, source: Source, start: int, stop: int) -> None:
        if self._full:
            return
        feed = self._reader.feed
        try:
            for line in stripped_lines(source, start, stop):
                feed(line)
        except LogFull:
            self._full = True

    def done(self) -> list[MetricLog]:
        logs = self._reader.done()
        if self._full:
            for log in logs:
                log.notes.append(f"{self._path!r} has more than {log.limit:,} values; the rest was not read")
        return logs


@dataclass
class _Known:
    """The state of a file when it was last read."""

    inode: tuple[int, int]
    size: int
    mtime_ns: int
    stop: int
    digest: bytes
    reading: FileReading


class GrownLogs:
    """Earlier readings of files, by path. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[str, str], _Known] = OrderedDict()
        self.nbytes = 0  #: read so far, without digests

    def read(
        self, path: str, kind: str, source: PreadSource, make: Callable[[], FileReading]
    ) -> tuple[FileReading, int]:
        """Return a copy of the reading of a file up to its last complete part, and where that ends."""
        info = os.fstat(source.fileno())
        inode, key = (info.st_dev, info.st_ino), (path, kind)
        with self._lock:
            known = self._known.pop(key, None)  # while it is used here, another thread reads the file itself
        if known is None or not self._grew(known, inode, source):
            known = _Known(inode, 0, 0, 0, b"", make())
        if source.size > known.stop:
            stop = known.reading.read(source, known.stop)
            self.nbytes += stop - known.stop
            known.stop = stop
        known.size, known.mtime_ns = source.size, source.stat.mtime_ns
        known.digest = _digest(source, known.stop)
        out = copy.deepcopy(known.reading)
        with self._lock:
            self._known[key] = known
            while len(self._known) > 1 and sum(one.reading.kept for one in self._known.values()) > KEPT:
                self._known.popitem(last=False)
        return out, known.stop

    @staticmethod
    def _grew(known: _Known, inode: tuple[int, int], source: Source) -> bool:
        if inode != known.inode or source.size < known.size:
            return False
        if source.size == known.size:
            return source.stat.mtime_ns == known.mtime_ns
        return _digest(source, known.stop) == known.digest


def _digest(source: Source, stop: int) -> bytes:
    found = hashlib.blake2b(source.read_bytes(0, min(HEAD, stop)))
    found.update(source.read_bytes(max(0, stop - TAIL), stop))
    return found.digest()


def read_grown(
    source: Source, path: str, kind: str, make: Callable[[], FileReading], known: GrownLogs | None, growing: bool
) -> list[MetricLog]:
    """Return the logs of a file.

    Args:
        source: the file.
        path: its absolute path.
        kind: how it is read; one file may be read in several ways.
        make: returns an empty reading.
        known: earlier readings; ``None`` if none are to be kept.
        growing: leave out an unterminated rest.
    """
    if known is None or not isinstance(source, PreadSource):
        reading = make()
        stop = reading.read(source, 0)
    else:
        reading, stop = known.read(path, kind, source, make)
    if not growing:
        reading.rest(source, stop)
    return reading.done()
