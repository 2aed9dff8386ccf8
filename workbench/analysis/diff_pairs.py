"""Pair the tensors of two checkpoints.

::

    same key                          'layers.0.wq'  ─  'layers.0.wq'
    same parameter and role           'optimizer.state.layers.0.wq.exp_avg'  ─  'optim.layers.0.wq.exp_avg'
    name map (cut, fused, stacked)    q, k, v  ─  'linear_qkv': a with the names and cuts of b
    same content, once on each side   'head'  ─  'lm_head': renamed, identified by its fingerprint, never guessed

Each step considers only tensors that the previous steps left over.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from workbench.analysis.name_map import NameMap, name_map
from workbench.checkpoint import Checkpoint
from workbench.core.fingerprint import tensor_fingerprints
from workbench.core.scan import Progress
from workbench.core.words import plural, some_of
from workbench.errors import WorkbenchError

ENOUGH = 16  #: minimum elements for equal content to be significant: all step counters are equal
KEY, MEANING, MAP, RENAMED = "key", "fqn and role", "name map", "fingerprint"


@dataclass(frozen=True)
class TensorPair:
    """Two tensors to compare.

    Attributes:
        a: the checkpoint of the first tensor: ``a`` itself, or ``a`` with the names of ``b``.
        tensor_a, tensor_b: positions.
        keys_a: stored names in ``a``; several if a name map joins them.
        key_b: stored name in ``b``.
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
        """The name of the first side, for display."""
        return " + ".join(self.keys_a)


@dataclass
class Alignment:
    """Pairs in the order of ``b``, and unpaired keys → the reason, if known."""

    pairs: list[TensorPair]
    only_a: dict[str, str] = field(default_factory=dict)
    only_b: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def align(a: Checkpoint, b: Checkpoint, names: NameMap | None = None) -> Alignment:
    """Pair the tensors of two checkpoints; a name map is computed if keys and fqns do not match, unless given."""
    if names is not None:
        return _ordered(_mapped(names, set(range(len(b)))))
    taken_a: set[int] = set()
    pairs: list[TensorPair] = []
    for u, key in enumerate(b.catalog.keys):
        t = a.catalog.index.get(key)
        if t is not None:
            pairs.append(TensorPair(a, t, u, (key,), key))
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
            result = _mapped(name_map(a, b), left_b)  # of all tensors: matched ones may also be parts of others
        except WorkbenchError as error:
            result = Alignment([], notes=[f"no name map could be computed: {error}"])
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
    a: Checkpoint,
    b: Checkpoint,
    only_a: Iterable[str],
    only_b: Iterable[str],
    *,
    threads: int | None = None,
    progress: Progress | None = None,
) -> tuple[list[TensorPair], list[str]]:
    """Return tensors with equal content under different names, and sentences on ambiguous ones.

    Only tensors whose dtype and shape remain on both sides are read.
    """
    sides: list[list[int]] = []
    kinds = []
    for ckpt, keys in ((a, only_a), (b, only_b)):
        tensors = [t for t in (ckpt.catalog.index[key] for key in keys) if ckpt.catalog.numel[t] >= ENOUGH]
        sides.append(tensors)
        kinds.append({(ckpt.catalog.dtype_of(t).name, ckpt.catalog.shape_of(t)) for t in tensors})
    both = kinds[0] & kinds[1]
    by_fingerprint: list[dict[str, list[int]]] = []
    for number, (ckpt, tensors) in enumerate(zip((a, b), sides, strict=True)):
        wanted = [t for t in tensors if (ckpt.catalog.dtype_of(t).name, ckpt.catalog.shape_of(t)) in both]
        found: dict[str, list[int]] = defaultdict(list)
        half = None if progress is None else _half(progress, number)
        if wanted:
            passed = tensor_fingerprints(
                ckpt.payloads, tensors=np.array(wanted), threads=threads, progress=half, on_error=lambda *_: None
            )
            for tensor, one in passed:
                found[one.hex].append(tensor)
        by_fingerprint.append(found)
    pairs, notes = [], []
    for digest in by_fingerprint[0].keys() & by_fingerprint[1].keys():
        first, second = by_fingerprint[0][digest], by_fingerprint[1][digest]
        names = [a.catalog.keys[t] for t in first], [b.catalog.keys[u] for u in second]
        if len(first) == len(second) == 1:
            pairs.append(TensorPair(a, first[0], second[0], (names[0][0],), names[1][0], RENAMED))
        else:
            notes.append(
                f"{plural(len(first), 'tensor')} only in a ({some_of(names[0], 3)}) and {len(second)} only in b "
                f"({some_of(names[1], 3)}) have the same content: it is ambiguous which was renamed to which"
            )
    return sorted(pairs, key=lambda pair: pair.tensor_b), sorted(notes)


def _by_meaning(a: Checkpoint, b: Checkpoint, left_a: set[int], left_b: set[int]) -> Iterable[TensorPair]:
    """Pair tensors of the same parameter, role and shape if there is one on each side."""
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
            yield TensorPair(a, t, u, (a.catalog.keys[t],), b.catalog.keys[u], MEANING)


def _mapped(names: NameMap, left_b: set[int]) -> Alignment:
    seen = names.apply()
    keys = names.a.catalog.keys
    pairs = []
    for position, target in enumerate(names.targets):
        u = names.b.catalog.index[target.key]
        if u in left_b:
            parts = tuple(dict.fromkeys(keys[piece.tensor] for piece in target.pieces))
            pairs.append(TensorPair(seen, position, u, parts, target.key, MAP))
    return Alignment(pairs, dict(names.only_a), dict(names.only_b))


def _ordered(found: Alignment) -> Alignment:
    found.pairs.sort(key=lambda pair: pair.tensor_b)
    return found


def _half(progress: Progress, number: int) -> Progress:
    return lambda share: progress((number + share) / 2)
