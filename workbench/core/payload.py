"""From a chunk row to its elements: their location in a file, or in memory if a codec has to decode them.

::

    file   ┊ …  item: start ─────────────────────── stop … ┊
                raw        │ payload                    │
                torch_zip  │ zip headers │ payload │ … │     found by reading ~1 KB, then remembered
                zstd       │ compressed stream          │     decompressed whole, its size bounded beforehand
                zstd+zstd  │ compressed node of values  │     … and so is the stream that begins at inner in it
                latin1     │ UTF-8 of one character per byte │  decoded whole, at most as long as it is stored
                raw_conj   │ payload │                        the signs of the imaginary parts are flipped
    chunk  =    payload[inner :: strides]  as elements of the raw type (unsigned integers of the element's size)
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np

from workbench.core import catalog as cat
from workbench.core import codecs
from workbench.core.arrays import Array, Ints
from workbench.core.box import distinct
from workbench.core.catalog import Catalog
from workbench.core.crc32 import fletcher32
from workbench.core.dtypes import DType, nbytes_of
from workbench.core.region import Axis, Region, resolved, swapped
from workbench.core.source import LazyBytes
from workbench.core.storage import SourcePool
from workbench.core.words import plural
from workbench.core.ziparchive import Item, single_tensor
from workbench.errors import CorruptError, MissingExtraError, UnsafeError, UnsupportedFormatError, WorkbenchError

EXPANDED = 1024  #: a compressed stream may expand to this many times its stored bytes …
EXPANDED_LEAST = 1 << 30  #: … or to this many bytes, if that is more

Undo = Callable[[Array], Array]
PART_LIMIT = 8 << 30  #: bytes to which an item may grow if a chunk is only a part of it and the size is unknown
AT_ONCE = 1024  #: small chunks that are fetched together
HEADERS = 16 << 10  #: bytes that an archive may have around a payload (seen: ~1.6 KB); more costs one more request
ZIP_OVERHEAD = 1 << 20  #: bytes a torch.save archive of one tensor may need beside its payload (seen: ~1.6 KB)


class Payloads:
    """The chunks of one catalog; remembers where each archive's payload is."""

    _by_reference = True

    def __init__(self, catalog: Catalog, pool: SourcePool) -> None:
        self.catalog, self.pool = catalog, pool
        self.decoding: Any = None  #: a ``core.decoding.values.Decoding``, where the format has recipes
        self._reference: tuple[Any, str] | None = None  #: sent to workers instead of the payloads (core/executors.py)
        self._items: dict[tuple[int, int], Item] = {}
        self._unpacked: tuple[tuple[int, int, int], Array] | None = None  # neighbouring slices meet one item often

    def __reduce__(self) -> tuple[Any, ...]:
        return Payloads, (self.catalog, self.pool), {"decoding": self.decoding}  # reads what was read before again

    def over(self, catalog: Catalog) -> Payloads:
        """Return payloads of other tensors in the same files."""
        return Payloads(catalog, self.pool)

    def region(self, row: int) -> Region:
        """Return the chunk's elements in place; for archives, the directory is read; transforms are decoded whole.

        Raises:
            TruncatedError, CorruptError, ChangedError, MissingFileError: the stored item is not valid.
            UnsafeError: the elements would take far more memory than bytes are stored.
        """
        c = self.catalog
        codec = codecs.TABLE[c.codec[row]]
        dtype, sizes, inner, strides = self._layout(row)
        if 0 in sizes:
            return Region.of(np.empty(sizes, dtype.raw))
        if c.inflated[row]:
            raise UnsafeError(c.not_checked(row))
        if codec.raw:
            undo = _undo(dtype, big=codec.big, conj=codec.conj, neg=codec.neg)
            return self._stored_at(row, 0, int(c.stop[row] - c.start[row]), undo)
        if codec.zip and codec.in_file:
            item, _ = self._checked(row)
            undo = _undo(dtype, big=item.byteorder == "big", conj=item.conj, neg=item.neg)
            at = item.start + item.storage_offset * dtype.itemsize
            if codec.part:
                return self._at(row, at, item.shape, item.stride, dtype, undo)
            if undo is None and cat.is_row_major(item.shape, item.stride):
                return self._stored_at(row, at, _nbytes(item.shape, dtype), None)
        if codec.zip:
            return Region.of(self._from_archive(row))
        if codec.compressed:
            plain = self._from_stream(row)
            if codec.within:
                plain, inner = self._from_within(row, plain, codec.within), 0
            reach = inner + cat.reach(sizes, cat.row_major(sizes) if strides is None else strides) * dtype.raw.itemsize
            if reach > len(plain):
                raise CorruptError(
                    f"{self.describe(row)} decompresses to {plural(len(plain), 'byte')} where {reach:,} are needed; "
                    "its stream was cut, or is from another save"
                )
            found = _strided(plain, inner, sizes, strides, dtype)
            return Region.of(swapped(found, dtype=dtype) if codec.big else found)
        if codec.text:
            return Region.of(_strided(self._from_text(row), inner, sizes, strides, dtype))
        if codec.varint:
            return Region.of(_strided(self._from_varints(row, dtype), inner, sizes, strides, dtype))
        raise UnsupportedFormatError(
            f"tensor {c.keys[c.tensor[row]]!r}: its chunk in {c.files[c.file[row]]!r} was written through an unknown "
            "transform; it can be listed but not read"
        )

    def array(self, row: int) -> Array:
        """Read the whole chunk into memory, as an array of ``sizes[row]`` in the raw type of its dtype.

        Packed types are returned as flat bytes. The array is read-only because it may be cached for the next call.

        Raises:
            as :meth:`region`.
        """
        found = self.region(row).load().view()
        found.flags.writeable = False
        return found

    def straight(self, row: int) -> int | None:
        """Return the byte of its file at which the chunk's elements begin, if they are stored row-major and little
        endian.

        Return ``None`` if they have to be decoded or reordered.

        Raises:
            as :meth:`region`.
        """
        if not codecs.IN_PLACE[self.catalog.codec[row]] or self.catalog.dtype_of(int(self.catalog.tensor[row])).packed:
            return None
        region = self.region(row)
        return region.straight if region.size else None

    def stored(self, row: int) -> LazyBytes:
        """Return the bytes of the stored item, checked to be inside the file; bytes are read when they are accessed."""
        c = self.catalog
        self._check_inside(row)
        return self.pool.window(int(c.file[row]), int(c.start[row]), int(c.stop[row]))

    def fetch_ends(self, rows: Ints) -> None:
        """Fetch the first and last bytes of stored items, which are archives, from a store: all at once."""
        if self.pool.at_once == 1:  # a disk reads on demand
            return
        c = self.catalog
        for file in distinct(c.file[rows]).tolist():
            mine = rows[c.file[rows] == file]
            source, start, stop = self.pool.source(file), c.start[mine], c.stop[mine]
            low, high = np.minimum(start + source.block, stop), np.maximum(stop - source.block, start)
            ends = np.concatenate([start, high]), np.concatenate([low, stop])
            source.fetch(list(zip(*(end.tolist() for end in ends), strict=True)))

    def item(self, row: int) -> tuple[Item, LazyBytes | Array]:
        """Return the position of a ``torch_zip`` chunk's payload, and the bytes of the archive that contains it."""
        c = self.catalog
        place = (int(c.file[row]), int(c.start[row]))
        data: LazyBytes | Array = self.stored(row)
        if codecs.COMPRESSED[c.codec[row]]:
            tensor = int(c.tensor[row])
            part = not codecs.WHOLE_ITEM[c.codec[row]]
            nbytes = nbytes_of(c.dtype_of(tensor), int(np.prod(c.sizes[row])))
            limit = PART_LIMIT if part else nbytes + ZIP_OVERHEAD
            last = self._unpacked
            if last is None or last[0] != (*place, limit):
                last = self._unpacked = (*place, limit), decompress(data[:], limit, what=self.describe(row))
            data = last[1]
        found = self._items.get(place)
        if found is None:
            found = single_tensor(data, what=self.describe(row))
            self._items[place] = found
        return found, data

    def check_expanded(self, rows: Ints) -> None:
        """Check chunks before memory is allocated for their elements.

        Raises:
            UnsafeError: the elements of a chunk take far more bytes than are stored.
        """
        if len(refused := rows[self.catalog.inflated[rows]]):
            raise UnsafeError(self.catalog.not_checked(int(refused[0])))

    def compare(self, row: int, region: Region, out: Array, seen: Array, axes: Sequence[Axis] | None = None) -> None:
        """Read elements like :meth:`Region.into` where chunks overlap: those already ``seen`` must be equal.

        Raises:
            CorruptError: they differ; the message names the chunk and the number of elements.
        """
        new = np.empty_like(out)
        region.into(new, axes)
        if wrong := int(np.count_nonzero(out[seen] != new[seen])):
            raise CorruptError(
                f"{self.describe(row)} overlaps another chunk and differs from it in {plural(wrong, 'element')}; it is "
                "unknown which one is valid: slice around it or restore the file"
            )
        out[...], seen[...] = new, True

    def ahead(self, rows: Ints, first: Ints, last: Ints) -> AbstractContextManager[None]:
        """Fetch bytes ``[first, last)`` of chunks' elements from a store before they are read piece by piece.

        Args:
            rows: ``(N,)`` chunks; those that a codec decodes whole are fetched whole.
            first, last: ``(N,)`` bytes of the elements as they are stored.
        """
        if self.pool.at_once == 1:
            return nullcontext()
        c = self.catalog
        start, stop = c.start[rows], c.stop[rows]
        whole = ~codecs.IN_PLACE[c.codec[rows]]
        at = start + (0 if c.inner is None else c.inner[rows])
        low = np.where(whole | (first < HEADERS), start, at + first)
        high = np.where(whole, stop, np.minimum(at + last + HEADERS, stop))
        return self.pool.ahead(c.file[rows], low, high)

    def fetching(self, rows: Ints) -> Iterator[int]:
        """Yield chunks, which are small, :data:`AT_ONCE` at a time: those in a store are fetched together."""
        for first in range(0, len(rows), AT_ONCE):
            some = rows[first : first + AT_ONCE]
            c = self.catalog
            with self.ahead(some, np.zeros(len(some), np.int64), c.stop[some] - c.start[some]):
                yield from some.tolist()

    def describe(self, row: int) -> str:
        """Describe a chunk for messages: tensor, file and byte."""
        c = self.catalog
        key, file = c.keys[c.tensor[row]], c.files[c.file[row]]
        return f"tensor {key!r}: item at byte {int(c.start[row]):,} of {file!r}"

    def _layout(self, row: int) -> tuple[DType, tuple[int, ...], int, tuple[int, ...] | None]:
        """Return a chunk's element type and sizes, its first byte in the payload, and its strides in elements."""
        c = self.catalog
        tensor = int(c.tensor[row])
        ndim = int(c.ndim[tensor])
        inner = 0 if c.inner is None else int(c.inner[row])
        strides = None if c.strides is None else tuple(c.strides[row, :ndim].tolist())
        return c.dtype_of(tensor), tuple(c.sizes[row, :ndim].tolist()), inner, strides

    def _check_inside(self, row: int) -> None:
        c = self.catalog
        if int(c.stop[row]) > self.pool.size(int(c.file[row])):
            raise c.truncated(row)

    def _stored_at(self, row: int, at: int, room: int, undo: Undo | None) -> Region:
        """Return the chunk in a payload of ``room`` bytes that begins at byte ``at`` of the stored item."""
        dtype, sizes, inner, strides = self._layout(row)
        if dtype.packed:
            sizes, strides = (nbytes_of(dtype, math.prod(sizes)),), None
        steps = cat.row_major(sizes) if strides is None else strides
        _check_reach(inner + cat.reach(sizes, steps) * dtype.raw.itemsize, room, sizes, strides)
        return self._at(row, at + inner, sizes, steps, dtype, undo)

    def _at(
        self, row: int, at: int, sizes: tuple[int, ...], steps: tuple[int, ...], dtype: DType, undo: Undo | None
    ) -> Region:
        """Return elements at strides, from byte ``at`` of the stored item on."""
        self._check_inside(row)
        c, itemsize = self.catalog, dtype.raw.itemsize
        start, strides = int(c.start[row]) + at, tuple(step * itemsize for step in steps)
        return Region(self.pool, int(c.file[row]), start, sizes, strides, dtype.raw, undo)

    def _from_text(self, row: int) -> Array:
        """Return the bytes that a string of one character per byte represents; the last string stays decoded."""
        place = (int(self.catalog.file[row]), int(self.catalog.start[row]), -1)
        data = self.stored(row)  # checks that the file is still the same
        last = self._unpacked
        if last is None or last[0] != place:
            try:
                plain = bytes(data[:]).decode("utf-8").encode("latin-1")
            except UnicodeError as error:
                raise CorruptError(f"{self.describe(row)} is not text with one character per byte: {error}") from None
            last = self._unpacked = place, np.frombuffer(plain, np.uint8)
        return last[1]

    def _from_varints(self, row: int, dtype: DType) -> Array:
        """Return the low bytes of each varint."""
        data = np.frombuffer(self.stored(row)[:], np.uint8)
        ends = np.flatnonzero(data < 128)
        starts = np.concatenate([[0], ends[:-1] + 1]) if len(ends) else ends
        _, sizes, _, _ = self._layout(row)
        count = nbytes_of(dtype, math.prod(sizes)) // dtype.raw.itemsize
        if len(ends) != count or ends[-1] != len(data) - 1 or (ends - starts).max() > 9:
            raise CorruptError(
                f"{self.describe(row)} does not consist of {plural(count, 'varint')}; the file is damaged"
            )
        place = np.arange(len(data)) - np.repeat(starts, ends - starts + 1)
        parts = (data & 127).astype(np.uint64) << (7 * place).astype(np.uint64)
        return np.add.reduceat(parts, starts).astype(dtype.raw).view(np.uint8)

    def _from_stream(self, row: int) -> Array:
        """Return the payload of a compressed chunk, no longer than the largest size that the reader found declared."""
        c = self.catalog
        place = (int(c.file[row]), int(c.start[row]), -2)
        data = self.stored(row)  # checks that the file is still the same
        last = self._unpacked
        if last is None or last[0] != place:
            decoder = _STREAMS.get(int(c.codec[row]), decompress)
            if filters := codecs.TABLE[c.codec[row]].filters:
                decoder = partial(unfilter, filters=filters, size=c.dtype_of(int(c.tensor[row])).itemsize)
            plain = decoder(data[:], int(c.meta.get("largest_chunk", 0)), what=self.describe(row))
            last = self._unpacked = place, plain
        return last[1]

    def _from_within(self, row: int, outer: Array, codec: str) -> Array:
        """Return the payload of a stream that begins in the decoded item."""
        c = self.catalog
        at = 0 if c.inner is None else int(c.inner[row])
        if at >= len(outer):
            raise CorruptError(
                f"{self.describe(row)} decompresses to {plural(len(outer), 'byte')} and needs those from {at:,} on"
            )
        decoder = inflate if codec == "gzip" else decompress
        return decoder(outer[at:], int(c.meta.get("largest_chunk", 0)), what=self.describe(row))

    def _from_archive(self, row: int) -> Array:
        dtype, sizes, inner, strides = self._layout(row)
        item, data = self._checked(row)
        if cat.inflates(_nbytes(item.shape, dtype), item.nbytes):
            raise UnsafeError(
                f"{self.describe(row)} has {plural(_nbytes(item.shape, dtype), 'byte')} of elements but stores "
                f"{item.nbytes:,}; it is listed but not read"
            )
        payload = np.frombuffer(data[item.start : item.start + item.nbytes], np.uint8)
        at = item.storage_offset * dtype.itemsize
        whole = _strided(payload, at, item.shape, item.stride, dtype)
        undo = _undo(dtype, big=item.byteorder == "big", conj=item.conj, neg=item.neg)
        if undo is not None:
            whole = undo(whole)
        if codecs.WHOLE_ITEM[self.catalog.codec[row]]:
            return whole
        flat = np.ascontiguousarray(whole).reshape(-1).view(np.uint8)  # a copy only if the item itself is strided
        return _strided(flat, inner, sizes, strides, dtype)

    def _checked(self, row: int) -> tuple[Item, LazyBytes | Array]:
        """Return :meth:`item` after checking that it has the cataloged type and shape, or is large enough to contain a
        part.
        """
        dtype, sizes, inner, strides = self._layout(row)
        item, data = self.item(row)
        if item.dtype != dtype.name:
            raise CorruptError(
                f"{self.describe(row)} contains {item.dtype} but the metadata says {dtype}; the file is from another "
                "save"
            )
        if codecs.WHOLE_ITEM[self.catalog.codec[row]] and item.shape != sizes:
            raise CorruptError(
                f"{self.describe(row)} contains a tensor of shape {item.shape} but the chunk has {sizes}; "
                "the file is from another save, or files of two ranks were swapped"
            )
        if not codecs.WHOLE_ITEM[self.catalog.codec[row]] and not dtype.packed:
            steps = cat.row_major(sizes) if strides is None else strides
            held, needed = (
                math.prod(item.shape),
                (inner + cat.reach(sizes, steps) * dtype.raw.itemsize) // dtype.itemsize,
            )
            if needed > held:
                raise CorruptError(
                    f"{self.describe(row)} contains {plural(held, 'element')} but the metadata says {needed:,} or "
                    "more, including those of this tensor; the file is from another save, or files of two ranks were "
                    "swapped"
                )
        return item, data


