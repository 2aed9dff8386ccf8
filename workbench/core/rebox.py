"""Tensors made of other tensors' boxes: slices, stacks and concatenations as arithmetic, no byte moved.

::

    source  linear_qkv (24, 64)            target  q (16, 64)       pieces: rows 0:8  → 0
            ┌──────┐ 0                             ┌──────┐                 rows 12:20 → 8
            │ q q  │ 8   group 0                   │ q q  │
            │ k v  │ 12                            ├──────┤
            │ q q  │ 20  group 1                   │ q q  │
            │ k v  │ 24                            └──────┘

Each piece is joined with the chunks of its source; each intersection becomes a chunk of the target that points into the
same stored item, by ``inner`` and ``strides``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from workbench.core import box, codecs
from workbench.core.arrays import Array
from workbench.core.box import row_major
from workbench.core.catalog import Catalog, ObjectTable
from workbench.core.dtypes import ITEMSIZE


@dataclass(frozen=True, slots=True)
class ComposedBox:
    """A box of a source tensor and its destination.

    Attributes:
        tensor: position of the source in its catalog.
        offsets, sizes: the box, in the source's axes.
        at: first element in the target, in the target's axes.
        axes: for each axis of the target the source's axis, or ``None`` for a new one of size 1. Axes of the source
            that are not named must have size 1 in the box.
        steps: for each axis of the source, 1 for every element from the first on, 2 for every other …; ``sizes``
            counts the elements taken. Empty if all are 1.
    """

    tensor: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    at: tuple[int, ...]
    axes: tuple[int | None, ...]
    steps: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Composition:
    """A tensor to compose: its key, shape and pieces; its dtype is that of the sources."""

    key: str
    shape: tuple[int, ...]
    pieces: Sequence[ComposedBox]
    fqn: str | None = None
    role: str = "param"


def compose(catalog: Catalog, targets: Sequence[Composition]) -> Catalog:
    """Return a catalog of the targets, in the same files as ``catalog``.

    Elements that no piece covers are holes, detected on reading. Replicas of the sources remain replicas.
    """
    pieces = [(t, piece) for t, target in enumerate(targets) for piece in target.pieces]
    dims = max([1, catalog.shape.shape[1], *(len(target.shape) for target in targets)])
    owner = np.array([t for t, _ in pieces], np.int64)
    tensor = np.array([piece.tensor for _, piece in pieces], np.int64)
    offsets = _pad([piece.offsets for _, piece in pieces], catalog.shape.shape[1], 0)
    sizes = _pad([piece.sizes for _, piece in pieces], catalog.shape.shape[1], 1)
    at = _pad([piece.at for _, piece in pieces], dims, 0)
    axes = _pad([tuple(-1 if a is None else a for a in piece.axes) for _, piece in pieces], dims, -1)
    every = _pad([piece.steps for _, piece in pieces], catalog.shape.shape[1], 1)

    span = np.where(sizes > 0, (sizes - 1) * every + 1, 0)
    which, row = box.group_join(tensor, offsets, span, catalog.tensor, catalog.offsets, catalog.sizes)
    first, extent = _taken(catalog.offsets[row] - offsets[which], catalog.sizes[row], sizes[which], every[which])
    hit = (extent > 0).all(axis=1)  # a step can pass a narrow chunk over
    which, row, first, extent = which[hit], row[hit], first[hit], extent[hit]
    low = offsets[which] + first * every[which]
    steps = row_major(catalog.sizes[row]) if catalog.strides is None else catalog.strides[row]
    itemsize = ITEMSIZE[catalog.dtype[catalog.tensor[row]]]
    inner = ((low - catalog.offsets[row]) * steps).sum(axis=1) * itemsize
    inner += 0 if catalog.inner is None else catalog.inner[row]
    # the target's axes picked from the source's; -1 (a new axis) reads the extra column
    picked = axes[which]
    within = _pick(first, picked, 0)
    new_sizes, new_steps = _pick(extent, picked, 1), _pick(steps * every[which], picked, 0)
    new_offsets = at[which] + within
    target = owner[which]

    order = np.lexsort([catalog.replica[row], *new_sizes.T[::-1], *new_offsets.T[::-1], target])
    row, target = row[order], target[order]
    dtypes = np.zeros(len(targets), np.uint8)
    if len(pieces):
        dtypes[owner] = catalog.dtype[tensor]
    return replace(
        catalog,
        keys=[t.key for t in targets],
        dtype=dtypes,
        ndim=np.array([len(t.shape) for t in targets], np.uint8),
        shape=_pad([t.shape for t in targets], dims, 1),
        row_ptr=np.searchsorted(target, np.arange(len(targets) + 1)).astype(np.int64),
        offsets=new_offsets[order],
        sizes=new_sizes[order],
        strides=new_steps[order],
        inner=inner[order],
        codec=codecs.PART[catalog.codec[row]],
        fqns=[t.fqn for t in targets],
        roles=[t.role for t in targets],
        objects=ObjectTable(),
        views=None,
        **{name: getattr(catalog, name)[row] for name in ("file", "start", "stop", "rank", "replica")},
    )


def _taken(begin: Array, length: Array, count: Array, every: Array) -> tuple[Array, Array]:
    """Return which of the elements ``0, every, 2·every …`` (``count`` of them) are in ``[begin, begin + length)``: the
    number of the first one, and how many there are.
    """
    first = np.maximum(-(-begin // every), 0)
    return first, np.minimum(-(-(begin + length) // every), count) - first


def _pad(rows: Sequence[Sequence[int]], dims: int, fill: int) -> Array:
    padded = [(*row, *([fill] * (dims - len(row)))) for row in rows]
    return np.array(padded, np.int64).reshape(len(padded), dims)


def _pick(columns: Array, axes: Array, fill: int) -> Array:
    """Return columns in the order of ``axes`` ``(N, D)``; -1 takes ``fill``."""
    wide = np.concatenate([columns, np.full((len(columns), 1), fill, np.int64)], axis=1)
    return np.take_along_axis(wide, np.where(axes < 0, columns.shape[1], axes), axis=1)
