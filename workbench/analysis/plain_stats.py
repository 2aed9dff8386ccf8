"""Statistics of a piece with numpy alone, at about a third of the speed of memory.

Bits tell what there is before anything is converted. As integers, signed and unsigned, floats are ordered on either
side of zero, so four reductions over the bits (memory speed) give the range, and whether a NaN, an infinity, a zero
or a subnormal can be there at all; only blocks that hold them are looked at again::

    unsigned   0 ─ smallest ─ … ─ largest │ −0 ─ … ─ most negative        umin, umax
    signed     −0 ─ … ─ most negative │ 0 ─ smallest ─ … ─ largest        smin, smax

Sums are dot products of rows of 2,048 float32 (with ones, and with themselves), added up in float64. 16-bit types are
taken in pairs from 32-bit words, with no conversion of types::

    word      bbbb aaaa       word << 16  =  aaaa 0000 = a as float32      word & ffff0000  =  bbbb 0000 = b

Types of 8 bits are counted: their 256 counts tell everything exactly (:mod:`workbench.analysis.bit_patterns`).
"""

from __future__ import annotations

import threading
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.analysis.bit_patterns import LAYOUTS, Layout, fold_counts, pattern_counts, pattern_value, raw_only
from workbench.analysis.numbers import BLOCK as DECODED
from workbench.analysis.numbers import Decoder
from workbench.core.dtypes import DType

if TYPE_CHECKING:
    from workbench.analysis.moments import Moment

__all__ = ["fold", "ordered"]

Array = np.ndarray[Any, Any]
BLOCK = 128 << 10  #: elements at a time: 512 KiB of float32 stay in a core's cache
ROW = 2048  #: elements added in float32
SMALL, HUGE = 1e-140, 1e140  #: magnitudes beyond which squares may leave float64


def fold(state: Moment, dtype: DType, bits: Array) -> None:
    """Take in elements: flat, contiguous, of the raw type."""
    state.count += len(bits)
    if raw_only(dtype) or not len(bits):
        return
    if dtype.bits == 8:
        fold_counts(state, dtype, pattern_counts(bits))
    elif dtype.kind == "c":
        decoder = Decoder(dtype)
        for start in range(0, len(bits), DECODED):
            with np.errstate(invalid="ignore"):  # NaN that signal
                magnitudes = decoder.numbers(bits[start : start + DECODED])
            _fold_floats(state, "float64", magnitudes.view(np.uint64), plain=False)
    elif dtype.kind == "f":
        _fold_floats(state, dtype.name, bits)
    else:
        kind = dtype.numpy_name or ("<i4" if dtype.name == "qint32" else dtype.raw)
        for start in range(0, len(bits), DECODED):
            _integers(state, bits[start : start + DECODED].view(kind))


# ---- floats ----------------------------------------------------------------------------------------------------------


class _Scratch(threading.local):
    """Buffers of a thread: ``BLOCK`` elements of 8 bytes each, used again."""

    def __init__(self) -> None:
        self.values, self.other, self.copy = (np.empty(BLOCK, np.float64) for _ in range(3))


_scratch = _Scratch()


def _fold_floats(state: Moment, name: str, bits: Array, *, plain: bool = True) -> None:
    layout, size = LAYOUTS[name], bits.dtype.itemsize
    aligned = bits.__array_interface__["data"][0] % max(size, 4) == 0
    for start in range(0, len(bits), BLOCK):
        block = bits[start : start + BLOCK]
        if not aligned:
            copy = _scratch.copy.view(np.uint8)[: block.nbytes]
            copy[:] = block.view(np.uint8)
            block = copy.view(bits.dtype)
        _block(state, name, layout, block, plain)


