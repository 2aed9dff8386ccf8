"""TensorFlow checkpoints (the V2 format of ``tf.train.Checkpoint`` and ``tf.train.Saver``).

::

    ckpt-7.index                      a sorted table: key → entry, in blocks
    ckpt-7.data-00000-of-00002        bytes of tensors, wherever their entries say

    index    block │ type 0 │ masked CRC-32C │ block … │ block of handles │ footer: handles, padding, 57 fb 80 8b …
    block    shared u │ own u │ value u │ rest of the key │ value … │ restarts u32 … │ their number u32     u: varint

    key ""               header: number of data files, byte order
    model/w/.ATTRIBUTES/VARIABLE_VALUE
                         entry: type, shape, data file, first byte, bytes, masked CRC-32C
    emb                  a partitioned variable: shape and slices; each slice has a separate entry, whose key is
                         0 │ name │ axes │ begin, length of each axis      in ordered code

Keys are as stored. Tensors of text are objects; ``_CHECKPOINTABLE_OBJECT_GRAPH`` is one that maps each key to the
variable's name. The CRC-32C of each entry is compared by ``verify(deep=True)``.

Sources: tensorflow 2.21 ``tensor_bundle.proto``, ``tensor_bundle.cc``, ``saved_tensor_slice_util.cc``,
``ordered_code.cc``, ``trackable_object_graph.proto``; LevelDB ``table_format.md``.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from math import prod
from typing import Any

import numpy as np

from workbench.core import codecs
from workbench.core.build import MAX_AXES, CatalogBuilder
from workbench.core.catalog import MAX_ELEMENTS, Catalog
from workbench.core.crc32 import crc32c, masked
from workbench.core.dtypes import DType, by_name, nbytes_of
from workbench.core.jsonable import check_listed, nested
from workbench.core.lazymap import LazyMap
from workbench.core.pickles.standins import short
from workbench.core.place import Place, lacking
from workbench.core.protobuf import BadMessage, fields, signed, varint
from workbench.core.words import plural
from workbench.errors import CorruptError, NotACheckpointError, OpenError, UnsafeError, UnsupportedFormatError, quoted
from workbench.formats.format import Format

SUFFIX = ".index"
MAGIC = b"\x57\xfb\x80\x8b\x24\x75\x47\xdb"
FOOTER, TRAILER = 48, 5  #: bytes of the table's footer, and of a block's type and checksum
INDEX_LIMIT = 128 << 20  #: bytes of an index; one entry takes some 100
KEYS = 8  #: times the bytes of the index that its keys may have, whose beginnings are shared …
KEYS_LEAST = 16 << 20  #: … if they are more bytes than this
TEXT_LIMIT = 64 << 20  #: bytes of a tensor of text that is shown
SHARDS = 100_000
NOTED = 5
GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
ATTRIBUTE = "/.ATTRIBUTES/VARIABLE_VALUE"
SLOT = "/.OPTIMIZER_SLOT/"
_ROLES = {
    "m": "exp_avg",
    "v": "exp_avg_sq",
    "vhat": "max_exp_avg_sq",
    "momentum": "momentum",
    "Adam": "exp_avg",
    "Adam_1": "exp_avg_sq",
    "Momentum": "momentum",
}
_TEXT = 7
_TYPES = {
    1: "float32",
    2: "float64",
    3: "int32",
    4: "uint8",
    5: "int16",
    6: "int8",
    8: "complex64",
    9: "int64",
    10: "bool",
    11: "qint8",
    12: "quint8",
    13: "qint32",
    14: "bfloat16",
    17: "uint16",
    18: "complex128",
    19: "float16",
    22: "uint32",
    23: "uint64",
    24: "float8_e5m2",
    25: "float8_e4m3fn",
    26: "float8_e4m3fnuz",
    28: "float8_e5m2fnuz",
}


@dataclass(slots=True)
class BundleEntry:
    """The index's entry of a tensor, or of a slice of one: ``start`` and ``size`` in bytes of the data file."""

    kind: int = 0
    shape: tuple[int, ...] = ()
    shard: int = 0
    start: int = 0
    size: int = 0
    crc: int | None = None
    slices: list[tuple[tuple[int, int], ...]] = field(default_factory=list)


# ---- the table -------------------------------------------------------------------------------------------------------


