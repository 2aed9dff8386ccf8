"""A file cut into segments without a gap, each with a label that says what it is: how a flipped byte gets a name.

::

    __0_0.distcp   ┌──────┬──────────────────────┬────┬──────┬─────────┬────┬ …
                   │archive  tensor 'layers.0.wq' │archive     object   │
                   └──────┴──────────────────────┴────┴──────┴─────────┴────┴ …
    x.safetensors  │ header │ tensor 'a' │ tensor 'b' │ …

Labels are ``(kind, name)``:

    ``tensor``   elements of a tensor, by its key; ``(kind, name, name …)`` where several share them (tied weights)
    ``archive``  zip headers, pickle and directory around one tensor's elements, by the tensor's key
    ``object``   a stored object that is no tensor, by its key
    ``record``   a record of a file that is one archive: ``archive/data.pkl``
    ``header``   what the file's reader reads first: a safetensors header
    ``rest``     anything else: padding, directories, files that hold no tensor
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from workbench.core import catalog as cat
from workbench.core.dtypes import ALL
from workbench.core.payload import Payloads
from workbench.core.ziparchive import read_directory
from workbench.core.ziprecord import locate
from workbench.errors import WorkbenchError

__all__ = ["KINDS", "Label", "Labels", "Segments", "cut_files"]

Array = np.ndarray[Any, Any]
Ints = np.ndarray[Any, np.dtype[np.int64]]
Label = tuple[str, ...]

KINDS = ("tensor", "archive", "object", "record", "header", "rest")
_ARCHIVES = (cat.TORCH_ZIP, cat.ZSTD_TORCH_ZIP, cat.TORCH_PART, cat.ZSTD_TORCH_PART)
_BITS = np.array([dtype.bits for dtype in ALL], np.int64)


class Segments(NamedTuple):
    """Segments of one file, one after the other from byte 0: their lengths, and positions in the table of labels."""

    lengths: Ints
    labels: Ints


class Labels(list[Label]):
    """A table of distinct labels."""

    def __init__(self) -> None:
        super().__init__()
        self._position: dict[Label, int] = {}

    def of(self, kind: str, *names: str) -> int:
        """The position of a label, added at its first use."""
        label = (kind, *names) if names else (kind, "")
        if label not in self._position:
            self._position[label] = len(self)
            self.append(label)
        return self._position[label]


class Cut(NamedTuple):
    """Files cut into segments.

    Attributes:
        segments: by file.
        whole: tensors that one segment holds from the first element to the last, as they lie in memory: tensor →
            ``(file, start)``. The blocks of that segment are those of the tensor's fingerprint.
    """

    segments: dict[str, Segments]
    whole: dict[int, tuple[str, int]]


def cut_files(payloads: Payloads, sizes: dict[str, int], labels: Labels) -> Cut:
    """Cut the named files; those that the catalog does not know are one segment each.

    Args:
        payloads: the catalog and its files; archives' directories are read.
        sizes: bytes of each file.
        labels: the table to add to.
    """
    catalog = payloads.catalog
    low, high, exact = _extents(payloads)
    by_file = np.argsort(catalog.file, kind="stable")
    bounds = np.searchsorted(catalog.file[by_file], np.arange(len(catalog.files) + 1))
    known = {name: number for number, name in enumerate(catalog.files)}
    result: dict[str, Segments] = {}
    for name, size in sizes.items():
        paint = _Paint(size, labels)
        if (file := known.get(name)) is not None:
            rows = by_file[bounds[file] : bounds[file + 1]]
            _paint_surroundings(payloads, file, rows, paint, labels)
            names = [catalog.keys[t] for t in catalog.tensor[rows].tolist()]
            owners = [labels.of("tensor", key) for key in names]
            paint.add(low[rows], high[rows], np.array(owners, np.int64), shared=True)
        result[name] = paint.segments()
    alone = np.flatnonzero(exact & (np.diff(catalog.row_ptr)[catalog.tensor] == 1))
    alone = alone[catalog.chunk_nbytes[alone] == catalog.tensor_nbytes[catalog.tensor[alone]]]
    places = [(catalog.files[f], a) for f, a in zip(catalog.file[alone].tolist(), low[alone].tolist(), strict=True)]
    return Cut(result, dict(zip(catalog.tensor[alone].tolist(), places, strict=True)))


def _extents(payloads: Payloads) -> tuple[Ints, Ints, Array]:
    """Bytes of their files in which the elements of each chunk row lie, and whether just as in memory."""
    catalog = payloads.catalog
    low, high = catalog.start.astype(np.int64), catalog.stop.astype(np.int64)
    inner = np.zeros_like(low) if catalog.inner is None else catalog.inner
    raw = np.isin(catalog.codec, (cat.RAW, cat.RAW_BE, *cat.LAZY))
    reach = catalog.chunk_nbytes
    if catalog.strides is not None:
        full = (catalog.sizes > 0).all(axis=1)
        steps = ((np.maximum(catalog.sizes, 1) - 1) * catalog.strides).sum(axis=1) + 1
        reach = np.where(full, (steps * _BITS[catalog.dtype[catalog.tensor]] + 7) // 8, 0)
    low[raw] += inner[raw]
    high[raw] = np.minimum(low[raw] + reach[raw], high[raw])
    exact = (catalog.codec == cat.RAW) & (high - low == catalog.chunk_nbytes)
    if catalog.strides is not None:
        steps = np.cumprod(np.concatenate([catalog.sizes, np.ones((len(low), 1), np.int64)], axis=1)[:, ::-1], axis=1)
        exact &= ((catalog.strides == steps[:, -2::-1]) | (catalog.sizes <= 1)).all(axis=1)
    rows = np.flatnonzero(np.isin(catalog.codec, (cat.TORCH_ZIP, cat.TORCH_PART)))
    for row in rows[np.lexsort((catalog.start[rows], catalog.file[rows]))].tolist():  # each file is opened once
        try:
            start = payloads.straight(row)
        except WorkbenchError:  # damaged already: the item as a whole stands for it
            start = None
        if start is not None:
            low[row], high[row], exact[row] = start, start + int(catalog.chunk_nbytes[row]), True
    return low, high, exact


def _paint_surroundings(payloads: Payloads, file: int, rows: Ints, paint: _Paint, labels: Labels) -> None:
    """What is not tensor elements: archives around them, objects, records, a header."""
    catalog, table = payloads.catalog, payloads.catalog.objects
    items = rows[np.isin(catalog.codec[rows], _ARCHIVES)]
    owners = [labels.of("archive", catalog.keys[t]) for t in catalog.tensor[items].tolist()]
    paint.add(catalog.start[items], catalog.stop[items], np.array(owners, np.int64))
    mine = np.flatnonzero(table.file == file)
    owners = [labels.of("object", table.keys[row]) for row in mine.tolist()]
    paint.add(table.start[mine], table.stop[mine], np.array(owners, np.int64))
    if not len(items) and not len(mine):
        _paint_head(payloads, file, rows, paint, labels)


def _paint_head(payloads: Payloads, file: int, rows: Ints, paint: _Paint, labels: Labels) -> None:
    """The records of a file that is one archive, or what lies before the first tensor of another."""
    catalog = payloads.catalog
    try:
        view = payloads.pool.window(file, 0, paint.size)
        if bytes(view[:4]) == b"PK\3\4":
            directory = read_directory(view, what=repr(catalog.files[file]))
            places = [(*locate(directory.view, record, directory.what), record.name)
                      for record in directory.records.values()]  # fmt: skip
            owners = [labels.of("record", name) for _, _, name in places]
            columns = np.array([place[:2] for place in places], np.int64).reshape(-1, 2)
            paint.add(columns[:, 0], columns[:, 1], np.array(owners, np.int64))
            return
    except WorkbenchError:
        pass  # unreadable as an archive: its bytes are still hashed, under the label of the rest
    if len(rows):
        first = int(catalog.start[rows].min())
        paint.add(np.array([0]), np.array([first]), np.array([labels.of("header")]))


class _Paint:
    """Ranges of one file, the later over the earlier."""

    def __init__(self, size: int, labels: Labels) -> None:
        self.size, self._labels = size, labels
        self._layers: list[tuple[Ints, Ints, Ints, bool]] = []

    def add(self, low: Ints, high: Ints, labels: Ints, *, shared: bool = False) -> None:
        """Paint ranges; where several of a ``shared`` layer meet, all their names count."""
        low, high = np.clip(low, 0, self.size), np.clip(high, 0, self.size)
        keep = high > low
        self._layers.append((low[keep].astype(np.int64), high[keep].astype(np.int64), labels[keep], shared))

    def segments(self) -> Segments:
        ends = [np.array([0, self.size], np.int64)]
        ends += [column for low, high, *_ in self._layers for column in (low, high)]
        edges = np.unique(np.concatenate(ends))
        labels = np.full(len(edges) - 1, self._labels.of("rest"), np.int64)
        for low, high, owners, shared in self._layers:
            first, last = np.searchsorted(edges, low), np.searchsorted(edges, high)
            single = last == first + 1
            labels[first[single]] = owners[single]
            for a, b, owner in zip(first[~single].tolist(), last[~single].tolist(), owners[~single].tolist(),
                                   strict=True):  # fmt: skip
                labels[a:b] = owner
            if shared:
                self._share(first, last, owners, labels)
        return Segments(np.diff(edges), labels)

    def _share(self, first: Ints, last: Ints, owners: Ints, labels: Ints) -> None:
        """Name all whose ranges meet in a segment."""
        steps = np.zeros(len(labels) + 1, np.int64)
        np.add.at(steps, first, 1)
        np.add.at(steps, last, -1)
        many = np.cumsum(steps[:-1]) > 1
        if not many.any():
            return
        before = np.concatenate([[0], np.cumsum(many)])
        names: dict[int, list[str]] = {}
        for row in np.flatnonzero(before[last] > before[first]).tolist():
            name = self._labels[int(owners[row])][1]
            for at in (first[row] + np.flatnonzero(many[first[row] : last[row]])).tolist():
                names.setdefault(at, []).append(name)
        for at, found in names.items():
            labels[at] = self._labels.of("tensor", *dict.fromkeys(found))
