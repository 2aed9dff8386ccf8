"""The basic structures of an HDF5 file: fields, checksums, and bounded reads.

::

    structure    four letters │ version │ fields … │ lookup3 of all before, u32, in files of version 2 and later
    address      of 2, 4 or 8 bytes; all ones: none

Sources: HDF5 File Format Specification; hdf5 2.0 ``H5checksum.c``; Jenkins, lookup3.c.
"""

from __future__ import annotations

from workbench.core.pickles.standins import short
from workbench.core.source import LazyBytes
from workbench.core.words import plural
from workbench.errors import CorruptError, TruncatedError, UnsafeError, UnsupportedFormatError

NODE_LIMIT = 16 << 20  #: maximum bytes of a node, a heap of names, or a page of an index


class StructureFields:
    """Bytes of the file, read in order."""

    __slots__ = ("at", "begin", "data", "what")

    def __init__(self, data: bytes, begin: int, what: str) -> None:
        self.data, self.begin, self.what, self.at = data, begin, what, 0

    def take(self, count: int) -> bytes:
        if count < 0 or count > len(self.data) - self.at:
            raise CorruptError(
                f"{self.what}, byte {self.begin + self.at:,}: a field of {count:,} bytes extends beyond the "
                f"{plural(len(self.data), 'byte')} that hold it; the file is damaged"
            )
        self.at += count
        return self.data[self.at - count : self.at]

    def uint(self, width: int) -> int:
        return int.from_bytes(self.take(width), "little")

    def pad(self, to: int = 8) -> None:
        self.take(min(-self.at % to, len(self.data) - self.at))

    @property
    def left(self) -> int:
        return len(self.data) - self.at


def lookup3(data: bytes) -> int:
    """Return Jenkins' lookup3 hash of bytes, the checksum of HDF5's metadata."""

    def rot(value: int, bits: int) -> int:
        return (value << bits | value >> (32 - bits)) & 0xFFFFFFFF

    a = b = c = (0xDEADBEEF + len(data)) & 0xFFFFFFFF
    at = 0
    while len(data) - at > 12:
        a = (a + int.from_bytes(data[at : at + 4], "little")) & 0xFFFFFFFF
        b = (b + int.from_bytes(data[at + 4 : at + 8], "little")) & 0xFFFFFFFF
        c = (c + int.from_bytes(data[at + 8 : at + 12], "little")) & 0xFFFFFFFF
        for bits in (4, 6, 8, 16, 19, 4):
            a = ((a - c) & 0xFFFFFFFF) ^ rot(c, bits)
            c = (c + b) & 0xFFFFFFFF
            a, b, c = b, c, a
        at += 12
    if at == len(data):
        return c
    rest = data[at:].ljust(12, b"\0")
    a = (a + int.from_bytes(rest[:4], "little")) & 0xFFFFFFFF
    b = (b + int.from_bytes(rest[4:8], "little")) & 0xFFFFFFFF
    c = (c + int.from_bytes(rest[8:], "little")) & 0xFFFFFFFF
    for bits in (14, 11, 25, 16, 4, 14, 24):
        c = ((c ^ b) - rot(b, bits)) & 0xFFFFFFFF
        a, b, c = b, c, a
    return b


class Structures:
    """A file's bytes; each structure is read once.

    Attributes:
        view, name: the bytes, and the file's name for messages.
        origin: where it begins in the file that is read, for positions.
        base: the byte that addresses are relative to; wide, long: bytes of an address and a length.
    """

    def __init__(self, view: LazyBytes, name: str, origin: int) -> None:
        self.view, self.name, self.origin = view, name, origin
        self.base, self.wide, self.long = 0, 8, 8
        self._seen: set[tuple[bytes, int]] = set()

    def what(self, path: str = "") -> str:
        """Name the file, and an object in it, for messages."""
        return f"{self.name!r}: {short(path)}" if path else repr(self.name)

    def read(self, address: int, count: int, what: str) -> StructureFields:
        """Read bytes from an address on."""
        at = self.base + address
        if count > NODE_LIMIT:
            raise UnsafeError(
                f"{what}, byte {self.origin + at:,}: {plural(count, 'byte')} of metadata, over the limit; refused"
            )
        if at + count > len(self.view):
            raise TruncatedError(
                f"{what}: bytes {self.origin + at:,} to {self.origin + at + count:,} are needed and the file ends at "
                f"{self.origin + len(self.view):,}; it is truncated, or an address in it is wrong"
            )
        return StructureFields(bytes(self.view[at : at + count]), self.origin + at, what)

    def marked(self, address: int, count: int, mark: bytes, what: str) -> StructureFields:
        """Read a structure that begins with four letters, once each."""
        if (mark, address) in self._seen:
            raise CorruptError(
                f"{what}: the {mark.decode()} at byte {self.origin + self.base + address:,} is referred to twice; the "
                "file is damaged"
            )
        self._seen.add((mark, address))
        found = self.read(address, count, what)
        if found.take(4) != mark:
            raise CorruptError(
                f"{what}, byte {found.begin:,}: {found.data[:4]!r} where {mark!r} is needed; the file is damaged"
            )
        return found

    def summed(self, data: bytes, begin: int, what: str) -> bytes:
        """Verify the checksum that ends some bytes, and return them without it."""
        stored, found = int.from_bytes(data[-4:], "little"), lookup3(data[:-4])
        if stored != found:
            raise CorruptError(
                f"{what}: the checksum of bytes {begin:,} to {begin + len(data) - 4:,} is {found:#010x}, stored is "
                f"{stored:#010x}; the file is damaged"
            )
        return data[:-4]

    def address(self, fields: StructureFields) -> int | None:
        """Read an address, or ``None`` for the undefined address."""
        found = fields.uint(self.wide)
        return None if found == (1 << 8 * self.wide) - 1 else found

    def version(self, fields: StructureFields, known: tuple[int, ...], part: str) -> int:
        found = fields.uint(1)
        if found not in known:
            raise UnsupportedFormatError(
                f"{fields.what}, byte {fields.begin + fields.at - 1:,}: version {found} of {part} is not known; "
                f"{known[0]} to {known[-1]} are"
            )
        return found
