"""numpy's archives (``.npz``) and arrays (``.npy``).

::

    x.npz   zip archive of NAME.npy, each stored or deflated; NAME is the key and may contain "/"

    x.npy   93 "NUMPY" │ version u8 u8 │ length u16 (1.0) or u32 (2.0, 3.0) │ header, text │ elements
                          {'descr': '<f4', 'fortran_order': False, 'shape': (30, 20), }

A stored member is read in place. A deflated one is inflated whole, because no part of it can be located otherwise. The
fields of a structured array are separate tensors (``points.x``). Text (``U``, ``S``) is an object. An array of Python
objects is a pickle, which is never loaded: it is named in the notes, as are other types that cannot be shown.

numpy does not store the names of types that it lacks: a bfloat16 array has the type ``V2``. It is read as ``bits16``,
raw bits, since the file does not state their meaning.

Sources: numpy 2.4 ``numpy/lib/_format_impl.py`` and NEP 1; APPNOTE.TXT 6.3.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from math import prod
from typing import Any

from workbench.core import codecs, payload, ziparchive
from workbench.core.build import CatalogBuilder
from workbench.core.catalog import MAX_ELEMENTS, Catalog
from workbench.core.dtypes import DType, by_name
from workbench.core.jsonable import check_listed, nested
from workbench.core.lazymap import LazyMap
from workbench.core.pickles.standins import short
from workbench.core.place import Place
from workbench.core.words import plural, some_of
from workbench.core.ziparchive import Archive
from workbench.core.ziprecord import DEFLATED, STORED, ZipRecord, locate
from workbench.errors import CorruptError, NotACheckpointError, OpenError, TruncatedError, UnsafeError, quoted
from workbench.formats.format import Format

MAGIC = b"\x93NUMPY"
END = ".npy"
#: Bytes; numpy itself reads headers of more than 10,000 only from files marked as trusted.
HEADER_LIMIT = 64 << 10
TEXT_LIMIT = 16 << 20  #: maximum bytes of an array of text that is shown
DEPTH = 16  #: maximum nesting of brackets in a header
RATIO = 1032  #: maximum expansion of deflate
NOTED = 5  #: maximum arrays with a note each
_TOKEN = re.compile(r"""\s*('(?:[^'\\\n]|\\.)*'|"(?:[^"\\\n]|\\.)*"|\d{1,20}L?|True|False|[()\[\]{},:])""")
_DESCR = re.compile(r"([<>|=]?)([biufcVSUO])(\d{1,18})?")
_DTYPES = {
    "b1": "bool",
    "i1": "int8",
    "i2": "int16",
    "i4": "int32",
    "i8": "int64",
    "u1": "uint8",
    "u2": "uint16",
    "u4": "uint32",
    "u8": "uint64",
    "f2": "float16",
    "f4": "float32",
    "f8": "float64",
    "c8": "complex64",
    "c16": "complex128",
    "V1": "bits8",
    "V2": "bits16",
}


@dataclass(frozen=True, slots=True)
class Npy:
    """The header of one array.

    Attributes:
        descr: as stored: a type's name, or the fields of a structured one.
        shape, fortran: sizes, and whether the first axis is the fastest.
        data: first byte of the elements, from the beginning of the header.
    """

    descr: Any
    shape: tuple[int, ...]
    fortran: bool
    data: int

    @property
    def strides(self) -> tuple[int, ...]:
        """Elements between neighbours along each axis."""
        steps = self.shape if self.fortran else self.shape[::-1]
        found = tuple(prod(max(size, 1) for size in steps[:axis]) for axis in range(len(steps)))
        return found if self.fortran else found[::-1]


@dataclass(frozen=True, slots=True)
class _Field:
    """One type in an array's elements: ``offset`` and ``item`` in bytes, ``shape`` of its own axes."""

    name: str
    dtype: DType
    big: bool
    offset: int
    item: int
    shape: tuple[int, ...] = ()


# ---- headers ---------------------------------------------------------------------------------------------------------


