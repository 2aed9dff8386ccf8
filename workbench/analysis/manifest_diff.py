"""Compare two manifests, tensor by tensor, without the checkpoints."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench.analysis.manifest_entries import Manifest, TensorEntry


@dataclass(frozen=True)
class ManifestDiff:
    """The difference of two checkpoints by their manifests, as names of tensors.

    Attributes:
        added, removed: only in the second, only in the first.
        changed: different elements, dtype or shape under the same name.
        equal: equal bit for bit.
        renamed: ``(before, after)``: the same content under another name, if no other tensor has this content.
        moved: equal, but stored in other files.
        unknown: no fingerprint on one side, so not comparable.
        files: the same for files: ``added removed changed equal``.
    """

    added: list[str]
    removed: list[str]
    changed: list[str]
    equal: list[str]
    renamed: list[tuple[str, str]]
    moved: list[str]
    unknown: list[str]
    files: dict[str, list[str]]

    @property
    def same(self) -> bool:
        """Whether all tensors have the same names and content."""
        return not (self.added or self.removed or self.changed or self.renamed or self.unknown)

    def to_dict(self) -> dict[str, Any]:
        """Return the same as plain JSON, with equal tensors and files as counts."""
        names = ("added", "removed", "changed", "renamed", "moved", "unknown")
        files = {kind: rows for kind, rows in self.files.items() if kind != "equal"}
        return {
            **{name: getattr(self, name) for name in names},
            "equal": len(self.equal),
            "files": {**files, "equal": len(self.files["equal"])},
        }


def compare(first: Manifest, second: Manifest) -> ManifestDiff:
    """Compare two checkpoints by their manifests; the checkpoints need not exist."""
    a, b = first.tensors, second.tensors
    common = [key for key in a if key in b]
    unknown = [key for key in common if a[key].fingerprint is None or b[key].fingerprint is None]
    incomparable = set(unknown)
    equal = [key for key in common if key not in incomparable and a[key].fingerprint == b[key].fingerprint]
    same = set(equal)
    renamed = _renamed({key: a[key] for key in a if key not in b}, {key: b[key] for key in b if key not in a})
    gone, new = {before for before, _ in renamed}, {after for _, after in renamed}
    places = _places(first), _places(second)
    names = {
        "added": [name for name in second.files if name not in first.files],
        "removed": [name for name in first.files if name not in second.files],
        "changed": [name for name in first.files if name in second.files and not _same_file(first, second, name)],
        "equal": [name for name in first.files if name in second.files and _same_file(first, second, name)],
    }
    return ManifestDiff(
        [key for key in b if key not in a and key not in new],
        [key for key in a if key not in b and key not in gone],
        [key for key in common if key not in same and key not in incomparable],
        equal,
        renamed,
        [key for key in equal if places[0][key] != places[1][key]],
        unknown,
        names,
    )


def _renamed(gone: dict[str, TensorEntry], new: dict[str, TensorEntry]) -> list[tuple[str, str]]:
    """Return pairs of names with the same content that no third tensor has."""
    before, after = _by_fingerprint(gone), _by_fingerprint(new)
    return [
        (names[0], after[found][0])
        for found, names in before.items()
        if len(names) == 1 and len(after.get(found, ())) == 1
    ]


def _by_fingerprint(tensors: dict[str, TensorEntry]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for key, entry in tensors.items():
        if entry.fingerprint is not None and 0 not in entry.shape:
            found[entry.fingerprint].append(key)
    return found


def _places(manifest: Manifest) -> dict[str, set[str]]:
    """Return the files that hold each tensor."""
    found: dict[str, set[str]] = defaultdict(set)
    for name, entry in manifest.files.items():
        for owner in np.unique(entry.owners).tolist():
            kind, *keys = manifest.labels[owner]
            if kind == "tensor":
                for key in keys:
                    found[key].add(name)
    return found


def _same_file(first: Manifest, second: Manifest, name: str) -> bool:
    """Return whether a file is the same in both; if its blocks differ, only sizes can be compared."""
    a, b = first.files[name], second.files[name]
    if a.size != b.size:
        return False
    same_cut = np.array_equal(a.blocks(name, first.grain).starts, b.blocks(name, second.grain).starts)
    return same_cut and np.array_equal(a.digests, b.digests)
