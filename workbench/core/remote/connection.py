"""The state shared by all folders of one opened URL: the connection, its counts, and the blocks that were read."""

from __future__ import annotations

import os
import threading
from bisect import insort
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from workbench.core.arrays import Array
from workbench.core.remote.objects import ObjectStore, complete, connect
from workbench.core.remote.payload_cache import PayloadCache, cache_of, up_to
from workbench.core.remote.requests import StoreCall, Traffic, alone
from workbench.core.remote.url import Location
from workbench.core.source import FileStat

KEPT = 192 << 20  #: bytes of metadata blocks that are kept for each open checkpoint
RECENT = 48 << 20  #: bytes of tensors' elements that are kept for it: passes read small tensors more than once
NEAR = 8  #: blocks that are searched for one with the requested bytes
R = TypeVar("R")


class Blocks:
    """Blocks of objects that were read last, up to ``room`` bytes; a block over a quarter of that is not kept."""

    def __init__(self, room: int) -> None:
        self._room, self._size = room, 0
        self._lock = threading.Lock()
        self._held: OrderedDict[tuple[str, int], Array] = OrderedDict()
        self._lows: dict[str, list[int]] = {}

    def find(self, key: str, start: int, stop: int) -> Array | None:
        """Return the bytes if one block has all of them."""
        with self._lock:
            for low in up_to(self._lows.get(key, []), start, NEAR):
                block = self._held[key, low]
                if stop <= low + len(block):
                    self._held.move_to_end((key, low))
                    return block[start - low : stop - low]
        return None

    def ended(self, key: str, start: int, gap: int) -> int:
        """Return the size of a block that ends up to ``gap`` bytes before ``start``, or later; 0 if there is none."""
        with self._lock:
            lows = up_to(self._lows.get(key, []), start, NEAR)
            blocks = ((low, len(self._held[key, low])) for low in lows)
            return next((size for low, size in blocks if low + size + gap >= start), 0)

    def keep(self, key: str, low: int, block: Array) -> None:
        """Keep a block, and drop those that were not used for longest if there is no room for it."""
        if len(block) > self._room // 4:
            return
        with self._lock:
            self._drop(key, low)
            self._held[key, low] = block
            insort(self._lows.setdefault(key, []), low)
            self._size += len(block)
            while self._size > self._room:
                self._drop(*next(iter(self._held)))

    def clear(self) -> None:
        """Drop all blocks."""
        with self._lock:
            while self._held:
                self._drop(*next(iter(self._held)))

    def _drop(self, key: str, low: int) -> None:
        old = self._held.pop((key, low), None)
        if old is not None:
            self._size -= len(old)
            self._lows[key].remove(low)


@dataclass
class _CacheUse:
    """A cache on disk, and how many calls want to read without it."""

    cache: PayloadCache | None
    without: int = 0
    lock: Any = field(default_factory=threading.Lock, repr=False, compare=False)


@dataclass
class Connection:
    """A store under one URL; pickled as the public part of the URL."""

    at: Location
    options: Mapping[str, Any] = field(repr=False)

    def __post_init__(self) -> None:
        given = dict(self.options)
        self._use = _CacheUse(cache_of(given))
        self.objects: ObjectStore = connect(self.at, given)
        self.traffic, self.blocks, self.recent = Traffic(), Blocks(KEPT), Blocks(RECENT)
        endpoint = given.get("endpoint") or given.get("aws_endpoint") or os.environ.get("AWS_ENDPOINT_URL", "")
        self._store = f"{self.at.scheme}://{self.at.host} {endpoint}"

    def get(self, key: str, name: str, start: int, stop: int, stat: FileStat, into: Array | None = None) -> memoryview:
        """Fetch bytes ``[start, stop)`` of an object, into ``into`` if given, from the disk cache or by a request."""
        pin = stat.tag or self.objects.pin
        cache = self._use.cache if self.pinned(stat) and not self._use.without else None
        if cache is not None and (kept := cache.find(f"{self._store}/{key}", stat.size, pin, start, stop)) is not None:
            self.traffic.count(cached=len(kept))
            return complete((kept,), start, stop, name, into)
        data = self.objects.get(key, name, start, stop, stat, into)
        self.traffic.count(requests=1, received=len(data))
        if cache is not None:
            cache.keep(f"{self._store}/{key}", stat.size, pin, start, data)
        return data

    def pinned(self, stat: FileStat) -> bool:
        """Return whether bytes may be used again: an object without a pin may change at any time."""
        return bool(stat.tag or self.objects.pin)

    def head(self, key: str) -> FileStat | None:
        """Request the identity of an object."""
        self.traffic.count(requests=1)
        return self.objects.head(key)

    def look(self, key: str, nbytes: int) -> FileStat | None:
        """Return the identity as :meth:`head`; keep the first ``nbytes`` bytes, to be read next, if they come along."""
        found = self.objects.look(key, nbytes) if nbytes else None
        if found is None:
            return self.head(key)
        stat, head = found
        self.traffic.count(requests=1, received=len(head))
        if len(head):
            self.blocks.keep(key, 0, np.frombuffer(head, np.uint8))
        return stat

    def ask(self, call: Callable[..., R], *given: Any) -> R:
        """Make a call, not in the caller's thread."""
        return self.begin(call, *given).wanted()

    def begin(self, call: Callable[..., R], *given: Any) -> StoreCall[R]:
        """Begin a call, not in the caller's thread."""
        return alone(lambda: call(*given))

    @contextmanager
    def uncached(self) -> Iterator[None]:
        """Read from the store meanwhile, not from the cache on disk or what was read before, in all threads and
        through all that :meth:`again` returns.
        """
        with self._use.lock:
            self._use.without += 1
        self.recent.clear()
        self.blocks.clear()
        try:
            yield
        finally:
            with self._use.lock:
                self._use.without -= 1

    def again(self, *, cached: bool = True) -> Connection:
        """Return the same connection without the bytes read so far and, if requested, without the cache on disk."""
        fresh = Connection.__new__(Connection)
        fresh.at, fresh.options, fresh.objects = self.at, self.options, self.objects
        fresh.traffic, fresh.blocks, fresh.recent = self.traffic, Blocks(KEPT), Blocks(RECENT)
        fresh._use, fresh._store = self._use if cached else _CacheUse(None), self._store
        return fresh

    def __getstate__(self) -> dict[str, Any]:
        return {"at": self.at}  # without options: secrets stay in their process

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["at"], {})  # type: ignore[misc]