def parse(data: Any, what: str) -> Npy:
    """Return the header that ``data`` begins with.

    Raises:
        CorruptError: it is not a numpy header, or contradicts itself.
        TruncatedError: it ends before its length; UnsafeError: a length over the limit.
    """
    head = bytes(data[:12])
    if head[:6] != MAGIC or len(head) < 10:
        raise CorruptError(f"{what} begins with {head[:6]!r}, not with numpy's {MAGIC!r}; the file is damaged")
    if head[6] not in (1, 2, 3):
        raise CorruptError(
            f"{what}, byte 6: unknown version {head[6]}.{head[7]} of the .npy format; 1.0 to 3.0 are known"
        )
    wide = 2 if head[6] == 1 else 4
    length = int.from_bytes(head[8 : 8 + wide], "little")
    if length > HEADER_LIMIT:
        raise UnsafeError(
            f"{what}, byte 8: a header of {plural(length, 'byte')}, over the limit of {HEADER_LIMIT:,}; refused"
        )
    begin = 8 + wide
    text = bytes(data[begin : begin + length])
    if len(text) < length:
        raise TruncatedError(
            f"{what} ends {plural(length - len(text), 'byte')} before the end of its header; it is truncated"
        )
    found = _literal(text.decode("utf-8" if head[6] == 3 else "latin-1", "replace"), what)
    if not isinstance(found, dict) or set(found) != {"descr", "fortran_order", "shape"}:
        raise CorruptError(f"{what}: the header is not a dict of descr, fortran_order and shape; the file is damaged")
    shape = found["shape"]
    if type(shape) is not tuple or not all(type(size) is int for size in shape) or len(shape) > 64:
        raise CorruptError(f"{what}: the shape {short(shape)} is not a tuple of sizes; the file is damaged")
    if type(found["fortran_order"]) is not bool:
        raise CorruptError(f"{what}: fortran_order is {short(found['fortran_order'])}; the file is damaged")
    if prod(shape) > MAX_ELEMENTS or max(shape, default=0) > MAX_ELEMENTS:
        raise CorruptError(f"{what} has the impossible shape {shape}")
    return Npy(found["descr"], shape, found["fortran_order"], begin + length)


def _literal(text: str, what: str) -> Any:
    """Parse a header's text: literals and brackets only, nested to a bounded depth."""
    at, depth, tokens = 0, 0, []
    text = text.rstrip()
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise CorruptError(f"{what}: the header is not a literal at character {at:,}: {text[at : at + 20]!r}")
        depth += (match[1] in "([{") - (match[1] in ")]}")
        if depth > DEPTH:
            raise CorruptError(f"{what}: the header has more than {DEPTH} nested brackets; refused")
        tokens.append(match[1].rstrip("L") if match[1][0].isdigit() else match[1])  # Python 2 wrote 20L
        at = match.end()
    try:
        found, end = _value(tokens, 0)
    except (ValueError, IndexError, TypeError):
        end = -1
    if end != len(tokens):
        raise CorruptError(f"{what}: the header {quoted(text)} is not a literal; the file is damaged")
    return found


_CLOSING = {"(": ")", "[": "]", "{": "}"}


def _value(tokens: list[str], at: int) -> tuple[Any, int]:
    """Parse the literal that begins at a token, and return the token after it too."""
    token = tokens[at]
    if token in _CLOSING:
        items: list[Any] = []
        at, comma = at + 1, True
        while tokens[at] != _CLOSING[token]:
            if not comma:
                raise ValueError
            item, at = _value(tokens, at)
            if token == "{":
                if tokens[at] != ":":
                    raise ValueError
                other, at = _value(tokens, at + 1)
                item = (item, other)
            items.append(item)
            comma = tokens[at] == ","
            at += comma
        if token == "(":
            return items[0] if len(items) == 1 and not comma else tuple(items), at + 1
        return dict(items) if token == "{" else items, at + 1
    if token[0] in "'\"" and "\\" not in token:
        return token[1:-1], at + 1
    return {"True": True, "False": False}[token] if token[0] in "TF" else int(token), at + 1