def read_table(data: bytes, what: str) -> Iterator[tuple[bytes, bytes]]:
    """Yield the keys and values of a table in order.

    Raises:
        CorruptError: it is not a table, a checksum is wrong, or blocks overlap or are out of order.
        UnsupportedFormatError: its blocks are compressed.
    """
    if len(data) < FOOTER or data[-8:] != MAGIC:
        raise CorruptError(
            f"{what} does not end with {MAGIC.hex(' ')}, the mark of an index; it is truncated or damaged"
        )
    try:
        at = len(data) - FOOTER
        for _ in range(2):  # of the unused block of filters
            _, at = varint(data, at, len(data))
        start, at = varint(data, at, len(data))
        size, at = varint(data, at, len(data))
        end, last, room = 0, b"", max(KEYS * len(data), KEYS_LEAST)
        for _, handle in _block(data, start, size, what):
            begin, at = varint(handle, 0, len(handle))
            length, at = varint(handle, at, len(handle))
            if begin < end:
                raise CorruptError(
                    f"{what}: a block at byte {begin:,} begins before the end of the one before it, {end:,}"
                )
            end = begin + length + TRAILER
            for key, value in _block(data, begin, length, what):
                room -= len(key)
                if room < 0:
                    raise UnsafeError(f"{what}: keys of more than {KEYS} times the bytes of the index; refused")
                if key <= last and (key or last):
                    raise CorruptError(f"{what}: the key {quoted(key)} is out of order; the file is damaged")
                last = key
                yield key, value
    except (BadMessage, IndexError):
        raise CorruptError(f"{what}: a block handle or an entry ends beyond its block; the file is damaged") from None


def _block(data: bytes, start: int, size: int, what: str) -> Iterator[tuple[bytes, bytes]]:
    """Yield the keys and values of one block after verifying its checksum."""
    stop = start + size
    if stop + TRAILER > len(data) - FOOTER or size < 4:
        raise CorruptError(
            f"{what}: a block should be bytes {start:,} to {stop:,}, but the index has {len(data):,}; it is "
            "truncated or damaged"
        )
    stored = int.from_bytes(data[stop + 1 : stop + TRAILER], "little")
    found = masked(crc32c(np.frombuffer(data[start : stop + 1], np.uint8)))
    if stored != found:
        raise CorruptError(
            f"{what}: the masked CRC-32C of the block at bytes {start:,} to {stop:,} is {found:08x}, stored is "
            f"{stored:08x}; the file is damaged"
        )
    if data[stop]:
        raise UnsupportedFormatError(
            f"{what}: the block at byte {start:,} is compressed (type {data[stop]}, snappy is 1)"
        )
    restarts = int.from_bytes(data[stop - 4 : stop], "little")
    end = stop - 4 - 4 * restarts
    at, key = start, b""
    while at < end:
        shared, at = varint(data, at, end)
        own, at = varint(data, at, end)
        length, at = varint(data, at, end)
        if shared > len(key) or own + length > end - at:
            raise BadMessage
        key = key[:shared] + data[at : at + own]
        at += own + length
        yield key, data[at - length : at]
    if end < start:
        raise BadMessage


# ---- entries ---------------------------------------------------------------------------------------------------------


def _entry(data: bytes) -> BundleEntry:
    found = BundleEntry()
    for number, value in fields(data):
        if number == 2 and isinstance(value, bytes):
            found.shape = tuple(_size(dim) for inner, dim in fields(value) if inner == 2 and isinstance(dim, bytes))
        elif number == 6 and isinstance(value, bytes):
            found.crc = int.from_bytes(value, "little")
        elif number == 7 and isinstance(value, bytes):
            found.slices.append(tuple(_extent(one) for n, one in fields(value) if n == 1 and isinstance(one, bytes)))
        elif isinstance(value, int) and number in (1, 3, 4, 5):
            setattr(found, {1: "kind", 3: "shard", 4: "start", 5: "size"}[number], signed(value))
    return found


def _size(data: bytes) -> int:
    return next((signed(value) for number, value in fields(data) if number == 1 and isinstance(value, int)), 0)


def _extent(data: bytes) -> tuple[int, int]:
    """Begin and length along one axis; a length of -1 is all of it."""
    found = {number: signed(value) for number, value in fields(data) if isinstance(value, int)}
    return found.get(1, 0), found.get(2, -1)


