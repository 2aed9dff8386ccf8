"""The header of one safetensors file, validated completely before it is used.

::

    0        8                          8+N                                      size
    ├────────┼───────────────────────────┼─────────┬───────────┬──────────────────┤
    │ N (u64)│ JSON, spaces to pad       │ tensor  │ tensor    │ …  no hole,      │
    │ little │ {"w": {"dtype": "BF16",   │         │           │    no overlap,   │
    │ endian │  "shape": [4, 2],         │         │           │    no remainder  │
    │        │  "data_offsets": [0, 16]} │ 0 … 16  │ 16 …      │                  │
    └────────┴───────────────────────────┴─────────┴───────────┴──────────────────┘
                                         ▲ data_offsets count from here

Elements are little endian and row major; F4 and F6 elements are packed and must fill whole bytes. The order of the JSON
is free: ``save_file`` sorts by element size, torch's own writers do not sort.

Source: safetensors 0.8 ``safetensors/src/tensor.rs`` (``read_metadata``, ``Metadata::validate``). It reports the first
violation and keeps the last of two equal names; here all violations are reported, including equal names.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple

from workbench.core import jsonsafe
from workbench.core.catalog import MAX_ELEMENTS
from workbench.core.dtypes import ALL, DType
from workbench.core.garbage import uncollected
from workbench.core.place import Place
from workbench.core.words import plural
from workbench.errors import CorruptError, OpenError, TruncatedError, UnsupportedFormatError

MAX_HEADER = 100_000_000  #: bytes of JSON that safetensors accepts (MAX_HEADER_SIZE)
MAX_DIMS = 64  #: torch's limit; safetensors has none
FIRST_READ = 16 << 10  #: bytes of the first read, which contain most headers
MAX_REPORTED = 5  #: maximum violations in one message
MAX_QUOTED = 120  #: maximum characters of a quoted value in a message

_entry = tuple.__new__  # what Entry._make calls
_DTYPES = {dtype.safetensors: dtype for dtype in ALL if dtype.safetensors}


class Entry(NamedTuple):
    """One tensor: ``shape`` in elements, ``start`` and ``stop`` in bytes from the beginning of the file."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Header:
    """The parsed header of a file.

    Attributes:
        entries: the tensors in the header's order.
        metadata: ``__metadata__``, arbitrary text by name.
        data_start: first byte after the header.
        size: bytes of the file.
    """

    entries: list[Entry]
    metadata: dict[str, str]
    data_start: int
    size: int


def looks_like(head: bytes, size: int) -> bool:
    """Return whether a file of ``size`` bytes that begins with ``head`` (9 bytes or more) can be safetensors."""
    return len(head) >= 9 and head[8:9] == b"{" and 2 <= int.from_bytes(head[:8], "little") <= size - 8


def parse(source: Place | bytes | memoryview, name: str, *, cut: bool = False) -> Header:
    """Read and validate the header of the file ``name``.

    Args:
        source: the file's folder, or the file's bytes.
        cut: accept tensors that end beyond the end of the file (for partial opens).

    Raises:
        TruncatedError: the header or a tensor ends beyond the end of the file.
        CorruptError: any other violation; the message lists the first few and counts the rest.
        UnsupportedFormatError: an element type is unknown.
    """
    size, head = _head(source, name)
    with uncollected():
        return _parse(head, size, name, cut)


def _parse(head: bytes, size: int, name: str, cut: bool) -> Header:
    document = jsonsafe.loads(head, what=f"the header of {name!r}")
    if not isinstance(document, dict):
        raise CorruptError(f"the header of {name!r} is a JSON {type(document).__name__}, not an object of tensors")
    start = 8 + len(head)
    found: list[OpenError] = []
    metadata = document.pop("__metadata__", None)
    entries = _entries(document, start, found)
    found += _metadata(metadata)
    if not found:  # invalid byte ranges were reported already
        found += _layout(entries, start, size, cut)
    if found:
        raise _report(found, name)
    return Header(entries, metadata or {}, start, size)


def _head(source: Place | bytes | memoryview, name: str) -> tuple[int, bytes]:
    if isinstance(source, Place):
        size = source.stat(name).size
        prefix = source.read(name, length=min(FIRST_READ, size))
    else:
        size, prefix = len(source), bytes(source[:FIRST_READ])
    length = _length(size, prefix, name)
    if length + 8 <= len(prefix):
        return size, prefix[8 : 8 + length]
    if isinstance(source, Place):
        return size, source.read(name, start=8, length=length)
    return size, bytes(source[8 : 8 + length])


