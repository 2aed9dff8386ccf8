"""Stored bits as numbers that can be added and compared, without torch, in reusable buffers.

::

    bits            becomes       how
    bf16            float32       shifted left by 16
    f16             float32       numpy
    fp8, e8m0       float32       a table of 256 entries, from the type's bits
    complex         float64       the magnitude, which has an order
    bool            uint8         0 or 1
    the rest        itself        no copy

Every conversion except the magnitude is exact. F4 and F6 pack several elements into a byte; they have no numbers here.

Tables: OCP "8-bit Floating Point Specification" 1.0 (E4M3, E5M2), the FNUZ variants of ``torch/headeronly/util`` 2.13
(bias one higher, no infinities, no negative zero: 0x80 is NaN), OCP "Microscaling Formats" 1.0 (E8M0).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from workbench.core.arrays import Array
from workbench.core.dtypes import DType

BLOCK = 128 << 10  #: elements converted at a time: 1 MiB of float64, which stays in a core's cache

# name: exponent bits, mantissa bits, bias, has infinities, is FNUZ
_FP8 = {
    "float8_e4m3fn": (4, 3, 7, False, False),
    "float8_e5m2": (5, 2, 15, True, False),
    "float8_e4m3fnuz": (4, 3, 8, False, True),
    "float8_e5m2fnuz": (5, 2, 16, False, True),
}
_INTEGERS = {
    "qint8": "i1",
    "quint8": "u1",
    "qint32": "<i4",
}  # the integers, whose scale is not stored beside them


class Decoder:
    """Converts blocks of one element type; the result is valid until the next block.

    Attributes:
        kind: ``numbers``, ``magnitudes`` (complex), or ``raw bytes`` (types whose elements share a byte).
    """

    def __init__(self, dtype: DType) -> None:
        self.dtype = dtype
        self.kind = "numbers"
        if dtype.packed or dtype.name == "float4_e2m1fn_x2":
            self.kind = "raw bytes"
        elif dtype.kind == "c":
            self.kind = "magnitudes"
        self._buffer = np.empty(0, np.float64)

    def numbers(self, bits: Array) -> Array:
        """Decode a flat array of ``LazyTensor.numpy()`` values (up to a block) as float32, float64 or integers."""
        name = self.dtype.name
        if self.kind == "raw bytes":
            raise ValueError(f"{name} has no numbers")
        if name == "bfloat16":
            out = self._take(len(bits), np.uint32)
            np.left_shift(bits, np.uint32(16), out=out, dtype=np.uint32, casting="unsafe")
            return out.view(np.float32)
        if name == "float16":
            out = self._take(len(bits), np.float32)
            out[:] = bits
            return out
        if name in _FP8 or name == "float8_e8m0fnu":
            return np.take(fp8_table(name), bits, out=self._take(len(bits), np.float32), mode="clip")
        if self.kind == "magnitudes":
            half = np.dtype(f"<f{self.dtype.itemsize // 2}")
            parts = np.ascontiguousarray(bits).view(half).reshape(-1, 2)
            with np.errstate(over="ignore"):  # the magnitude of two huge parts is beyond float64
                return np.hypot(parts[:, 0], parts[:, 1], out=self._take(len(parts), np.float64), dtype=np.float64)
        if name == "bool":
            return (bits.view(np.uint8) != 0).view(np.uint8)
        return bits.view(_INTEGERS[name]) if name in _INTEGERS else bits

    def _take(self, count: int, kind: Any) -> Array:
        if len(self._buffer) < count:
            self._buffer = np.empty(count, np.float64)
        return self._buffer.view(kind)[:count]


@cache
def fp8_table(name: str) -> Array:
    """Return the value of every byte of an 8-bit float type, ``(256,) float32``."""
    code = np.arange(256)
    if name == "float8_e8m0fnu":
        table = np.ldexp(1.0, code - 127)
        table[255] = np.nan
        return table.astype(np.float32)
    exponent_bits, mantissa_bits, bias, infinite, fnuz = _FP8[name]
    exponent = (code >> mantissa_bits) & ((1 << exponent_bits) - 1)
    mantissa = code & ((1 << mantissa_bits) - 1)
    fraction = np.where(exponent > 0, 1 << mantissa_bits, 0) + mantissa
    table = np.ldexp(fraction.astype(np.float64), np.maximum(exponent, 1) - bias - mantissa_bits)
    table = np.where(code & 0x80, -table, table)
    if fnuz:
        table[0x80] = np.nan
    elif infinite:
        top = exponent == (1 << exponent_bits) - 1
        table = np.where(top, np.where(mantissa == 0, np.where(code & 0x80, -np.inf, np.inf), np.nan), table)
    else:
        table[[0x7F, 0xFF]] = np.nan
    return table.astype(np.float32)
