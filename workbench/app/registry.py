"""Open checkpoints of this process: opened once, shared by every session, closed with the last one.

::

    session 1 ── acquire(path) ──► Lease ─┐
    session 2 ── acquire(path) ──► Lease ─┴─► Entry(checkpoint, 2 holders) ── release ×2 ──► checkpoint.close()

A checkpoint is read-only and safe to share. What is costly to derive from it and the same for every session (the
rows of the table, the Overview's sums) is derived once, too, and must not be changed by whoever gets it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import workbench as wb
from workbench.checkpoint import Checkpoint
from workbench.errors import OpenError

if TYPE_CHECKING:
    import pandas as pd

    from workbench.app.glance import Glance
    from workbench.app.rows import Ranks

__all__ = ["Lease", "Registry", "shared"]

Stamp = tuple[tuple[str, int, int], ...]


class Entry:
    """One open checkpoint and how many hold it."""

    def __init__(self, path: Path) -> None:
        self.path, self.holders = path, 0
        self.lock = threading.Lock()
        self.checkpoint: Checkpoint | None = None
        self.stamp: Stamp = ()


class Lease:
    """A session's hold on an open checkpoint; releasing it twice does nothing."""

    def __init__(self, registry: Registry, entry: Entry, checkpoint: Checkpoint) -> None:
        self._registry = registry
        self._entry: Entry | None = entry
        self.checkpoint = checkpoint

    def release(self) -> None:
        """Give the checkpoint back; the last one to do so closes it."""
        entry, self._entry = self._entry, None
        if entry is not None:
            self._registry._release(entry)

    def changed(self) -> str:
        """What became of the files since they were opened, in words; empty while they are the same. Takes a ``stat`` of
        each metadata file: call it in a job.
        """
        entry = self._entry
        if entry is None:
            return ""
        try:
            same = _stamp(self.checkpoint) == entry.stamp
        except (OpenError, OSError):
            return "This checkpoint was deleted or moved after it was opened. What is shown was read before."
        if same:
            return ""
        return (
            "This checkpoint was rewritten after it was opened. What is shown was read before; select it in the list "
            "again to open the new one."
        )

    @property
    def rows(self) -> pd.DataFrame:
        """One row a tensor, as the table shows it; shared by sessions, never to be changed."""
        return self._shared[0]

    @property
    def ranks(self) -> Ranks:
        """The order of the rows by each column; shared."""
        return self._shared[1]

    @property
    def glance(self) -> Glance:
        """What the Overview tells; shared."""
        return self._shared[2]

    @cached_property
    def _shared(self) -> tuple[pd.DataFrame, Ranks, Glance]:
        from workbench.app.glance import glance
        from workbench.app.rows import Ranks, tensor_rows

        with _rows_lock:
            found = self.checkpoint.__dict__.get("_app_rows")
            if found is None:
                rows = tensor_rows(self.checkpoint)
                found = self.checkpoint.__dict__["_app_rows"] = rows, Ranks(rows), glance(self.checkpoint)
            return found


class Registry:
    """Open checkpoints by real path, counted.

    Args:
        opener: what opens a path; replaced in tests that count openings.
    """

    def __init__(self, opener: Callable[[Path], Checkpoint] | None = None) -> None:
        self._opener = opener or wb.open
        self._lock = threading.Lock()
        self._entries: dict[Path, Entry] = {}

    def __len__(self) -> int:
        with self._lock:
            return len(self._entries)

    def acquire(self, path: Path) -> Lease:
        """Open a checkpoint, or share the one that is open unless its files changed since.

        Raises:
            OpenError: as :func:`workbench.open`; nothing is kept then.
        """
        path = Path(os.path.realpath(path))
        while True:
            with self._lock:
                entry = self._entries.setdefault(path, Entry(path))
                entry.holders += 1
            try:
                with entry.lock:  # opening takes seconds at a million chunks; other paths need not wait for it
                    if entry.checkpoint is None:
                        entry.checkpoint = self._opener(path)
                        entry.stamp = _stamp(entry.checkpoint)
                        return Lease(self, entry, entry.checkpoint)
                    if entry.stamp == _stamp(entry.checkpoint):
                        return Lease(self, entry, entry.checkpoint)
            except BaseException:
                self._release(entry)
                raise
            with self._lock:  # saved over: those who hold the old one keep it, newcomers get a new one
                if self._entries.get(path) is entry:
                    del self._entries[path]
            self._release(entry)

    def _release(self, entry: Entry) -> None:
        with self._lock:
            entry.holders -= 1
            if entry.holders:
                return
            if self._entries.get(entry.path) is entry:
                del self._entries[entry.path]
        if entry.checkpoint is not None:
            entry.checkpoint.close()


#: The registry of the served dashboard.
shared = Registry()
_rows_lock = threading.Lock()


def _stamp(checkpoint: Checkpoint) -> Stamp:
    """Size and modification time of the metadata files, which every save rewrites."""
    place = checkpoint._place
    found = []
    for name in checkpoint.catalog.metadata_files[:64]:
        info = place.stat(name)
        found.append((name, info.size, info.mtime_ns))
    return tuple(found)
