"""``torch.save`` of a flat dict of tensors: a zip archive, written without torch.

::

    archive/data.pkl             {name: _rebuild_tensor_v2(storage N, 0, shape, stride, …)}    protocol 2
    archive/.format_version      1
    archive/.storage_alignment   64
    archive/byteorder            little
    archive/data/0 …             payloads, each from a multiple of 64 bytes on (an "FB" field of 'Z's pads)
    archive/version              3
    central directory            CRCs are known when the payloads are written: it is filled in last

Records are STORED, with data descriptors (flag bit 3), as torch writes them; from 4 GiB on with zip64 fields. Element
types without a storage class of their own go through ``_rebuild_tensor_v3`` over an untyped storage.

Source: torch 2.13 ``torch/serialization.py`` (``_save``), ``torch/_tensor.py`` (``_reduce_ex_internal``),
``caffe2/serialize/inline_container.cc``; APPNOTE.TXT 6.3, sections 4.3.7 to 4.3.16, 4.5.3.
"""

from __future__ import annotations

import io
import pickle
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from workbench.core import catalog as cat
from workbench.core.dtypes import DType
from workbench.errors import UnsupportedFormatError, UsageError
from workbench.reshard.filemap import FileMap, Pieces

__all__ = ["torch_file"]

ALIGN = 64  #: bytes
ROOT = "archive"
#: Types with a storage class of their own; the others are named themselves.
STORAGES = {
    "float32": "FloatStorage", "float64": "DoubleStorage", "float16": "HalfStorage", "bfloat16": "BFloat16Storage",
    "int64": "LongStorage", "int32": "IntStorage", "int16": "ShortStorage", "int8": "CharStorage",
    "uint8": "ByteStorage", "bool": "BoolStorage", "complex64": "ComplexFloatStorage",
    "complex128": "ComplexDoubleStorage",
}  # fmt: skip
FULL = 0xFFFFFFFF
FLAGS, DESCRIPTOR = 0x800, 0x8
DAY_ZERO = 0x0021  # 1 January 1980, the first that zip knows
_LOCAL = struct.Struct("<4s5H3L2H")
_CENTRAL = struct.Struct("<4s6H3L5H2L")


def torch_file(pieces: Pieces, name: str, *, objects: Mapping[str, Any] = MappingProxyType({})) -> FileMap:
    """One archive of all pieces.

    Args:
        objects: plain values (:mod:`workbench.reshard.plain`) that follow the tensors in the dict.

    Raises:
        UnsupportedFormatError: an element type that torch lacks or cannot load; names the tensor.
        UsageError: two tensors of one name.
    """
    small = [
        ("data.pkl", _pickle(pieces, objects)),
        (".format_version", b"1"),
        (".storage_alignment", str(ALIGN).encode()),
        ("byteorder", b"little"),
    ]
    layout = _Layout()
    for record, data in small:
        layout.add(record, len(data), data)
    for at, nbytes in enumerate(pieces.nbytes.tolist()):
        layout.add(f"data/{at}", nbytes)
    layout.add("version", 2, b"3\n")
    start = np.array([record.start for record in layout.records if record.data is None], np.int64)
    size = layout.at + len(layout.directory([0] * len(pieces)))
    return FileMap(name, size, tuple(layout.literals), pieces, start, layout.finish)


# ---- the archive -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Record:
    name: bytes
    offset: int  # of the local header
    start: int  # of the payload
    size: int
    data: bytes | None  # known beforehand

    @property
    def flags(self) -> int:
        return FLAGS | DESCRIPTOR if self.size else FLAGS  # torch writes no descriptor of nothing

    def descriptor(self, crc: int) -> bytes:
        if not self.size:
            return b""
        return struct.pack("<4sLQQ" if self.size >= FULL else "<4sLLL", b"PK\x07\x08", crc, self.size, self.size)


class _Layout:
    """Records one after the other; what depends on no payload becomes a literal."""

    def __init__(self) -> None:
        self.records: list[_Record] = []
        self.literals: list[tuple[int, bytes]] = []
        self.at = 0

    def add(self, name: str, size: int, data: bytes | None = None) -> None:
        """The next record; ``data`` where it is known now."""
        full = f"{ROOT}/{name}".encode()
        wide = struct.pack("<HHQQ", 1, 16, 0, 0) if size >= FULL else b""  # with a descriptor, sizes are told there
        head = self.at + _LOCAL.size + len(full) + len(wide) + 4
        pad = -head % ALIGN
        extra = wide + struct.pack("<2sH", b"FB", pad) + b"Z" * pad
        record = _Record(full, self.at, head + pad, size, data)
        short = FULL if wide else 0
        local = _LOCAL.pack(b"PK\x03\x04", 45 if wide else 20, record.flags, 0, 0, DAY_ZERO, 0, short, short, len(full),
                            len(extra))  # fmt: skip
        self.literals.append((self.at, local + full + extra))
        if data is not None:
            self.literals.append((record.start, data + record.descriptor(zlib.crc32(data))))
        self.records.append(record)
        self.at = record.start + size + len(record.descriptor(0))

    def finish(self, crcs: Sequence[int]) -> list[tuple[int, bytes]]:
        """Descriptors and the directory, once the payloads' CRCs are known."""
        payloads = [record for record in self.records if record.data is None]
        made = [
            (record.start + record.size, record.descriptor(crc)) for record, crc in zip(payloads, crcs, strict=True)
        ]
        return [*(one for one in made if one[1]), (self.at, self.directory(crcs))]

    def directory(self, crcs: Sequence[int]) -> bytes:
        """The central directory and the end records, zip64 ones included as torch always does."""
        rest = iter(crcs)
        rows = b"".join(_row(r, next(rest) if r.data is None else zlib.crc32(r.data)) for r in self.records)
        count, start = len(self.records), self.at
        end64 = struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, len(rows), start)
        locator = struct.pack("<4sLQL", b"PK\x06\x07", 0, start + len(rows), 1)
        few, short = min(count, 0xFFFF), min(start, FULL)
        end = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, few, few, min(len(rows), FULL), short, 0)
        return rows + end64 + locator + end


