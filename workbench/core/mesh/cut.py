"""Cut tensors for ranks: placements to boxes, as columns over tensors × ranks.

Each axis of a tensor is a list of runs (positions along the axis, in the local tensor's order) that placements narrow
down one after the other; the boxes of a local tensor are the products of the runs of its axes. A flat range cuts the
local tensor last. No loop over tensors or ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from workbench.core import box
from workbench.core.arrays import Ints
from workbench.core.box import row_major
from workbench.core.mesh.placement import Flat, Only, PartedShard, Placement, Replicate, Shard, StridedShard
from workbench.core.words import plural
from workbench.errors import UsageError


@dataclass(frozen=True, eq=False)
class Locals:
    """The local tensors of ranks, and the boxes that they are made of.

    An element ``x`` of a box (counted from its first) is element ``at + (x · strides).sum()`` of the local tensor in
    row-major order.

    Attributes:
        tensor: ``(L,)`` which global tensor.
        rank: ``(L,)`` the rank that holds it.
        copy: ``(L,)`` 0 for the first rank that holds these elements; each rank that holds them has another number.
        ndim: ``(L,)``.
        shape: ``(L, D)`` of the local tensor, padded with 1.
        ptr: ``(L+1,)``: ``ptr[l]:ptr[l+1]`` are its boxes, in the order of its elements; none if it is empty.
        offsets, sizes: ``(P, D)`` boxes of the global tensor.
        at: ``(P,)`` element of the local tensor that a box begins at.
        strides: ``(P, D)`` elements of the local tensor from one of the box's elements to the next.
    """

    tensor: Ints
    rank: Ints
    copy: Ints
    ndim: Ints
    shape: Ints
    ptr: Ints
    offsets: Ints
    sizes: Ints
    at: Ints
    strides: Ints

    def __len__(self) -> int:
        return len(self.tensor)

    @property
    def owner(self) -> Ints:
        """``(P,)`` local tensor of each box."""
        return np.repeat(np.arange(len(self)), np.diff(self.ptr))

    @property
    def numel(self) -> Ints:
        """``(L,)`` elements of each local tensor."""
        return box.volume(self.shape)


def cut(shapes: Ints, ndim: int, steps: Sequence[tuple[Placement, int]], coordinates: Ints) -> Locals:
    """Compute the local tensors of tensors with the same placements, ordered by tensor, then rank.

    Args:
        shapes: ``(T, D)`` global shapes, padded with 1.
        ndim: axes that they have, all the same.
        steps: placements in the order they are applied, each with the size of its mesh axis; one per mesh axis.
        coordinates: ``(R, len(steps))`` of each rank along these mesh axes.

    Returns:
        ``tensor`` and ``rank`` are positions in ``shapes`` and ``coordinates``.

    Raises:
        UsageError: a placement that does not fit the tensor.
    """
    shapes, coordinates = np.asarray(shapes, np.int64), np.asarray(coordinates, np.int64)
    ranks = np.arange(len(coordinates))
    for position, (placement, _) in enumerate(steps):
        if isinstance(placement, Only):
            ranks = ranks[np.isin(coordinates[ranks, position], placement.coordinates)]
    tensor, rank = np.repeat(np.arange(len(shapes)), len(ranks)), np.tile(ranks, len(shapes))
    copy = np.tile(_copies(steps, coordinates[ranks]), len(shapes))
    axes: dict[int, _Axis] = {}
    flat: tuple[Flat, int, Ints] | None = None
    for position, (placement, count) in enumerate(steps):
        if isinstance(placement, Replicate | Only):
            continue
        if flat is not None:
            raise UsageError(f"{placement} is applied after {flat[0]}; a flat range must be the last placement")
        at = coordinates[rank, position]
        if isinstance(placement, Flat):
            flat = placement, count, at
            continue
        dim = _dim(placement, ndim)
        axes.setdefault(dim, _Axis.whole(shapes[tensor, dim]))
        axes[dim] = axes[dim].narrow(*_ranges(placement, axes[dim].length, count, at))
    local = shapes[tensor]
    for dim, axis in axes.items():
        local[:, dim] = axis.length
    owner, offsets, sizes, inside = _product(shapes[tensor], axes)
    found = Locals(
        tensor,
        rank,
        copy,
        np.full(len(tensor), ndim),
        local,
        _pointers(owner, len(tensor)),
        offsets,
        sizes,
        (inside * row_major(local)[owner]).sum(axis=1),
        row_major(local)[owner],
    )
    return found if flat is None else _flatten(found, inside, *_flat_range(flat, found.numel))


def concatenate(parts: Sequence[Locals]) -> Locals:
    """Concatenate several sets of local tensors, ordered by tensor, then rank."""
    if len(parts) == 1 and (np.diff(parts[0].tensor) >= 0).all():  # and by rank, as they are cut
        return parts[0]
    tensor, rank = (np.concatenate([getattr(part, name) for part in parts]) for name in ("tensor", "rank"))
    order = np.lexsort((rank, tensor))
    counts = np.concatenate([np.diff(part.ptr) for part in parts])[order]
    bases = np.cumsum([0, *(len(part.at) for part in parts[:-1])])
    begins = np.concatenate([part.ptr[:-1] + base for part, base in zip(parts, bases, strict=True)])[order]
    rows = box.spans(begins, counts)
    columns = {name: np.concatenate([getattr(part, name) for part in parts]) for name in _BY_LOCAL + _BY_BOX}
    return Locals(
        **{name: columns[name][order] for name in _BY_LOCAL},
        **{name: columns[name][rows] for name in _BY_BOX},
        ptr=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
    )


_BY_LOCAL = ("tensor", "rank", "copy", "ndim", "shape")
_BY_BOX = ("offsets", "sizes", "at", "strides")


class _Axis(NamedTuple):
    """Runs of one axis: ``low`` in the global tensor, ``at`` in the local one; ``length`` of each local tensor."""

    owner: Ints
    low: Ints
    size: Ints
    at: Ints
    length: Ints
    single: bool  # one run per local tensor, perhaps empty

    @classmethod
    def whole(cls, length: Ints) -> _Axis:
        return cls(np.arange(len(length)), np.zeros_like(length), length, np.zeros_like(length), length, True)

    def narrow(self, owner: Ints, first: Ints, size: Ints) -> _Axis:
        """Keep ranges of local positions, given by owner and in the order that they are joined in."""
        single = self.single and len(owner) == len(self.length)
        if self.single:
            low, size = self.low[owner] + first, size
        else:
            i, j = box.group_join(
                owner, first[:, None], size[:, None], self.owner, self.at[:, None], self.size[:, None]
            )
            begin = np.maximum(first[i], self.at[j])
            size = np.minimum(first[i] + size[i], self.at[j] + self.size[j]) - begin
            low, owner = self.low[j] + begin - self.at[j], owner[i]
        if not single:
            real = size > 0
            owner, low, size = owner[real], low[real], size[real]
        length = np.bincount(owner, size, len(self.length)).astype(np.int64) if not single else size
        ends = np.cumsum(size) - size
        base = ends[np.searchsorted(owner, owner)] if len(owner) else ends
        return _Axis(owner, low, size, ends - base, length, single)


def _ranges(placement: Shard | StridedShard | PartedShard, length: Ints, count: int, at: Ints) -> tuple[Ints, ...]:
    """Return the ranges ``(owner, first, size)`` of an axis of ``length`` that coordinate ``at`` of ``count`` keeps."""
    if isinstance(placement, Shard):
        base, part = np.zeros_like(length)[:, None], length[:, None]
    elif isinstance(placement, StridedShard):
        if placement.split_factor < 1:
            raise UsageError(f"{placement} has no parts; split_factor must be 1 or more")
        each = -(-length // placement.split_factor)[:, None]
        base = np.minimum(np.arange(placement.split_factor) * each, length[:, None])
        part = np.minimum(each, length[:, None] - base)
    else:
        wrong = length != sum(placement.parts)
        if wrong.any() or min(placement.parts, default=-1) < 0:
            raise UsageError(
                f"{placement} has parts that sum to {sum(placement.parts)}, on an axis of size {length[wrong][:1]}"
            )
        part = np.broadcast_to(np.array(placement.parts, np.int64), (len(length), len(placement.parts)))
        base = np.cumsum(part, axis=1) - part
    each = -(-part // count)
    first = np.minimum(each * at[:, None], part)
    size = np.minimum(each, part - first)
    owner = np.repeat(np.arange(len(length)), part.shape[1])
    return owner, (base + first).ravel(), size.ravel()


def _dim(placement: Shard | StridedShard | PartedShard, ndim: int) -> int:
    dim = placement.dim + ndim if placement.dim < 0 else placement.dim
    if not 0 <= dim < ndim:
        raise UsageError(f"{placement} on a tensor with {ndim} axes; give it a separate rule, or Replicate()")
    return dim


def _copies(steps: Sequence[tuple[Placement, int]], coordinates: Ints) -> Ints:
    """Number each rank's copy, counting over the axes that do not cut."""
    found = np.zeros(len(coordinates), np.int64)
    for position, (placement, count) in enumerate(steps):
        if isinstance(placement, Only):
            held = np.sort(placement.coordinates)
            found = found * len(held) + np.searchsorted(held, coordinates[:, position])
        elif isinstance(placement, Replicate):
            found = found * count + coordinates[:, position]
    return found


