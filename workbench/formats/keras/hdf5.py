"""The contents of an HDF5 file, read from its bytes: groups, data sets and the places of their elements.

::

    superblock    89 "HDF" 0d 0a 1a 0a │ version 0 – 3 │ bytes of an address, of a length │ end │ root
    object        header, version 1 or 2 ("OHDR", "OCHK"): messages, in one or more blocks
      group       symbol table ► "TREE" ► "SNOD": names in a "HEAP" │ link messages, in the header or in a fractal heap
      data set    data space (shape) │ data type │ layout │ filters │ attributes
    layout        compact: in the message │ contiguous: one range │ chunked: an index of ranges
      index       "TREE" type 1 │ one chunk │ implicit │ fixed array "FAHD", "FADB" │ B-tree of version 2

The parser is bounded: every range is checked against the file, every header and node of an index is read once, and
links to other files, soft links and cycles are not followed. Unsupported features (other indices and filters, virtual
data sets, external storage) raise or are noted with the object and the byte.

Sources: HDF5 File Format Specification 1.0 – 4.0; hdf5 2.0 ``H5checksum.c``, ``H5Dfarray.c``, ``H5FAdblock.c``.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any, NamedTuple

import numpy as np

from workbench.core import codecs
from workbench.core.arrays import Array
from workbench.core.catalog import MAX_ELEMENTS
from workbench.core.jsonable import check_listed, nested
from workbench.core.pickles.standins import short
from workbench.core.source import LazyBytes
from workbench.core.words import plural
from workbench.errors import CorruptError, TruncatedError, UnsafeError, UnsupportedFormatError, quoted
from workbench.formats.keras.dense import read_records, read_stored
from workbench.formats.keras.indices import MOST_CHUNKS, fixed_array, read_tree, record_rows, tree_rows
from workbench.formats.keras.structures import StructureFields, Structures
from workbench.formats.keras.types import Element, read_element

MAGIC = b"\x89HDF\r\n\x1a\n"
OBJECTS = 1 << 17  #: groups and data sets of a file
MESSAGES = 1 << 19  #: of all headers, however often each is read; a variable has about eight
_MESSAGE_1, _MESSAGE_2 = struct.Struct("<HHB3x"), struct.Struct("<BHB")  #: type, bytes, flags; by header version
DEPTH = 64  #: groups in groups
HEADER_LIMIT = 16 << 20  #: bytes of an object's header
NAME_LIMIT = 64 << 10  #: bytes of a name
NAMES_LIMIT = 64 << 20  #: bytes of the paths of all objects
NOTED = 8  #: notes that are kept
TEXT_LIMIT = 64 << 20  #: bytes of all attributes
#: Filters by number, by the names that codecs have.
FILTERS = {1: "gzip", 2: "shuffle", 3: "fletcher32"}
OTHERS = {4: "szip", 5: "nbit", 6: "scaleoffset", 32000: "lzf", 32001: "blosc", 32004: "lz4", 32015: "zstd"}
_SPACE, _LINKS, _TYPE, _LINK, _EXTERNAL, _LAYOUT, _PIPELINE = 1, 2, 3, 6, 7, 8, 11
_ATTRIBUTE, _CONTINUED, _SYMBOLS, _ATTRIBUTES = 12, 16, 17, 21
_FAR = 1 << 62  #: an address beyond every file
_KNOWN = 0x17  #: the last message that the specification describes


class Message(NamedTuple):
    """A message of a header: its type, bytes, their position, and flags."""

    kind: int
    data: bytes
    at: int
    flags: int


@dataclass(slots=True)
class Hdf5Group:
    """A group; ``at`` is the byte of its header, ``messages`` those of its attributes."""

    path: str
    at: int
    messages: list[Message] = field(default_factory=list)


@dataclass(slots=True)
class DataSet(Hdf5Group):
    """A data set.

    Attributes:
        shape: ``None`` if it has no elements at all (a null data space).
        why: why its elements cannot be read; empty if they can.
        start, stop: bytes of the file, of a data set in one piece; -1 if it was never written.
        chunk: elements along each axis of a chunk, of one in pieces …
        offsets, starts, sizes, masks: ``(N, D)`` and ``(N,) int64``: first element, byte and bytes of each, and
            bits of the filters that it skipped.
        filters: names, in the order in which they were applied.
    """

    element: Element = field(default_factory=lambda: Element("", 0))
    shape: tuple[int, ...] | None = None
    why: str = ""
    start: int = -1
    stop: int = -1
    chunk: tuple[int, ...] | None = None
    offsets: Array = field(default_factory=lambda: np.empty((0, 0), np.int64))
    starts: Array = field(default_factory=lambda: np.empty(0, np.int64))
    sizes: Array = field(default_factory=lambda: np.empty(0, np.int64))
    masks: Array = field(default_factory=lambda: np.empty(0, np.int64))
    filters: tuple[str, ...] = ()


class Hdf5(Structures):
    """An open file.

    Args:
        view: its bytes.
        name: the file's name, for messages.
        origin: where it begins in the file that is read, for positions.

    Attributes:
        notes: sentences on what was left out, and why; see :meth:`note`.
        end: the byte at which it ends according to its superblock.

    Raises:
        CorruptError, TruncatedError: it contradicts itself.
        UnsafeError: an impossible count or length.
        UnsupportedFormatError: the version of a part is not known.
    """

    def __init__(self, view: LazyBytes, name: str, origin: int = 0) -> None:
        super().__init__(view, name, origin)
        self.notes: list[str] = []
        self.left_out = 0
        self._left, self._messages, self._letters, self._text = OBJECTS, MESSAGES, NAMES_LIMIT, TEXT_LIMIT
        self._heaps: dict[int, dict[int, bytes]] = {}
        self._paths: dict[int, str] = {}
        self._sharing = 0
        self.end = 0
        self._root = self._superblock()

    def note(self, text: str) -> None:
        """Note what was left out; the first :data:`NOTED` notes are kept, and the number of the others."""
        self.left_out += 1
        if self.left_out <= NOTED:
            self.notes.append(text)

    def _superblock(self) -> int:
        """Read the superblock and return the address of the root's header."""
        what = self.what()
        fields = self.read(0, min(128, len(self.view)), what)
        if fields.take(8) != MAGIC:
            raise CorruptError(f"{what} does not begin with HDF5's {MAGIC!r}; the file is damaged")
        version = self.version(fields, (0, 1, 2, 3), "the superblock")
        if version < 2:
            fields.take(4)
        self.wide, self.long = fields.uint(1), fields.uint(1)
        if self.wide not in (2, 4, 8) or self.long not in (2, 4, 8):
            raise CorruptError(
                f"{what}, byte {fields.begin + fields.at - 2:,}: addresses of {self.wide} bytes and "
                f"lengths of {self.long}; the file is damaged"
            )
        if version < 2:
            fields.take({0: 9, 1: 13}[version])
        else:
            if fields.uint(1) & 1:
                self.notes.append("the file was not closed by the program that wrote it; it may be incomplete")
        self.base = fields.uint(self.wide)
        fields.take(self.wide)  # free space, or the superblock's extension
        end = fields.uint(self.wide)
        if version < 2:
            fields.take(2 * self.wide)
        root = fields.uint(self.wide)
        if version >= 2:
            self.summed(fields.data[: fields.at + 4], fields.begin, what)
        if self.base:
            raise UnsupportedFormatError(
                f"{what} begins with a user block of {plural(self.base, 'byte')}, which is not read"
            )
        if end > len(self.view):
            raise TruncatedError(
                f"{what} has {plural(len(self.view), 'byte')} and should end at byte {end:,}, {end - len(self.view):,} "
                "later; it is truncated"
            )
        self.end = end
        return root

    # ---- objects -----------------------------------------------------------------------------------------------------

    def walk(self) -> Iterator[Hdf5Group]:
        """Yield every group and data set, each before its contents; the root's path is empty."""
        waiting: list[tuple[str, int, int]] = [("", self._root, 0)]
        while waiting:
            path, address, depth = waiting.pop()
            self._left -= 1
            if self._left < 0:
                raise UnsafeError(f"{self.what()} has more than {OBJECTS:,} objects; refused")
            what = self.what(path)
            if address in self._paths:
                self.note(f"{short(path)} is another name of {short(self._paths[address] or '/')} and is left out")
                continue
            self._paths[address] = path
            messages = self._header(address, what)
            kinds = {message.kind for message in messages}
            at = self.origin + self.base + address
            if _LAYOUT in kinds:
                yield self._data_set(path, at, messages)
            elif kinds & {_SYMBOLS, _LINKS, _LINK}:
                if depth == DEPTH:
                    raise UnsafeError(f"{what}, byte {at:,}: more than {DEPTH} nested groups; refused")
                yield Hdf5Group(path, at, messages)
                members = self._members(messages, path)
                for name in sorted(members, reverse=True):
                    waiting.append((f"{path}/{name}" if path else name, members[name], depth + 1))
            elif _TYPE not in kinds or path == "":
                raise CorruptError(f"{what}, byte {at:,}: neither a group nor a data set; the file is damaged")

    def _header(self, address: int, what: str) -> list[Message]:
        first = self.read(address, min(16, max(len(self.view) - self.base - address, 4)), what)
        if first.data[:4] == b"OHDR":
            return self._second(address, what)
        self.version(first, (1,), "an object's header")
        first.take(1)
        count = first.uint(2)
        first.take(4)
        found: list[Message] = []
        blocks, seen = [(address + 16, first.uint(4))], dict[int, int]()
        while blocks and count > 0:
            begin, length = blocks.pop(0)
            block = self._block(begin, length, seen, what)
            while block.left >= 8 and count > 0:
                kind, size, flags = _MESSAGE_1.unpack(block.take(8))
                at = block.begin + block.at
                self._count(found, Message(kind, block.take(size), at, flags), what)
                count -= 1
                if kind == _CONTINUED:
                    blocks.append(self._continued(found[-1], what))
        return self._resolved(found, what)

    def _block(self, begin: int, size: int, seen: dict[int, int], what: str) -> StructureFields:
        """Read a block of a header; ``seen``: address of each block so far → bytes of the header up to its end."""
        total = size + next(reversed(seen.values()), 0)
        if begin in seen or total > HEADER_LIMIT:
            raise CorruptError(
                f"{what}, byte {self.origin + self.base + begin:,}: a block of {plural(size, 'byte')} of the header is "
                "referred to twice, or too long; the file is damaged"
            )
        seen[begin] = total
        return self.read(begin, size, what)

    def _count(self, found: list[Message], message: Message, what: str) -> None:
        """Add a message to those of a header. Several headers may have a block in common, so all are counted."""
        self._messages -= 1
        if self._messages < 0:
            raise UnsafeError(f"{what}, byte {message.at:,}: more than {MESSAGES:,} messages in all headers; refused")
        found.append(message)

    def _second(self, address: int, what: str) -> list[Message]:
        head = self.read(address, min(40, len(self.view) - self.base - address), what)
        head.take(4)
        self.version(head, (2,), "an object's header")
        flags = head.uint(1)
        head.take(16 * bool(flags & 0x20) + 4 * bool(flags & 0x10))
        length = head.uint(1 << (flags & 3))
        found: list[Message] = []
        blocks, seen = [(address, head.at, head.at + length + 4)], dict[int, int]()
        while blocks:
            begin, skipped, size = blocks.pop(0)
            whole = self._block(begin, size, seen, what)
            block = StructureFields(self.summed(whole.data, whole.begin, what), whole.begin, what)
            if block.take(skipped)[:4] not in (b"OHDR", b"OCHK"):
                raise CorruptError(f"{what}, byte {block.begin:,}: not a block of a header; the file is damaged")
            prefix = 4 + 2 * bool(flags & 4)
            while block.left >= prefix:
                kind, size, bits = _MESSAGE_2.unpack(block.take(4))
                block.take(prefix - 4)
                at = block.begin + block.at
                self._count(found, Message(kind, block.take(size), at, bits), what)
                if kind == _CONTINUED:
                    start, length = self._continued(found[-1], what)
                    blocks.append((start, 4, length))
        return self._resolved(found, what)

    def _continued(self, message: Message, what: str) -> tuple[int, int]:
        fields = StructureFields(message.data, message.at, what)
        return fields.uint(self.wide), fields.uint(self.long)

    def _resolved(self, messages: list[Message], what: str) -> list[Message]:
        """Resolve messages: drop placeholders, and replace each shared message with the one that it refers to."""
        found = []
        for message in messages:
            if message.kind > _KNOWN and message.flags & 0x80:
                raise UnsupportedFormatError(
                    f"{what}, byte {message.at:,}: a message of type {message.kind} is not known and must be"
                )
            if message.flags & 2 and message.kind in (_SPACE, _TYPE, _PIPELINE, _ATTRIBUTE):
                message = self._shared(message, what)
            found.append(message)
        return found

    def _shared(self, message: Message, what: str) -> Message:
        """Return the message in another object's header (a committed data type)."""
        fields = StructureFields(message.data, message.at, what)
        version, where = self.version(fields, (1, 2, 3), "a shared message"), fields.uint(1)
        if version == 3 and where == 1:
            raise UnsupportedFormatError(
                f"{what}, byte {message.at:,}: a message is shared in a heap, which is not read"
            )
        if version == 1:
            fields.take(6)
        address = fields.uint(self.wide)
        self._sharing += 1  # a shared message in the header of a shared message …
        others = self._header(address, what) if self._sharing < 4 else []
        self._sharing -= 1
        for other in others:
            if other.kind == message.kind:
                return other
        raise CorruptError(
            f"{what}, byte {message.at:,}: the object at byte {self.origin + self.base + address:,} does not hold the "
            "message that is shared; the file is damaged"
        )

    # ---- groups ------------------------------------------------------------------------------------------------------

    def _members(self, messages: list[Message], path: str) -> dict[str, int]:
        """Return the members of a group: names and addresses."""
        members: dict[str, int] = {}
        what = self.what(path or "/")

        def add(name: bytes, address: int, at: int) -> None:
            try:
                text = name.decode()
            except UnicodeDecodeError:
                text = ""
            if not text or "/" in text or "\0" in text or text in (".", "..") or text in members:
                raise CorruptError(
                    f"{what}, byte {at:,}: the name {quoted(name)} occurs twice or is not valid; the file is damaged"
                )
            self._letters -= len(path) + len(text)
            if self._letters < 0 or len(members) > OBJECTS:
                raise UnsafeError(f"{what}, byte {at:,}: names of over {NAMES_LIMIT:,} bytes in all; refused")
            members[text] = address

        for message in messages:
            fields = StructureFields(message.data, message.at, what)
            if message.kind == _SYMBOLS:
                tree, heap = fields.uint(self.wide), fields.uint(self.wide)
                for name, address, at in self._symbol_table(tree, self._local_heap(heap, what), what):
                    add(name, address, at)
            elif message.kind == _LINK:
                if (link := self._link(fields)) is not None:
                    add(*link, message.at)
            elif message.kind == _LINKS:
                self.version(fields, (0,), "a group's links")
                fields.take(8 * (fields.uint(1) & 1))
                for stored in self._dense(fields, 4):
                    if (link := self._link(stored)) is not None:
                        add(*link, stored.begin)
        return members

    def _dense(self, fields: StructureFields, skipped: int) -> Iterator[StructureFields]:
        """Yield the links or attributes in a heap and an index of their names, if the index exists.

        ``skipped``: bytes of a record of the index before the object's id in the heap; 0 if it comes first.
        """
        heap, index = self.address(fields), self.address(fields)
        if heap is not None and index is not None:
            yield from read_stored(
                self, heap, [row[skipped:] for row in read_records(self, index, fields.what)], fields.what
            )

    def _link(self, fields: StructureFields) -> tuple[bytes, int] | None:
        """Name and address of a hard link; others are noted."""
        self.version(fields, (1,), "a link")
        flags = fields.uint(1)
        kind = fields.uint(1) if flags & 8 else 0
        fields.take(8 * bool(flags & 4) + bool(flags & 16))
        name = fields.take(fields.uint(1 << (flags & 3)))
        if kind:
            self._not_followed(name, fields.what, fields.begin)
            return None
        return name, fields.uint(self.wide)

    def _not_followed(self, name: bytes, what: str, at: int) -> None:
        self.note(f"{what}, byte {at:,}: {quoted(name)} is a soft or external link, which is not followed")

    def _local_heap(self, address: int, what: str) -> StructureFields:
        """Return the local heap with the names of a group."""
        fields = self.marked(address, 8 + 2 * self.long + self.wide, b"HEAP", what)
        self.version(fields, (0,), "a heap of names")
        fields.take(3)
        size = fields.uint(self.long)
        fields.take(self.long)
        return self.read(fields.uint(self.wide), size, what)

    def _symbol_table(self, tree: int, heap: StructureFields, what: str) -> Iterator[tuple[bytes, int, int]]:
        """Yield name, address and byte of each member of a group of version 1."""

        def name_at(offset: int, at: int) -> bytes:
            end = heap.data.find(b"\0", offset, offset + NAME_LIMIT)
            if end < 0:
                raise CorruptError(
                    f"{what}, byte {at:,}: a name at byte {offset:,} of a heap of {len(heap.data):,} does not end; the "
                    "file is damaged"
                )
            return heap.data[offset:end]

        last = b""
        for _, node, greatest in read_tree(self, tree, 0, self.long, what):
            head = self.marked(node, 8, b"SNOD", what)
            self.version(head, (1,), "a symbol table's node")
            head.take(1)
            size = 2 * self.wide + 24
            rows = self.read(node + 8, head.uint(2) * size, what)
            while rows.left:
                at = rows.begin + rows.at
                offset, address, kind = rows.uint(self.wide), rows.uint(self.wide), rows.uint(4)
                rows.take(20)
                name = name_at(offset, at)
                if name <= last:
                    raise CorruptError(f"{what}, byte {at:,}: the name {quoted(name)} is out of order; it is damaged")
                last = name
                if kind == 2:
                    self._not_followed(name, what, at)
                else:
                    yield name, address, at
            if last != (expected := name_at(int.from_bytes(greatest, "little"), head.begin)):
                raise CorruptError(
                    f"{what}, byte {head.begin:,}: the last name of a node is {quoted(last)} and should be "
                    f"{quoted(expected)}; members of the group are lost"
                )

    # ---- data sets ---------------------------------------------------------------------------------------------------

    def _data_set(self, path: str, at: int, messages: list[Message]) -> DataSet:
        what = self.what(path)
        by_kind: dict[int, Message] = {}
        for message in messages:
            if (
                message.kind in (_SPACE, _TYPE, _LAYOUT, _PIPELINE)
                and by_kind.setdefault(message.kind, message) != message
            ):
                raise CorruptError(
                    f"{what}, byte {message.at:,}: a second message of type {message.kind}; it is damaged"
                )
        if not {_SPACE, _TYPE} <= set(by_kind):
            raise CorruptError(f"{what}, byte {at:,}: a data set without a shape or a type; the file is damaged")
        shape, most = self._space(StructureFields(by_kind[_SPACE].data, by_kind[_SPACE].at, what))
        element = read_element(StructureFields(by_kind[_TYPE].data, by_kind[_TYPE].at, what))
        found = DataSet(path, at, messages, element, shape)
        if any(message.kind == _EXTERNAL for message in messages):
            found.why = f"has its elements in another file (byte {at:,})"
        elif element.why:
            found.why = element.why
        elif shape is None:
            found.why = "has no elements (a null data space)"
        if found.why or shape is None:
            return found
        layout = StructureFields(by_kind[_LAYOUT].data, by_kind[_LAYOUT].at, what)
        version = layout.uint(1)
        if version not in (3, 4, 5):
            found.why = f"has a layout of version {version} (byte {layout.begin:,})"
            return found
        kind = layout.uint(1)
        nbytes = prod(shape) * element.size
        if kind == 0:
            size = layout.uint(2)
            found.start = layout.begin + layout.at
            found.stop = found.start + len(layout.take(size))
        elif kind == 1:
            address, size = self.address(layout), layout.uint(self.long)
            if address is not None and size:
                found.start = self.origin + self.base + address
                found.stop = found.start + size
        elif kind == 2:
            mask = self._filters(by_kind.get(_PIPELINE), found, what)
            if not found.why:
                self._chunked(layout, version, found, most, mask)
            return found
        else:
            found.why = f"is a virtual data set, a view of others (byte {layout.begin:,})"
            return found
        if found.start >= 0 and found.stop - found.start != nbytes:
            raise CorruptError(
                f"{what}, byte {layout.begin:,}: {plural(found.stop - found.start, 'byte', 'are')} stored for {shape} "
                f"of {element.size} bytes each, {nbytes:,}; the file is damaged"
            )
        if found.stop > self.origin + len(self.view):
            raise TruncatedError(
                f"{what}: its elements are bytes {found.start:,} to {found.stop:,}, and the file ends at byte "
                f"{self.origin + len(self.view):,}; it is truncated, or an address in it is wrong"
            )
        return found

    def _space(self, fields: StructureFields) -> tuple[tuple[int, ...] | None, tuple[int, ...]]:
        """Return the shape of a data space and its largest allowed shape; ``None`` for a space without elements."""
        version = self.version(fields, (1, 2), "a data space")
        axes, flags = fields.uint(1), fields.uint(1)
        kind = fields.uint(1)
        if version == 1:
            fields.take(4)
        shape = tuple(fields.uint(self.long) for _ in range(axes))
        most = tuple(fields.uint(self.long) for _ in range(axes)) if flags & 1 else shape
        if axes > 32 or prod(shape) > MAX_ELEMENTS or max(shape, default=0) > MAX_ELEMENTS:
            raise CorruptError(f"{fields.what}, byte {fields.begin:,}: the impossible shape {shape[:8]}; it is damaged")
        return (None if version == 2 and kind == 2 else shape), most

    def _filters(self, message: Message | None, found: DataSet, what: str) -> int:
        """Read the filters of a data set; returns how many there are."""
        if message is None:
            return 0
        fields = StructureFields(message.data, message.at, what)
        version, count = self.version(fields, (1, 2), "a filter pipeline"), fields.uint(1)
        if version == 1:
            fields.take(6)
        names = []
        for _ in range(count):
            number = fields.uint(2)
            length = fields.uint(2) if version == 1 or number >= 256 else 0
            fields.take(2)
            values = fields.uint(2)
            fields.take(length + (-length % 8 if version == 1 else 0))
            given = [fields.uint(4) for _ in range(values)]
            if version == 1 and values % 2:
                fields.take(min(4, fields.left))
            names.append(FILTERS.get(number, OTHERS.get(number, f"filter {number}")))
            if names[-1] == "shuffle" and given[:1] != [found.element.size]:
                names[-1] = "shuffle of another size"
        found.filters, listed = tuple(names), ", ".join(names)
        if codecs.filtered(found.filters, False) is None:
            found.why = f"is stored through filters that cannot be undone here: {listed} (byte {message.at:,})"
        return len(names)

    # ---- chunks ------------------------------------------------------------------------------------------------------

    def _chunked(
        self, layout: StructureFields, version: int, found: DataSet, most: tuple[int, ...], filters: int
    ) -> None:
        """Read the index of a data set in chunks."""
        what, shape = layout.what, found.shape or ()
        address: int | None = None
        flags, kind = 0, 0
        if version == 3:
            axes = layout.uint(1)
            address = self.address(layout)
            sizes = tuple(layout.uint(4) for _ in range(axes))
        else:
            flags, axes = layout.uint(1), layout.uint(1)
            width = layout.uint(1)
            sizes = tuple(layout.uint(width) for _ in range(axes))
            kind = layout.uint(1)
        chunk = found.chunk = sizes[:-1]
        nbytes = prod(chunk) * found.element.size
        if (
            not shape
            or len(chunk) != len(shape)
            or sizes[-1:] != (found.element.size,)
            or 0 in chunk
            or nbytes >= 1 << 40
        ):
            raise CorruptError(
                f"{what}, byte {layout.begin:,}: chunks of {sizes} for {shape} of {found.element.size} bytes each; the "
                "file is damaged"
            )
        whole = tuple(-(-n // size) for n, size in zip(shape, chunk, strict=True))
        if prod(whole) > MOST_CHUNKS:
            raise UnsafeError(f"{what}: {plural(prod(whole), 'chunk')}, over the limit of {MOST_CHUNKS:,}; refused")
        if flags & 1:
            found.why = f"has edge chunks without filters (byte {layout.begin:,})"
            return
        if 0 in shape:
            return
        if kind == 0:
            rows = tree_rows(self, address, len(chunk), what)
        else:
            # places are counted in the grid of the largest shape
            ends = tuple(size if n >> 8 * self.long - 1 else n for n, size in zip(most, shape, strict=True))
            grid = tuple(-(-n // size) for n, size in zip(ends, chunk, strict=True))
            if kind == 1:
                size, mask = (layout.uint(self.long), layout.uint(4)) if flags & 2 else (nbytes, 0)
                address = self.address(layout)
                places = np.zeros(0 if address is None else 1, np.int64)
                rows = places, places + min(address or 0, _FAR), places + min(size, _FAR), places + mask
            elif kind == 2:
                address = self.address(layout)
                if address is not None and address + prod(grid) * nbytes > len(self.view):
                    raise TruncatedError(
                        f"{what}: {plural(prod(grid), 'chunk')} of {plural(nbytes, 'byte')} follow byte "
                        f"{self.origin + address:,}, and "
                        f"the file ends at byte {self.origin + len(self.view):,}; it is truncated or damaged"
                    )
                places = np.arange(0 if address is None else prod(grid), dtype=np.int64)
                rows = places, (address or 0) + places * nbytes, np.full_like(places, nbytes), np.zeros_like(places)
            elif kind == 3:
                layout.take(1)
                rows = fixed_array(self, self.address(layout), bool(filters), nbytes, what)
            elif kind == 5:
                layout.take(6)
                rows = record_rows(self, self.address(layout), bool(filters), grid, nbytes, what)
            else:
                name = {4: "an extensible array"}.get(kind, f"of type {kind}")
                found.why = f"has an index of chunks that is {name} (byte {layout.begin:,}), which is not read"
                return
            if len(rows[0]) and rows[0].max() >= prod(grid):
                raise CorruptError(
                    f"{what}, byte {layout.begin:,}: more chunks than the grid {grid} has; it is damaged"
                )
            at = np.stack(np.unravel_index(rows[0], grid), axis=1)
            inside = (at < np.array(whole, np.int64)).all(axis=1)
            _, starts, lengths, masks = rows
            rows = (at * np.array(chunk, np.int64))[inside], starts[inside], lengths[inside], masks[inside]
        self._settle(found, rows, filters, nbytes, what)

    def _settle(self, found: DataSet, rows: Any, filters: int, nbytes: int, what: str) -> None:
        """Check the chunks and record them."""
        offsets, starts, sizes, masks = rows
        shape, chunk = np.array(found.shape, np.int64), np.array(found.chunk, np.int64)
        starts = starts + self.origin + self.base
        wrong = ((offsets % chunk != 0) | (offsets < 0) | (offsets >= shape)).any(axis=1)
        plain = masks & (1 << filters) - 1 == (1 << filters) - 1
        wrong |= plain & (sizes != nbytes)
        end = self.origin + len(self.view)
        wrong |= (starts < self.origin) | (starts > end) | (sizes < 0) | (sizes > end - np.minimum(starts, end))
        if wrong.any():
            row = int(np.flatnonzero(wrong)[0])
            raise CorruptError(
                f"{what}: its chunk at {tuple(offsets[row].tolist())} should be {plural(int(sizes[row]), 'byte')} at "
                f"byte {int(starts[row]):,}, which does not fit the shape {found.shape}, the chunks of {found.chunk} "
                f"or the file of {plural(end, 'byte')}; it is damaged or truncated"
            )
        found.offsets, found.starts, found.sizes, found.masks = offsets, starts, sizes, masks

    # ---- attributes --------------------------------------------------------------------------------------------------

    def attributes(self, of: Hdf5Group) -> dict[str, Any]:
        """Return the attributes of an object: numbers, text, or nested lists of them; others are noted and left out.

        Raises:
            CorruptError: one contradicts itself; UnsafeError: they are too long.
        """
        found: dict[str, Any] = {}
        what = self.what(of.path or "/")
        for message in of.messages:
            if message.kind == _ATTRIBUTE:
                name, value = self._attribute(StructureFields(message.data, message.at, what))
                if value is not None:
                    found[name] = value
            elif message.kind == _ATTRIBUTES:
                fields = StructureFields(message.data, message.at, what)
                self.version(fields, (0,), "an attribute table")
                fields.take(2 * (fields.uint(1) & 1))
                for stored in self._dense(fields, 0):
                    name, value = self._attribute(stored)
                    if value is not None:
                        found[name] = value
        return found

    def _attribute(self, fields: StructureFields) -> tuple[str, Any]:
        version = self.version(fields, (1, 2, 3), "an attribute")
        flags = fields.uint(1)
        sizes = [fields.uint(2) for _ in range(3)]
        fields.take(version == 3)
        parts = []
        for size in sizes:
            at = fields.begin + fields.at
            parts.append(StructureFields(fields.take(size), at, fields.what))
            if version == 1:
                fields.take(min(-size % 8, fields.left))
        name = parts[0].data.rstrip(b"\0").decode("utf-8", "backslashreplace")
        for bit, kind, part in ((1, _TYPE, 1), (2, _SPACE, 2)):
            if version > 1 and flags & bit:
                shared = self._shared(Message(kind, parts[part].data, parts[part].begin, 2), fields.what)
                parts[part] = StructureFields(shared.data, shared.at, fields.what)
        element = read_element(parts[1])
        shape, _ = self._space(parts[2])
        if element.why or shape is None:
            return name, None
        self._text -= element.size * prod(shape)
        if self._text < 0:
            raise UnsafeError(f"{fields.what}, byte {fields.begin:,}: attributes of over {TEXT_LIMIT:,} bytes; refused")
        return name, self.values(fields.take(element.size * prod(shape)), element, shape, fields)

    def values(
        self, data: bytes, element: Element, shape: tuple[int, ...], fields: StructureFields | None = None
    ) -> Any:
        """Read the elements of an attribute or a data set of strings, as nested lists."""
        count = prod(shape)
        check_listed(shape, fields.what if fields else self.what())
        parts = [data[n * element.size : (n + 1) * element.size] for n in range(count if element.size else 0)]
        if element.name in ("text", "texts"):
            read = partial(self._text_of, what=fields.what if fields else self.what())
            texts = [part if element.name == "text" else read(part) for part in parts] or [b""] * count
            return nested([text.split(b"\0")[0].decode("utf-8", "backslashreplace") for text in texts], shape)
        from_numpy = {"bool": "?", "bits8": "u1", "bits16": "u2", "bfloat16": "u2"}.get(element.name, element.name)
        dtype = np.dtype(from_numpy).newbyteorder(">" if element.big else "<")
        found = np.frombuffer(data, dtype).reshape(shape)
        return None if element.name.startswith("complex") else found.tolist()

    def _text_of(self, reference: bytes, what: str) -> bytes:
        """Read a variable-length string: the bytes of an object of a global heap."""
        fields = StructureFields(reference, 0, what)
        length, address, number = fields.uint(4), self.address(fields), fields.uint(4)
        if not length or not address:
            return b""
        self._text -= length
        if self._text < 0:
            raise UnsafeError(f"{what}: text of over {TEXT_LIMIT:,} bytes; refused")
        text = self._global_heap(address, what).get(number)
        if text is None or len(text) < length:
            raise CorruptError(
                f"{what}: a text of {plural(length, 'byte')} is object {number:,} of the heap at byte "
                f"{self.origin + self.base + address:,}, which does not hold it; the file is damaged"
            )
        return text[:length]

    def _global_heap(self, address: int, what: str) -> dict[int, bytes]:
        if address not in self._heaps:
            head = self.marked(address, 8 + self.long, b"GCOL", what)
            self.version(head, (1,), "a global heap")
            head.take(3)
            size = head.uint(self.long)
            fields = self.read(address, size, what)
            fields.take(min(len(head.data), size))
            objects: dict[int, bytes] = {}
            while fields.left >= 8 + self.long:
                number = fields.uint(2)
                if not number:
                    break
                fields.take(6)
                objects[number] = fields.take(fields.uint(self.long))
                fields.pad()
            self._heaps[address] = objects
        return self._heaps[address]
