"""The facts that the reprs show about a checkpoint, from the columns of its catalog; no file is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from workbench.checkpoint import Checkpoint
from workbench.core.arrays import Array
from workbench.core.catalog import Catalog
from workbench.core.codecs import OPAQUE
from workbench.core.dtypes import ALL
from workbench.core.words import Ordinary, plural
from workbench.views import units
from workbench.views.names import safe, shorten
from workbench.views.tree import Node, build


@dataclass(frozen=True, slots=True)
class Share:
    """A part of a checkpoint: tensors and bytes under one label."""

    label: str
    tensors: int
    nbytes: int


def heading(ckpt: Checkpoint) -> list[tuple[str, str]]:
    """Return name and value of the lines that every checkpoint has, safe to print."""
    catalog = ckpt.catalog
    size = int(catalog.tensor_nbytes.sum())
    lines = [
        ("step", "not stored" if ckpt.step is None else f"{ckpt.step:,}"),
        ("world size", _world(ckpt)),
        ("parameters", _parameters(ckpt)),
        ("tensors", f"{len(catalog):,} in {plural(catalog.chunks, 'chunk')}, {units.nbytes(size)}"),
        ("files", _files(catalog)),
    ]
    if ckpt._parent is not None:
        lines.insert(0, ("selection", f"{len(ckpt):,} of {len(_root(ckpt)):,} tensors"))
    if len(ckpt.objects):
        lines.append(("objects", f"{len(ckpt.objects):,}: {_listed(list(ckpt.objects))}"))
    return lines


def by_role(ckpt: Checkpoint) -> list[Share]:
    """Return the bytes by role, largest first."""
    return _shares(ckpt.roles, ckpt.catalog.tensor_nbytes)


def by_dtype(ckpt: Checkpoint) -> list[Share]:
    """Return the bytes by dtype, largest first."""
    return _shares([units.dtype(ALL[code].name) for code in ckpt.catalog.dtype.tolist()], ckpt.catalog.tensor_nbytes)


def by_rank(ckpt: Checkpoint) -> list[Share]:
    """Return the bytes by the rank that wrote them, largest first; empty if one rank wrote them or none is known."""
    catalog = ckpt.catalog
    known = catalog.rank >= 0
    if not known.any() or (catalog.rank == catalog.rank[0]).all():
        return []
    ranks, where = np.unique(catalog.rank[known], return_inverse=True)
    nbytes = np.bincount(where, catalog.chunk_nbytes[known])
    chunks = np.bincount(where)
    order = np.argsort(-nbytes, kind="stable")
    return [Share(f"rank {ranks[at]}", int(chunks[at]), int(nbytes[at])) for at in order.tolist()]


def nodes(catalog: Catalog) -> tuple[Node, ...]:
    """Return the catalog's names as a tree of modules."""
    shapes = [tuple(row[:n]) for row, n in zip(catalog.shape.tolist(), catalog.ndim.tolist(), strict=True)]
    dtypes = [ALL[code].name for code in catalog.dtype.tolist()]
    return build(catalog.keys, shapes, dtypes, catalog.tensor_nbytes.tolist())


def oddities(ckpt: Checkpoint) -> list[str]:
    """Return sentences about what an ordinary checkpoint does not have, safe to print.

    Those that are nothing to worry about are :class:`~workbench.core.words.Ordinary`.
    """
    catalog = ckpt.catalog
    found: list[str] = [Ordinary(safe(note)) if isinstance(note, Ordinary) else safe(note) for note in ckpt.notes]
    unnamed = [key for key, fqn, role in zip(catalog.keys, ckpt.fqns, ckpt.roles, strict=True) if _unknown(fqn, role)]
    if unnamed:
        found.append(f"{plural(len(unnamed), 'tensor')} of an unnamed parameter: {_listed(unnamed)}")
    copies = int(catalog.replica.max(initial=0)) + 1
    if copies > 1:
        twice = len(np.unique(catalog.tensor[catalog.replica > 0]))
        found.append(Ordinary(f"{plural(twice, 'tensor')} stored up to {copies} times (replicas of several ranks)"))
    lacking = _lacking(catalog)
    if len(lacking):
        names = _listed([catalog.keys[t] for t in lacking.tolist()])
        found.append(f"{plural(len(lacking), 'tensor')} with elements that are stored in no chunk: {names}")
    sealed = np.unique(catalog.tensor[catalog.codec == OPAQUE])
    if len(sealed):
        names = _listed([catalog.keys[t] for t in sealed.tolist()])
        found.append(f"{plural(len(sealed), 'tensor')} encoded with an unknown transform, unreadable: {names}")
    gone = [name for name, stat in zip(catalog.files, catalog.file_stats, strict=True) if stat.size < 0]
    if gone:
        found.append(f"{plural(len(gone), 'file')} missing: {_listed(gone)}")
    return found


