"""Divide a shape into runs: consecutive pieces in row-major order, each along one axis.

A run has one position on the axes before its axis and is complete on the axes after it, so its elements are contiguous
in the tensor and usually in the file::

    shape (2, 6, 4), at most 8 elements     [0, 0:2, :]  [0, 2:4, :]  [0, 4:6, :]  [1, 0:2, :] …
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

Key = tuple[Any, ...]  #: an index of a tensor


@dataclass(frozen=True)
class ElementRun:
    """A contiguous run of a tensor in row-major order.

    Attributes:
        key: index of the run: integers, then one slice; nothing for the axes after it.
        start: flat position of its first element.
        low, sizes: the same as a box.
    """

    key: Key
    start: int
    low: tuple[int, ...]
    sizes: tuple[int, ...]


class Runs:
    """The runs of a shape, in row-major order.

    Args:
        size: maximum elements of a run; the minimum is one element of the last axis.
        several: number of such runs of an axis that are joined into one.

    Attributes:
        axis: the axis along which runs are cut; later axes are complete.
        longest: elements of the longest run.
    """

    def __init__(self, shape: tuple[int, ...], size: int, several: int = 1) -> None:
        self.shape = shape
        shape = shape or (1,)
        axis, inner = len(shape) - 1, 1
        while axis > 0 and inner * shape[axis] <= size:
            inner *= shape[axis]
            axis -= 1
        self.axis, self._inner = axis, inner
        self._step = max(size // max(inner, 1), 1) * several
        self.longest = self._step * inner
        self._turns = -(-shape[axis] // self._step)
        self._lead = shape[:axis]
        self._size = shape[axis]

    def __len__(self) -> int:
        return prod(self._lead) * self._turns if prod(self.shape) else 0

    def __getitem__(self, number: int) -> ElementRun:
        if not self.shape:
            return ElementRun((), 0, (), ())
        lead, turn = divmod(number, self._turns)
        first = turn * self._step
        last = min(first + self._step, self._size)
        at = tuple(int(i) for i in np.unravel_index(lead, self._lead)) if self._lead else ()
        rest = self.shape[self.axis + 1 :]
        sizes = (*(1 for _ in at), last - first, *rest)
        start = (lead * self._size + first) * self._inner
        return ElementRun((*at, slice(first, last)), start, (*at, first, *(0 for _ in rest)), sizes)

    def __iter__(self) -> Iterator[ElementRun]:
        return (self[number] for number in range(len(self)))

    def ends_first(self) -> Iterator[ElementRun]:
        """Yield all runs, the first, last and middle ones first: they reveal most random changes."""
        count = len(self)
        early = sorted({0, count - 1, count // 2}) if count else []
        yield from (self[number] for number in early)
        yield from (self[number] for number in range(count) if number not in early)
