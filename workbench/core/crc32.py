"""CRC-32 of data from the CRCs of its parts, so threads can share one record; and CRC-32C, which zlib lacks.

A CRC is the remainder of a polynomial over GF(2); appending ``n`` bytes multiplies the remainder so far by
``x^(8n)``. Bits are reflected: the highest bit stands for 1. CRC-32C (Castagnoli) is computed likewise: numpy takes
many parts of the bytes at once, four bytes of each a step, and their remainders are combined.

Sources: zlib 1.3 ``crc32_combine_`` (crc32.c); RFC 3720, appendix B.4 (CRC-32C).
"""

from __future__ import annotations

import zlib
from functools import lru_cache
from typing import Any

import numpy as np

from workbench.core.arrays import Array

PIECE = 1 << 20  #: bytes passed to zlib at a time; it releases the GIL meanwhile
_POLYNOMIAL = 0xEDB88320
_CASTAGNOLI = 0x82F63B78
_ONE = 1 << 31
_LANE = 256  #: bytes of the shortest part that numpy processes in parallel with others


def crc32(data: np.ndarray[Any, Any], crc: int = 0) -> int:
    """Compute the CRC-32 of bytes, continuing from ``crc``."""
    for at in range(0, len(data), PIECE):
        crc = zlib.crc32(data[at : at + PIECE], crc)
    return crc


def crc32_of_two(first: int, second: int, length: int, *, castagnoli: bool = False) -> int:
    """Combine the CRC-32s (or CRC-32Cs) of two consecutive parts; ``length`` is the second part's, in bytes."""
    polynomial = _CASTAGNOLI if castagnoli else _POLYNOMIAL
    found: int = _product(_shift(length, polynomial), first, polynomial) ^ second
    return found


def masked(crc: int) -> int:
    """Mask a CRC-32C as LevelDB and TensorFlow store it: rotated by 15 bits, plus a constant (LevelDB ``crc32c.h``)."""
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def crc32c(data: Array) -> int:
    """Compute the CRC-32C of a contiguous ``uint8`` array."""
    size = len(data)
    lanes = 1 << min((size // _LANE).bit_length(), 13)
    width = -(-size // (4 * lanes)) * 4
    padded = np.zeros(lanes * width, np.uint8)  # zeros in front do not change a remainder
    padded[len(padded) - size :] = data
    rest = _remainders(padded.reshape(lanes, width))
    while len(rest) > 1:
        rest = _product(_shift(width, _CASTAGNOLI), rest[::2], _CASTAGNOLI) ^ rest[1::2]
        width *= 2
    start = _product(_shift(size, _CASTAGNOLI), 0xFFFFFFFF, _CASTAGNOLI)
    return int(rest[0]) ^ start ^ 0xFFFFFFFF


def crc32c_rows(rows: Array) -> Array:
    """Compute the CRC-32C ``(N,) uint32`` of the rows of a ``(N, nbytes) uint8`` array; 4 must divide ``nbytes``."""
    start = _product(_shift(rows.shape[1], _CASTAGNOLI), 0xFFFFFFFF, _CASTAGNOLI)
    return _remainders(rows) ^ np.uint32(start ^ 0xFFFFFFFF)


def _remainders(rows: Array) -> Array:
    """Compute the remainder of each row, starting from 0."""
    low, high = _tables()
    words = np.ascontiguousarray(np.ascontiguousarray(rows).view("<u4").T)
    rest = np.zeros(len(rows), np.uint32)
    for word in words:
        rest ^= word
        rest = low[rest & 0xFFFF] ^ high[rest >> 16]
    return rest


@lru_cache(maxsize=1)
def _tables() -> tuple[Array, Array]:
    """Return what the low and the high halves of four bytes become four bytes later, ``(65536,) uint32`` each."""
    halves = np.arange(1 << 16, dtype=np.uint32)
    shift = _shift(4, _CASTAGNOLI)
    return _product(shift, halves, _CASTAGNOLI), _product(shift, halves << np.uint32(16), _CASTAGNOLI)


@lru_cache(maxsize=256)
def _shift(length: int, polynomial: int = _POLYNOMIAL) -> int:
    """Compute ``x^(8 · length)`` by squaring."""
    power, result = _ONE >> 8, _ONE
    while length:
        if length & 1:
            result = _product(power, result, polynomial)
        power = _product(power, power, polynomial)
        length >>= 1
    return result


def _product(a: int, b: Any, polynomial: int = _POLYNOMIAL) -> Any:
    """Compute ``a · b``, or the product of ``a`` and each of many remainders."""
    result = b ^ b
    while a:
        if a & _ONE:
            result = result ^ b
        a = a << 1 & 0xFFFFFFFF
        b = b >> 1 ^ polynomial * (b & 1)
    return result


def fletcher32(data: np.ndarray[Any, Any]) -> int:
    """Compute Fletcher-32 as HDF5 does: big-endian words of 16 bits, with an odd last byte as the high one of its word.

    Sums are reduced modulo 65535 to 1 … 65535; they are 0 only if every word is 0.
    """
    words = np.frombuffer(data.tobytes() + b"\0" * (len(data) % 2), ">u2").astype(np.uint64)
    first = second = 0
    for at in range(0, len(words), PIECE):
        part = words[at : at + PIECE]
        second += len(part) * first + int((part * np.arange(len(part), 0, -1, dtype=np.uint64)).sum())
        first += int(part.sum())
    return int(second and (second - 1) % 65535 + 1) << 16 | int(first and (first - 1) % 65535 + 1)
