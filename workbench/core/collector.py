"""Python's cycle collector, paused where many objects are made and none is garbage.

A full collection visits every object of the process: 0.1 s with torch imported; and making objects is what sets it off.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["paused"]


@contextmanager
def paused() -> Iterator[None]:
    """No collection inside the block, unless another thread asks for one; also as a decorator. May be nested."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
