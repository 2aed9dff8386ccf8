"""What a plan would do, in tables, before a byte is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from workbench.core import box
from workbench.core.catalog import Catalog

if TYPE_CHECKING:
    import pandas as pd

    from workbench.reshard.target import Planned, Target

__all__ = ["Explanation", "explain"]


@dataclass(frozen=True, eq=False)
class Explanation:
    """A plan of all ranks in figures.

    Attributes:
        ranks: one row a rank: rank, its coordinate by mesh axis, tensors, nbytes, copies.
        tensors: one row a tensor: key, shape, dtype, placements, why, ranks (that hold it), times (each element is
            held), largest (shape of the largest local tensor), nbytes (on all ranks together).
        files: one row a file that is read: file, nbytes, copies.
        copies: how many copies there are.
        nbytes: bytes of all local tensors.
        unique_nbytes: of those, bytes that no lower rank holds too.
        notes: what the rules did not know or could not do.
    """

    ranks: pd.DataFrame
    tensors: pd.DataFrame
    files: pd.DataFrame
    copies: int
    nbytes: int
    unique_nbytes: int
    notes: list[str]

    def __str__(self) -> str:
        largest, smallest = (int(f(self.ranks["nbytes"])) if len(self.ranks) else 0 for f in (max, min))
        lines = [
            f"{len(self.tensors):,} tensors on {len(self.ranks):,} ranks: {self.nbytes:,} bytes, of which "
            f"{self.unique_nbytes:,} once and {self.nbytes - self.unique_nbytes:,} as copies",
            f"a rank holds {smallest:,} to {largest:,} bytes",
            f"{self.copies:,} copies from {len(self.files):,} files",
        ]
        return "\n".join([*lines, *self.notes])


def explain(target: Target, catalog: Catalog, planned: Planned) -> Explanation:
    """The tables of a plan of all ranks; ``catalog`` is the one that was planned to be read."""
    import pandas as pd

    found, reads = planned
    mesh, world = target.mesh, target.mesh.world_size
    nbytes = target.nbytes(found)
    itemsize = target.nbytes(found)[found.owner] / np.maximum(found.numel[found.owner], 1)
    moved = (box.volume(reads.sizes) * itemsize[reads.request]).round().astype(np.int64)
    coordinates = dict(zip(mesh.axes, mesh.coordinates().T, strict=True))
    copies = np.bincount(found.rank[found.owner[reads.request]], minlength=world)
    held = np.bincount(found.rank, minlength=world)
    ranks = pd.DataFrame({"rank": np.arange(world), **coordinates, "tensors": held,
                          "nbytes": _sums(found.rank, nbytes, world), "copies": copies})  # fmt: skip
    count = len(target.catalog)
    whole = np.maximum(target.catalog.tensor_nbytes, 1)
    total = _sums(found.tensor, nbytes, count)
    order = np.lexsort((-nbytes, found.tensor))
    first = order[
        np.searchsorted(found.tensor[order], np.arange(count))[np.bincount(found.tensor, minlength=count) > 0]
    ]
    largest = {int(found.tensor[k]): tuple(found.shape[k, : found.ndim[k]].tolist()) for k in first.tolist()}
    tensors = pd.DataFrame({
        "key": target.catalog.keys,
        "shape": [target.catalog.shape_of(t) for t in range(count)],
        "dtype": [target.catalog.dtype_of(t).name for t in range(count)],
        "placements": [str(layout) for layout in target.layouts],
        "why": [layout.why for layout in target.layouts],
        "ranks": np.bincount(found.tensor, minlength=count),
        "times": total // whole,
        "largest": [largest.get(t, ()) for t in range(count)],
        "nbytes": total,
    })  # fmt: skip
    file = catalog.file[reads.row]
    read = np.flatnonzero(np.bincount(file, minlength=len(catalog.files)))
    files = pd.DataFrame({
        "file": [catalog.files[f] for f in read.tolist()],
        "nbytes": _sums(file, moved, len(catalog.files))[read],
        "copies": np.bincount(file, minlength=len(catalog.files))[read],
    })  # fmt: skip
    unique = int(nbytes[found.copy == 0].sum())
    return Explanation(ranks, tensors, files, len(reads), int(nbytes.sum()), unique, target.notes)


def _sums(group: np.ndarray, values: np.ndarray, count: int) -> np.ndarray:
    found = np.zeros(count, np.int64)
    np.add.at(found, group, values)
    return found
