"""Windows: loads packed into a buffer, which one thread fills.

::

    file      ┊ t0 ████████ t1 ███ (64 bytes of a header) t2 ██████ ┊       … another place ┊ t3 ███ ┊
    buffer      t0 ████████ t1 ███ ······················ t2 ██████    ▏a   t3 ███
    reads       ├──────────────────── 1 ───────────────────────────┤        ├─ 2 ─┤

Loads that follow each other in a file are read as one, across small gaps, regardless of their tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from workbench.core.arrays import Array
from workbench.core.storage import SourcePool
from workbench.load.onto_device.loads import Fetch, Load

GAP = 16 << 10  #: bytes that cost less to read than another request
ALIGN = 512  #: alignment of loads that do not follow in the file: a multiple of every element size and of a DMA's step


class _Read(NamedTuple):
    """Bytes ``[low, high)`` of the buffer: from a file, or from ``fetch``."""

    low: int
    high: int
    file: int
    start: int
    fetch: Fetch | None

    def __call__(self, pool: SourcePool, array: Array) -> None:
        part = array[self.low : self.high]
        if self.fetch is not None:
            self.fetch(part)
        else:
            pool.source(self.file).read_into(part, self.start)


class BufferWindow:
    """Loads, and where each begins in the buffer."""

    def __init__(self) -> None:
        self.loads: list[tuple[int, Load]] = []
        self._reads: list[_Read] = []

    def add(self, load: Load, nbytes: int) -> bool:
        """Add a load, unless it ends beyond ``nbytes``."""
        last, at = self._reads[-1] if self._reads else None, 0
        goes_on = False
        if last is not None:
            at = last.low + load.start - last.start  # at the same distance as in the file
            plain = last.fetch is None and load.fetch is None and last.file == load.file
            goes_on = plain and 0 <= at - last.high <= GAP
            at = at if goes_on else -(-last.high // ALIGN) * ALIGN
        end = at + load.nbytes
        if end > nbytes:
            return False
        if last is not None and goes_on:
            self._reads[-1] = last._replace(high=end)
        else:
            self._reads.append(_Read(at, end, load.file, load.start, load.fetch))
        self.loads.append((at, load))
        return True

    @property
    def nbytes(self) -> int:
        """Bytes that are read for it."""
        return sum(read.high - read.low for read in self._reads)

    def fill(self, pool: SourcePool, array: Array) -> None:
        """Read it into a buffer."""
        # a single read is requested as it is: fetching it ahead would cut it in more requests
        some = [read for read in self._reads if read.fetch is None and len(self._reads) > 1]
        spans = [(read.file, read.start, read.start + read.high - read.low) for read in some]
        with pool.ahead(*np.array(spans, np.int64).reshape(-1, 3).T):
            for read in self._reads:
                read(pool, array)


def windows(loads: Iterable[Load], nbytes: int) -> Iterator[BufferWindow]:
    """Yield windows of loads in order, each with as many as fit into a buffer of ``nbytes``; none is larger."""
    window = BufferWindow()
    for load in loads:
        if not window.add(load, nbytes):
            yield window
            window = BufferWindow()
            window.add(load, nbytes)
    if window.loads:
        yield window
