"""Windows: loads packed into buffers, and the parts that each thread reads.

::

    file      ┊ t0 ████████ t1 ███ (64 bytes of a header) t2 ██████ ┊       … another place ┊ t3 ███ ┊
    buffer      t0 ████████ t1 ███ ······················ t2 ██████    ▏a   t3 ███
    reads       ├────── thread 1 ──────┤├────── thread 2 ──────────┤        ├────┤

Loads that follow each other in a file are read as one, across small gaps, regardless of their tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from workbench.core.arrays import Array
from workbench.core.storage import SourcePool
from workbench.core.transfer.regions import portions
from workbench.load.onto_device.loads import Fetch, Load
from workbench.load.onto_device.ring import Task

GAP = 16 << 10  #: bytes that cost less to read than another request
ALIGN = 512  #: alignment of loads that do not follow in the file: a multiple of every element size and of a DMA's step
MIN_PART = 1 << 20  #: bytes below which handing a part to a thread costs more than reading it


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

    def goes_on(self, other: _Read) -> bool:
        """Return whether the other's bytes follow these at the same distance in the file and in the buffer."""
        same = self.fetch is None and other.fetch is None and self.file == other.file
        return same and other.start - self.start == other.low - self.low


@dataclass(frozen=True)
class Filled:
    """Loads, and where each begins in the buffer."""

    loads: list[tuple[int, Load]]
    pool: SourcePool
    part: int

    def tasks(self) -> Iterator[Task]:
        """Yield tasks that read about ``part`` bytes each, for one thread each."""
        reads = list(self._reads())
        for group in portions(np.array([read.high - read.low for read in reads]), self.part):
            yield partial(_carry_out, reads[group.start : group.stop], self.pool)

    def _reads(self) -> Iterator[_Read]:
        """Yield reads, joined if they are adjacent in file and buffer, then cut at ``part`` bytes."""
        joined: list[_Read] = []
        for at, load in self.loads:
            read = _Read(at, at + load.nbytes, load.file, load.start, load.fetch)
            if joined and joined[-1].goes_on(read):
                joined[-1] = joined[-1]._replace(high=read.high)
            else:
                joined.append(read)
        for read in joined:
            if read.fetch is not None:
                yield read
                continue
            for low in range(read.low, read.high, self.part):
                moved = read.start + low - read.low
                yield _Read(low, min(low + self.part, read.high), read.file, moved, None)


def windows(loads: Iterable[Load], pool: SourcePool, *, nbytes: int, threads: int) -> Iterator[Filled]:
    """Yield windows of loads in order, each with as many as fit into a buffer of ``nbytes``.

    Args:
        loads: the loads, none larger than a buffer.
        pool: their files.
        threads: number of threads that share a window.
    """
    part = max(-(-nbytes // threads), MIN_PART)
    window: list[tuple[int, Load]] = []
    end = 0
    for load in loads:
        at = _next(window[-1][1], load, end) if window else 0
        if at + load.nbytes > nbytes:
            yield Filled(window, pool, part)
            window, at = [], 0
        window.append((at, load))
        end = at + load.nbytes
    if window:
        yield Filled(window, pool, part)


def _next(last: Load, load: Load, end: int) -> int:
    gap = load.start - last.start - last.nbytes
    if last.fetch is None and load.fetch is None and last.file == load.file and 0 <= gap <= GAP:
        return end + gap
    return -(-end // ALIGN) * ALIGN


def _carry_out(reads: list[_Read], pool: SourcePool, array: Array) -> None:
    # a single read is requested as it is: fetching it ahead would cut it in more requests
    some = [read for read in reads if read.fetch is None and len(reads) > 1]
    spans = [(read.file, read.start, read.start + read.high - read.low) for read in some]
    with pool.ahead(*np.array(spans, np.int64).reshape(-1, 3).T):
        for read in reads:
            read(pool, array)
