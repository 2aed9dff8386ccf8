"""Bits of small floats to ``float32`` and back, as torch casts them.

::

    e4m3fn    S EEEE MMM     bias 7, no infinity, NaN 0x7f and 0xff        8 bits: 256 values in a table
    e5m2      S EEEEE MM     bias 15, the upper half of a float16
    …fnuz                    the same with one more in the bias, no −0; NaN is 0x80
    e2m1      S EE M         0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives
    e8m0      EEEEEEEE       2 ** (byte - 127), NaN 0xff
    bfloat16  the high half of a float32; rounded to nearest, ties to even

Sources: OCP "8-bit Floating Point Specification" 1.0 (E4M3, E5M2), OCP "Microscaling Formats" 1.0 (E8M0); torch 2.13
``c10/util/BFloat16.h``, ``torch/headeronly/util/Float8_*.h``.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from workbench.core import engine
from workbench.core.arrays import Array
from workbench.core.dtypes import DType
from workbench.errors import UnsupportedFormatError

#: 8-bit types: bits of the exponent and of the mantissa, bias, has infinities, is FNUZ (no −0: 0x80 is NaN)
FP8 = {
    "float8_e4m3fn": (4, 3, 7, False, False),
    "float8_e5m2": (5, 2, 15, True, False),
    "float8_e4m3fnuz": (4, 3, 8, False, True),
    "float8_e5m2fnuz": (5, 2, 16, False, True),
}


@cache
def fp8_table(name: str) -> Array:
    """Return the value of every byte of an 8-bit float type, ``(256,) float32``."""
    code = np.arange(256)
    if name == "float8_e8m0fnu":
        table = np.ldexp(1.0, code - 127)
        table[255] = np.nan
        return table.astype(np.float32)
    exponent_bits, mantissa_bits, bias, infinite, fnuz = FP8[name]
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


E4M3, E8M0 = fp8_table("float8_e4m3fn"), fp8_table("float8_e8m0fnu")
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def widened(raw: Array, dtype: DType) -> Array:
    """Return the values of raw elements as ``float32``: of floats of up to 32 bits, and of integers of up to 16.

    Raises:
        UnsupportedFormatError: any other type.
    """
    name = dtype.name
    if name == "bfloat16":
        return (raw.astype(np.uint32) << 16).view(np.float32)
    if name == "float8_e4m3fn":
        return E4M3[raw]
    if name == "float8_e8m0fnu":
        return E8M0[raw]
    if name == "float16" and engine.compiled_in_use():
        from workbench.core.decoding import fast_decode

        return fast_decode.widened(raw)
    if name in ("float32", "float16", "int8", "uint8", "int16", "uint16"):
        return raw.view(dtype.numpy).astype(np.float32, copy=False)
    raise UnsupportedFormatError(f"quantised weights with numbers of type {dtype} are not decoded")


def rounded(values: Array, dtype: DType) -> Array:
    """Return the bits of ``float32`` values in another float type, rounded to nearest, ties to even.

    Raises:
        UnsupportedFormatError: a type other than ``float32``, ``float16`` and ``bfloat16``.
    """
    if dtype.name == "float32":
        return values.astype(np.float32, copy=False).view(np.uint32)
    if dtype.name in ("float16", "bfloat16") and engine.compiled_in_use():
        from workbench.core.decoding import fast_decode

        return fast_decode.rounded(values, dtype.name)
    if dtype.name == "float16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16).view(np.uint16)
    if dtype.name != "bfloat16":
        raise UnsupportedFormatError(f"quantised weights are not decoded to {dtype}")
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    up = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(values), np.uint32(0x7FC0), up).astype(np.uint16)
