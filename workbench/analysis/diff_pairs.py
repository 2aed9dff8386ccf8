"""Which tensor of one checkpoint belongs to which of another.

::

    same key                          'layers.0.wq'  ─  'layers.0.wq'
    same parameter and role           'optimizer.state.layers.0.wq.exp_avg'  ─  'optim.layers.0.wq.exp_avg'
    name map (cut, fused, stacked)    q, k, v  ─  'linear_qkv': a is seen under the names and cuts of b
    same content, once on each side   'head'  ─  'lm_head': renamed, recognised by its fingerprint, never guessed

Each step takes only what the ones before left over.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from workbench.checkpoint import Checkpoint
from workbench.core.fingerprint import tensor_fingerprints
from workbench.core.scan import Tick
from workbench.errors import WorkbenchError
from workbench.namemap import NameMap, name_map

__all__ = ["KEY", "MAP", "MEANING", "RENAMED", "Alignment", "Pair", "align", "renamed"]

ENOUGH = 16  #: elements from which equal content says something: step counters are all alike
KEY, MEANING, MAP, RENAMED = "key", "fqn and role", "name map", "fingerprint"


@dataclass(frozen=True)
class Pair:
    """Two tensors to compare.

    Attributes:
        a: the checkpoint that holds the first one: ``a`` itself, or ``a`` under the names of ``b``.
        tensor_a, tensor_b: positions.
        keys_a: stored names of ``a``: several where a name map puts them together.
        key_b: stored name of ``b``.
        by: ``key``, ``fqn and role``, ``name map``, ``fingerprint``.
    """

    a: Checkpoint
    tensor_a: int
    tensor_b: int
    keys_a: tuple[str, ...]
    key_b: str
    by: str = KEY

    @property
    def key_a(self) -> str:
        """One name for the first side, for people."""
        return " + ".join(self.keys_a)


@dataclass
class Alignment:
    """Pairs in the order of ``b``, and what is left over: key → why, where there is more to say."""

    pairs: list[Pair]
    only_a: dict[str, str] = field(default_factory=dict)
    only_b: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def align(a: Checkpoint, b: Checkpoint, names: NameMap | None = None) -> Alignment:
    """Pair the tensors of two checkpoints; a name map is made where keys and meanings do not match, unless given."""
    if names is not None:
        return _ordered(_mapped(names, set(range(len(b)))))
    taken_a: set[int] = set()
    pairs: list[Pair] = []
    for u, key in enumerate(b.catalog.keys):
        t = a.catalog.index.get(key)
        if t is not None:
            pairs.append(Pair(a, t, u, (key,), key))
            taken_a.add(t)
    left_b = set(range(len(b))) - {pair.tensor_b for pair in pairs}
    left_a = set(range(len(a))) - taken_a
    if left_a and left_b:
        found = list(_by_meaning(a, b, left_a, left_b))
        pairs += found
        left_a -= {pair.tensor_a for pair in found}
        left_b -= {pair.tensor_b for pair in found}
    result = Alignment(pairs)
    if left_a and left_b:
        keys, rest = a.catalog.keys, b.catalog.keys
        try:
            result = _mapped(name_map(a, b), left_b)  # of the whole: what matched may be a part too
        except WorkbenchError as error:
            result = Alignment([], notes=[f"no name map could be made: {error}"])
        result = Alignment(pairs + result.pairs, result.only_a, result.only_b, result.notes)
        used = {part for pair in result.pairs if pair.by == MAP for part in pair.keys_a}
        left_a = {t for t in left_a if keys[t] not in used}
        left_b -= {pair.tensor_b for pair in result.pairs}
        result.only_a = {keys[t]: result.only_a.get(keys[t], "") for t in sorted(left_a)}
        result.only_b = {rest[u]: result.only_b.get(rest[u], "") for u in sorted(left_b)}
    else:
        result.only_a = {a.catalog.keys[t]: "" for t in sorted(left_a)}
        result.only_b = {b.catalog.keys[u]: "" for u in sorted(left_b)}
    return _ordered(result)


def renamed(
    a: Checkpoint, b: Checkpoint, only_a: Iterable[str], only_b: Iterable[str], *, threads: int | None = None,
    tick: Tick | None = None,
) -> tuple[list[Pair], list[str]]:  # fmt: skip
    """Tensors of one content that stand under other names, and sentences on those that cannot be told apart.

    Only tensors whose type and shape is left over on both sides are read.
    """
    sides: list[list[int]] = []
    kinds = []
    for ckpt, keys in ((a, only_a), (b, only_b)):
        tensors = [t for t in (ckpt.catalog.index[key] for key in keys) if ckpt.catalog.numel[t] >= ENOUGH]
        sides.append(tensors)
        kinds.append({(ckpt.catalog.dtype_of(t).name, ckpt.catalog.shape_of(t)) for t in tensors})
    both = kinds[0] & kinds[1]
    prints: list[dict[str, list[int]]] = []
    for number, (ckpt, tensors) in enumerate(zip((a, b), sides, strict=True)):
        wanted = [t for t in tensors if (ckpt.catalog.dtype_of(t).name, ckpt.catalog.shape_of(t)) in both]
        found: dict[str, list[int]] = defaultdict(list)
        told = None if tick is None else _half(tick, number)
        if wanted:
            passed = tensor_fingerprints(
                ckpt.payloads, tensors=np.array(wanted), threads=threads, tick=told, on_error=lambda *_: None
            )
            for tensor, one in passed:
                found[one.hex].append(tensor)
        prints.append(found)
    pairs, notes = [], []
    for digest in prints[0].keys() & prints[1].keys():
        first, second = prints[0][digest], prints[1][digest]
        names = [a.catalog.keys[t] for t in first], [b.catalog.keys[u] for u in second]
        if len(first) == len(second) == 1:
            pairs.append(Pair(a, first[0], second[0], (names[0][0],), names[1][0], RENAMED))
        else:
            notes.append(
                f"{len(first)} tensors only in a ({_some(names[0])}) and {len(second)} only in b ({_some(names[1])}) "
                "have one content: which was renamed to which cannot be told"
            )
    return sorted(pairs, key=lambda pair: pair.tensor_b), sorted(notes)


def _by_meaning(a: Checkpoint, b: Checkpoint, left_a: set[int], left_b: set[int]) -> Iterable[Pair]:
    """One tensor on each side of a parameter and role, of one shape."""
    sides = []
    for ckpt, left in ((a, left_a), (b, left_b)):
        found: dict[tuple[str, str], list[int]] = defaultdict(list)
        for tensor in left:
            fqn = ckpt.fqns[tensor]
            if fqn is not None:
                found[fqn, ckpt.roles[tensor]].append(tensor)
        sides.append(found)
    for meaning in sides[1]:
        first, second = sides[0].get(meaning, []), sides[1][meaning]
        if len(first) == len(second) == 1 and a.catalog.shape_of(first[0]) == b.catalog.shape_of(second[0]):
            t, u = first[0], second[0]
            yield Pair(a, t, u, (a.catalog.keys[t],), b.catalog.keys[u], MEANING)


def _mapped(names: NameMap, left_b: set[int]) -> Alignment:
    seen = names.apply()
    keys = names.a.catalog.keys
    pairs = []
    for position, target in enumerate(names.targets):
        u = names.b.catalog.index[target.key]
        if u in left_b:
            parts = tuple(dict.fromkeys(keys[piece.tensor] for piece in target.pieces))
            pairs.append(Pair(seen, position, u, parts, target.key, MAP))
    return Alignment(pairs, dict(names.only_a), dict(names.only_b))


def _ordered(found: Alignment) -> Alignment:
    found.pairs.sort(key=lambda pair: pair.tensor_b)
    return found


def _half(tick: Tick, number: int) -> Tick:
    return lambda share: tick((number + share) / 2)


def _some(names: list[str]) -> str:
    return ", ".join(map(repr, names[:3])) + (f", … {len(names) - 3} more" if len(names) > 3 else "")