def _block(state: Moment, name: str, layout: Layout, bits: Array, plain: bool) -> None:
    lowest, highest, least, most = extremes(bits)
    subnormal = 0
    if least < layout.normal:
        zero, subnormal = _small(bits, layout.normal, least)
        state.zero += zero
        state.subnormal += subnormal if plain else 0
    if most >= layout.special:
        _with_specials(state, name, bits)
    elif most == 0:
        state.add(len(bits), 0.0, 0.0, 0.0, 0.0, 0.0)
    else:
        values = _decoded(name, bits, subnormal)
        low, high = pattern_value(name, lowest), pattern_value(name, highest)
        state.add(len(bits), *_sums(values, max(abs(low), abs(high))), low, high)


def extremes(bits: Array) -> tuple[int, int, int, int]:
    """Patterns of the smallest and the largest value, and the smallest and the largest magnitude."""
    signed = bits.view(bits.dtype.str.replace("u", "i"))
    return ordered(int(bits.min()), int(bits.max()), int(signed.min()), int(signed.max()), bits.itemsize * 8)


def ordered(umin: int, umax: int, smin: int, smax: int, width: int) -> tuple[int, int, int, int]:
    """The same from the range of the bits as unsigned and as signed integers."""
    sign = 1 << (width - 1)
    negative, positive = umax >= sign, smax >= 0
    lowest, highest = umax if negative else umin, smax if positive else umin
    least = min(umin if positive else sign, smin + sign if negative else sign)
    most = max(smax if positive else 0, umax - sign if negative else 0)
    return lowest, highest, least, most


def _small(bits: Array, normal: int, least: int) -> tuple[int, int]:
    """How many are zero, and how many subnormal: of a magnitude less than this pattern; ``least`` is the smallest."""
    kind = bits.dtype.type
    mask = kind((1 << (bits.itemsize * 8 - 1)) - 1)
    magnitude = np.bitwise_and(bits, mask, out=_scratch.other.view(bits.dtype)[: len(bits)])
    flags = _scratch.values.view(np.bool_)[: len(bits)]
    zero = 0 if least else int(np.count_nonzero(np.equal(magnitude, kind(0), out=flags)))
    return zero, int(np.count_nonzero(np.less(magnitude, kind(normal), out=flags))) - zero


