"""torch.save's zip archives inside a byte range: where each storage's bytes are, their CRC, and nothing read
that is not asked for.

::

    start ┌ PK 03 04  local header ─ name ─ extra "FB" + 'Z'… padding   one per record; flags bit 3: sizes and
          │ payload                                    (64-aligned)     CRC are 0 here and follow it,
          │ PK 07 08  data descriptor: CRC, sizes                       so the file cannot be walked forward
          ├ …                     archive/data.pkl    the object, storages as persistent ids
          │                       archive/byteorder   "little" or "big"; absent in old files: little
          │                       archive/data/0 …    one storage each, STORED
          ├ PK 01 02  central directory: method, CRC, sizes, name, offset of the local header
          ├ PK 06 06  zip64 end record        torch always writes both; plain zip writers only
          ├ PK 06 07  zip64 locator           when a number does not fit
    stop  └ PK 05 06  end record, 22 bytes + comment

Read from torch 2.13 (``caffe2/serialize/inline_container.cc``, miniz 3) and APPNOTE.TXT 6.3. The archive's
folder is ``archive`` or the file's stem. Alignment is relative to ``start`` only: in a ``.distcp`` file most
payloads are unaligned. All offsets here are relative to the buffer, which must be exactly the archive's byte
range.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import NamedTuple

from workbench.core.dtypes import by_name
from workbench.core.stubs import StorageRef, TensorRef, short
from workbench.core.unpickle import loads, torch_storage
from workbench.errors import CorruptError, TruncatedError, UnsafeError, UnsupportedFormatError

__all__ = ["Archive", "Item", "Record", "read_directory", "single_tensor"]

_END = struct.Struct(
    "<4s4H2LH"
)  # signature, disk, cd disk, records here, records, cd size, cd offset, comment
_END64 = struct.Struct(
    "<4sQ2H2L4Q"
)  # signature, size, made by, needed, disk, cd disk, records here, records, cd size, cd offset
_LOCATOR64 = struct.Struct("<4sLQL")  # signature, disk, offset of the end record, disks
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
STORED, DEFLATED = 0, 8
ENCRYPTED = 0x1 | 0x20 | 0x40 | 0x2000  # encrypted, patch data, strong encryption, masked headers
DESCRIPTOR, UTF8 = 0x8, 0x800
MAX_RECORDS = 4_000_000
MAX_INFLATED = 64 << 20
MAX_RATIO = 1000
MARKERS = (
    "byteorder",
    "version",
    ".format_version",
    ".storage_alignment",
)  # never empty, so a CRC of 0 was never computed


class Record(NamedTuple):
    """A row of the central directory. ``offset`` is of the local header; the payload ends at or before
    ``limit``.
    """

    name: str
    method: int
    flags: int
    crc: int
    csize: int
    usize: int
    offset: int
    limit: int


class Item(NamedTuple):
    """The tensor of a one-tensor archive.

    Its storage is bytes ``[start, start + nbytes)`` of the buffer; ``storage_offset`` and ``stride`` count
    elements within it. ``crc`` is the CRC-32 of the whole storage, None when the file has no checksums.
    """

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    storage_offset: int
    start: int
    nbytes: int
    crc: int | None
    byteorder: str


@dataclass(slots=True, eq=False)
class Archive:
    """The directory of an archive; payloads stay where they are.

    ``prefix`` is the folder that holds data.pkl, None when the zip has none (then it is not of torch.save).
    ``has_checksums`` is False when the writer left all CRCs at 0
    (``torch.serialization.set_crc32_options(False)``).
    """

    view: memoryview
    what: str
    records: dict[str, Record]
    prefix: str | None
    has_checksums: bool

    @property
    def byteorder(self) -> str:
        """``little`` or ``big``, of every payload. Raises CorruptError for another word."""
        record = self.find("byteorder")
        if record is None:
            return "little"
        word = self.read(record)
        if word not in (b"little", b"big"):
            raise CorruptError(
                f"{self.what}: record {record.name!r} says {word[:20]!r}, neither 'little' nor 'big'; "
                "the file is damaged"
            )
        return word.decode()

    def find(self, name: str) -> Record | None:
        """The record ``name`` of the archive's folder, such as ``data/0``."""
        return self.records.get(f"{self.prefix}/{name}")

    def payload(self, record: Record) -> tuple[int, int]:
        """Where a STORED record's bytes are: (start, stop) in the buffer.

        Raises:
            CorruptError: the local header contradicts the directory; UnsafeError: encrypted;
            UnsupportedFormatError: compressed, so no bytes of it lie in the file as they are.
        """
        if record.method != STORED:
            raise UnsupportedFormatError(
                f"{self.what}: record {record.name!r} is compressed (zip method {record.method}); "
                "torch.save stores payloads "
                "as they are, so the file was repacked: unpack it and save it with torch.save"
            )
        return _data(self.view, record, self.what)

    def read(self, record: Record) -> bytes:
        """A small record's content, inflated if need be and checked against its CRC. Raises like `payload`;
        UnsafeError: a bomb.
        """
        start, stop = _data(self.view, record, self.what)
        if record.method == STORED:
            content = bytes(self.view[start:stop])
        elif record.method == DEFLATED:
            content = _inflate(self.view[start:stop], record, self.what)
        else:
            raise UnsupportedFormatError(
                f"{self.what}: record {record.name!r} uses zip method {record.method}, which torch.save "
                "never "
                "writes; unpack the file and save it with torch.save"
            )
        if self.has_checksums and zlib.crc32(content) != record.crc:
            raise CorruptError(
                f"{self.what}: record {record.name!r}, bytes {start:,} to {stop:,}: CRC-32 is "
                f"{zlib.crc32(content):#010x}, the directory says {record.crc:#010x}; the file is damaged"
            )
        return content


