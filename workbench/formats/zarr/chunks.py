"""From the keys of a store to chunks in a catalog; a store is a folder, or an OCDBT database.

::

    key                                        value                                       becomes
    params.embedder.embedding/.zarray          a description                               tensor
    params.embedder.embedding/0.1              bytes 5,787–8,688 of a file                 chunk
    params.norm.scale/0                        bytes 1,314–1,488 of a node's content       chunk, codec zstd+zstd
    params.wi.kernel/c/0/1                     a shard; its index is read                  a chunk for each inner one

Only descriptions and the indices of shards are read. A chunk without a value is a hole, whatever the fill value.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import numpy as np

from workbench.core import codecs
from workbench.core.arrays import Array
from workbench.core.box import row_major
from workbench.core.build import CatalogBuilder
from workbench.core.crc32 import crc32c_rows
from workbench.core.dtypes import by_name
from workbench.core.place import Place, stat_or_absent
from workbench.core.source import Source
from workbench.core.words import plural
from workbench.errors import CorruptError, TruncatedError, UnsafeError, UnsupportedFormatError
from workbench.formats.zarr.array import DESCRIPTIONS, ZarrArray, read_array
from workbench.formats.zarr.ocdbt import Leaf, read_leaves

DEPTH = 4  #: folders between the checkpoint and an array, whose name may contain "/"
DESCRIPTION_LIMIT = 16 << 20  #: bytes of the description of an array
MOST_CHUNKS = 1 << 23  #: inner chunks of the arrays of one description
TOGETHER = 4096  #: descriptions that are read at once …
SPAN = 64 << 10  #: … and bytes of them: memory that is used again, as fresh memory costs more than the bytes
NOTED = 3  #: arrays that are left out and have a note each
_PROCESS = re.compile(r"(?:^|/)ocdbt\.process_(\d{1,8})/")
#: Codec of a chunk in a file → codec of the same chunk in a node that is a zstd stream.
_WITHIN = {codecs.RAW: codecs.ZSTD, codecs.ZSTD: codecs.ZSTD_ZSTD, codecs.GZIP: codecs.ZSTD_GZIP}


@dataclass(frozen=True, slots=True)
class StoredValues:
    """Keys, and where their values are stored.

    Attributes:
        keys: in any order.
        files: names, relative to the checkpoint.
        file: ``(n,) int64`` positions in ``files``.
        start, length: ``(n,) int64`` bytes: of the file, or of ``content`` where ``within``.
        within: ``(n,) bool`` whether a value is in the content of a node that is stored as one zstd stream.
        content, stored: that content, and the first and last byte of the stream.
        whole: whether each value is a file.
    """

    keys: list[str]
    files: list[str]
    file: Array
    start: Array
    length: Array
    within: Array
    content: Array = field(default_factory=lambda: np.empty(0, np.uint8))
    stored: tuple[int, int] = (0, 0)
    whole: bool = False


def arrays_below(place: Place, prefix: str = "", depth: int = DEPTH) -> Iterator[str]:
    """Yield the folders that are arrays, in order; links are not followed."""
    here = place.sub(prefix) if prefix else place
    for folder in here.folders:
        inner = f"{prefix}/{folder}" if prefix else folder
        if place.is_link(inner):
            continue
        if any(name in place.sub(inner).files for name in DESCRIPTIONS):
            yield inner
        elif depth > 1:
            yield from arrays_below(place, inner, depth - 1)


def folder_values(place: Place, folder: str) -> Iterator[StoredValues]:
    """Yield the files of each array below a folder of the place."""
    for array in arrays_below(place, folder, DEPTH):
        sizes = dict(_files(place.sub(array), 33))
        keys = [f"{array}/{name}" for name in sizes]
        counts, none = np.arange(len(keys)), np.zeros(len(keys), np.int64)
        lengths = np.fromiter(sizes.values(), np.int64, len(keys))
        yield StoredValues(
            [key[len(folder) + bool(folder) :] for key in keys], keys, counts, none, lengths, none > 0, whole=True
        )


def _files(place: Place, depth: int) -> Iterator[tuple[str, int]]:
    yield from ((name, stat.size) for name, stat in place.files.items())
    for folder in place.folders if depth else ():
        if folder.isdecimal() or folder == "c":
            yield from ((f"{folder}/{name}", size) for name, size in _files(place.sub(folder), depth - 1))


_NONE = -1  #: the place of a key that is not a chunk's


@dataclass
class _Described:
    """A description, the places in the grid that its arrays' keys stand for, and the chunks to be added.

    Attributes:
        places: key → position in ``grid``, the places so far.
        rows, tensors, at: of each chunk its row, tensor and position in ``grid``.
        ordinary: whether chunks can be read and have no checksums of their own.
    """

    array: ZarrArray
    places: dict[str, int] = field(default_factory=lambda: dict.fromkeys(DESCRIPTIONS, _NONE))
    grid: list[tuple[int, ...]] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    tensors: list[int] = field(default_factory=list)
    at: list[int] = field(default_factory=list)
    ordinary: bool = True

    def __post_init__(self) -> None:
        self.ordinary = self.array.codec != codecs.OPAQUE and not self.array.tail and not self.array.more

    def place(self, key: str) -> int:
        """Decode a key that was not met before."""
        at = self.array.place(key)
        if at is not None:
            self.grid.append(at)
        self.places[key] = found = len(self.grid) - 1 if at is not None else _NONE
        return found


_LEFT_OUT = _Described(ZarrArray((), (), (), by_name("uint8"), codecs.OPAQUE, "."))  #: of arrays that are not read


@dataclass
class Adder:
    """Adds the arrays of stores to a catalog, and collects notes about them."""

    place: Place
    builder: CatalogBuilder
    notes: list[str] = field(default_factory=list)
    opaque: list[str] = field(default_factory=list)
    checked: dict[str, str] = field(default_factory=dict)
    largest: int = 0
    arrays: int = 0
    _sources: dict[str, Source] = field(default_factory=dict)
    _kinds: dict[tuple[str, bytes], _Described] = field(default_factory=dict)

    def databases(self, folders: Sequence[str], name: Callable[[str], str]) -> None:
        """Add the arrays of OCDBT databases, one store together; ``name`` makes a tensor's key of an array's."""
        used = partial(self.builder.file, metadata=True)
        leaves = (leaf for folder in folders for leaf in read_leaves(self.place, folder, used))
        self.add([_of_leaf(leaf) for leaf in leaves], name)

    def folder(self, folder: str, name: Callable[[str], str]) -> None:
        """Add the arrays that are folders."""
        for one in folder_values(self.place, folder):
            self.add([one], name)

    def meta(self) -> dict[str, Any]:
        """Return the facts about the arrays for the catalog's ``meta``."""
        if self.opaque:
            self.notes.append(
                f"{plural(len(self.opaque), 'array', 'have')} a filter, a byte order or a compressor that cannot be "
                f"undone here, such as blosc; they are listed but not read: {self.opaque[0]!r} …"
            )
        found = {"step": None, "notes": self.notes, "largest_chunk": self.largest}
        return found | ({"chunk_crc32c": self.checked, "archive": "zarr"} if self.checked else {})

    def add(self, stores: Sequence[StoredValues], name: Callable[[str], str]) -> None:
        """Add the arrays of one store, whose keys may be in several parts.

        Raises:
            CorruptError: a description, a shard's index or a chunk contradicts the others.
        """
        tensors: dict[str, tuple[int, _Described]] = {}
        left_out: dict[str, str] = {}
        declare, before, found = self.builder.tensor, ("", b""), None
        for values in stores:
            rows = [row for row, key in enumerate(values.keys) if key.endswith(DESCRIPTIONS)]
            for row, data in zip(rows, self._texts(values, rows), strict=True):
                array, _, kind = values.keys[row].rpartition("/")
                if not array or kind not in DESCRIPTIONS:
                    continue
                if (kind, data) != before:  # hashing it takes longer than all else
                    before = kind, data
                    found = self._kinds.get(before)
                if found is None:
                    try:
                        found = self._kind(
                            data, kind, values.files[values.file[row]] if values.whole else values.keys[row]
                        )
                    except UnsupportedFormatError as error:
                        left_out[array] = str(error)
                        tensors[array] = _NONE, _LEFT_OUT
                        continue
                if array in tensors and tensors[array][1] is not found:
                    raise CorruptError(
                        f"array {array!r} is described twice, and differently; it is unknown which is valid"
                    )
                key = name(array)
                tensors[array] = declare(key, found.array.dtype, found.array.shape), found
                if found.ordinary:
                    continue
                if found.array.codec == codecs.OPAQUE:
                    self.opaque.append(key)
                else:
                    self.checked[key] = "behind" if found.array.tail else "inside"
        self.arrays += len(tensors) - len(left_out)
        third = any(kind.array.prefix for kind in self._kinds.values())
        odd = {array for array in tensors if array.endswith("/c")} if third else None
        strays = [key for values in stores for key in self._chunks(values, tensors, odd)]
        self.notes += [f"array {array!r} is left out: {error}" for array, error in list(left_out.items())[:NOTED]]
        if len(left_out) > NOTED:
            self.notes.append(f"{plural(len(left_out) - NOTED, 'more array', 'are')} left out for similar reasons")
        if strays:
            self.notes.append(f"{plural(len(strays), 'key', 'belong')} to no array; left out: {strays[0]!r} …")

    def _kind(self, data: bytes, kind: str, file: str) -> _Described:
        """Decode a description, which many arrays usually share."""
        found = self._kinds[kind, data] = _Described(read_array(data, file))
        self.largest = max(self.largest, found.array.chunk_nbytes + found.array.more)
        return found

    def _texts(self, values: StoredValues, rows: list[int]) -> Iterator[bytes]:
        """Yield the values that are descriptions."""
        for at in range(0, len(rows), TOGETHER):
            yield from self._read(values, rows[at : at + TOGETHER])

    def _read(self, values: StoredValues, rows: list[int]) -> list[bytes]:
        chosen = np.array(rows, np.int64)
        files, lengths, within = values.file[chosen], values.length[chosen], values.within[chosen]
        if lengths.max(initial=0) > DESCRIPTION_LIMIT:
            key = values.keys[rows[int(lengths.argmax())]]
            raise UnsafeError(
                f"{key!r} has {plural(int(lengths.max()), 'byte')}, over the limit of {DESCRIPTION_LIMIT:,}"
            )
        starts = values.start[chosen].tolist()
        stops = (values.start[chosen] + lengths).tolist()
        content, texts = memoryview(values.content), [b""] * len(rows)
        for i in np.flatnonzero(within).tolist():
            texts[i] = bytes(content[starts[i] : stops[i]])
        for file in np.unique(files[~within]).tolist():
            name, mine = values.files[file], np.flatnonzero(~within & (files == file)).tolist()
            if values.whole:
                self.builder.file(name, metadata=True)
                for i in mine:
                    texts[i] = self.place.read(name)
                continue
            spans = [(starts[i], stops[i]) for i in mine]
            for i, data in zip(mine, _ranges(self._source(name), spans), strict=True):
                texts[i] = data
        if sum(map(len, texts)) < (int(lengths.sum()) if not values.whole else 0):
            i = next(i for i, text in enumerate(texts) if len(text) < stops[i] - starts[i])
            raise TruncatedError(
                f"file {values.files[files[i]]!r} ends at byte {starts[i] + len(texts[i]):,}, "
                f"{plural(stops[i] - starts[i] - len(texts[i]), 'byte')} too early: the description of an array is in "
                "them; restore it"
            )
        return texts

    def _source(self, file: str) -> Source:
        """Return an open file; one at a time, as a save may have thousands."""
        if file not in self._sources:
            self._sources = {file: self.place.source(file)}
        return self._sources[file]

    def _chunks(
        self, values: StoredValues, tensors: dict[str, tuple[int, _Described]], odd: set[str] | None
    ) -> Iterator[str]:
        """Add the chunks of arrays that are described; yield the keys that belong to none.

        Args:
            odd: arrays whose names end with ``/c``; ``None`` if no array has keys like ``c/0/1``.
        """
        touched: dict[int, _Described] = {}
        for row, key in enumerate(values.keys):
            cut = -1 if odd is None else key.rfind("/c/")  # of zarr 3, unless an array has such a name
            owner = tensors.get(key[:cut]) if cut > 0 and not (odd and key[: cut + 2] in odd) else None
            cut = cut if owner is not None else len(key)
            while owner is None and cut > 0:
                cut = key.rfind("/", 0, cut)
                owner = tensors.get(key[:cut]) if cut > 0 else None
            if owner is None:
                if not values.whole:
                    yield key
                continue
            tensor, kind = owner
            if tensor < 0:
                continue
            rest = key[cut + 1 :]
            at = kind.places.get(rest)
            if at is None:
                try:
                    at = kind.place(rest)
                except CorruptError as error:
                    file = values.files[values.file[row]] if values.whole else key
                    raise CorruptError(f"{file!r} {error}") from None
            if at >= 0:
                if not kind.rows:
                    touched[id(kind)] = kind
                kind.rows.append(row)
                kind.tensors.append(tensor)
                kind.at.append(at)
        for kind in touched.values():
            grid = np.array(kind.grid, np.int64).reshape(len(kind.grid), len(kind.array.shape))
            rows, tensors_of, at_of = (np.array(column, np.int64) for column in (kind.rows, kind.tensors, kind.at))
            kind.rows, kind.tensors, kind.at = [], [], []
            self._rows(values, rows, tensors_of, kind.array, grid[at_of])

    def _rows(self, values: StoredValues, rows: Array, tensor: Array, array: ZarrArray, at: Array) -> None:
        """Add chunks of arrays with one description, at places ``(N, axes)`` of the grid."""
        offsets = at * np.array(array.chunk, np.int64)
        start, length = values.start[rows], values.length[rows]
        lost = np.zeros(len(rows), bool)
        if array.shards is not None and array.codec != codecs.OPAQUE:
            index, lost = self._indices(values, rows, array)
            if lost.any():  # the shard represents its chunks: opening reports the file
                self._block(
                    values, rows[lost], tensor[lost], array, offsets[lost], array.chunk, start[lost], length[lost], True
                )
            owner, inner, begin, length = index
            offsets = offsets[owner] + inner
            inside = (offsets < np.array(array.shape, np.int64)).all(axis=1)
            rows, tensor = rows[owner][inside], tensor[owner][inside]
            offsets, start, length = offsets[inside], (values.start[rows] + begin[inside]), length[inside]
        self._block(values, rows, tensor, array, offsets, array.payload, start, length - array.tail, False)

    def _block(
        self,
        values: StoredValues,
        rows: Array,
        tensor: Array,
        array: ZarrArray,
        offsets: Array,
        chunk: tuple[int, ...],
        start: Array,
        length: Array,
        lost: bool,
    ) -> None:
        if not len(rows):
            return
        codec = codecs.OPAQUE if lost else array.codec
        within, file = values.within[rows], values.file[rows]
        plain = codecs.RAW_BYTES[codec]
        if plain and values.whole and array.shards is None:
            length = np.full_like(length, array.chunk_nbytes)  # the file may be cut: opening reports it
        wrong = (length != array.chunk_nbytes) if plain else (length < 0)
        if wrong.any():
            row = int(np.flatnonzero(wrong)[0])
            raise CorruptError(
                f"chunk {values.keys[rows[row]]!r} has {plural(length[row], 'byte')} where {array.chunk_nbytes:,} are "
                "needed; the store is damaged or from another save"
            )
        sizes = np.minimum(np.array(array.shape, np.int64) - offsets, np.array(chunk, np.int64))
        steps = np.broadcast_to(np.array(array.strides, np.int64), sizes.shape)
        plain = lost or not sizes.shape[1] or np.array_equal(steps, row_major(sizes))
        names = [values.files[i] for i in np.unique(file).tolist()]
        ids, ranks = np.full(len(values.files), -1), np.full(len(values.files), -1)
        for i, name in zip(np.unique(file).tolist(), names, strict=True):
            process = _PROCESS.search(name)
            ids[i], ranks[i] = self.builder.file(name), int(process[1]) if process else -1
        if within.any():
            self.largest = max(self.largest, len(values.content))
        self.builder.block(
            tensor,
            offsets,
            sizes,
            ids[file],
            np.where(within, values.stored[0], start),
            np.where(within, values.stored[1], start + length),
            codec=np.where(within, _WITHIN.get(codec, codecs.OPAQUE), codec),
            rank=np.where(within, -1, ranks[file]),
            inner=np.where(within, start, 0),
            strides=None if plain else steps,
        )

    def _indices(
        self, values: StoredValues, rows: Array, array: ZarrArray
    ) -> tuple[tuple[Array, Array, Array, Array], Array]:
        """Return the inner chunks of shards that exist: position in ``rows``, offsets in the shard, first byte in it,
        bytes; and ``(N,) bool``, the shards whose bytes are beyond the end of their file.
        """
        assert array.shards is not None
        shards, grid = array.shards, array.shards.grid(array.chunk)
        count = prod(grid)
        nbytes = 16 * count + 4 * shards.checked
        length = values.length[rows]
        sizes = np.zeros(len(values.files), np.int64)
        for file in np.unique(values.file[rows]).tolist():
            sizes[file] = stat_or_absent(self.place, values.files[file]).size
        lost = ~values.within[rows] & (values.start[rows] + length > sizes[values.file[rows]])
        short = np.flatnonzero((length < nbytes) & ~lost)
        if len(short):
            raise CorruptError(
                f"shard {values.keys[rows[short[0]]]!r} has {plural(length[short[0]], 'byte')}, but the index of its "
                f"{count:,} inner chunks alone takes {nbytes:,}; the store is damaged or from another save"
            )
        good = np.flatnonzero(~lost)
        if len(good) * count > MOST_CHUNKS:
            raise UnsafeError(f"{values.keys[rows[0]]!r} has more than {MOST_CHUNKS:,} inner chunks; refused")
        data = np.empty((len(good), nbytes), np.uint8)
        first = values.start[rows[good]] + (0 if shards.first else length[good] - nbytes)
        self._fill(values, rows[good], first, data)
        if shards.checked:
            wrong = crc32c_rows(data[:, :-4]) != np.ascontiguousarray(data[:, -4:]).view("<u4")[:, 0]
            if wrong.any():
                raise CorruptError(
                    f"the index of shard {values.keys[rows[good[np.flatnonzero(wrong)[0]]]]!r} does not match its "
                    "CRC-32C: a byte of it changed; restore the file"
                )
        table = np.ascontiguousarray(data[:, : 16 * count]).view("<u8").reshape(len(good), count, 2)
        there = ~(table == np.uint64((1 << 64) - 1)).all(axis=2)
        end = length[good, None].astype(np.uint64)
        bad = table[..., 1] > end - np.minimum(table[..., 0], end)
        bad |= table[..., 0] > end
        bad |= table[..., 1] == 0  # of a file with a hole; what is not there has its own mark
        bad &= there
        if bad.any():
            row, number = (int(i[0]) for i in np.nonzero(bad))
            raise CorruptError(
                f"shard {values.keys[rows[good[row]]]!r} has {plural(length[good[row]], 'byte')}, but its index says "
                f"that inner chunk {number:,} is at byte {table[row, number, 0]:,}, "
                f"{plural(table[row, number, 1], 'byte')} long"
            )
        which, chunk = np.nonzero(there)
        at = np.stack(np.unravel_index(chunk, grid), axis=1) if grid else np.empty((len(chunk), 0), np.int64)
        inner = at * np.array(shards.chunk, np.int64)
        entries = table[which, chunk].astype(np.int64)
        return (good[which], inner, entries[:, 0], entries[:, 1]), lost

    def _fill(self, values: StoredValues, rows: Array, first: Array, data: Array) -> None:
        """Read the same number of bytes of each value, from byte ``first`` of its file or content."""
        within = values.within[rows]
        for i in np.flatnonzero(within).tolist():
            data[i] = values.content[first[i] : first[i] + data.shape[1]]
        file = np.where(within, -1, values.file[rows])
        for number in np.unique(file[~within]).tolist():
            name = values.files[number]
            source = self._source(name)
            mine = np.flatnonzero(file == number)
            starts = first[mine].tolist()
            source.fetch([(start, start + data.shape[1]) for start in starts])
            part = np.empty((len(mine), data.shape[1]), np.uint8)
            source.read_runs(part, starts)
            data[mine] = part


