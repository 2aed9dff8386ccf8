"""Which ``torch.save`` archives a checkpoint holds, and in which bytes: found without reading a payload.

::

    items of chunks and objects     __0_0.distcp [0, 1600) [1600, 3200) …      named by the catalog
    whole files                     model.pt, training_args.bin                told by how they begin and end
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from workbench.core import catalog as cat
from workbench.core.dtypes import nbytes_of
from workbench.core.objects import OBJECT_LIMIT
from workbench.core.payload import PART_LIMIT, ZIP_OVERHEAD, Payloads
from workbench.core.place import Place
from workbench.core.storage import SourcePool
from workbench.errors import WorkbenchError

__all__ = ["PLAIN", "ArchiveRange", "ItemArchives", "file_archives", "looks_like_one"]

PLAIN = (cat.TORCH_ZIP, cat.TORCH_PART)  #: codecs of items that are an archive …
ZSTD = (cat.ZSTD_TORCH_ZIP, cat.ZSTD_TORCH_PART)  #: … and of those that are one inside a zstd stream


class ArchiveRange(NamedTuple):
    """An archive: bytes of a file, plain, or as one zstd stream that may grow to ``limit`` bytes."""

    pool: SourcePool
    file: int
    name: str
    start: int
    stop: int
    owner: str = ""
    limit: int | None = None


class ItemArchives:
    """Items of chunk rows and of objects, each once, in the order of the files.

    Attributes:
        nbytes: of all of them, as stored.
    """

    def __init__(self, payloads: Payloads) -> None:
        catalog, table = payloads.catalog, payloads.catalog.objects
        self._payloads = payloads
        rows = np.flatnonzero(np.isin(catalog.codec, PLAIN + ZSTD))
        objects = np.array([row for row in range(len(table.keys)) if self._is_archive(row)], np.int64)
        file, start, stop = (
            np.concatenate([getattr(catalog, name)[rows], getattr(table, name)[objects]]).astype(np.int64)
            for name in ("file", "start", "stop")
        )
        source = np.concatenate([rows, -1 - objects])  # negative: an object
        order = np.lexsort((stop, start, file))
        new = np.ones(len(order), bool)
        for column in (file, start, stop):
            column[:] = column[order]
        new[1:] = (file[1:] != file[:-1]) | (start[1:] != start[:-1]) | (stop[1:] != stop[:-1])
        self._source = source[order][new]
        self.nbytes = int((stop - start)[new].sum())

    def __iter__(self) -> Iterator[ArchiveRange]:
        return (self._of_row(row) if row >= 0 else self._of_object(-1 - row) for row in self._source)

    def _of_row(self, row: int) -> ArchiveRange:
        catalog, limit = self._payloads.catalog, None
        tensor, codec = int(catalog.tensor[row]), int(catalog.codec[row])
        if codec in ZSTD:
            nbytes = nbytes_of(catalog.dtype_of(tensor), int(np.prod(catalog.sizes[row])))
            limit = PART_LIMIT if codec == cat.ZSTD_TORCH_PART else nbytes + ZIP_OVERHEAD
        place = int(catalog.file[row]), int(catalog.start[row]), int(catalog.stop[row])
        return ArchiveRange(
            self._payloads.pool, place[0], catalog.files[place[0]], place[1], place[2], catalog.keys[tensor], limit
        )

    def _of_object(self, row: int) -> ArchiveRange:
        catalog, table = self._payloads.catalog, self._payloads.catalog.objects
        limit = OBJECT_LIMIT if table.codec[row] in ZSTD else None
        place = int(table.file[row]), int(table.start[row]), int(table.stop[row])
        return ArchiveRange(
            self._payloads.pool, place[0], catalog.files[place[0]], place[1], place[2], table.keys[row], limit
        )

    def _is_archive(self, row: int) -> bool:
        return self._payloads.catalog.objects.codec[row] in PLAIN + ZSTD or looks_like_one(self._of_object(row))


def file_archives(payloads: Payloads, place: Place | None, others: Iterable[str]) -> Iterator[ArchiveRange]:
    """Files that are one archive each.

    Args:
        place, others: names of files of the place that the catalog does not know, to look at as well.
    """
    catalog = payloads.catalog
    holds_items = set(catalog.file[np.isin(catalog.codec, PLAIN + ZSTD)].tolist())
    holds_items |= set(catalog.objects.file.tolist())
    for file, (name, stat) in enumerate(zip(catalog.files, catalog.file_stats, strict=True)):
        archive = ArchiveRange(payloads.pool, file, name, 0, stat.size)
        if file not in holds_items and stat.size > 0 and looks_like_one(archive):
            yield archive
    names = sorted(set(others) - set(catalog.files))
    if place is None or not names:
        return
    stats = [place.stat(name) for name in names]
    pool = SourcePool(place, names, stats)
    for file, (name, stat) in enumerate(zip(names, stats, strict=True)):
        archive = ArchiveRange(pool, file, name, 0, stat.size)
        if looks_like_one(archive):
            yield archive


def looks_like_one(archive: ArchiveRange) -> bool:
    """Whether it begins or ends like a zip archive; what cannot be read is left to be told later."""
    if archive.stop - archive.start < 22:
        return False
    try:
        view = archive.pool.maps().source(archive.file).view(archive.start, archive.stop)
    except WorkbenchError:
        return False
    return bytes(view[:4]) == b"PK\3\4" or bytes(view[-22:-18]) == b"PK\5\6"
