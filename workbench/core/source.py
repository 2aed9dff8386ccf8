"""The bytes of one file, read by ``pread``: never through a map, because truncating a mapped file kills the process.

A read either fills its buffer with the bytes of the file as it was opened, or raises: the file's size and modification
time are compared after each read so that a file that is cut or rewritten meanwhile is an error, not a mixture.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from workbench.core.arrays import Array
from workbench.core.words import plural
from workbench.errors import ChangedError, MissingFileError, OpenError, TruncatedError, WorkbenchError

BLOCK = 8 << 10  #: bytes that are read around a small request
SMALL = 512  #: bytes of a run below which runs that are near each other are read together
_MOST = 1 << 30  #: bytes of one system call; Linux limits it to 2 GiB


@dataclass(frozen=True, slots=True)
class FileStat:
    """Identity of a file's content, as far as the file system or the store reports it.

    Attributes:
        size: bytes; -1 for an absent file.
        mtime_ns: nanoseconds since the epoch at which it was last modified; 0 if unknown.
        tag: the store's name for this content (an ETag); empty for local files.
    """

    size: int
    mtime_ns: int
    tag: str = ""


class Source:
    """Bytes of one file, or of memory in its place."""

    stat: FileStat
    block = BLOCK  #: bytes that are read around a small request
    span = 1 << 20  #: bytes that are read at once to pick strided elements from
    gap = 16 << 10  #: bytes between two elements from which skipping them is cheaper than reading on

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self.stat.size

    def read_into(self, buffer: Array, start: int) -> None:
        """Fill a contiguous ``uint8`` buffer from byte ``start`` on."""
        raise NotImplementedError

    def read_runs(self, rows: Array, starts: Sequence[int]) -> None:
        """Fill each row of a contiguous ``(N, nbytes) uint8`` array, from the byte of the same number on."""
        for row, start in zip(rows, starts, strict=True):
            self.read_into(row, start)

    def read(self, start: int, stop: int) -> Array:
        """Read bytes ``[start, stop)`` into memory of their own, read-only."""
        buffer = np.empty(stop - start, np.uint8)
        self.read_into(buffer, start)
        buffer.flags.writeable = False
        return buffer

    def read_bytes(self, start: int, stop: int) -> bytes:
        """Read bytes ``[start, stop)``, or to the end of a file that ends earlier; for metadata."""
        return self.read(start, min(stop, self.size)).tobytes()

    def advise(self, advice: str) -> None:
        """Announce ``sequential`` or ``normal`` access."""

    def ahead(self, spans: Sequence[tuple[int, int]]) -> AbstractContextManager[None]:
        """Fetch ranges that this thread is about to read piece by piece, if a few large requests are faster."""
        return nullcontext()

    def fetch(self, spans: Sequence[tuple[int, int]]) -> None:
        """Fetch ranges of metadata that are about to be read, all at once, if each read is a request."""


class _Descriptor:
    """Closed with its last reference; apart from its source, which a weak reference may revive until it is gone."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.close(self.number)


