"""The CRC-32 that ``torch.save`` writes for every record and ``torch.load`` never looks at.

::

    x.pt  one archive            __0_0.distcp  an archive an item, plain or inside a zstd stream
    ┌ data.pkl       crc ┐       ┌ data.pkl crc ┐┌ data.pkl crc ┐┌ …
    │ byteorder      crc │       │ data/0   crc ││ data/0   crc ││
    │ data/0 …       crc │       └──── item ────┘└──── item ────┘└
    └ directory          ┘

A CRC covers a record's payload: not the padding and local header before it, not the directory itself. Whether a file
has checksums at all is told by records that are never empty, such as ``byteorder``: their CRC is 0 only where
``torch.serialization.set_crc32_options(False)`` was in force (torch 2.6 and later). Formats without archives
(safetensors, paddle, torch before 1.6) store none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from workbench.core import catalog as cat
from workbench.core.archives import PLAIN, ArchiveRange, ItemArchives, file_archives, looks_like_one
from workbench.core.crc32 import PIECE, crc32, crc32_of_two
from workbench.core.payload import Payloads, decompress
from workbench.core.place import Place
from workbench.core.scan import Announcer, Tick, cores, in_order
from workbench.core.source import LazyBytes, Source
from workbench.core.ziparchive import Archive, read_directory
from workbench.core.ziprecord import STORED, Record, inflate, locate
from workbench.errors import WorkbenchError

__all__ = ["RecordCheck", "StoredCrcs", "archives_nbytes", "check_archives", "stored_crcs"]

Array = np.ndarray[Any, Any]
Ints = np.ndarray[Any, np.dtype[np.int64]]

TASK = 32 << 20  #: bytes that a thread takes at a time; longer records are cut and their parts' CRCs combined
ITEM_COST = 128 << 10  #: bytes that reading one more directory is worth


@dataclass(frozen=True, slots=True)
class RecordCheck:
    """One record of one archive.

    Attributes:
        status: ``ok``; ``mismatch`` (the payload is not what was written); ``absent`` (written without checksums);
            ``damaged`` (the archive, its zstd stream or a record's header contradicts itself, or cannot be read;
            ``message`` says how).
        file: relative to the checkpoint.
        record: name inside the archive; empty where the whole archive is damaged.
        start, stop: bytes of the payload in the file; for a damaged archive and inside a zstd stream, of the item.
        owner: stored name of the tensor or object whose item the archive is; empty for a whole file.
        stored, computed: CRC-32, ``None`` where there is none.
        message: why a record is damaged.
    """

    status: str
    file: str
    record: str
    start: int
    stop: int
    owner: str = ""
    stored: int | None = None
    computed: int | None = None
    message: str = ""


class StoredCrcs(NamedTuple):
    """What the directories say about the bytes behind each chunk row, no payload read.

    Attributes:
        crc: ``(N,) int64`` the record's CRC-32, or -1 where none is stored or it cannot be had without the payload.
        nbytes: ``(N,) int64`` bytes of the record; 0 where ``crc`` is -1.
        exact: ``(N,) bool`` whether the record is this chunk's elements in row-major order and nothing else. Where it
            is not (a parameter in a flat buffer), equal CRCs still mean equal chunks if ``inner``, ``strides`` and
            ``nbytes`` agree, but different CRCs do not say that it is this chunk that differs.
    """

    crc: Ints
    nbytes: Ints
    exact: Array


def check_archives(
    payloads: Payloads,
    place: Place | None = None,
    others: Iterable[str] = (),
    *,
    threads: int | None = None,
    tick: Tick | None = None,
) -> Iterator[RecordCheck]:
    """Compute the CRC-32 of every record of every ``torch.save`` archive, archive by archive.

    Archives are: the items of chunk rows and objects; files with tensors; and the files of ``others`` that look like
    one. A file without archives yields nothing.

    Args:
        payloads: the catalog and its files.
        place: the checkpoint's folder, needed for ``others``.
        others: names of files without tensors, relative to the place; those that the catalog reads are skipped.
        threads: how many work side by side; by default as many as this process may use cores, at most 8.
        tick: told the share of bytes that is done, in the caller's thread; raising there ends the pass.
    """
    items, files = ItemArchives(payloads), list(file_archives(payloads, place, others))
    total, done, crc = max(items.nbytes + sum(one.stop for one in files), 1), 0, 0
    lost: tuple[ArchiveRange, int] | None = None
    announcer = Announcer()
    workers = ThreadPoolExecutor(threads or cores(), thread_name_prefix="workbench-crc")
    with payloads.pool.keeping(), workers as pool:
        try:
            for nbytes, results in in_order(pool, partial(_run, announcer), _tasks(chain(items, files))):
                for result in results:
                    if isinstance(result, RecordCheck):
                        yield result
                        continue
                    part, found = result
                    if isinstance(found, WorkbenchError) and lost != (part.archive, part.start):
                        lost = part.archive, part.start
                        yield _damaged(part.archive, part.record.name, str(found))
                    if isinstance(found, WorkbenchError) or lost == (part.archive, part.start):
                        continue  # told once for all its parts
                    crc = found if part.first == part.start else crc32_of_two(crc, found, part.last - part.first)
                    if part.last == part.stop:
                        yield _verdict(part.archive, part.record, part.start, part.stop, crc, part.checked)
                done += nbytes
                if tick is not None:
                    tick(min(done / total, 1.0))
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
            announcer.restore()


def archives_nbytes(payloads: Payloads, place: Place | None = None, others: Iterable[str] = ()) -> int:
    """Bytes that :func:`check_archives` will read; no payload is."""
    return ItemArchives(payloads).nbytes + sum(one.stop for one in file_archives(payloads, place, others))


def stored_crcs(payloads: Payloads) -> StoredCrcs:
    """The stored CRC-32 behind each chunk row; directories are read, payloads are not.

    Archives that cannot be read, inside a zstd stream or in another byte order count as having none.
    """
    catalog = payloads.catalog
    result = StoredCrcs(
        np.full(catalog.chunks, -1, np.int64), np.zeros(catalog.chunks, np.int64), np.zeros(catalog.chunks, bool)
    )
    rows = np.flatnonzero(np.isin(catalog.codec, PLAIN))
    for row in rows[np.lexsort((catalog.start[rows], catalog.file[rows]))].tolist():  # each file is opened once
        try:
            item, _ = payloads.item(row)
        except WorkbenchError:
            continue
        if item.crc is not None and item.byteorder == "little":
            whole = item.storage_offset == 0 and _is_row_major(item.shape, item.stride)
            whole &= (
                not (item.conj or item.neg)
                and item.nbytes == catalog.chunk_nbytes[row]
                and catalog.codec[row] == cat.TORCH_ZIP
            )
            result.crc[row], result.nbytes[row], result.exact[row] = item.crc, item.nbytes, whole
    raw = np.flatnonzero(catalog.codec == cat.RAW)
    for file in np.unique(catalog.file[raw]).tolist():
        _from_file(payloads, file, raw[catalog.file[raw] == file], result)
    return result


# ---- tasks -----------------------------------------------------------------------------------------------------------


class _Part(NamedTuple):
    """Bytes ``[first, last)`` of a file that are a part of one record's payload ``[start, stop)``."""

    archive: ArchiveRange
    record: Record
    start: int
    stop: int
    first: int
    last: int
    checked: bool


