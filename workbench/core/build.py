"""Build a catalog one chunk at a time, for readers whose metadata is small enough for a Python loop.

Readers of huge metadata (DCP) fill the columns themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from workbench.core import box, codecs
from workbench.core import catalog as cat
from workbench.core.arrays import Array
from workbench.core.catalog import MAX_ELEMENTS, Catalog, ObjectTable
from workbench.core.dtypes import DType
from workbench.core.pickles.budget import NAMES, check_names
from workbench.core.pickles.standins import short
from workbench.core.place import Place, stat_or_absent
from workbench.errors import CorruptError, quoted

MAX_AXES = 64  #: of a tensor, as in torch and numpy


class CatalogBuilder:
    """Collects tensors, chunks and objects; :meth:`build` sorts and packs them.

    Chunks come one at a time (:meth:`chunk`) or as columns (:meth:`block`), for formats with a million of them.

    >>> builder = CatalogBuilder("demo", place)  # doctest: +SKIP
    >>> builder.tensor("w", by_name("F32"), (4, 2))
    >>> builder.chunk("w", (0, 0), (4, 2), "a.bin", 0, 32)
    """

    def __init__(self, format: str, place: Place, *, files: dict[str, int] | None = None) -> None:
        self.format, self.place = format, place
        self._tensors: dict[str, tuple[DType, tuple[int, ...], int, str | None, str | None]] = {}  #: int: its position
        self._letters = 0  # of all names
        self._files: dict[str, int] = {} if files is None else files
        self._chunks: list[tuple[Any, ...]] = []
        self._blocks: list[dict[str, Array]] = []
        self._objects: list[tuple[str, int, int, int, int]] = []
        self._metadata: dict[str, None] = {}
        self._ends: dict[str, int] = {}
        self._views: CatalogBuilder | None = None

    @property
    def views(self) -> CatalogBuilder:
        """A builder for tensors that are views of other tensors' bytes (see ``Catalog.views``)."""
        if self._views is None:
            self._views = CatalogBuilder(self.format, self.place, files=self._files)
        return self._views

    def file(self, name: str, *, metadata: bool = False, end: int | None = None) -> int:
        """Return the id of a file (registered on first use).

        Args:
            metadata: whether the catalog is made from it.
            end: the byte at which it ends by its own metadata; later bytes are unused (``meta["ends"]``).
        """
        if metadata:
            self._metadata[name] = None
        if end is not None:
            self._ends[name] = end
        return self._files.setdefault(name, len(self._files))

    def __contains__(self, key: str) -> bool:
        return key in self._tensors

    def __len__(self) -> int:
        return len(self._tensors)

    def tensor(
        self, key: str, dtype: DType, shape: Sequence[int], *, fqn: str | None = None, role: str | None = None
    ) -> int:
        """Declare a global tensor and return its position; declaring it again must agree.

        Raises:
            CorruptError: declared before with another dtype or shape, or a shape that no tensor can have.
            UnsafeError: the names are far longer than those of a model.
        """
        shape = tuple(shape)
        known = self._tensors.get(key)
        if known is None:
            if len(shape) > MAX_AXES or (shape and not 0 <= min(shape) <= max(shape) <= MAX_ELEMENTS):
                raise CorruptError(f"tensor {quoted(key)} has the impossible shape {short(shape)}")
            self._letters += len(key)
            if self._letters > NAMES:
                check_names(len(self._tensors) + 1, self._letters, repr(self.place.path), lambda: quoted(key))
            self._tensors[key] = dtype, shape, len(self._tensors), fqn, role
            return len(self._tensors) - 1
        if known[:2] != (dtype, shape):
            raise CorruptError(
                f"tensor {key!r} is {known[0]} {known[1]} in one place and {dtype} {shape} in another; "
                "the files are from different saves"
            )
        return known[2]

    def chunk(
        self,
        key: str,
        offsets: Sequence[int],
        sizes: Sequence[int],
        file: str,
        start: int,
        stop: int,
        *,
        codec: int = codecs.RAW,
        rank: int = -1,
        inner: int = 0,
        strides: Sequence[int] | None = None,
    ) -> None:
        """Add one stored box of a declared tensor; ``start``/``stop``/``inner`` in bytes, ``strides`` in elements."""
        if strides is not None and tuple(strides) == cat.row_major(sizes):
            strides = None
        row = (self._tensors[key][2], tuple(offsets), tuple(sizes), self.file(file), start, stop, codec, rank)
        self._chunks.append((*row, inner, None if strides is None else tuple(strides)))

    def block(
        self,
        tensor: Array,
        offsets: Array,
        sizes: Array,
        file: Array | int,
        start: Array | int,
        stop: Array | int,
        *,
        codec: Array | int = codecs.RAW,
        rank: Array | int = -1,
        inner: Array | int = 0,
        strides: Array | None = None,
    ) -> None:
        """Add many chunks at once: ``tensor`` ``(N,)`` as :meth:`tensor` returned them,
        ``offsets``/``sizes``/``strides`` ``(N, D)`` padded with 0, 1 and 0; ``file`` ids as :meth:`file` returned them.
        Scalars count for all rows.
        """
        count = len(tensor)
        columns = {"tensor": tensor, "file": file, "start": start, "stop": stop, "codec": codec, "rank": rank}
        block = {name: np.broadcast_to(np.asarray(value, np.int64), (count,)) for name, value in columns.items()}
        block["inner"] = np.broadcast_to(np.asarray(inner, np.int64), (count,))
        block |= {"offsets": np.asarray(offsets, np.int64), "sizes": np.asarray(sizes, np.int64)}
        if strides is not None:
            block["strides"] = np.asarray(strides, np.int64)
        self._blocks.append(block)

    def object(self, key: str, file: str, start: int, stop: int, codec: int = codecs.RAW) -> None:
        """Add one stored non-tensor item."""
        self._objects.append((key, self.file(file), start, stop, codec))

    def build(self, meta: Mapping[str, Any] | None = None, *, named: bool = False) -> Catalog:
        """Return the catalog. ``named``: the reader supplied fqn and role for every tensor."""
        declared = list(self._tensors.values())
        ndim = np.fromiter((len(shape) for _, shape, *_ in declared), np.uint8, len(declared))
        dims = max(1, int(ndim.max(initial=0)))
        rows = self._columns(dims)
        views = self._views.build(named=named) if self._views is not None else None
        files = list(self._files)
        return Catalog(
            format=self.format,
            keys=list(self._tensors),
            dtype=np.fromiter((dtype.code for dtype, *_ in declared), np.uint8, len(declared)),
            ndim=ndim,
            shape=_pad([shape for _, shape, *_ in declared], dims, 1),
            row_ptr=np.searchsorted(rows["tensor"], np.arange(len(declared) + 1)).astype(np.int64),
            offsets=rows["offsets"],
            sizes=rows["sizes"],
            file=rows["file"].astype(np.int32),
            start=rows["start"],
            stop=rows["stop"],
            codec=rows["codec"].astype(np.uint8),
            rank=rows["rank"].astype(np.int32),
            replica=_replicas(rows),
            inner=rows["inner"] if rows["inner"].any() else None,
            strides=rows.get("strides"),
            files=files,
            file_stats=[stat_or_absent(self.place, name) for name in files],
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
            meta={**(meta or {}), **({"ends": self._ends} if self._ends else {})},
            views=views,
        )

    def _columns(self, dims: int) -> dict[str, Array]:
        """Return all chunks as columns, ordered by tensor, box and rank."""
        blocks = [*self._blocks, *([_as_block(self._chunks, dims)] if self._chunks or not self._blocks else [])]
        strided = any("strides" in block for block in blocks)
        joined = {
            name: np.concatenate([block[name] for block in blocks])
            for name in ("tensor", "file", "start", "stop", "codec", "rank", "inner")
        }
        joined["offsets"] = np.concatenate([box.padded(block["offsets"], dims, 0) for block in blocks])
        joined["sizes"] = np.concatenate([box.padded(block["sizes"], dims, 1) for block in blocks])
        if strided:
            joined["strides"] = np.concatenate(
                [box.padded(block.get("strides", box.row_major(block["sizes"])), dims, 0) for block in blocks]
            )
        by = [joined["rank"], *joined["sizes"].T[::-1], *joined["offsets"].T[::-1], joined["tensor"]]
        order = np.lexsort(by)
        return {name: column[order] for name, column in joined.items()}


