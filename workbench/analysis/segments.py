"""Divide a file into adjacent labeled segments, which attribute a flipped byte to its content.

::

    __0_0.distcp   ┌──────┬──────────────────────┬────┬──────┬─────────┬────┬ …
                   │archive  tensor 'layers.0.wq' │archive     object   │
                   └──────┴──────────────────────┴────┴──────┴─────────┴────┴ …
    x.safetensors  │ header │ tensor 'a' │ tensor 'b' │ …

Labels are ``(kind, name)``:

    ``tensor``   elements of a tensor, by its key; ``(kind, name, name …)`` if several share them (tied weights)
    ``archive``  zip headers, pickle and directory around one tensor's elements, by the tensor's key
    ``object``   a stored non-tensor object, by its key
    ``record``   a record of a file that is one archive: ``archive/data.pkl``
    ``header``   the part that a reader reads first, such as a safetensors header
    ``rest``     anything else: padding, directories, files without tensors
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from workbench.core import codecs
from workbench.core.arrays import Array, Ints
from workbench.core.dtypes import nbytes_of_codes
from workbench.core.payload import Payloads
from workbench.core.ziparchive import read_directory
from workbench.core.ziprecord import locate
from workbench.errors import WorkbenchError

Label = tuple[str, ...]

KINDS = ("tensor", "archive", "object", "record", "header", "rest")


class Segments(NamedTuple):
    """Adjacent segments of one file from byte 0 on: their lengths, and positions in the table of labels."""

    lengths: Ints
    labels: Ints


class Labels(list[Label]):
    """A table of distinct labels."""

    def __init__(self) -> None:
        super().__init__()
        self._position: dict[Label, int] = {}

    def of(self, kind: str, *names: str) -> int:
        """Return the position of a label, which is added on first use."""
        label = (kind, *names) if names else (kind, "")
        if label not in self._position:
            self._position[label] = len(self)
            self.append(label)
        return self._position[label]


class FileSegments(NamedTuple):
    """Files divided into segments.

    Attributes:
        segments: by file.
        whole: tensors stored completely in one segment, in memory order: tensor → ``(file, start)``. The blocks of that
            segment are the blocks of the tensor's fingerprint.
    """

    segments: dict[str, Segments]
    whole: dict[int, tuple[str, int]]


def cut_files(payloads: Payloads, sizes: dict[str, int], labels: Labels) -> FileSegments:
    """Divide the named files; files that are not in the catalog are one segment each.

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
    return FileSegments(result, dict(zip(catalog.tensor[alone].tolist(), places, strict=True)))


def _extents(payloads: Payloads) -> tuple[Ints, Ints, Array]:
    """Return the byte range of each chunk row's elements in its file, and whether they are in memory order."""
    catalog = payloads.catalog
    low, high = catalog.start.astype(np.int64), catalog.stop.astype(np.int64)
    inner = np.zeros_like(low) if catalog.inner is None else catalog.inner
    raw = codecs.RAW_BYTES[catalog.codec]
    reach = catalog.chunk_nbytes
    if catalog.strides is not None:
        full = (catalog.sizes > 0).all(axis=1)
        steps = ((np.maximum(catalog.sizes, 1) - 1) * catalog.strides).sum(axis=1) + 1
        reach = np.where(full, nbytes_of_codes(catalog.dtype[catalog.tensor], steps), 0)
    low[raw] += inner[raw]
    high[raw] = np.minimum(low[raw] + reach[raw], high[raw])
    exact = (catalog.codec == codecs.RAW) & (high - low == catalog.chunk_nbytes)
    if catalog.strides is not None:
        steps = np.cumprod(np.concatenate([catalog.sizes, np.ones((len(low), 1), np.int64)], axis=1)[:, ::-1], axis=1)
        exact &= ((catalog.strides == steps[:, -2::-1]) | (catalog.sizes <= 1)).all(axis=1)
    rows = np.flatnonzero((codecs.ZIP & codecs.IN_FILE)[catalog.codec])
    for row in rows[np.lexsort((catalog.start[rows], catalog.file[rows]))].tolist():  # each file is opened once
        try:
            start = payloads.straight(row)
        except WorkbenchError:  # already damaged: use the item's whole range
            start = None
        if start is not None:
            low[row], high[row], exact[row] = start, start + int(catalog.chunk_nbytes[row]), True
    return low, high, exact


def _paint_surroundings(payloads: Payloads, file: int, rows: Ints, paint: _Paint, labels: Labels) -> None:
    """Label everything except tensor elements: archives around them, objects, records, a header."""
    catalog, table = payloads.catalog, payloads.catalog.objects
    items = rows[codecs.ZIP[catalog.codec[rows]]]
    owners = [labels.of("archive", catalog.keys[t]) for t in catalog.tensor[items].tolist()]
    paint.add(catalog.start[items], catalog.stop[items], np.array(owners, np.int64))
    mine = np.flatnonzero(table.file == file)
    owners = [labels.of("object", table.keys[row]) for row in mine.tolist()]
    paint.add(table.start[mine], table.stop[mine], np.array(owners, np.int64))
    if not len(items) and not len(mine):
        _paint_head(payloads, file, rows, paint, labels)


def _paint_head(payloads: Payloads, file: int, rows: Ints, paint: _Paint, labels: Labels) -> None:
    """Label the records of a file that is one archive, or the bytes before the first tensor of another file."""
    catalog = payloads.catalog
    try:
        view = payloads.pool.window(file, 0, paint.size)
        if bytes(view[:4]) == b"PK\3\4":
            directory = read_directory(view, what=repr(catalog.files[file]))
            places = [
                (*locate(directory.view, record, directory.what), record.name) for record in directory.records.values()
            ]
            owners = [labels.of("record", name) for _, _, name in places]
            columns = np.array([place[:2] for place in places], np.int64).reshape(-1, 2)
            paint.add(columns[:, 0], columns[:, 1], np.array(owners, np.int64))
            return
    except WorkbenchError:
        pass  # not readable as an archive: its bytes are still hashed, with the label ``rest``
    if len(rows):
        first = int(catalog.start[rows].min())
        paint.add(np.array([0]), np.array([first]), np.array([labels.of("header")]))


class _Paint:
    """Ranges of one file; later ranges replace earlier ones."""

    def __init__(self, size: int, labels: Labels) -> None:
        self.size, self._labels = size, labels
        self._layers: list[tuple[Ints, Ints, Ints, bool]] = []

    def add(self, low: Ints, high: Ints, labels: Ints, *, shared: bool = False) -> None:
        """Add ranges; where several of a ``shared`` layer overlap, the label has all their names."""
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
            for a, b, owner in zip(
                first[~single].tolist(), last[~single].tolist(), owners[~single].tolist(), strict=True
            ):
                labels[a:b] = owner
            if shared:
                self._share(first, last, owners, labels)
        return Segments(np.diff(edges), labels)

    def _share(self, first: Ints, last: Ints, owners: Ints, labels: Ints) -> None:
        """Label each segment with all names whose ranges overlap it."""
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
