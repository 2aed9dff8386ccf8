"""Classes of tensors with the same chunks and holders: each sharding pattern is analysed only once.

A checkpoint of a million chunks has a handful of patterns. Rows of a tensor are summed into one 64-bit number; tensors
with equal numbers are compared row by row with the first of them, so equal numbers alone decide nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from workbench.core.arrays import Ints
from workbench.core.catalog import Catalog

ROWS = 1 << 19  #: chunks that are compared at a time


def blocks(catalog: Catalog, tensors: Ints) -> Iterator[Ints]:
    """Cut a list of tensors into parts of up to ``ROWS`` chunks, or of one tensor."""
    ends = np.cumsum(np.diff(catalog.row_ptr)[tensors])
    first = 0
    while first < len(tensors):
        before = int(ends[first - 1]) if first else 0
        stop = max(int(np.searchsorted(ends, before + ROWS, side="right")), first + 1)
        yield tensors[first:stop]
        first = stop


def rows_of(catalog: Catalog, tensors: Ints) -> Ints:
    """Return the chunk rows of tensors, one tensor after the other."""
    counts = np.diff(catalog.row_ptr)[tensors]
    ends = np.cumsum(counts)
    return np.repeat(catalog.row_ptr[tensors] - (ends - counts), counts) + np.arange(int(counts.sum()))


def alike(catalog: Catalog, holder: Ints, tensors: Ints) -> tuple[Ints, Ints]:
    """Group tensors by shape, and the boxes and holders of their chunks.

    Args:
        catalog: where they are.
        holder: ``(N,)`` of each chunk row.
        tensors: positions in the catalog.

    Returns:
        ``(class of each tensor, position in tensors of the first one of each class)``.
    """
    if not len(tensors):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    columns = [holder, catalog.replica]
    columns += [column for table in (catalog.offsets, catalog.sizes) for column in table.T]
    sums = np.concatenate([_summed(catalog, columns, some) for some in blocks(catalog, tensors)])
    _, first, group = np.unique(sums, return_index=True, return_inverse=True)
    twins, same, at = tensors[first[group]], np.zeros(len(tensors), bool), 0
    for some in blocks(catalog, tensors):
        rows = slice(at, at := at + len(some))
        same[rows] = _same_rows(catalog, columns, some, twins[rows])
    if not same.all():  # two patterns with the same number: those that differ get their own class
        odd = np.flatnonzero(~same)
        group = group.copy()
        group[odd] = len(first) + np.arange(len(odd))
        first = np.concatenate([first, odd])
    return group, first


def _summed(catalog: Catalog, columns: list[Ints], tensors: Ints) -> Any:
    """Return one number for each tensor; those of equal rows are equal."""
    rows, counts = rows_of(catalog, tensors), np.diff(catalog.row_ptr)[tensors]
    ends = np.cumsum(counts)
    inside = np.arange(len(rows)) - np.repeat(ends - counts, counts)
    mixed = _mix(inside.astype(np.uint64) * np.uint64(_ODD))
    for number, column in enumerate(columns, 1):
        mixed = _mix(mixed + column[rows].astype(np.int64).astype(np.uint64) * np.uint64(_ODD + 2 * number))
    total = np.zeros(len(rows) + 1, np.uint64)
    np.cumsum(mixed, out=total[1:])
    sums = total[ends] - total[ends - counts]
    for column in (counts, catalog.ndim[tensors], *catalog.shape[tensors].T):
        sums = _mix(sums + np.asarray(column).astype(np.uint64))
    return sums


def _same_rows(catalog: Catalog, columns: list[Ints], tensors: Ints, twins: Ints) -> Any:
    """Return whether each tensor equals its twin."""
    counts = np.diff(catalog.row_ptr)
    same = (counts[tensors] == counts[twins]) & (catalog.ndim[tensors] == catalog.ndim[twins])
    same &= (catalog.shape[tensors] == catalog.shape[twins]).all(axis=1)
    alike = np.flatnonzero(same)
    rows, others = rows_of(catalog, tensors[alike]), rows_of(catalog, twins[alike])
    differs = np.zeros(len(rows), bool)
    for column in columns:
        differs |= column[rows] != column[others]
    same[alike[np.repeat(np.arange(len(alike)), counts[tensors[alike]])[differs]]] = False
    return same


_ODD = 0x9E3779B97F4A7C15


def _mix(values: np.ndarray[Any, np.dtype[np.uint64]]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Spread each bit over all bits (splitmix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
