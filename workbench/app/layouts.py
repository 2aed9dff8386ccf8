"""The layout of an open checkpoint with what its pictures are made from: found once, shared by every session.

It is kept with the checkpoint and goes with it.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from workbench.analysis.layout import Layout, layout
from workbench.app.jobs import Tick
from workbench.checkpoint import Checkpoint
from workbench.views.layout_bytes import Bytes

__all__ = ["Found", "found", "found_of"]

PLACE = "_app_layout"
PATIENCE = 0.1  #: seconds between two looks at whether anyone still wants it
_lock = threading.Lock()


@dataclass(frozen=True, eq=False)
class Found:
    """A layout and its bytes in order; not to be changed."""

    layout: Layout
    bytes: Bytes


def found(ckpt: Checkpoint, tick: Tick) -> Found:
    """Find the layout, or take the one that another session found; call it in a job."""
    while not _lock.acquire(timeout=PATIENCE):
        tick(0.0)
    try:
        there: Found | None = ckpt.__dict__.get(PLACE)
        if there is None:
            tick(0.1)
            there = ckpt.__dict__[PLACE] = found_of(layout(ckpt, tick=lambda share: tick(0.9 * share)))
        tick(1.0)
        return there
    finally:
        _lock.release()


def found_of(one: Layout) -> Found:
    """A layout made ready to be shown."""
    made = Found(one, Bytes(one))
    _ = one.summary, one.ranks  # made here, not on the page's thread
    return made
