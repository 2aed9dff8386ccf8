"""Blocks of ggml's quantised types to ``float32``, with the operations of the reference in its order.

::

    Q4_0     │ d f16 │ 16 bytes: element i low, i + 16 high │                  (q - 8) · d
    Q4_K     │ d │ dmin │ 8 scales and 8 minima of 6 bits │ 128 bytes │        d · scale · q - dmin · min
    IQ2_XXS  │ d │ 8 × (4 indices into a codebook, 4 × 7 sign bits, 4 bits of scale) │

The results equal those of gguf 0.19 bit for bit (and ggml's ``to_float`` where that was compared), which dictates the
order in which factors are multiplied. All are little endian.

A type whose numbers are chosen one by one, the nearest code for each, also has *cells*: the numbers that a code stands
for, up to half the distance to the next code on either side. Numbers beyond the last code become the last code. Where
ggml takes the scale from the largest number, they are at most a step further out. Where it fits the scale (``Q*_K``,
``IQ4``), nothing limits them; a cell then ends one range of the run further out (``Q2_K``: two), and what the rounding
of the run's scale and minimum to 4 to 8 bits costs. That held for every number of twelve distributions that ggml
quantised without weights::

    code            0     1     2            14      15
    cells    ◄──────┼──┤·····├·····├ … ┤·······├──────┼──────►
             a range                                   a range

The other types have no cells. IQ1, IQ2 and IQ3 choose four or eight numbers together to make a sum of weighted squares
small. The weights are those of an importance matrix, which the file does not hold, and a number of weight 0 may become
any other. Where seven bits hold eight signs, one sign may be wrong on purpose. Q1_0 keeps the sign and the mean.

Source: gguf 0.19 ``quants.py``; ggml ``ggml-quants.c`` (``dequantize_row_q1_0``, ``_q8_K``) for the two that gguf does
not decode, and ``quantize_row_*_ref`` for the cells.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from workbench.core import engine
from workbench.core.arrays import Array
from workbench.core.decoding.codebooks import SIGNS, codebook
from workbench.core.dtypes import BLOCKS, by_name
from workbench.core.words import plural
from workbench.errors import CorruptError

CODES = np.array([by_name(name).code for name in BLOCKS], np.uint8)  #: codes of the block types
HALF = (2.0**-11, 2.0**-25)  #: error of rounding to float16: relative, and absolute for subnormal numbers
_NONLINEAR = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
_WHOLE = np.arange(-128, 128, dtype=np.float32)  #: integers; a slice of it is the table of a type
_SIGNED = np.arange(256).astype(np.uint8).view(np.int8).astype(np.float32)  #: of bytes as ``int8``
_E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)  #: doubled


def decode(name: str, data: Array) -> Array:
    """Return the elements of whole blocks as ``(N,) float32``.

    Args:
        name: of the type, a key of :data:`BLOCKS`.
        data: ``uint8``, blocks one after the other.

    Raises:
        CorruptError: the bytes are not a multiple of the block's.
    """
    with np.errstate(invalid="ignore", over="ignore"):  # a NaN or an infinite scale is stored; so are its products
        blocks = _blocks(name, data)
        found = _GRIDS[name](blocks) if name in _GRIDS else _OTHERS[name](blocks)
        return np.asarray(found if isinstance(found, np.ndarray) else found.values, np.float32).reshape(-1)


def cells(name: str, data: Array) -> Array:
    """Return the range of numbers that each element of whole blocks represents: ``(N, 2) float32``, from and to.

    Both ends allow for the rounding of a scale to float16 after the codes were chosen.

    Args:
        name: one of :data:`HAS_CELLS`.

    Raises:
        as :func:`decode`.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        return _GRIDS[name](_blocks(name, data)).cells()


def _blocks(name: str, data: Array) -> Array:
    _, nbytes = BLOCKS[name]
    if len(data) % nbytes:
        raise CorruptError(f"{plural(len(data), 'byte')} of {name}, not whole blocks of {nbytes}")
    return np.ascontiguousarray(data).reshape(-1, nbytes)


