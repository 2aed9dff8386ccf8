"""Flax's msgpack files: ``flax_model.msgpack``, its shards, and ``checkpoint_N`` of ``flax.training.checkpoints``.

::

    one msgpack value: maps with text as keys, nested; a list or tuple is a map with the keys "0", "1", …

    ext 1   [shape, "float32", bytes]        an array; the bytes are in the file as they are, in row-major order
    ext 2   [real, imaginary]                a complex number
    ext 3   [[], "int32", bytes]             a numpy scalar
    {"__msgpack_chunked_array__": true, "shape": {"0": 70, "1": 24}, "chunks": {"0": ext 1, "1": ext 1, …}}
                                             an array of more than 1 GiB: its elements in order, cut into flat pieces

    flax_model-00001-of-00002.msgpack, …, flax_model.msgpack.index.json     shards, each a map of its own parameters

The file is read in one pass, and payloads are skipped. The keys of a tensor are joined with ``.``; other values are
objects. Pieces of a chunked array that begin and end in the middle of a row are several boxes.

Sources: flax 0.12 ``flax/serialization.py``; the msgpack specification; transformers 4.57 ``modeling_flax_utils.py``.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise
from math import prod
from typing import Any

from workbench.core.build import CatalogBuilder
from workbench.core.catalog import MAX_ELEMENTS, Catalog
from workbench.core.dtypes import DType, by_name
from workbench.core.lazymap import LazyMap
from workbench.core.pickles.budget import leaves
from workbench.core.pickles.standins import short
from workbench.core.place import Place, lacking
from workbench.core.words import plural
from workbench.errors import CorruptError, NotACheckpointError, TruncatedError, UnsafeError, quoted
from workbench.formats.format import Format
from workbench.names.arrays import meaning

SUFFIX = ".msgpack"
INDEX = ".msgpack.index.json"
CHUNKED = "__msgpack_chunked_array__"
DEPTH = 64  #: maps in maps
ITEMS = 2_000_000  #: values of a file; an array is ten
PIECES = 1 << 20  #: pieces of an array, times the square of its axes; flax cuts at every GiB
INLINE = 16 << 20  #: bytes of text, or of a value that is not an array
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.msgpack")
_CHECKPOINT = re.compile(r"(?:.*[_-])?checkpoint_(\d+)")
_ARRAY, _COMPLEX, _SCALAR = 1, 2, 3
#: First bytes of values with a fixed layout: struct's code of a number …
_NUMBERS = {
    0xCA: ">f",
    0xCB: ">d",
    0xCC: ">B",
    0xCD: ">H",
    0xCE: ">I",
    0xCF: ">Q",
    0xD0: ">b",
    0xD1: ">h",
    0xD2: ">i",
    0xD3: ">q",
}
#: … and first bytes of values with a length, and the bytes of that length.
_SIZED = {
    0xC4: ("bin", 1),
    0xC5: ("bin", 2),
    0xC6: ("bin", 4),
    0xC7: ("ext", 1),
    0xC8: ("ext", 2),
    0xC9: ("ext", 4),
    0xD9: ("text", 1),
    0xDA: ("text", 2),
    0xDB: ("text", 4),
    0xDC: ("list", 2),
    0xDD: ("list", 4),
    0xDE: ("map", 2),
    0xDF: ("map", 4),
}
_FIXED_EXT = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}


@dataclass(frozen=True, slots=True)
class StoredArray:
    """An array of the file: bytes ``[start, stop)``."""

    dtype: DType
    shape: tuple[int, ...]
    start: int
    stop: int
    scalar: bool = False


@dataclass(frozen=True, slots=True)
class ChunkedArray:
    """An array that is stored as flat pieces, in order."""

    dtype: DType
    shape: tuple[int, ...]
    pieces: tuple[StoredArray, ...]


# ---- msgpack ---------------------------------------------------------------------------------------------------------


class _Walker:
    """One pass over a file; arrays become locations, everything else a value."""

    def __init__(self, place: Place, name: str) -> None:
        self.name, self.view = name, place.window(name)
        self.at, self.end, self.left = 0, len(self.view), ITEMS

    def whole(self) -> Any:
        found = self.value(DEPTH)
        if self.at != self.end:
            raise CorruptError(
                f"{self.name!r}: {plural(self.end - self.at, 'byte', 'follow')} the value that ends at byte "
                f"{self.at:,}; the file is damaged, or two files were joined"
            )
        return found

    def take(self, count: int, what: str) -> bytes:
        self.room(count, what)
        if count > INLINE:
            raise UnsafeError(
                f"{self.name!r}, byte {self.at:,}: {what} of {count:,} bytes is outside an array; refused"
            )
        self.at += count
        return bytes(self.view[self.at - count : self.at])

    def room(self, count: int, what: str) -> None:
        if count > self.end - self.at:
            raise TruncatedError(
                f"{self.name!r} ends at byte {self.end:,}, {plural(count - (self.end - self.at), 'byte')} before the "
                f"end of {what} at byte {self.at:,}; the file is truncated, or a length in it is wrong"
            )

    def head(self) -> tuple[str, Any]:
        """Read the kind of the next value, and its value or length; a container's items and a payload are not read."""
        at = self.at
        self.left -= 1
        if self.left < 0:
            raise UnsafeError(f"{self.name!r} has more than {ITEMS:,} values; refused")
        first = self.take(1, "a value")[0]
        if first < 0x80 or first >= 0xE0:
            return "number", first - (first >= 0xE0) * 256
        if first < 0xC0:
            kind = "map" if first < 0x90 else "list" if first < 0xA0 else "text"
            return kind, first & (0x1F if kind == "text" else 0x0F)
        if first in _NUMBERS:
            form = _NUMBERS[first]
            return "number", struct.unpack(form, self.take(struct.calcsize(form), "a number"))[0]
        if first in _SIZED:
            kind, width = _SIZED[first]
            return kind, int.from_bytes(self.take(width, "a length"), "big")
        if first in _FIXED_EXT:
            return "ext", _FIXED_EXT[first]
        if first == 0xC1:
            raise CorruptError(f"{self.name!r}, byte {at:,}: 0xc1 begins no msgpack value; the file is damaged")
        return "number", {0xC0: None, 0xC2: False, 0xC3: True}[first]

    def value(self, depth: int) -> Any:
        at = self.at
        kind, found = self.head()
        if kind == "number":
            return found
        if kind == "text":
            return self.decoded(found)
        if kind == "bin":
            return self.take(found, "bytes")
        if kind == "ext":
            return self.extension(found)
        if not depth:
            raise CorruptError(f"{self.name!r}, byte {at:,}: more than {DEPTH} nested maps or lists; refused")
        self.room(found * (2 if kind == "map" else 1), plural(found, "item"))
        if kind == "list":
            return [self.value(depth - 1) for _ in range(found)]
        made: dict[str, Any] = {}
        for _ in range(found):
            at = self.at
            key = self.value(depth - 1)
            if type(key) is not str or key in made:
                why = "occurs twice" if type(key) is str else "is not text"
                raise CorruptError(f"{self.name!r}, byte {at:,}: the key {quoted(str(key))} {why}; the file is damaged")
            made[key] = self.value(depth - 1)
        return self.chunked(made, at) if made.get(CHUNKED) is True else made

    def decoded(self, length: int) -> str:
        at = self.at
        try:
            return self.take(length, "text").decode()
        except UnicodeDecodeError as error:
            raise CorruptError(f"{self.name!r}, byte {at:,}: text is not UTF-8 ({error.reason})") from None

    def extension(self, length: int) -> Any:
        code = self.take(1, "an extension")[0]
        at, stop = self.at, self.at + length
        self.room(length, "an extension")
        if code in (_ARRAY, _SCALAR):
            found: Any = self.array(at, scalar=code == _SCALAR)
        elif code == _COMPLEX:
            found = self.pair(at)
        else:
            found = self.view[at : min(stop, at + INLINE)].tobytes()
            self.at = stop
        if self.at != stop:
            raise CorruptError(
                f"{self.name!r}, byte {at:,}: an extension of {length:,} bytes contains a value of {self.at - at:,}; "
                "the file is damaged"
            )
        return found

    def pair(self, at: int) -> complex:
        parts = self.value(1)
        if not isinstance(parts, list) or len(parts) != 2 or not all(type(part) in (int, float) for part in parts):
            raise CorruptError(f"{self.name!r}, byte {at:,}: a complex number is not two numbers; the file is damaged")
        return complex(*parts)

    def array(self, at: int, scalar: bool) -> StoredArray:
        kind, count = self.head()
        shape = self.value(1) if (kind, count) == ("list", 3) else None
        name = self.value(0) if shape is not None else None
        if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape) or type(name) is not str:
            raise CorruptError(f"{self.name!r}, byte {at:,}: an array is not a shape, a type and bytes; it is damaged")
        kind, length = self.head()
        if kind != "bin":
            raise CorruptError(
                f"{self.name!r}, byte {at:,}: an array has {kind} in place of bytes; the file is damaged"
            )
        dtype = by_name(_numpy_name(name))
        if len(shape) > 64 or prod(shape) > MAX_ELEMENTS or prod(shape) * dtype.itemsize != length:
            raise CorruptError(
                f"{self.name!r}, byte {at:,}: an array of {dtype} {short(tuple(shape), 200)} has "
                f"{plural(length, 'byte')}; the file is damaged"
            )
        self.room(length, "an array")
        start, self.at = self.at, self.at + length
        return StoredArray(dtype, tuple(shape), start, start + length, scalar)

    def chunked(self, made: dict[str, Any], at: int) -> ChunkedArray:
        """Return the array that a map of flat pieces represents."""
        shape, pieces = (_listed(made.get(part)) for part in ("shape", "chunks"))
        good = shape is not None and pieces and all(type(size) is int and size >= 0 for size in shape)
        if not good or not all(isinstance(one, StoredArray) and len(one.shape) == 1 for one in pieces or ()):
            raise CorruptError(f"{self.name!r}, byte {at:,}: a chunked array has no shape, or pieces that are not flat")
        assert shape is not None and pieces is not None
        if len(pieces) * len(shape) ** 2 > PIECES:
            raise UnsafeError(
                f"{self.name!r}, byte {at:,}: an array of {len(shape)} axes in {plural(len(pieces), 'piece')}, more "
                "than any array is cut into; refused"
            )
        stored = sum(one.shape[0] for one in pieces)
        if len(shape) > 64 or len({one.dtype for one in pieces}) != 1 or prod(shape) != stored:
            raise CorruptError(
                f"{self.name!r}, byte {at:,}: {plural(len(pieces), 'piece')} with {plural(stored, 'element', 'do')} "
                f"not make an array of {short(tuple(shape), 200)}; a piece is missing or damaged"
            )
        return ChunkedArray(pieces[0].dtype, tuple(shape), tuple(pieces))