def _most(limit: int, stored: int) -> int:
    """Return the bytes that a stream of ``stored`` bytes may become: the declared size alone is not trusted."""
    return min(limit, max(EXPANDED_LEAST, EXPANDED * stored))


def _too_long(what: str, limit: int, stored: int) -> WorkbenchError:
    most = _most(limit, stored)
    if most == limit:
        return CorruptError(f"{what} decompresses to more than the expected {limit:,} bytes; refused")
    return UnsafeError(
        f"{what} decompresses to more than {most:,} bytes from {stored:,}; refused, since only constant values shrink "
        "so much. Read it with the program that wrote it if you trust it"
    )


def decompress(data: Array | memoryview, limit: int, *, what: str) -> Array:
    """Decompress one zstd stream to no more than ``limit`` bytes.

    Raises:
        UnsafeError: it becomes more than 1 GiB and over 1,024 times as long as it is stored.
        MissingExtraError: neither ``zstandard`` nor Python 3.14's ``compression.zstd`` is installed.
        CorruptError: it is not a zstd stream, or it decompresses to more than the limit (a bomb).
    """
    try:
        import zstandard
    except ModuleNotFoundError:
        raise MissingExtraError(
            f"{what} is compressed with zstd; to read it: pip install 'ckpt-workbench[zstd]'"
        ) from None
    try:
        reader = zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(memoryview(data))
        out = reader.read(_most(limit, len(data)) + 1)
    except zstandard.ZstdError as error:
        raise CorruptError(f"{what} is not a zstd stream: {error}") from None
    if len(out) > _most(limit, len(data)):
        raise _too_long(what, limit, len(data))
    return np.frombuffer(out, np.uint8)


