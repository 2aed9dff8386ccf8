"""Bytes by rank, file, role, dtype, layer and pipeline stage; balance; copies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.analysis.layout.holders import Holders
from workbench.analysis.layout.placed import InferredMesh
from workbench.core import box
from workbench.core.arrays import Ints
from workbench.core.catalog import Catalog
from workbench.core.dtypes import ALL
from workbench.names.weights import parse

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, slots=True)
class Balance:
    """How evenly bytes are spread.

    Attributes:
        count: number of ranks or files that they are spread over.
        smallest, largest: bytes.
        mean: bytes.
    """

    count: int
    smallest: int
    largest: int
    mean: float

    @property
    def ratio(self) -> float:
        """The largest divided by the mean: 1 is even; 0 if there are no bytes."""
        return self.largest / self.mean if self.mean else 0.0


def balance(nbytes: Ints) -> Balance:
    """Compute the balance of bytes per rank or file."""
    if not len(nbytes):
        return Balance(0, 0, 0, 0.0)
    return Balance(len(nbytes), int(nbytes.min()), int(nbytes.max()), float(nbytes.mean()))


def rank_frame(catalog: Catalog, who: Holders, mesh: InferredMesh, places: Ints) -> pd.DataFrame:
    """Return one row per holder: label rank, one column per axis, files tensors chunks nbytes copies.

    ``nbytes`` counts elements; ``copies`` those that an earlier holder stores, too.
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
        "nbytes": box.sums(who.of_chunk, nbytes, count),
        "copies": box.sums(who.of_chunk, np.where(catalog.replica > 0, nbytes, 0), count),
    }
    return pd.DataFrame(found)


def file_frame(catalog: Catalog, who: Holders) -> pd.DataFrame:
    """Return one row per file: file size holders tensors chunks nbytes; ``size`` is <NA> for an absent file."""
    import pandas as pd

    count = len(catalog.files)
    sizes = np.array([stat.size for stat in catalog.file_stats], np.int64)
    return pd.DataFrame(
        {
            "file": catalog.files,
            "size": known(sizes),
            "holders": distinct(catalog.file, who.of_chunk, count),
            "tensors": distinct(catalog.file, catalog.tensor, count),
            "chunks": np.bincount(catalog.file, minlength=count),
            "nbytes": box.sums(catalog.file, catalog.chunk_nbytes, count),
        }
    )


def chunk_rows(catalog: Catalog, rows: Ints) -> pd.DataFrame:
    """Return one row per chunk: key offsets sizes nbytes file start stop replica."""
    import pandas as pd

    tensor = catalog.tensor[rows]
    ndim = catalog.ndim[tensor].tolist()
    names = np.empty(len(catalog.files), object)
    names[:] = catalog.files
    return pd.DataFrame(
        {
            "key": [catalog.keys[t] for t in tensor.tolist()],
            "offsets": _boxes(catalog.offsets[rows], ndim),
            "sizes": _boxes(catalog.sizes[rows], ndim),
            "nbytes": catalog.chunk_nbytes[rows],
            "file": names[catalog.file[rows]],
            "start": catalog.start[rows],
            "stop": catalog.stop[rows],
            "replica": catalog.replica[rows],
        }
    )


def labels(catalog: Catalog, fqns: Sequence[str | None], roles: Sequence[str], what: str) -> list[str]:
    """Return the label that each tensor is counted under: its ``role``, ``dtype`` or ``layer``."""
    if what == "role":
        return list(roles)
    if what == "dtype":
        return [ALL[code].name for code in catalog.dtype.tolist()]
    names = [fqn if fqn is not None else key for fqn, key in zip(fqns, catalog.keys, strict=True)]
    weights = map(parse, names)
    return ["no layer" if one.layer is None else f"{one.stack}.{one.layer}" for one in weights]


def shares(names: Sequence[str], tensor: Ints, nbytes: Ints, whole: Ints, what: str) -> pd.DataFrame:
    """Return the bytes under each label, in order of first use: label tensors nbytes stored.

    ``nbytes`` counts each tensor once, ``stored`` every chunk.
    """
    import pandas as pd

    order: dict[str, int] = {}
    code = np.array([order.setdefault(name, len(order)) for name in names], np.int64)
    count = len(order)
    return pd.DataFrame(
        {
            what: list(order),
            "tensors": np.bincount(code, minlength=count),
            "nbytes": box.sums(code, whole, count),
            "stored": box.sums(code[tensor], nbytes, count),
        }
    )


def _boxes(columns: Ints, ndim: Sequence[int]) -> Any:
    found = np.empty(len(columns), object)
    found[:] = [tuple(row[:n]) for row, n in zip(columns.tolist(), ndim, strict=True)]
    return found


def distinct(group: Ints, values: Ints, count: int) -> Ints:
    """Return the number of distinct values in each group."""
    if not len(group):
        return np.zeros(count, np.int64)
    span = int(values.max()) + 1
    return np.bincount(box.distinct(group.astype(np.int64) * span + values) // span, minlength=count)


def known(values: Ints) -> Any:
    """Return integers, with <NA> for negative ones."""
    import pandas as pd

    found = pd.array(values, dtype="Int64")
    found[values < 0] = pd.NA
    return found
