"""Mesh axes, inferred from the order in which ranks store pieces.

A rank is a number in mixed radix; its digits are the coordinates on the mesh, the first axis outermost. A placement
makes the index of a rank's piece a sum over its digits::

    rank               0  1  2  3      along ranks, goes +2, then −1: the innermost axis has 2 ranks, weight 2;
    piece of 0:515     0  2  1  3      of every second rank, +1: an outer axis of 2 ranks, weight 1

Axes that are consecutive in one index (weights 2 and 1 on 2 and 2 ranks, outer first) look like one axis of 4.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, pairwise, product
from math import prod

import numpy as np

from workbench.core.arrays import Ints

MOST = 64  #: maximum number of splits of axes to try


def radices(index: Ints) -> tuple[int, ...] | None:
    """Infer the sizes of the mesh axes, outermost first, from ``(ranks, dims)`` indices of pieces, if possible."""
    found: list[int] = []
    while len(index) > 1:
        step = index[1] - index[0]
        steady = (np.diff(index, axis=0) == step).all(axis=1)
        size = len(index) if steady.all() else int(np.argmin(steady)) + 1
        if len(index) % size:
            return None
        rows = index.reshape(len(index) // size, size, index.shape[1])
        if (rows - rows[:, :1] != np.arange(size)[:, None] * step).any():
            return None
        found.append(size)
        index = rows[:, 0]
    return tuple(reversed(found))


def finer(sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield the mesh, then meshes with some axes split: uneven pieces show where a cut was cut again."""
    yield tuple(sizes)
    ways = [list(islice(_factorings(size), MOST)) for size in sizes]
    for number, way in enumerate(product(*ways)):
        if number >= MOST:
            return
        flat = tuple(size for part in way for size in part)
        if flat != tuple(sizes):
            yield flat


def refine(meshes: Iterable[Sequence[int]], world: int) -> tuple[int, ...]:
    """Return the coarsest mesh of ``world`` ranks that has the axes of all; skip those that contradict earlier ones."""
    edges = {1, world}
    for mesh in meshes:
        mine = {prod(mesh[at:]) for at in range(len(mesh))}
        if prod(mesh) != world:
            continue
        both = sorted(edges | mine)
        if all(b % a == 0 for a, b in pairwise(both)):
            edges |= mine
    ordered = sorted(edges, reverse=True)
    return tuple(a // b for a, b in pairwise(ordered))


def coordinates(ranks: Ints, sizes: Sequence[int]) -> Ints:
    """Return ``(R, axes)`` digits of ranks."""
    found = np.empty((len(ranks), len(sizes)), np.int64)
    rest = np.asarray(ranks, np.int64)
    for axis in range(len(sizes) - 1, -1, -1):
        found[:, axis] = rest % sizes[axis]
        rest = rest // sizes[axis]
    return found


def _factorings(size: int) -> Iterator[tuple[int, ...]]:
    """Yield ordered factorings into numbers above 1, fewest factors first."""
    yield (size,)
    for first in range(2, size):
        if size % first == 0:
            for rest in _factorings(size // first):
                yield (first, *rest)
