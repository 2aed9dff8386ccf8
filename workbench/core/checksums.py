"""The CRC-32 that ``torch.save`` writes for every record and ``torch.load`` never checks.

::

    x.pt  one archive            __0_0.distcp  one archive per item, plain or inside a zstd stream
    ┌ data.pkl       crc ┐       ┌ data.pkl crc ┐┌ data.pkl crc ┐┌ …
    │ byteorder      crc │       │ data/0   crc ││ data/0   crc ││
    │ data/0 …       crc │       └──── item ────┘└──── item ────┘└
    └ directory          ┘

A CRC covers a record's payload: not the padding and local header before it, not the directory itself. Records that are
never empty, such as ``byteorder``, show whether a file has checksums at all: their CRC is 0 only if
``torch.serialization.set_crc32_options(False)`` was set (torch 2.6 and later). Formats without archives (safetensors,
paddle, torch before 1.6) store none.

Most bytes are elements, which a pass over the values reads too. It then computes their CRC-32 as well
(:class:`Summed`), and they are read only once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from workbench.core import catalog as cat
from workbench.core import codecs
from workbench.core.archives import ArchiveRange, ItemArchives, file_archives, looks_like_one
from workbench.core.arrays import Array, Ints
from workbench.core.crc32 import PIECE, crc32, crc32_of_two, crc32c, masked
from workbench.core.executors import ordered
from workbench.core.parts import storable
from workbench.core.payload import Payloads, decompress
from workbench.core.payload import inflate as inflate_stream
from workbench.core.place import Place
from workbench.core.scan import Progress, workers
from workbench.core.source import LazyBytes, Source
from workbench.core.storage import Announcer, SourcePool
from workbench.core.words import plural
from workbench.core.ziparchive import Archive, read_directory
from workbench.core.ziprecord import STORED, ZipRecord, inflate, inflated_crc, locate
from workbench.errors import CorruptError, WorkbenchError

TASK = 32 << 20  #: bytes in one task of a thread; longer records are cut and their parts' CRCs combined
ITEM_COST = 128 << 10  #: bytes whose reading costs as much as one more directory
ENDS = 64 << 10  #: bytes at either end of an item that are read for its directory and its small records


@storable
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
        stored, computed: CRC-32, or ``None``.
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
    """The stored CRC-32s of the bytes behind each chunk row, from the directories; no payload is read.

    Attributes:
        crc: ``(N,) int64`` the record's CRC-32, or -1 if none is stored, or if it cannot be found without the payload.
        nbytes: ``(N,) int64`` bytes of the record; 0 where ``crc`` is -1.
        exact: ``(N,) bool`` whether the record is this chunk's elements in row-major order and nothing else. Where it
            is not (a parameter in a flat buffer), equal CRCs still mean equal chunks if ``inner``, ``strides`` and
            ``nbytes`` agree, but different CRCs do not say that it is this chunk that differs.
    """

    crc: Ints
    nbytes: Ints
    exact: Array


class SummedTable(NamedTuple):
    """Chunk rows whose payload another pass sums, by file and first byte.

    Attributes:
        row: ``(K,)`` chunk row.
        file: ``(K,)`` its file, ascending.
        start: ``(K,)`` first byte of what is stored of it: the item, or the record.
        nbytes: ``(K,)`` bytes of its elements.
    """

    row: Ints
    file: Ints
    start: Ints
    nbytes: Ints

    def of_files(self, files: Iterable[int]) -> SummedTable:
        """Return the rows in these files."""
        kept = np.isin(self.file, list(files))
        return SummedTable(*(column[kept] for column in self))

    def within(self, file: int, start: int, stop: int) -> range:
        """Return the positions of rows that begin in a range of a file."""
        low, high = np.searchsorted(self.file, file), np.searchsorted(self.file, file, side="right")
        first, last = np.searchsorted(self.start[low:high], (start, stop)).tolist()
        return range(int(low) + first, int(low) + last)

    def find(self, file: int, start: int, nbytes: int) -> int | None:
        """Return the chunk row of ``nbytes`` bytes that begins at ``start``, if there is one."""
        found = (int(self.row[at]) for at in self.within(file, start, start + 1) if self.nbytes[at] == nbytes)
        return next(found, None)


class Summed:
    """CRC-32 of chunks, computed by a pass that reads their elements anyway.

    Attributes:
        rows: ``(N,) bool`` chunks that the pass is to sum, whole and in the order in which they are stored.
        table: where these are.
    """

    def __init__(self, payloads: Payloads) -> None:
        """Choose the chunks: plain items, and records of archives that are one chunk each."""
        c = payloads.catalog
        listed = [one.file for one in file_archives(payloads, None, ())]
        raw = (c.codec == codecs.RAW) & np.isin(c.file, listed) & (c.stop - c.start == c.chunk_nbytes)
        self.rows = ((c.codec == codecs.TORCH_ZIP) | raw) & (c.chunk_nbytes > 0) & ~c.inflated
        rows = np.flatnonzero(self.rows)
        rows = rows[np.lexsort((c.start[rows], c.file[rows]))]
        columns = (c.file, c.start, c.chunk_nbytes)
        self.table = SummedTable(rows, *(column[rows].astype(np.int64) for column in columns))
        self._at, self._nbytes, self._crc = (np.full(c.chunks, -1, np.int64) for _ in range(3))

    @property
    def nbytes(self) -> int:
        """Bytes of these chunks, each range of a file once."""
        new = np.ones(len(self.table.row), bool)
        new[1:] = (np.diff(self.table.file) != 0) | (np.diff(self.table.start) != 0)
        return int(self.table.nbytes[new].sum())

    def add(self, row: int, at: int, nbytes: int, crc: int) -> None:
        """Record the CRC-32 of the ``nbytes`` bytes of a chunk from byte ``at`` of its file on."""
        self._at[row], self._nbytes[row], self._crc[row] = at, nbytes, crc

    def of(self, row: int, start: int, stop: int) -> int | None:
        """Return the CRC-32 of bytes ``[start, stop)`` of a chunk's file, if that is what was recorded of it."""
        known = self._at[row] == start and self._nbytes[row] == stop - start
        return int(self._crc[row]) if known else None