def check_start(place: Place, name: str) -> int:
    """Return the length of a file's header, after checking that it begins like one. Raises as :func:`parse`."""
    size = place.stat(name).size
    start = place.read(name, length=min(9, size))
    length = _length(size, start, name)
    if length and start[8:] not in (b"{", b" ", b"\n"):
        raise CorruptError(f"the header of {name!r} is not JSON: it begins with {start[8:]!r}")
    return length


def _length(size: int, prefix: bytes, name: str) -> int:
    """Return the bytes of the header."""
    if len(prefix) < 8:
        raise TruncatedError(f"file {name!r} has {size} bytes; a safetensors file begins with 8 bytes of length")
    length = int.from_bytes(prefix[:8], "little")
    if length > MAX_HEADER:
        raise CorruptError(
            f"file {name!r} claims a header of {plural(length, 'byte')} at byte 0, over the limit of {MAX_HEADER:,}; "
            "it is not a safetensors file, or its first bytes are damaged"
        )
    if length > size - 8:
        raise TruncatedError(
            f"file {name!r} claims a header of {plural(length, 'byte')} but ends at byte {size:,}, "
            f"{plural(length + 8 - size, 'byte')} too early; it is truncated: copy it again"
        )
    return length


def _entries(document: Mapping[str, Any], base: int, found: list[OpenError]) -> list[Entry]:
    entries: list[Entry] = []
    for name, info in document.items():
        try:
            dtype, shape, (start, stop) = _DTYPES[info["dtype"]], info["shape"], info["data_offsets"]
            if len(shape) <= MAX_DIMS and type(start) is int and type(stop) is int and 0 <= start <= stop:
                bits = dtype.bits
                for size in shape:
                    if type(size) is not int or size < 0:
                        break
                    bits *= size
                else:  # an empty tensor may hide a huge size behind a 0: use the slow path
                    if bits == (stop - start) * 8 and bits and type(shape) is list and stop < MAX_ELEMENTS:
                        entries.append(_entry(Entry, (name, dtype, tuple(shape), base + start, base + stop)))
                        continue
        except (KeyError, TypeError, ValueError, IndexError):  # reported below
            pass
        wrong = _wrong(name, info)
        if wrong:
            found.append(wrong)
        else:
            start, stop = info["data_offsets"]
            entries.append(Entry(name, _DTYPES[info["dtype"]], tuple(info["shape"]), base + start, base + stop))
    try:
        "".join(document).encode()
    except UnicodeEncodeError:  # JSON's "\ud800" passes half a character past UTF-8
        bad = next(name for name in document if any(0xD800 <= ord(letter) < 0xE000 for letter in name))
        found.append(CorruptError(f"tensor {_q(bad)} has a name that is not Unicode text"))
    return entries


def _wrong(name: str, info: Any) -> OpenError | None:
    """Return what is wrong with one entry alone, or ``None``."""
    tensor = f"tensor {_q(name)}"
    if not isinstance(info, dict):
        return CorruptError(f"{tensor} is described by a {type(info).__name__}, not an object")
    lacking = [field for field in ("dtype", "shape", "data_offsets") if field not in info]
    if lacking:
        return CorruptError(f"{tensor} has no {' and no '.join(lacking)}")
    shape, offsets = info["shape"], info["data_offsets"]
    if not isinstance(info["dtype"], str):
        return CorruptError(f"{tensor} has the element type {_q(info['dtype'])}, which is not text")
    if info["dtype"] not in _DTYPES:
        known = "it may be newer than this workbench"
        return UnsupportedFormatError(f"{tensor} has the unknown element type {_q(info['dtype'])}; {known}")
    if isinstance(shape, list) and len(shape) > MAX_DIMS:
        return CorruptError(f"{tensor} has {plural(len(shape), 'dimension')}, over the limit of {MAX_DIMS}")
    if not isinstance(shape, list) or any(type(size) is not int or size < 0 for size in shape):
        return CorruptError(f"{tensor} has the shape {_q(shape)}, which is not a list of sizes")
    if math.prod(max(size, 1) for size in shape) > MAX_ELEMENTS:
        return CorruptError(f"{tensor} has the impossibly large shape {_q(shape)}")
    if not isinstance(offsets, list) or len(offsets) != 2 or any(type(at) is not int or at < 0 for at in offsets):
        return CorruptError(f"{tensor} has the data_offsets {_q(offsets)}, which are not two positions")
    start, stop = offsets
    if stop < start or stop >= MAX_ELEMENTS:
        return CorruptError(f"{tensor} has the data_offsets {_q(offsets)}, which are not a byte range")
    dtype = _DTYPES[info["dtype"]]
    bits = math.prod(shape) * dtype.bits
    if bits % 8:
        return CorruptError(f"{tensor}: shape {_q(shape)} of {info['dtype']} ends inside a byte")
    need, have = bits // 8, stop - start
    if need != have:
        return CorruptError(
            f"{tensor}: shape {_q(shape)} of {info['dtype']} needs {plural(need, 'byte')} but its range [{start:,}, "
            f"{stop:,}) has {have:,}, {abs(need - have):,} {'too few' if need > have else 'too many'}"
        )
    return None


