"""Where bytes come from: memory maps by default, ``pread`` for file systems where maps are slow.

A source is opened once per file and kept; each use first checks that the file still has the size and modification
time it had when the checkpoint was opened, because reading a map past a shortened file kills the process (SIGBUS)
and a rewritten file would mix two checkpoints in one tensor.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import numpy as np

from workbench.core import memory
from workbench.core.memory import map_file
from workbench.core.place import FileStat, Place, cannot_open
from workbench.errors import ChangedError, MissingFileError, TruncatedError, UsageError

__all__ = ["ByteRange", "MmapSource", "PreadSource", "Source", "SourcePool"]

MAX_OPEN = 256  #: files kept open at once; the usual limit of a process is 1,024


class ByteRange(NamedTuple):
    """Bytes ``[start, stop)`` of a file, named relative to the checkpoint."""

    file: str
    start: int
    stop: int


class Source(Protocol):
    """Bytes of one file."""

    size: int

    def view(self, start: int, stop: int) -> np.ndarray[Any, Any]:
        """Read-only ``uint8`` array of a range; valid as long as it is held."""

    def read_into(self, buffer: np.ndarray[Any, Any], start: int) -> None:
        """Fill a ``uint8`` buffer from ``start`` on."""

    def advise(self, advice: str) -> None:
        """Announce ``sequential`` or ``normal`` access."""

    def close(self) -> None:
        """Give the file back; views that are still held keep their memory."""


class MmapSource:
    """A read-only shared map of a whole file: no copy, and pages are the kernel's to reclaim."""

    def __init__(self, path: str, name: str) -> None:
        fd = _open(path, name)
        try:
            self.size = os.fstat(fd).st_size
            self._bytes = map_file(fd, self.size) if self.size else np.empty(0, np.uint8)
        except OSError as error:
            raise cannot_open(f"file {name!r}", error) from None
        finally:
            os.close(fd)

    def view(self, start: int, stop: int) -> np.ndarray[Any, Any]:
        return self._bytes[start:stop]

    def read_into(self, buffer: np.ndarray[Any, Any], start: int) -> None:
        buffer[:] = self._bytes[start : start + len(buffer)]

    def advise(self, advice: str) -> None:
        if len(self._bytes):
            memory.advise(self._bytes, mmap.MADV_SEQUENTIAL if advice == "sequential" else mmap.MADV_NORMAL)

    def close(self) -> None:
        self._bytes = np.empty(0, np.uint8)  # the map goes with the last view of it


class PreadSource:
    """``pread`` into memory of our own: for NFS, Lustre and FUSE, where page faults cost a round trip each."""

    def __init__(self, path: str, name: str) -> None:
        self._fd = _open(path, name)
        self._name = name
        self.size = os.fstat(self._fd).st_size

    def view(self, start: int, stop: int) -> np.ndarray[Any, Any]:
        buffer = np.empty(stop - start, np.uint8)
        self.read_into(buffer, start)
        buffer.flags.writeable = False
        return buffer

    def read_into(self, buffer: np.ndarray[Any, Any], start: int) -> None:
        left = memoryview(buffer)
        while left:
            count = os.preadv(self._fd, [left[: 1 << 30]], start)
            if count == 0:
                raise TruncatedError(f"file {self._name!r} ends at byte {start:,}, {len(left):,} bytes too early")
            start, left = start + count, left[count:]

    def advise(self, advice: str) -> None:
        if hasattr(os, "posix_fadvise"):
            kind = os.POSIX_FADV_SEQUENTIAL if advice == "sequential" else os.POSIX_FADV_NORMAL
            os.posix_fadvise(self._fd, 0, 0, kind)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        self.close()


class SourcePool:
    """The open files of one checkpoint: at most :data:`MAX_OPEN`, the least recently used closed first.

    Safe to use from several threads.
    """

    def __init__(self, place: Place, files: Sequence[str], stats: Sequence[FileStat], io: str = "mmap") -> None:
        if io not in ("mmap", "pread"):
            raise UsageError(f"io={io!r}: choose 'mmap' or 'pread'")
        self._place, self._files, self._stats = place, files, stats
        self._kind = MmapSource if io == "mmap" else PreadSource
        self._open: OrderedDict[int, Source] = OrderedDict()
        self._paths: dict[int, str] = {}
        self._lock = threading.Lock()

    @property
    def mapped(self) -> bool:
        """Whether views are maps (and cost nothing until touched)."""
        return self._kind is MmapSource

    def maps(self) -> SourcePool:
        """The same files through memory maps, of which only the pages that are looked at are read: for directories."""
        return self if self.mapped else SourcePool(self._place, self._files, self._stats)

    def source(self, file: int) -> Source:
        """The source of the file with this id, checked to be unchanged since the checkpoint was opened."""
        self.check(file)
        with self._lock:
            source = self._open.get(file)
            if source is None:
                name = self._files[file]
                source = self._kind(self._place.resolve(name), name)
                if source.size != self._stats[file].size:
                    raise _changed(name, self._stats[file].size, source.size)
                self._open[file] = source
                if (
                    len(self._open) > MAX_OPEN
                ):  # not closed: another thread may be reading it; it goes with its last user
                    self._open.popitem(last=False)
            else:
                self._open.move_to_end(file)
        return source

    def check(self, file: int) -> None:
        """Raise :class:`ChangedError` unless the file is as it was.

        Whether its path stays inside the checkpoint was checked when it was first used; to compare size and time,
        one call to the file system is enough.
        """
        name, known = self._files[file], self._stats[file]
        path = self._paths.get(file)
        if path is None:
            path = self._paths[file] = self._place.resolve(name)
        try:
            now = os.stat(path)
        except OSError as error:
            raise MissingFileError(f"file {name!r} is gone ({error.strerror}); open the checkpoint again") from None
        if now.st_size != known.size:
            raise _changed(name, known.size, now.st_size)
        if now.st_mtime_ns != known.mtime_ns:
            raise ChangedError(f"file {name!r} was rewritten after the checkpoint was opened; open it again")

    def private(self, file: int, start: int, stop: int) -> np.ndarray[Any, Any] | None:
        """A copy-on-write map of a range for the user to keep, or ``None`` where maps are not in use.

        Each call maps anew: what a user writes into one tensor is seen in no other, and never in the file.
        """
        if not self.mapped or stop <= start:
            return None
        self.check(file)
        name = self._files[file]
        fd = _open(self._place.resolve(name), name)
        try:
            base = start - start % mmap.ALLOCATIONGRANULARITY
            mapped = map_file(fd, stop - base, offset=base, private=True)
        except OSError:  # out of map entries: the caller copies instead
            return None
        finally:
            os.close(fd)
        return mapped[start - base :]

    def close(self) -> None:
        """Drop every open file."""
        with self._lock:
            self._open.clear()


@contextmanager
def sequential(source: Source) -> Iterator[Source]:
    """Announce one pass over the source, and go back to normal afterwards."""
    source.advise("sequential")
    try:
        yield source
    finally:
        source.advise("normal")


def _open(path: str, name: str) -> int:
    try:
        return os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0))
    except PermissionError:
        raise MissingFileError(f"no permission to read {name!r}; ask its owner for `chmod a+r`") from None
    except OSError as error:
        raise cannot_open(f"file {name!r}", error) from None


def _changed(name: str, before: int, now: int) -> ChangedError:
    return ChangedError(
        f"file {name!r} had {before:,} bytes when the checkpoint was opened and has {now:,} now; open it again"
    )
