"""Bits of small floats to ``float32`` and back, as torch casts them.

::

    e4m3fn    S EEEE MMM     bias 7, no infinity, NaN 0x7f and 0xff        256 values in a table
    e2m1      S EE M         0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives
    e8m0      EEEEEEEE       2 ** (byte - 127), NaN 0xff
    bfloat16  the high half of a float32; rounded to nearest, ties to even

Sources: OCP MX 1.0 and FP8 specifications; torch 2.13 ``c10/util/BFloat16.h``, ``Float8_e4m3fn.h``.
"""

from __future__ import annotations

import numpy as np

from workbench.core import engine
from workbench.core.arrays import Array
from workbench.core.dtypes import DType
from workbench.errors import UnsupportedFormatError


def _e4m3() -> Array:
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    value = np.ldexp(np.where(exponent > 0, 8, 0) + mantissa, np.maximum(exponent, 1) - 10)
    value[[0x7F, 0xFF]] = np.nan
    return np.where(code & 0x80, -value, value).astype(np.float32)


def _e8m0() -> Array:
    value = np.ldexp(1.0, np.arange(256) - 127)
    value[255] = np.nan
    return value.astype(np.float32)


E4M3, E8M0 = _e4m3(), _e8m0()
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