_Task = list[ArchiveRange | _Part | RecordCheck]
_PartCrc = tuple[_Part, int | WorkbenchError]


def _tasks(archives: Iterable[ArchiveRange]) -> Iterator[tuple[int, _Task]]:
    """Bytes and what to do with them: small archives several at a time, large ones record by record."""
    task: _Task = []
    weight = nbytes = 0
    for archive in archives:
        whole = archive.stop - archive.start <= TASK or archive.limit is not None
        for one, size in [(archive, archive.stop - archive.start)] if whole else _records(archive):
            if task and weight + size > TASK:
                yield nbytes, task
                task, weight, nbytes = [], 0, 0
            task.append(one)
            weight, nbytes = weight + size + ITEM_COST, nbytes + size
    if task:
        yield nbytes, task


def _records(archive: ArchiveRange) -> Iterator[tuple[_Part | RecordCheck, int]]:
    """The records of a large archive, cut; what cannot be read as results already."""
    try:
        window = archive.pool.window(archive.file, archive.start, archive.stop)
        directory = read_directory(window, what=repr(archive.name))
    except WorkbenchError as error:
        yield _damaged(archive, "", str(error)), archive.stop - archive.start
        return
    if directory.prefix is None:
        return
    for record in directory.records.values():
        try:
            start, stop = locate(directory.view, record, directory.what)
        except WorkbenchError as error:
            yield _damaged(archive, record.name, str(error)), record.csize
            continue
        start, stop = archive.start + start, archive.start + stop
        if record.method != STORED or start == stop:
            yield _of_record(archive, directory, record), record.csize
            continue
        for first in range(start, stop, TASK):
            last = min(first + TASK, stop)
            yield _Part(archive, record, start, stop, first, last, directory.has_checksums), last - first


# ---- in a thread -----------------------------------------------------------------------------------------------------


def _run(announcer: Announcer, task: tuple[int, _Task]) -> tuple[int, list[RecordCheck | _PartCrc]]:
    results: list[RecordCheck | _PartCrc] = []
    for one in task[1]:
        if isinstance(one, RecordCheck):
            results.append(one)
        elif isinstance(one, _Part):
            results.append(_of_part(one, announcer))
        else:
            results += _of_archive(one, announcer)
    return task[0], results