def _ranges(source: Source, spans: Sequence[tuple[int, int]]) -> list[bytes]:
    """Read ranges of a file; those near each other are read together. One beyond the end of the file is cut there."""
    together: list[tuple[int, int]] = []
    low = high = -1
    for start, stop in sorted(spans):
        if start > high + source.gap or stop > low + SPAN or not together:
            low, high = start, stop
            together.append((low, high))
        elif stop > high:
            high = stop
            together[-1] = low, high
    source.fetch(together)
    firsts = [start for start, _ in together]
    found, low, high, data = [], -1, -1, b""
    for start, stop in spans:
        if start < low or stop > high:
            low, high = together[bisect_right(firsts, start) - 1]
            data = source.read_bytes(low, high)
        found.append(data[start - low : stop - low])
    return found


def _of_leaf(leaf: Leaf) -> StoredValues:
    """Read a leaf node's values; inline values are at the end of the node's file."""
    name, first, last = leaf.where
    inline = leaf.file < 0
    start = np.where(inline & (not leaf.compressed), leaf.start + first, leaf.start)
    file = np.where(inline, len(leaf.files), leaf.file)
    within = inline if leaf.compressed else np.zeros(len(inline), bool)
    return StoredValues(leaf.keys, [*leaf.files, name], file, start, leaf.length, within, leaf.content, (first, last))