def _fields(descr: Any) -> tuple[list[_Field], int, str]:
    """Return the types of an element, its bytes, and why it cannot be shown, or an empty string."""
    if isinstance(descr, str):
        match = _DESCR.fullmatch(descr)
        kind, size = (match[2], int(match[3] or 0)) if match else ("", 0)
        name = _DTYPES.get(f"{kind}{size}")
        item = size * 4 if kind == "U" else size
        if name is None or match is None:
            return [], item, "is a pickle of Python objects" if kind == "O" else f"has the type {quoted(descr)}"
        return [_Field("", by_name(name), match[1] == ">" and item > 1, 0, item)], item, ""
    found: list[_Field] = []
    at = 0
    for one in descr if isinstance(descr, list) else [()]:
        if not isinstance(one, tuple) or len(one) not in (2, 3) or not isinstance(one[1], str):
            return [], 0, "has nested fields"
        sizes = one[2] if len(one) == 3 else ()
        if type(sizes) is not tuple or not all(type(size) is int for size in sizes) or prod(sizes) > MAX_ELEMENTS:
            return [], 0, "has nested fields"
        inner, item, why = _fields(one[1])
        if one[0] == "" and one[1][1:2] == "V":  # padding
            at += item
            continue
        name = one[0][-1] if isinstance(one[0], tuple) and one[0] else one[0]
        if why or not isinstance(name, str):
            return [], 0, f"has a field that {why}"
        found.append(_Field(f".{name}", inner[0].dtype, inner[0].big, at, item, sizes))
        at += item * prod(sizes)
    if any(at % field.item for field in found):
        return [], at, "has fields that are not aligned to their size"
    return found, at, ""


# ---- members ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Member:
    """An array of the file: its stored bytes, its codec, and the number of decoded bytes."""

    key: str
    start: int
    stop: int
    deflated: bool
    length: int
    npy: Npy
    what: str


def _members(place: Place, file: str, notes: list[str]) -> Iterator[_Member]:
    view = place.window(file)
    if bytes(view[:6]) == MAGIC:
        npy = parse(view, repr(file))
        yield _Member(file.removesuffix(END), 0, len(view), False, len(view), npy, repr(file))
        return
    archive = ziparchive.read_directory(view, what=repr(file))
    archive.fetch_headers()
    others = []
    for record in archive.records.values():
        if not record.name.endswith(END):
            others.append(record.name)
            continue
        start, stop = locate(view, record, repr(file))
        what = f"{file!r}: member {record.name!r}"
        if record.method not in (STORED, DEFLATED):
            notes.append(f"array {record.name!r} is compressed with zip method {record.method}; it is left out")
            continue
        deflated = record.method == DEFLATED
        if deflated and record.usize > RATIO * record.csize + 64:
            raise UnsafeError(f"{what} cannot inflate from {plural(record.csize, 'byte')} to {record.usize:,}; refused")
        head = _inflated_head(archive, record, start, stop) if deflated else view.part(start, stop)
        yield _Member(record.name.removesuffix(END), start, stop, deflated, record.usize, parse(head, what), what)
    if others:
        notes.append(f"{plural(len(others), 'member', 'are')} not arrays and are left out: {others[0]!r} …")


def _inflated_head(archive: Archive, record: ZipRecord, start: int, stop: int) -> bytes:
    most = HEADER_LIMIT + 12
    try:
        return zlib.decompressobj(-15).decompress(archive.view[start : min(stop, start + most)], most)
    except zlib.error as error:
        raise CorruptError(f"{archive.what}: member {record.name!r} cannot be inflated ({error})") from None


