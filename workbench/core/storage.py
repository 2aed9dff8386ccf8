"""The files of one checkpoint, each opened when it is read and checked to be the file that the catalog describes.

What is read is copied by ``pread`` into memory of our own (:mod:`workbench.core.source`). The one map left is
:meth:`SourcePool.private`, for tensors that a user asks for without a copy.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from workbench.core.memory import map_file
from workbench.core.place import FileStat, Place
from workbench.core.source import LazyBytes, PreadSource, Source, changed, rewritten
from workbench.errors import MissingFileError, UsageError

__all__ = ["ByteRange", "LazyBytes", "PreadSource", "Source", "SourcePool"]


class ByteRange(NamedTuple):
    """Bytes ``[start, stop)`` of a file, named relative to the checkpoint."""

    file: str
    start: int
    stop: int


KEPT = 32  #: files that stay open between two reads of one operation


class SourcePool:
    """The files of one checkpoint. A file is open while somebody holds its source; an idle checkpoint has none open.

    Safe to use from several threads, and in a process forked from this one.
    """

    def __init__(self, place: Place, files: Sequence[str], stats: Sequence[FileStat], io: str = "mmap") -> None:
        if io not in ("mmap", "pread"):
            raise UsageError(f"io={io!r}: choose 'mmap' or 'pread'")
        self._place, self._files, self._stats, self._io = place, files, stats, io
        self._open: weakref.WeakValueDictionary[int, PreadSource] = weakref.WeakValueDictionary()
        self._paths: dict[int, str] = {}
        self._lock = threading.Lock()
        self._kept: OrderedDict[int, PreadSource] = OrderedDict()  # while operations are under way
        self._operations = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return SourcePool, (self._place, self._files, self._stats, self._io)

    def source(self, file: int) -> Source:
        """The source of the file with this id, checked to be unchanged since the checkpoint was opened."""
        self.check(file)
        source = self._open.get(file)
        if source is None:
            with self._lock:
                source = self._open.get(file)
                if source is None:
                    source = self._open[file] = self._opened(file)
        if self._operations:
            with self._lock:
                self._kept[file] = source
                self._kept.move_to_end(file)
                if len(self._kept) > KEPT:
                    self._kept.popitem(last=False)
        return source

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Keep the last :data:`KEPT` files open that are read meanwhile: an operation of many small reads opens each
        of a few files once, which network file systems charge for.
        """
        with self._lock:
            self._operations += 1
        try:
            yield
        finally:
            with self._lock:
                self._operations -= 1
                if not self._operations:
                    self._kept.clear()

    def size(self, file: int) -> int:
        """Bytes of a file when the checkpoint was opened; -1 for one that was absent."""
        return self._stats[file].size

    def window(self, file: int, start: int, stop: int) -> LazyBytes:
        """Bytes ``[start, stop)`` of a file; a byte is read when it is first accessed."""
        return LazyBytes(self.source(file), start, stop)

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
            raise changed(name, known.size, now.st_size)
        if now.st_mtime_ns != known.mtime_ns:
            raise rewritten(name)

    def private(self, file: int, start: int, stop: int) -> np.ndarray[Any, Any] | None:
        """A copy-on-write map of a range for a user who asked for no copy, or ``None`` where maps are not in use.

        Each call maps anew: what a user writes into one tensor is seen in no other, and never in the file. The map
        shows the file, not a copy of it: it changes as the file is rewritten, and touching a page of it that the file
        has lost ends the process.
        """
        if self._io != "mmap" or stop <= start:
            return None
        source = self.source(file)  # held until the map is made
        assert isinstance(source, PreadSource)
        base = start - start % mmap.ALLOCATIONGRANULARITY
        try:
            return map_file(source.fileno(), stop - base, offset=base, private=True)[start - base :]
        except OSError:  # out of map entries: the caller copies instead
            return None

    def close(self) -> None:
        """Forget the open files; those that are being read are closed by their last reader."""
        with self._lock:
            self._open.clear()
            self._kept.clear()

    def _opened(self, file: int) -> PreadSource:
        name, known = self._files[file], self._stats[file]
        source = PreadSource(self._paths[file], name)
        if source.size != known.size:
            raise changed(name, known.size, source.size)
        if source.mtime_ns != known.mtime_ns:
            raise rewritten(name)
        return source
