"""The ways that tensors of several chunks lie, and which of them are flat for certain."""

from __future__ import annotations

from typing import Any

import numpy as np

from workbench.analysis.layout.classes import alike
from workbench.analysis.layout.fit import Way, way_of
from workbench.analysis.layout.flat import flat_parts
from workbench.analysis.layout.holders import Holders
from workbench.core import box
from workbench.core.catalog import Catalog

__all__ = ["ragged", "rows_of", "ways"]

Ints = np.ndarray[Any, np.dtype[np.int64]]
Bools = np.ndarray[Any, np.dtype[np.bool_]]


def ragged(catalog: Catalog, who: Holders, tensors: Ints) -> Bools:
    """Tensors whose chunks are ranges in the order of holders, with an edge inside a row: flat, and nothing else."""
    found = np.zeros(len(catalog), bool)
    if not len(tensors):
        return found
    part = catalog.take(tensors)
    holder = who.of_chunk[rows_of(catalog, tensors)]
    rows = np.flatnonzero(box.volume(part.sizes) > 0)
    shapes = part.shape.astype(np.int64)
    owner = part.tensor[rows].astype(np.int64)
    offsets, sizes = part.offsets[rows].astype(np.int64), part.sizes[rows].astype(np.int64)
    ranges, flat = flat_parts(owner, holder[rows], shapes[owner], offsets, sizes, len(tensors))
    row = part.numel // np.maximum(shapes[:, 0], 1)
    inside = np.zeros(len(tensors), bool)
    cut = (ranges.start % row[ranges.tensor] != 0) | (ranges.stop % row[ranges.tensor] != 0)
    inside[ranges.tensor[cut]] = True
    backwards = (np.diff(ranges.tensor) == 0) & (np.diff(ranges.holder) <= 0)
    flat[ranges.tensor[1:][backwards]] = False
    found[tensors[flat & inside]] = True
    return found


def ways(catalog: Catalog, who: Holders, tensors: Ints) -> list[tuple[Way, Ints]]:
    """Distinct ways of tensors of several chunks, each with its tensors; those of most tensors first."""
    if not len(tensors):
        return []
    part = catalog.take(tensors)
    holder = who.of_chunk[rows_of(catalog, tensors)]
    group, first = alike(part, holder)
    found = []
    order = np.argsort(group, kind="stable")
    ends = np.searchsorted(group[order], np.arange(len(first) + 1))
    for number, tensor in enumerate(first.tolist()):
        rows = part.rows_of(tensor)
        way = way_of(part.shape_of(tensor), holder[rows], part.offsets[rows], part.sizes[rows])
        found.append((way, tensors[order[ends[number] : ends[number + 1]]]))
    return sorted(found, key=lambda one: (-len(one[1]), int(one[1][0])))


def rows_of(catalog: Catalog, tensors: Ints) -> Ints:
    counts = np.diff(catalog.row_ptr)[tensors]
    ends = np.cumsum(counts)
    return np.repeat(catalog.row_ptr[tensors] - (ends - counts), counts) + np.arange(int(counts.sum()))