@dataclass(frozen=True)
class _CodeGrid:
    """Elements as ``d · times · table[code] - least``, each the nearest level of its run.

    Attributes:
        d: the float16 (or, of some types, exact number) that scales a block.
        codes: ``uint8`` of each element; the last axis is a run.
        table: the ``float32`` value of each code, its level.
        ends: the first and the last level.
        times: the factor of ``d`` in each run.
        least: the number to subtract.
        levels: all levels in order; those of integers are one apart.
        loose: how many steps beyond the first or the last level a number may be that became it; ``None`` if these were
            fitted: then as many as the run has, and what it loses by the rounding of ``times``; ``ranges`` times that.
        lost: by that of ``least``, in the unit of the result.
        again: the codes were chosen again after ``d`` was rounded.
    """

    d: Array
    codes: Array
    table: Array
    ends: tuple[float, float]
    times: Array | float = 1.0
    least: Array | None = None
    levels: Array | None = None
    loose: float | None = 0.5
    lost: Array | float = 0.0
    ranges: float = 1.0
    again: bool = False

    @property
    def values(self) -> Array:
        """The elements, in the order of operations of the reference."""
        scale = self.d * np.float32(self.times)
        more = None if self.least is None else -self.least
        if engine.compiled_in_use():
            from workbench.core.decoding import fast_decode

            return fast_decode.spread(self.codes, self.table, scale, more=more)
        found = scale * self.table[self.codes]
        return found if more is None else found + more

    def cells(self) -> Array:
        """Return the ends of each element's cell, ``(N, 2)``."""
        level, times = self.table[self.codes], np.abs(self.times)
        off = np.abs(self.d) * HALF[0] + HALF[1]  # the error of the float16
        step = np.broadcast_to((np.abs(self.d) + off) * times, level.shape)
        below: Array | float = 0.5
        above: Array | float = 0.5
        if self.levels is not None:
            gaps = np.diff(self.levels) / 2
            at = np.searchsorted(self.levels, level)
            below, above = np.append(gaps[0], gaps)[at], np.append(gaps, gaps[-1])[at]
        if self.loose is None:
            wide = self.ends[1] - self.ends[0]
            loose = self.ranges * wide * (step + (np.abs(self.d) + off * (times + 1)) / 2) + self.lost
        else:
            loose = self.loose * step + self.lost
        turned = np.broadcast_to(self.d * np.float32(self.times) < 0, level.shape)
        flat = np.broadcast_to(self.d * np.float32(self.times) == 0, level.shape)
        below, above = np.where(turned, above, below), np.where(turned, below, above)
        first, last = level <= self.ends[0], level >= self.ends[1]
        first, last = np.where(turned, last, first) | flat, np.where(turned, first, last) | flat
        down = np.where(first, np.maximum(step * below, loose), step * below)
        up = np.where(last, np.maximum(step * above, loose), step * above)
        slack = np.float32(1e-6) * np.abs(step * level) + HALF[1]  # the arithmetic
        if not self.again:
            slack = slack + off * times * np.abs(level)
        if self.least is not None:
            slack = slack + np.abs(self.least) * (1e-6 if self.again else HALF[0])
        values = self.values
        return np.stack([values - down - slack, values + up + slack], axis=-1).astype(np.float32).reshape(-1, 2)


@dataclass(frozen=True)
class _Codewords:
    """Elements as ``d · (book[index] + delta) · sign``.

    Attributes:
        d: of each run, ``(…)``.
        book: ``(rows, 4 or 8) float32``.
        indices: of its rows, ``(…, rows of a run)``.
        signs: ``uint8``, a byte of signs for eight elements, low bit first; set means negative.
        delta: the number to add to each row, ``float32`` of the shape of ``indices``, or one per run.
    """

    d: Array
    book: Array
    indices: Array
    signs: Array | None = None
    delta: Array | None = None

    @property
    def values(self) -> Array:
        """The elements, in the order of operations of the reference."""
        if engine.compiled_in_use():
            from workbench.core.decoding import fast_decode

            return fast_decode.looked_up(self.d, self.book, self.indices, self.signs, self.delta)
        rows = self.book[self.indices]
        if self.delta is not None:
            rows = rows + self.delta[..., None]
        found: Array = self.d[..., None, None] * rows
        return found if self.signs is None else found.reshape(-1, 8) * _signs(self.signs.reshape(-1))


