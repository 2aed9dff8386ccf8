"""Exact boxes of elements stored in no chunk, and of elements stored in two different chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from workbench.core import box
from workbench.core.catalog import Catalog

if TYPE_CHECKING:
    import pandas as pd

LISTED = 1024  #: maximum number of holes, and of overlaps, listed per tensor
ALL = 20_000  #: the same for all tensors together


class Coverage(NamedTuple):
    """Boxes by tensor, up to :data:`LISTED` of each kind, and up to :data:`ALL` of all tensors together.

    Attributes:
        holes: tensor, offsets, sizes.
        overlaps: tensor, offsets, sizes, and the two chunk rows that overlap.
        tangled: tensors with too many overlaps or holes to search for all holes.
    """

    holes: list[tuple[int, tuple[int, ...], tuple[int, ...]]]
    overlaps: list[tuple[int, tuple[int, ...], tuple[int, ...], int, int]]
    tangled: list[int]

    def frames(self, catalog: Catalog) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Return tables ``holes``: key offsets sizes numel; ``overlaps``: the same and file_a, file_b."""
        import pandas as pd

        holes = [(catalog.keys[t], low, size, int(np.prod(size, dtype=np.int64))) for t, low, size in self.holes]
        twice = [
            (
                catalog.keys[t],
                low,
                size,
                int(np.prod(size, dtype=np.int64)),
                catalog.files[catalog.file[a]],
                catalog.files[catalog.file[b]],
            )
            for t, low, size, a, b in self.overlaps
        ]
        columns = ["key", "offsets", "sizes", "numel"]
        return pd.DataFrame(holes, columns=columns), pd.DataFrame(twice, columns=[*columns, "file_a", "file_b"])


def coverage(catalog: Catalog) -> Coverage:
    """Find holes and overlaps of all tensors; copies of a box (``replica`` above 0) do not count as overlaps."""
    found = Coverage([], [], [])
    if not len(catalog):
        return found
    first = np.flatnonzero(catalog.replica == 0)
    offsets, sizes = catalog.offsets[first].astype(np.int64), catalog.sizes[first].astype(np.int64)
    owner = catalog.tensor[first]
    held = box.sums(owner, box.volume(sizes), len(catalog))
    i, j = box.overlapping(owner, offsets, sizes, limit=LISTED)
    for a, b in zip(first[i][:ALL].tolist(), first[j][:ALL].tolist(), strict=True):
        tensor = int(catalog.tensor[a])
        ndim = int(catalog.ndim[tensor])
        low, size = box.intersect(catalog.offsets[a], catalog.sizes[a], catalog.offsets[b], catalog.sizes[b])
        found.overlaps.append((tensor, tuple(low[:ndim].tolist()), tuple(size[:ndim].tolist()), a, b))
    for tensor in np.union1d(np.flatnonzero(held != catalog.numel), box.distinct(owner[i])).tolist():
        low_row, high_row = np.searchsorted(owner, [tensor, tensor + 1]).tolist()
        whole = catalog.shape[tensor].astype(np.int64)
        ndim = int(catalog.ndim[tensor])
        rows = slice(low_row, high_row)
        limit = min(LISTED, ALL - len(found.holes))
        try:
            holes = box.missing(np.zeros_like(whole), whole, offsets[rows], sizes[rows], limit=limit)
        except box.Tangled:
            found.tangled.append(tensor)
            continue
        found.holes.extend((tensor, tuple(low[:ndim].tolist()), tuple(size[:ndim].tolist())) for low, size in holes)
    return found