def _add(builder: CatalogBuilder, file: str, one: _Member) -> str:
    """Declare the tensors of an array; return why it is left out, or an empty string."""
    npy = one.npy
    fields, item, why = _fields(npy.descr)
    if not why and npy.data + prod(npy.shape) * item != one.length:
        kind = TruncatedError if npy.data + prod(npy.shape) * item > one.length else CorruptError
        raise kind(
            f"{one.what} has {plural(one.length - npy.data, 'byte')} of elements, but its header says {npy.shape} of "
            f"{item} bytes each, {prod(npy.shape) * item:,}; the file is truncated or damaged"
        )
    for field in fields:
        key = one.key + field.name
        if key in builder:
            raise CorruptError(f"{one.what}: the name {key!r} occurs twice in {file!r}")
        shape = npy.shape + field.shape
        builder.tensor(key, field.dtype, shape)
        steps = tuple(step * (item // field.item) for step in npy.strides) + Npy("", field.shape, False, 0).strides
        start, inner = one.start, npy.data + field.offset
        codec = codecs.DEFLATE_BE if field.big else codecs.DEFLATE
        if not one.deflated:
            start, inner = start + inner, 0
            codec = codecs.RAW_BE if field.big else codecs.RAW
        builder.chunk(
            key, [0] * len(shape), shape, file, start, max(one.stop, start), codec=codec, inner=inner, strides=steps
        )
    return why


def _is_text(npy: Npy) -> bool:
    return isinstance(npy.descr, str) and npy.descr.lstrip("<>|=")[:1] in ("U", "S")


def _text(place: Place, file: str, members: Callable[[], dict[str, _Member]], key: str) -> Any:
    """Read an array of strings, as nested lists."""
    one = members()[key]
    count, item = prod(one.npy.shape), int(one.npy.descr.lstrip("<>|=US") or 0)
    item *= 4 if "U" in one.npy.descr else 1
    if one.length > TEXT_LIMIT:
        raise UnsafeError(
            f"{one.what} has {plural(one.length, 'byte')} of text, over the limit of {TEXT_LIMIT:,}; refused"
        )
    check_listed(one.npy.shape, one.what)
    data: Any = place.read(file, start=one.start, length=one.stop - one.start)
    if one.deflated:
        data = payload.inflate(memoryview(data), one.length, what=one.what, raw=True).tobytes()
    if len(data) != one.npy.data + count * item:
        raise CorruptError(
            f"{one.what} has {plural(len(data), 'byte')}, but its header says {one.npy.data + count * item:,}"
        )
    wide = "utf-32-be" if one.npy.descr[0] == ">" else "utf-32-le"
    encoding = wide if "U" in one.npy.descr else "latin-1"
    texts = [
        data[at : at + item].decode(encoding, "backslashreplace").rstrip("\0")
        for at in range(one.npy.data, one.npy.data + count * item, item or 1)
    ] or [""] * count
    return nested(texts, one.npy.shape, fortran=one.npy.fortran)


# ---- the format ------------------------------------------------------------------------------------------------------


def detect(place: Place) -> bool:
    """Return whether the file is an array, or a zip archive that holds one and is not of ``torch.save``."""
    if place.file is None:
        return False
    try:
        head = place.read(place.file, length=min(6, place.stat(place.file).size))
        if head == MAGIC:
            return True
        if not head.startswith((b"PK\x03\x04", b"PK\x05\x06")):
            return False
        if place.file.endswith(".npz"):
            return True
        archive = ziparchive.read_directory(place.window(place.file), what=repr(place.file))
        return archive.prefix is None and any(name.endswith(END) for name in archive.records)
    except OpenError:
        return False


def read_catalog(place: Place) -> Catalog:
    """Return the catalog of every array.

    Raises:
        CorruptError, TruncatedError: the archive or a header is damaged or contradicts itself.
        UnsafeError: an impossible size.
    """
    if place.file is None:
        raise NotACheckpointError(f"{place.path!r} is a folder; open one of its .npz files")
    file, notes, left, texts = place.file, [], [], []  # type: tuple[str, list[str], list[str], list[str]]
    builder = CatalogBuilder("npz", place)
    builder.file(file, metadata=True)
    largest = 0
    raw: list[str] = []
    for one in _members(place, file, notes):
        if _is_text(one.npy):
            texts.append(one.key)
        elif why := _add(builder, file, one):
            left.append(f"array {one.key!r} {why} and is left out")
        else:
            largest = max(largest, one.length)
        if isinstance(one.npy.descr, str) and one.npy.descr.lstrip("<>|=") in ("V1", "V2"):
            raw.append(one.key)
    if raw:
        notes.append(
            f"the type of {some_of(raw, 3)} is not stored (V1, V2, as numpy saves bfloat16 and float8): shown as bits"
        )
    notes += left[:NOTED]
    if len(left) > NOTED:
        notes.append(f"{plural(len(left) - NOTED, 'more array', 'are')} left out for similar reasons")
    return builder.build(
        {"step": None, "notes": notes, "largest_chunk": largest, "objects": texts, "archive": "the archive"}
    )


def read_objects(place: Place, catalog: Catalog) -> Mapping[str, Any]:
    """Return the arrays of text."""
    file, listed = place.file or "", catalog.meta.get("objects", [])

    @cache
    def members() -> dict[str, _Member]:
        return {one.key: one for one in _members(place, file, [])}

    return LazyMap({key: partial(_text, place, file, members, key) for key in listed})


FORMAT = Format(
    name="npz",
    title="numpy archive",
    marks="*.npz, *.npy",
    read_from="numpy 1.0 – 2.4",
    detect=detect,
    read_catalog=read_catalog,
    read_objects=read_objects,
    single_file=True,
)
