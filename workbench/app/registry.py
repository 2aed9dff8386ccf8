"""Open checkpoints of this process: opened once, shared by every session, closed with the last holder.

::

    session 1 ── acquire(path) ──► Lease ─┐
    session 2 ── acquire(path) ──► Lease ─┴─► Entry(checkpoint, 2 holders) ── release ×2 ──► checkpoint.close()

A checkpoint is read-only and safe to share. Data that is costly to derive from it and the same for every session (the
rows of the table, the sums of the Overview) is derived once, too; callers must not modify it.
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
from workbench.core.remote.url import is_url
from workbench.core.source import FileStat
from workbench.errors import OpenError

if TYPE_CHECKING:
    import pandas as pd

    from workbench.app.glance import Glance
    from workbench.app.rows import RowOrder

Stamp = tuple[tuple[str, FileStat], ...]


class OpenCheckpoint:
    """One open checkpoint and the number of its holders."""

    def __init__(self, path: Path | str) -> None:
        self.path, self.holders = path, 0
        self.lock = threading.Lock()
        self.checkpoint: Checkpoint | None = None
        self.stamp: Stamp = ()


class Lease:
    """A session's hold on an open checkpoint; releasing it again does nothing."""

    def __init__(self, registry: Registry, entry: OpenCheckpoint, checkpoint: Checkpoint) -> None:
        self._registry = registry
        self._entry: OpenCheckpoint | None = entry
        self.checkpoint = checkpoint

    def release(self) -> None:
        """Release the checkpoint; the last release closes it."""
        entry, self._entry = self._entry, None
        if entry is not None:
            self._registry._release(entry)

    def changed(self) -> str:
        """Return what happened to the files since they were opened; empty if they are unchanged.

        Looks at each metadata file: call it in a job.
        """
        entry = self._entry
        if entry is None:
            return ""
        try:
            same = _stamp(self.checkpoint) == entry.stamp
        except (OpenError, OSError):
            return "This checkpoint was deleted or moved after it was opened. This page shows its earlier contents."
        if same:
            return ""
        return (
            "This checkpoint was rewritten after it was opened. This page shows its earlier contents; select it in the "
            "list again to open the new one."
        )

    @property
    def rows(self) -> pd.DataFrame:
        """One row per tensor, as in the table; shared by sessions, must not be modified."""
        return self._shared[0]

    @property
    def ranks(self) -> RowOrder:
        """The order of the rows by each column; shared by sessions."""
        return self._shared[1]

    @property
    def glance(self) -> Glance:
        """The contents of the Overview; shared by sessions."""
        return self._shared[2]

    @cached_property
    def _shared(self) -> tuple[pd.DataFrame, RowOrder, Glance]:
        from workbench.app.glance import glance
        from workbench.app.rows import RowOrder, tensor_rows

        with _rows_lock:
            found = self.checkpoint.__dict__.get("_app_rows")
            if found is None:
                rows = tensor_rows(self.checkpoint)
                found = self.checkpoint.__dict__["_app_rows"] = rows, RowOrder(rows), glance(self.checkpoint)
            return found


class Registry:
    """Open checkpoints by real path or URL, with reference counts.

    Args:
        opener: opens a path; replaced in tests that count openings.
    """

    def __init__(self, opener: Callable[[Path | str], Checkpoint] | None = None) -> None:
        self._opener = opener or wb.open
        self._lock = threading.Lock()
        self._entries: dict[Path | str, OpenCheckpoint] = {}

    def __len__(self) -> int:
        with self._lock:
            return len(self._entries)

    def acquire(self, path: Path | str) -> Lease:
        """Open a checkpoint, or share an open one whose files have not changed since.

        Raises:
            OpenError: as in :func:`workbench.open`; nothing is kept.
        """
        path = path if isinstance(path, str) and is_url(path) else Path(os.path.realpath(path))
        while True:
            with self._lock:
                entry = self._entries.setdefault(path, OpenCheckpoint(path))
                entry.holders += 1
            try:
                with entry.lock:  # opening takes seconds at a million chunks; other paths do not wait for it
                    if entry.checkpoint is None:
                        entry.checkpoint = self._opener(path)
                        entry.stamp = _stamp(entry.checkpoint)
                        return Lease(self, entry, entry.checkpoint)
                    if entry.stamp == _stamp(entry.checkpoint):
                        return Lease(self, entry, entry.checkpoint)
            except BaseException:
                self._release(entry)
                raise
            with self._lock:  # overwritten: current holders keep the old one, new ones get the new one
                if self._entries.get(path) is entry:
                    del self._entries[path]
            self._release(entry)

    def _release(self, entry: OpenCheckpoint) -> None:
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
    """Return the identity of the metadata files, which every save rewrites; stores are queried again."""
    place = checkpoint.place if checkpoint.place.local else checkpoint.place.again()
    return tuple((name, place.stat(name)) for name in checkpoint.catalog.metadata_files[:64])
