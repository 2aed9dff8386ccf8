"""The tables of tensors and chunks as plain JSON rows, with the columns of the DataFrames; pandas is not needed."""

from __future__ import annotations

from typing import Any

from workbench.checkpoint import Checkpoint
from workbench.core.catalog import Catalog
from workbench.core.codecs import CODECS
from workbench.core.dtypes import ALL
from workbench.core.frames import distinct_files, group_max


def tensor_rows(ckpt: Checkpoint) -> list[dict[str, Any]]:
    """Return a row per tensor (``Checkpoint.tensors``): key fqn role dtype shape numel nbytes chunks files replicas."""
    catalog = ckpt.catalog
    counts = (catalog.row_ptr[1:] - catalog.row_ptr[:-1]).tolist()
    replicas = group_max(catalog.replica.astype("i8") + 1, catalog.row_ptr).tolist()
    columns = (
        catalog.keys,
        ckpt.fqns,
        ckpt.roles,
        [ALL[code].name for code in catalog.dtype.tolist()],
        [row[:n] for row, n in zip(catalog.shape.tolist(), catalog.ndim.tolist(), strict=True)],
        catalog.numel.tolist(),
        catalog.tensor_nbytes.tolist(),
        counts,
        distinct_files(catalog).tolist(),
        replicas,
    )
    names = ("key", "fqn", "role", "dtype", "shape", "numel", "nbytes", "chunks", "files", "replicas")
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def chunk_rows(catalog: Catalog, tensor: int) -> list[dict[str, Any]]:
    """Return one dict per chunk: key offsets sizes dtype file start stop rank replica codec (``Checkpoint.chunks``).

    ``rank`` is ``None`` if unknown.
    """
    rows, dims = catalog.rows_of(tensor), int(catalog.ndim[tensor])
    dtype = catalog.dtype_of(tensor).name
    found = []
    for row in range(rows.start, rows.stop):
        rank = int(catalog.rank[row])
        found.append(
            {
                "key": catalog.keys[tensor],
                "offsets": catalog.offsets[row, :dims].tolist(),
                "sizes": catalog.sizes[row, :dims].tolist(),
                "dtype": dtype,
                "file": catalog.files[catalog.file[row]],
                "start": int(catalog.start[row]),
                "stop": int(catalog.stop[row]),
                "rank": rank if rank >= 0 else None,
                "replica": int(catalog.replica[row]),
                "codec": CODECS[catalog.codec[row]],
            }
        )
    return found
