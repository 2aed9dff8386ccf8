"""Build a catalog one chunk at a time, for readers whose metadata is small enough for a Python loop.

Readers of huge metadata (DCP) fill the columns themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from workbench.core import catalog as cat
from workbench.core.catalog import Catalog, ObjectTable
from workbench.core.dtypes import DType
from workbench.core.place import FileStat, Place, stat_or_absent
from workbench.errors import CorruptError

__all__ = ["CatalogBuilder", "merge"]


class CatalogBuilder:
    """Collects tensors, chunks and objects; :meth:`build` sorts and packs them.

    >>> builder = CatalogBuilder("demo", place)  # doctest: +SKIP
    >>> builder.tensor("w", by_name("F32"), (4, 2))
    >>> builder.chunk("w", (0, 0), (4, 2), "a.bin", 0, 32)
    """

    def __init__(self, format: str, place: Place) -> None:
        self.format, self.place = format, place
        self._tensors: dict[str, tuple[DType, tuple[int, ...], str | None, str | None]] = {}
        self._position: dict[str, int] = {}
        self._files: dict[str, int] = {}
        self._chunks: list[tuple[Any, ...]] = []
        self._objects: list[tuple[str, int, int, int, int]] = []
        self._metadata: dict[str, None] = {}

    def file(self, name: str, *, metadata: bool = False) -> int:
        """Id of a file (registered on first use); ``metadata`` marks one that the catalog is made from."""
        if metadata:
            self._metadata[name] = None
        return self._files.setdefault(name, len(self._files))

    def __contains__(self, key: str) -> bool:
        return key in self._tensors

    def tensor(
        self, key: str, dtype: DType, shape: Sequence[int], *, fqn: str | None = None, role: str | None = None
    ) -> None:
        """Declare a global tensor; declaring it again must agree.

        Raises:
            CorruptError: declared before with another dtype or shape.
        """
        shape = tuple(shape)
        known = self._tensors.setdefault(key, (dtype, shape, fqn, role))
        if known[:2] != (dtype, shape):
            raise CorruptError(
                f"tensor {key!r} is {known[0]} {known[1]} in one place and {dtype} {shape} in another; "
                "the files are from different saves"
            )
        self._position.setdefault(key, len(self._position))

    def chunk(
        self,
        key: str,
        offsets: Sequence[int],
        sizes: Sequence[int],
        file: str,
        start: int,
        stop: int,
        *,
        codec: int = cat.RAW,
        rank: int = -1,
        inner: int = 0,
        strides: Sequence[int] | None = None,
    ) -> None:
        """One stored box of a declared tensor; ``start``/``stop``/``inner`` in bytes, ``strides`` in elements."""
        if strides is not None and tuple(strides) == cat.row_major(sizes):
            strides = None
        row = (self._position[key], tuple(offsets), tuple(sizes), self.file(file), start, stop, codec, rank)
        self._chunks.append((*row, inner, None if strides is None else tuple(strides)))

    def object(self, key: str, file: str, start: int, stop: int, codec: int = cat.RAW) -> None:
        """One stored non-tensor item."""
        self._objects.append((key, self.file(file), start, stop, codec))

    def build(self, meta: Mapping[str, Any] | None = None, *, named: bool = False) -> Catalog:
        """The catalog. ``named`` says that the reader supplied fqn and role for every tensor."""
        dims = max([1, *(len(shape) for _, shape, _, _ in self._tensors.values())])
        declared = list(self._tensors.values())
        rows = sorted(self._chunks, key=lambda row: (row[0], row[1], row[2], row[7]))  # then by rank
        counts = np.bincount([row[0] for row in rows], minlength=len(declared)) if rows else np.zeros(len(declared))
        strided = any(row[9] is not None for row in rows)
        files = list(self._files)
        return Catalog(
            format=self.format,
            keys=list(self._tensors),
            dtype=np.array([dtype.code for dtype, *_ in declared], np.uint8),
            ndim=np.array([len(shape) for _, shape, *_ in declared], np.uint8),
            shape=_pad((shape for _, shape, *_ in declared), dims, 1),
            row_ptr=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
            offsets=_pad((row[1] for row in rows), dims, 0),
            sizes=_pad((row[2] for row in rows), dims, 1),
            file=np.array([row[3] for row in rows], np.int32),
            start=np.array([row[4] for row in rows], np.int64),
            stop=np.array([row[5] for row in rows], np.int64),
            codec=np.array([row[6] for row in rows], np.uint8),
            rank=np.array([row[7] for row in rows], np.int32),
            replica=_replicas(rows),
            inner=np.array([row[8] for row in rows], np.int64) if any(row[8] for row in rows) else None,
            strides=_pad((row[9] or cat.row_major(row[2]) for row in rows), dims, 0) if strided else None,
            files=files,
            file_stats=[self._stat(name) for name in files],
            metadata_files=list(self._metadata),
            fqns=[fqn for *_, fqn, _ in declared] if named else None,
            roles=[role or "other" for *_, role in declared] if named else None,
            objects=ObjectTable(
                [row[0] for row in self._objects],
                np.array([row[1] for row in self._objects], np.int32),
                np.array([row[2] for row in self._objects], np.int64),
                np.array([row[3] for row in self._objects], np.int64),
                np.array([row[4] for row in self._objects], np.uint8),
            ),
            meta=dict(meta or {}),
        )

    def _stat(self, name: str) -> FileStat:
        return stat_or_absent(self.place, name)


def merge(format: str, parts: Sequence[tuple[str, str, Catalog]], meta: Mapping[str, Any]) -> Catalog:
    """One catalog of several, for checkpoints made of parts (model, optimizer …).

    Args:
        parts: ``(key prefix, folder, catalog)``; the prefix is put before every key, the folder before every file.
    """
    dims = max([1, *(part.shape.shape[1] for _, _, part in parts)])
    files: list[str] = []
    columns: dict[str, list[Any]] = {name: [] for name in (*cat.CHUNK_COLUMNS, "dtype", "ndim", "shape", "counts")}
    strided = any(part.strides is not None for *_, part in parts)
    for _, folder, part in parts:
        for name in ("start", "stop", "codec", "rank", "replica", "dtype", "ndim"):
            columns[name].append(getattr(part, name))
        columns["shape"].append(_widen(part.shape, dims, 1))
        columns["offsets"].append(_widen(part.offsets, dims, 0))
        columns["sizes"].append(_widen(part.sizes, dims, 1))
        columns["file"].append(part.file + np.int32(len(files)))
        columns["counts"].append(np.diff(part.row_ptr))
        columns["inner"].append(np.zeros(part.chunks, np.int64) if part.inner is None else part.inner)
        if strided:
            columns["strides"].append(_widen(_strides_of(part), dims, 0))
        files += [f"{folder}/{name}" if folder else name for name in part.files]
    known = all(part.fqns is not None for *_, part in parts)
    joined = {name: np.concatenate(values) for name, values in columns.items() if values}
    inner, counts = joined.pop("inner"), joined.pop("counts")
    starts = np.cumsum([0, *(len(part.files) for *_, part in parts)])
    return Catalog(
        format=format,
        keys=[prefix + key for prefix, _, part in parts for key in part.keys],
        row_ptr=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        inner=inner if inner.any() else None,
        files=files,
        file_stats=[stat for *_, part in parts for stat in part.file_stats],
        metadata_files=[f"{folder}/{n}" if folder else n for _, folder, part in parts for n in part.metadata_files],
        fqns=[fqn for *_, part in parts for fqn in part.fqns or ()] if known else None,
        roles=[role for *_, part in parts for role in part.roles or ()] if known else None,
        objects=ObjectTable(
            [prefix + key for prefix, _, part in parts for key in part.objects.keys],
            np.concatenate([p.objects.file + np.int32(s) for s, (*_, p) in zip(starts, parts, strict=False)]),
            np.concatenate([p.objects.start for *_, p in parts]),
            np.concatenate([p.objects.stop for *_, p in parts]),
            np.concatenate([p.objects.codec for *_, p in parts]),
        ),
        meta=dict(meta),
        **joined,
    )


def _pad(rows: Iterable[Sequence[int]], dims: int, fill: int) -> np.ndarray[Any, Any]:
    padded = [(*row, *([fill] * (dims - len(row)))) for row in rows]
    return np.array(padded, np.int64).reshape(len(padded), dims)


def _widen(column: np.ndarray[Any, Any], dims: int, fill: int) -> np.ndarray[Any, Any]:
    return np.pad(column, ((0, 0), (0, dims - column.shape[1])), constant_values=fill)


def _strides_of(part: Catalog) -> np.ndarray[Any, Any]:
    if part.strides is not None:
        return part.strides
    steps = np.cumprod(np.maximum(part.sizes, 1)[:, :0:-1], axis=1)[:, ::-1]
    return np.concatenate([steps, np.ones((part.chunks, 1), np.int64)], axis=1)


def _replicas(rows: Sequence[tuple[Any, ...]]) -> np.ndarray[Any, Any]:
    """Number the copies of equal boxes 0, 1, … in order of rank; rows are sorted so that they are neighbours."""
    replica = np.zeros(len(rows), np.int16)
    for position in range(1, len(rows)):
        if rows[position][:3] == rows[position - 1][:3]:
            replica[position] = replica[position - 1] + 1
    return replica
