"""The end records and the central directory of a zip archive, which describe the rest of it.

::

    start ┌ PK 01 02  method, CRC, sizes, name, extra, offset of the local header    one row per record
          ├ …
    stop  ├ PK 06 06  zip64 end record    the numbers below in 64 bits     torch always writes these two,
          ├ PK 06 07  zip64 locator       where that one is                others if a number does not fit
          └ PK 05 06  end record          rows, size and place of the directory      22 bytes, then a comment

There is nothing between ``stop`` and the end records, and the rows fill the directory to the byte: an archive
that shows two contents to two readers needs room for the other one. Read from APPNOTE.TXT 6.3, sections
4.3.12 to 4.3.16 and 4.5.3.
"""

from __future__ import annotations

import struct

from workbench.core.source import LazyBytes
from workbench.core.words import plural
from workbench.core.ziprecord import ENCRYPTED, STORED, UTF8, ZipRecord
from workbench.errors import CorruptError, TruncatedError, UnsafeError, UnsupportedFormatError, quoted

# signature, disk, disk of the directory, records here, records, size, offset, length of the comment
_END = struct.Struct("<4s4H2LH")
# signature, size, made by, needed, disk, disk of the directory, records here, records, size, offset
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR64 = struct.Struct("<4sLQL")  # signature, disk, offset of the zip64 end record, disks
# signature, (versions), flags, method, (time), CRC, both sizes, three lengths, disk, (attributes), offset
_CENTRAL = struct.Struct("<4s4x2H4x3L4H6xL")
MAX_RECORDS = 4_000_000


def find_directory(view: memoryview | LazyBytes, what: str) -> tuple[int, int, int]:
    """Return ``(start, stop, number of records)`` of the central directory, after checking its place and size.

    Raises:
        TruncatedError: starts like an archive but has no end record.
        CorruptError: no zip archive, or end records that contradict each other or their place.
        UnsupportedFormatError: split over several disks; UnsafeError: an absurd number of records.
    """
    at, end = _end_record(view, what)
    _, disk, cd_disk, here, count, size, offset, _ = end
    stop = at
    if at >= _LOCATOR64.size and view[at - 20 : at - 16] == b"PK\x06\x07":
        _, disk64, at64, disks = _LOCATOR64.unpack(view[at - 20 : at])
        if at64 + _END64.size > at - 20 or view[at64 : at64 + 4] != b"PK\x06\x06":
            raise CorruptError(
                f"{what}, byte {at - 20:,}: the zip64 locator points at byte {at64:,}, which is not a zip64 end "
                "record; the file is damaged, or its byte range is wrong"
            )
        _, size64, _, _, disk_, cd_disk_, here_, count_, size_, offset_ = _END64.unpack(view[at64 : at64 + _END64.size])
        if at64 + 12 + size64 != at - 20 or disk64 or disks > 1:
            raise CorruptError(
                f"{what}, byte {at64:,}: the zip64 end record has a size that does not match its position; the file is "
                "damaged"
            )
        pairs = (
            (disk, disk_, 0xFFFF),
            (cd_disk, cd_disk_, 0xFFFF),
            (here, here_, 0xFFFF),
            (count, count_, 0xFFFF),
            (size, size_, 0xFFFFFFFF),
            (offset, offset_, 0xFFFFFFFF),
        )
        if any(short_ != long_ and short_ != full for short_, long_, full in pairs):
            raise CorruptError(
                f"{what}, byte {at:,}: the end record and the zip64 end record contradict each other; the "
                "file is damaged, or crafted to show two contents"
            )
        disk, cd_disk, here, count, size, offset, stop = disk_, cd_disk_, here_, count_, size_, offset_, at64
    if disk or cd_disk or here != count:
        raise UnsupportedFormatError(
            f"{what}, byte {at:,}: a zip archive split over several disks; torch.save never writes one"
        )
    if offset + size != stop:
        raise CorruptError(
            f"{what}: the central directory should be bytes {offset:,} to {offset + size:,}, but its end "
            f"record is at {stop:,}; the file is damaged, or bytes were inserted before it or removed"
        )
    if count > MAX_RECORDS or count * _CENTRAL.size > size:
        raise UnsafeError(
            f"{what}, byte {at:,}: {plural(count, 'record')} in a directory of {plural(size, 'byte')}; the "
            "directory was not read"
        )
    return offset, stop, count


