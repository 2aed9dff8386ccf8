"""Distinct sharding patterns of multi-chunk tensors, and those that can only be flat."""

from __future__ import annotations

import numpy as np

from workbench.analysis.layout.classes import alike
from workbench.analysis.layout.fit import ShardingPattern, sharding_pattern_of
from workbench.analysis.layout.flat import flat_parts
from workbench.analysis.layout.holders import Holders
from workbench.core import box
from workbench.core.arrays import Bools, Ints
from workbench.core.catalog import Catalog


def ragged(catalog: Catalog, who: Holders, tensors: Ints) -> Bools:
    """Return tensors whose chunks are ranges in the order of holders that break inside a row: these must be flat."""
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


def sharding_patterns(catalog: Catalog, who: Holders, tensors: Ints) -> list[tuple[ShardingPattern, Ints]]:
    """Return the distinct sharding patterns of multi-chunk tensors with their tensors, most tensors first."""
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
        pattern = sharding_pattern_of(part.shape_of(tensor), holder[rows], part.offsets[rows], part.sizes[rows])
        found.append((pattern, tensors[order[ends[number] : ends[number + 1]]]))
    return sorted(found, key=lambda one: (-len(one[1]), int(one[1][0])))


def rows_of(catalog: Catalog, tensors: Ints) -> Ints:
    counts = np.diff(catalog.row_ptr)[tensors]
    ends = np.cumsum(counts)
    return np.repeat(catalog.row_ptr[tensors] - (ends - counts), counts) + np.arange(int(counts.sum()))
