"""Which ``torch.save`` archives a checkpoint holds, and in which bytes: found without reading a payload.

::

    items of chunks and objects     __0_0.distcp [0, 1600) [1600, 3200) …      named by the catalog
    whole files with tensors        model.pt                                   recognised by how they begin and end
    whole files without tensors     training_args.bin, extra_state_rank_0.pt   as above; the caller names them
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from workbench.core import codecs
from workbench.core.dtypes import nbytes_of
from workbench.core.executors import in_order
from workbench.core.objects import OBJECT_LIMIT
from workbench.core.payload import PART_LIMIT, ZIP_OVERHEAD, Payloads
from workbench.core.place import Place, stat_or_absent
from workbench.core.storage import SourcePool
from workbench.core.ziparchive import read_directory
from workbench.errors import WorkbenchError

NOT_ONE = (".distcp", ".safetensors", ".json")  #: ends of names of files that are not one archive
FILES = 512  #: files of a folder whose headers are fetched before they are read


class ArchiveRange(NamedTuple):
    """An archive: bytes of a file, plain, or as one zstd stream that may grow to ``limit`` bytes."""

    pool: SourcePool
    file: int
    name: str
    start: int
    stop: int
    owner: str = ""
    limit: int | None = None
    listed: bool = False  #: it holds tensors of the catalog: its records are checked, whoever wrote them


class ItemArchives:
    """Items of chunk rows and of objects, each listed once, in the order of the files.

    Attributes:
        nbytes: the stored bytes of all items.
    """

    def __init__(self, payloads: Payloads) -> None:
        catalog, table = payloads.catalog, payloads.catalog.objects
        self._payloads = payloads
        rows = np.flatnonzero(codecs.ZIP[catalog.codec])
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
        tensor, codec = int(catalog.tensor[row]), codecs.TABLE[catalog.codec[row]]
        if codec.compressed:
            nbytes = nbytes_of(catalog.dtype_of(tensor), int(np.prod(catalog.sizes[row])))
            limit = nbytes + ZIP_OVERHEAD if codec.part else PART_LIMIT
        place = int(catalog.file[row]), int(catalog.start[row]), int(catalog.stop[row])
        return ArchiveRange(
            self._payloads.pool, place[0], catalog.files[place[0]], place[1], place[2], catalog.keys[tensor], limit
        )

    def _of_object(self, row: int) -> ArchiveRange:
        catalog, table = self._payloads.catalog, self._payloads.catalog.objects
        limit = OBJECT_LIMIT if codecs.COMPRESSED[table.codec[row]] else None
        place = int(table.file[row]), int(table.start[row]), int(table.stop[row])
        return ArchiveRange(
            self._payloads.pool, place[0], catalog.files[place[0]], place[1], place[2], table.keys[row], limit
        )

    def _is_archive(self, row: int) -> bool:
        return codecs.ZIP[self._payloads.catalog.objects.codec[row]] or looks_like_one(self._of_object(row))


def file_archives(payloads: Payloads, place: Place | None, others: Iterable[str]) -> Iterator[ArchiveRange]:
    """Yield the files that are one archive each.

    A file of the catalog that holds no chunk and no object is looked at only if ``others`` names it: in a selection of
    a few tensors it may be a ``.distcp`` file of many archives, whose bounds only the whole catalog knows.

    Args:
        place, others: names of files of the place to look at as well; those that the catalog reads are skipped.
    """
    catalog = payloads.catalog
    items = codecs.ZIP[catalog.codec]
    holds_items = {*catalog.file[items].tolist(), *catalog.objects.file.tolist()}
    holds_raw = set(catalog.file[~items].tolist())
    for file in sorted(holds_raw - holds_items):
        archive = ArchiveRange(payloads.pool, file, catalog.files[file], 0, catalog.file_stats[file].size, listed=True)
        if looks_like_one(archive):
            yield archive
    names = sorted(set(others) - {catalog.files[file] for file in holds_raw | holds_items})
    if place is None or not names:
        return
    stats = [stat_or_absent(place, name) for name in names]
    pool = SourcePool(place, names, stats)
    for file, (name, stat) in enumerate(zip(names, stats, strict=True)):
        archive = ArchiveRange(pool, file, name, 0, stat.size)
        if looks_like_one(archive):
            yield archive


def fetch_headers(place: Place) -> None:
    """Fetch what readers look at in a store's archives, for all files of a folder at once: pickles, local headers.

    Otherwise each rank's file would cost a reader one more round trip. Errors are left to the reads themselves.
    """
    if place.at_once == 1:
        return

    def fetch(name: str) -> None:
        with suppress(WorkbenchError):
            window = place.window(name)
            if bytes(window[:4]) == b"PK\3\4":
                archive = read_directory(window, what=repr(name))
                if (record := archive.find("data.pkl")) is not None:
                    archive.read(record)
                archive.fetch_headers()

    names = [name for name in place.files if not name.endswith(NOT_ONE)][:FILES]
    with ThreadPoolExecutor(place.at_once, thread_name_prefix="workbench-headers") as pool:
        for _ in in_order(pool, fetch, names):
            pass


def looks_like_one(archive: ArchiveRange) -> bool:
    """Return whether the range begins or ends like a zip archive; unreadable files are left to be reported later."""
    if archive.stop - archive.start < 22:
        return False
    try:
        window = archive.pool.window(archive.file, archive.start, archive.stop)
        return bytes(window[:4]) == b"PK\3\4" or bytes(window[-22:-18]) == b"PK\5\6"
    except WorkbenchError:
        return False
