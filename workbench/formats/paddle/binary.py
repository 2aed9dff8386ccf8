"""Tensors in paddle's C++ layout: ``paddle.save(…, use_binary_format=True)``, ``.pdiparams``; no pickle.

::

    0         4              12            16           20 + N
    ├─────────┼──────────────┼─────────────┼────────────┼───────────────────┬────────────────────────┬─────
    │ version │ lod levels   │ version     │ N: i32     │ TensorDesc        │ data, little endian,   │ the next
    │ u32 = 0 │ u64, usually │ of a tensor │            │ 1: element type   │ row-major              │ tensor
    │         │ 0            │ u32 = 0     │            │ 2: dims, varints  │                        │
    └─────────┴──────────────┴─────────────┴────────────┴───────────────────┴────────────────────────┴─────
               each level: u64 length in bytes, then the bytes

The file stores no names. Source: paddlepaddle 3.3.1 ``phi/core/framework/dense_tensor_serialize.cc`` and
``framework.proto`` (``VarType.Type``, ``VarType.TensorDesc``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from workbench.core.catalog import MAX_ELEMENTS
from workbench.core.dtypes import DType, by_name, nbytes_of
from workbench.core.protobuf import BadMessage, varint
from workbench.core.source import LazyBytes
from workbench.core.words import plural
from workbench.errors import CorruptError, TruncatedError, UnsupportedFormatError

#: ``VarType.Type`` of framework.proto.
DTYPES = {
    0: "bool",
    1: "int16",
    2: "int32",
    3: "int64",
    4: "float16",
    5: "float32",
    6: "float64",
    20: "uint8",
    21: "int8",
    22: "bfloat16",
    23: "complex64",
    24: "complex128",
    32: "float8_e4m3fn",
    33: "float8_e5m2",
}
MAX_DESC = 4096  #: bytes of a TensorDesc; real ones have about 20
MAX_LOD = 64


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor, in bytes ``[start, stop)`` of the file."""

    dtype: DType
    shape: tuple[int, ...]
    start: int
    stop: int


def looks_like(head: bytes) -> bool:
    """Return whether a file that begins with ``head`` (21 bytes or more) may have this layout, without lod levels."""
    return (
        len(head) > 20
        and not any(head[:16])
        and 2 <= int.from_bytes(head[16:20], "little") <= MAX_DESC
        and head[20] == 8
    )


def parse(view: memoryview | LazyBytes, what: str) -> list[Tensor]:
    """Return all tensors of a file.

    Raises:
        TruncatedError: a tensor ends beyond the end of the file.
        CorruptError: the file does not have this layout.
        UnsupportedFormatError: the version or an element type is unknown.
    """
    found: list[Tensor] = []
    at = 0
    while at < len(view):
        found.append(_tensor(view, at, what))
        at = found[-1].stop
    return found


def _tensor(view: memoryview | LazyBytes, at: int, what: str) -> Tensor:
    begin = at
    version, levels, at = _int(view, at, 4, what), _int(view, at + 4, 8, what), at + 12
    if version or levels > MAX_LOD:
        raise UnsupportedFormatError(
            f"{what}, byte {begin:,}: version {version} of paddle's tensors; only 0 is supported"
        )
    for _ in range(levels):
        at += 8 + _int(view, at, 8, what)
    version, length = _int(view, at, 4, what), _int(view, at + 4, 4, what)
    if version or not 0 < length <= MAX_DESC:
        raise CorruptError(
            f"{what}, byte {at:,}: a tensor with version {version} and {plural(length, 'byte')} of description"
        )
    at += 8
    if at + length > len(view):
        raise TruncatedError(f"{what} ends at byte {len(view):,}, inside the description of a tensor at byte {at:,}")
    code, shape = _desc(bytes(view[at : at + length]), f"{what}, byte {at:,}")
    if code not in DTYPES:
        raise UnsupportedFormatError(f"{what}, byte {at:,}: element type {code} is not in paddle's table")
    dtype = by_name(DTYPES[code])
    numel = math.prod(shape)
    if numel > MAX_ELEMENTS:
        raise CorruptError(f"{what}, byte {at:,}: a tensor has the impossibly large shape {shape}")
    start = at + length
    stop = start + nbytes_of(dtype, numel)
    if stop > len(view):
        raise TruncatedError(
            f"{what}: the tensor of shape {shape} at byte {start:,} ends at byte {stop:,}, the file at {len(view):,}"
        )
    return Tensor(dtype, shape, start, stop)


def _int(view: memoryview | LazyBytes, at: int, width: int, what: str) -> int:
    if at + width > len(view):
        raise TruncatedError(f"{what} ends at byte {len(view):,}, inside the header of a tensor")
    return int.from_bytes(view[at : at + width], "little")


def _desc(data: bytes, what: str) -> tuple[int, tuple[int, ...]]:
    """Return element type and shape of a TensorDesc message, with one field per dim (proto2) or packed dims."""
    code, dims, at = -1, [], 0
    while at < len(data):
        tag, at = _varint(data, at, what)
        value, at = _varint(data, at, what)
        if tag == 0x08:
            code = value
        elif tag == 0x10:
            dims.append(value)
        elif tag == 0x12:
            stop = at + value
            while at < min(stop, len(data)):
                one, at = _varint(data, at, what)
                dims.append(one)
        else:
            raise CorruptError(f"{what}: unknown field {tag >> 3} in the description of a tensor; expected 1 or 2")
    if any(n >= 1 << 63 for n in dims) or len(dims) > 64:
        raise CorruptError(f"{what}: a tensor with a negative size or {plural(len(dims), 'dimension')}")
    return code, tuple(dims)


def _varint(data: bytes, at: int, what: str) -> tuple[int, int]:
    try:
        return varint(data, at, len(data))
    except BadMessage:
        raise CorruptError(f"{what}: an unterminated number in the description of a tensor") from None
