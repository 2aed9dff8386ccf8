"""Distinct sharding patterns of multi-chunk tensors, and those that can only be flat."""

from __future__ import annotations

import numpy as np

from workbench.analysis.layout.classes import alike, blocks, rows_of
from workbench.analysis.layout.fit import ShardingPattern, sharding_pattern_of
from workbench.analysis.layout.flat import flat_parts
from workbench.analysis.layout.holders import Holders
from workbench.core import box
from workbench.core.arrays import Bools, Ints
from workbench.core.catalog import Catalog


def ragged(catalog: Catalog, who: Holders, tensors: Ints) -> Bools:
    """Return tensors whose chunks are ranges in the order of holders that break inside a row: these must be flat."""
    found = np.zeros(len(catalog), bool)
    for some in blocks(catalog, tensors):
        found[some[_ragged(catalog, who, some)]] = True
    return found


def _ragged(catalog: Catalog, who: Holders, tensors: Ints) -> Bools:
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
    return flat & inside


def sharding_patterns(catalog: Catalog, who: Holders, tensors: Ints) -> list[tuple[ShardingPattern, Ints]]:
    """Return the distinct sharding patterns of multi-chunk tensors with their tensors, most tensors first."""
    group, first = alike(catalog, who.of_chunk, tensors)
    found = []
    order = np.argsort(group, kind="stable")
    ends = np.searchsorted(group[order], np.arange(len(first) + 1))
    for number, tensor in enumerate(tensors[first].tolist()):
        rows = catalog.rows_of(tensor)
        boxes = catalog.offsets[rows], catalog.sizes[rows]
        pattern = sharding_pattern_of(catalog.shape_of(tensor), who.of_chunk[rows], *boxes)
        found.append((pattern, tensors[order[ends[number] : ends[number + 1]]]))
    return sorted(found, key=lambda one: (-len(one[1]), int(one[1][0])))
