"""Where the bytes of a data file go: a file through the page cache or around it, or an object of a store.

::

    DataFile ──► Output.write(parts, at)  back to back, up to some MiB at a time
                 Output.end(size, sync)   the size is known, and everything is durable
                 Output.close()           an unfinished output is abandoned

Source: man-pages 6.9, open(2) ``O_DIRECT``; linux ``Documentation/filesystems`` (alignment of direct I/O).
"""

from __future__ import annotations

import errno
import mmap
import os
import queue
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Protocol

from workbench.core.remote.destination import CanceledError, Destination
from workbench.export.atomic.syscalls import allocate, start_writeback
from workbench.export.atomic.writing import write_all

ALIGNED = 4096  #: direct writes begin and end at multiples of this, in the file and in memory
DIRECT = 8 << 20  #: bytes of a direct write
AHEAD = 2  #: maximum writes that wait to be sent
NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0)


class Output(Protocol):
    """A new file or object that is written from beginning to end."""

    def write(self, parts: Sequence[memoryview], at: int) -> None:
        """Append parts; ``at`` is the number of bytes before them. They are not referenced afterwards."""

    def end(self, size: int, *, sync: bool) -> None:
        """Complete it."""

    def close(self) -> None:
        """Release its resources; an object that was not ended is not created."""


class DiskOutput:
    """A file."""

    def __init__(self, path: str, size: int) -> None:
        """Create a file with space for ``size`` bytes.

        Raises:
            OSError: the system refuses, or the file exists.
        """
        self._fd = self._opened(path)
        try:
            allocate(self._fd, size)
        except BaseException:
            self.close()
            with suppress(OSError):
                os.unlink(path)
            raise

    def _opened(self, path: str) -> int:
        return os.open(path, NEW, 0o666)

    def write(self, parts: Sequence[memoryview], at: int) -> None:
        """Write parts in one call, and start writing them back to disk."""
        start = at
        done = os.pwritev(self._fd, parts, at)
        for part in parts:
            if done < len(part):  # interrupted, or nearly full: the rest, or the error
                write_all(self._fd, part[done:], at + done)
            at += len(part)
            done = max(done - len(part), 0)
        start_writeback(self._fd, start, at - start)

    def end(self, size: int, *, sync: bool) -> None:
        """Give the file its size, and sync it to disk."""
        os.ftruncate(self._fd, size)
        if sync:
            os.fdatasync(self._fd)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


class DirectOutput(DiskOutput):
    """A file written around the page cache, through one aligned buffer; the last block is padded, then cut off.

    Attributes:
        refused: whether the file system does not support that: then the file is written as usual.
    """

    def __init__(self, path: str, size: int) -> None:
        self.refused = False
        self._filled = self._at = 0
        super().__init__(path, size)
        self._buffer = None if self.refused else mmap.mmap(-1, DIRECT)  # begins on a page

    def _opened(self, path: str) -> int:
        flag = getattr(os, "O_DIRECT", 0)
        self.refused = not flag
        try:
            return os.open(path, NEW | flag, 0o666)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self.refused = True
        with suppress(FileNotFoundError):  # some file systems refuse after they have created it
            os.unlink(path)
        return os.open(path, NEW, 0o666)

    def write(self, parts: Sequence[memoryview], at: int) -> None:
        """Copy parts into the buffer; write it when it is full."""
        if self._buffer is None:
            super().write(parts, at)
            return
        for part in parts:
            while part:
                count = min(len(part), DIRECT - self._filled)
                self._buffer[self._filled : self._filled + count] = part[:count]
                self._filled, part = self._filled + count, part[count:]
                if self._filled == DIRECT:
                    self._flush(self._buffer)

    def end(self, size: int, *, sync: bool) -> None:
        """Write the rest in whole blocks, and give the file its size."""
        if self._buffer is not None and self._filled:
            padded = -(-self._filled // ALIGNED) * ALIGNED
            self._buffer[self._filled : padded] = bytes(padded - self._filled)
            self._filled = padded
            self._flush(self._buffer)
        super().end(size, sync=sync)

    def _flush(self, buffer: mmap.mmap) -> None:
        with memoryview(buffer) as whole:
            done = 0
            while done < self._filled:
                with whole[done : self._filled] as part:
                    try:
                        count = os.pwrite(self._fd, part, self._at + done)
                    except OSError as error:
                        if error.errno != errno.EINVAL or self.refused:
                            raise
                        self._through_cache()  # it requires another alignment, or wrote less than a block
                        continue
                done += count
        self._at += self._filled
        self._filled = 0

    def _through_cache(self) -> None:
        import fcntl

        self.refused = True
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        fcntl.fcntl(self._fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)

    def close(self) -> None:
        """Close the file."""
        super().close()
        self._buffer = None


class StoreOutput:
    """An object that is sent while it is written, in parts that the store checks; it is visible once it is complete."""

    def __init__(self, to: Destination, key: str, size: int) -> None:
        """Begin to send an object of about ``size`` bytes."""
        self._parts: queue.Queue[bytes | None] = queue.Queue(AHEAD)
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="workbench-send")
        self._sent = self._pool.submit(to.stream, key, size, self._taken(), self._stop)
        self._key, self._ended = key, False

    def write(self, parts: Sequence[memoryview], at: int) -> None:
        """Pass parts on to be sent; raise the error of an earlier part, if any."""
        self._put(b"".join(parts))

    def end(self, size: int, *, sync: bool) -> None:
        """Wait until the store has the whole object, which is always durable.

        Raises:
            WriteError: the store refuses.
        """
        self._put(None)
        self._sent.result()
        self._ended = True

    def close(self) -> None:
        """Abandon the object unless it was ended."""
        if not self._ended:
            self._stop.set()
            with suppress(queue.Full):
                self._parts.put_nowait(None)
        self._pool.shutdown()

    def _put(self, data: bytes | None) -> None:
        while True:
            if self._sent.done():
                self._sent.result()
            with suppress(queue.Full):
                self._parts.put(data, timeout=0.2)
                return

    def _taken(self) -> Iterator[bytes]:
        while (data := self._parts.get()) is not None:
            if self._stop.is_set():
                break
            yield data
        if self._stop.is_set():
            raise CanceledError(self._key)
