"""Classes of tensors with the same cuts and holders: each sharding pattern is analysed only once.

A checkpoint of a million chunks has a handful of patterns. Rows of a tensor are summed into one 64-bit number; tensors
with equal numbers are compared row by row with the first of them, so equal numbers alone decide nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from workbench.core.arrays import Ints
from workbench.core.catalog import Catalog


def alike(catalog: Catalog, holder: Ints) -> tuple[Ints, Ints]:
    """Group tensors by shape, and the boxes and holders of their chunks.

    Args:
        catalog: the tensors.
        holder: ``(N,)`` of each chunk row.

    Returns:
        ``(class of each tensor, first tensor of each class)``.
    """
    counts = np.diff(catalog.row_ptr)
    tensors = len(counts)
    if not tensors:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    columns = [holder.astype(np.int64), catalog.replica.astype(np.int64)]
    columns += [column for table in (catalog.offsets, catalog.sizes) for column in table.T]
    inside = np.arange(catalog.chunks) - np.repeat(catalog.row_ptr[:-1], counts)
    mixed = np.zeros(catalog.chunks, np.uint64)
    for number, column in enumerate([inside, *columns]):
        mixed = _mix(mixed + column.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15 + 2 * number))
    total = np.zeros(catalog.chunks + 1, np.uint64)
    np.cumsum(mixed, out=total[1:])
    sums = total[catalog.row_ptr[1:]] - total[catalog.row_ptr[:-1]]
    for column in (counts, catalog.ndim, *catalog.shape.T):
        sums = _mix(sums + np.asarray(column).astype(np.uint64))
    _, first, group = np.unique(sums, return_index=True, return_inverse=True)
    same = _same_rows(catalog, columns, counts, first[group], inside)
    if not same.all():  # two patterns with the same number: those that differ get their own class
        odd = np.flatnonzero(~same)
        group = group.copy()
        group[odd] = len(first) + np.arange(len(odd))
        first = np.concatenate([first, odd])
    return group, first


def _same_rows(catalog: Catalog, columns: list[Ints], counts: Ints, first: Ints, inside: Ints) -> Any:
    """Return whether each tensor equals the first of its group."""
    same = (counts == counts[first]) & (catalog.ndim == catalog.ndim[first])
    same &= (catalog.shape == catalog.shape[first]).all(axis=1)
    rows = np.flatnonzero(same[catalog.tensor])
    twin = (catalog.row_ptr[first][catalog.tensor[rows]] + inside[rows]).astype(np.int64)
    differs = np.zeros(len(rows), bool)
    for column in columns:
        differs |= column[rows] != column[twin]
    same[catalog.tensor[rows[differs]]] = False
    return same


def _mix(values: np.ndarray[Any, np.dtype[np.uint64]]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Spread each bit over all bits (splitmix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
