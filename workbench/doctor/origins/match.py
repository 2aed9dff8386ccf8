"""Match rows of after with rows of before, tolerating updates, by the angle between them.

::

    rows of after    (s, w) ──project──▶ (s, 64)  ┐  cosine, roughly       the best few        exact cosine
    rows of before   (n, w) ──project──▶ (n, 64)  ┴─ of all pairs ───────▶ candidates ───────▶ gap to its own row

A projection by random signs preserves angles to about 1/√64; its candidates are recomputed on all elements. A few
updates turn a row only a little (healthy: cosine above .9), and two trained rows are nearly orthogonal. Rows of before
are read block by block: memory is the matched rows of after (16 MiB) and one block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench.analysis.numbers import Decoder
from workbench.core.arrays import Array, Ints
from workbench.doctor.origins.index import row_shape
from workbench.tensor import LazyTensor

DIMS = 64
ROWS = 1024  #: most rows of a tensor that are matched, spread over it
BYTES = 16 << 20  #: approximate bytes of those rows
LARGEST = 1e15  #: limit on values, so their squares stay finite
BLOCK = 1 << 19  #: elements of before in memory at a time


@dataclass(frozen=True, eq=False)
class Matched:
    """Rows of after with their places before.

    Attributes:
        rows: ``(s,)`` the matched rows of after. step: distance between them (1: all). count: number of all rows.
        source, place: ``(s,)`` tensor of before (its number) and row in it.
        cosine: ``(s,)`` with that row. own: with the row of the same number in the same tensor.
        chance: the best cosine of that many rows of that length by chance, about √(1 − n^(−2/(w − 1))).
    """

    rows: Ints
    step: int
    source: Ints
    place: Ints
    cosine: Array
    own: Array
    chance: float
    count: int


def values(tensor: LazyTensor, first: int, last: int, *, columns: bool = False) -> Array:
    """Return ``(last - first, w) float32`` rows of a tensor, or columns (of its last axis); NaN becomes 0."""
    count, width = row_shape(tensor.shape)
    if columns:
        part = tensor.lazy[(*[slice(None)] * (len(tensor.shape) - 1), slice(first, last))]
    elif len(tensor.shape) == 2:
        part = tensor.lazy[first:last]
    else:
        each = count // tensor.shape[0]
        part = tensor.lazy[first // each : -(-last // each)]
    found = _numbers(part, part.numpy())
    if columns:
        return np.ascontiguousarray(found.reshape(-1, found.shape[-1]).T)
    rows = found.reshape(-1, width)
    start = 0 if len(tensor.shape) == 2 else first % (count // tensor.shape[0])
    return np.asarray(rows[start : start + last - first])


def some(tensor: LazyTensor, rows: Ints) -> Array:
    """Return ``(len(rows), w) float32`` rows of a tensor as :func:`values` does, planned and read together.

    Args:
        rows: ``(s,)`` numbers of rows of a tensor with at least two axes.
    """
    shape, (_, width) = tensor.shape, row_shape(tensor.shape)
    axes = len(shape) - 1 if shape[-1] == width else 1  # those that number the rows
    offsets, sizes = np.zeros((2, len(rows), len(shape)), np.int64)
    offsets[:, :axes] = np.stack(np.unravel_index(rows, shape[:axes]), 1)
    sizes[:] = [1] * axes + list(shape[axes:])
    raw = np.empty((len(rows), width), tensor.element.numpy)
    for at, box in enumerate(tensor.boxes(offsets, sizes)):
        raw[at] = box.reshape(-1)
    return _numbers(tensor, raw)


def _numbers(tensor: LazyTensor, raw: Array) -> Array:
    with np.errstate(all="ignore"):
        found = Decoder(tensor.element).numbers(np.ascontiguousarray(raw).reshape(-1)).astype(np.float32)
        return np.clip(np.nan_to_num(found.reshape(raw.shape), nan=0.0), -LARGEST, LARGEST)


def match(after: LazyTensor, before: Sequence[LazyTensor], own: int, *, columns: bool = False) -> Matched:
    """Match the rows of a tensor with those of several tensors of before.

    Args:
        before: tensors with rows of the same length.
        own: the number of the one with the same name.
        columns: match columns instead, those of the last axis.
    """
    count, width = _lines(after, columns)
    step = -(-count // max(min(ROWS, BYTES // (4 * width)), 64))
    rows = np.arange(0, count, step)
    signs = _signs(width)

    def lines(tensor: LazyTensor, first: int, last: int) -> Array:
        return values(tensor, first, last, columns=columns)

    if step > 1 and columns:
        mine = np.concatenate([lines(after, row, row + 1) for row in rows.tolist()])
    elif step > 1:
        mine = some(after, rows)
    else:
        mine = _all(lines, after, count, width)
    length = np.linalg.norm(mine, axis=1)
    drawn = _unit(mine @ signs)
    source, place = np.full(len(rows), own), rows.copy()
    cosine, straight = np.full(len(rows), -2.0), np.zeros(len(rows))
    every = np.arange(len(rows))
    for number, tensor in enumerate(before):
        total, _ = _lines(tensor, columns)
        piece = max(BLOCK // width, 1)
        for first in range(0, total, piece):
            block = lines(tensor, first, min(first + piece, total))
            top = (drawn @ _unit(block @ signs).T).argmax(axis=1)
            exact = _cosines(mine, length, block[top[every]])
            better = exact > cosine
            source[better], place[better], cosine[better] = number, first + top[better], exact[better]
            if number == own:
                here = (rows >= first) & (rows < first + len(block))
                straight[here] = _cosines(mine[here], length[here], block[rows[here] - first])
    stay = straight >= cosine
    source[stay], place[stay], cosine[stay] = own, rows[stay], straight[stay]
    many = sum(_lines(tensor, columns)[0] for tensor in before)
    chance = math.sqrt(1 - max(many, 2) ** (-2 / (width - 1))) if width > 1 else 1.0
    return Matched(rows, step, source, place, cosine, straight, chance, count)


def _all(lines: Any, tensor: LazyTensor, count: int, width: int) -> Array:
    piece = max(BLOCK // width, 1)
    return np.concatenate([lines(tensor, first, min(first + piece, count)) for first in range(0, count, piece)])


def _lines(tensor: LazyTensor, columns: bool) -> tuple[int, int]:
    """Return the number of rows (columns) and the elements per row."""
    count, width = row_shape(tensor.shape)
    return (tensor.shape[-1], math.prod(tensor.shape[:-1])) if columns else (count, width)


def _signs(width: int) -> Array:
    """Return ``(w, 64)`` of ±1, the same for each width."""
    made = np.random.default_rng(width)
    return (2 * made.integers(0, 2, (width, DIMS)) - 1).astype(np.float32)


def _unit(rows: Array) -> Array:
    length = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.asarray(rows / np.where(length > 0, length, 1))


def _cosines(mine: Array, length: Array, others: Array) -> Array:
    both = length * np.linalg.norm(others, axis=1)
    return np.asarray(np.einsum("ij,ij->i", mine, others) / np.where(both > 0, both, 1), np.float64)
