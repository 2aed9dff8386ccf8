"""One sharding pattern on one mesh: the axes that cut it, and the roles of the other axes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np

from workbench.analysis.layout.fit import Fit, ShardingPattern, fits, product_of
from workbench.analysis.layout.placed import PARTLY, PROVEN, UNKNOWN, InferredMesh, Placed
from workbench.analysis.layout.runs import Run, joined
from workbench.core.arrays import Ints

STAGES = ("pp", "ep")  #: axes whose coordinates store different tensors rather than copies


def place(
    pattern: ShardingPattern,
    mesh: InferredMesh,
    places: Ints,
    allowed: Sequence[int],
    known: str,
    *,
    parts: bool = False,
) -> Placed:
    """Find the placement of a sharding pattern that tiles its tensor.

    Args:
        pattern: the boxes.
        mesh: the axes.
        places: ``(len(pattern.holders), axes)`` coordinates.
        allowed: axes that may cut.
        known: the holders as text: ``ranks 0–3``.
        parts: whether a holder may have stored only a part of its local tensor.
    """
    cut, pieces, copies = divided(pattern)
    facts: dict[str, Any] = {"cut": cut, "pieces": pieces, "copies": copies}
    whole = pieces == 1
    found = [] if whole else fits(pattern, mesh.shape, places, allowed, parts=parts)
    if len(found) > 1:
        names = " or ".join("·".join(mesh.axes[axis] for axis in fit.axes) for fit in found)
        why = f"{cut}; the holders, {known}, do not determine the axis: {names}"
        return Placed("grid", UNKNOWN, why, **facts)
    fit = found[0] if found else Fit((), ())
    flat = None if whole else _flat(pattern, fit, mesh, places)
    if not (whole or found or parts) and flat is None:  # ranges of the rest after other axes
        for one in fits(pattern, mesh.shape, places, allowed, parts=True):
            if (flat := _flat(pattern, one, mesh, places)) is not None:
                fit, found = one, [one]
                break
    left = [axis for axis in range(len(mesh.axes)) if axis not in fit.axes and mesh.shape[axis] > 1]
    if not whole and not found and flat is None:
        return Placed("irregular", UNKNOWN, f"{cut}; no placement along {mesh} gives them to {known}", **facts)
    others = {} if flat == -1 else {axis: _other(pattern, mesh, places, axis) for axis in left if axis != flat}
    if flat is not None:
        others = {axis: text for axis, text in others.items() if text != "Replicate()" or copies[0] > 1}
    kind = "whole" if whole else "flat" if flat is not None else "grid"
    status, why = _verdict(whole, others, mesh, known, len(pattern.holders))
    return Placed(kind, status, why, mesh, fit.cuts, flat, others, **facts)


def divided(pattern: ShardingPattern) -> tuple[str, int, tuple[int, int]]:
    """Return how a tensor is divided, the number of boxes, and the minimum and maximum number of copies."""
    boxes: dict[tuple[Run, ...], int] = {}
    for mine in pattern.boxes:
        for box in mine:
            boxes[box] = boxes.get(box, 0) + 1
    copies = (min(boxes.values(), default=0), max(boxes.values(), default=0))
    if len(boxes) <= 1:
        return "one piece", len(boxes), copies
    counts = [len({box[dim] for box in boxes}) for dim in range(len(pattern.shape))]
    if prod(counts) != len(boxes):
        return f"{len(boxes):,} boxes", len(boxes), copies
    dims = [dim for dim, count in enumerate(counts) if count > 1]
    sizes = " × ".join(f"{counts[dim]:,}" for dim in dims)
    noun = "axis" if len(dims) == 1 else "axes"
    return f"{sizes} pieces along {noun} {', '.join(map(str, dims))}", len(boxes), copies


def _verdict(whole: bool, others: dict[int, str], mesh: InferredMesh, known: str, holders: int) -> tuple[str, str]:
    unknown = [mesh.axes[axis] for axis, text in others.items() if text == "?"]
    if not unknown:
        return PROVEN, f"gives {known} exactly the boxes that they store"
    if whole and holders == 1:
        return UNKNOWN, f"stored once, by {known}: replicated but saved once, or held only there"
    if whole and all(text == "?" for text in others.values()):
        return UNKNOWN, f"stored by {known}, not by the others of {mesh}: what these hold is unknown"
    return PARTLY, f"gives {known} the boxes that they store; what others along {', '.join(unknown)} hold is unknown"


def _other(pattern: ShardingPattern, mesh: InferredMesh, places: Ints, axis: int) -> str:
    """Return ``Replicate()`` if all coordinates of an axis store the same, ``Only(…)`` for a stage, else ``?``."""
    at = places[:, axis]
    if (at < 0).any():
        return "?"
    used = sorted(set(at.tolist()))
    if mesh.axes[axis] in STAGES and len(used) < mesh.shape[axis]:
        return f"Only({', '.join(map(str, used))})"
    rest = np.delete(places, axis, axis=1)
    groups: dict[tuple[int, ...], list[int]] = {}
    for row, key in enumerate(map(tuple, rest.tolist())):
        groups.setdefault(key, []).append(row)
    for rows in groups.values():
        alike = {pattern.boxes[row] for row in rows}
        if len(alike) > 1 or len({int(at[row]) for row in rows}) < mesh.shape[axis]:
            return "?"
    return "Replicate()"


def _flat(pattern: ShardingPattern, fit: Fit, mesh: InferredMesh, places: Ints) -> int | None:
    """Return the axis along which the holders of a local tensor have consecutive ranges; -1: all holders, no axis."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for row, at in enumerate(map(tuple, places[:, list(fit.axes)].tolist())):
        groups.setdefault(at, []).append(row)
    if all(len(rows) == 1 for rows in groups.values()):
        return None
    for rows in groups.values():
        if not _in_order([pattern.boxes[row] for row in rows]):
            return None
    left = [axis for axis in range(len(mesh.axes)) if axis not in fit.axes]
    varying = [axis for axis in left if len(set(places[:, axis].tolist())) > 1]
    if len(varying) == 1 and all((np.diff(places[rows, varying[0]]) > 0).all() for rows in groups.values()):
        return varying[0]
    return -1 if not fit.cuts else None


