"""The layout of an open checkpoint and the data of its pictures: computed once, shared by every session.

It lives as long as the checkpoint.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import dataclass

from workbench.analysis.layout import Layout, layout
from workbench.analysis.phases import SavePhases, phases
from workbench.app.jobs import Progress
from workbench.checkpoint import Checkpoint
from workbench.errors import WorkbenchError
from workbench.views.layout_bytes import Bytes

PLACE = "_app_layout"
PATIENCE = 0.1  #: seconds between two checks whether the result is still wanted
_lock = threading.Lock()


@dataclass(frozen=True, eq=False)
class ReadyLayout:
    """A layout, its chunks in byte order, and the phases of the save if they are recorded; must not be modified."""

    layout: Layout
    bytes: Bytes
    phases: SavePhases | None = None


def found(ckpt: Checkpoint, progress: Progress) -> ReadyLayout:
    """Compute the layout, or reuse the one from another session; call it in a job."""
    while not _lock.acquire(timeout=PATIENCE):
        progress(0.0)
    try:
        ready: ReadyLayout | None = ckpt.__dict__.get(PLACE)
        if ready is None:
            progress(0.1)
            ready = ckpt.__dict__[PLACE] = found_of(layout(ckpt, progress=lambda share: progress(0.9 * share)), ckpt)
        progress(1.0)
        return ready
    finally:
        _lock.release()


def found_of(one: Layout, ckpt: Checkpoint | None) -> ReadyLayout:
    """Prepare a layout for display; ``ckpt`` is the checkpoint, whose manifest is read."""
    recorded = None
    if ckpt is not None:
        with suppress(WorkbenchError):  # no manifest, or another writer's; the Integrity tab reports a damaged one
            recorded = phases(ckpt.place)
    made = ReadyLayout(one, Bytes(one), recorded)
    _ = one.summary, one.ranks  # computed here, not on the page's thread
    return made