def read_directory(buf: object, *, what: str) -> Archive:
    """Read the central directory of the zip archive that fills ``buf`` (bytes, memoryview, or a uint8 array
    over a mapping).

    Raises:
        TruncatedError: starts like an archive but has no end record.
        CorruptError: no zip archive, or one that contradicts itself.
        UnsafeError: encrypted, record names that leave the archive, absurd record counts.
    """
    view = _view(buf)
    start, stop, count = _find_directory(view, what)
    records = _records(view, start, stop, count, what)
    prefix = None
    for name in records:
        if name.endswith("/data.pkl") and name.count("/") == 1:
            if prefix is not None:
                raise CorruptError(
                    f"{what} has two objects, {prefix + '/data.pkl'!r} and {name!r}; torch.save writes "
                    "one, do not trust it"
                )
            prefix = name[:-9]
    return Archive(view, what, records, prefix, _has_checksums(records, prefix))


_TEMPLATES: dict[
    bytes, TensorRef
] = {}  # data.pkl → what it says; the chunks of one tensor mostly share it to the byte
_TEMPLATE_LIMIT = 4096


def single_tensor(buf: object, *, what: str) -> Item:
    """The one tensor of a ``.distcp`` item (torch.save of a tensor), where it lies in ``buf``.

    Raises:
        CorruptError: no archive of one tensor, or dtype, shape, stride and payload do not fit each other.
        UnsupportedFormatError: an element type without whole bytes, a conjugate or negative view, or a
        compressed payload.
    """
    archive = read_directory(buf, what=what)
    pickled = archive.find("data.pkl")
    if pickled is None:
        raise CorruptError(
            f"{what} is a zip archive without data.pkl, not of torch.save; the item's byte range may be wrong"
        )
    content = archive.read(pickled)
    tensor = _TEMPLATES.get(content)
    if tensor is None:
        tensor = _one_tensor(content, what)
        if len(content) < 4096:  # real ones have about 200 bytes
            if len(_TEMPLATES) >= _TEMPLATE_LIMIT:
                _TEMPLATES.clear()
            _TEMPLATES[content] = tensor
    record = archive.find(f"data/{tensor.storage.key}")
    if record is None:
        raise CorruptError(
            f"{what}: data.pkl names storage {tensor.storage.key[:80]!r}, but there is no such record; "
            "the file is damaged"
        )
    start, stop = archive.payload(record)
    _check_extent(tensor, stop - start, what)
    return Item(
        tensor.dtype,
        tensor.shape,
        tensor.stride,
        tensor.storage_offset,
        start,
        stop - start,
        record.crc if archive.has_checksums else None,
        archive.byteorder,
    )


