"""Round to a floating-point type, and encode its bits, without a library that supports the type.

::

    x = ±1.m × 2^e       quantum = 2^(max(e, emin) − mantissa bits)       rounded = rint(x / quantum) · quantum

``rint`` rounds halves to even, like IEEE 754 and torch; division by a power of two is exact. Numbers beyond the largest
become infinity, or NaN in types without infinity (torch 2.13's conversion). A *saturating* conversion, as in
Transformer Engine, yields the largest number.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np

from workbench.core.arrays import Array
from workbench.core.decoding.floats import fp8_table
from workbench.core.dtypes import DType


class Kind(NamedTuple):
    """A floating-point type: bits of its mantissa, exponent of its smallest normal number, largest number."""

    mantissa: int
    emin: int
    top: float
    infinite: bool
    negative_zero: bool = True


FLOATS = {
    "float64": Kind(52, -1022, float(np.finfo(np.float64).max), True),
    "float32": Kind(23, -126, float(np.finfo(np.float32).max), True),
    "bfloat16": Kind(7, -126, float.fromhex("0x1.fep127"), True),
    "float16": Kind(10, -14, 65504.0, True),
    "float8_e4m3fn": Kind(3, -6, 448.0, False),
    "float8_e5m2": Kind(2, -14, 57344.0, True),
    "float8_e4m3fnuz": Kind(3, -7, 240.0, False, False),
    "float8_e5m2fnuz": Kind(2, -15, 57344.0, False, False),
}


def numbers(raw: Array, element: DType) -> Array:
    """Return bits as float32 (float64 for float64), or as integers for integer types."""
    if element.name == "bfloat16":
        return (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if element.name == "float16":
        with np.errstate(invalid="ignore"):  # signalling NaNs
            return raw.view(np.float16).astype(np.float32)
    if element.name in FLOATS and element.bits == 8:
        return fp8_table(element.name)[raw]
    return raw.view(element.numpy)


def rounded(x: Array, name: str, how: str = "nearest") -> Array:
    """Return the numbers of a type closest to ``x``, in the type of ``x`` (float32 or float64).

    Args:
        how: ``nearest`` (halves to even), ``truncated`` (towards zero), ``saturating`` (nearest, up to the largest).
    """
    kind = FLOATS[name]
    if kind.mantissa >= (23 if x.dtype == np.float32 else 52):
        return x
    with np.errstate(all="ignore"):
        if name in ("float32", "float16") and how == "nearest":
            return x.astype(name).astype(x.dtype)
        mask = np.uint32(0x7F800000) if x.dtype == np.float32 else np.uint64(0x7FF0 << 48)
        power = (np.ascontiguousarray(x).view(mask.dtype) & mask).view(x.dtype)
        quantum = np.maximum(power, x.dtype.type(2.0**kind.emin)) * x.dtype.type(2.0**-kind.mantissa)
        result = np.trunc(x / quantum) if how == "truncated" else np.rint(x / quantum)
        result *= quantum
        beyond = np.abs(result) > kind.top
        if beyond.any() or not np.isfinite(x).all():
            most = kind.top if how == "saturating" else np.inf if kind.infinite else np.nan
            result = np.where(beyond | np.isinf(x), np.copysign(x.dtype.type(most), x), result)
            result = np.where(np.isnan(x), x, result)
    return result if kind.negative_zero else result + x.dtype.type(0.0)


def half_step(y: Array, element: DType) -> Array:
    """Return half the distance to the next number of the type, or more."""
    kind = FLOATS.get(element.name)
    if kind is None:
        return np.full(len(y), 0.5)
    _, exponent = np.frexp(y)  # y = f · 2^exponent, ½ ≤ |f| < 1
    return np.ldexp(0.5, np.maximum(exponent - 1, kind.emin) - kind.mantissa)


def encode(x: Array, element: DType) -> Array:
    """Return the bits of numbers that the type represents exactly."""
    name = element.name
    if name == "bfloat16":
        found = (x.astype(np.float32).view(np.uint32) >> np.uint32(16)).astype(np.uint16)
        return np.where(np.isnan(x), np.uint16(0x7FC0), found)
    if name in FLOATS and element.bits == 8:
        return _codes(name)[x.astype(np.float32).view(np.uint32) >> np.uint32(16)]
    with np.errstate(all="ignore"):
        return x.astype(element.numpy).view(element.raw)


@cache
def _codes(name: str) -> Array:
    """Return ``(65536,) uint8``: the byte of each number of the type, by the upper half of its float32."""
    table = fp8_table(name)
    codes = np.zeros(1 << 16, np.uint8)
    codes[table.view(np.uint32) >> np.uint32(16)] = np.arange(256, dtype=np.uint8)
    nan = int(np.flatnonzero(np.isnan(table))[0])
    codes[0x7F81:0x8000], codes[0xFF81:] = nan, nan | 0x80
    codes[0x7FC0], codes[0xFFC0] = nan, nan if name.endswith("fnuz") else nan | 0x80
    return codes
