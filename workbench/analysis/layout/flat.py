"""Ranges of flattened tensors, as ranks hold them under ZeRO, FSDP1 and Megatron's distributed optimizer.

A buffer contains tensors end to end and is cut into equal parts; a tensor is inside one part, or cut where parts meet::

    buffer   │ wq          │ wk    │ w1                 │
    ranks    │ 0        │ 1          │ 2       │ 3      │       rank 1: the end of wq, wk, the beginning of w1

A range of a row-major tensor consists of a few boxes, and each box is itself a range.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from workbench.core import box
from workbench.core.arrays import Bools, Ints
from workbench.core.build import row_major


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