def _one_tensor(content: bytes, what: str) -> TensorRef:
    value = loads(content, what=f"{what} (data.pkl)", persistent_load=torch_storage)
    if not isinstance(value, TensorRef) or not isinstance(value.storage, StorageRef):
        raise CorruptError(
            f"{what} holds {short(value, 60)}, not a tensor; the item's byte range may be wrong"
        )
    if value.attrs.get("metadata"):
        raise UnsupportedFormatError(
            f"{what} is a conjugate or negative view ({short(value.attrs['metadata'])}), so its bytes "
            "are not its "
            "values; save it again after tensor.resolve_conj().resolve_neg()"
        )
    return value


def _check_extent(tensor: TensorRef, nbytes: int, what: str) -> None:
    storage = tensor.storage
    try:
        itemsize = by_name(tensor.dtype).itemsize
        stored = storage.numel if storage.dtype is None else storage.numel * by_name(storage.dtype).itemsize
    except UnsupportedFormatError as error:
        raise UnsupportedFormatError(f"{what}: {error}") from None
    if stored != nbytes:
        raise CorruptError(
            f"{what}: data.pkl says storage {storage.key!r} has {stored:,} bytes, the record has "
            f"{nbytes:,}; the file is "
            "damaged"
        )
    last = tensor.storage_offset
    for size, stride in zip(tensor.shape, tensor.stride, strict=True):
        if size == 0:
            return
        last += (size - 1) * stride
    if (last + 1) * itemsize > nbytes:
        raise CorruptError(
            f"{what}: a tensor of shape {list(tensor.shape)}, stride {list(tensor.stride)} at element "
            f"{tensor.storage_offset:,} ends at byte {(last + 1) * itemsize:,} of a storage of "
            f"{nbytes:,}; the file is damaged"
        )


def _view(buf: object) -> memoryview:
    view = buf if type(buf) is memoryview else memoryview(buf)  # type: ignore[arg-type]
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def _find_directory(view: memoryview, what: str) -> tuple[int, int, int]:
    """(start, stop, number of records) of the central directory, its place and size checked."""
    at, end = _end_record(view, what)
    _, disk, cd_disk, here, count, size, offset, _ = end
    stop = at
    if at >= _LOCATOR64.size and view[at - 20 : at - 16] == b"PK\x06\x07":
        _, disk64, at64, disks = _LOCATOR64.unpack_from(view, at - 20)
        if at64 + _END64.size > at - 20 or view[at64 : at64 + 4] != b"PK\x06\x06":
            raise CorruptError(
                f"{what}, byte {at - 20:,}: the zip64 locator points at byte {at64:,}, where no zip64 "
                "end record is; "
                "the file is damaged, or its byte range is wrong"
            )
        _, size64, _, _, disk_, cd_disk_, here_, count_, size_, offset_ = _END64.unpack_from(view, at64)
        if at64 + 12 + size64 != at - 20 or disk64 or disks > 1:
            raise CorruptError(
                f"{what}, byte {at64:,}: the zip64 end record does not fit its place; the file is damaged"
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
                f"{what}, byte {at:,}: the end record and the zip64 end record contradict each other; "
                "the file is damaged, "
                "or made to show two contents"
            )
        disk, cd_disk, here, count, size, offset, stop = disk_, cd_disk_, here_, count_, size_, offset_, at64
    if disk or cd_disk or here != count:
        raise UnsupportedFormatError(
            f"{what}, byte {at:,}: a zip archive split over several disks; torch.save never writes one"
        )
    if offset + size != stop:
        raise CorruptError(
            f"{what}: the central directory should be bytes {offset:,} to {offset + size:,}, but its end "
            "record is at "
            f"{stop:,}; the file is damaged, or something was put before it or left out"
        )
    if count > MAX_RECORDS or count * _CENTRAL.size > size:
        raise UnsafeError(
            f"{what}, byte {at:,}: {count:,} records in a directory of {size:,} bytes; it was not read"
        )
    return offset, stop, count


