"""Distinct sharding patterns of multi-chunk tensors, and those that can only be flat.

Ranks hold ranges of flattened tensors under ZeRO, FSDP1 and Megatron's distributed optimizer. A buffer contains tensors
end to end and is cut into equal parts; a tensor is inside one part, or cut where parts meet::

    buffer   │ wq          │ wk    │ w1                 │
    ranks    │ 0        │ 1          │ 2       │ 3      │       rank 1: the end of wq, wk, the beginning of w1

A range of a row-major tensor consists of a few boxes, and each box is itself a range.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from workbench.analysis.layout.classes import alike, blocks, rows_of
from workbench.analysis.layout.fit import ShardingPattern, sharding_pattern_of
from workbench.analysis.layout.holders import Holders
from workbench.core import box
from workbench.core.arrays import Bools, Ints
from workbench.core.box import row_major
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


# ---- flat buffers ----------------------------------------------------------------------------------------------------


class FlatRanges(NamedTuple):
    """Ranges of flattened tensors, by tensor and start; ``(P,)`` each."""

    tensor: Ints
    holder: Ints
    start: Ints
    stop: Ints


def ranges_of(shapes: Ints, offsets: Ints, sizes: Ints) -> tuple[Ints, Ints, Bools]:
    """Return start and stop of boxes in their flattened tensors, and whether they contain all elements between."""
    strides = row_major(shapes)
    start = (offsets * strides).sum(axis=1)
    stop = start + ((sizes - 1) * strides).sum(axis=1) + 1
    return start, stop, stop - start == box.volume(sizes)


def flat_parts(
    tensor: Ints, holder: Ints, shapes: Ints, offsets: Ints, sizes: Ints, count: int
) -> tuple[FlatRanges, Bools]:
    """Join boxes (none empty, none twice) to one range for each tensor and holder.

    Args:
        tensor, holder: ``(N,)``.
        shapes, offsets, sizes: ``(N, D)``; ``shapes`` is the flattened tensor's.
        count: number of tensors.

    Returns:
        the ranges, and ``(count,)`` whether each tensor is covered by disjoint ranges, one per holder.
    """
    start, stop, solid = ranges_of(shapes, offsets, sizes)
    flat = np.ones(count, bool)
    flat[tensor[~solid]] = False
    order = np.lexsort((start, tensor))
    tensor, holder, start, stop = tensor[order], holder[order], start[order], stop[order]
    same = tensor[1:] == tensor[:-1]
    flat[tensor[1:][same & (start[1:] != stop[:-1])]] = False  # a hole, an overlap, or copies
    begins = np.concatenate([[True], ~(same & (holder[1:] == holder[:-1]))]) if len(tensor) else np.empty(0, bool)
    heads = np.flatnonzero(begins)
    tails = np.concatenate([heads[1:], [len(tensor)]])[: len(heads)] - 1
    found = FlatRanges(tensor[heads], holder[heads], start[heads], stop[tails])
    pair = found.tensor * (int(holder.max(initial=0)) + 1) + found.holder
    twice = np.bincount(np.unique(pair, return_inverse=True)[1], minlength=1)[np.unique(pair, return_inverse=True)[1]]
    flat[found.tensor[twice > 1]] = False  # a holder with two ranges
    return found, flat
