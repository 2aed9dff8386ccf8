"""Blocks of ggml's quantised types to ``float32``, with the operations of the reference in its order.

::

    Q4_0     │ d f16 │ 16 bytes: element i low, i + 16 high │                  (q - 8) · d
    Q4_K     │ d │ dmin │ 8 scales and 8 minima of 6 bits │ 128 bytes │        d · scale · q - dmin · min
    IQ2_XXS  │ d │ 8 × (4 indices into a codebook, 4 × 7 sign bits, 4 bits of scale) │

The results equal those of gguf 0.19 bit for bit (and ggml's ``to_float`` where that was compared), which decides the
order in which factors are multiplied. All are little endian.

Source: gguf 0.19 ``quants.py``; ggml ``ggml-quants.c`` (``dequantize_row_q1_0``, ``_q8_K``) for the two that gguf does
not decode.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from workbench.core.arrays import Array
from workbench.core.decoding.codebooks import SIGNS, codebook
from workbench.core.dtypes import BLOCKS, by_name
from workbench.errors import CorruptError

__all__ = ["CODES", "decode"]

CODES = np.array([by_name(name).code for name in BLOCKS], np.uint8)  #: codes of the block types
_NONLINEAR = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
_E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)  #: doubled


def decode(name: str, data: Array) -> Array:
    """Return the elements of whole blocks as ``(N,) float32``.

    Args:
        name: of the type, a key of :data:`BLOCKS`.
        data: ``uint8``, blocks one after the other.

    Raises:
        CorruptError: the bytes are not a multiple of the block's.
    """
    _, nbytes = BLOCKS[name]
    if len(data) % nbytes:
        raise CorruptError(f"{len(data):,} bytes of {name} are not whole blocks of {nbytes}")
    blocks = np.ascontiguousarray(data).reshape(-1, nbytes)
    with np.errstate(invalid="ignore", over="ignore"):  # a NaN or an infinite scale is stored; so are its products
        return np.asarray(_DECODERS[name](blocks), np.float32).reshape(-1)


# ---- pieces of blocks ----------------------------------------------------------------------------------------------


def _half(blocks: Array, at: int) -> Array:
    """``(N, 1)`` of a float16 at a byte of each block."""
    return _words(blocks, at, at + 2, "<f2").astype(np.float32)


def _words(blocks: Array, start: int, stop: int, dtype: str) -> Array:
    return np.ascontiguousarray(blocks[:, start:stop]).view(dtype)


def _nibbles(packed: Array) -> Array:
    """``(N, 2B)``: the low nibbles of all bytes, then the high ones."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _shifted(packed: Array, run: int, shifts: range) -> Array:
    """``(N, R, S, run)``: runs of bytes, each under every shift."""
    count = len(packed)
    return packed.reshape(count, -1, 1, run) >> np.array(shifts, packed.dtype).reshape(1, 1, -1, 1)


def _signs(bits: Array) -> Array:
    """``(…, 8) float32`` of 1 and -1 for each byte of signs, low bit first."""
    return np.where((bits[..., None] >> np.arange(8, dtype=np.uint8)) & 1, np.float32(-1), np.float32(1))


def _scales_and_minima(packed: Array) -> tuple[Array, Array]:
    """Eight scales and minima of 6 bits in twelve bytes (Q4_K, Q5_K)."""
    d, m, high = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scale = np.concatenate([d & 0x3F, (high & 15) | ((d >> 2) & 0x30)], axis=-1)
    least = np.concatenate([m & 0x3F, (high >> 4) | ((m >> 2) & 0x30)], axis=-1)
    return scale.astype(np.float32), least.astype(np.float32)


# ---- blocks of 32 and 128 ------------------------------------------------------------------------------------------


def _q1_0(blocks: Array) -> Array:
    bits = np.unpackbits(blocks[:, 2:], axis=1, bitorder="little")
    d = _half(blocks, 0)
    return np.where(bits, d, -d)


def _q4_0(blocks: Array) -> Array:
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:]).astype(np.float32) - 8)