def slice_key(name: bytes, extents: tuple[tuple[int, int], ...]) -> bytes:
    """Return the key of a slice of a partitioned variable, in ordered code."""
    text = re.sub(rb"[\x00\xff]", lambda match: match[0] + (b"\x00" if match[0] == b"\xff" else b"\xff"), name)
    parts = [b"\x00", text, b"\x00\x01", _ordered(len(extents))]
    return b"".join(parts + [_ordered_signed(number) for extent in extents for number in extent])


def _ordered(number: int) -> bytes:
    raw = number.to_bytes(8, "big").lstrip(b"\0")
    return bytes([len(raw)]) + raw


def _ordered_signed(number: int) -> bytes:
    length = ((~number if number < 0 else number).bit_length()) // 7 + 1
    raw = bytearray(number.to_bytes(10, "big", signed=True)[-length:])
    header = ((1 << 16) - (1 << (16 - length))).to_bytes(2, "big")
    for at in range(min(length, 2)):
        raw[at] ^= header[at]
    return bytes(raw)


@dataclass(slots=True)
class _Index:
    """The whole index: entries by key as stored, and the names of the data files."""

    entries: dict[bytes, BundleEntry]
    files: list[str]
    big: bool


def _read_index(place: Place, name: str) -> _Index:
    what = repr(name)
    if place.stat(name).size > INDEX_LIMIT:
        raise UnsafeError(
            f"{what} has {plural(place.stat(name).size, 'byte')}, over the limit of {INDEX_LIMIT:,} of an index"
        )
    entries: dict[bytes, BundleEntry] = {}
    header: dict[int, int] = {}
    first = True
    for key, value in read_table(place.read(name), what):
        try:
            if first != (key == b""):
                raise CorruptError(f"{what}: the first key is {quoted(key)}, not the header's; the file is damaged")
            if first:
                header, first = {n: v for n, v in fields(value) if isinstance(v, int)}, False
                continue
            entries[key] = _entry(value)
        except BadMessage:
            raise CorruptError(f"{what}: the entry of {quoted(key)} is not a message; the file is damaged") from None
    shards = header.get(1, 0)
    if not 0 < shards <= SHARDS:
        raise CorruptError(f"{what}: {shards:,} data files; the header is damaged")
    stem = name.removesuffix(SUFFIX)
    return _Index(entries, [f"{stem}.data-{n:05d}-of-{shards:05d}" for n in range(shards)], header.get(2) == 1)


# ---- the format ------------------------------------------------------------------------------------------------------


def detect(place: Place) -> bool:
    """Return whether the file is an index with its mark, or the folder holds exactly one with data beside it: a folder
    with several is a run.
    """
    if place.file is None:
        return len(_prefixes(place)) == 1
    try:
        size = place.stat(place.file).size
        return (
            place.file.endswith(SUFFIX) and size >= FOOTER and place.read(place.file, start=size - 8, length=8) == MAGIC
        )
    except OpenError:
        return False


def _prefixes(place: Place) -> list[str]:
    """Return the indices in a folder that have a data file beside them."""
    stems = {name.rpartition(".data-")[0] for name in place.files if ".data-" in name}
    return [name for name in place.files if name.endswith(SUFFIX) and name.removesuffix(SUFFIX) in stems]


def missing(place: Place) -> str:
    """Describe the data files that are missing."""
    names = _read_index(place, _name(place)).files
    lost = [name for name in names if not place.exists(name)]
    return f"{lacking(len(lost), len(names), 'data files')}, first {lost[0]!r}" if lost else ""


def _name(place: Place) -> str:
    names = [place.file] if place.file is not None else _prefixes(place)
    if len(names) != 1:
        listed = ", ".join(map(repr, names[:4]))
        raise NotACheckpointError(f"{place.path!r} holds {len(names)} indices{': ' if names else ''}{listed}; open one")
    return names[0]


def stored_step(place: Place) -> Any:
    """Return the number that ends the checkpoint's prefix, as ``tf.train.CheckpointManager`` counts."""
    match = re.fullmatch(r".*-(\d{1,15})\.index", _name(place), re.DOTALL)
    return int(match[1]) if match else None