@storable
@dataclass(frozen=True, slots=True)
class _Left:
    """A record whose CRC-32 another pass computes; ``check`` is the result without it."""

    row: int
    check: RecordCheck


def check_archives(
    payloads: Payloads,
    place: Place | None = None,
    others: Iterable[str] = (),
    *,
    summed: Summed | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Iterator[RecordCheck]:
    """Compute the CRC-32 of every record of every ``torch.save`` archive, archive by archive.

    Archives are: the items of chunk rows and objects; files with tensors; and the files of ``others`` that look like
    one. A file without archives yields nothing.

    Args:
        payloads: the catalog and its files.
        place: the checkpoint's folder, needed for ``others``.
        others: names of files without tensors, relative to the place; those that the catalog reads are skipped.
        summed: the CRC-32 of chunks that were read before; they are read here only if theirs is unknown.
        threads: number of threads; by default the cores available to this process, up to 8.
        progress: called with the fraction of bytes done, in the caller's thread; raise an exception to cancel.
    """
    items, files = ItemArchives(payloads), list(file_archives(payloads, place, others))
    table = None if summed is None else summed.table
    total = items.nbytes + sum(one.stop for one in files) - (0 if summed is None else summed.nbytes)
    unknown: list[tuple[int, _Task]] = []
    with payloads.pool.keeping():
        for one in _results(payloads, _tasks(chain(items, files), table), table, total, threads, progress):
            if isinstance(one, RecordCheck):
                yield one
                continue
            assert summed is not None
            check, row = one.check, one.row
            if (crc := summed.of(row, check.start, check.stop)) is not None:
                yield _judged(check, crc)
            else:
                archive = ArchiveRange(
                    payloads.pool, int(payloads.catalog.file[row]), check.file, check.start, check.stop, check.owner
                )
                size, stored = check.stop - check.start, check.stored or 0
                record = ZipRecord(check.record, STORED, 0, stored, size, size, 0, 0)
                parts = _parts(archive, record, check.start, check.stop, True)
                unknown += [(part.last - part.first, [part]) for part in parts]
        size = sum(nbytes for nbytes, _ in unknown)
        for one in _results(payloads, unknown, None, size, threads, None):
            assert isinstance(one, RecordCheck)
            yield one
        yield from _check_ranges(payloads)


def _results(
    payloads: Payloads,
    tasks: Iterable[tuple[int, _Task]],
    table: SummedTable | None,
    total: int,
    threads: int | None,
    progress: Progress | None,
) -> Iterator[RecordCheck | _Left]:
    """Run tasks that read about ``total`` bytes, and join the parts of long records."""
    done = crc = 0
    lost: tuple[ArchiveRange, int] | None = None
    results_of = ordered(
        _CheckRecords(table),
        tasks,
        total,
        threads=workers(payloads.pool, threads),
        at_once=threads or payloads.pool.at_once,
        name="workbench-crc",
    )
    with closing(results_of):
        for (nbytes, task), results in results_of:
            for part, result in zip(task, results, strict=True):
                if isinstance(result, list):
                    yield from result
                    continue
                assert isinstance(part, _PayloadPart)
                if isinstance(result, WorkbenchError) and lost != (part.archive, part.start):
                    lost = part.archive, part.start
                    yield _damaged(part.archive, part.record.name, str(result))
                if isinstance(result, WorkbenchError) or lost == (part.archive, part.start):
                    continue  # reported once for all its parts
                crc = result if part.first == part.start else crc32_of_two(crc, result, part.last - part.first)
                if part.last == part.stop:
                    yield _verdict(part.archive, part.record, part.start, part.stop, crc, part.checked)
            done += nbytes
            if progress is not None:
                progress(min(done / max(total, 1), 1.0))


def _check_ranges(payloads: Payloads) -> Iterator[RecordCheck]:
    """Compute the CRC-32C of the chunks that have one: masked in ``meta["crc32c"]``, by file and first byte, or, of the
    tensors in ``meta["chunk_crc32c"]``, in the four bytes behind a chunk (``behind``) or at the end of its stream."""
    catalog = payloads.catalog
    stored: dict[str, dict[str, int]] = catalog.meta.get("crc32c", {})
    chunked: dict[str, str] = catalog.meta.get("chunk_crc32c", {})
    for row in np.lexsort((catalog.start, catalog.file)) if stored or chunked else ():
        number, start, stop = int(catalog.file[row]), int(catalog.start[row]), int(catalog.stop[row])
        name, key = catalog.files[number], catalog.keys[catalog.tensor[row]]
        expected = stored.get(name, {}).get(str(start))
        how = "" if codecs.TABLE[catalog.codec[row]].within else chunked.get(key, "")  # a node has its own
        if (expected is None and not how) or start == stop:
            continue
        try:
            source, crc = payloads.pool.source(number), 0
            if how == "inside":
                data = _stream(
                    source.read(start, stop),
                    int(catalog.codec[row]),
                    catalog.meta,
                    f"tensor {key!r}: item at byte {start:,} of {name!r}",
                )
                crc, expected = crc32c(data[:-4]), int.from_bytes(data[-4:].tobytes(), "little")
            else:
                for first in range(start, stop, TASK):
                    last = min(first + TASK, stop)
                    part = crc32c(source.read(first, last))
                    crc = part if first == start else crc32_of_two(crc, part, last - first, castagnoli=True)
                if how:
                    expected = int.from_bytes(bytes(source.read(stop, stop + 4)), "little")
                else:
                    crc = masked(crc)
        except WorkbenchError as error:
            yield RecordCheck("damaged", name, key, start, stop, key, message=str(error))
            continue
        yield RecordCheck("ok" if crc == expected else "mismatch", name, key, start, stop, key, expected, crc)


def _stream(data: Array, codec: int, meta: Mapping[str, Any], what: str) -> Array:
    """Return the content of a compressed chunk, with the checksum at its end."""
    limit = int(meta["largest_chunk"])
    found = (inflate_stream if codec == codecs.GZIP else decompress)(data, limit, what=what)
    if len(found) < 4:
        raise CorruptError(f"{what} becomes {plural(len(found), 'byte')}, fewer than its checksum has")
    return found


def archives_nbytes(payloads: Payloads, place: Place | None = None, others: Iterable[str] = ()) -> int:
    """Return the bytes of all archives, without reading payloads; :func:`check_archives` reads those not summed."""
    return ItemArchives(payloads).nbytes + sum(one.stop for one in file_archives(payloads, place, others))


def stored_crcs(payloads: Payloads) -> StoredCrcs:
    """Return the stored CRC-32 of each chunk row; directories are read, payloads are not.

    Archives that cannot be read, inside a zstd stream or in another byte order count as having none.
    """
    catalog = payloads.catalog
    result = StoredCrcs(
        np.full(catalog.chunks, -1, np.int64), np.zeros(catalog.chunks, np.int64), np.zeros(catalog.chunks, bool)
    )
    rows = np.flatnonzero((codecs.ZIP & codecs.IN_FILE)[catalog.codec])
    for row in rows[np.lexsort((catalog.start[rows], catalog.file[rows]))].tolist():  # each file is opened once
        try:
            item, _ = payloads.item(row)
        except WorkbenchError:
            continue
        if item.crc is not None and item.byteorder == "little":
            whole = item.storage_offset == 0 and cat.is_row_major(item.shape, item.stride)
            whole &= (
                not (item.conj or item.neg)
                and item.nbytes == catalog.chunk_nbytes[row]
                and catalog.codec[row] == codecs.TORCH_ZIP
            )
            result.crc[row], result.nbytes[row], result.exact[row] = item.crc, item.nbytes, whole
    raw = np.flatnonzero(catalog.codec == codecs.RAW)
    for file in np.unique(catalog.file[raw]).tolist():
        _from_file(payloads, file, raw[catalog.file[raw] == file], result)
    return result


# ---- tasks -----------------------------------------------------------------------------------------------------------


class _PayloadPart(NamedTuple):
    """Bytes ``[first, last)`` of a file that are a part of one record's payload ``[start, stop)``."""

    archive: ArchiveRange
    record: ZipRecord
    start: int
    stop: int
    first: int
    last: int
    checked: bool


_Task = list[ArchiveRange | _PayloadPart | RecordCheck | _Left]


def _tasks(archives: Iterable[ArchiveRange], table: SummedTable | None) -> Iterator[tuple[int, _Task]]:
    """Yield each task with its bytes: small archives several at a time, large ones record by record."""
    task: _Task = []
    weight = nbytes = 0
    for archive in archives:
        left = archive.stop - archive.start - sum(stop - start for start, stop in _summed_spans(archive, table))
        whole = left <= TASK or archive.limit is not None
        for one, size in [(archive, left)] if whole else _records(archive, table):
            if task and weight + size > TASK:
                yield nbytes, task
                task, weight, nbytes = [], 0, 0
            task.append(one)
            weight, nbytes = weight + size + ITEM_COST, nbytes + size
    if task:
        yield nbytes, task


def _records(
    archive: ArchiveRange, table: SummedTable | None
) -> Iterator[tuple[_PayloadPart | RecordCheck | _Left, int]]:
    """Yield the records of a large archive, cut into parts; unreadable records are yielded as results."""
    try:
        window = archive.pool.window(archive.file, archive.start, archive.stop)
        directory = read_directory(window, what=repr(archive.name))
    except WorkbenchError as error:
        yield _damaged(archive, "", str(error)), archive.stop - archive.start
        return
    if directory.prefix is None and not archive.listed:
        return
    row_of = _rows_of(archive, table)
    for record in directory.records.values():
        try:
            start, stop = locate(directory.view, record, directory.what)
        except WorkbenchError as error:
            yield _damaged(archive, record.name, str(error)), record.csize
            continue
        start, stop = archive.start + start, archive.start + stop
        if record.method != STORED or start == stop or row_of(record, start) is not None:
            one = _of_record(archive, directory, record, row_of)
            yield one, record.csize if isinstance(one, RecordCheck) else 0
            continue
        for part in _parts(archive, record, start, stop, directory.has_checksums):
            yield part, part.last - part.first


def _parts(archive: ArchiveRange, record: ZipRecord, start: int, stop: int, checked: bool) -> Iterator[_PayloadPart]:
    for first in range(start, stop, TASK):
        yield _PayloadPart(archive, record, start, stop, first, min(first + TASK, stop), checked)


_RowOf = Callable[[ZipRecord, int], int | None]


def _rows_of(archive: ArchiveRange, table: SummedTable | None) -> _RowOf:
    """Return a function from a record, and its first byte in the file, to the chunk that it is, if that is summed.

    Of an item, it is the record of as many bytes; if that is another one, what is recorded of the chunk does not fit.
    """
    if table is None or archive.limit is not None or not (archive.owner or archive.listed):
        return lambda record, start: None
    if not archive.owner:
        return lambda record, start: table.find(archive.file, start, record.csize) if record.method == STORED else None
    at = table.within(archive.file, archive.start, archive.start + 1)[:1]
    rows = {int(nbytes): int(row) for nbytes, row in zip(table.nbytes[at], table.row[at], strict=True)}
    return lambda record, start: rows.get(record.csize) if record.method == STORED else None


def _summed_spans(archive: ArchiveRange, table: SummedTable | None) -> list[tuple[int, int]]:
    """Return bytes of an archive that another pass sums: of an item, those in the middle, as its ends are read."""
    if table is None or archive.limit is not None or not (archive.owner or archive.listed):
        return []
    if not archive.owner:
        found = table.within(archive.file, archive.start, archive.stop)
        starts, sizes = (column[found.start : found.stop].tolist() for column in (table.start, table.nbytes))
        return sorted({(start, start + size) for start, size in zip(starts, sizes, strict=True)})
    for at in table.within(archive.file, archive.start, archive.start + 1)[:1]:
        rest = archive.stop - archive.start - int(table.nbytes[at])
        low, high = archive.start + max(rest, ENDS), archive.stop - max(rest, ENDS)
        return [(low, high)] if low < high else []
    return []


# ---- in a thread -----------------------------------------------------------------------------------------------------

_own = threading.local()


class _CheckRecords:
    """The work of a thread on a task: the records of each archive, or the CRC-32 of each part."""

    def __init__(self, table: SummedTable | None = None) -> None:
        self._announcer, self._table = Announcer(), table

    def __reduce__(self) -> tuple[Any, ...]:
        return _CheckRecords, (self._table,)

    def __call__(self, task: tuple[int, _Task]) -> list[list[RecordCheck | _Left] | int | WorkbenchError]:
        with ExitStack() as held:
            for pool, spans in _reach([one for one in task[1] if not self._by_ends(one)]):
                held.enter_context(pool.ahead(*np.array(spans, np.int64).T))
            for pool, spans in _reach([one for one in task[1] if self._by_ends(one)]):
                _fetch_ends(pool, spans)
            return [self._one(one) for one in task[1]]

    def _by_ends(self, one: ArchiveRange | _PayloadPart | RecordCheck | _Left) -> bool:
        """Return whether only the ends of an archive are read, which the check of its header may have fetched."""
        if not isinstance(one, ArchiveRange) or one.pool.at_once == 1:  # a disk reads on demand
            return False
        return (bool(one.owner) and one.stop - one.start <= 2 * ENDS) or bool(_summed_spans(one, self._table))

    def _one(
        self, one: ArchiveRange | _PayloadPart | RecordCheck | _Left
    ) -> list[RecordCheck | _Left] | int | WorkbenchError:
        if isinstance(one, (RecordCheck, _Left)):
            return [one]
        if isinstance(one, _PayloadPart):
            return _of_part(one, self._announcer)
        return list(_of_archive(one, self._announcer, self._table))

    def nbytes(self, task: tuple[int, _Task]) -> int:
        return task[0]

    def part(self, tasks: list[tuple[int, _Task]]) -> tuple[_CheckRecords, list[tuple[int, _Task]]]:
        if self._table is None:
            return self, tasks
        archives = [one for _, task in tasks for one in task if isinstance(one, ArchiveRange)]
        return _CheckRecords(self._table.of_files({one.file for one in archives})), tasks

    def key(self, task: tuple[int, _Task]) -> bytes:
        archives = [one.archive if isinstance(one, _PayloadPart) else one for one in task[1]]
        places = [tuple(one)[2:] if isinstance(one, ArchiveRange) else str(one) for one in archives]
        parts = [(one.first, one.last) for one in task[1] if isinstance(one, _PayloadPart)]
        return f"checksums {places} {parts}".encode("utf-8", "surrogatepass")

    def close(self) -> None:
        self._announcer.restore()


def _reach(task: _Task) -> list[tuple[SourcePool, list[tuple[int, int, int]]]]:
    """Return the file and the bytes that a task reads, grouped by the pool that it reads them from."""
    found: dict[int, tuple[SourcePool, list[tuple[int, int, int]]]] = {}
    for one in task:
        if isinstance(one, (RecordCheck, _Left)):
            continue
        archive = one if isinstance(one, ArchiveRange) else one.archive
        if archive.pool.at_once == 1:  # nothing is fetched ahead from a disk
            continue
        low, high = (one.start, one.stop) if isinstance(one, ArchiveRange) else (one.first, one.last)
        found.setdefault(id(archive.pool), (archive.pool, []))[1].append((archive.file, low, high))
    return list(found.values())


def _fetch_ends(pool: SourcePool, archives: list[tuple[int, int, int]]) -> None:
    """Fetch both ends of archives, unless they are held; errors are left to the reads themselves."""
    for file in sorted({file for file, _, _ in archives}):
        mine = [(start, stop) for one, start, stop in archives if one == file]
        spans = [((start, min(start + ENDS, stop)), (max(stop - ENDS, start), stop)) for start, stop in mine]
        ends = [end for both in spans for end in both]
        with suppress(WorkbenchError):
            pool.source(file).fetch(ends)


def _of_part(part: _PayloadPart, announcer: Announcer) -> int | WorkbenchError:
    if not part.checked:
        return 0
    try:
        return _crc(announcer.announce(part.archive.pool, part.archive.file), part.first, part.last)
    except WorkbenchError as error:
        return error


def _crc(source: Source, start: int, stop: int) -> int:
    """Return the CRC-32 of a file's bytes."""
    if not hasattr(_own, "buffer"):  # kept: new memory for each part costs a twentieth of a pass on a Dask worker
        _own.buffer = np.empty(PIECE, np.uint8)
    crc, buffer = 0, _own.buffer
    for at in range(start, stop, PIECE):
        flat = buffer[: min(PIECE, stop - at)]
        source.read_into(flat, at)
        crc = crc32(flat, crc)
    return crc


def _of_archive(
    archive: ArchiveRange, announcer: Announcer, table: SummedTable | None
) -> Iterator[RecordCheck | _Left]:
    """Yield the check of every record of an archive that is read whole."""
    what = f"item at byte {archive.start:,} of {archive.name!r}" if archive.owner else repr(archive.name)
    try:
        source = announcer.announce(archive.pool, archive.file)
        if archive.stop > source.size:
            short = archive.stop - source.size
            yield _damaged(
                archive, "", f"{what} ends {plural(short, 'byte')} beyond the end of the file; it is truncated"
            )
            return
        data: LazyBytes | Array = LazyBytes(source, archive.start, archive.stop)
        if archive.limit is not None:
            data = decompress(data[:], archive.limit, what=what)
        directory = read_directory(data, what=what)
    except WorkbenchError as error:
        yield _damaged(archive, "", str(error))
        return
    if directory.prefix is None and not archive.owner and not archive.listed:
        return  # a zip archive of another program
    if not archive.owner and _summed_spans(archive, table):
        directory.fetch_headers()
    row_of = _rows_of(archive, table)
    for record in directory.records.values():
        yield _of_record(archive, directory, record, row_of)


def _of_record(archive: ArchiveRange, directory: Archive, record: ZipRecord, row_of: _RowOf) -> RecordCheck | _Left:
    try:
        start, stop = locate(directory.view, record, directory.what)
        place = archive.start + start, archive.start + stop
        crc = 0
        if archive.limit is not None:
            place = archive.start, archive.stop
        if not directory.has_checksums:
            pass
        elif (row := row_of(record, place[0])) is not None:
            return _Left(row, RecordCheck("ok", archive.name, record.name, *place, archive.owner, record.crc))
        elif record.method == STORED and archive.limit is None and record.csize > ENDS:
            crc = _crc(archive.pool.source(archive.file), *place)
        elif record.method != STORED and archive.listed and directory.prefix is None:
            crc = inflated_crc(directory.view, start, stop, record, directory.what)
        else:
            content: Any = directory.view[start:stop]
            if record.method != STORED:
                content = inflate(content, record, directory.what)
            crc = crc32(np.frombuffer(content, np.uint8))
    except WorkbenchError as error:
        return _damaged(archive, record.name, str(error))
    return _verdict(archive, record, *place, crc, directory.has_checksums)


def _verdict(archive: ArchiveRange, record: ZipRecord, start: int, stop: int, crc: int, checked: bool) -> RecordCheck:
    if not checked:
        return RecordCheck("absent", archive.name, record.name, start, stop, archive.owner)
    return _judged(RecordCheck("ok", archive.name, record.name, start, stop, archive.owner, record.crc), crc)


def _judged(check: RecordCheck, crc: int) -> RecordCheck:
    return replace(check, status="ok" if crc == check.stored else "mismatch", computed=crc)


def _damaged(archive: ArchiveRange, record: str, message: str) -> RecordCheck:
    return RecordCheck("damaged", archive.name, record, archive.start, archive.stop, archive.owner, message=message)


# ---- stored CRCs of a file that is one archive -----------------------------------------------------------------------


def _from_file(payloads: Payloads, file: int, rows: Ints, result: StoredCrcs) -> None:
    """Take the CRCs of rows that are raw ranges of an archive's records."""
    catalog = payloads.catalog
    archive = ArchiveRange(payloads.pool, file, catalog.files[file], 0, catalog.file_stats[file].size)
    if not looks_like_one(archive):
        return
    try:
        directory = read_directory(payloads.pool.window(file, 0, archive.stop), what=repr(archive.name))
        if directory.prefix is None or not directory.has_checksums or directory.byteorder != "little":
            return
        records = {
            locate(directory.view, record, directory.what): record.crc
            for record in directory.records.values()
            if record.method == STORED
        }
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
                whole &= cat.is_row_major(sizes, strides)
            result.crc[row], result.nbytes[row], result.exact[row] = crc, place[1] - place[0], whole
