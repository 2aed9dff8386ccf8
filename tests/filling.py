"""What a writer puts into a target, for processes that are killed meanwhile: they import nothing else of the tests."""

from __future__ import annotations

import os
from typing import Any

from workbench.export.atomic.writing import write_all

__all__ = ["fill"]


def fill(made: Any, text: str = "new") -> None:
    """Files of some bytes each, synced."""
    paths = [os.path.join(made.path, name) for name in ("a", "b")] if made.folder else [made.path]
    for path in paths:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT)
        write_all(fd, memoryview(text.encode() * 1000), 0)
        os.fsync(fd)
        os.close(fd)
