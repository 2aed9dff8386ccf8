"""One record of a zip archive: its row in the central directory, its local header, its bytes.

::

    offset ┌ PK 03 04  needed, flags, method, time, CRC, sizes, name length, extra length     30 bytes
           │ name ─ extra "FB" + 'Z'… padding           torch aligns payloads to 64 bytes by it
    start  │ payload                                    STORED, or DEFLATED for small ones
    stop   │ PK 07 08  data descriptor                  flags bit 3: CRC and sizes are here, and 0 above
    limit  └ the next record, or the central directory

Read from APPNOTE.TXT 6.3, sections 4.3.7 to 4.3.9, and torch 2.13 (``caffe2/serialize/inline_container.cc``).
"""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

from workbench.core.source import LazyBytes
from workbench.core.words import plural
from workbench.errors import CorruptError, UnsafeError

# signature, needed, flags, method, time, date, CRC, both sizes, length of the name, of the extra field
_LOCAL = struct.Struct("<4s5H3L2H")
STORED, DEFLATED = 0, 8
ENCRYPTED = 0x1 | 0x20 | 0x40 | 0x2000  # encrypted, patch data, strong encryption, masked headers
DESCRIPTOR, UTF8 = 0x8, 0x800
MAX_INFLATED = 64 << 20  # bytes: only small records are ever compressed
PIECE = 1 << 20  # bytes that are inflated at a time
MAX_RATIO = 1000  # deflate's own limit is 1,032


class ZipRecord(NamedTuple):
    """A row of the central directory. ``offset`` is that of the local header; the payload ends at or before
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


def locate(view: memoryview | LazyBytes, record: ZipRecord, what: str) -> tuple[int, int]:
    """Return ``(start, stop)`` of a record's bytes in the file, after checking its local header.

    Raises:
        CorruptError: the local header contradicts the directory; UnsafeError: encrypted.
    """
    at = record.offset
    signature, _, flags, method, _, _, crc, csize, usize, n_name, n_extra = _LOCAL.unpack(view[at : at + _LOCAL.size])
    start = at + 30 + n_name + n_extra
    stop = start + record.csize
    if signature != b"PK\x03\x04" or method != record.method or stop > record.limit:
        raise CorruptError(
            f"{what}, byte {at:,}: the local header of record {record.name!r} contradicts the central "
            "directory; the file is damaged, or its byte range is wrong"
        )
    if flags & ENCRYPTED:
        raise UnsafeError(f"{what}, byte {at:,}: record {record.name!r} is encrypted; torch.save never encrypts")
    if view[at + 30 : at + 30 + n_name] != record.name.encode():
        raise CorruptError(
            f"{what}, byte {at:,}: the local header names another record than {record.name!r}; the file is "
            "damaged, or crafted to show two contents"
        )
    if not flags & DESCRIPTOR and not (
        csize in (record.csize, 0xFFFFFFFF) and usize in (record.usize, 0xFFFFFFFF) and crc == record.crc
    ):
        raise CorruptError(
            f"{what}, byte {at:,}: sizes or CRC in the local header of record {record.name!r} differ from "
            "the central directory; the file is damaged"
        )
    return start, stop


def inflate(data: memoryview, record: ZipRecord, what: str) -> bytes:
    """Inflate a DEFLATED record of exactly ``record.usize`` bytes.

    Raises:
        UnsafeError: more than `MAX_INFLATED` bytes, or `MAX_RATIO` times ``data``; CorruptError: damaged.
    """
    if record.usize > MAX_INFLATED or record.usize > MAX_RATIO * max(1, len(data)):
        raise UnsafeError(
            f"{what}: record {record.name!r} would inflate {plural(len(data), 'byte')} to {record.usize:,}; it "
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
            f"{what}: record {record.name!r} does not inflate to its {plural(record.usize, 'byte')}; the "
            "file is damaged"
        )
    return content


def inflated_crc(view: memoryview | LazyBytes, start: int, stop: int, record: ZipRecord, what: str) -> int:
    """Compute the CRC-32 of a DEFLATED record of any size, bytes ``[start, stop)`` of ``view``, in a few megabytes of
    memory.

    Raises:
        CorruptError: it cannot be inflated, or not to ``record.usize`` bytes.
    """
    stream, crc, length = zlib.decompressobj(-15), 0, 0
    try:
        for at in range(start, stop, PIECE):
            rest = bytes(view[at : min(at + PIECE, stop)])
            while rest and length <= record.usize and not stream.eof:
                content = stream.decompress(rest, PIECE)
                crc, length, rest = zlib.crc32(content, crc), length + len(content), stream.unconsumed_tail
        content = stream.flush()
    except zlib.error as error:
        raise CorruptError(
            f"{what}: record {record.name!r} cannot be inflated ({error}); the file is damaged"
        ) from None
    if length + len(content) != record.usize or not stream.eof:
        raise CorruptError(
            f"{what}: record {record.name!r} does not inflate to its {plural(record.usize, 'byte')}; the "
            "file is damaged"
        )
    return zlib.crc32(content, crc)
