"""Memory for results: large arrays begin on a huge page, because first touch is what a copy into fresh memory costs.

The kernel hands out zeroed memory page by page, at ~0.5 µs for each 4 KiB on first touch; where transparent huge pages
are allowed (``madvise`` or ``always``), one fault brings 2 MiB. ``np.empty`` asks for them too, but starts its arrays
anywhere, so that the ends of each array fall back to small pages: a quarter of an 8 MiB tensor.
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from typing import Any

import numpy as np

__all__ = ["HUGE_PAGE", "empty"]

HUGE_PAGE = 2 << 20  #: bytes; x86-64's, and with 4 KiB pages also arm64's
_ADVICE = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux only


def empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """As ``np.empty``; from :data:`HUGE_PAGE` bytes on, the whole pages of the array are huge ones where allowed."""
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    if nbytes < HUGE_PAGE or _ADVICE is None:
        return np.empty(shape, dtype)
    # A page more than is needed, to begin where one begins: addresses are used up, memory is not.
    try:
        mapped = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:  # out of map entries
        return np.empty(shape, dtype)
    whole = np.frombuffer(mapped, np.uint8)
    start = -whole.__array_interface__["data"][0] % HUGE_PAGE
    with suppress(OSError):  # a kernel without huge pages: still memory
        mapped.madvise(_ADVICE, start, nbytes // HUGE_PAGE * HUGE_PAGE)
    return whole[start : start + nbytes].view(dtype).reshape(shape)
