"""One object of a store as a source: exact ranges, merged if they are close, split if they are long.

::

    wanted   ▒▒  ▒▒      ▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒
    requests └────┘      └── 16 MiB ──┘└── 16 MiB ──┘      32 at a time

Metadata is read in blocks that are kept: a reader of directories reads many small adjacent fields. A pass that
reads much announces its next reads (``ahead``): headers and payloads of many chunks then share a request, and
arrive while the pass is at the first of them.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from workbench.core.arrays import Array
from workbench.core.box import distinct
from workbench.core.remote.connection import Connection
from workbench.core.remote.requests import BUFFER, Arriving, ahead, together, unless_unanswered
from workbench.core.source import FileStat, Source, too_short

AHEAD_PART = BUFFER  #: bytes of a request made ahead
AHEAD_MOST = 64 << 20  #: bytes that one announcement fetches; bytes beyond are read when they are needed
PART = 16 << 20  #: bytes of the largest request
GAP = 256 << 10  #: bytes between two ranges up to which one request for both is cheaper than two
SPAN = 32 << 20  #: bytes that are fetched at once to pick strided elements from
BLOCK = 64 << 10  #: bytes of metadata that are fetched around a small read
WINDOW = 2 << 20  #: bytes of elements that are fetched at once, at most, for small reads that follow each other


class RangedSource(Source):
    """The bytes of one object, each request bound to the content that was there when the checkpoint was opened."""

    block, span, gap = BLOCK, SPAN, GAP

    def __init__(self, connection: Connection, key: str, name: str, stat: FileStat) -> None:
        """Create a source that reads ``key`` in the store; messages call it ``name``."""
        self._connection, self._key, self._name, self.stat = connection, key, name, stat
        self._fetched = threading.local()  # the announcement of each thread

    @contextmanager
    def ahead(self, spans: Sequence[tuple[int, int]]) -> Iterator[None]:
        missing = [span for span in spans if span[1] - span[0] > GAP or self._held(*span) is None]
        parts = [part for span in _merged(missing, self.size) for part in _split(*span)]
        with ahead(self._get, parts) as fetched:  # as they arrive, never joined
            self._fetched.parts = parts, fetched
            try:
                yield
            finally:
                self._fetched.parts = (), ()

    def fetch(self, spans: Sequence[tuple[int, int]]) -> None:
        blocks = self._connection.blocks
        missing = [span for span in spans if blocks.find(self._key, *span) is None]
        requests = [part for span in _merged(missing, self.size) for part in _split(*span)]

        def keep(part: tuple[int, int]) -> None:
            with unless_unanswered():  # the read itself meets the error, and knows what it reads
                blocks.keep(self._key, part[0], np.frombuffer(self._get(*part), np.uint8))

        together(keep, requests)

    def _ready(self, row: Array, start: int, *, again: bool = False) -> bool:
        """Fill a row from what this thread fetched ahead, if that has all of it; the bytes may be needed ``again``."""
        parts: Sequence[tuple[int, int]]
        fetched: Sequence[Arriving]
        parts, fetched = getattr(self._fetched, "parts", ((), ()))
        stop = start + len(row)
        first = k = bisect_right(parts, (start, self.size)) - 1
        at = start
        while 0 <= k < len(parts) and parts[k][0] <= at < min(parts[k][1], stop):
            at, k = parts[k][1], k + 1
        if at < stop:
            return False
        spans = [(max(start, low), min(stop, high)) for low, high in parts[first:k]]
        for (begin, end), future in zip(spans, fetched[first:k], strict=True):
            if not future.copy(begin, end, row[begin - start : end - start]):  # the read itself meets the error
                return False
        if not again:
            for (begin, end), future in zip(spans, fetched[first:k], strict=True):
                future.passed(begin, end)
        return True

    def _copied(self, start: int, stop: int) -> Array | None:
        row = np.empty(stop - start, np.uint8)
        return row if self._ready(row, start, again=True) else None

    def read_into(self, buffer: Array, start: int) -> None:
        self.read_runs(buffer.reshape(1, -1), [start])

    def read_runs(self, rows: Array, starts: Sequence[int]) -> None:
        nbytes = rows.shape[1]
        if not nbytes or not len(rows):
            return
        at = np.asarray(starts, np.int64)
        self._inside(int(at.max()) + nbytes)
        if all(self._ready(row, start) for row, start in zip(rows, starts, strict=True)):
            self._connection.traffic.count(needed=nbytes * len(at))
            return
        order = np.argsort(at, kind="stable")
        at = at[order]
        self._connection.traffic.count(needed=nbytes * len(at))
        # a request ends if the next range is far away, or if it would become too long
        group, first = np.zeros(len(at), np.int64), 0
        for k in range(1, len(at)):
            if at[k] - (at[k - 1] + nbytes) > GAP or at[k] + nbytes - at[first] > PART:
                first = k
            group[k] = first
        firsts = distinct(group)
        lasts = np.append(firsts[1:], len(at)) - 1
        spans: list[tuple[int, int]] = []
        for begin, end in zip(at[firsts].tolist(), (at[lasts] + nbytes).tolist(), strict=True):
            spans += [(low, min(low + PART, end)) for low in range(begin, end, PART)]
        flat = rows.reshape(-1)

        def fill(span: tuple[int, int]) -> None:
            low, high = span
            k = int(np.searchsorted(at, low - nbytes, side="right"))
            of_one_row = at[k] <= low and high <= at[k] + nbytes and (k + 1 == len(at) or at[k + 1] >= high)
            if of_one_row and high - low > GAP:
                into = int(order[k]) * nbytes + low - int(at[k])
                self._get(low, high, flat[into : into + high - low])
                return
            data = self._small(low, high) if high - low <= GAP else np.frombuffer(self._get(low, high), np.uint8)
            while k < len(at) and at[k] < high:
                begin, end = max(int(at[k]), low), min(int(at[k]) + nbytes, high)
                into = int(order[k]) * nbytes + begin - int(at[k])
                flat[into : into + end - begin] = data[begin - low : end - low]
                k += 1

        together(fill, spans)

    def _small(self, low: int, high: int) -> Array:
        """Fetch a few bytes of elements; also those that follow, if the bytes before were fetched: twice as many each
        time. They are kept.
        """
        if not self._connection.pinned(self.stat):
            return np.frombuffer(self._get(low, high), np.uint8)
        recent, found = self._connection.recent, self._held(low, high)
        if found is None:
            before = recent.ended(self._key, low, GAP)
            stop = min(low + min(max(2 * before, GAP), WINDOW), self.size) if before else high
            found = np.frombuffer(self._get(low, stop), np.uint8)
            recent.keep(self._key, low, found)
        return found[: high - low]

    def _held(self, low: int, high: int) -> Array | None:
        """Return a few bytes if they were fetched before, as elements or around metadata, and are kept."""
        if not self._connection.pinned(self.stat):
            return None
        found = self._connection.recent.find(self._key, low, high)
        return self._connection.blocks.find(self._key, low, high) if found is None else found

    def read(self, start: int, stop: int) -> Array:
        """Read bytes ``[start, stop)`` of metadata; a small read fetches the block around it, which is kept."""
        self._inside(stop)
        found = self._copied(start, stop)
        if found is None:
            found = self._connection.blocks.find(self._key, start, stop)
        if found is None:
            low, high = start, stop
            if stop - start < BLOCK:
                low = max(min(start, self.size - BLOCK), 0)
                high = min(low + BLOCK, self.size)
            parts = [(at, min(at + PART, high)) for at in range(low, high, PART)]
            data = [np.frombuffer(part, np.uint8) for part in together(lambda span: self._get(*span), parts)]
            found = data[0] if len(data) == 1 else np.concatenate([np.empty(0, np.uint8), *data])
            self._connection.blocks.keep(self._key, low, found)
            found = found[start - low : stop - low]
        self._connection.traffic.count(needed=stop - start)
        found = found.view()
        found.flags.writeable = False
        return found

    def _get(self, start: int, stop: int, into: Array | None = None) -> memoryview:
        return self._connection.get(self._key, self._name, start, stop, self.stat, into)

    def _inside(self, stop: int) -> None:
        if stop > self.size:
            raise too_short(self._name, self.size, stop)


def _split(low: int, high: int) -> Iterator[tuple[int, int]]:
    """Split a range into equal parts of up to :data:`AHEAD_PART` bytes."""
    part = -(-(high - low) // max(-(-(high - low) // AHEAD_PART), 1))
    return ((at, min(at + part, high)) for at in range(low, high, part))


def _merged(spans: Sequence[tuple[int, int]], size: int) -> list[tuple[int, int]]:
    """Return ranges of a file in order, merged if they are close together, up to :data:`AHEAD_MOST` bytes."""
    found: list[tuple[int, int]] = []
    left = AHEAD_MOST
    for low, high in sorted(spans):
        low, high = max(low, 0), min(high, size)
        near = bool(found) and low - found[-1][1] <= GAP
        more = high - (found[-1][1] if near else low)
        if more <= 0:
            continue
        if more > left:
            break
        left -= more
        found[-1:] = [(found[-1][0], high)] if near else [*found[-1:], (low, high)]
    return found
