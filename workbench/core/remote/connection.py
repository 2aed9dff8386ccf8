"""What all folders of one opened URL share: the connection, its counts, and the blocks that were read."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from workbench.core.arrays import Array
from workbench.core.remote.objects import ObjectStore, connect
from workbench.core.remote.requests import Traffic, alone
from workbench.core.remote.url import Location
from workbench.core.source import FileStat

__all__ = ["Connection"]

KEPT = 192 << 20  #: bytes of metadata blocks that are kept for each open checkpoint
R = TypeVar("R")


class Blocks:
    """Blocks of metadata that were read last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: OrderedDict[tuple[str, int], Array] = OrderedDict()
        self._lows: dict[str, set[int]] = {}
        self._size = 0

    def find(self, key: str, start: int, stop: int) -> Array | None:
        """The bytes, if one block has all of them."""
        with self._lock:
            for low in self._lows.get(key, ()):
                block = self._held[key, low]
                if low <= start and stop <= low + len(block):
                    self._held.move_to_end((key, low))
                    return block[start - low : stop - low]
        return None

    def keep(self, key: str, low: int, block: Array) -> None:
        """Keep a block, and drop the oldest ones over :data:`KEPT` bytes."""
        if len(block) > KEPT // 4:
            return
        with self._lock:
            self._drop(key, low)
            self._held[key, low] = block
            self._lows.setdefault(key, set()).add(low)
            self._size += len(block)
            while self._size > KEPT:
                self._drop(*next(iter(self._held)))

    def _drop(self, key: str, low: int) -> None:
        old = self._held.pop((key, low), None)
        if old is not None:
            self._size -= len(old)
            self._lows[key].discard(low)


@dataclass
class Connection:
    """A store under one URL; pickled by what of the URL may be shown."""

    at: Location
    options: Mapping[str, Any] = field(repr=False)

    def __post_init__(self) -> None:
        self.objects: ObjectStore = connect(self.at, self.options)
        self.traffic, self.blocks = Traffic(), Blocks()

    def get(self, key: str, name: str, start: int, stop: int, stat: FileStat) -> memoryview:
        data = self.objects.get(key, name, start, stop, stat)
        self.traffic.count(requests=1, received=len(data))
        return data

    def head(self, key: str) -> FileStat | None:
        """Ask for the identity of an object."""
        self.traffic.count(requests=1)
        return self.objects.head(key)

    def ask(self, call: Callable[..., R], *given: Any) -> R:
        """Make a call, not in the caller's thread."""
        return self.begin(call, *given).result()

    def begin(self, call: Callable[..., R], *given: Any) -> Future[R]:
        """Begin a call, not in the caller's thread."""
        return alone(lambda: call(*given))

    def again(self) -> Connection:
        """The same connection without what was read."""
        fresh = Connection.__new__(Connection)
        fresh.at, fresh.options, fresh.objects = self.at, self.options, self.objects
        fresh.traffic, fresh.blocks = self.traffic, Blocks()
        return fresh

    def __getstate__(self) -> dict[str, Any]:
        return {"at": self.at}  # without options: secrets stay in their process

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["at"], {})  # type: ignore[misc]
