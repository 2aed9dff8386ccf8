"""Split two checkpoints into unfused weights, so faults have the same form whatever the framework stores.

::

    linear_fc1   gate 0 │ gate 1 │ up 0 │ up 1   ──▶   gate_proj  gate 0 │ gate 1      up_proj  up 0 │ up 1
    linear_qkv   q q k v │ q q k v               ──▶   q_proj  q q q q    k_proj  k k    v_proj  v v

A tensor whose parts are unknown is not split. Nothing is read: boxes are composed in the catalog.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np

from workbench.checkpoint import Checkpoint
from workbench.core.rebox import ComposedBox, Composition, compose
from workbench.doctor.facts.evidence import Pair
from workbench.doctor.ledger.roles import quantity
from workbench.names.frameworks import Geometry, geometry, links
from workbench.tensor import LazyTensor


@dataclass(frozen=True)
class Atom:
    """A weight, or its optimizer state, on both sides.

    Attributes:
        fqn: its own name.
        owners: fqns of the stored tensors that hold it.
        tensor: position in both catalogs of the atoms.
    """

    fqn: str
    role: str
    owners: tuple[str, ...]
    tensor: int


class Atoms:
    """The tensors that both sides of a pair hold in one shape, split into atoms.

    Attributes:
        facts: heads, query groups, rows per head and vocabulary, as far as either side states them.
        rows: every atom, in the order of the second side.
        gone: atoms of tensors that only the first side holds, whose values may be elsewhere on the second.
    """

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        mine, theirs = geometry(pair.a.ckpt.objects), geometry(pair.b.ckpt.objects)
        self.facts: Geometry = theirs.filled(mine)
        self.rows: list[Atom] = []
        sides: tuple[list[Composition], list[Composition]] = ([], [])
        made: dict[tuple[str, str, str], int] = {}
        for fqn, roles in pair.shared():
            for role, (one, two) in roles.items():
                if quantity(role) is None:
                    continue
                for atom, shape, pieces in _cut(fqn, pair.b.shape(two), self.facts):
                    # all parts of a weight (grouped QKV) have one name, and therefore one target
                    at = made.setdefault((atom, role, fqn), len(self.rows))
                    if at == len(self.rows):
                        self.rows.append(Atom(atom, role, (fqn,), at))
                    for targets, tensor in zip(sides, (one, two), strict=True):
                        if at == len(targets):
                            targets.append(Composition(f"{role}:{atom}", shape, [], fqn=atom, role=role))
                        placed = [ComposedBox(tensor, *piece) for piece in pieces]
                        targets[at] = Composition(f"{role}:{atom}", shape, [*targets[at].pieces, *placed], atom, role)
        self.gone: list[Atom] = []
        for fqn, held in pair.a.params.items():
            for role, at in held.items():
                if quantity(role) is None or role in pair.b.params.get(fqn, {}) or not pair.comparable(fqn):
                    continue
                for atom, shape, pieces in _cut(fqn, pair.a.shape(at), self.facts):
                    self.gone.append(Atom(atom, role, (fqn,), len(sides[0])))
                    placed = [ComposedBox(at, *piece) for piece in pieces]
                    sides[0].append(Composition(f"{role}:{atom}", shape, placed, atom, role))
        self._sides = sides

    @cached_property
    def a(self) -> Checkpoint:
        return self.pair.a.ckpt.derive(compose(self.pair.a.ckpt.catalog, _unique(self._sides[0])))

    @cached_property
    def b(self) -> Checkpoint:
        return self.pair.b.ckpt.derive(compose(self.pair.b.ckpt.catalog, _unique(self._sides[1])))

    def tensors(self, atom: Atom) -> tuple[LazyTensor, LazyTensor]:
        """Return the atom on both sides."""
        return self.a[self.a.catalog.keys[atom.tensor]], self.b[self.b.catalog.keys[atom.tensor]]

    def before(self, atom: Atom) -> LazyTensor:
        """Return the atom on the first side."""
        return self.a[self.a.catalog.keys[atom.tensor]]

    def of(self, fqns: Collection[tuple[str, str]]) -> Iterator[Atom]:
        """Return the atoms of some stored tensors, by ``(fqn, role)``."""
        return (atom for atom in self.rows if (atom.owners[0], atom.role) in fqns)

    def part(self, atoms: Collection[Atom]) -> tuple[Checkpoint, Checkpoint]:
        """Return both sides with only these atoms."""
        wanted = np.array([atom.tensor for atom in atoms], np.int64)
        return self.a.derive(self.a.catalog.take(wanted)), self.b.derive(self.b.catalog.take(wanted))


Part = tuple[str, tuple[int, ...], list[tuple[tuple[int, ...], ...]]]


def _cut(fqn: str, shape: tuple[int, ...], facts: Geometry) -> list[Part]:
    """Return the atoms of a tensor: name, shape, and boxes ``(offsets, sizes, at, axes)``."""
    found = links(fqn, shape, facts) if shape else []
    zeros, axes = (0,) * len(shape), tuple(range(len(shape)))
    whole: list[Part] = [(fqn, shape, [(zeros, shape, zeros, axes)])]
    if isinstance(found, str) or len(found) < 2:
        return whole
    parts: dict[str, tuple[list[int], list[tuple[tuple[int, ...], ...]]]] = {}
    for link in found:
        sizes = [link.sizes[axis] for axis in link.axes]
        extent, boxes = parts.setdefault(link.atom, ([0] * len(sizes), []))
        for axis, (at, size) in enumerate(zip(link.at, sizes, strict=True)):
            extent[axis] = max(extent[axis], at + size)
        boxes.append((link.offsets, link.sizes, link.at, link.axes))
    if sum(prod(extent) for extent, _ in parts.values()) != prod(shape):
        return whole
    return [(name, tuple(extent), boxes) for name, (extent, boxes) in parts.items()]


def _unique(targets: list[Composition]) -> list[Composition]:
    """Make keys unique if two stored tensors hold an atom of the same name."""
    seen: dict[str, int] = {}
    found = []
    for target in targets:
        count = seen[target.key] = seen.get(target.key, 0) + 1
        key = target.key if count == 1 else f"{target.key} ({count})"
        found.append(Composition(key, target.shape, target.pieces, target.fqn, target.role))
    return found