def _q4_1(blocks: Array) -> Array:
    return _half(blocks, 0) * _nibbles(blocks[:, 4:]).astype(np.float32) + _half(blocks, 2)


def _fifth(blocks: Array, at: int) -> Array:
    """Five bits: nibbles from ``at + 4`` on, their high bits in the four bytes at ``at``."""
    high = np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little")
    return (_nibbles(blocks[:, at + 4 :]) | high << 4).astype(np.float32)


def _q5_0(blocks: Array) -> Array:
    return _half(blocks, 0) * (_fifth(blocks, 2) - 16)


def _q5_1(blocks: Array) -> Array:
    return _half(blocks, 0) * _fifth(blocks, 4) + _half(blocks, 2)


def _q8_0(blocks: Array) -> Array:
    return blocks[:, 2:].view(np.int8).astype(np.float32) * _half(blocks, 0)


def _iq4_nl(blocks: Array) -> Array:
    return _half(blocks, 0) * _NONLINEAR[_nibbles(blocks[:, 2:])]


def _mxfp4(blocks: Array) -> Array:
    e = blocks[:, :1].astype(np.uint32)
    bits = np.where(e < 2, np.uint32(0x00200000) << np.minimum(e, 1), (np.maximum(e, 1) - 1) << np.uint32(23))
    return bits.astype(np.uint32).view(np.float32) * _E2M1[_nibbles(blocks[:, 1:])]


def _nvfp4(blocks: Array) -> Array:
    x = blocks[:, :4]
    exponent, mantissa = ((x >> 3) & 15).astype(np.float32), (x & 7).astype(np.float32)
    normal = (1 + mantissa / np.float32(8)) * np.exp2(exponent - 7)
    scale = np.where(exponent == 0, mantissa * np.float32(2**-9), normal) * np.float32(0.5)
    scale = np.where((x == 0) | (x == 0x7F), np.float32(0), scale)
    return scale[:, :, None] * _E2M1[_nibbles(blocks[:, 4:].reshape(-1, 4, 8))]


# ---- blocks of 256 -------------------------------------------------------------------------------------------------


def _q2_k(blocks: Array) -> Array:
    scales = blocks[:, :16]
    d = (_half(blocks, 80) * (scales & 15).astype(np.float32))[:, :, None]
    least = (_half(blocks, 82) * (scales >> 4).astype(np.float32))[:, :, None]
    q = (_shifted(blocks[:, 16:80], 32, range(0, 8, 2)) & 3).reshape(len(blocks), 16, 16)
    return d * q.astype(np.float32) - least


def _q3_k(blocks: Array) -> Array:
    count, packed = len(blocks), blocks[:, 96:108]
    low = (packed[:, None, :8] >> np.array([[0], [4]], np.uint8)).reshape(count, 16) & 15
    high = (packed[:, None, 8:] >> np.array([[0], [2], [4], [6]], np.uint8)).reshape(count, 16) & 3
    scales = (low | high << 4).astype(np.float32) - 32
    q = (_shifted(blocks[:, 32:96], 32, range(0, 8, 2)) & 3).reshape(count, 16, 16).astype(np.float32)
    absent = (_shifted(blocks[:, :32], 32, range(8)) & 1 ^ 1).reshape(count, 16, 16).astype(np.float32)
    return (_half(blocks, 108) * scales)[:, :, None] * (q - 4 * absent)


def _q4_k(blocks: Array) -> Array:
    scale, least = _scales_and_minima(blocks[:, 4:16])
    q = (_shifted(blocks[:, 16:], 32, range(0, 8, 4)) & 15).reshape(len(blocks), 8, 32).astype(np.float32)
    return (_half(blocks, 0) * scale)[:, :, None] * q - (_half(blocks, 2) * least)[:, :, None]


