"""Locate changes: in the part of one rank or file, in some rows of every tensor, and the first changed element."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from workbench.analysis.where import band_width
from workbench.doctor.origins.atoms import Atoms
from workbench.doctor.origins.look import AtomLook

MOST = 0.6  #: share of a file's elements; padding and frozen tensors are equal in any two saves


@dataclass(frozen=True)
class Where:
    """A place that holds all changes.

    Attributes:
        confined: whether it is one rank's (file's) part, or the same part of many tensors, and most of that changed.
        words: a clause to append to a sentence. evidence: the same for programs.
    """

    confined: bool = False
    words: str = ""
    evidence: Mapping[str, Any] = field(default_factory=dict)


def where(atoms: Atoms, looks: Sequence[AtomLook]) -> Where:
    """Return the place of all changes."""
    files = _files(atoms, looks)
    first = looks[0]
    evidence: dict[str, Any] = {"first": _first(first)}
    if files is not None:
        names, of = files
        some = ", ".join(map(repr, names[:2])) + (" …" if len(names) > 2 else "")
        words = f"; all of it is in {some}, {len(names):,} of {of:,} files"
        return Where(True, words, evidence | {"files": names[:16], "files_of": of})
    parts = [one for one in looks if one.kind == "part"]
    if len(parts) > 1 and 2 * len(parts) > len(looks):
        words = "; only a part of each" + (f", in {first.atom.fqn!r} {first.text}" if first.text else "")
        return Where(True, words, evidence | {"parts": len(parts)})
    return Where(False, "", evidence)


def _files(atoms: Atoms, looks: Sequence[AtomLook]) -> tuple[list[str], int] | None:
    """Return the files that hold all changes, if they hold little else of those roles and other files exist."""
    catalog = atoms.b.catalog
    roles = {one.atom.role for one in looks}
    held: Counter[str] = Counter()
    for atom in atoms.rows:
        if atom.role in roles:
            rows = catalog.rows_of(atom.tensor)
            keep = catalog.replica[rows] == 0
            volumes = catalog.sizes[rows].prod(axis=1)[keep]
            for file, volume in zip(catalog.file[rows][keep].tolist(), volumes.tolist(), strict=True):
                held[catalog.files[file]] += volume
    changed: Counter[str] = Counter()
    for one in looks:
        c, own = one.row.comparison, one.row.catalog
        if c is None or own is None or not c.chunks:
            return None
        for (_, row), count in c.chunks.items():
            changed[own.files[own.file[row]]] += count
    if len(changed) == len(held) or changed.total() < MOST * sum(held[name] for name in changed):
        return None
    return sorted(changed), len(held)


def _first(one: AtomLook) -> Any:
    c = one.row.comparison
    bands = None if c is None else c.bands
    if bands is None or not len(bands):
        return None
    return [
        int(np.flatnonzero(line)[0]) * band_width(size) if line.any() else 0
        for line, size in zip(bands, one.row.shape_b, strict=False)
    ]
