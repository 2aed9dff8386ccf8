"""The holder of each chunk: a rank if file names contain it, else the coordinates stored in a file, else the file.

A writer holds what it wrote. Other holders of a copy are only known if every rank saves everything it has: in a save
without duplicates (DCP, Megatron), one of several holders writes, and nothing is stored about the others.
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from workbench.checkpoint import Checkpoint
from workbench.core.arrays import Ints


@dataclass(frozen=True, eq=False)
class Holders:
    """The holders, ordered by rank, then by file.

    Attributes:
        rank: ``(H,)``, -1 if not stored.
        label: the name of each: ``rank 3``, ``tp=0 pp=1`` or a file name.
        axes: mesh axes stored in the files, with their sizes if known.
        coordinates: ``(H, axes)``, -1 if not stored.
        of_chunk: ``(N,)`` holder of each chunk row.
        source: where the coordinates are stored; empty if nowhere.
    """

    rank: Ints
    label: list[str]
    axes: dict[str, int]
    coordinates: Ints
    of_chunk: Ints
    source: str

    def __len__(self) -> int:
        return len(self.rank)

    @cached_property
    def ranked(self) -> bool:
        """Whether every holder is a rank."""
        return len(self) > 0 and bool((self.rank >= 0).all())


def holders(ckpt: Checkpoint) -> Holders:
    """Determine the holders of a checkpoint's chunks."""
    catalog, mesh = ckpt.catalog, ckpt.mesh
    files = len(catalog.files)
    stated, named, axes = _stated(ckpt, mesh)
    # one code per (rank, file); then its label: coordinates, else the rank, else the file name
    pair = (catalog.rank.astype(np.int64) + 1) * max(files, 1) + catalog.file
    used, of_pair = np.unique(pair, return_inverse=True)
    codes = [(code // max(files, 1) - 1, code % max(files, 1)) for code in used.tolist()]
    coordinates = [
        (stated.get(str(rank)) if rank >= 0 else None) or named.get(catalog.files[file]) for rank, file in codes
    ]
    at_rank: dict[int, set[Any]] = {}
    for (rank, _), at in zip(codes, coordinates, strict=True):
        if at:
            at_rank.setdefault(rank, set()).add(_key(at))
    numbers: dict[Any, int] = {}
    rows: list[int] = []
    ranks: list[int] = []
    for (rank, file), at in zip(codes, coordinates, strict=True):
        same = at_rank.get(rank, set()) if rank >= 0 else set()
        identity: Any = rank if rank >= 0 else catalog.files[file]
        if at:
            identity = _key(at)
        elif len(same) == 1:
            identity = next(iter(same))
        row = numbers.setdefault(identity, len(numbers))
        rows.append(row)
        ranks += [-1] * (row + 1 - len(ranks))
        ranks[row] = max(ranks[row], rank)
    return _table(
        numbers, np.array(ranks, np.int64), axes, mesh, np.array(rows, np.int64)[of_pair] if rows else of_pair
    )


def _table(
    numbers: dict[Any, int], rank: Ints, axes: dict[str, int], mesh: Mapping[str, Any], of_chunk: Ints
) -> Holders:
    """Return the holders in order, from what distinguishes them."""
    names = list(axes)
    place = np.full((len(numbers), len(names)), -1, np.int64)
    label = []
    for row, identity in enumerate(numbers):
        at = dict(identity) if isinstance(identity, tuple) else {}
        for axis, coordinate in at.items():
            place[row, names.index(axis)] = coordinate
        text = " ".join(f"{axis}={at[axis]}" for axis in names if axis in at) or str(identity)
        label.append(f"rank {rank[row]}" if rank[row] >= 0 else text)
    order = np.lexsort((np.arange(len(numbers)), *place.T[::-1], rank))
    back = np.empty(len(order), np.int64)
    back[order] = np.arange(len(order))
    source = str(mesh.get("source", "")) if (place >= 0).any() else ""
    return Holders(rank[order], [label[k] for k in order.tolist()], axes, place[order], back[of_chunk], source)


def _key(at: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(at.items()))


def _stated(
    ckpt: Checkpoint, mesh: Mapping[str, Any]
) -> tuple[dict[str, dict[str, int]], dict[str, dict[str, int]], dict[str, int]]:
    """Return coordinates by rank and by file, and their axes."""
    stored = mesh.get("ranks")
    ranks = {str(name): _numbers(at) for name, at in stored.items()} if isinstance(stored, Mapping) else {}
    by_rank = {name: at for name, at in ranks.items() if name.isdecimal()}
    by_file = {name: at for name, at in ranks.items() if not name.isdecimal()}
    folders = mesh.get("folders")
    if isinstance(folders, Mapping):
        for file in ckpt.catalog.files:
            at = folders.get(posixpath.dirname(file)) or folders.get(file.split("/")[0])
            if isinstance(at, Mapping) and file not in by_file:
                by_file[file] = _numbers(at)
    sizes = _numbers(mesh.get("axes", {}))
    axes: dict[str, int] = {}
    for at in [*by_rank.values(), *by_file.values()]:
        for axis, coordinate in at.items():
            axes[axis] = max(axes.get(axis, 0), sizes.get(axis, 0), coordinate + 1)
    order = [axis for axis in sizes if axis in axes] + [axis for axis in axes if axis not in sizes]
    return by_rank, by_file, {axis: axes[axis] for axis in order}


def _numbers(found: Any) -> dict[str, int]:
    items = found.items() if isinstance(found, Mapping) else ()
    return {str(k): v for k, v in items if type(v) is int and v >= 0}