def _of_part(part: _Part, announcer: Announcer) -> _PartCrc:
    if not part.checked:
        return part, 0
    try:
        return part, _crc(announcer.announce(part.archive.pool, part.archive.file), part.first, part.last)
    except WorkbenchError as error:
        return part, error


def _crc(source: Source, start: int, stop: int) -> int:
    """The CRC-32 of a file's bytes."""
    crc, buffer = 0, np.empty(min(PIECE, stop - start), np.uint8)
    for at in range(start, stop, PIECE):
        flat = buffer[: min(PIECE, stop - at)]
        source.read_into(flat, at)
        crc = crc32(flat, crc)
    return crc


def _of_archive(archive: ArchiveRange, announcer: Announcer) -> Iterator[RecordCheck]:
    """Every record of an archive that is read whole."""
    what = f"item at byte {archive.start:,} of {archive.name!r}" if archive.owner else repr(archive.name)
    try:
        source = announcer.announce(archive.pool, archive.file)
        if archive.stop > source.size:
            short = archive.stop - source.size
            yield _damaged(archive, "", f"{what} ends {short:,} bytes beyond the end of the file; it is cut short")
            return
        data: LazyBytes | Array = LazyBytes(source, archive.start, archive.stop)
        if archive.limit is not None:
            data = decompress(data[:], archive.limit, what=what)
        directory = read_directory(data, what=what)
    except WorkbenchError as error:
        yield _damaged(archive, "", str(error))
        return
    if directory.prefix is None and not archive.owner:
        return  # a zip archive of somebody else's
    for record in directory.records.values():
        yield _of_record(archive, directory, record)


def _of_record(archive: ArchiveRange, directory: Archive, record: Record) -> RecordCheck:
    try:
        start, stop = locate(directory.view, record, directory.what)
        place = archive.start + start, archive.start + stop
        crc = 0
        if archive.limit is not None:
            place = archive.start, archive.stop
        if not directory.has_checksums:
            pass
        elif record.method == STORED and archive.limit is None:
            crc = _crc(archive.pool.source(archive.file), *place)
        else:
            content: Any = directory.view[start:stop]
            if record.method != STORED:
                content = inflate(content, record, directory.what)
            crc = crc32(np.frombuffer(content, np.uint8))
    except WorkbenchError as error:
        return _damaged(archive, record.name, str(error))
    return _verdict(archive, record, *place, crc, directory.has_checksums)


def _verdict(archive: ArchiveRange, record: Record, start: int, stop: int, crc: int, checked: bool) -> RecordCheck:
    if not checked:
        return RecordCheck("absent", archive.name, record.name, start, stop, archive.owner)
    status = "ok" if crc == record.crc else "mismatch"
    return RecordCheck(status, archive.name, record.name, start, stop, archive.owner, record.crc, crc)


def _damaged(archive: ArchiveRange, record: str, message: str) -> RecordCheck:
    return RecordCheck("damaged", archive.name, record, archive.start, archive.stop, archive.owner, message=message)


# ---- stored CRCs of a file that is one archive -----------------------------------------------------------------------


def _from_file(payloads: Payloads, file: int, rows: Ints, result: StoredCrcs) -> None:
    """Rows that are raw ranges of an archive's records."""
    catalog = payloads.catalog
    archive = ArchiveRange(payloads.pool, file, catalog.files[file], 0, catalog.file_stats[file].size)
    if not looks_like_one(archive):
        return
    try:
        directory = read_directory(payloads.pool.window(file, 0, archive.stop), what=repr(archive.name))
        if directory.prefix is None or not directory.has_checksums or directory.byteorder != "little":
            return
        records = {locate(directory.view, record, directory.what): record.crc
                   for record in directory.records.values() if record.method == STORED}  # fmt: skip
    except WorkbenchError:
        return
    for row in rows.tolist():
        place = int(catalog.start[row]), int(catalog.stop[row])
        if (crc := records.get(place)) is not None:
            whole = place[1] - place[0] == catalog.chunk_nbytes[row]
            whole &= catalog.inner is None or catalog.inner[row] == 0
            dims = int(catalog.ndim[catalog.tensor[row]])
            if catalog.strides is not None:
                strides, sizes = catalog.strides[row, :dims].tolist(), catalog.sizes[row, :dims].tolist()
                whole &= _is_row_major(sizes, strides)
            result.crc[row], result.nbytes[row], result.exact[row] = crc, place[1] - place[0], whole


def _is_row_major(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether elements lie one after the other; the stride of an axis of one step says nothing."""
    return all(n <= 1 or a == b for n, a, b in zip(sizes, strides, cat.row_major(sizes), strict=True))