def _row(record: _Record, crc: int) -> bytes:
    size, offset = min(record.size, FULL), min(record.offset, FULL)
    wide = [record.size] * 2 if size == FULL else []
    wide += [record.offset] if offset == FULL else []
    extra = struct.pack(f"<HH{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
    version = 45 if wide else 20
    return (
        _CENTRAL.pack(b"PK\x01\x02", version, version, record.flags, 0, 0, DAY_ZERO, crc, size, size,
                      len(record.name), len(extra), 0, 0, 0, 0, offset)
        + record.name
        + extra
    )  # fmt: skip


# ---- the pickle ------------------------------------------------------------------------------------------------------


def _pickle(pieces: Pieces, objects: Mapping[str, Any]) -> bytes:
    """The opcodes of ``{name: tensor, …, name: object}``, protocol 2, with torch's persistent ids for storages."""
    out = io.BytesIO()
    out.write(pickle.PROTO + b"\x02" + pickle.EMPTY_DICT)
    memo: dict[str, int] = {}
    seen: set[str] = set()
    if len(pieces) or objects:
        out.write(pickle.MARK)
        for at, name in enumerate(pieces.names):
            if name in seen or name in objects:
                raise UsageError(f"two entries would be called {name!r}; rename one of them, or leave it out")
            seen.add(name)
            out.write(_text(name))
            _tensor(out.write, memo, pieces, at)
        for name, value in objects.items():
            out.write(_text(name) + _plain(value))
        out.write(pickle.SETITEMS)
    out.write(pickle.STOP)
    return out.getvalue()


def _tensor(write: Callable[[bytes], object], memo: dict[str, int], pieces: Pieces, at: int) -> None:
    dtype, shape = pieces.dtype_of(at), pieces.shape_of(at)
    if dtype.torch_name is None or dtype.packed:
        raise UnsupportedFormatError(
            f"tensor {pieces.names[at]!r}: torch has no element type {dtype} that it can load; leave it out, or cast it"
        )
    storage = STORAGES.get(dtype.name)
    rebuild = "_rebuild_tensor_v2" if storage else "_rebuild_tensor_v3"
    count = int(np.prod(shape, dtype=np.int64)) if storage else int(pieces.nbytes[at])
    cls = f"torch {storage}" if storage else "torch.storage UntypedStorage"
    write(_named(memo, f"torch._utils {rebuild}"))
    write(pickle.MARK)
    write(pickle.MARK + _named(memo, "'storage") + _named(memo, cls) + _text(str(at)) + _named(memo, "'cpu"))
    write(_int(count) + pickle.TUPLE + pickle.BINPERSID)
    write(_int(0) + _ints(shape) + _ints(cat.row_major(shape)) + pickle.NEWFALSE)
    write(_named(memo, "collections OrderedDict") + pickle.EMPTY_TUPLE + pickle.REDUCE)
    if not storage:
        write(_named(memo, f"torch {_attribute(dtype)}"))
    write(pickle.TUPLE + pickle.REDUCE)


def _attribute(dtype: DType) -> str:
    assert dtype.torch_name is not None
    return dtype.torch_name


def _named(memo: dict[str, int], what: str) -> bytes:
    """A global, ``module name``, or after a quote a text; from the second time on by reference."""
    if what in memo:
        return pickle.BINGET + bytes([memo[what]])  # fewer than 256 are ever named
    memo[what] = len(memo)
    made = _text(what[1:]) if what[0] == "'" else pickle.GLOBAL + what.replace(" ", "\n").encode() + b"\n"
    return made + pickle.BINPUT + bytes([memo[what]])


def _plain(value: object) -> bytes:
    """The opcodes that make a plain value, without a memo: its numbers would be those of this pickle."""
    out = io.BytesIO()
    pickler = pickle.Pickler(out, 2)
    pickler.fast = True
    pickler.dump(value)
    return out.getvalue()[len(pickle.PROTO) + 1 : -len(pickle.STOP)]


def _text(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return pickle.BINUNICODE + struct.pack("<L", len(data)) + data


def _int(value: int) -> bytes:
    if value < 1 << 31:
        return pickle.BININT + struct.pack("<l", value)
    data = value.to_bytes(value.bit_length() // 8 + 1, "little")
    return pickle.LONG1 + bytes([len(data)]) + data


def _ints(values: Sequence[int]) -> bytes:
    return pickle.MARK + b"".join(_int(value) for value in values) + pickle.TUPLE
