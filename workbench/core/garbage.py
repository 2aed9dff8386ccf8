"""The garbage collector, off while many objects are made."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_pauses = 0  # of all threads
_resumes = False  # whether the collector runs again after the last of them


@contextmanager
def uncollected() -> Iterator[None]:
    """Pause the collector, also as a decorator, until no thread of the process needs the pause any more.

    100,000 tensors are a million young objects and no garbage: collections would take most of the time. A collection
    also goes to the account of the thread in which it happens, where a pickle has a limit of CPU time.
    """
    global _pauses, _resumes
    with _lock:
        if not _pauses:
            _resumes = gc.isenabled()
            gc.disable()
        _pauses += 1
    try:
        yield
    finally:
        with _lock:
            _pauses = max(_pauses - 1, 0)
            if not _pauses and _resumes:
                gc.enable()


def _alone() -> None:
    """Forget the pauses of threads that a forked process does not have."""
    global _lock, _pauses
    _lock = threading.Lock()
    if _pauses and _resumes:
        gc.enable()
    _pauses = 0


os.register_at_fork(after_in_child=_alone)
