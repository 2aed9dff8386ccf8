"""Two manifests side by side: what became of each tensor, without either checkpoint."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench.analysis.manifest_entries import Manifest, TensorEntry

__all__ = ["ManifestDiff", "compare"]


@dataclass(frozen=True)
class ManifestDiff:
    """What two manifests tell of the difference of their checkpoints, by the tensors' names.

    Attributes:
        added, removed: only in the second, only in the first.
        changed: other elements, dtype or shape under the same name.
        equal: bit for bit the same.
        renamed: ``(before, after)``: the same content under another name; only where it is the only one with it.
        moved: equal, but stored in other files.
        unknown: without a fingerprint on one side, so that nothing can be said.
        files: the same of files: ``added removed changed equal``.
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
        """Whether all tensors are the same, by name and content."""
        return not (self.added or self.removed or self.changed or self.renamed or self.unknown)

    def to_json(self) -> dict[str, Any]:
        """The same as plain JSON, equal ones as counts."""
        names = ("added", "removed", "changed", "renamed", "moved", "unknown")
        files = {kind: rows for kind, rows in self.files.items() if kind != "equal"}
        return {
            **{name: getattr(self, name) for name in names},
            "equal": len(self.equal),
            "files": {**files, "equal": len(self.files["equal"])},
        }


def compare(first: Manifest, second: Manifest) -> ManifestDiff:
    """Compare two checkpoints by their manifests; neither needs to be there."""
    a, b = first.tensors, second.tensors
    common = [key for key in a if key in b]
    unknown = [key for key in common if a[key].fingerprint is None or b[key].fingerprint is None]
    blind = set(unknown)
    equal = [key for key in common if key not in blind and a[key].fingerprint == b[key].fingerprint]
    same = set(equal)
    renamed = _renamed({key: a[key] for key in a if key not in b}, {key: b[key] for key in b if key not in a})
    gone, new = {before for before, _ in renamed}, {after for _, after in renamed}
    places = _places(first), _places(second)
    names = {
        "added": [name for name in second.files if name not in first.files],
        "removed": [name for name in first.files if name not in second.files],
        "changed": [name for name in first.files if name in second.files and not _alike(first, second, name)],
        "equal": [name for name in first.files if name in second.files and _alike(first, second, name)],
    }
    return ManifestDiff(
        [key for key in b if key not in a and key not in new],
        [key for key in a if key not in b and key not in gone],
        [key for key in common if key not in same and key not in blind],
        equal,
        renamed,
        [key for key in equal if places[0][key] != places[1][key]],
        unknown,
        names,
    )


def _renamed(gone: dict[str, TensorEntry], new: dict[str, TensorEntry]) -> list[tuple[str, str]]:
    """Pairs of names with one content, where no third has it."""
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
    """The files that hold each tensor."""
    found: dict[str, set[str]] = defaultdict(set)
    for name, entry in manifest.files.items():
        for owner in np.unique(entry.owners).tolist():
            kind, *keys = manifest.labels[owner]
            if kind == "tensor":
                for key in keys:
                    found[key].add(name)
    return found


def _alike(first: Manifest, second: Manifest, name: str) -> bool:
    """Whether a file is the same in both; where they were cut differently, its size is all there is to compare."""
    a, b = first.files[name], second.files[name]
    if a.size != b.size:
        return False
    same_cut = np.array_equal(a.blocks(name, first.grain).starts, b.blocks(name, second.grain).starts)
    return same_cut and np.array_equal(a.digests, b.digests)