def _metadata(metadata: Any) -> Iterator[OpenError]:
    if metadata is None:
        return
    if not isinstance(metadata, dict):
        yield CorruptError(f"__metadata__ is a {type(metadata).__name__}, not an object of strings")
        return
    for key, value in metadata.items():
        if not isinstance(value, str):
            yield CorruptError(f"__metadata__ {_q(key)} is a {type(value).__name__}, not a string")


def _layout(entries: list[Entry], base: int, size: int, cut: bool) -> Iterator[OpenError]:
    """Check that every byte after the header belongs to exactly one tensor."""
    at, before = base, None
    for name, _, _, start, stop in sorted(entries, key=itemgetter(3, 4)):
        if start != at or stop > size:
            this = f"tensor {_q(name)}"
            if start < at:
                yield CorruptError(
                    f"{this} begins at byte {start:,}, {plural(at - start, 'byte')} before the end of {_label(before)}"
                    ": they overlap"
                )
            elif start > at:
                yield CorruptError(
                    f"{plural(start - at, 'byte')} from byte {at:,} on, between {_label(before)} and {this}, "
                    "belong to no tensor"
                )
            if stop > size and not cut:
                yield TruncatedError(
                    f"{this} ends at byte {stop:,}, {plural(stop - size, 'byte')} beyond the end of the file at "
                    f"{size:,}: it is truncated, copy it again"
                )
        if stop >= at:
            at, before = stop, name
    if at < size:
        yield CorruptError(
            f"{plural(size - at, 'byte')} from byte {at:,} on, after {_label(before)}, belong to no tensor"
        )


def _label(name: str | None) -> str:
    return "the header" if name is None else f"tensor {_q(name)}"


def _report(found: list[OpenError], name: str) -> OpenError:
    first, rest = found[0], [str(violation) for violation in found[1:MAX_REPORTED]]
    text = f"file {name!r}: {first}"
    if rest:
        more = len(found) - 1
        text += f"; and {more:,} more: {'; '.join(rest)}" + ("; …" if more > len(rest) else "")
    return type(first)(text)


def _q(value: object) -> str:
    """Quote an untrusted value for a message, escaped and bounded."""
    if isinstance(value, (list, dict, str)) and len(value) > MAX_QUOTED:  # its repr would be too long
        value = (
            value[:MAX_QUOTED] if isinstance(value, (list, str)) else dict(itertools.islice(value.items(), MAX_QUOTED))
        )
    text = repr(value)
    return text if len(text) <= MAX_QUOTED else f"{text[: MAX_QUOTED - 1]}…"


def saved_offsets(file: str, header: Header, *, partial: bool = False) -> dict[str, tuple[int, ...]]:
    """Return the offset of each piece in its tensor, in elements; empty for a file of complete tensors.

    Args:
        partial: tensors whose offset is not stored are left out, instead of raising.

    Raises:
        CorruptError: an offset is not stored, or is not one.
    """
    text = header.metadata.get("DCP_SHARDING_INFO")
    if text is None:
        return {}
    what = f"DCP_SHARDING_INFO of {file!r}"
    document = jsonsafe.loads(text.encode(), what=what)
    found: dict[str, tuple[int, ...]] = {}
    for entry in header.entries:
        info = document.get(entry.name) if isinstance(document, dict) else document
        if info is None and partial:
            continue
        offsets = info.get("saved_offsets") if isinstance(info, dict) else None
        if not isinstance(offsets, list) or len(offsets) != len(entry.shape) or not all(map(_is_offset, offsets)):
            raise CorruptError(f"{what} has no {len(entry.shape)}-dimensional offset for tensor {entry.name!r}")
        found[entry.name] = tuple(offsets)
    return found


def _is_offset(at: object) -> bool:
    return type(at) is int and 0 <= at < 1 << 55