def read_records(view: memoryview | LazyBytes, start: int, stop: int, count: int, what: str) -> dict[str, ZipRecord]:
    """Return the directory's records by name, in file order.

    Raises:
        CorruptError: rows that contradict the directory, each other or the file's size.
        UnsafeError: encrypted, or a name that leaves the archive.
    """
    directory = bytes(view[start:stop])
    rows: list[tuple[int, str, int, int, int, int, int]] = []
    at = 0
    for _ in range(count):
        if at + 46 > len(directory):
            raise CorruptError(
                f"{what}, byte {start + at:,}: the central directory ends before its {plural(count, 'record')}; the "
                "file is damaged"
            )
        row = _CENTRAL.unpack_from(directory, at)
        signature, flags, method, crc, csize, usize, n_name, n_extra, n_comment, disk, offset = row
        after = at + 46 + n_name + n_extra + n_comment
        if signature != b"PK\x01\x02" or after > len(directory):
            raise CorruptError(f"{what}, byte {start + at:,}: not a central directory record; the file is damaged")
        raw = directory[at + 46 : at + 46 + n_name]
        if csize == 0xFFFFFFFF or usize == 0xFFFFFFFF or offset == 0xFFFFFFFF:
            extra = directory[at + 46 + n_name : at + 46 + n_name + n_extra]
            usize, csize, offset = _zip64(extra, usize, csize, offset, what, start + at)
        if disk not in (0, 0xFFFF) or flags & ENCRYPTED:
            raise UnsafeError(
                f"{what}, byte {start + at:,}: record {quoted(raw)} is encrypted or on another disk; "
                "torch.save writes neither"
            )
        name = _record_name(raw, flags, what, start + at)
        if method == STORED and csize != usize:
            raise CorruptError(
                f"{what}, byte {start + at:,}: record {name!r} is stored uncompressed, yet has {plural(csize, 'byte')} "
                f"for {usize:,}; the file is damaged"
            )
        if offset + 30 + n_name + csize > start:
            raise CorruptError(
                f"{what}, byte {start + at:,}: record {name!r} of {csize:,} bytes at byte {offset:,} runs "
                f"into the central directory at {start:,}; the file is damaged"
            )
        rows.append((offset, name, method, flags, crc, csize, usize))
        at = after
    if at != len(directory):
        raise CorruptError(
            f"{what}, byte {start + at:,}: {plural(len(directory) - at, 'byte', 'follow')} the "
            f"{plural(count, 'record')} of the central directory; the file is damaged"
        )
    return _in_order(rows, start, what)


def _end_record(view: memoryview | LazyBytes, what: str) -> tuple[int, tuple[int, ...]]:
    at = len(view) - _END.size
    if at >= 0 and view[at : at + 4] == b"PK\x05\x06" and view[at + 20 :] == b"\0\0":
        return at, _END.unpack(view[at : at + _END.size])
    base = max(0, len(view) - _END.size - 0xFFFF)  # a comment of up to 64 KiB may follow
    tail = bytes(view[base:])
    found = tail.rfind(b"PK\x05\x06", 0, max(0, len(tail) - _END.size + 4))
    while found >= 0:
        end = _END.unpack_from(tail, found)
        if found + _END.size + end[7] == len(tail):
            return base + found, end
        found = tail.rfind(b"PK\x05\x06", 0, found)
    if view[:4] == b"PK\x03\x04":
        raise TruncatedError(
            f"{what} starts like a zip archive of torch.save but has no end record in its {len(view):,} "
            "bytes; it is truncated, something was appended to it, or its byte range is wrong"
        )
    raise CorruptError(
        f"{what} ({plural(len(view), 'byte')}, starts with {bytes(view[:4])!r}) is not a zip archive; it is damaged, "
        "or its byte range is wrong"
    )


def _in_order(rows: list[tuple[int, str, int, int, int, int, int]], stop: int, what: str) -> dict[str, ZipRecord]:
    """Refuse overlaps and duplicates. Local headers are not touched: each record learns where the next one
    starts.
    """
    ordered = sorted(rows)
    records: dict[str, ZipRecord] = {}
    for i, (offset, name, method, flags, crc, csize, usize) in enumerate(ordered):
        limit = ordered[i + 1][0] if i + 1 < len(ordered) else stop
        if offset + 30 + len(name) + csize > limit:  # characters, up to the bytes of the name: exact in `locate`
            raise CorruptError(
                f"{what}: record {name!r} of {csize:,} bytes at byte {offset:,} overlaps the next one at "
                f"{limit:,}; the file is damaged, or a zip bomb"
            )
        if name in records:
            raise CorruptError(
                f"{what} has two records {name!r}; readers would disagree on which one counts, so neither is read"
            )
        records[name] = ZipRecord(name, method, flags, crc, csize, usize, offset, limit)
    return records


def _zip64(extra: bytes, usize: int, csize: int, offset: int, what: str, at: int) -> tuple[int, int, int]:
    """Return the 64-bit numbers of a directory record: field 0x0001 contains those whose 32-bit field is full, in this
    order.
    """
    position = 0
    while position + 4 <= len(extra):
        kind, size = struct.unpack_from("<2H", extra, position)
        if kind == 1 and position + 4 + size <= len(extra):
            numbers = [usize, csize, offset]
            saturated = [i for i, number in enumerate(numbers) if number == 0xFFFFFFFF]
            if 8 * len(saturated) <= size:
                for place, i in enumerate(saturated):
                    (numbers[i],) = struct.unpack_from("<Q", extra, position + 4 + 8 * place)
                return numbers[0], numbers[1], numbers[2]
        position += 4 + size
    raise CorruptError(
        f"{what}, byte {at:,}: a record whose sizes do not fit 32 bits has no zip64 field; the file is damaged"
    )


def _record_name(raw: bytes, flags: int, what: str, at: int) -> str:
    try:
        name = raw.decode("utf-8" if flags & UTF8 else "ascii")
    except UnicodeDecodeError:
        try:
            name = raw.decode("utf-8")  # torch before 1.6 set no flag
        except UnicodeDecodeError:
            raise CorruptError(
                f"{what}, byte {at:,}: record name {quoted(raw)} is not UTF-8; the file is damaged"
            ) from None
    if (
        not name
        or "\0" in name
        or "\\" in name
        or name[0] == "/"
        or name[1:2] == ":"
        or (".." in name and ".." in name.split("/"))
    ):
        raise UnsafeError(
            f"{what}, byte {at:,}: record name {quoted(name)} would leave the archive; the archive was not read"
        )
    return name
