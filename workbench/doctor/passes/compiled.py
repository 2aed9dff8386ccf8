"""What the compiled passes have in common: how arrays are handed to numba, and what a compiler may reorder.

numba keeps compiled code until the file of a kernel changes. A kernel and the loops that it calls therefore stay in one
file; whoever changes an option here has to touch those files (``fast_one.py``, ``fast_rows.py``, ``fast_pair.py``).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

__all__ = ["RUN", "clean", "exact", "ready", "reordered"]

Array = np.ndarray[Any, Any]

RUN = 4096  #: elements of a run: some tensors' runs stay in a core's cache


def _compiler(fastmath: bool | set[str]) -> Any:
    def compiled(function: Any) -> Any:
        options: dict[str, Any] = {"nogil": True, "fastmath": fastmath, "error_model": "numpy"}
        try:
            return njit(cache=True, **options)(function)
        except RuntimeError:  # no folder for the cache
            return njit(**options)(function)

    return compiled


exact = _compiler(False)
reordered = _compiler({"reassoc", "contract"})  # of sums alone; NaN and infinities are what they are
clean = _compiler({"nnan", "nsz", "reassoc"})  # of numbers alone


def ready(array: Array, kind: Any = np.float32) -> Array:
    """One type of array, one compilation: aligned, read-only, its bits taken as ``kind``."""
    array = array.view(kind) if array.flags.aligned and array.flags.c_contiguous else array.copy().view(kind)
    array.flags.writeable = False
    return array
