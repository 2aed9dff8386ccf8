"""Read two tensors in parallel in blocks, and compute a key per row, without loading either completely.

::

    runs      [0:4, :] [4:8, :] …                         row-major, up to READ bytes each
    slab      every index of one axis, but few elements of each, such as the first 256 columns
    keys      one uint64 per index along an axis: equal rows have equal keys, others almost never

A key is only a hint. Its suggestions are proved on the bits afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from math import prod

import numpy as np

from workbench.core.arrays import Array
from workbench.core.runs import Key, Runs
from workbench.tensor import LazyTensor

READ = 4 << 20  #: approximate bytes of one tensor in memory at a time
ELEMENTS = 1 << 20  #: maximum elements at a time; their positions take 8 MiB
SLAB = 256  #: elements of each row that are read first
FIRST = 512  #: elements that refute most wrong hypotheses
PART = 1 << 17  #: elements converted at a time
_SHORT = 64  #: maximum bytes of rows that are mixed together instead of hashed one by one
_MIX = tuple(np.uint64(odd) for odd in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53))  # splitmix64's finaliser


def readable(tensor: LazyTensor) -> bool:
    """Return whether elements can be compared: not if several share a byte, nor 128-bit complex numbers."""
    return not tensor.element.packed and tensor.element.bits <= 64


def bits(tensor: LazyTensor, key: Key = ()) -> Array:
    """Return the stored bits of a part as contiguous unsigned integers."""
    part = (tensor.lazy[key] if key else tensor).numpy()
    return np.ascontiguousarray(part).view(tensor.element.raw).reshape(part.shape)


def runs_of(shape: tuple[int, ...], itemsize: int, most: int = 0) -> Runs:
    """Return the runs of a shape, each up to ``most`` bytes (default ``READ``), or one element of the last axis."""
    return Runs(shape, max(min((most or READ) // itemsize, ELEMENTS), 1))


def corner(tensor: LazyTensor, most: int = 4096) -> Array:
    """Return the first elements, flat, up to about ``most``."""
    return bits(tensor, runs_of(tensor.shape, 1, most)[0].key).reshape(-1)


def slab(shape: tuple[int, ...], axis: int, itemsize: int, most: int = SLAB) -> Key:
    """Return a key that keeps an axis complete, with up to ``most`` elements at each index."""
    left = max(min(most, READ // itemsize // max(shape[axis], 1)), 1)
    sizes = list(shape)
    for other in reversed(range(len(shape))):
        if other != axis:
            sizes[other] = min(sizes[other], left)
            left = max(left // sizes[other], 1)
    return tuple(slice(0, size) for size in sizes)


def keys(tensor: LazyTensor, axis: int, longest: int = 0) -> Array:
    """Return ``(shape[axis],) uint64``: one number per index along an axis, over all its elements.

    Args:
        longest: divide the work as if the axis had this length, to make keys of tensors of other lengths comparable.
    """
    n = tensor.shape[axis]
    found = np.zeros(n, np.uint64)
    for key, inside in _cuts(tensor.shape, axis, max(longest, n), tensor.element.itemsize):
        part = np.moveaxis(bits(tensor, key), axis, 0)
        found[inside] = fold(found[inside], part.reshape(len(part), -1))
    return found


def fold(state: Array, rows: Array) -> Array:
    """Return the keys ``(n,)`` updated with rows ``(n, m)`` of elements."""
    rows = np.ascontiguousarray(rows)
    width = rows.shape[1] * rows.itemsize
    if width <= _SHORT:
        return _mixed(state, rows, width)
    from xxhash import xxh3_64_intdigest

    data = rows.view(np.uint8)
    digest = [xxh3_64_intdigest(row, seed) for row, seed in zip(data, state.tolist(), strict=True)]
    return np.array(digest, np.uint64)


def parts(count: int) -> list[tuple[int, int]]:
    """Return ranges of a block for work in wider types; the first is short, as it refutes most hypotheses."""
    cuts = [0, *range(min(FIRST, count), count, PART), count]
    return [(start, stop) for start, stop in pairwise(cuts) if stop > start]


def differing(left: Array, right: Array) -> int:
    """Return the number of elements whose bits differ."""
    return int(np.count_nonzero(left != right))


def _cuts(shape: tuple[int, ...], axis: int, longest: int, itemsize: int) -> Iterator[tuple[Key, slice]]:
    """Yield boxes in row-major order of the other axes, with all indices of the axis, or some if there are too many."""
    others = tuple(size for k, size in enumerate(shape) if k != axis)
    wide = max(READ // itemsize // max(longest, 1), 1)  # elements of each index at a time
    for run in runs_of(others, 1, wide):
        part = list(run.key) + [slice(None)] * (len(others) - len(run.key))
        part = [slice(k, k + 1) if isinstance(k, int) else k for k in part]
        inner = prod(run.sizes)
        step = max(READ // itemsize // inner, 1)
        for first in range(0, shape[axis], step):
            inside = slice(first, min(first + step, shape[axis]))
            yield (*part[:axis], inside, *part[axis:]), inside


def _mixed(state: Array, rows: Array, width: int) -> Array:
    words = np.zeros((len(rows), -(-width // 8) * 8), np.uint8)
    words[:, :width] = rows.view(np.uint8)
    found = state.copy()
    for word in words.view(np.uint64).T:
        found ^= word
        for odd in _MIX:
            found ^= found >> np.uint64(33)
            found *= odd
        found += np.uint64(0x9E3779B97F4A7C15)
    return found
