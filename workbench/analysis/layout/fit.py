"""Placements that yield, rank by rank, exactly the stored boxes.

Holders are points of a mesh. Holders that agree on some axes form a group (in a save without copies, any of them may
write); each group must store exactly what cuts along these axes leave to it::

    linear_fc1 = [gate; up] (192, 64), tp=2 × dp=2, each piece written by one of its two holders
        rank 0  tp 0 dp 0  rows 96:144 ┐ tp 0: rows 0:48, 96:144      = StridedShard(0, 2) along tp, coordinate 0
        rank 2  tp 0 dp 1  rows 0:48   ┘
        rank 1  tp 1 dp 0  rows 144:192┐ tp 1: rows 48:96, 144:192    = …, coordinate 1
        rank 3  tp 1 dp 1  rows 48:96  ┘

As many axes as possible cut: fewer would always fit as well. Most savers store a local tensor in one piece; then the
holders of a group must have stored the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations, product
from math import prod

from workbench.analysis.layout.runs import AxisCut, Run, cut_axis, joined
from workbench.core.arrays import Ints

Box = tuple[tuple[Run, ...], ...]  #: runs of each axis; their product is the box or boxes
AXES = 4  #: maximum number of mesh axes; more do not occur
TRIED = 4096  #: maximum number of placements tried per sharding pattern
PARTS = (2, 3)  #: parts of fused weights: [gate; up], [q; k; v]


@dataclass(frozen=True, eq=False)
class ShardingPattern:
    """A sharding pattern: the boxes that each holder stores.

    Attributes:
        shape: of the tensor.
        holders: distinct holders, in order.
        boxes: distinct boxes of each holder: ``((low, size), …)``, one pair per axis.
    """

    shape: tuple[int, ...]
    holders: tuple[int, ...]
    boxes: tuple[frozenset[tuple[Run, ...]], ...]


@dataclass(frozen=True, slots=True)
class Fit:
    """Cuts that yield the stored boxes, and the mesh axes that they use."""

    cuts: tuple[AxisCut, ...]
    axes: tuple[int, ...]


def sharding_pattern_of(shape: tuple[int, ...], holder: Ints, offsets: Ints, sizes: Ints) -> ShardingPattern:
    """Collect boxes by holder, without empty ones."""
    ndim = len(shape)
    found: dict[int, set[tuple[Run, ...]]] = {}
    rows = zip(holder.tolist(), offsets[:, :ndim].tolist(), sizes[:, :ndim].tolist(), strict=True)
    for who, low, size in rows:
        mine = found.setdefault(who, set())
        if all(size):
            mine.add(tuple(zip(low, size, strict=True)))
    order = sorted(found)
    return ShardingPattern(shape, tuple(order), tuple(frozenset(found[who]) for who in order))


def fits(
    pattern: ShardingPattern, sizes: Sequence[int], places: Ints, allowed: Sequence[int], *, parts: bool = False
) -> list[Fit]:
    """Return every fit with the maximum number of axes; they differ in which axes.

    Args:
        pattern: the boxes.
        sizes: of the mesh's axes.
        places: ``(len(pattern.holders), axes)`` coordinates; a row with -1 on an axis excludes that axis.
        allowed: axes that may cut.
        parts: whether a holder may have stored only a part of its local tensor; otherwise each stored all of it.
    """
    known = [axis for axis in allowed if sizes[axis] > 1 and (places[:, axis] >= 0).all()][:AXES]
    for count in range(len(known), 0, -1):
        found = []
        for axes in combinations(known, count):
            grouped = _grouped(pattern, places[:, axes], parts)
            if grouped is not None and (cuts := _cuts(pattern.shape, axes, sizes, grouped)) is not None:
                found.append(Fit(cuts, axes))
        if found:
            return found
    return []


def product_of(boxes: Sequence[tuple[Run, ...]]) -> Box | None:
    """Return boxes as the product of runs along each axis, or ``None`` if they are not a product."""
    if not boxes:
        return ()
    runs = [sorted({one[dim] for one in boxes}) for dim in range(len(boxes[0]))]
    if prod(map(len, runs)) != len(boxes):
        return None
    return tuple(tuple(joined(axis)) for axis in runs)


def _grouped(pattern: ShardingPattern, places: Ints, parts: bool) -> dict[tuple[int, ...], Box] | None:
    """Return the joint runs of each coordinate's holders; ``None`` if not a product of runs, or if holders differ."""
    together: dict[tuple[int, ...], set[tuple[Run, ...]]] = {}
    for at, boxes in zip(map(tuple, places.tolist()), pattern.boxes, strict=True):
        mine = together.setdefault(at, set(boxes))
        if not parts and mine != boxes:
            return None
        mine.update(boxes)
    found = {}
    for at, every in together.items():
        box = product_of(_merged(sorted(every)))
        if box is None:
            return None
        found[at] = box
    return found


