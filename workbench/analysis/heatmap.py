"""A tensor as a small picture that shows every extreme: each cell is its element of largest magnitude.

The tensor is viewed as a matrix with leading axes flattened, and divided into up to ``rows × cols`` cells::

    (3, 1000, 4096)  ─▶  3000 × 4096  ─▶  96 × 96 cells of ~31 × 43 elements   cell = the element of largest |value|

A mean would hide an outlier; the largest element with its sign does not. A cell with a NaN or an infinity shows it.
All elements are read, in blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from workbench.analysis.blocks import MatrixBlock, MatrixBlocks
from workbench.analysis.numbers import BLOCK, Decoder
from workbench.core.arrays import Array
from workbench.core.words import plural
from workbench.tensor import LazyTensor


@dataclass(frozen=True, eq=False)
class Heat:
    """A down-sampled tensor.

    Attributes:
        values: ``(R, C) float32``: the element of largest magnitude in each cell, with its sign (for complex types the
            magnitude; beyond float32 its largest finite value); NaN before an infinity before a number.
        row_edges, col_edges: ``(R+1,)`` and ``(C+1,)`` int64 positions in the matrix ``shape``.
        shape: shape of the matrix.
        view: text that describes how the tensor became a matrix.
        worst: ``(index, value)`` of the most extreme elements, with indices in the tensor's axes: non-finite ones
            first, by position, then by magnitude.
        kind: the kind of values, see :attr:`Summary.kind`.
    """

    values: Array
    row_edges: Array
    col_edges: Array
    shape: tuple[int, int]
    view: str
    worst: list[tuple[tuple[int, ...], float | int]]
    kind: str


def heatmap(tensor: LazyTensor, rows: int = 96, cols: int = 96, *, top: int = 10) -> Heat:
    """Divide a tensor into up to ``rows × cols`` cells and list its ``top`` most extreme elements.

    A packed type (F4, F6) has no numbers: ``values`` is empty and ``kind`` is ``raw bytes``.

    Raises:
        HoleError, OpenError: an element is not stored or cannot be read.
    """
    decoder = Decoder(tensor.element)
    shape = _matrix(tensor.shape)
    if decoder.kind == "raw bytes" or 0 in shape:
        none = np.zeros(1, np.int64)
        return Heat(np.empty((0, 0), np.float32), none, none, shape, _words(tensor.shape), [], decoder.kind)
    row_edges, col_edges = _edges(shape[0], rows), _edges(shape[1], cols)
    high = np.full((len(row_edges) - 1, len(col_edges) - 1), -np.inf)
    low = -high
    worst = _Worst(top)
    for block in MatrixBlocks(tensor):
        for part in _bounded(block):
            numbers = decoder.numbers(part.values)
            _fold(high, low, numbers, part, row_edges, col_edges)
            worst.add(numbers, part.rows[0] * shape[1] + part.cols[0])
    values = np.where(high >= -low, high, low)
    values = np.where(np.isnan(high), np.nan, values)
    finite = np.isfinite(values)
    values[finite] = np.clip(values[finite], -_MAX, _MAX)
    listed = [(_index(flat, tensor.shape), value) for flat, value in worst.listed()]
    picture = values.astype(np.float32)
    return Heat(picture, row_edges, col_edges, shape, _words(tensor.shape), listed, decoder.kind)


class _Worst:
    """The first non-finite elements, and the finite ones of largest magnitude."""

    def __init__(self, top: int) -> None:
        self._top = top
        self._odd: list[tuple[int, Any]] = []
        self._big: list[tuple[Any, int, Any]] = []  # (−|value|, flat index, value), sorted

    def add(self, values: Array, start: int) -> None:
        if not self._top:
            return
        if values.dtype.kind == "f":
            odd = np.flatnonzero(~np.isfinite(values))
            if len(odd):
                first = odd[: max(self._top - len(self._odd), 0)]
                self._odd += [(start + at, values[at].item()) for at in first.tolist()]
                values = np.where(np.isfinite(values), values, 0)
        least = -self._big[-1][0] if len(self._big) == self._top else -1
        low, high = values.min().item(), values.max().item()
        if max(high, -low) <= least:
            return
        # unlike numpy's, Python's integers can negate the smallest value
        magnitude = np.maximum(values, -values) if values.dtype.kind == "f" else _unsigned(values)
        candidates = np.flatnonzero(magnitude > least) if least >= 0 else np.arange(len(values))
        if len(candidates) > self._top:
            bound = np.partition(magnitude[candidates], len(candidates) - self._top)[len(candidates) - self._top]
            above, equal = candidates[magnitude[candidates] > bound], candidates[magnitude[candidates] == bound]
            candidates = np.concatenate([above, equal[: self._top - len(above)]])
        found = [(-magnitude[at].item(), start + at, values[at].item()) for at in candidates.tolist()]
        self._big = sorted(self._big + found, key=lambda row: row[:2])[: self._top]

    def listed(self) -> list[tuple[int, Any]]:
        odd = {flat for flat, _ in self._odd}
        return (self._odd + [(flat, value) for _, flat, value in self._big if flat not in odd])[: self._top]


def _fold(high: Array, low: Array, numbers: Array, part: MatrixBlock, row_edges: Array, col_edges: Array) -> None:
    """Update the cells' extremes with a rectangle of the matrix."""
    rows, row_at = _cells(row_edges, *part.rows)
    cols, col_at = _cells(col_edges, *part.cols)
    grid = numbers.reshape(part.rows[1] - part.rows[0], -1)
    where = (slice(rows.start, rows.stop), slice(cols.start, cols.stop))
    with np.errstate(invalid="ignore"):
        for whole, ufunc in ((high, np.maximum), (low, np.minimum)):
            found = ufunc.reduceat(ufunc.reduceat(grid, row_at, axis=0), col_at, axis=1)
            whole[where] = ufunc(whole[where], found)


