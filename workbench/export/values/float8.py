"""Floats of 8 bits: the values of their codes, and the nearest code of e4m3fn (2⁻⁹ … 448).

::

    float32   s eeeeeeee mmm|mmmmmmmmmmmmmmmmmmmm      normal codes: the upper bits, rounded, exponent − 120
                                                       below 2⁻⁶: multiples of 2⁻⁹, rounded
"""

from __future__ import annotations

import numpy as np

from workbench.core.arrays import Array
from workbench.core.decoding.floats import fp8_table

LARGEST = 448.0  #: of e4m3fn
_SMALLEST_NORMAL = np.uint32(0x3C800000)  # 2⁻⁶
_REBIAS = np.uint32(120 << 3)
_TO_STEPS = np.float32(1 << 14)  # whose last digit is 2⁻⁹
_STEPS = _TO_STEPS.view(np.uint32)
_NAN, _LARGEST_CODE = np.uint8(0x7F), np.uint32(0x7E)


def decoded(codes: Array, name: str) -> Array:
    """Decode codes (``uint8``, any shape) of an 8-bit float type to float32."""
    return np.take(fp8_table(name), codes)


def encoded(single: Array) -> Array:
    """Encode flat float32 values as the nearest e4m3fn codes (``uint8``), ties to even; NaN keep their sign.

    Values larger than 448, including infinite ones, become 448: torch's cast of values clamped to ±448.
    """
    bits = single.view(np.uint32)
    size = bits & np.uint32(0x7FFFFFFF)
    normal = ((size + np.uint32(0x7FFFF) + ((size >> np.uint32(20)) & np.uint32(1))) >> np.uint32(20)) - _REBIAS
    with np.errstate(invalid="ignore"):  # the addition rounds to multiples of 2⁻⁹
        steps = (size.view(np.float32) + _TO_STEPS).view(np.uint32) - _STEPS
    out = np.minimum(np.where(size < _SMALLEST_NORMAL, steps, normal), _LARGEST_CODE).astype(np.uint8)
    nan = np.isnan(single)
    if nan.any():
        out[nan] = _NAN
    return out | (bits >> np.uint32(24)).astype(np.uint8) & np.uint8(0x80)