def _listed(stored: Any) -> list[Any] | None:
    """Return the values of a map with the keys "0", "1", …"""
    if not isinstance(stored, dict) or set(stored) != {str(number) for number in range(len(stored))}:
        return None
    return [stored[str(number)] for number in range(len(stored))]


def _numpy_name(name: str) -> str:
    """Return the type of a dtype's ``name``, little endian unless it states otherwise, because flax writes no other."""
    if not re.fullmatch(r"(bfloat|float|int|uint|complex|bool)[0-9a-z_]{0,12}", name):
        raise CorruptError(f"unknown element type {quoted(name)}")
    return {"float8_e4m3": "float8_e4m3", "bool_": "bool"}.get(name, name)


# ---- tensors ---------------------------------------------------------------------------------------------------------


def _leaves(place: Place, name: str) -> list[tuple[tuple[str, ...], Any]]:
    """Return every value in a file that is not a map, with its path of keys; an empty map counts as a value."""

    def children(node: Any) -> Any:
        return node.items()

    def is_leaf(node: Any) -> bool:
        return not isinstance(node, dict) or not node

    return leaves(_Walker(place, name).whole(), children, is_leaf, what=repr(name))


def _boxes(shape: tuple[int, ...], first: int, last: int) -> Iterator[tuple[list[int], list[int], int]]:
    """Yield the boxes (offsets, sizes, first element) that flat elements ``[first, last)`` of an array fill."""
    if not shape:
        yield [], [], first
        return
    row = prod(shape[1:])
    if len(shape) == 1 or not row:
        yield [first, *[0] * (len(shape) - 1)], [last - first, *shape[1:]], first
        return
    cuts = sorted({first, last, *(cut for cut in (-(-first // row) * row, last // row * row) if first < cut < last)})
    for low, high in pairwise(cuts):
        if low % row == 0 and high % row == 0:
            yield [low // row, *[0] * (len(shape) - 1)], [(high - low) // row, *shape[1:]], low
        else:
            within = low // row * row
            for offsets, sizes, at in _boxes(shape[1:], low - within, high - within):
                yield [low // row, *offsets], [1, *sizes], within + at


def _add(builder: CatalogBuilder, file: str, key: str, one: StoredArray | ChunkedArray) -> None:
    if key in builder:
        raise CorruptError(f"{file!r}: two arrays have the name {quoted(key)}; it is unknown which one is valid")
    builder.tensor(key, one.dtype, one.shape)
    first = 0
    for piece in one.pieces if isinstance(one, ChunkedArray) else (one,):
        if isinstance(one, StoredArray):
            builder.chunk(key, [0] * len(one.shape), one.shape, file, one.start, one.stop)
            return
        last, item = first + piece.shape[0], one.dtype.itemsize
        for offsets, sizes, at in _boxes(one.shape, first, last):
            start = piece.start + (at - first) * item
            builder.chunk(key, offsets, sizes, file, start, start + prod(sizes) * item)
        first = last


# ---- the format ------------------------------------------------------------------------------------------------------


def detect(place: Place) -> bool:
    """Return whether flax or transformers uses the name, and the file begins with a msgpack map."""
    if place.file is None:
        return any(name.endswith(INDEX) or _is_model(name) for name in place.files)
    if not place.file.endswith(SUFFIX) and not _CHECKPOINT.fullmatch(place.file):
        return False
    head = place.head(place.file, 1)
    return bool(head) and (0x80 < head[0] < 0x90 or head[0] in (0xDE, 0xDF))


def missing(place: Place) -> str:
    """Describe the shards that are missing."""
    names = _files(place)
    lost = [name for name in names if not place.exists(name)]
    return f"{lacking(len(lost), len(names), 'shards')}, first {lost[0]!r}" if lost else ""


def _is_model(name: str) -> bool:
    return name == "flax_model.msgpack" or bool((match := _PART.fullmatch(name)) and match[1] == "flax_model")


def _files(place: Place) -> list[str]:
    names = [place.file] if place.file is not None else [name for name in place.files if _is_model(name)]
    if place.file is None:
        names = ["flax_model.msgpack"] if "flax_model.msgpack" in names else names[:1]
    if not names:
        raise NotACheckpointError(f"{place.path!r} holds no flax_model.msgpack and no shard of one")
    match = _PART.fullmatch(names[0])
    if match is None or not 1 <= int(match[2]) <= int(match[3]):
        return names
    return [f"{match[1]}-{number:05d}-of-{match[3]}{SUFFIX}" for number in range(1, int(match[3]) + 1)]


def read_catalog(place: Place) -> Catalog:
    """Return the catalog of every array.

    Raises:
        CorruptError, TruncatedError, UnsafeError: a file is not such a value, contradicts itself, or has a count or a
            length that it cannot hold.
    """
    names = _files(place)
    builder = CatalogBuilder("flax", place)
    lost = [name for name in names if not place.exists(name)]
    objects: dict[str, Any] = {}
    step = None
    for name in [name for name in names if name not in lost] or names:
        builder.file(name, metadata=True)
        for path, value in _leaves(place, name):
            key = ".".join(path) or "value"
            if isinstance(value, StoredArray | ChunkedArray):
                _add(builder, name, key, value)
            else:
                objects[key] = name
            step = value if path == ("step",) and type(value) is int else step
    facts: dict[str, Any] = {"step": step, "objects": objects}
    if lost:
        facts["incomplete"] = (
            f"{lacking(len(lost), len(names), 'shards')}, first {lost[0]!r}; restore it, or open the rest with "
            "partial=True"
        )
    catalog = builder.build(facts)
    fqns, roles = meaning(catalog.keys)
    return replace(catalog, fqns=fqns, roles=roles)


def read_objects(place: Place, catalog: Catalog) -> Mapping[str, Any]:
    """Return the values that are not arrays, by key."""
    stored = catalog.meta.get("objects", {})

    @cache
    def values(name: str) -> dict[str, Any]:  # of a whole file: it has to be walked for any one of them
        found = ((".".join(path) or "value", value) for path, value in _leaves(place, name))
        return {key: value for key, value in found if stored.get(key) == name}

    def value(name: str, key: str) -> Any:
        return values(name)[key]

    return LazyMap({key: partial(value, name, key) for key, name in stored.items()})


def stored_step(place: Place) -> Any:
    """Return the step in the name of a ``checkpoint_N`` file."""
    match = _CHECKPOINT.fullmatch(place.file or "")
    return int(match[1]) if match and len(match[1]) < 16 else None


FORMAT = Format(
    name="flax",
    title="Flax msgpack (JAX)",
    marks="*.msgpack, checkpoint_N",
    read_from="flax 0.12",
    detect=detect,
    read_catalog=read_catalog,
    read_objects=read_objects,
    missing=missing,
    stored_step=stored_step,
    single_file=True,
    suffixes=(SUFFIX,),
    names=_CHECKPOINT.pattern,
    own_bytes=True,
)