def _end_record(view: memoryview, what: str) -> tuple[int, tuple[int, ...]]:
    at = len(view) - _END.size
    if at >= 0 and view[at : at + 4] == b"PK\x05\x06" and view[at + 20 :] == b"\0\0":
        return at, _END.unpack_from(view, at)
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
            "bytes; it is cut "
            "short, or its byte range is wrong"
        )
    raise CorruptError(
        f"{what} ({len(view):,} bytes, starts with {bytes(view[:4])!r}) is no zip archive; it is "
        "damaged, or its byte "
        "range is wrong"
    )


def _records(view: memoryview, start: int, stop: int, count: int, what: str) -> dict[str, Record]:
    directory = bytes(view[start:stop])
    rows: list[tuple[int, str, int, int, int, int, int]] = []
    at = 0
    for _ in range(count):
        if at + 46 > len(directory):
            raise CorruptError(
                f"{what}, byte {start + at:,}: the central directory ends before its {count:,} records; "
                "the file is damaged"
            )
        (
            signature,
            _,
            _,
            flags,
            method,
            _,
            _,
            crc,
            csize,
            usize,
            n_name,
            n_extra,
            n_comment,
            disk,
            _,
            _,
            offset,
        ) = _CENTRAL.unpack_from(directory, at)
        after = at + 46 + n_name + n_extra + n_comment
        if signature != b"PK\x01\x02" or after > len(directory):
            raise CorruptError(
                f"{what}, byte {start + at:,}: no record of a central directory; the file is damaged"
            )
        raw = directory[at + 46 : at + 46 + n_name]
        if csize == 0xFFFFFFFF or usize == 0xFFFFFFFF or offset == 0xFFFFFFFF:
            extra = directory[at + 46 + n_name : at + 46 + n_name + n_extra]
            usize, csize, offset = _zip64(extra, usize, csize, offset, what, start + at)
        if disk not in (0, 0xFFFF) or flags & ENCRYPTED:
            raise UnsafeError(
                f"{what}, byte {start + at:,}: record {raw[:80]!r} is encrypted or on another disk; "
                "torch.save writes neither"
            )
        name = _record_name(raw, flags, what, start + at)
        if method == STORED and csize != usize:
            raise CorruptError(
                f"{what}, byte {start + at:,}: record {name!r} is stored as it is, yet has {csize:,} "
                f"bytes for {usize:,}; "
                "the file is damaged"
            )
        if offset + 30 + n_name + csize > start:
            raise CorruptError(
                f"{what}, byte {start + at:,}: record {name!r} of {csize:,} bytes at byte {offset:,} "
                "runs into the central "
                f"directory at {start:,}; the file is damaged"
            )
        rows.append((offset, name, method, flags, crc, csize, usize))
        at = after
    if at != len(directory):
        raise CorruptError(
            f"{what}, byte {start + at:,}: {len(directory) - at:,} bytes follow the {count:,} records of "
            "the central "
            "directory; the file is damaged"
        )
    return _in_order(rows, start, what)


def _in_order(
    rows: list[tuple[int, str, int, int, int, int, int]], stop: int, what: str
) -> dict[str, Record]:
    """Refuse overlaps and duplicates. Local headers are not touched: each record learns where the next one
    starts.
    """
    ordered = sorted(rows)
    records: dict[str, Record] = {}
    for i, (offset, name, method, flags, crc, csize, usize) in enumerate(ordered):
        limit = ordered[i + 1][0] if i + 1 < len(ordered) else stop
        if (
            offset + 30 + len(name) + csize > limit
        ):  # characters, at most the bytes of the name: exact in `_data`
            raise CorruptError(
                f"{what}: record {name!r} of {csize:,} bytes at byte {offset:,} overlaps the next one at "
                f"{limit:,}; the file "
                "is damaged, or a zip bomb"
            )
        if name in records:
            raise CorruptError(
                f"{what} has two records {name!r}; readers would disagree which one counts, so none is read"
            )
        records[name] = Record(name, method, flags, crc, csize, usize, offset, limit)
    return records


