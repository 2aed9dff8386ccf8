"""How loops are compiled. Import only where compiled code runs: importing numba takes 0.2 s.

::

    kernel      called from Python; compiled on first use, with every loop that it calls, and kept on disk
    loop        called by kernels alone, its sums in order: the same numbers as numpy's
    reordered   the same, but sums may be added in any order, which allows SIMD instructions

numba checks only whether the kernel's own file has changed before it loads one from disk. Here the key covers what a
kernel calls, too, because formulas may be in another file. If the folder cannot be written, or a file in it is
damaged, the kernel is compiled again.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import numba
import numpy as np
from numba.core.caching import FunctionCache

from workbench.core.arrays import Array

_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True}
_njit: Any = numba.njit  # whose stubs know only some of the options
_REORDERED = {"reassoc", "contract"}  # NaN, infinities and signed zeros are preserved


def kernel(function: Callable[..., Any]) -> Any:
    """Compile a function that Python calls."""
    compiled = _njit(**_OPTIONS)(function)
    with contextlib.suppress(RuntimeError, OSError):  # no folder for it can be written
        compiled._cache = _Cache(function)
    return compiled


def loop(function: Callable[..., Any]) -> Any:
    """Compile a function that only kernels call."""
    return _njit(no_cpython_wrapper=True, **_OPTIONS)(function)


def reordered(function: Callable[..., Any]) -> Any:
    """Compile a loop whose sums may be added in any order."""
    return _njit(no_cpython_wrapper=True, fastmath=_REORDERED, **_OPTIONS)(function)


def ready(array: Array, kind: Any = np.float32) -> Array:
    """Prepare an array for a kernel: aligned, read-only, its bits viewed as ``kind``, so one compilation serves all."""
    flags = array.flags
    array = array.view(kind) if flags.aligned and flags.c_contiguous else array.copy().view(kind)
    array.setflags(write=False)
    return array


class _Cache(FunctionCache):
    """numba's cache, for a kernel and all that it calls; kernels that cannot be read or written are compiled again."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        except Exception:  # a damaged file: pickle raises any exception
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        with contextlib.suppress(Exception):
            super().save_overload(sig, data)

    def _index_key(self, sig: Any, codegen: Any) -> tuple[Any, ...]:
        parts = "\n".join(_parts(self._py_func, set()))
        return sig, codegen.magic_tuple(), hashlib.sha256(parts.encode()).hexdigest()


def _parts(function: Any, seen: set[Any]) -> Iterator[str]:
    """Yield the code of a function, then that of the functions and constants that it names."""
    if function in seen:
        return
    seen.add(function)
    code = function.__code__
    yield f"{code.co_code!r} {code.co_consts!r}"
    around = [cell.cell_contents for cell in function.__closure__ or ()]
    named = {name: function.__globals__.get(name) for name in code.co_names}
    for name, held in {**named, **dict(zip(code.co_freevars, around, strict=True))}.items():
        if hasattr(held, "py_func"):
            yield from _parts(held.py_func, seen)
        elif isinstance(held, (bool, int, float, tuple, np.generic)):
            yield f"{name} {held!r}"
