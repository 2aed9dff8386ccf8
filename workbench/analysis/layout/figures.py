"""Bytes by rank, file, role, type, layer and pipeline stage; balance; copies."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.analysis.layout.holders import Holders
from workbench.analysis.layout.placed import Mesh
from workbench.core import box
from workbench.core.catalog import Catalog
from workbench.core.dtypes import ALL

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Balance", "balance", "chunk_rows", "distinct", "file_frame", "known", "labels", "rank_frame", "shares"]

Ints = np.ndarray[Any, np.dtype[np.int64]]
_LAYER = re.compile(r"((?:\w+\.)*?(?:layers|layer|h|blocks|block)\.\d{1,9})(?:\.|$)", re.S)


@dataclass(frozen=True, slots=True)
class Balance:
    """How evenly bytes are spread.

    Attributes:
        count: of what they are spread over.
        smallest, largest: bytes.
        mean: bytes.
    """

    count: int
    smallest: int
    largest: int
    mean: float

    @property
    def ratio(self) -> float:
        """The largest over the mean: 1 is even; 0 where there is nothing."""
        return self.largest / self.mean if self.mean else 0.0


def balance(nbytes: Ints) -> Balance:
    """Of bytes a rank or file."""
    if not len(nbytes):
        return Balance(0, 0, 0, 0.0)
    return Balance(len(nbytes), int(nbytes.min()), int(nbytes.max()), float(nbytes.mean()))


def rank_frame(catalog: Catalog, who: Holders, mesh: Mesh, places: Ints) -> pd.DataFrame:
    """One row a holder: label rank, a column an axis, files tensors chunks nbytes copies.

    ``nbytes`` counts elements; ``copies`` those of them that a holder before it stores too.
    """
    import pandas as pd

    count = len(who)
    found: dict[str, Any] = {"label": who.label, "rank": known(who.rank)}
    for axis, name in enumerate(mesh.axes):
        if name not in ("ranks",):
            found[name] = known(places[:, axis])
    nbytes = catalog.chunk_nbytes
    found |= {
        "files": distinct(who.of_chunk, catalog.file, count),
        "tensors": distinct(who.of_chunk, catalog.tensor, count),
        "chunks": np.bincount(who.of_chunk, minlength=count),
        "nbytes": _sums(who.of_chunk, nbytes, count),
        "copies": _sums(who.of_chunk, np.where(catalog.replica > 0, nbytes, 0), count),
    }
    return pd.DataFrame(found)


def file_frame(catalog: Catalog, who: Holders) -> pd.DataFrame:
    """One row a file: file size holders tensors chunks nbytes; ``size`` in bytes, <NA> for one that is absent."""
    import pandas as pd

    count = len(catalog.files)
    sizes = np.array([stat.size for stat in catalog.file_stats], np.int64)
    return pd.DataFrame({
        "file": catalog.files,
        "size": known(sizes),
        "holders": distinct(catalog.file, who.of_chunk, count),
        "tensors": distinct(catalog.file, catalog.tensor, count),
        "chunks": np.bincount(catalog.file, minlength=count),
        "nbytes": _sums(catalog.file, catalog.chunk_nbytes, count),
    })  # fmt: skip


def chunk_rows(catalog: Catalog, rows: Ints) -> pd.DataFrame:
    """Some chunks, a row each: key offsets sizes nbytes file start stop replica."""
    import pandas as pd

    tensor = catalog.tensor[rows]
    ndim = catalog.ndim[tensor].tolist()
    names = np.empty(len(catalog.files), object)
    names[:] = catalog.files
    return pd.DataFrame({
        "key": [catalog.keys[t] for t in tensor.tolist()],
        "offsets": _boxes(catalog.offsets[rows], ndim),
        "sizes": _boxes(catalog.sizes[rows], ndim),
        "nbytes": catalog.chunk_nbytes[rows],
        "file": names[catalog.file[rows]],
        "start": catalog.start[rows],
        "stop": catalog.stop[rows],
        "replica": catalog.replica[rows],
    })  # fmt: skip


def labels(catalog: Catalog, fqns: Sequence[str | None], roles: Sequence[str], what: str) -> list[str]:
    """What each tensor is counted under: its ``role``, ``dtype`` or ``layer``."""
    if what == "role":
        return list(roles)
    if what == "dtype":
        return [ALL[code].name for code in catalog.dtype.tolist()]
    names = [fqn if fqn is not None else key for fqn, key in zip(fqns, catalog.keys, strict=True)]
    return [found[1] if (found := _LAYER.match(name)) else "no layer" for name in names]


def shares(names: Sequence[str], tensor: Ints, nbytes: Ints, whole: Ints, what: str) -> pd.DataFrame:
    """Bytes under each label, in the order of first use: label tensors nbytes stored.

    ``nbytes`` counts each tensor once, ``stored`` every chunk.
    """
    import pandas as pd

    order: dict[str, int] = {}
    code = np.array([order.setdefault(name, len(order)) for name in names], np.int64)
    count = len(order)
    return pd.DataFrame({
        what: list(order),
        "tensors": np.bincount(code, minlength=count),
        "nbytes": _sums(code, whole, count),
        "stored": _sums(code[tensor], nbytes, count),
    })  # fmt: skip


def _boxes(columns: Ints, ndim: Sequence[int]) -> Any:
    found = np.empty(len(columns), object)
    found[:] = [tuple(row[:n]) for row, n in zip(columns.tolist(), ndim, strict=True)]
    return found


def _sums(group: Ints, values: Ints, count: int) -> Ints:
    """Exact sums by group."""
    found = np.zeros(count, np.int64)
    np.add.at(found, group, values)
    return found


def distinct(group: Ints, values: Ints, count: int) -> Ints:
    """How many different values each group has."""
    if not len(group):
        return np.zeros(count, np.int64)
    span = int(values.max()) + 1
    return np.bincount(box.distinct(group.astype(np.int64) * span + values) // span, minlength=count)


def known(values: Ints) -> Any:
    """Integers, <NA> where negative."""
    import pandas as pd

    found = pd.array(values, dtype="Int64")
    found[values < 0] = pd.NA
    return found