def _zip64(extra: bytes, usize: int, csize: int, offset: int, what: str, at: int) -> tuple[int, int, int]:
    """The 64-bit numbers of a directory record: field 0x0001 holds those whose 32-bit place is full, in this
    order.
    """
    position = 0
    while position + 4 <= len(extra):
        kind, size = struct.unpack_from("<2H", extra, position)
        if kind == 1 and position + 4 + size <= len(extra):
            numbers = [usize, csize, offset]
            wanted = [i for i, number in enumerate(numbers) if number == 0xFFFFFFFF]
            if 8 * len(wanted) <= size:
                for place, i in enumerate(wanted):
                    (numbers[i],) = struct.unpack_from("<Q", extra, position + 4 + 8 * place)
                return numbers[0], numbers[1], numbers[2]
        position += 4 + size
    raise CorruptError(
        f"{what}, byte {at:,}: a record whose sizes do not fit 32 bits has no zip64 field; the file is "
        "damaged"
    )


def _record_name(raw: bytes, flags: int, what: str, at: int) -> str:
    try:
        name = raw.decode("utf-8" if flags & UTF8 else "ascii")
    except UnicodeDecodeError:
        try:
            name = raw.decode("utf-8")  # torch before 1.6 set no flag
        except UnicodeDecodeError:
            raise CorruptError(
                f"{what}, byte {at:,}: record name {raw[:80]!r} is not UTF-8; the file is damaged"
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
            f"{what}, byte {at:,}: record name {name[:200]!r} would leave the archive; it was not read"
        )
    return name


def _data(view: memoryview, record: Record, what: str) -> tuple[int, int]:
    """(start, stop) of a record's bytes as they lie in the file, its local header checked."""
    at = record.offset
    signature, _, flags, method, _, _, crc, csize, usize, n_name, n_extra = _LOCAL.unpack_from(view, at)
    start = at + 30 + n_name + n_extra
    stop = start + record.csize
    if signature != b"PK\x03\x04" or method != record.method or stop > record.limit:
        raise CorruptError(
            f"{what}, byte {at:,}: the local header of record {record.name!r} contradicts the central "
            "directory; the file "
            "is damaged, or its byte range is wrong"
        )
    if flags & ENCRYPTED:
        raise UnsafeError(
            f"{what}, byte {at:,}: record {record.name!r} is encrypted; torch.save writes no such file"
        )
    if view[at + 30 : at + 30 + n_name] != record.name.encode():
        raise CorruptError(
            f"{what}, byte {at:,}: the local header names another record than {record.name!r}; the file "
            "is damaged, or made "
            "to show two contents"
        )
    if not flags & DESCRIPTOR and not (
        csize in (record.csize, 0xFFFFFFFF) and usize in (record.usize, 0xFFFFFFFF) and crc == record.crc
    ):
        raise CorruptError(
            f"{what}, byte {at:,}: sizes or CRC in the local header of record {record.name!r} differ "
            "from the central "
            "directory; the file is damaged"
        )
    return start, stop


def _inflate(data: memoryview, record: Record, what: str) -> bytes:
    if record.usize > MAX_INFLATED or record.usize > MAX_RATIO * max(1, len(data)):
        raise UnsafeError(
            f"{what}: record {record.name!r} would inflate {len(data):,} bytes to {record.usize:,}; it "
            "was not read"
        )
    stream = zlib.decompressobj(-15)
    try:
        content = stream.decompress(data, record.usize + 1)
    except zlib.error as error:
        raise CorruptError(
            f"{what}: record {record.name!r} cannot be inflated ({error}); the file is damaged"
        ) from None
    if len(content) != record.usize or not stream.eof:
        raise CorruptError(
            f"{what}: record {record.name!r} does not inflate to its {record.usize:,} bytes; the file is "
            "damaged"
        )
    return content


def _has_checksums(records: dict[str, Record], prefix: str | None) -> bool:
    for marker in MARKERS:
        if record := records.get(f"{prefix}/{marker}"):
            return record.crc != 0
    return any(record.crc for record in records.values())
