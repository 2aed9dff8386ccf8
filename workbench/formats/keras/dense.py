"""Fractal heaps and B-trees of version 2, in which HDF5 stores many links or attributes, and chunks of two open axes.

::

    "BTHD" ► "BTIN" ► "BTLF"    records of one size: a hash of the name, and an id │ address and place of a chunk
    id                          kind │ offset │ length         in the space of the heap
    "FRHP" ► "FHIB" ► "FHDB"    the heap: blocks whose sizes double from row to row, of ``width`` blocks each

Sources: HDF5 File Format Specification, III.A.2 and III.G; hdf5 2.0 ``H5B2hdr.c``, ``H5HFdtable.c``, ``H5HFhdr.c``.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

from workbench.core.words import plural
from workbench.errors import CorruptError, UnsupportedFormatError
from workbench.formats.keras.structures import StructureFields, Structures

DEPTH = 16  #: maximum depth of nodes


def _bytes_of(largest: int) -> int:
    """Return how many bytes store numbers up to ``largest``."""
    return (max(largest, 1).bit_length() - 1) // 8 + 1


# ---- B-trees ---------------------------------------------------------------------------------------------------------


def read_records(file: Structures, address: int, what: str) -> Iterator[bytes]:
    """Yield the records of a B-tree of version 2.

    Raises:
        CorruptError, TruncatedError, UnsupportedFormatError: it is not a B-tree, or a checksum is wrong.
    """
    head = file.marked(address, 22 + file.wide + file.long, b"BTHD", what)
    file.summed(head.data, head.begin, what)
    file.version(head, (0,), "a B-tree of version 2")
    head.take(1)
    node, size, depth = head.uint(4), head.uint(2), head.uint(2)
    head.take(2)
    root, count = file.address(head), head.uint(2)
    if depth > DEPTH or not size or node <= 10 + size:
        raise CorruptError(
            f"{what}, byte {head.begin:,}: nodes of {plural(node, 'byte')}, {depth} deep; the file is damaged"
        )
    most = (node - 10) // size
    width, totals = _bytes_of(most), [0]  # bytes of a child's records, and of all records below it, by level
    below = most
    for _ in range(depth):
        pointer = file.wide + width + totals[-1]
        held = (node - 10 - pointer) // (size + pointer)
        below = (held + 1) * below + held
        totals.append(_bytes_of(below))
    waiting = [(root, count, depth)] if root is not None else []
    while waiting:
        at, count, level = waiting.pop()
        pointer = file.wide + width + totals[level - 1] if level else 0
        length = 6 + count * size + (count + 1) * pointer * bool(level) + 4
        if length > node:
            raise CorruptError(
                f"{what}: a node of {plural(length, 'byte')} where {node:,} is the most; the file is damaged"
            )
        found = file.marked(at, length, b"BTIN" if level else b"BTLF", what)
        file.summed(found.data, found.begin, what)
        found.take(2)
        yield from (found.take(size) for _ in range(count))
        for _ in range((count + 1) * bool(level)):
            child, held = found.uint(file.wide), found.uint(width)
            found.take(totals[level - 1])
            waiting.append((child, held, level - 1))


# ---- heaps -----------------------------------------------------------------------------------------------------------


def read_stored(file: Structures, address: int, ids: Sequence[bytes], what: str) -> Iterator[StructureFields]:
    """Yield the objects of a fractal heap for ids (and the bytes that follow them).

    Raises:
        CorruptError, TruncatedError: they are not in the heap, or a checksum is wrong.
        UnsupportedFormatError: the heap is filtered, or an object is stored outside of its blocks.
    """
    long, wide = file.long, file.wide
    head = file.marked(address, 26 + 12 * long + 3 * wide, b"FRHP", what)
    file.version(head, (0,), "a fractal heap")
    head.take(2)
    if head.uint(2):
        raise UnsupportedFormatError(f"{what}, byte {head.begin:,}: a heap that is filtered, which is not read")
    file.summed(head.data, head.begin, what)
    flags, largest = head.uint(1), head.uint(4)
    head.take(10 * long + 2 * wide)
    table, start, most = head.uint(2), head.uint(long), head.uint(long)
    bits, _ = head.uint(2), head.uint(2)
    root, rows = file.address(head), head.uint(2)
    good = (
        start and most >= start and not start & (start - 1) and not most & (most - 1) and 0 < bits <= 64 and rows <= 64
    )
    if not good or not 0 < table <= 1 << 10:
        raise CorruptError(
            f"{what}, byte {head.begin:,}: a heap of blocks of {plural(start, 'byte')}; the file is damaged"
        )
    wide_offset = (bits + 7) // 8
    wide_length = min((most.bit_length() + 6) // 8, _bytes_of(largest))
    blocks = _HeapBlocks(file, start, most, table, wide_offset, bool(flags & 2), what)
    if root is not None:
        blocks.add(root, 0, start, rows)
    offsets = sorted(blocks.found)
    for one in ids:
        kind = one[0] >> 4 if one else 0
        if kind:
            raise UnsupportedFormatError(f"{what}: an object of kind {kind} of a heap, which is not read")
        offset = int.from_bytes(one[1 : 1 + wide_offset], "little")
        length = int.from_bytes(one[1 + wide_offset : 1 + wide_offset + wide_length], "little")
        place = bisect_right(offsets, offset) - 1
        first = offsets[place] if place >= 0 else 0
        block, inside = blocks.found.get(first), offset - first
        if block is None or inside + length > len(block.data):
            raise CorruptError(
                f"{what}, byte {head.begin:,}: an object of {plural(length, 'byte')} at {offset:,} is not in the heap; "
                "the file is damaged"
            )
        yield StructureFields(block.data[inside : inside + length], block.begin + inside, what)


class _HeapBlocks:
    """The blocks of a heap, by their first byte in its space."""

    def __init__(
        self, file: Structures, start: int, most: int, table: int, offset: int, checked: bool, what: str
    ) -> None:
        self.file, self.start, self.most, self.table = file, start, most, table
        self.offset, self.checked, self.what = offset, checked, what
        self.found: dict[int, StructureFields] = {}

    def add(self, address: int, first: int, size: int, rows: int, depth: int = DEPTH) -> None:
        """Add a block of ``size`` bytes, or those below one with rows."""
        file, prefix = self.file, 5 + self.file.wide + self.offset
        if not rows:
            block = file.marked(address, size, b"FHDB", self.what)
            if self.checked:
                end = prefix + 4
                file.summed(
                    block.data[:prefix] + bytes(4) + block.data[end:] + block.data[prefix:end], block.begin, self.what
                )
            self.found[first] = block
            return
        direct = (self.most // self.start).bit_length() + 1  # rows of blocks that hold objects
        count = rows * self.table
        if not depth:
            raise CorruptError(f"{self.what}: a heap of more than {DEPTH} nested blocks; the file is damaged")
        block = file.marked(address, prefix + count * file.wide + 4, b"FHIB", self.what)
        file.summed(block.data, block.begin, self.what)
        block.take(prefix - 4)
        for row in range(rows):
            size = self.start << max(row - 1, 0)
            for _ in range(self.table):
                child = file.address(block)
                if child is not None:
                    below = 0 if row < direct else (size // (self.start * self.table)).bit_length()
                    self.add(child, first, size, below, depth - 1)
                first += size
