"""The indices in which HDF5 stores the place of each chunk: B-trees of version 1 (also of groups) and 2, fixed arrays.

::

    "TREE"    type u8 │ level u8 │ entries u16 │ neighbours │ key │ child │ key │ … │ key
      chunk   key: bytes u32 │ skipped filters u32 │ first element of each axis u64 │ 0 u64
    "BTHD"    records: first byte │ bytes, skipped filters u32 where there are any │ place in the grid of each axis u64
    "FAHD"    "FADB": first byte (bytes, skipped filters) of each place in the grid; in pages, if there are many

Sources: HDF5 File Format Specification, III.A and appendix C; hdf5 2.0 ``H5Dfarray.c``, ``H5FAdblock.c``.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from workbench.core.arrays import Array
from workbench.core.words import plural
from workbench.errors import CorruptError
from workbench.formats.keras.dense import read_records
from workbench.formats.keras.structures import Structures

MOST_CHUNKS = 1 << 26


def read_tree(file: Structures, root: int, kind: int, key: int, what: str) -> Iterator[tuple[bytes, int, bytes]]:
    """Yield the children of the leaves of a version 1 B-tree, in order, with the keys before and after each."""
    waiting: list[tuple[int, int | None]] = [(root, None)]
    while waiting:
        address, expected = waiting.pop()
        head = file.marked(address, 8 + 2 * file.wide, b"TREE", what)
        found, level, count = head.uint(1), head.uint(1), head.uint(2)
        if found != kind or (expected is not None and level != expected):
            raise CorruptError(
                f"{what}, byte {head.begin:,}: a node of type {found} and level {level} where {kind} and "
                f"{expected or 0} are needed; the file is damaged"
            )
        rows = file.read(address + len(head.data), count * (key + file.wide) + key, what)
        parts = [(rows.take(key), rows.uint(file.wide)) for _ in range(count)]
        if level:
            waiting += [(child, level - 1) for _, child in reversed(parts)]
        else:
            keys = [*(before for before, _ in parts[1:]), rows.take(key)]
            yield from ((before, child, after) for (before, child), after in zip(parts, keys, strict=False))


def tree_rows(file: Structures, root: int | None, axes: int, what: str) -> tuple[Array, Array, Array, Array]:
    """Return offsets, addresses, bytes and filter masks of the chunks in a version 1 B-tree."""
    key = 8 + 8 * (axes + 1)
    parts, addresses = [], []
    for row, address, _ in read_tree(file, root, 1, key, what) if root is not None else ():
        parts.append(row)
        addresses.append(address)
    table = np.frombuffer(b"".join(parts), np.dtype([("size", "<u4"), ("mask", "<u4"), ("at", "<u8", (axes + 1,))]))
    starts = np.array(addresses, np.uint64).astype(np.int64)
    return (
        table["at"][:, :axes].astype(np.int64),
        starts,
        table["size"].astype(np.int64),
        table["mask"].astype(np.int64),
    )


def record_rows(
    file: Structures, address: int | None, filtered: bool, grid: tuple[int, ...], nbytes: int, what: str
) -> tuple[Array, Array, Array, Array]:
    """Return positions, addresses, bytes and filter masks of the chunks in a version 2 B-tree."""
    none = np.empty(0, np.int64)
    records = list(read_records(file, address, what)) if address is not None else []
    if not records:
        return none, none, none, none
    table = np.frombuffer(b"".join(records), np.uint8).reshape(len(records), -1)
    width = table.shape[1] - file.wide - 4 * filtered - 8 * len(grid)  # bytes of a chunk's size
    if not 0 <= width <= 8 or (width and not filtered):
        raise CorruptError(f"{what}: a chunk's record has {table.shape[1]} bytes; the file is damaged")
    at = np.stack(
        [_integers(table[:, n : n + 8]) for n in range(table.shape[1] - 8 * len(grid), table.shape[1], 8)], axis=1
    )
    if (at < 0).any() or (at >= np.array(grid, np.int64)).any():
        raise CorruptError(f"{what}: a chunk is outside of the grid of {grid}; the file is damaged")
    places, starts = np.ravel_multi_index(tuple(at.T), grid), _integers(table[:, : file.wide])
    if not filtered:
        return places, starts, np.full_like(places, nbytes), np.zeros_like(places)
    end = file.wide + width
    return places, starts, _integers(table[:, file.wide : end]), _integers(table[:, end : end + 4])


def fixed_array(
    file: Structures, address: int | None, filtered: bool, nbytes: int, what: str
) -> tuple[Array, Array, Array, Array]:
    """Return positions, addresses, bytes and filter masks of the chunks in a fixed array."""
    none = np.empty(0, np.int64)
    if address is None:
        return none, none, none, none
    head = file.marked(address, 12 + file.long + file.wide, b"FAHD", what)
    file.summed(head.data, head.begin, what)
    file.version(head, (0,), "a fixed array")
    head.take(1)
    item, bits = head.uint(1), head.uint(1)
    count, block = head.uint(file.long), file.address(head)
    width = item - file.wide - 4 if filtered else 0  # bytes of a chunk's size
    if not 0 <= width <= 8 or item != file.wide + (4 + width) * filtered or bits > 24 or count > MOST_CHUNKS:
        raise CorruptError(
            f"{what}, byte {head.begin:,}: a fixed array of {plural(count, 'item')} of {item} bytes; damaged"
        )
    if block is None:
        return none, none, none, none
    pages = -(-count >> bits) if count > 1 << bits else 0
    prefix = 6 + file.wide + -(-pages // 8)
    data = file.marked(block, prefix + 4 if pages else prefix + count * item + 4, b"FADB", what)
    file.summed(data.data, data.begin, what)
    parts = [(0, data.data[prefix:-4])]
    if pages:  # each with its own checksum; places without a chunk were never written
        parts, at = [], block + prefix + 4
        for page in range(pages):
            length = min(count - (page << bits), 1 << bits) * item
            if data.data[6 + file.wide + page // 8] & 128 >> page % 8:
                stored = file.read(at, length + 4, what)
                parts.append((page << bits, file.summed(stored.data, stored.begin, what)))
            at += length + 4
    if not parts:
        return none, none, none, none
    places = np.concatenate([np.arange(first, first + len(part) // item) for first, part in parts])
    table = np.frombuffer(b"".join(part for _, part in parts), np.uint8).reshape(-1, item)
    allocated = ~(table[:, : file.wide] == 255).all(axis=1)
    places, table = places[allocated], table[allocated]
    starts = _integers(table[:, : file.wide])
    if not filtered:
        return places, starts, np.full_like(places, nbytes), np.zeros_like(places)
    return places, starts, _integers(table[:, file.wide : -4]), _integers(table[:, -4:])


def _integers(columns: Array) -> Array:
    """Decode little-endian integers ``(N, bytes) uint8`` as ``int64``."""
    wide = np.zeros((len(columns), 8), np.uint8)
    wide[:, : columns.shape[1]] = columns
    return wide.view("<i8")[:, 0]
