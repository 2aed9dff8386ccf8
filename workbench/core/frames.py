"""Catalog columns as pandas DataFrames, the tables users sort, filter and plot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.core.catalog import Catalog
from workbench.core.codecs import CODECS
from workbench.core.dtypes import ALL

if TYPE_CHECKING:
    import pandas as pd


def tensor_frame(catalog: Catalog, fqns: Sequence[str | None], roles: Sequence[str]) -> pd.DataFrame:
    """Return one row per tensor: key fqn role dtype shape numel nbytes chunks files replicas.

    ``nbytes`` counts the elements once; ``replicas`` is the largest number of copies of a box.
    """
    import pandas as pd

    counts = np.diff(catalog.row_ptr)
    shapes = [tuple(row[:n]) for row, n in zip(catalog.shape.tolist(), catalog.ndim.tolist(), strict=True)]
    return pd.DataFrame(
        {
            "key": _text(catalog.keys),
            "fqn": _text(fqns),
            "role": pd.Categorical(roles),
            "dtype": _category(catalog.dtype, [dtype.name for dtype in ALL]),
            "shape": _tuples(shapes),
            "numel": catalog.numel,
            "nbytes": catalog.tensor_nbytes,
            "chunks": counts,
            "files": distinct_files(catalog),
            "replicas": group_max(catalog.replica.astype(np.int64) + 1, catalog.row_ptr),
        }
    )


def chunk_frame(catalog: Catalog) -> pd.DataFrame:
    """Return one row per chunk: key offsets sizes dtype file start stop rank replica codec.

    ``start`` and ``stop`` are bytes of the stored item; ``rank`` is <NA> if unknown.
    """
    import pandas as pd

    tensor = catalog.tensor
    ndim = catalog.ndim[tensor].tolist()
    offsets = [tuple(row[:n]) for row, n in zip(catalog.offsets.tolist(), ndim, strict=True)]
    sizes = [tuple(row[:n]) for row, n in zip(catalog.sizes.tolist(), ndim, strict=True)]
    rank = pd.array(catalog.rank, dtype="Int32")
    rank[catalog.rank < 0] = pd.NA
    return pd.DataFrame(
        {
            "key": _category(tensor, catalog.keys),
            "offsets": _tuples(offsets),
            "sizes": _tuples(sizes),
            "dtype": _category(catalog.dtype[tensor], [dtype.name for dtype in ALL]),
            "file": _category(catalog.file, catalog.files),
            "start": np.asarray(catalog.start),
            "stop": np.asarray(catalog.stop),
            "rank": rank,
            "replica": np.asarray(catalog.replica),
            "codec": _category(catalog.codec, list(CODECS)),
        }
    )


def _text(values: Sequence[str | None]) -> Any:
    import pandas as pd

    return pd.array(list(values), dtype="str")


def _category(codes: np.ndarray[Any, Any], names: Sequence[str]) -> pd.Categorical:
    """Encode names as a categorical, each kept once; categories that no row uses are left out."""
    import pandas as pd

    used, compact = np.unique(codes, return_inverse=True)
    return pd.Categorical.from_codes(compact, [names[code] for code in used.tolist()])


def _tuples(values: list[tuple[int, ...]]) -> np.ndarray[Any, Any]:
    column = np.empty(len(values), object)
    column[:] = values
    return column


def distinct_files(catalog: Catalog) -> np.ndarray[Any, Any]:
    """Count the files that hold chunks of each tensor, ``(T,)``."""
    if not catalog.chunks:
        return np.zeros(len(catalog), np.int64)
    files = max(len(catalog.files), 1)
    pair = catalog.tensor.astype(np.int64) * files + catalog.file
    pair.sort()  # np.unique hashes them instead: ten times slower at a million, and no other thread runs meanwhile
    fresh = np.concatenate([[True], pair[1:] != pair[:-1]])
    return np.bincount(pair[fresh] // files, minlength=len(catalog))


def group_max(values: np.ndarray[Any, Any], row_ptr: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the largest value over the rows of each tensor, ``(T,)``; 0 for tensors without rows."""
    out = np.zeros(len(row_ptr) - 1, np.int64)
    full = np.flatnonzero(np.diff(row_ptr))
    if len(full):
        out[full] = np.maximum.reduceat(values, row_ptr[full])
    return out