class PreadSource(Source):
    """An open file; closed with its last reference."""

    def __init__(self, path: str, name: str) -> None:
        self._name = name
        try:
            self._fd = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0))
        except PermissionError:
            raise MissingFileError(f"no permission to read {name!r}; ask its owner for `chmod a+r`") from None
        except OSError as error:
            raise cannot_open(f"file {name!r}", error) from None
        self._held = _Descriptor(self._fd)
        info = os.fstat(self._fd)
        self.stat = FileStat(info.st_size, info.st_mtime_ns)

    def read_into(self, buffer: Array, start: int) -> None:
        self._fill(memoryview(buffer), start)
        self._check(start, start + len(buffer))

    def read_runs(self, rows: Array, starts: Sequence[int]) -> None:
        if len(rows) == 1:
            self.read_into(rows[0], int(starts[0]))
            return
        nbytes, first = rows.shape[1], np.asarray(starts, np.int64)
        steps = np.diff(first)
        separate = (steps < 0) | (steps > self.gap) | (nbytes >= SMALL)
        buffer = np.empty(0, np.uint8)  # used again: the first touch of fresh memory costs more than the bytes
        for low, high in pairwise([0, *(np.flatnonzero(separate) + 1).tolist(), len(first)]):
            if high - low == 1:
                self._fill(memoryview(rows[low]), int(first[low]))
                continue
            at = low  # rows near each other are read with the bytes between them
            while at < high:
                stop = max(int(np.searchsorted(first[low:high], first[at] + self.span)) + low, at + 1)
                size = int(first[stop - 1] - first[at]) + nbytes
                buffer = buffer if size <= len(buffer) else np.empty(min(2 * size, self.span + nbytes), np.uint8)
                data = buffer[:size]
                self._fill(memoryview(data), int(first[at]))
                step = int(steps[at]) if stop - at > 1 else 0
                if (steps[at : stop - 1] == step).all():
                    rows[at:stop] = np.ndarray((stop - at, nbytes), np.uint8, data.data, 0, (step, 1))
                else:
                    rows[at:stop] = sliding_window_view(data, nbytes)[first[at:stop] - first[at]]
                at = stop
        self._check(int(first.min()), int(first.max()) + nbytes)

    def fileno(self) -> int:
        """Return the descriptor, valid as long as the source is held."""
        return self._fd

    def read_bytes(self, start: int, stop: int) -> bytes:
        parts, at = [], start
        while at < stop:
            try:
                part = os.pread(self._fd, min(stop - at, _MOST), at)
            except OSError as error:
                raise cannot_open(f"file {self._name!r}", error, "read") from None
            if not part:
                break
            parts.append(part)
            at += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def advise(self, advice: str) -> None:
        if hasattr(os, "posix_fadvise"):
            kind = os.POSIX_FADV_SEQUENTIAL if advice == "sequential" else os.POSIX_FADV_NORMAL
            os.posix_fadvise(self._fd, 0, 0, kind)

    def _fill(self, left: memoryview, at: int) -> None:
        while left:
            try:
                count = os.preadv(self._fd, [left[:_MOST]], at)
            except OSError as error:  # a bad sector, a server that is gone
                raise cannot_open(f"file {self._name!r}, byte {at:,},", error, "read") from None
            if count == 0:
                self._check(at, at + len(left))
                raise too_short(self._name, self.size, at + len(left))
            at, left = at + count, left[count:]

    def _check(self, start: int, stop: int) -> None:
        """Raise unless the file is still the one that was opened. Inodes are not compared: FUSE changes them."""
        now = os.fstat(self._fd)
        if now.st_size != self.size:
            raise changed(self._name, self.size, now.st_size, f"; bytes {start:,} to {stop:,} were being read")
        if now.st_mtime_ns != self.stat.mtime_ns:
            raise ChangedError(
                f"file {self._name!r} was rewritten while bytes {start:,} to {stop:,} were being read; open it again"
            )


class LazyBytes:
    """Bytes ``[start, stop)`` of a source, indexed and sliced like a ``memoryview``; read when they are accessed.

    A slice is a ``memoryview`` of separate memory. The last two blocks are kept: readers of directories read many
    small adjacent fields.
    """

    __slots__ = ("_blocks", "_source", "_start", "_stop")

    def __init__(self, source: Source, start: int, stop: int) -> None:
        self._source, self._start, self._stop = source, start, stop
        self._blocks: tuple[tuple[int, int, memoryview], ...] = ()  # replaced as a whole: threads may share it

    def __len__(self) -> int:
        return self._stop - self._start

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, slice):
            for low, high, data in self._blocks:
                if low <= key < high:
                    return data[key - low]
            if not 0 <= key < len(self):
                raise IndexError(key)
            low, _, data = self._block(key, key + 1)
            return data[key - low]
        start, stop = key.start, key.stop
        if key.step is not None or type(start) is not int or type(stop) is not int or start < 0 or stop > len(self):
            start, stop, step = key.indices(len(self))
            if step != 1:
                raise ValueError("a byte source supports only slices with step 1")
        if not 0 <= start < stop:
            return memoryview(b"")
        for low, high, data in self._blocks:
            if low <= start and stop <= high:
                return data[start - low : stop - low]
        low, _, data = self._block(start, stop)
        return data[start - low : stop - low]

    def part(self, start: int, stop: int) -> LazyBytes:
        """Return the same bytes between narrower bounds; nothing is read."""
        return LazyBytes(self._source, self._start + start, self._start + min(stop, len(self)))

    def fetch(self, starts: Sequence[int]) -> None:
        """Fetch the blocks at these positions, all at once, if each access would be a request to a store."""
        size = self._source.block
        lows = [self._start + max(min(start, len(self) - size), 0) for start in starts]
        self._source.fetch([(low, min(low + size, self._stop)) for low in lows])

    def _block(self, start: int, stop: int) -> tuple[int, int, memoryview]:
        size = self._source.block
        if stop - start > size:  # not kept: it may be large
            return start, stop, memoryview(self._source.read(self._start + start, self._start + stop))
        low = max(min(start, len(self) - size), 0)
        high = min(low + size, len(self))
        block = low, high, memoryview(self._source.read(self._start + low, self._start + high))
        self._blocks = (block, *self._blocks[:1])
        return block