def merge(format: str, parts: Sequence[tuple[str, str, Catalog]], meta: Mapping[str, Any]) -> Catalog:
    """Merge several catalogs into one, for checkpoints made of parts (model, optimizer …).

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
        columns["shape"].append(box.padded(part.shape, dims, 1))
        columns["offsets"].append(box.padded(part.offsets, dims, 0))
        columns["sizes"].append(box.padded(part.sizes, dims, 1))
        columns["file"].append(part.file + np.int32(len(files)))
        columns["counts"].append(np.diff(part.row_ptr))
        columns["inner"].append(np.zeros(part.chunks, np.int64) if part.inner is None else part.inner)
        if strided:
            columns["strides"].append(box.padded(_strides_of(part), dims, 0))
        files += [f"{folder}/{name}" if folder else name for name in part.files]
    known = all(part.fqns is not None for *_, part in parts)
    joined = {name: np.concatenate(values) for name, values in columns.items() if values}
    inner, counts = joined.pop("inner"), joined.pop("counts")
    starts = np.cumsum([0, *(len(part.files) for *_, part in parts)])
    ends = {
        f"{folder}/{name}" if folder else name: end
        for _, folder, part in parts
        for name, end in part.meta.get("ends", {}).items()
    }
    lost = {fact: part.meta[fact] for *_, part in parts for fact in cat.LOST_FACTS if fact in part.meta}
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
        meta={**lost, **meta, **({"ends": ends} if ends else {})},
        views=_merge_views(format, parts),
        **joined,
    )


def _merge_views(format: str, parts: Sequence[tuple[str, str, Catalog]]) -> Catalog | None:
    if all(part.views is None for *_, part in parts):
        return None
    # a part without views still brings its files so that file ids stay those of the whole
    empty = np.empty(0, np.int64)
    return merge(format, [(p, f, part.views or part.take(empty)) for p, f, part in parts], {})


def _pad(rows: Sequence[Sequence[int]], dims: int, fill: int) -> Array:
    counts = np.fromiter(map(len, rows), np.int64, len(rows))
    padded = np.full((len(rows), dims), fill, np.int64)
    padded[np.arange(dims) < counts[:, None]] = np.fromiter(chain.from_iterable(rows), np.int64, int(counts.sum()))
    return padded


def _strides_of(part: Catalog) -> Array:
    return box.row_major(part.sizes) if part.strides is None else part.strides


def _as_block(rows: Sequence[tuple[Any, ...]], dims: int) -> dict[str, Array]:
    names = ("tensor", "offsets", "sizes", "file", "start", "stop", "codec", "rank", "inner", "strides")
    columns = dict(zip(names, zip(*rows, strict=True), strict=True)) if rows else dict.fromkeys(names, ())
    block = {name: np.array(columns[name], np.int64) for name in names if name not in ("offsets", "sizes", "strides")}
    block |= {"offsets": _pad(columns["offsets"], dims, 0), "sizes": _pad(columns["sizes"], dims, 1)}
    if any(strides is not None for strides in columns["strides"]):
        filled = [t or cat.row_major(s) for t, s in zip(columns["strides"], columns["sizes"], strict=True)]
        block["strides"] = _pad(filled, dims, 0)
    return block


def _replicas(rows: Mapping[str, Array]) -> Array:
    """Number the copies of equal boxes 0, 1, … in order of rank; rows are ordered so that they are neighbours."""
    count = len(rows["tensor"])
    first = np.ones(count, bool)
    first[1:] = rows["tensor"][1:] != rows["tensor"][:-1]
    for name in ("offsets", "sizes"):
        first[1:] |= (rows[name][1:] != rows[name][:-1]).any(axis=1)
    begin = np.maximum.accumulate(np.where(first, np.arange(count), 0))
    return (np.arange(count) - begin).astype(np.int16)