def _decoded(name: str, bits: Array, subnormal: int) -> Array:
    """The values in some order, as float32 or float64; valid until the next block."""
    if name == "float32" or name == "float64":
        return bits.view(name)
    n, half = len(bits), len(bits) // 2
    out = _scratch.values.view(np.uint32)[:n]
    values = out.view(np.float32)
    if name == "float16" and subnormal and (_flushed() or subnormal > n // 64):
        values[:] = bits.view(np.float16)  # below, they would be float32's for a moment: slow, or lost
        return values
    words, low, high = bits[: 2 * half].view(np.uint32), out[:half], out[half : 2 * half]
    np.left_shift(words, np.uint32(16), out=low)
    if name == "bfloat16":
        np.bitwise_and(words, np.uint32(0xFFFF0000), out=high)
        if n % 2:
            out[-1] = int(bits[-1]) << 16
        return values
    # sign, then the other bits three places lower: the pattern of value · 2⁻¹¹² in float32
    np.right_shift(words.view(np.int32), np.int32(3), out=high.view(np.int32))
    np.right_shift(low.view(np.int32), np.int32(3), out=low.view(np.int32))
    out[: 2 * half] &= np.uint32(0x8FFFE000)
    values[: 2 * half] *= np.float32(2.0**112)
    if n % 2:
        values[-1] = bits[-1:].view(np.float16)[0]
    return values


def _flushed() -> bool:
    """Whether this thread's processor takes subnormals for zero (``torch.set_flush_denormal`` and the like)."""
    return bool(np.array([1e-40], np.float32).prod() * np.float32(2.0**100) == 0)


def _sums(values: Array, most: float) -> tuple[Any, Any, Any]:
    """Mean, M₂ and Σ|x| of finite values of magnitudes up to ``most``."""
    if values.dtype == np.float64 and not SMALL < most < HUGE:
        wide = values.astype(np.longdouble)  # its exponent is wide enough for the squares
        mean = wide.mean()
        return mean, ((wide - mean) ** 2).sum(), np.abs(wide).sum()
    scale = _scale(values, most)
    work = _scratch.other.view(values.dtype)[: len(values)]
    if scale != 1.0:
        values = np.multiply(values, values.dtype.type(scale), out=_scratch.values.view(values.dtype)[: len(values)])
    n = len(values)
    total = _dot(values, None)
    squares = _dot(values, values)
    mean = total / n
    m2 = squares - total * mean
    l1 = _dot(np.abs(values, out=work), None)
    if mean * total > m2:  # the mean outweighs the spread: what is left of the difference is rounding
        shift = values.dtype.type(mean)
        np.subtract(values, shift, out=work)
        rest = _dot(work, None) / n
        mean, m2 = float(shift) + rest, _dot(work, work) - n * rest * rest
    return mean / scale, max(m2, 0.0) / scale / scale, l1 / scale


def _scale(values: Array, most: float) -> float:
    """A power of two that keeps squares inside float32, and those that count out of its subnormals."""
    if values.dtype == np.float64:
        return 1.0
    exponent = int(np.frexp(most)[1])
    return 1.0 if -20 <= exponent <= 40 else 2.0 ** min(30 - exponent, 127)


def _dot(a: Array, b: Array | None) -> float:
    """Σ aᵢ·bᵢ (or Σ aᵢ): rows in the type itself, their sums in float64."""
    rows = len(a) // ROW
    cut = rows * ROW
    ones = _ones(a.dtype.str)
    found = 0.0
    if rows:
        block = a[:cut].reshape(rows, ROW)
        found = float(np.vecdot(block, ones if b is None else b[:cut].reshape(rows, ROW)).sum(dtype=np.float64))
    if cut < len(a):
        found += float(np.vecdot(a[cut:], ones[: len(a) - cut] if b is None else b[cut:]))
    return found


@cache
def _ones(kind: str) -> Array:
    return np.ones(ROW, kind)


def _with_specials(state: Moment, name: str, bits: Array) -> None:
    """A block with NaN or infinities: counted, and the rest in float64."""
    if name == "bfloat16":
        bits = bits.astype(np.uint32) << np.uint32(16)
    with np.errstate(invalid="ignore"):  # NaN that signal, which converting makes quiet
        values = bits.view(f"<f{bits.itemsize}").astype(np.float64)
    add_values(state, values)


def add_values(state: Moment, values: Array) -> None:
    """Take in float64 values, NaN and infinities among them; zeros are the caller's to count."""
    state.nan += int(np.count_nonzero(np.isnan(values)))
    state.posinf += int(np.count_nonzero(values == np.inf))
    state.neginf += int(np.count_nonzero(values == -np.inf))
    values = values[np.isfinite(values)]
    for start in range(0, len(values), BLOCK):
        part = values[start : start + BLOCK]
        low, high = float(part.min()), float(part.max())
        state.add(len(part), *_sums(part, max(abs(low), abs(high))), low, high)


# ---- integers --------------------------------------------------------------------------------------------------------


def _integers(state: Moment, values: Array) -> None:
    if not values.flags.aligned:
        values = values.copy()
    low, high = int(values.min()), int(values.max())
    state.zero += len(values) - int(np.count_nonzero(values)) if low <= 0 <= high else 0
    total = _exact(values)
    l1 = total if low >= 0 else -total if high <= 0 else total - 2 * _exact(np.minimum(values, 0))
    steps: Array
    if values.itemsize == 8:  # exact for any two 64-bit integers
        steps = values.view(np.uint64) - np.uint64(low % (1 << 64))
    else:
        steps = values.astype(np.int64) - low
    away = steps.astype(np.float64)
    away -= away.sum() / len(away)
    state.add(len(values), 0.0, _dot(away, away), l1, low, high, total)


def _exact(values: Array) -> int:
    if values.itemsize < 8:
        return int(values.sum(dtype=np.int64))
    if values.dtype.kind == "u":
        return (int((values >> np.uint64(32)).sum()) << 32) + int((values & np.uint64(0xFFFFFFFF)).sum())
    return (int((values >> 32).sum()) << 32) + int((values & 0xFFFFFFFF).sum())
