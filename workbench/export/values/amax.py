"""The largest magnitude in each block of tensors, as an export will write them: one pass over their bytes.

::

    chunks, in the order of the files ─► runs of 1 MiB ─► boxes ─► values after the steps so far ─► maximum by block

Memory is a few MB per thread and one float32 per block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from workbench.core import box
from workbench.core.arrays import Array
from workbench.core.dtypes import DType
from workbench.core.payload import Payloads
from workbench.core.scan import Piece, Progress, scan
from workbench.core.work import chunk_work
from workbench.export.values.located import TensorChange
from workbench.export.values.scales import grid_shape


def largest(
    payloads: Payloads,
    changes: Mapping[int, TensorChange],
    blocks: Mapping[int, tuple[int, int]],
    *,
    threads: int | None = None,
    progress: Progress | None = None,
) -> dict[int, Array]:
    """Return the largest finite magnitude of each block, 0 if it has none.

    Args:
        changes: earlier changes of the values; by position of the tensor, which has two axes or more.
        blocks: rows and columns of a block, by position of the tensor.

    Returns:
        float32 grids of :func:`workbench.export.values.scales.grid_shape`, by position of the tensor.
    """
    catalog = payloads.catalog
    found = {t: np.zeros(grid_shape(catalog.shape_of(t), block), np.float32) for t, block in blocks.items()}
    work = chunk_work(payloads, tensors=np.fromiter(blocks, np.int64, len(blocks)))
    for tensor, state in scan(work, _GridMax(payloads, changes, blocks), threads=threads, progress=progress):
        if state:
            found[tensor] = state[0]
    return found


@dataclass(frozen=True)
class _GridMax:
    """A state is a list of one grid, empty before the first piece, which determines the tensor."""

    payloads: Payloads
    changes: Mapping[int, TensorChange]
    blocks: Mapping[int, tuple[int, int]]

    def begin(self, dtype: DType, other: DType | None) -> list[Array]:
        return []

    def fold(self, state: list[Array], piece: Piece) -> None:
        catalog = self.payloads.catalog
        tensor = int(catalog.tensor[piece.row])
        ndim, shape = int(catalog.ndim[tensor]), catalog.shape_of(tensor)
        if not state:
            state.append(np.zeros(grid_shape(shape, self.blocks[tensor]), np.float32))
        ends = np.array([piece.start]), np.array([piece.start + len(piece.bits)])
        _, offsets, sizes, at = box.flat_ranges(np.asarray(piece.sizes)[None, :ndim], *ends)
        for offset, size, start in zip(offsets, sizes, at.tolist(), strict=True):
            raw = piece.bits[start - piece.start :][: int(box.volume(size))].reshape(size)
            begin = (piece.offsets[:ndim] + offset).tolist()
            with np.errstate(over="ignore", invalid="ignore"):
                _fold(state[0], begin, self.changes[tensor].values(begin, raw), self.blocks[tensor])

    def merge(self, state: list[Array], later: list[Array]) -> None:
        if state and later:
            np.maximum(state[0], later[0], out=state[0])
        else:
            state.extend(later)


def _fold(grid: Array, begin: Sequence[int], values: Array, block: tuple[int, int]) -> None:
    """Take a box into account; ``values`` are changed."""
    np.abs(values, out=values)
    if not np.isfinite(values.max(initial=0)):
        values[~np.isfinite(values)] = 0
    for axis in (-1, -2):
        first = begin[axis] // block[axis]
        cuts = np.arange(first, -(-(begin[axis] + values.shape[axis]) // block[axis])) * block[axis] - begin[axis]
        values = np.maximum.reduceat(values, np.maximum(cuts, 0), axis=axis)
    place = [slice(a, a + n) for a, n in zip(begin[:-2], values.shape[:-2], strict=True)]
    place += [slice(a // b, a // b + n) for a, b, n in zip(begin[-2:], block, values.shape[-2:], strict=True)]
    part = grid[tuple(place)]
    np.maximum(part, values, out=part)
