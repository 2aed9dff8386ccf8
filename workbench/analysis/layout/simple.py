"""Tensors that need no fitting: ranges that start or end inside a row, and tensors in one chunk."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench.analysis.layout.classes import rows_of
from workbench.analysis.layout.holders import Holders
from workbench.analysis.layout.place import STAGES
from workbench.analysis.layout.placed import PARTLY, PROVEN, UNKNOWN, InferredMesh, Placed
from workbench.checkpoint import Checkpoint
from workbench.core.arrays import Bools, Ints
from workbench.core.catalog import Catalog
from workbench.core.words import plural, some_of
from workbench.formats import record

FLAT_STATES = ("param", "exp_avg", "exp_avg_sq", "momentum")  #: of FSDP1's flat parameters


@dataclass(frozen=True, eq=False)
class Ground:
    """Holders on a mesh: ``places`` are their ``(H, axes)`` coordinates, -1 if unknown."""

    who: Holders
    mesh: InferredMesh
    places: Ints

    @property
    def axes(self) -> list[int]:
        """Axes with more than one coordinate."""
        return [axis for axis, size in enumerate(self.mesh.shape) if size > 1]

    def stage(self, rows: Sequence[int], axis: int) -> str:
        """Return ``Only(…)`` for holders at some pipeline stages, ``?`` on other axes."""
        at = sorted(set(self.places[list(rows), axis].tolist()))
        known = at[0] >= 0 and self.mesh.axes[axis] in STAGES and len(at) < self.mesh.shape[axis]
        return f"Only({', '.join(map(str, at))})" if known else "?"


class Table:
    """Placements by tensor."""

    def __init__(self, tensors: int) -> None:
        self.of_tensor = np.full(tensors, -1, np.int64)
        self.placed: list[Placed] = []

    @property
    def open(self) -> Bools:
        """Tensors that have no placement yet."""
        found: Bools = self.of_tensor < 0
        return found

    def put(self, tensors: Any, placed: Placed) -> None:
        """Assign a placement to tensors."""
        if len(tensors):
            self.of_tensor[np.asarray(tensors)] = len(self.placed)
            self.placed.append(placed)


def put_flat(table: Table, catalog: Catalog, ground: Ground, tensors: Ints) -> None:
    """Assign placements to tensors that can only be flat: one entry per set of holders from first to last."""
    if not len(tensors):
        return
    who, mesh, places = ground.who, ground.mesh, ground.places
    rows = rows_of(catalog, tensors)
    counts = np.diff(catalog.row_ptr)[tensors]
    heads = np.cumsum(counts) - counts
    low, high = np.minimum.reduceat(who.of_chunk[rows], heads), np.maximum.reduceat(who.of_chunk[rows], heads)
    kinds, at = np.unique(np.stack([low, high, counts]), axis=1, return_inverse=True)
    for number, (first, last, count) in enumerate(kinds.T.tolist()):
        span = list(range(first, last + 1))
        varying = [axis for axis in ground.axes if len(set(places[[first, last], axis].tolist())) > 1]
        axis = varying[0] if len(varying) == 1 else -1
        others = {a: ground.stage(span, a) for a in ground.axes if a != axis} if axis >= 0 else {}
        why = f"{called(who, span)} hold consecutive ranges of the flattened tensor, cut inside a row"
        status = UNKNOWN if not mesh.axes else PARTLY if "?" in others.values() else PROVEN
        why = why if mesh.axes else f"{why}; no ranks are stored"
        cut = f"ranges in {plural(count, 'box')}"
        table.put(
            tensors[at.ravel() == number], Placed("flat", status, why, mesh, (), axis, others, cut=cut, pieces=count)
        )


def put_singles(table: Table, ckpt: Checkpoint, ground: Ground, tensors: Ints) -> None:
    """Assign placements to tensors in one chunk: one entry per holder (and kind of state, if that is informative)."""
    roles, catalog = ckpt.roles, ckpt.catalog
    buffered = flat_roles(ckpt)
    flat = np.array([one.kind == "flat" for one in table.placed], bool)
    done = np.flatnonzero(~table.open)
    ranges = {roles[t] for t in done[flat[table.of_tensor[done]]].tolist()} if len(done) else set()
    groups: dict[tuple[int, str], list[int]] = defaultdict(list)
    for tensor, holder in zip(tensors.tolist(), ground.who.of_chunk[catalog.row_ptr[tensors]].tolist(), strict=True):
        stated = roles[tensor] in buffered and (ground.places[holder] >= 0).any()
        groups[holder, "format" if stated else "beside" if roles[tensor] in ranges else ""].append(tensor)
    for (holder, kind), mine in groups.items():
        table.put(mine, _single(ground, holder, kind, ckpt.world_size))


def called(who: Holders, rows: Sequence[int]) -> str:
    """Return ``ranks 0–3``, ``rank 2``, or the names of a few holders."""
    ranks = who.rank[list(rows)].tolist()
    if all(rank >= 0 for rank in ranks):
        ordered = sorted(set(ranks))
        if len(ordered) == 1:
            return f"rank {ordered[0]}"
        if ordered[-1] - ordered[0] + 1 == len(ordered):
            return f"ranks {ordered[0]}–{ordered[-1]}"
        return f"ranks {some_of(ordered, 6)}"
    return some_of([who.label[row] for row in rows], between="; ")


def flat_roles(ckpt: Checkpoint) -> tuple[str, ...]:
    """Return roles whose tensors are all parts of flat buffers, by definition of the format or by stored facts."""
    buffers = ckpt.catalog.meta.get("flat_parameters")
    if isinstance(buffers, list) and buffers:
        inside = sum(one.get("parameters", 0) for one in buffers if isinstance(one, dict))
        return FLAT_STATES if inside == ckpt.roles.count("param") else ()
    return record(ckpt.format).flat_roles


def _single(ground: Ground, holder: int, kind: str, world: int | None) -> Placed:
    who, mesh = ground.who, ground.mesh
    label, cut = called(who, [holder]), "one piece"
    if world == 1:
        return Placed("whole", PROVEN, "the job had one rank", cut=cut)
    if not mesh.axes:
        return Placed("whole", UNKNOWN, "in one file; no ranks are stored", cut=cut)
    if kind == "format" and (mesh.axes == ("ranks",) or "dp" in mesh.axes):
        axis = mesh.axes.index("dp") if "dp" in mesh.axes else 0
        others = {a: ground.stage([holder], a) for a in ground.axes if a != axis}
        status = PARTLY if "?" in others.values() else PROVEN
        why = f"the format stores parts of flat buffers; the tensor is entirely in that of {label}"
        return Placed("flat", status, why, mesh, (), axis, others, cut=cut)
    others = {axis: ground.stage([holder], axis) for axis in ground.axes}
    if others and "?" not in others.values():
        why = f"only {label} stores it, and the files of the other stages exist"
        return Placed("whole", PROVEN, why, mesh, (), None, others, cut=cut)
    why = f"stored once, by {label}: replicated but saved once, or held only there"
    if kind == "beside":
        why = f"stored once, by {label}: a flat range like others of its role, or replicated but saved once"
    elif len(who) == 1:
        why += "; the number of ranks is not stored"
    return Placed("whole", UNKNOWN, why, mesh, (), None, others, cut=cut)