def _cells(edges: Array, start: int, stop: int) -> tuple[range, Array]:
    """Return the cells that overlap ``[start, stop)``, and where each begins in it."""
    first = int(np.searchsorted(edges, start, side="right")) - 1
    last = int(np.searchsorted(edges, stop, side="left"))
    return range(first, last), np.maximum(edges[first:last] - start, 0)


def _bounded(block: MatrixBlock) -> list[MatrixBlock]:
    """Split a block into pieces of up to :data:`BLOCK` elements (or one row, split if it is longer)."""
    height, width = block.rows[1] - block.rows[0], block.cols[1] - block.cols[0]
    if height > 1 or width <= BLOCK:
        step = max(BLOCK // width, 1)
        found = [
            MatrixBlock(
                (r, min(r + step, block.rows[1])),
                block.cols,
                block.values[(r - block.rows[0]) * width :][: step * width],
            )
            for r in range(block.rows[0], block.rows[1], step)
        ]
        if width <= BLOCK:
            return found
        return [piece for row in found for piece in _bounded(row)]
    return [
        MatrixBlock(block.rows, (c, min(c + BLOCK, block.cols[1])), block.values[c - block.cols[0] :][:BLOCK])
        for c in range(*block.cols, BLOCK)
    ]


def _matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    if not shape:
        return 1, 1
    return prod(shape[:-1]), shape[-1]


def _words(shape: tuple[int, ...]) -> str:
    if not shape:
        return "a single element"
    if len(shape) == 1:
        return f"a vector of {shape[0]:,} as one row"
    if len(shape) == 2:
        return f"{plural(shape[0], 'row')} × {plural(shape[1], 'column')}"
    lead = " × ".join(f"{size:,}" for size in shape[:-1])
    return (
        f"axes 0–{len(shape) - 2} ({lead}) flattened to {plural(prod(shape[:-1]), 'row')}, × "
        f"{plural(shape[-1], 'column')}"
    )


def _edges(size: int, cells: int) -> Array:
    cells = min(cells, size)
    return np.array([size * i // cells for i in range(cells + 1)], np.int64)


def _index(flat: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    index: list[int] = []
    for size in reversed(shape):
        flat, at = divmod(flat, size)
        index.append(at)
    return tuple(reversed(index))


def _unsigned(values: Array) -> Array:
    if values.dtype.kind == "u":
        return values
    unsigned = values.astype(np.int64).view(np.uint64)
    return np.where(values < 0, ~unsigned + np.uint64(1), unsigned)


_MAX = float(np.finfo(np.float32).max)