def read_catalog(place: Place) -> Catalog:
    """Return the catalog of every variable.

    Raises:
        CorruptError: the index is damaged or contradicts itself. UnsafeError: an impossible size.
    """
    name = _name(place)
    index = _read_index(place, name)
    builder = CatalogBuilder("tensorflow", place)
    builder.file(name, metadata=True)
    notes: list[str] = []
    left: list[str] = []
    crcs: dict[str, dict[str, int]] = {}
    texts: list[str] = []
    slices: set[bytes] = set()
    for raw, entry in index.entries.items():
        if raw in slices or raw[:1] == b"\0":
            continue
        key = _text(raw, name)
        if entry.kind == _TEXT and not entry.slices:
            texts.append(key)
            builder.object(key, _data_file(index, entry, key, name), entry.start, entry.start + entry.size)
            continue
        if entry.kind not in _TYPES:
            left.append(f"{key!r} has the type {entry.kind} and is left out")
            continue
        dtype = by_name(_TYPES[entry.kind])
        _check_shape(entry.shape, key, name)
        fqn, role = _meaning(key, index.entries)
        builder.tensor(key, dtype, entry.shape, fqn=fqn, role=role)
        boxes = [(tuple((0, size) for size in entry.shape), entry)]
        if entry.slices:
            keys = [slice_key(raw, one) for one in entry.slices]
            slices |= {*keys}
            boxes = [(one, index.entries.get(key)) for one, key in zip(entry.slices, keys, strict=True)]  # type: ignore[misc]
        for extents, one in boxes:
            file, sizes, first = _box(index, one, extents, entry.shape, dtype, key, name)
            builder.chunk(
                key,
                first,
                sizes,
                file,
                one.start,
                one.start + one.size,
                codec=codecs.RAW_BE if index.big else codecs.RAW,
            )
            if one.crc is not None and one.size:
                crcs.setdefault(file, {})[str(one.start)] = one.crc
    stray = [key for key in index.entries if key[:1] == b"\0" and key not in slices]
    if stray:
        notes.append(f"{plural(len(stray), 'slice', 'belong')} to no variable; left out")
    notes += left[:NOTED] + (
        [f"{len(left) - NOTED:,} more are left out for similar reasons"] if len(left) > NOTED else []
    )
    facts: dict[str, Any] = {
        "step": stored_step(place),
        "notes": notes,
        "objects": texts,
        "crc32c": crcs,
        "archive": "the index",
    }
    lost = [one for one in index.files if not place.exists(one)]
    if lost:
        facts["incomplete"] = (
            f"{lacking(len(lost), len(index.files), 'data files')}, first {lost[0]!r}; restore it, or open the rest "
            "with partial=True"
        )
    return builder.build(facts, named=True)


def _text(raw: bytes, name: str) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise CorruptError(f"{name!r}: the key {quoted(raw)} is not UTF-8; the file is damaged") from None


def _data_file(index: _Index, entry: BundleEntry, key: str, name: str) -> str:
    if not 0 <= entry.shard < len(index.files) or entry.start < 0 or entry.size < 0:
        raise CorruptError(
            f"{name!r}: {quoted(key)} should be {plural(entry.size, 'byte')} at byte {entry.start:,} of data file "
            f"{entry.shard:,} of {len(index.files):,}; the entry is damaged"
        )
    return index.files[entry.shard]


def _check_shape(shape: tuple[int, ...], key: str, name: str) -> None:
    if len(shape) > MAX_AXES or min(shape, default=0) < 0 or prod(shape) > MAX_ELEMENTS:
        raise CorruptError(f"{name!r}: {quoted(key)} has the impossible shape {short(shape)}")


def _box(
    index: _Index,
    one: BundleEntry | None,
    extents: tuple[tuple[int, int], ...],
    shape: tuple[int, ...],
    dtype: DType,
    key: str,
    name: str,
) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """Return the file, sizes and offsets of one slice of a variable."""
    if len(extents) != len(shape):
        raise CorruptError(f"{name!r}: a slice of {quoted(key)} has {len(extents)} axes, the variable {len(shape)}")
    first = tuple(begin if length >= 0 else 0 for begin, length in extents)
    sizes = tuple(length if length >= 0 else size for (_, length), size in zip(extents, shape, strict=True))
    if one is None:
        raise CorruptError(f"{name!r}: the slice of {quoted(key)} at {first} has no entry; the index is damaged")
    if one.size != nbytes_of(dtype, prod(sizes)) or by_name(_TYPES.get(one.kind, "bool")) != dtype:
        raise CorruptError(
            f"{name!r}: {quoted(key)} has {plural(one.size, 'byte')} for {dtype} {sizes}; the entry is damaged or of "
            "another save"
        )
    return _data_file(index, one, key, name), sizes, first