def _in_order(parts: Sequence[frozenset[tuple[Run, ...]]]) -> bool:
    """Return whether each holder's boxes are one range of their common local tensor, one after the other."""
    every = [box for boxes in parts for box in boxes]
    if len(set(every)) != len(every):
        return False
    local = _local(every)
    if local is None:
        return False
    axes, shape = local
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    end = 0
    for boxes in parts:
        ranges = []
        for box in boxes:
            first = [axes[dim][run[0]] for dim, run in enumerate(box)]
            start = sum(at * stride for at, stride in zip(first, strides, strict=True))
            last = sum((at + run[1] - 1) * s for at, run, s in zip(first, box, strides, strict=True))
            if last + 1 - start != prod(run[1] for run in box):
                return False
            ranges.append((start, last + 1 - start))
        if not ranges:
            continue
        mine = joined(sorted(ranges))
        if len(mine) != 1 or mine[0][0] != end:
            return False
        end = sum(mine[0])
    return end == prod(shape)


def _local(boxes: Sequence[tuple[Run, ...]]) -> tuple[list[dict[int, int]], list[int]] | None:
    """Return the local tensor that these boxes tile: the start of each run along its axes, and its shape."""
    axes, shape = [], []
    for dim in range(len(boxes[0]) if boxes else 0):
        edges = sorted({edge for box in boxes for edge in (box[dim][0], sum(box[dim]))})
        covered = [
            (low, high - low)
            for low, high in pairwise(edges)
            if any(box[dim][0] <= low and sum(box[dim]) >= high for box in boxes)
        ]
        at, where = 0, {}
        for low, size in covered:
            where[low] = at
            at += size
        axes.append(where)
        shape.append(at)
    if sum(prod(run[1] for run in box) for box in boxes) != prod(shape):
        return None
    return axes, shape


def index_of(pattern: ShardingPattern) -> Ints | None:
    """Return ``(holders, dims)``: the index of each holder's piece along each axis; ``None`` if not a grid."""
    mine = [product_of(sorted(boxes)) for boxes in pattern.boxes]
    if any(box is None or (box == () and pattern.shape) for box in mine):
        return None
    found = np.zeros((len(mine), len(pattern.shape)), np.int64)
    for dim in range(len(pattern.shape)):
        runs = [box[dim] for box in mine if box is not None]
        order = {run: number for number, run in enumerate(sorted(set(runs)))}
        found[:, dim] = [order[run] for run in runs]
    return found
