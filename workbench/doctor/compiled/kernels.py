"""What the compiled passes have in common: how arrays are handed to numba, and what a compiler may reorder.

numba keeps compiled code until the file of a kernel changes. A kernel and the loops that it calls therefore stay in one
file; whoever changes an option here has to touch those files (``fast_one.py``, ``fast_rows.py``, ``fast_pair.py``).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

__all__ = ["NEARLY", "RUN", "exact", "ready", "reordered"]

Array = np.ndarray[Any, Any]

NEARLY = 1 - 1e-12  #: times a bound: what rounds to it exceeds that
RUN = 2048  #: elements of a run: some tensors' runs stay in a core's cache


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


def ready(array: Array, kind: Any = np.float32) -> Array:
    """One type of array, one compilation: aligned, read-only, its bits taken as ``kind``."""
    flags = array.flags
    array = array.view(kind) if flags.aligned and flags.c_contiguous else array.copy().view(kind)
    array.setflags(write=False)
    return array