# ---- pieces of blocks ----------------------------------------------------------------------------------------------


def _half(blocks: Array, at: int) -> Array:
    """Return the float16 at a byte of each block, ``(N, 1)``."""
    return _words(blocks, at, at + 2, "<f2").astype(np.float32)


def _words(blocks: Array, start: int, stop: int, dtype: str) -> Array:
    return np.ascontiguousarray(blocks[:, start:stop]).view(dtype)


def _nibbles(packed: Array) -> Array:
    """Return the low nibbles of all bytes, then the high ones, ``(N, 2B)``."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _shifted(packed: Array, run: int, shifts: range) -> Array:
    """Return runs of bytes under every shift, ``(N, R, S, run)``."""
    count = len(packed)
    return packed.reshape(count, -1, 1, run) >> np.array(shifts, packed.dtype).reshape(1, 1, -1, 1)


def _whole(first: int, last: int) -> Array:
    """Return the table of the codes from ``first`` to ``last``."""
    return _WHOLE[first + 128 : last + 129]


def _signs(bits: Array) -> Array:
    """Return 1 and -1 for each byte of sign bits, low bit first, ``(…, 8) float32``."""
    return np.where((bits[..., None] >> np.arange(8, dtype=np.uint8)) & 1, np.float32(-1), np.float32(1))


def _scales_and_minima(packed: Array) -> tuple[Array, Array]:
    """Unpack eight 6-bit scales and minima from twelve bytes (Q4_K, Q5_K)."""
    d, m, high = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scale = np.concatenate([d & 0x3F, (high & 15) | ((d >> 2) & 0x30)], axis=-1)
    least = np.concatenate([m & 0x3F, (high >> 4) | ((m >> 2) & 0x30)], axis=-1)
    return scale.astype(np.float32), least.astype(np.float32)


# ---- blocks of 32 and 128 ------------------------------------------------------------------------------------------


def _q1_0(blocks: Array) -> Array:
    bits = np.unpackbits(blocks[:, 2:], axis=1, bitorder="little")
    d = _half(blocks, 0)
    return np.where(bits, d, -d)


def _q4_0(blocks: Array) -> _CodeGrid:
    return _CodeGrid(_half(blocks, 0), _nibbles(blocks[:, 2:]), _whole(-8, 7), (-8, 7), loose=1)


def _q4_1(blocks: Array) -> _CodeGrid:
    return _CodeGrid(_half(blocks, 0), _nibbles(blocks[:, 4:]), _whole(0, 15), (0, 15), least=-_half(blocks, 2))


def _five_bit_codes(blocks: Array, at: int) -> Array:
    """Unpack 5-bit codes: nibbles from ``at + 4`` on, with their high bits in the four bytes at ``at``."""
    high = np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little")
    return _nibbles(blocks[:, at + 4 :]) | high << 4


def _q5_0(blocks: Array) -> _CodeGrid:
    return _CodeGrid(_half(blocks, 0), _five_bit_codes(blocks, 2), _whole(-16, 15), (-16, 15), loose=1)


def _q5_1(blocks: Array) -> _CodeGrid:
    return _CodeGrid(_half(blocks, 0), _five_bit_codes(blocks, 4), _whole(0, 31), (0, 31), least=-_half(blocks, 2))


def _q8_0(blocks: Array) -> _CodeGrid:
    return _CodeGrid(_half(blocks, 0), blocks[:, 2:], _SIGNED, (-127, 127))


def _nonlinear(d: Array, codes: Array, times: Array | float = 1.0) -> _CodeGrid:
    ends = float(_NONLINEAR[0]), float(_NONLINEAR[-1])
    return _CodeGrid(d, codes, _NONLINEAR, ends, times, levels=_NONLINEAR, loose=None)


def _iq4_nl(blocks: Array) -> _CodeGrid:
    return _nonlinear(_half(blocks, 0), _nibbles(blocks[:, 2:]))


def _mxfp4(blocks: Array) -> _CodeGrid:
    e = blocks[:, :1].astype(np.uint32)
    bits = np.where(e < 2, np.uint32(0x00200000) << np.minimum(e, 1), (np.maximum(e, 1) - 1) << np.uint32(23))
    d = bits.astype(np.uint32).view(np.float32)
    return _CodeGrid(d, _nibbles(blocks[:, 1:]), _E2M1, (-12, 12), levels=np.unique(_E2M1), loose=4, again=True)


def _nvfp4(blocks: Array) -> _CodeGrid:
    """Decode NVFP4. ggml rounds a sixth of the largest number to the scale, half up: up to 2^-6 in steps of 2^-9 (from
    7 to 8 of them down), so small scales lose more than their share, and 0x7E stands for any that is too large."""
    x = blocks[:, :4]
    exponent, mantissa = ((x >> 3) & 15).astype(np.float32), (x & 7).astype(np.float32)
    normal = (1 + mantissa / np.float32(8)) * np.exp2(exponent - 7)
    scale = np.where(exponent == 0, mantissa * np.float32(2**-9), normal) * np.float32(0.5)
    scale = np.where((x == 0) | (x == 0x7F), np.float32(0), scale)
    lost = 6 * np.select([x < 7, x == 7, x >= 0x7E], [2.0**-10, 2.0**-9, np.inf], 0.0)
    codes, levels = _nibbles(blocks[:, 4:].reshape(-1, 4, 8)), np.unique(_E2M1)
    return _CodeGrid(
        scale[:, :, None], codes, _E2M1, (-12, 12), levels=levels, loose=0.75, lost=lost[:, :, None], again=True
    )


# ---- blocks of 256 -------------------------------------------------------------------------------------------------


def _fitted(
    d: Array, times: Array, codes: Array, ends: tuple[int, int], dmin: Array | None = None, least: Array | None = None
) -> _CodeGrid:
    """Describe runs whose scale is a rounded multiple of ``d``, and whose minimum is one of ``dmin``, both fitted by
    ggml.
    """
    table = _whole(*ends)
    if dmin is None or least is None:
        return _CodeGrid(d[:, :, None], codes, table, ends, times[:, :, None], loose=None, again=True)
    lost = np.abs(dmin) / 2 + (np.abs(dmin) * HALF[0] + HALF[1]) * (least + 1)
    ranges = 2 if ends == (0, 3) else 1  # Q2_K fits by the weight |x|: zeros have none
    return _CodeGrid(
        d[:, :, None],
        codes,
        table,
        ends,
        times[:, :, None],
        (dmin * least)[:, :, None],
        None,
        None,
        lost[:, :, None],
        ranges,
        True,
    )


def _q2_k(blocks: Array) -> _CodeGrid:
    scales = blocks[:, :16]
    q = (_shifted(blocks[:, 16:80], 32, range(0, 8, 2)) & 3).reshape(len(blocks), 16, 16)
    scale, least = (scales & 15).astype(np.float32), (scales >> 4).astype(np.float32)
    return _fitted(_half(blocks, 80), scale, q, (0, 3), _half(blocks, 82), least)


def _q3_k(blocks: Array) -> _CodeGrid:
    count, packed = len(blocks), blocks[:, 96:108]
    low = (packed[:, None, :8] >> np.array([[0], [4]], np.uint8)).reshape(count, 16) & 15
    high = (packed[:, None, 8:] >> np.array([[0], [2], [4], [6]], np.uint8)).reshape(count, 16) & 3
    scales = (low | high << 4).astype(np.float32) - 32
    q = (_shifted(blocks[:, 32:96], 32, range(0, 8, 2)) & 3).reshape(count, 16, 16)
    high = (_shifted(blocks[:, :32], 32, range(8)) & 1).reshape(count, 16, 16)
    return _fitted(_half(blocks, 108), scales, q | high << 2, (-4, 3))


def _q4_k(blocks: Array) -> _CodeGrid:
    scale, least = _scales_and_minima(blocks[:, 4:16])
    q = (_shifted(blocks[:, 16:], 32, range(0, 8, 4)) & 15).reshape(len(blocks), 8, 32)
    return _fitted(_half(blocks, 0), scale, q, (0, 15), _half(blocks, 2), least)


def _q5_k(blocks: Array) -> _CodeGrid:
    count = len(blocks)
    scale, least = _scales_and_minima(blocks[:, 4:16])
    low = (_shifted(blocks[:, 48:], 32, range(0, 8, 4)) & 15).reshape(count, 8, 32)
    high = (_shifted(blocks[:, 16:48], 32, range(8)) & 1).reshape(count, 8, 32)
    return _fitted(_half(blocks, 0), scale, low | high << 4, (0, 31), _half(blocks, 2), least)


def _q6_k(blocks: Array) -> _CodeGrid:
    count = len(blocks)
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32)
    low = (_shifted(blocks[:, :128], 64, range(0, 8, 4)) & 15).reshape(count, 8, 32)
    high = (_shifted(blocks[:, 128:192], 32, range(0, 8, 2)) & 3).reshape(count, 8, 32)
    return _fitted(_half(blocks, 208), scales, (low | high << 4).reshape(count, 16, 16), (-32, 31))


def _q8_k(blocks: Array) -> _CodeGrid:
    return _CodeGrid(_words(blocks, 0, 4, "<f4"), blocks[:, 4:260], _SIGNED, (-128, 127))


def _iq4_xs(blocks: Array) -> _CodeGrid:
    count = len(blocks)
    high = (_words(blocks, 2, 4, "<u2") >> np.arange(0, 16, 2, dtype=np.uint16)) & 3
    low = (blocks[:, 4:8, None] >> np.array([0, 4], np.uint8)).reshape(count, 8) & 15
    scales = (low | high.astype(np.uint8) << 4).astype(np.float32) - 32
    q = (_shifted(blocks[:, 8:], 16, range(0, 8, 4)) & 15).reshape(count, 8, 32)
    return _nonlinear(_half(blocks, 0)[:, :, None], q, scales[:, :, None])


def _tq1_0(blocks: Array) -> _CodeGrid:
    count = len(blocks)
    parts = []
    for start, stop, run, digits in ((0, 32, 32, 5), (32, 48, 16, 5), (48, 52, 4, 4)):
        powers = np.array([1, 3, 9, 27, 81][:digits], np.uint8).reshape(1, 1, -1, 1)
        parts.append((blocks[:, start:stop].reshape(count, -1, 1, run) * powers).reshape(count, -1))
    codes = (np.concatenate(parts, axis=-1).astype(np.uint16) * 3 >> 8).astype(np.uint8)
    return _CodeGrid(_half(blocks, 52), codes, _whole(-1, 1), (-1, 1))


def _tq2_0(blocks: Array) -> _CodeGrid:
    codes = (_shifted(blocks[:, :64], 32, range(0, 8, 2)) & 3).reshape(len(blocks), -1)
    return _CodeGrid(_half(blocks, 64), codes, _whole(-1, 2), (-1, 1))


# ---- blocks of 256 with a codebook ---------------------------------------------------------------------------------


def _by_seven(word: Array) -> Array:
    """Return the signs of 32 values, one byte for eight, from four 7-bit indices in a word."""
    return SIGNS[(word[..., None] >> np.array([0, 7, 14, 21], np.uint32)) & 0x7F]


def _iq2_xxs(blocks: Array) -> _Codewords:
    words = _words(blocks, 2, 66, "<u4").reshape(len(blocks), 8, 2)
    d = _half(blocks, 0) * (np.float32(0.5) + (words[..., 1] >> 28).astype(np.float32)) * np.float32(0.25)
    indices = np.ascontiguousarray(words[..., 0]).view(np.uint8).reshape(len(blocks), 8, 4)
    return _Codewords(d, codebook("IQ2_XXS"), indices, _by_seven(words[..., 1]))


def _iq2_scales(blocks: Array, packed: Array) -> Array:
    """Return the 4-bit scales of IQ2_XS and IQ2_S, ``(N, 16)``."""
    scales = (packed[:, :, None] >> np.array([0, 4], np.uint8)).reshape(len(blocks), 16) & 15
    return _half(blocks, 0) * (np.float32(0.5) + scales.astype(np.float32)) * np.float32(0.25)


def _iq2_xs(blocks: Array) -> _Codewords:
    words = _words(blocks, 2, 66, "<u2").reshape(len(blocks), 16, 2)
    return _Codewords(_iq2_scales(blocks, blocks[:, 66:]), codebook("IQ2_XS"), words & 511, SIGNS[words >> 9])


def _iq2_s(blocks: Array) -> _Codewords:
    count = len(blocks)
    high = (blocks[:, 66:74, None] >> np.array([0, 2, 4, 6], np.uint8)).reshape(count, 32) & 3
    indices = (blocks[:, 2:34] | high.astype(np.uint16) << 8).reshape(count, 16, 2)
    return _Codewords(_iq2_scales(blocks, blocks[:, 74:]), codebook("IQ2_S"), indices, blocks[:, 34:66])


def _iq3_xxs(blocks: Array) -> _Codewords:
    words = _words(blocks, 66, 98, "<u4")
    d = _half(blocks, 0) * (np.float32(0.5) + (words >> 28).astype(np.float32)) * np.float32(0.5)
    return _Codewords(d, codebook("IQ3_XXS"), blocks[:, 2:66].reshape(-1, 8, 8), _by_seven(words))


def _iq3_s(blocks: Array) -> _Codewords:
    count = len(blocks)
    scales = (blocks[:, 106:, None] >> np.array([0, 4], np.uint8)).reshape(count, 8) & 15
    d = _half(blocks, 0) * (1 + 2 * scales).astype(np.float32)
    high = np.unpackbits(blocks[:, 66:74], axis=1, bitorder="little").astype(np.uint16)
    return _Codewords(d, codebook("IQ3_S"), (blocks[:, 2:66] | high << 8).reshape(count, 8, 8), blocks[:, 74:106])


def _iq1_s(blocks: Array) -> _Codewords:
    count = len(blocks)
    words = _words(blocks, 34, 50, "<u2")
    d = _half(blocks, 0) * (2 * ((words >> 12) & 7) + 1).astype(np.float32)
    high = ((words[..., None] >> np.array([0, 3, 6, 9], np.uint16)) & 7).reshape(count, 32)
    indices = (blocks[:, 2:34] | high << 8).reshape(count, 8, 4)
    return _Codewords(d, codebook("IQ1_S"), indices, delta=_eighths(words & 0x8000)[..., None])


def _iq1_m(blocks: Array) -> _Codewords:
    count = len(blocks)
    words = _words(blocks, 48, 56, "<u2")
    parts = (words & 0xF000) >> np.array([12, 8, 4, 0], np.uint16)
    d = np.bitwise_or.reduce(parts, axis=1).astype(np.uint16).view(np.float16).astype(np.float32)
    scales = ((words[..., None] >> np.array([0, 3, 6, 9], np.uint16)) & 7).reshape(count, 16)
    d = d[:, None] * (2 * scales + 1).astype(np.float32)
    high = (blocks[:, 32:48, None] >> np.array([0, 4], np.uint8)).reshape(count, 32)
    indices = (blocks[:, :32] | (high & 7).astype(np.uint16) << 8).reshape(count, 16, 2)
    return _Codewords(d, codebook("IQ1_S"), indices, delta=_eighths(high & 8).reshape(count, 16, 2))


def _eighths(negative: Array) -> Array:
    return np.where(negative, np.float32(-0.125), np.float32(0.125))


_GRIDS: dict[str, Callable[[Array], _CodeGrid]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "Q8_K": _q8_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "TQ1_0": _tq1_0,
    "TQ2_0": _tq2_0,
    "MXFP4": _mxfp4,
    "NVFP4": _nvfp4,
}
_OTHERS: dict[str, Callable[[Array], Array | _Codewords]] = {
    "Q1_0": _q1_0,
    "IQ1_S": _iq1_s,
    "IQ1_M": _iq1_m,
    "IQ2_XXS": _iq2_xxs,
    "IQ2_XS": _iq2_xs,
    "IQ2_S": _iq2_s,
    "IQ3_XXS": _iq3_xxs,
    "IQ3_S": _iq3_s,
}
HAS_CELLS = frozenset(_GRIDS)  #: types that choose the nearest code for each number
