"""Scales: one float32 for each block of a tensor's last two axes.

::

    weight (5, 7), block (2, 4)       grid (3, 2)        a scale for the tensor: block (m, n), grid (1, 1)
    ┌────────┬──────┐                 ┌─────┬─────┐      a scale a row:          block (1, n), grid (m, 1)
    │ 2 × 4  │ 2 × 3│                 │     │     │      a stack [e, m, n]:      grid [e, …, …]
    ├────────┼──────┤                 ├─────┼─────┤
    │        │      │                 │     │     │
    ├────────┼──────┤                 ├─────┼─────┤
    │ 1 × 4  │ 1 × 3│                 │     │     │
    └────────┴──────┘                 └─────┴─────┘
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from workbench.core.arrays import Array


def grid_shape(shape: Sequence[int], block: tuple[int, int]) -> tuple[int, ...]:
    """Return the grid of blocks of a tensor of two or more axes; blocks at the ends may be smaller."""
    return (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))


@dataclass(frozen=True, eq=False)
class Scales:
    """Multiplies each element by its block's number: a step of :class:`workbench.export.values.located.TensorChange`.

    Attributes:
        grid: float32, of :func:`grid_shape`.
        block: rows and columns of a block.
    """

    grid: Array
    block: tuple[int, int]

    @property
    def identity(self) -> str:
        """The block, and a digest of the numbers."""
        return f"scales {self.block} {xxhash.xxh3_128_hexdigest(np.ascontiguousarray(self.grid))}"

    def __call__(self, begin: Sequence[int], values: Array) -> None:
        """Multiply a box of the tensor in place; it begins at ``begin`` and has as many axes."""
        if values.ndim < 2:
            begin, values = (
                (0,) * (2 - values.ndim) + tuple(begin),
                values.reshape((1,) * (2 - values.ndim) + values.shape),
            )
        rows, columns = self.block
        for lead in np.ndindex(*values.shape[:-2]):
            grid = self.grid[tuple(a + k for a, k in zip(begin, lead, strict=False))]
            part = values[lead]
            if grid.shape[1] == 1:
                part *= grid[np.arange(begin[-2], begin[-2] + len(part)) // rows]
                continue
            first = begin[-1] // columns
            last = -(-(begin[-1] + part.shape[1]) // columns)
            for block, run in segments(begin[-2], len(part), rows):
                line = np.repeat(grid[block, first:last], columns)[begin[-1] - first * columns :]
                part[run] *= line[: part.shape[1]]


def segments(begin: int, count: int, block: int) -> Iterator[tuple[int, slice]]:
    """Return the blocks that contain ``count`` positions from ``begin`` on, and the positions in each."""
    for number in range(begin // block, -(-(begin + count) // block)):
        yield number, slice(max(number * block - begin, 0), min((number + 1) * block - begin, count))
