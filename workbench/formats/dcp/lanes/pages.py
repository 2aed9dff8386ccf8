"""The bytes of a pickle: all of them in memory, or those of a huge file that are needed at the time.

A ``.metadata`` of ten million chunks has 2 GB. Each pass over it goes from its beginning to its end, and a window that
moves along is enough.
"""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np

from workbench.core.source import Source

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

PAGE = 20  #: bits of a page's size
RESIDENT = 128 << 20  #: bytes of a file that stay in memory


class HeldBytes:
    """Bytes that are in memory, as an ``array`` of ``(n,)``."""

    def __init__(self, data: bytes | memoryview) -> None:
        self._data = data
        self.array: Bytes = np.frombuffer(data, np.uint8)

    @property
    def data(self) -> Any:
        """The same bytes, to be indexed and sliced as ``bytes`` are."""
        return self._data

    def need(self, start: int, stop: int) -> int:
        """Bring bytes ``[start, stop)`` into ``array``; return where the bytes end that are there."""
        return len(self.array)


class PagedBytes(HeldBytes):
    """Bytes of a file. Where they are not in memory, ``array`` is zero.

    Reading raises ChangedError if the file has changed since it was opened.
    """

    def __init__(self, source: Source, *, bits: int = PAGE, resident: int = RESIDENT) -> None:
        self._source, self._bits, self._resident = source, bits, resident
        self._map = mmap.mmap(-1, source.size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.array = np.frombuffer(self._map, np.uint8)
        self._here = bytearray((source.size >> bits) + 1)

    @property
    def data(self) -> Any:
        """The same bytes, to be indexed and sliced as ``bytes`` are; what is accessed is read."""
        return self

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, key: Any) -> Any:
        if type(key) is int:
            if not self._here[key >> self._bits]:
                self.need(key, key + 1)
            return self._map[key]
        start, stop, _ = key.indices(len(self))
        self.need(start, stop)
        return self._map[start:stop]

    def need(self, start: int, stop: int) -> int:
        """Bring bytes ``[start, stop)`` into ``array``; return where the bytes end that are there."""
        low, high = max(start, 0) >> self._bits, (min(stop, len(self)) - 1 >> self._bits) + 1
        if low >= high or self._here.find(0, low, high) < 0:
            return min(stop, len(self))
        if self._here.count(1) << self._bits > self._resident:
            self._drop(0, low)
            self._drop(high, len(self._here))
        for page in range(low, high):
            if not self._here[page]:
                first = page << self._bits
                self._source.read_into(self.array[first : first + (1 << self._bits)], first)
                self._here[page] = 1
        return min(stop, len(self))

    def _drop(self, low: int, high: int) -> None:
        """Return the memory of these pages to the system."""
        start, stop = low << self._bits, min(high << self._bits, len(self))
        if start < stop:
            self._map.madvise(mmap.MADV_DONTNEED, start, stop - start)
            self._here[low:high] = bytes(high - low)
