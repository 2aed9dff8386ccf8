"""Memory for results, and maps of files that hold no descriptor.

Large arrays begin on a huge page, because page faults dominate a copy into fresh memory.

The kernel hands out zeroed memory page by page, at ~0.5 µs for each 4 KiB on first touch; where transparent huge pages
are allowed (``madvise`` or ``always``), one fault brings 2 MiB. ``np.empty`` asks for them too, but starts its arrays
at any address, so the ends of each array fall back to small pages: a quarter of an 8 MiB tensor.

``mmap.mmap`` keeps a duplicate of the descriptor for as long as the map lives (until Python 3.13's ``trackfd``): a
few hundred open checkpoints would use up the limit of a process. The system call itself needs none.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from contextlib import suppress
from typing import Any

import numpy as np

from workbench.core.words import plural
from workbench.errors import OpenError

HUGE_PAGE = 2 << 20  #: bytes; x86-64's, and with 4 KiB pages also arm64's
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # named in Python 3.12 only; Linux' value
_FAILED = ctypes.c_void_p(-1).value
_ADVICE = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux only


def empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Return an array like ``np.empty``; from :data:`HUGE_PAGE` bytes on, it uses huge pages if allowed.

    Raises:
        OpenError: there is not enough memory for it.
    """
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    if nbytes < HUGE_PAGE or _ADVICE is None:
        return _plain(shape, dtype, nbytes)
    # One page more than needed, to start at a page boundary: this uses up addresses, not memory.
    try:
        mapped = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:  # out of map entries, or of memory
        return _plain(shape, dtype, nbytes)
    whole = np.frombuffer(mapped, np.uint8)
    start = -whole.__array_interface__["data"][0] % HUGE_PAGE
    with suppress(OSError):  # a kernel without huge pages: still memory
        mapped.madvise(_ADVICE, start, nbytes // HUGE_PAGE * HUGE_PAGE)
    return whole[start : start + nbytes].view(dtype).reshape(shape)


def _plain(shape: tuple[int, ...], dtype: np.dtype[Any], nbytes: int) -> np.ndarray[Any, Any]:
    try:
        return np.empty(shape, dtype)
    except MemoryError:
        raise OpenError(f"there is not enough memory to read {plural(nbytes, 'byte')}; read a slice instead") from None


def map_file(fd: int, nbytes: int, *, offset: int = 0, private: bool = False) -> np.ndarray[Any, Any]:
    """Map bytes of an open file; the map outlives the descriptor and ends with its last view.

    Args:
        fd: may be closed afterwards.
        nbytes: at least 1.
        offset: a multiple of ``mmap.ALLOCATIONGRANULARITY``.
        private: writable; writes do not reach the file.

    Raises:
        OSError: the file cannot be mapped.
    """
    # NORESERVE: a writable private map of a file larger than memory is refused otherwise
    flags = mmap.MAP_PRIVATE | _NORESERVE if private else mmap.MAP_SHARED
    prot = mmap.PROT_READ | (mmap.PROT_WRITE if private else 0)
    address = _libc.mmap(None, nbytes, prot, flags, fd, offset)
    if address is None or address == _FAILED:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    held = (ctypes.c_ubyte * nbytes).from_address(address)
    # not at exit: threads may still read, and the process takes its maps along
    weakref.finalize(held, _libc.munmap, address, nbytes).atexit = False
    array = np.frombuffer(held, np.uint8)
    array.flags.writeable = private
    return array


def _system() -> ctypes.CDLL:
    found = ctypes.CDLL(None, use_errno=True)
    size, pointer, number = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int
    found.mmap.argtypes, found.mmap.restype = [pointer, size, number, number, number, ctypes.c_long], pointer
    found.munmap.argtypes, found.munmap.restype = [pointer, size], number
    return found


_libc = _system()
