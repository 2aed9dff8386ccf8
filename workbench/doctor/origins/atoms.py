"""Two checkpoints as weights that nobody fuses further: faults have one form there, whatever the framework stores.

::

    linear_fc1   gate 0 │ gate 1 │ up 0 │ up 1   ──▶   gate_proj  gate 0 │ gate 1      up_proj  up 0 │ up 1
    linear_qkv   q q k v │ q q k v               ──▶   q_proj  q q q q    k_proj  k k    v_proj  v v

A tensor whose parts are unknown stays whole. Nothing is read: boxes are composed in the catalog.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np

from workbench.checkpoint import Checkpoint
from workbench.conventions import Geometry, geometry, links
from workbench.core.rebox import Piece, Target, compose
from workbench.doctor.facts.evidence import Pair
from workbench.doctor.ledger.roles import quantity
from workbench.tensor import LazyTensor

__all__ = ["Atom", "Atoms", "kind_of", "names_of"]

#: What a weight is, by the names of Hugging Face, Llama, GPT-2 and torchtitan.
_KINDS = tuple(
    (kind, re.compile(rf"(?:^|[._])(?:{words})(?:[._]|$)"))
    for kind, words in {
        "norm": r"\w*norm\w*|ln_[12f]|ln_f",
        "embed": r"(?<!_)emb|embed_tokens|tok_embeddings|word_embeddings|wte|embed_in",
        "head": r"lm_head|output_layer|embed_out|output",
        "q": r"q_proj|wq|query|q",
        "k": r"k_proj|wk|key|k",
        "v": r"v_proj|wv|value|v",
        "o": r"o_proj|wo|out_proj|linear_proj",
        "qkv": r"qkv|qkv_proj|linear_qkv|query_key_value|c_attn|in_proj",
        "gate_up": r"gate_up_proj|linear_fc1|gate_and_up_proj|w13",
        "gate": r"gate_proj|w1",
        "up": r"up_proj|w3",
        "down": r"down_proj|w2|linear_fc2",
        "router": r"router|gate",
    }.items()
)
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block|layer)\.(\d+)(?=\.|$)")
_EXPERT = re.compile(r"(?:^|\.)(?:experts|local_experts)\.(\d+)(?=\.|$)")


@dataclass(frozen=True)
class Atom:
    """A weight, or a state of it, on both sides.

    Attributes:
        fqn: its own name; owners: fqns of the stored tensors that hold it.
        tensor: position in both catalogs of the atoms.
    """

    fqn: str
    role: str
    owners: tuple[str, ...]
    tensor: int


def kind_of(fqn: str) -> str:
    """``q k v o gate up down norm router embed head``, ``qkv gate_up`` (fused), or ``""``."""
    leaf = fqn.removesuffix(".weight").removesuffix(".bias")
    last = leaf.rpartition(".")[2]
    return next((kind for kind, pattern in _KINDS if pattern.search(last)), "") or next(
        (kind for kind, pattern in _KINDS if pattern.search(leaf)), ""
    )


def names_of(fqn: str) -> tuple[str, int | None, int | None]:
    """The name without its numbers, the layer, the expert."""
    layer, expert = _LAYER.search(fqn), _EXPERT.search(fqn)
    bare = _EXPERT.sub(".experts.*", _LAYER.sub(".layers.*", fqn))
    return bare, None if layer is None else int(layer[1]), None if expert is None else int(expert[1])


class Atoms:
    """What both sides of a pair hold in one shape, cut into atoms.

    Attributes:
        facts: heads, query groups, rows a head, vocabulary, as far as either side says.
        rows: every atom, in the order of the second side.
    """

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        mine, theirs = geometry(pair.a.ckpt.objects), geometry(pair.b.ckpt.objects)
        self.facts: Geometry = theirs.filled(mine)
        self.rows: list[Atom] = []
        sides: tuple[list[Target], list[Target]] = ([], [])
        made: dict[tuple[str, str, str], int] = {}
        for fqn, roles in pair.shared():
            for role, (one, two) in roles.items():
                if quantity(role) is None:
                    continue
                for atom, shape, pieces in _cut(fqn, pair.b.shape(two), self.facts):
                    # a part of a weight that another tensor has more of (grouped QKV) has one name, and so one target
                    at = made.setdefault((atom, role, fqn), len(self.rows))
                    if at == len(self.rows):
                        self.rows.append(Atom(atom, role, (fqn,), at))
                    for targets, tensor in zip(sides, (one, two), strict=True):
                        if at == len(targets):
                            targets.append(Target(f"{role}:{atom}", shape, [], fqn=atom, role=role))
                        placed = [Piece(tensor, *piece) for piece in pieces]
                        targets[at] = Target(f"{role}:{atom}", shape, [*targets[at].pieces, *placed], atom, role)
        self._sides = sides

    @cached_property
    def a(self) -> Checkpoint:
        return self.pair.a.ckpt.derive(compose(self.pair.a.ckpt.catalog, _unique(self._sides[0])))

    @cached_property
    def b(self) -> Checkpoint:
        return self.pair.b.ckpt.derive(compose(self.pair.b.ckpt.catalog, _unique(self._sides[1])))

    def tensors(self, atom: Atom) -> tuple[LazyTensor, LazyTensor]:
        """The atom on both sides."""
        return self.a[self.a.catalog.keys[atom.tensor]], self.b[self.b.catalog.keys[atom.tensor]]

    def before(self, atom: Atom) -> LazyTensor:
        """The atom on the first side."""
        return self.a[self.a.catalog.keys[atom.tensor]]

    def of(self, fqns: Collection[tuple[str, str]]) -> Iterator[Atom]:
        """Atoms of some stored tensors, by ``(fqn, role)``."""
        return (atom for atom in self.rows if (atom.owners[0], atom.role) in fqns)

    def part(self, atoms: Collection[Atom]) -> tuple[Checkpoint, Checkpoint]:
        """Both sides with these atoms alone."""
        wanted = np.array([atom.tensor for atom in atoms], np.int64)
        return self.a.derive(self.a.catalog.take(wanted)), self.b.derive(self.b.catalog.take(wanted))


Part = tuple[str, tuple[int, ...], list[tuple[tuple[int, ...], ...]]]


def _cut(fqn: str, shape: tuple[int, ...], facts: Geometry) -> list[Part]:
    """Atoms of a tensor: name, shape, and boxes ``(offsets, sizes, at, axes)``."""
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


def _unique(targets: list[Target]) -> list[Target]:
    """Keys are made different where two stored tensors hold an atom of one name."""
    seen: dict[str, int] = {}
    found = []
    for target in targets:
        count = seen[target.key] = seen.get(target.key, 0) + 1
        key = target.key if count == 1 else f"{target.key} ({count})"
        found.append(Target(key, target.shape, target.pieces, target.fqn, target.role))
    return found