def inflate(data: Array | memoryview, limit: int, *, what: str, raw: bool = False) -> Array:
    """Decompress one gzip or zlib stream, or a ``raw`` one without their headers, to no more than ``limit`` bytes.

    Raises:
        UnsafeError: as :func:`decompress`.
        CorruptError: it is not such a stream, is cut short, or decompresses to more than the limit (a bomb).
    """
    stream = zlib.decompressobj(wbits=-zlib.MAX_WBITS if raw else 32 + zlib.MAX_WBITS)
    kind = "deflate" if raw else "gzip or zlib"
    try:
        out = stream.decompress(memoryview(data), _most(limit, len(data)) + 1)
    except zlib.error as error:
        raise CorruptError(f"{what} is not a {kind} stream: {error}") from None
    if len(out) > _most(limit, len(data)):
        raise _too_long(what, limit, len(data))
    if not stream.eof:
        raise CorruptError(f"{what} ends before its {kind} stream does")
    return np.frombuffer(out, np.uint8)


def unfilter(data: Array | memoryview, limit: int, *, filters: tuple[str, ...], size: int, what: str) -> Array:
    """Undo HDF5's filters, the last one first; ``size`` is an element's bytes.

    Raises:
        CorruptError: the checksum is wrong; otherwise as :func:`inflate`.
    """
    plain = np.frombuffer(data, np.uint8)
    for name in reversed(filters):
        if name == "gzip":
            plain = inflate(plain, limit, what=what)
        elif name == "shuffle":
            whole = len(plain) // size * size
            plain = np.concatenate([plain[:whole].reshape(size, -1).T.reshape(-1), plain[whole:]])
        else:
            if len(plain) < 4:
                raise CorruptError(
                    f"{what} has {plural(len(plain), 'byte')}, fewer than its checksum; the file is damaged"
                )
            stored, plain = int.from_bytes(plain[-4:].tobytes(), "little"), plain[:-4]
            found = fletcher32(plain)
            swapped_halves = (found >> 8 & 0x00FF00FF) | (found << 8 & 0xFF00FF00)  # as hdf5 before 1.6.3 wrote it
            if stored not in (found, swapped_halves):
                raise CorruptError(
                    f"{what}: its Fletcher-32 checksum is {found:#010x}, stored is {stored:#010x}; the file is damaged"
                )
    return plain


