"""The header of one GGUF file: metadata and tensor infos, every count bounded by the bytes of the file.

::

    "GGUF" │ version u32 │ tensors u64 │ pairs u64 │ pairs … │ infos … │ padding │ data
    pair     key (length u64, UTF-8) │ type u32 │ value      type 8: text; type 9: element type u32, count u64, elements
    info     name │ axes u32 │ sizes u64 each, fastest first │ ggml type u32 │ offset u64 in the data

    version 1     lengths, counts and sizes are u32
    versions 2, 3 as drawn; version 3 may be big endian (then the version reads 00 00 00 03), with its elements

The data begins at the next multiple of ``general.alignment`` (32 if it is absent), as does every tensor in it.

Sources: ggml ``docs/gguf.md``; gguf 0.19 ``gguf_reader.py``, ``constants.py``; llama.cpp ``gguf.cpp``.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any

from workbench.core.catalog import MAX_ELEMENTS
from workbench.core.dtypes import DType, by_name, nbytes_of
from workbench.core.pickles.standins import short
from workbench.core.place import Place
from workbench.core.words import plural
from workbench.errors import CorruptError, TruncatedError, UnsafeError, UnsupportedFormatError, quoted

MAGIC = b"GGUF"
ALIGNMENT = 32  #: bytes, without ``general.alignment``
MAX_ALIGNMENT = 1 << 20
MAX_AXES = 4  #: GGML_MAX_DIMS
DEPTH = 4  #: arrays in arrays
STEP = 1 << 20  #: bytes of a header that are read at a time
LONGEST = 128 << 20  #: bytes of a header; a tokenizer of 256,000 words takes 10 MB
LONGEST_TEXT = 16 << 20  #: bytes of a text; chat templates take some 10 KB
PAIRS = 1 << 16  #: of metadata; models have some 50
VALUES = 4_000_000  #: array elements of a header; a tokenizer has about three for each word
#: Codes of :mod:`struct` by type of a value.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9
#: ggml's types by number.
_TYPES = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    6: "Q5_0",
    7: "Q5_1",
    8: "Q8_0",
    10: "Q2_K",
    11: "Q3_K",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    30: "BF16",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
    40: "NVFP4",
    41: "Q1_0",
}
_REMOVED = {4, 5, 31, 32, 33, 36, 37, 38}  #: types that ggml no longer has


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor: ``shape`` in numpy's order, ``start`` and ``stop`` in bytes from the beginning of the file."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class GgufHeader:
    """The parsed header of a file.

    Attributes:
        metadata: value by key, in the file's order.
        tensors: in the file's order.
        data_start: first byte after the header and its padding.
        version, big: format version, and whether the file is big endian.
    """

    metadata: dict[str, Any]
    tensors: list[GgufTensor]
    data_start: int
    version: int
    big: bool = False
    alignment: int = field(default=ALIGNMENT)


def begin(place: Place, name: str) -> tuple[_HeaderReader, int, int, int]:
    """Read the beginning of a header, up to its metadata: version, and number of tensors and of metadata pairs.

    Raises as :func:`parse`.
    """
    reader = _HeaderReader(place, name)
    magic = bytes(reader.take(4, "magic"))
    if magic != MAGIC:
        raise CorruptError(f"{name!r} begins with {magic!r}, not with {MAGIC!r}")
    raw = bytes(reader.take(4, "version"))
    little, big_version = int.from_bytes(raw, "little"), int.from_bytes(raw, "big")
    reader.big = big_version < little
    version = min(little, big_version)
    if not 1 <= version <= 3:
        raise UnsupportedFormatError(f"{name!r} has GGUF version {version:,}; this workbench reads 1 to 3")
    reader.size = "I" if version == 1 else "Q"
    tensors, pairs = reader.count("tensors", 24), reader.count("metadata pairs", 9)
    if pairs > PAIRS:
        raise UnsafeError(f"{name!r} has {plural(pairs, 'metadata pair')}, over the limit of {PAIRS:,}; refused")
    return reader, version, tensors, pairs


def parse(place: Place, name: str, *, metadata_only: bool = False) -> GgufHeader:
    """Read and validate the header of a file. Tensors may end beyond the end of the file.

    Args:
        metadata_only: stop before the tensors.

    Raises:
        CorruptError: not GGUF, or it contradicts itself; the message names the byte.
        TruncatedError: the header ends beyond the end of the file.
        UnsafeError: a count that the file cannot hold.
        UnsupportedFormatError: a version or an element type that is not known.
    """
    reader, version, tensors, pairs = begin(place, name)
    metadata: dict[str, Any] = {}
    for _ in range(pairs):
        at = reader.at
        key = reader.text("a key")
        if key in metadata:
            raise CorruptError(f"{name!r}, byte {at:,}: the key {quoted(key)} occurs twice")
        metadata[key] = reader.value(reader.number("I", f"the type of {quoted(key)}"), key, DEPTH)
    alignment = metadata.get("general.alignment", ALIGNMENT)
    if type(alignment) is not int or not 0 < alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise CorruptError(f"{name!r}: general.alignment is {short(alignment)}, not a power of 2")
    infos = [_info(reader) for _ in range(0 if metadata_only else tensors)]
    start = -(-reader.at // alignment) * alignment
    found = list(_placed(name, infos, start, alignment))
    return GgufHeader(metadata, found, start, version, reader.big, alignment)


_Info = tuple[str, DType, tuple[int, ...], int, int]


def _info(reader: _HeaderReader) -> _Info:
    at = reader.at
    name = reader.text("a tensor's name")
    axes = reader.number("I", "the number of axes of a tensor")
    if axes > MAX_AXES:
        raise CorruptError(
            f"{reader.name!r}, byte {at:,}: tensor {quoted(name)} has {axes:,} axes; ggml has {MAX_AXES}"
        )
    *sizes, kind, offset = reader.numbers(f"{axes}{reader.size}IQ", "the shape, type and offset of a tensor")
    if kind not in _TYPES:
        gone = "no longer exists" if kind in _REMOVED else "is newer than this workbench, or only for activations"
        raise UnsupportedFormatError(f"{reader.name!r}: tensor {quoted(name)} has ggml type {kind}, which {gone}")
    dtype, shape = by_name(_TYPES[kind]), tuple(reversed(sizes))
    if prod(shape) > MAX_ELEMENTS:
        raise CorruptError(f"{reader.name!r}: tensor {quoted(name)} has the impossible shape {shape}")
    if dtype.packed and (not shape or shape[-1] % dtype.block):
        raise CorruptError(
            f"{reader.name!r}: tensor {quoted(name)} of {dtype} has the shape {shape}; its rows are not whole blocks "
            f"of {dtype.block} elements"
        )
    return name, dtype, shape, offset, at


def _placed(file: str, infos: list[_Info], start: int, alignment: int) -> Iterator[GgufTensor]:
    """Yield tensors with their bytes: each begins where the previous one ends, padded, as llama.cpp requires."""
    seen: set[str] = set()
    expected = 0
    for name, dtype, shape, offset, at in infos:
        if name in seen:
            raise CorruptError(f"{file!r}, byte {at:,}: tensor {quoted(name)} occurs twice")
        seen.add(name)
        if offset != expected:
            raise CorruptError(
                f"{file!r}, byte {at:,}: tensor {quoted(name)} begins at byte {offset:,} of the data, but the one "
                f"before it ends at byte {expected:,}, with padding; an offset, a shape or a type is wrong"
            )
        stop = offset + nbytes_of(dtype, prod(shape))
        expected = -(-stop // alignment) * alignment
        yield GgufTensor(name, dtype, shape, start + offset, start + stop)


class _HeaderReader:
    """The bytes of a header in order; more of the file is read when it is needed."""

    def __init__(self, place: Place, name: str) -> None:
        self.place, self.name, self.at = place, name, 0
        self.total = place.stat(name).size
        self.big = False
        self.size = "Q"
        self._data = b""
        self._left = VALUES

    def take(self, count: int, what: str) -> memoryview:
        """Return the next bytes.

        Raises:
            TruncatedError: the file ends earlier.
        """
        stop = self.at + count
        if stop > self.total:
            raise TruncatedError(
                f"{self.name!r} ends at byte {self.total:,}, {plural(stop - self.total, 'byte')} before the end of "
                f"{what} at byte {self.at:,}; the file is truncated, or a length in it is wrong"
            )
        if stop > LONGEST:
            raise UnsafeError(f"{self.name!r} has a header of more than {LONGEST:,} bytes, for {what}; refused")
        if stop > len(self._data):
            have = len(self._data)
            length = min(max(stop - have, have, STEP), self.total - have)
            self._data += self.place.read(self.name, start=have, length=length)
        found = memoryview(self._data)[self.at : stop]
        self.at = stop
        return found

    def numbers(self, form: str, what: str) -> tuple[Any, ...]:
        """Return numbers, as :mod:`struct` writes them."""
        form = (">" if self.big else "<") + form
        return struct.unpack(form, self.take(struct.calcsize(form), what))

    def number(self, form: str, what: str) -> int:
        """Return one number."""
        found: int = self.numbers(form, what)[0]
        return found

    def count(self, what: str, least: int) -> int:
        """Return a count of items that take ``least`` bytes or more each.

        Raises:
            UnsafeError: the rest of the file is too short for them.
        """
        at = self.at
        found = self.number(self.size, f"the number of {what}")
        if found * least > self.total - self.at:
            raise UnsafeError(
                f"{self.name!r}, byte {at:,}: {found:,} {what} would take {plural(found * least, 'byte')} or more, but "
                f"{self.total - self.at:,} remain; the file is damaged"
            )
        return found

    def letters(self, what: str) -> memoryview:
        """Return the bytes of text.

        Raises:
            UnsafeError: more than :data:`LONGEST_TEXT`.
        """
        at, length = self.at, self.number(self.size, f"the length of {what}")
        if LONGEST_TEXT < length <= self.total - self.at:
            raise UnsafeError(
                f"{self.name!r}, byte {at:,}: {what} has {plural(length, 'byte')}, over {LONGEST_TEXT:,}; refused"
            )
        return self.take(length, what)

    def text(self, what: str) -> str:
        """Return text."""
        at = self.at
        try:
            return str(self.letters(what), "utf-8")
        except UnicodeDecodeError as error:
            raise CorruptError(f"{self.name!r}, byte {at:,}: {what} is not UTF-8 ({error.reason})") from None

    def value(self, kind: int, key: str, depth: int) -> Any:
        """Return a value of metadata."""
        what = f"the value of {quoted(key)}"
        if kind in _SCALARS:
            return self.numbers(_SCALARS[kind], what)[0]
        if kind == _TEXT:  # a tokenizer's merges need not be UTF-8
            return str(self.letters(what), "utf-8", "backslashreplace")
        if kind != _ARRAY or not depth:
            raise CorruptError(f"{self.name!r}, byte {self.at - 4:,}: {what} has the unknown type {kind:,}")
        inner = self.number("I", f"the element type of {what}")
        form = _SCALARS.get(inner)
        least = struct.calcsize(form) if form else 12 if inner == _ARRAY else struct.calcsize(self.size)
        count = self.count(f"elements of {quoted(key)}", least)
        self._left -= count
        if self._left < 0:
            raise UnsafeError(f"{self.name!r} has more than {VALUES:,} array elements in its metadata; refused")
        if form:
            return list(self.numbers(f"{count}{form}", what))
        return [self.value(inner, key, depth - 1) for _ in range(count)]