def _meaning(key: str, entries: Mapping[bytes, BundleEntry]) -> tuple[str | None, str]:
    """Return the parameter and role of a variable."""
    name = key.removesuffix(ATTRIBUTE)
    base, _, last = name.rpartition("/")
    owner, slot, optimizer = base.rpartition(SLOT)
    if slot and owner and optimizer and last:
        return owner, _ROLES.get(last, "other")
    if last in _ROLES and last[0].isupper() and base.encode() in entries:
        return base, _ROLES[last]
    if name in ("save_counter", "global_step", "step") or "/.ATTRIBUTES/" in name or "optimizer/" in name:
        return None, "other"
    return name, "param"


# ---- text ------------------------------------------------------------------------------------------------------------


def read_objects(place: Place, catalog: Catalog) -> Mapping[str, Any]:
    """Return the tensors of text, and the object graph as names of variables by key."""
    name = _name(place)
    index = cache(partial(_read_index, place, name))
    return LazyMap({key: partial(_strings, place, name, index, key) for key in catalog.meta.get("objects", [])})


def _strings(place: Place, name: str, read: Callable[[], _Index], key: str) -> Any:
    """Read a string tensor: lengths, their checksum, then the strings."""
    index = read()
    entry = index.entries[key.encode()]
    _check_shape(entry.shape, key, name)
    file, count = _data_file(index, entry, key, name), prod(entry.shape)
    if entry.size > TEXT_LIMIT:
        raise UnsafeError(
            f"{key!r} has {plural(entry.size, 'byte')} of text, over the limit of {TEXT_LIMIT:,}; it was not read"
        )
    check_listed(entry.shape, repr(key))
    data = place.read(file, start=entry.start, length=entry.size)
    lengths, at = [], 0
    try:
        for _ in range(count):
            length, at = varint(data, at, len(data))
            lengths.append(length)
    except BadMessage:
        lengths = []
    if at + 4 + sum(lengths) != len(data) or len(lengths) != count:
        raise CorruptError(
            f"{key!r} in {file!r}: {plural(len(data), 'byte', 'are')} not {plural(count, 'text')}; the file is damaged"
        )
    widths = b"".join(struct.pack("<I" if length < 1 << 32 else "<Q", length) for length in lengths)
    found = masked(crc32c(np.frombuffer(widths + data[at:], np.uint8)))
    if entry.crc is not None and found != entry.crc:
        raise CorruptError(
            f"{key!r} in {file!r}: masked CRC-32C is {found:08x}, stored is {entry.crc:08x}; it is damaged"
        )
    texts, at = [], at + 4
    for length in lengths:
        texts.append(data[at : at + length])
        at += length
    if key == GRAPH:
        return _graph(texts[0] if texts else b"", key)
    shown = [text.decode("utf-8", "backslashreplace") for text in texts]
    return nested(shown, entry.shape)


def _graph(data: bytes, key: str) -> dict[str, str]:
    """Return the names of the variables by the keys of the index."""
    names: dict[str, str] = {}
    try:
        for number, node in fields(data):
            for inner, attribute in fields(node) if number == 1 and isinstance(node, bytes) else ():
                if inner == 2 and isinstance(attribute, bytes):
                    stored = {n: value for n, value in fields(attribute) if isinstance(value, bytes)}
                    names[stored.get(3, b"").decode("utf-8", "replace")] = stored.get(2, b"").decode("utf-8", "replace")
    except BadMessage:
        raise CorruptError(f"{key!r} is not a message; the file is damaged") from None
    return names


FORMAT = Format(
    name="tensorflow",
    title="TensorFlow checkpoint (V2)",
    marks="*.index, *.data-00000-of-N",
    read_from="tensorflow 2.21",
    detect=detect,
    read_catalog=read_catalog,
    read_objects=read_objects,
    missing=missing,
    stored_step=stored_step,
    single_file=True,
    suffixes=(SUFFIX,),
    own_bytes=True,
)
