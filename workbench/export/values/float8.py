"""Floats of 8 bits: the values of their codes, and the nearest code of e4m3fn.

::

    e4m3fn    s eeee mmm      bias 7: 2⁻⁹ … 448, NaN 0x7f, nothing infinite
    e5m2      s eeeee mm      the upper half of a float16
    …fnuz     the same with one more in the bias, no −0; NaN is 0x80
    e8m0fnu   eeeeeeee        a scale 2^(code − 127); 0xff is NaN

    float32   s eeeeeeee mmm|mmmmmmmmmmmmmmmmmmmm      normal codes: the upper bits, rounded, exponent − 120
                                                       below 2⁻⁶: multiples of 2⁻⁹, rounded

Source: OCP 8-bit floating point specification 1.0 (E4M3, E5M2), OCP microscaling 1.0 (E8M0); torch 2.13
``torch/headeronly/util/Float8_*.h``.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from workbench.core.arrays import Array

LARGEST = 448.0  #: of e4m3fn
#: By type: bits of the mantissa, bias of the exponent; for the rest see :func:`_values`.
CODES = {
    "float8_e4m3fn": (3, 7),
    "float8_e5m2": (2, 15),
    "float8_e4m3fnuz": (3, 8),
    "float8_e5m2fnuz": (2, 16),
}
_SMALLEST_NORMAL = np.uint32(0x3C800000)  # 2⁻⁶
_REBIAS = np.uint32(120 << 3)
_TO_STEPS = np.float32(1 << 14)  # whose last digit is 2⁻⁹
_STEPS = _TO_STEPS.view(np.uint32)
_NAN, _LARGEST_CODE = np.uint8(0x7F), np.uint32(0x7E)


def decoded(codes: Array, name: str) -> Array:
    """Decode codes (``uint8``, any shape) of a type of :data:`CODES`, or of ``float8_e8m0fnu``, to float32."""
    return np.take(_values(name), codes)


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


@lru_cache
def _values(name: str) -> Array:
    """Return the values of all 256 codes."""
    codes = np.arange(256)
    if name == "float8_e8m0fnu":
        values = np.ldexp(1.0, codes - 127)
        values[255] = np.nan
        return values.astype(np.float32)
    mantissa, bias = CODES[name]
    digits, exponent = codes & ((1 << mantissa) - 1), (codes & 0x7F) >> mantissa
    values = np.where(
        exponent == 0,
        np.ldexp(digits.astype(float), 1 - bias - mantissa),
        np.ldexp((1 << mantissa) + digits.astype(float), exponent - bias - mantissa),
    )
    values = np.where(codes & 0x80, -values, values)
    if name.endswith("uz"):
        values[0x80] = np.nan
    elif name == "float8_e5m2":
        values[[0x7C, 0xFC]] = np.inf, -np.inf
        values[[0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF]] = np.nan
    else:
        values[[0x7F, 0xFF]] = np.nan
    return values.astype(np.float32)