def describe(shares: Sequence[Share], most: int = 5) -> str:
    """Return ``param 4.1 GiB · exp_avg 4.1 GiB · …``."""
    parts = [f"{share.label} {units.nbytes(share.nbytes)}" for share in shares[:most]]
    rest = shares[most:]
    if rest:
        parts.append(f"{len(rest)} more {units.nbytes(sum(share.nbytes for share in rest))}")
    return " · ".join(parts) or "–"


def _root(ckpt: Checkpoint) -> Checkpoint:
    while ckpt._parent is not None:
        ckpt = ckpt._parent
    return ckpt


def _unknown(fqn: str | None, role: str) -> bool:
    return fqn is None and role in _OF_PARAMETERS()


@cache
def _OF_PARAMETERS() -> frozenset[str]:
    from workbench.names.roles import STATES

    return frozenset(STATES.values()) | {"master"}


def _world(ckpt: Checkpoint) -> str:
    ranks = np.unique(ckpt.catalog.rank)
    ranks = ranks[ranks >= 0].tolist()
    if ckpt.world_size is not None:
        return f"{ckpt.world_size:,}"
    if not ranks:
        return "not stored"
    noun = "rank" if len(ranks) == 1 else "ranks"
    return f"not stored; written by {noun} {units.ranges(ranks).replace('-', '–')}"


def _parameters(ckpt: Checkpoint) -> str:
    mine = np.array([role == "param" for role in ckpt.roles], bool)
    total = int(ckpt.catalog.numel[mine].sum())
    if not mine.any():
        return "none"
    short = units.count(total)
    exact = f" ({total:,})" if short != f"{total:,}" else ""
    return f"{short}{exact} in {plural(int(mine.sum()), 'tensor')}"


def _files(catalog: Catalog) -> str:
    if not catalog.files:
        return "none"
    size = sum(max(stat.size, 0) for stat in catalog.file_stats)
    return f"{len(catalog.files):,}, {units.nbytes(size)}: {_listed(catalog.files)}"


def _listed(names: Sequence[str], room: int = 60) -> str:
    """Return as many names as fit, then the number of the others."""
    shown: list[str] = []
    for name in names:
        text = shorten(safe(name), 48)
        if shown and sum(map(len, shown)) + len(text) + 2 * len(shown) > room:
            break
        shown.append(text)
    more = len(names) - len(shown)
    return ", ".join(shown) + (f", … {more:,} more" if more else "")


def _shares(labels: Sequence[str], nbytes: Array) -> list[Share]:
    sums: dict[str, list[int]] = {}
    for label, size in zip(labels, nbytes.tolist(), strict=True):
        entry = sums.setdefault(label, [0, 0])
        entry[0] += 1
        entry[1] += size
    found = [Share(safe(label), *entry) for label, entry in sums.items()]
    return sorted(found, key=lambda share: -share.nbytes)


def _lacking(catalog: Catalog) -> Array:
    """Return tensors whose first copies have too few elements to cover them; overlaps can still hide other holes."""
    have = np.zeros(len(catalog) + 1, np.int64)
    if catalog.chunks:
        volume = np.where(catalog.replica == 0, catalog.sizes.prod(axis=1), 0)
        have = np.concatenate([[0], np.cumsum(volume)])
        have = have[catalog.row_ptr[1:]] - have[catalog.row_ptr[:-1]]
    return np.flatnonzero(have[: len(catalog)] < catalog.numel)
