"""CRC-32 of a whole from the CRCs of its parts so that threads can share one record.

A CRC is the remainder of a polynomial over GF(2); appending ``n`` bytes multiplies the remainder so far by
``x^(8n)``. Bits are reflected: the highest bit stands for 1. Source: zlib 1.3 ``crc32_combine_`` (crc32.c).
"""

from __future__ import annotations

import zlib
from functools import lru_cache
from typing import Any

import numpy as np

__all__ = ["crc32", "crc32_of_two"]

PIECE = 1 << 20  #: bytes given to zlib at a time; it lets go of the interpreter meanwhile
_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31


def crc32(data: np.ndarray[Any, Any], crc: int = 0) -> int:
    """CRC-32 of bytes, continuing from ``crc``."""
    for at in range(0, len(data), PIECE):
        crc = zlib.crc32(data[at : at + PIECE], crc)
    return crc


def crc32_of_two(first: int, second: int, length: int) -> int:
    """CRC-32 of two parts put together, from theirs; ``length`` is the second part's in bytes."""
    return _product(_shift(length), first) ^ second


@lru_cache(maxsize=256)
def _shift(length: int) -> int:
    """``x^(8 · length)``, by squaring."""
    power, result = _ONE >> 8, _ONE
    while length:
        if length & 1:
            result = _product(power, result)
        power = _product(power, power)
        length >>= 1
    return result


def _product(a: int, b: int) -> int:
    result = 0
    while a:
        if a & _ONE:
            result ^= b
        a = a << 1 & 0xFFFFFFFF
        b = b >> 1 ^ _POLYNOMIAL if b & 1 else b >> 1
    return result
