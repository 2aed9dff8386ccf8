"""A tensor in blocks, in row-major order: what bounds the memory of every single-tensor view.

A block is a run along one axis at one position of the axes before it, whole along those after it; so that its
elements are neighbours both in the tensor and, mostly, in the file::

    shape (2, 6, 4), at most 8 elements a block     [0, 0:2, :]  [0, 2:4, :]  [0, 4:6, :]  [1, 0:2, :] …
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from workbench.tensor import LazyTensor

__all__ = ["Block", "Blocks"]

READ = 1 << 20  #: elements of one read when everything is read
PIECES = 64  #: reads that a sample is spread over
KEEP = 2 << 20  #: elements of a sample that are kept for a second pass


@dataclass(frozen=True)
class Block:
    """A piece of a tensor seen as a matrix (leading axes flattened).

    Attributes:
        rows, cols: half-open ranges of the matrix that the block covers.
        values: flat ``LazyTensor.numpy()`` values.
    """

    rows: tuple[int, int]
    cols: tuple[int, int]
    values: np.ndarray[Any, Any]


class Blocks:
    """The blocks of one tensor; those of a small sample are read once however often one iterates.

    Args:
        tensor: any lazy tensor whose elements fill whole bytes.
        limit: about how many elements to read, as evenly spaced blocks; ``None`` for all.
    """

    def __init__(self, tensor: LazyTensor, limit: int | None = None) -> None:
        self._tensor, self._shape = tensor, tensor.shape
        self.sampled = limit is not None and tensor.numel > max(limit, 1)
        size = max(limit // PIECES, 1) if limit is not None and self.sampled else READ
        self._plan(size)
        wanted = range(self._count)
        if self.sampled and limit is not None:
            share = min(self._count, max(limit // max(self._step * self._inner, 1), 1))
            wanted = np.unique(np.linspace(0, self._count - 1, share).astype(np.int64)).tolist()
        self._wanted = wanted
        self._kept: list[Block] | None = [] if len(wanted) * self._step * self._inner <= KEEP else None
        self._done = False

    def __iter__(self) -> Iterator[Block]:
        if self._done and self._kept is not None:
            yield from self._kept
            return
        kept: list[Block] = []
        for number in self._wanted:
            block = self._read(number)
            if self._kept is not None:
                kept.append(block)
            yield block
        if self._kept is not None:
            self._kept, self._done = kept, True

    def _plan(self, size: int) -> None:
        shape = self._shape or (1,)
        axis, inner = len(shape) - 1, 1
        while axis > 0 and inner * shape[axis] <= size:
            inner *= shape[axis]
            axis -= 1
        self._axis, self._inner = axis, inner
        self._step = max(size // max(inner, 1), 1)
        self._runs = -(-shape[axis] // self._step)
        self._count = prod(shape[:axis]) * self._runs if prod(shape) else 0

    def _read(self, number: int) -> Block:
        if not self._shape:
            return Block((0, 1), (0, 1), self._tensor.numpy().reshape(-1))
        lead, run = divmod(number, self._runs)
        first, size = run * self._step, self._shape[self._axis]
        last = min(first + self._step, size)
        key: list[Any] = []
        rest = lead
        for extent in reversed(self._shape[: self._axis]):
            rest, index = divmod(rest, extent)
            key.append(index)
        whole = not key and (first, last) == (0, size)
        part = self._tensor if whole else self._tensor.lazy[(*reversed(key), slice(first, last))]
        values = part.numpy().reshape(-1)
        if self._axis == len(self._shape) - 1:
            return Block((lead, lead + 1), (first, last), values)
        width = self._shape[-1]
        start = (lead * size + first) * self._inner // width
        return Block((start, start + len(values) // width), (0, width), values)