def _product(shapes: Ints, axes: dict[int, _Axis]) -> tuple[Ints, Ints, Ints, Ints]:
    """Return the boxes of every local tensor, row by row: owner, offsets, sizes, and the offsets in local positions."""
    owner, picked = np.arange(len(shapes)), {}
    for dim, axis in sorted(axes.items()):
        if axis.single:
            picked[dim] = owner
            continue
        begin = np.searchsorted(axis.owner, np.arange(len(shapes) + 1))
        counts = np.diff(begin)[owner]
        rows = np.repeat(np.arange(len(owner)), counts)
        run = box.spans(begin[owner], counts)
        owner, picked = owner[rows], {d: p[rows] for d, p in picked.items()}
        picked[dim] = run
    offsets, sizes = np.zeros((len(owner), shapes.shape[1]), np.int64), shapes[owner]
    inside = np.zeros_like(offsets)
    for dim, run in picked.items():
        offsets[:, dim], sizes[:, dim], inside[:, dim] = axes[dim].low[run], axes[dim].size[run], axes[dim].at[run]
    real = box.volume(sizes) > 0
    if real.all():
        return owner, offsets, sizes, inside
    return owner[real], offsets[real], sizes[real], inside[real]


def _flat_range(flat: tuple[Flat, int, Ints], numel: Ints) -> tuple[Ints, Ints]:
    placement, count, at = flat
    if placement.starts is None or placement.stops is None:
        each = -(-numel // count)
        start = np.minimum(each * at, numel)
        return start, np.minimum(start + each, numel)
    if not len(placement.starts) == len(placement.stops) == count:
        raise UsageError(
            f"a flat range has {len(placement.starts)} starts for {plural(count, 'rank')} of its mesh axis"
        )
    start, stop = np.array(placement.starts, np.int64)[at], np.array(placement.stops, np.int64)[at]
    if ((start < 0) | (stop < start) | (stop > numel)).any():
        raise UsageError("a flat range is outside its tensor, or ends before it starts")
    return start, stop


def _flatten(found: Locals, inside: Ints, start: Ints, stop: Ints) -> Locals:
    """Return ranges of the flattened local tensors, their boxes cut at the boxes that make up the local tensors."""
    index, low, size, position = box.flat_ranges(found.shape, start, stop)
    owner = found.owner
    i, j = box.group_join(index, low, size, owner, inside, found.sizes)
    begin, extent = box.intersect(low[i], size[i], inside[j], found.sizes[j])
    strides = row_major(size[i])
    at = position[i] - start[index[i]] + ((begin - low[i]) * strides).sum(axis=1)
    order = np.lexsort((at, index[i]))
    i, j = i[order], j[order]
    shape = np.ones_like(found.shape)
    shape[:, 0] = stop - start
    return Locals(
        found.tensor,
        found.rank,
        found.copy,
        np.ones_like(found.ndim),
        shape,
        _pointers(index[i], len(found)),
        (found.offsets[j] + begin[order] - inside[j]),
        extent[order],
        at[order],
        strides[order],
    )


def _pointers(owner: Ints, count: int) -> Ints:
    return np.concatenate([[0], np.cumsum(np.bincount(owner, minlength=count))]).astype(np.int64)