def _q5_k(blocks: Array) -> Array:
    count = len(blocks)
    scale, least = _scales_and_minima(blocks[:, 4:16])
    low = (_shifted(blocks[:, 48:], 32, range(0, 8, 4)) & 15).reshape(count, 8, 32)
    high = (_shifted(blocks[:, 16:48], 32, range(8)) & 1).reshape(count, 8, 32)
    q = (low | high << 4).astype(np.float32)
    return (_half(blocks, 0) * scale)[:, :, None] * q - (_half(blocks, 2) * least)[:, :, None]


def _q6_k(blocks: Array) -> Array:
    count = len(blocks)
    d = _half(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    low = (_shifted(blocks[:, :128], 64, range(0, 8, 4)) & 15).reshape(count, 8, 32)
    high = (_shifted(blocks[:, 128:192], 32, range(0, 8, 2)) & 3).reshape(count, 8, 32)
    q = (low | high << 4).astype(np.float32) - 32
    return d[:, :, None] * q.reshape(count, 16, 16)


def _q8_k(blocks: Array) -> Array:
    return _words(blocks, 0, 4, "<f4") * blocks[:, 4:260].view(np.int8).astype(np.float32)


def _iq4_xs(blocks: Array) -> Array:
    count = len(blocks)
    high = (_words(blocks, 2, 4, "<u2") >> np.arange(0, 16, 2, dtype=np.uint16)) & 3
    low = (blocks[:, 4:8, None] >> np.array([0, 4], np.uint8)).reshape(count, 8) & 15
    scales = (low | high.astype(np.uint8) << 4).astype(np.float32) - 32
    q = (_shifted(blocks[:, 8:], 16, range(0, 8, 4)) & 15).reshape(count, 8, 32)
    return (_half(blocks, 0) * scales)[:, :, None] * _NONLINEAR[q]


def _tq1_0(blocks: Array) -> Array:
    count = len(blocks)
    parts = []
    for start, stop, run, digits in ((0, 32, 32, 5), (32, 48, 16, 5), (48, 52, 4, 4)):
        powers = np.array([1, 3, 9, 27, 81][:digits], np.uint8).reshape(1, 1, -1, 1)
        parts.append((blocks[:, start:stop].reshape(count, -1, 1, run) * powers).reshape(count, -1))
    q = (np.concatenate(parts, axis=-1).astype(np.uint16) * 3 >> 8).astype(np.float32) - 1
    return _half(blocks, 52) * q


def _tq2_0(blocks: Array) -> Array:
    q = (_shifted(blocks[:, :64], 32, range(0, 8, 2)) & 3).reshape(len(blocks), -1).astype(np.float32) - 1
    return _half(blocks, 64) * q


# ---- blocks of 256 with a codebook ---------------------------------------------------------------------------------


def _by_seven(word: Array) -> Array:
    """Signs of 32 values from four indices of 7 bits in a word."""
    return _signs(SIGNS[(word[..., None] >> np.array([0, 7, 14, 21], np.uint32)) & 0x7F])


def _iq2_xxs(blocks: Array) -> Array:
    words = _words(blocks, 2, 66, "<u4").reshape(len(blocks), 8, 2)
    d = _half(blocks, 0) * (np.float32(0.5) + (words[..., 1] >> 28).astype(np.float32)) * np.float32(0.25)
    indices = np.ascontiguousarray(words[..., 0]).view(np.uint8).reshape(len(blocks), 8, 4)
    return d[..., None, None] * codebook("IQ2_XXS")[indices] * _by_seven(words[..., 1])


def _quarters(blocks: Array, packed: Array) -> Array:
    """``(N, 16, 1, 1)``: scales of 4 bits, as IQ2_XS and IQ2_S have them."""
    scales = (packed[:, :, None] >> np.array([0, 4], np.uint8)).reshape(len(blocks), 16) & 15
    d = _half(blocks, 0) * (np.float32(0.5) + scales.astype(np.float32)) * np.float32(0.25)
    return d[:, :, None, None]


def _iq2_xs(blocks: Array) -> Array:
    words = _words(blocks, 2, 66, "<u2").reshape(len(blocks), 16, 2)
    d = _quarters(blocks, blocks[:, 66:])
    return d * codebook("IQ2_XS")[words & 511] * _signs(SIGNS[words >> 9])


def _iq2_s(blocks: Array) -> Array:
    count = len(blocks)
    high = (blocks[:, 66:74, None] >> np.array([0, 2, 4, 6], np.uint8)).reshape(count, 32) & 3
    indices = (blocks[:, 2:34] | high.astype(np.uint16) << 8).reshape(count, 16, 2)
    signs = _signs(blocks[:, 34:66].reshape(count, 16, 2))
    return _quarters(blocks, blocks[:, 74:]) * codebook("IQ2_S")[indices] * signs


def _iq3_xxs(blocks: Array) -> Array:
    count = len(blocks)
    words = _words(blocks, 66, 98, "<u4")
    d = _half(blocks, 0) * (np.float32(0.5) + (words >> 28).astype(np.float32)) * np.float32(0.5)
    values = codebook("IQ3_XXS")[blocks[:, 2:66]].reshape(count, 8, 4, 8)
    return d[..., None, None] * values * _by_seven(words)


def _iq3_s(blocks: Array) -> Array:
    count = len(blocks)
    scales = (blocks[:, 106:, None] >> np.array([0, 4], np.uint8)).reshape(count, 8) & 15
    d = _half(blocks, 0) * (1 + 2 * scales).astype(np.float32)
    high = np.unpackbits(blocks[:, 66:74], axis=1, bitorder="little").astype(np.uint16)
    values = codebook("IQ3_S")[blocks[:, 2:66] | high << 8].reshape(count, 8, 4, 8)
    return d[..., None, None] * values * _signs(blocks[:, 74:106]).reshape(count, 8, 4, 8)


def _iq1_s(blocks: Array) -> Array:
    count, eighth = len(blocks), np.float32(0.125)
    words = _words(blocks, 34, 50, "<u2")
    d = _half(blocks, 0) * (2 * ((words >> 12) & 7) + 1).astype(np.float32)
    delta = np.where(words & 0x8000, -eighth, eighth)
    high = ((words[..., None] >> np.array([0, 3, 6, 9], np.uint16)) & 7).reshape(count, 32)
    values = codebook("IQ1_S")[blocks[:, 2:34] | high << 8].reshape(count, 8, 4, 8)
    return d[..., None, None] * (values + delta[..., None, None])


def _iq1_m(blocks: Array) -> Array:
    count, eighth = len(blocks), np.float32(0.125)
    words = _words(blocks, 48, 56, "<u2")
    parts = (words & 0xF000) >> np.array([12, 8, 4, 0], np.uint16)
    d = np.bitwise_or.reduce(parts, axis=1).astype(np.uint16).view(np.float16).astype(np.float32)
    scales = ((words[..., None] >> np.array([0, 3, 6, 9], np.uint16)) & 7).reshape(count, 16)
    d = d[:, None] * (2 * scales + 1).astype(np.float32)
    high = (blocks[:, 32:48, None] >> np.array([0, 4], np.uint8)).reshape(count, 32)
    delta = np.where(high & 8, -eighth, eighth).reshape(count, 16, 2, 1)
    values = codebook("IQ1_S")[blocks[:, :32] | (high & 7).astype(np.uint16) << 8].reshape(count, 16, 2, 8)
    return d[..., None, None] * (values + delta)


_DECODERS: dict[str, Callable[[Array], Array]] = {
    "Q1_0": _q1_0, "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0,
    "Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k, "Q8_K": _q8_k, "IQ1_S": _iq1_s,
    "IQ1_M": _iq1_m, "IQ2_XXS": _iq2_xxs, "IQ2_XS": _iq2_xs, "IQ2_S": _iq2_s, "IQ3_XXS": _iq3_xxs, "IQ3_S": _iq3_s,
    "IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs, "TQ1_0": _tq1_0, "TQ2_0": _tq2_0, "MXFP4": _mxfp4, "NVFP4": _nvfp4,
}  # fmt: skip
