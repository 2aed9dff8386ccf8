"""Apply placements forward, to one axis of one rank at a time: the other half of every proof.

An axis is a list of runs, ``(low, size)``; a placement keeps some of their elements, counted in the runs' order::

    16 rows, tp=2 StridedShard(0, 2), coordinate 0     (0, 4) (8, 4)
             dp=2 Shard(0), coordinate 1                       (8, 4)

Sizes that do not divide evenly are cut as by ``torch.chunk``: ceil(n / ranks) each, the last ones short or empty.
This is independent of the arithmetic of resharding, which the tests compare with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Run = tuple[int, int]


@dataclass(frozen=True, slots=True)
class AxisCut:
    """The cut of one axis of a tensor by one mesh axis.

    Attributes:
        axis: position of the mesh axis.
        dim: axis of the tensor.
        parts: sizes of the parts that are cut separately ([gate; up], [q; k; v]); empty for a plain shard.
    """

    axis: int
    dim: int
    parts: tuple[int, ...] = ()

    def __str__(self) -> str:
        if not self.parts:
            return f"Shard({self.dim})"
        length, count = sum(self.parts), len(self.parts)
        if self.parts == tuple(chunk(length, count, at)[1] for at in range(count)):
            return f"StridedShard({self.dim}, {count})"
        return f"PartedShard({self.dim}, {', '.join(map(str, self.parts))})"


def chunk(length: int, count: int, at: int) -> Run:
    """Return the range of piece ``at`` of ``count`` from ``torch.chunk``, as ``(low, size)``."""
    each = -(-length // count)
    low = min(each * at, length)
    return low, min(each, length - low)


def cut_axis(length: int, cuts: Sequence[tuple[AxisCut, int, int]]) -> list[Run]:
    """Return what remains of an axis after cuts in order, each with the size of its mesh axis and the coordinate on it.

    Adjacent runs are joined, in the order of the local tensor.
    """
    runs: list[Run] = [(0, length)] if length else []
    for cut, count, at in cuts:
        total = sum(size for _, size in runs)
        base, kept = 0, []
        for part in cut.parts or (total,):
            low, size = chunk(part, count, at)
            kept += _between(runs, base + low, base + low + size)
            base += part
        runs = joined(kept)
    return runs


def joined(runs: Sequence[Run]) -> list[Run]:
    """Join consecutive runs."""
    found: list[Run] = []
    for low, size in runs:
        if found and sum(found[-1]) == low:
            found[-1] = (found[-1][0], found[-1][1] + size)
        elif size:
            found.append((low, size))
    return found


def _between(runs: Sequence[Run], start: int, stop: int) -> list[Run]:
    """Return the elements ``start`` to ``stop`` of the concatenated runs."""
    found, at = [], 0
    for low, size in runs:
        first, last = max(start - at, 0), min(stop - at, size)
        if last > first:
            found.append((low + first, last - first))
        at += size
    return found
