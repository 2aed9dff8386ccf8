"""Which rank hashes which block of a sharded tensor, and who sends it pieces; every rank infers it from the placements.

::

    rows 0:40 | 40:80 | 80:120 of three ranks, blocks of 32 rows
    block 0  rank 0                    its own: hashed in place
    block 1  rank 0, rank 1            the second of its two holders hashes it, the other one sends a piece
    block 2  rank 1, rank 2            …

A block is a flat range of up to ``2n − 1`` boxes; a piece is the intersection of such a box with a rank's box.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from workbench.core import box
from workbench.core.arrays import Ints
from workbench.core.fingerprint import BLOCK
from workbench.core.mesh.cut import cut
from workbench.core.mesh.placement import Placement

AT_ONCE = 1024  #: blocks that are planned at a time


@dataclass(frozen=True, eq=False)
class Copy:
    """A set of ranks that together hold a tensor once.

    Attributes:
        members: ranks, in the order of the mesh.
        local: ``(L, D)`` shapes of their local tensors.
        owner: ``(P,)`` member of each box; the boxes are as those of :class:`~workbench.core.mesh.cut.Locals`.
    """

    members: tuple[int, ...]
    local: Ints
    owner: Ints
    offsets: Ints
    sizes: Ints
    at: Ints


class BlockPiece(NamedTuple):
    """Elements of one block that one member holds as a box.

    Attributes:
        source: the box in its local tensor.
        begin, shape: the block's box that it is a part of: its first element in the block, and its sizes.
        dest: the part.
    """

    member: int
    source: tuple[slice, ...]
    begin: int
    shape: tuple[int, ...]
    dest: tuple[slice, ...]
    numel: int


class Unit(NamedTuple):
    """One block: its number, its elements, its pieces, and the member that hashes it."""

    block: int
    numel: int
    pieces: list[BlockPiece]
    owner: int


def copies(shape: tuple[int, ...], steps: Sequence[tuple[Placement, int]], ranks: Sequence[int]) -> list[Copy]:
    """Return the copies of a tensor on a mesh of ``ranks`` (in row-major order of its axes)."""
    sizes = [count for _, count in steps]
    grid = np.indices(sizes).reshape(len(sizes), -1).T if sizes else np.zeros((1, 0), np.int64)
    padded = np.array([shape or (1,)], np.int64)
    found = cut(padded, len(shape), steps, grid)
    made = []
    for copy in box.distinct(found.copy).tolist():
        rows = np.flatnonzero(found.copy == copy)
        number = np.full(len(found), -1, np.int64)
        number[rows] = np.arange(len(rows))
        mine = number[found.owner] >= 0
        made.append(
            Copy(
                tuple(ranks[rank] for rank in found.rank[rows].tolist()),
                found.shape[rows],
                number[found.owner][mine],
                found.offsets[mine],
                found.sizes[mine],
                found.at[mine],
            )
        )
    return made


def units(copy: Copy, shape: tuple[int, ...], itemsize: int) -> Iterator[Unit]:
    """Yield the blocks of a tensor in order. Blocks with too few pieces have elements that no rank holds."""
    whole = np.array([shape or (1,)], np.int64)
    numel, each = int(whole.prod()), BLOCK // itemsize
    for first in range(0, -(-numel // each), AT_ONCE):
        starts = np.arange(first, min(first + AT_ONCE, -(-numel // each)), dtype=np.int64) * each
        stops = np.minimum(starts + each, numel)
        block, offsets, sizes, at = box.flat_ranges(np.repeat(whole, len(starts), axis=0), starts, stops)
        i, j = box.group_join(
            np.zeros(len(block), np.int64),
            offsets,
            sizes,
            np.zeros(len(copy.owner), np.int64),
            copy.offsets,
            copy.sizes,
        )
        low, extent = box.intersect(offsets[i], sizes[i], copy.offsets[j], copy.sizes[j])
        local = _unravel(copy.at[j], copy.local[copy.owner[j]]) + low - copy.offsets[j]
        inside = low - offsets[i]
        pieces: list[list[BlockPiece]] = [[] for _ in starts]
        columns = (
            block[i],
            copy.owner[j],
            local,
            extent,
            at[i] - starts[block[i]],
            sizes[i],
            inside,
            box.volume(extent),
        )
        ndim = len(shape)
        for number, member, source, size, begin, outer, dest, count in zip(*(c.tolist() for c in columns), strict=True):
            pieces[number].append(
                BlockPiece(
                    member, _slices(source, size, ndim), begin, tuple(outer[:ndim]), _slices(dest, size, ndim), count
                )
            )
        for number, start in enumerate(starts.tolist()):
            holders = sorted({piece.member for piece in pieces[number]})
            owner = holders[(first + number) % len(holders)] if holders else 0
            yield Unit(first + number, int(stops[number]) - start, pieces[number], owner)


def _slices(starts: list[int], sizes: list[int], ndim: int) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(starts[:ndim], sizes[:ndim], strict=True))


def _unravel(at: Ints, shapes: Ints) -> Ints:
    found = np.zeros_like(shapes)
    for axis in range(shapes.shape[1] - 1, -1, -1):
        found[:, axis] = at % np.maximum(shapes[:, axis], 1)
        at = at // np.maximum(shapes[:, axis], 1)
    return found
