"""A tensor in blocks, in row-major order, which bound the memory of every single-tensor view.

A block is a run (:mod:`workbench.core.runs`) seen as a piece of a matrix, whose rows are all axes but the last::

    shape (2, 6, 4), up to 8 elements a block       rows 0:2     2:4     4:6     6:8 …
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench.core.runs import Runs
from workbench.tensor import LazyTensor

READ = 1 << 20  #: elements of one read when everything is read
PIECES = 64  #: reads that a sample is spread over
KEEP = 2 << 20  #: elements of a sample that are kept for a second pass


@dataclass(frozen=True)
class MatrixBlock:
    """A piece of a tensor seen as a matrix (leading axes flattened).

    Attributes:
        rows, cols: half-open ranges of the matrix that the block covers.
        values: flat ``LazyTensor.numpy()`` values.
    """

    rows: tuple[int, int]
    cols: tuple[int, int]
    values: np.ndarray[Any, Any]


class MatrixBlocks:
    """The blocks of one tensor; a small sample is read only once, even if it is iterated again.

    Args:
        tensor: any lazy tensor whose elements fill whole bytes.
        limit: about how many elements to read, as evenly spaced blocks; ``None`` for all.
    """

    def __init__(self, tensor: LazyTensor, limit: int | None = None) -> None:
        self._tensor, self._shape = tensor, tensor.shape
        self.sampled = limit is not None and tensor.numel() > max(limit, 1)
        size = max(limit // PIECES, 1) if limit is not None and self.sampled else READ
        self._runs = Runs(self._shape, size)
        wanted = range(len(self._runs))
        if self.sampled and limit is not None:
            share = min(len(self._runs), max(limit // max(self._runs.longest, 1), 1))
            wanted = np.unique(np.linspace(0, len(self._runs) - 1, share).astype(np.int64)).tolist()
        self._wanted = wanted
        self._kept: list[MatrixBlock] | None = [] if len(wanted) * self._runs.longest <= KEEP else None
        self._done = False

    def __iter__(self) -> Iterator[MatrixBlock]:
        if self._done and self._kept is not None:
            yield from self._kept
            return
        kept: list[MatrixBlock] = []
        for number in self._wanted:
            block = self._read(number)
            if self._kept is not None:
                kept.append(block)
            yield block
        if self._kept is not None:
            self._kept, self._done = kept, True

    def _read(self, number: int) -> MatrixBlock:
        if not self._shape:
            return MatrixBlock((0, 1), (0, 1), self._tensor.numpy().reshape(-1))
        run, width = self._runs[number], self._shape[-1]
        part = self._tensor if run.sizes == self._shape else self._tensor.lazy[run.key]
        values = part.numpy().reshape(-1)
        row = run.start // width
        if self._runs.axis == len(self._shape) - 1:
            return MatrixBlock((row, row + 1), (run.low[-1], run.low[-1] + len(values)), values)
        return MatrixBlock((row, row + len(values) // width), (0, width), values)