_STREAMS: dict[int, Callable[..., Array]] = {
    codecs.GZIP: inflate,
    codecs.DEFLATE: partial(inflate, raw=True),
    codecs.DEFLATE_BE: partial(inflate, raw=True),
}


def _undo(dtype: DType, *, big: bool, conj: bool, neg: bool) -> Undo | None:
    """Return the function that turns stored bits into values; ``None`` if they are the values."""
    order = partial(swapped, dtype=dtype) if big else None
    signs = partial(resolved, dtype=dtype, conj=conj, neg=neg) if conj or neg else None
    if order is None or signs is None:
        return order or signs
    return lambda array: signs(order(array))


def _strided(data: Array, start: int, sizes: tuple[int, ...], strides: tuple[int, ...] | None, dtype: DType) -> Array:
    """Return a read-only view of ``sizes`` elements, after checking the reach of the strides against the bytes."""
    if dtype.packed:
        return data[start : start + nbytes_of(dtype, int(np.prod(sizes)))]
    strides = cat.row_major(sizes) if strides is None else strides
    reach = cat.reach(sizes, strides) * dtype.raw.itemsize
    _check_reach(start + reach, len(data), sizes, strides)
    return np.ndarray(
        sizes, dtype.raw, buffer=data.data, offset=start, strides=tuple(s * dtype.itemsize for s in strides)
    )


def _check_reach(end: int, room: int, sizes: tuple[int, ...], strides: tuple[int, ...] | None) -> None:
    if end > room:
        layout = "row-major" if strides is None else f"strides {strides}"
        raise CorruptError(
            f"a tensor of sizes {sizes}, {layout}, extends {plural(end - room, 'byte')} past its payload"
        )


def _nbytes(sizes: tuple[int, ...], dtype: DType) -> int:
    return math.prod(sizes) * dtype.itemsize
