"""The files of one checkpoint, each opened when it is read and checked to be the file that the catalog describes.

Bytes are copied by ``pread`` into new memory (:mod:`workbench.core.source`). The only map left is
:meth:`SourcePool.private`, for tensors that a user asks for without a copy.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from workbench.core.arrays import Ints
from workbench.core.box import distinct
from workbench.core.memory import map_file
from workbench.core.place import Place
from workbench.core.source import FileStat, LazyBytes, PreadSource, Source, compared
from workbench.errors import UsageError, WorkbenchError

KEPT = 32  #: files that stay open between two reads of one operation


class SourcePool:
    """The files of one checkpoint. A file is open while its source is held; an idle checkpoint has no open files.

    Safe to use from several threads, and in a process forked from this one.
    """

    def __init__(self, place: Place, files: Sequence[str], stats: Sequence[FileStat], io: str = "mmap") -> None:
        if io not in ("mmap", "pread"):
            raise UsageError(f"io={io!r}: choose 'mmap' or 'pread'")
        self._place, self._files, self._stats, self._io = place, files, stats, io
        self._open: weakref.WeakValueDictionary[int, Source] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()
        self._kept: OrderedDict[int, Source] = OrderedDict()  # while operations are under way
        self._operations = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return SourcePool, (self._place.pinned({}), self._files, self._stats, self._io)

    @property
    def at_once(self) -> int:
        """Reads that are worth running at the same time, whatever the number of cores."""
        return self._place.at_once

    def source(self, file: int) -> Source:
        """Return the source of the file with this id, checked to be unchanged since the checkpoint was opened."""
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
        """Return the bytes of a file when the checkpoint was opened; -1 if it was absent."""
        return self._stats[file].size

    def window(self, file: int, start: int, stop: int) -> LazyBytes:
        """Return bytes ``[start, stop)`` of a file; a byte is read when it is first accessed."""
        return LazyBytes(self.source(file), start, stop)

    @contextmanager
    def ahead(self, files: Ints, low: Ints, high: Ints) -> Iterator[None]:
        """Fetch ranges ``[low, high)`` of files that this thread is about to read piece by piece: ``(N,)`` each.

        Do nothing on disk, and raise no error: the reads that follow will raise it, with the name of what they read.
        """
        if self.at_once == 1 or not len(files):
            yield
            return
        with ExitStack() as held:
            for file in distinct(files).tolist():
                mine = files == file
                try:
                    spans = list(zip(low[mine].tolist(), high[mine].tolist(), strict=True))
                    held.enter_context(self.source(file).ahead(spans))
                except WorkbenchError:
                    continue
            yield

    def check(self, file: int) -> None:
        """Raise :class:`ChangedError` unless the file is as it was."""
        name = self._files[file]
        compared(name, self._stats[file], self._place.now(name))

    def private(self, file: int, start: int, stop: int) -> np.ndarray[Any, Any] | None:
        """Map a range copy-on-write for a user who asked for no copy; ``None`` if maps are not in use.

        Each call creates a new map: writes to one tensor are visible in no other, and never in the file. The map
        shows the file, not a copy of it: it changes as the file is rewritten, and touching a page of it that the file
        has lost kills the process.
        """
        if self._io != "mmap" or stop <= start:
            return None
        source = self.source(file)  # held until the map is made
        if not isinstance(source, PreadSource):
            return None
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

    def _opened(self, file: int) -> Source:
        name = self._files[file]
        source = self._place.source(name)
        compared(name, self._stats[file], source.stat)
        return source


class Announcer:
    """Announces one pass over each file on its first use, and withdraws that at the end.

    Sources are held weakly: the pool closes the files of a thousand ranks one after the other.
    """

    def __init__(self) -> None:
        self._announced: dict[tuple[int, int], weakref.ref[Any]] = {}

    def announce(self, pool: SourcePool, file: int) -> Source:
        """Announce that a file is about to be read; return its source, to be held during the read."""
        source = pool.source(file)
        key = id(pool), file
        known = self._announced.get(key)
        if known is None or known() is not source:
            source.advise("sequential")
            self._announced[key] = weakref.ref(source)
        return source

    def restore(self) -> None:
        """Withdraw the announcements at the end of the pass."""
        for reference in self._announced.values():
            if (source := reference()) is not None:
                source.advise("normal")