def _merged(boxes: list[tuple[Run, ...]]) -> list[tuple[Run, ...]]:
    """Merge boxes that are adjacent along one axis: it does not matter which holder wrote which half."""
    for dim in range(len(boxes[0]) if boxes else 0):
        beside: dict[tuple[Run, ...], list[Run]] = {}
        for box in boxes:
            beside.setdefault(box[:dim] + box[dim + 1 :], []).append(box[dim])
        boxes = [(*rest[:dim], run, *rest[dim:]) for rest, runs in beside.items() for run in joined(sorted(runs))]
    return boxes


def _cuts(
    shape: tuple[int, ...], axes: tuple[int, ...], sizes: Sequence[int], held: dict[tuple[int, ...], Box]
) -> tuple[AxisCut, ...] | None:
    """Return cuts along all of these axes that yield exactly the stored boxes of each coordinate, possibly none."""
    points = list(held)
    if prod(sizes[axis] for axis in axes) <= 64 * len(points):
        points = list(product(*(range(sizes[axis]) for axis in axes)))
    points.sort(key=lambda at: (at not in held, sum(at)))
    cut_dims = [dim for dim, size in enumerate(shape) if any(box and box[dim] != ((0, size),) for box in held.values())]
    for tried, cuts in enumerate(_candidates(shape, axes, sizes, cut_dims, held)):
        if tried == TRIED:
            return None
        if all(_gives(shape, axes, sizes, cuts, at, held.get(at, ())) for at in points):
            return cuts
    return None


def _candidates(
    shape: tuple[int, ...],
    axes: tuple[int, ...],
    sizes: Sequence[int],
    dims: Sequence[int],
    held: dict[tuple[int, ...], Box],
) -> Iterator[tuple[AxisCut, ...]]:
    """Yield assignments of mesh axes to the cut axes of the tensor, plain ones first."""
    if len(axes) < len(dims):
        return
    assignments = [assignment for assignment in product(dims, repeat=len(axes)) if set(assignment) == set(dims)]
    orders = list(permutations(range(len(axes))))
    for order in orders:  # the order matters only within one dim
        for assignment in assignments:
            yield tuple(AxisCut(axes[k], assignment[k]) for k in order)
    for order in orders:
        for assignment in assignments:
            dim = assignment[order[0]]
            for parts in _parts(shape[dim], dim, held):
                first = AxisCut(axes[order[0]], dim, parts)
                yield (first, *(AxisCut(axes[k], assignment[k]) for k in order[1:]))


def _parts(length: int, dim: int, held: dict[tuple[int, ...], Box]) -> list[tuple[int, ...]]:
    """Yield possible parts of fused weights: equal ones, or starting where the first coordinate's runs start."""
    found = {tuple(min(-(-length // n), max(length - k * -(-length // n), 0)) for k in range(n)) for n in PARTS}
    starts = sorted({run[0] for at, box in held.items() if box and not any(at) for run in box[dim]})
    if 1 < len(starts) <= 64 and starts[0] == 0:
        found.add(tuple(b - a for a, b in zip(starts, [*starts[1:], length], strict=True)))
    return sorted(found, key=len)


def _gives(
    shape: tuple[int, ...],
    axes: tuple[int, ...],
    sizes: Sequence[int],
    cuts: tuple[AxisCut, ...],
    at: tuple[int, ...],
    box: Box,
) -> bool:
    """Return whether the cuts leave exactly ``box`` to a coordinate."""
    where = dict(zip(axes, at, strict=True))
    left = []
    for dim, length in enumerate(shape):
        mine = [(cut, sizes[cut.axis], where[cut.axis]) for cut in cuts if cut.dim == dim]
        left.append(tuple(sorted(cut_axis(length, mine))) if mine else ((0, length),))
    if any(not runs for runs in left):
        return not box
    return tuple(tuple(joined(runs)) for runs in left) == box
