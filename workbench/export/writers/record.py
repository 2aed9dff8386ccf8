"""Records of a ``torch.save`` archive, laid out before the payloads are known: zip as torch writes it.

::

    local header, name, "FB" field of 'Z's    pads so that the payload begins at a multiple of 64 bytes
    payload
    data descriptor                           CRC-32 and sizes; none if the payload is empty
    …
    central directory, zip64 end records      CRCs again: filled in last

Records are STORED, with data descriptors (flag bit 3); from 4 GiB on with zip64 fields. Versions and dates are 0, as
in torch.

Source: torch 2.13 ``caffe2/serialize/inline_container.cc``, ``third_party/miniz``; APPNOTE.TXT 6.3, sections 4.3.7 to
4.3.16, 4.5.3.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

ALIGN = 64  #: bytes
ROOT = "archive"
FULL = 0xFFFFFFFF
FLAGS, DESCRIPTOR = 0x800, 0x8
_LOCAL = struct.Struct("<4s5H3L2H")
_CENTRAL = struct.Struct("<4s6H3L5H2L")


@dataclass(frozen=True, slots=True)
class ArchiveRecord:
    """One file of the archive.

    Attributes:
        offset: of the local header.
        start, size: of the payload, bytes.
        data: the payload, if it is known beforehand.
    """

    name: bytes
    offset: int
    start: int
    size: int
    data: bytes | None

    @property
    def flags(self) -> int:
        """Bit 11, names are UTF-8; bit 3, a descriptor follows."""
        return FLAGS | DESCRIPTOR if self.size else FLAGS  # torch writes no descriptor for an empty payload

    def descriptor(self, crc: int) -> bytes:
        """Return the bytes after the payload."""
        if not self.size:
            return b""
        return struct.pack("<4sLQQ" if self.size >= FULL else "<4sLLL", b"PK\x07\x08", crc, self.size, self.size)


class RecordLayout:
    """Consecutive records; bytes that depend on no payload become literals.

    Attributes:
        records: in their order.
        literals: ``(start, bytes)``.
        at: byte where the next record begins.
    """

    def __init__(self) -> None:
        self.records: list[ArchiveRecord] = []
        self.literals: list[tuple[int, bytes]] = []
        self.at = 0

    def add(self, name: str, size: int, data: bytes | None = None) -> ArchiveRecord:
        """Add the next record, with ``data`` if it is already known."""
        full = f"{ROOT}/{name}".encode()
        wide = struct.pack("<HHQQ", 1, 16, 0, 0) if size >= FULL else b""  # with a descriptor, sizes are stored there
        head = self.at + _LOCAL.size + len(full) + len(wide) + 4
        pad = -head % ALIGN
        extra = wide + struct.pack("<2sH", b"FB", pad) + b"Z" * pad
        record = ArchiveRecord(full, self.at, head + pad, size, data)
        short = FULL if wide else 0
        local = _LOCAL.pack(b"PK\x03\x04", 0, record.flags, 0, 0, 0, 0, short, short, len(full), len(extra))
        self.literals.append((self.at, local + full + extra))
        if data is not None:
            self.literals.append((record.start, data + record.descriptor(zlib.crc32(data))))
        self.records.append(record)
        self.at = record.start + size + len(record.descriptor(0))
        return record

    def finish(self, crcs: Sequence[int]) -> list[tuple[int, bytes]]:
        """Return the descriptors and the directory, once the CRCs of all payloads are known."""
        payloads = [record for record in self.records if record.data is None]
        made = [
            (record.start + record.size, record.descriptor(crc)) for record, crc in zip(payloads, crcs, strict=True)
        ]
        return [*(one for one in made if one[1]), (self.at, self.directory(crcs))]

    def crc_fields(self) -> list[int]:
        """Return the byte in the directory at which each record's CRC is stored."""
        rows = [len(_row(record, 0)) for record in self.records]
        return [self.at + sum(rows[:number]) + 16 for number in range(len(rows))]

    def directory(self, crcs: Sequence[int]) -> bytes:
        """Return the central directory and the end records, including the zip64 ones that torch always writes."""
        rest = iter(crcs)
        rows = b"".join(_row(r, next(rest) if r.data is None else zlib.crc32(r.data)) for r in self.records)
        count, start = len(self.records), self.at
        end64 = struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 0x031E, 45, 0, 0, count, count, len(rows), start)
        locator = struct.pack("<4sLQL", b"PK\x06\x07", 0, start + len(rows), 1)
        few, short = min(count, 0xFFFF), min(start, FULL)
        end = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, few, few, min(len(rows), FULL), short, 0)
        return rows + end64 + locator + end


def _row(record: ArchiveRecord, crc: int) -> bytes:
    size, offset = min(record.size, FULL), min(record.offset, FULL)
    wide = [record.size] * 2 if size == FULL else []
    wide += [record.offset] if offset == FULL else []
    extra = struct.pack(f"<HH{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
    return (
        _CENTRAL.pack(
            b"PK\x01\x02",
            0,
            0,
            record.flags,
            0,
            0,
            0,
            crc,
            size,
            size,
            len(record.name),
            len(extra),
            0,
            0,
            0,
            0,
            offset,
        )
        + record.name
        + extra
    )