def too_short(name: str, size: int, stop: int) -> TruncatedError:
    """Return the error for a file of ``size`` bytes that is read up to byte ``stop``."""
    return TruncatedError(
        f"file {name!r} ends at byte {size:,}, {plural(stop - size, 'byte')} too early; it is truncated or from "
        "another save, restore it"
    )


def cannot_open(what: str, error: OSError, verb: str = "opened") -> OpenError:
    """Return the error for a file that the system does not open; running out of descriptors is not a missing file."""
    if no_descriptor(error):
        return OpenError(f"{what} cannot be {verb}: {_NONE_FREE}")
    return MissingFileError(f"{what} cannot be {verb}: {error.strerror}")


_NONE_FREE = (
    "too many files are open and the process has no free file descriptor; close unneeded files or raise "
    "the limit (ulimit -n)"
)
_refused = 0  #: how often the process had no free descriptor


def no_descriptor(error: OSError) -> bool:
    """Return whether a file was not opened because the process (or the system) has no free descriptor.

    The failure is counted so that :func:`needs_descriptors` can discard what callers concluded from it.
    """
    global _refused
    found = error.errno in (errno.EMFILE, errno.ENFILE)
    _refused += found
    return found


@contextmanager
def needs_descriptors() -> Iterator[None]:
    """Raise an OpenError if the process had no free file descriptor meanwhile; also used as a decorator.

    Most callers treat an error on opening as a property of the file: a finding, a row without numbers, another format.
    None of these is true if no file can be opened at all. Modules that are imported late fail in the same way.
    """
    before = _refused
    try:
        yield
    except OSError as error:
        if no_descriptor(error):
            raise OpenError(f"a file cannot be opened: {_NONE_FREE}") from None
        raise
    except WorkbenchError as error:
        if _refused != before and _NONE_FREE not in str(error):
            raise OpenError(f"a file cannot be opened: {_NONE_FREE}") from None
        raise
    if _refused != before:
        raise OpenError(f"a file cannot be opened: {_NONE_FREE}")


def changed(name: str, before: int, now: int, when: str = "") -> ChangedError:
    """Return the error for a file whose size changed since the checkpoint was opened."""
    return ChangedError(
        f"file {name!r} had {plural(before, 'byte')} when the checkpoint was opened and has {now:,} now{when}; "
        "open it again"
    )


def compared(name: str, known: FileStat, now: FileStat) -> None:
    """Raise ChangedError unless a file is the one that was examined before."""
    if now.size != known.size:
        raise changed(name, known.size, now.size)
    if now.tag != known.tag if now.tag and known.tag else now.mtime_ns != known.mtime_ns:
        raise rewritten(name)


def rewritten(name: str) -> ChangedError:
    """Return the error for a file whose modification time changed since the checkpoint was opened."""
    return ChangedError(f"file {name!r} was rewritten after the checkpoint was opened; open it again")
