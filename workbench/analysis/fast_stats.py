"""The same statistics by numba, in one pass at the speed of memory. Import only where numba is installed.

Runs of 4,096 elements stay in the first cache while two loops go over them, both of which the compiler turns into
vector code: the range of the bits as signed and unsigned integers, and Σx, Σx², Σ|x| in float32 over some dozens of
accumulators; the sums of 512 elements are merged in float64. What is rare leaves the loop: runs whose mean outweighs
their spread are summed again about their mean; runs with NaN or infinities are left to numpy, in float64.

16-bit and 8-bit floats become float32 without arithmetic on subnormals, which costs a hundred cycles on some
processors: by the processor's own half → float conversion where it has one (e4m3 has the pattern of value · 2⁻⁸ in
float16), else by integers.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from llvmlite import binding, ir
from numba import njit, types
from numba.extending import intrinsic, overload

from workbench.analysis import plain_stats
from workbench.analysis.bit_patterns import LAYOUTS, pattern_value, pattern_values
from workbench.analysis.plain_stats import ordered
from workbench.core.dtypes import DType

if TYPE_CHECKING:
    from workbench.analysis.moments import Moment

__all__ = ["KINDS", "count8", "count16", "fold"]

Array = np.ndarray[Any, Any]
RUN = 4096  #: elements of a run
PART = 512  #: elements that are summed in float32: sixteen an accumulator, whose rounding stays below 1e-6 of the sum
BF16, F16, F32, E4M3, E5M2 = range(5)
KINDS = {"bfloat16": BF16, "float16": F16, "float32": F32, "float8_e4m3fn": E4M3, "float8_e5m2": E5M2}

# additions may be reordered (or there would be no vectors), but NaN and infinities must be what they are
_OPTIONS: dict[str, Any] = {"nogil": True, "fastmath": {"reassoc", "contract", "nsz"}, "error_model": "numpy"}


def _jit(function: Callable[..., Any]) -> Any:
    """Compiled on first use, and kept on disk if there is a folder that can be written."""
    try:
        return njit(cache=True, **_OPTIONS)(function)
    except RuntimeError:  # no folder for the cache
        return njit(**_OPTIONS)(function)


def fold(state: Moment, dtype: DType, bits: Array) -> None:
    """Take in elements: flat, contiguous, of the raw type of one of :data:`KINDS`."""
    if not len(bits):
        return
    if bits.__array_interface__["data"][0] % 8:
        bits = bits.copy()
    bits = bits.view()
    bits.flags.writeable = False  # one type of array, one compilation
    words = bits[: bits.nbytes // 8 * 8 // bits.itemsize].view(np.uint64)
    signed = bits.view(bits.dtype.str.replace("u", "i"))
    layout, width = LAYOUTS[dtype.name], bits.itemsize * 8
    dirty = np.zeros(-(-len(bits) // RUN), np.bool_)
    sums, counts = np.zeros(4), np.zeros(7, np.int64)
    unsigned = bits.dtype.type
    _fold(
        bits, signed, words, KINDS[dtype.name], unsigned(layout.special), unsigned(layout.normal), sums, counts, dirty
    )
    n, zero, subnormal, umin, umax, smin, smax = counts.tolist()
    state.count += n
    state.zero += zero
    state.subnormal += subnormal
    if n:
        lowest, highest, _, _ = ordered(umin, umax, smin, smax, width)
        low, high = _value(dtype, lowest), _value(dtype, highest)
        mean, m2, l1 = (float(value) for value in sums[:3])
        state.add(n, mean, m2, l1, low, high)
    if n < len(bits):
        edges = np.flatnonzero(np.diff(dirty, prepend=False, append=False)).reshape(-1, 2) * RUN
        for start, stop in edges.tolist():
            plain_stats.fold(state, dtype, bits[start:stop])


def count8(bits: Array) -> Array:
    """``(256,) int64``: how often each byte occurs."""
    pairs = np.zeros(1 << 16, np.int64)
    even = len(bits) // 2 * 2
    count16(bits[:even].view(np.uint16), pairs)
    found = pairs.reshape(256, 256).sum(axis=0) + pairs.reshape(256, 256).sum(axis=1)
    if even < len(bits):
        found[bits[-1]] += 1
    return found


def count16(bits: Array, counts: Array) -> None:
    """Add how often each 16-bit pattern occurs to ``counts``, ``(65536,) int64``."""
    bits = bits.view() if bits.flags.aligned else bits.copy()
    bits.flags.writeable = False
    _count(bits, counts)


def _value(dtype: DType, pattern: int) -> float:
    return float(pattern_values(dtype)[pattern]) if dtype.bits < 32 else pattern_value(dtype.name, pattern)


# ---- compiled --------------------------------------------------------------------------------------------------------


@_jit
def _fold(bits, signed, words, kind, special, normal, sums, counts, dirty):
    """All runs; ``sums``: mean, M₂, Σ|x|; ``counts``: n, zero, subnormal, and the range of the bits."""
    mean, m2, l1, n = 0.0, 0.0, 0.0, 0
    for start in range(0, len(bits), RUN):
        run = bits[start : start + RUN]
        umin, umax, smin, smax = _extremes(run, signed[start : start + RUN])
        least, most = _magnitudes(umin, umax, smin, smax, normal)
        if most >= special:
            dirty[start // RUN] = True
            continue
        if least < normal:
            zero, small = _below(run, words, start, normal)
            counts[1] += zero
            counts[2] += small - zero
        if n == 0:
            counts[3], counts[4], counts[5], counts[6] = umin, umax, smin, smax
        else:
            counts[3], counts[4] = min(counts[3], np.int64(umin)), max(counts[4], np.int64(umax))
            counts[5], counts[6] = min(counts[5], np.int64(smin)), max(counts[6], np.int64(smax))
        m, scale = len(run), _scale(most, kind)
        s, q, a = _parts(run, kind, scale, np.float32(0))
        run_mean, run_m2 = s / m, q - s * (s / m)
        if s * run_mean > run_m2:
            shift = np.float32(run_mean)
            s, q, _ = _parts(run, kind, scale, shift)
            run_mean, run_m2 = np.float64(shift) + s / m, max(q - s * (s / m), 0.0)
        back = _BACK[kind] / np.float64(scale)
        run_mean, run_m2 = run_mean * back, run_m2 * back * back
        delta, both = run_mean - mean, n + m
        if n == 0:
            mean, m2 = run_mean, run_m2
        else:
            mean += delta * (m / both)
            m2 += run_m2 + delta * delta * (n * (m / both))
        l1 += a * back
        n = both
    sums[0], sums[1], sums[2], counts[0] = mean, m2, l1, n


@_jit
def _parts(run, kind, scale, shift):
    """:func:`_sums` of a run, part by part."""
    s, q, a = 0.0, 0.0, 0.0
    for start in range(0, len(run), PART):
        found = _sums(run[start : start + PART], kind, scale, shift)
        s, q, a = s + found[0], q + found[1], a + found[2]
    return s, q, a


@_jit
def _extremes(bits, signed):
    umin, umax, smin, smax = bits[0], bits[0], signed[0], signed[0]
    for k in range(len(bits)):
        umin, umax = min(umin, bits[k]), max(umax, bits[k])
        smin, smax = min(smin, signed[k]), max(smax, signed[k])
    return umin, umax, smin, smax


@_jit
def _magnitudes(umin, umax, smin, smax, normal):
    """Smallest and largest pattern without the sign (see ``plain_stats.ordered``)."""
    mask = np.int64(_mask(normal))
    least = most = np.int64(-1)
    if smax >= 0:
        least, most = np.int64(umin), np.int64(smax)
    if smin < 0:
        low, high = np.int64(smin) & mask, np.int64(umax) & mask
        least, most = low if least < 0 else min(least, low), max(most, high)
    return least, most


@_jit
def _below_wide(bits, normal):
    """How many are zero, and how many zero or subnormal."""
    mask = _mask(normal)
    zero, small = np.int32(0), np.int32(0)
    for k in range(len(bits)):
        magnitude = bits[k] & mask
        zero += np.int32(magnitude == 0)
        small += np.int32(magnitude < normal)
    return np.int64(zero), np.int64(small)


@_jit
def _below_bytes(bits, words, start, normal):
    """The same of bytes, eight in a word: adding 0x80 − limit to seven bits carries into the eighth from limit on."""
    low, ones = np.uint64(0x7F7F7F7F7F7F7F7F), np.uint64(0x0101010101010101)
    up, eighth = np.uint64(np.uint64(0x80 - np.int64(normal)) * ones), np.uint64(7)
    whole = len(bits) // 8
    there, ordinary = np.int64(0), np.int64(0)
    for first in range(0, whole, 255):  # a byte of a sum counts to 255
        part = words[start // 8 + first : start // 8 + min(first + 255, whole)]
        a, b = np.uint64(0), np.uint64(0)
        for k in range(len(part)):
            magnitude = np.uint64(part[k] & low)
            a += np.uint64(np.uint64(np.uint64(magnitude + low) >> eighth) & ones)
            b += np.uint64(np.uint64(np.uint64(magnitude + up) >> eighth) & ones)
        there, ordinary = there + _sum_bytes(a), ordinary + _sum_bytes(b)
    zero, small = 8 * whole - there, 8 * whole - ordinary
    for k in range(8 * whole, len(bits)):
        magnitude_of_one = bits[k] & np.uint8(0x7F)
        zero += magnitude_of_one == 0
        small += magnitude_of_one < normal
    return zero, small


@_jit
def _sum_bytes(word):
    total = np.int64(0)
    for k in range(8):
        total += np.int64(np.uint64(word >> np.uint64(8 * k)) & np.uint64(0xFF))
    return total


@_jit
def _scale(most, kind):
    """A power of two that brings the largest magnitude near 2³⁰, so that no square leaves float32."""
    if kind != BF16 and kind != F32:
        return np.float32(1)
    exponent = most >> 7 if kind == BF16 else most >> 23
    return np.uint32(np.uint32(min(254, 284 - exponent)) << np.uint32(23)).view(np.float32)


@_jit
def _count(bits, counts):
    for k in range(len(bits)):
        counts[bits[k]] += 1


def _mask(normal: Any) -> Any:
    """All bits but the sign, of the type of ``normal``."""
    raise NotImplementedError


@overload(_mask)
def _mask_of(normal):
    ones = {types.uint8: np.uint8(0x7F), types.uint16: np.uint16(0x7FFF), types.uint32: np.uint32(0x7FFFFFFF)}[normal]
    return lambda normal: ones


def _below(bits: Any, words: Any, start: Any, normal: Any) -> Any:
    """How many of a run are zero, and how many zero or subnormal."""
    raise NotImplementedError


@overload(_below)
def _below_of(bits, words, start, normal):
    if bits.dtype == types.uint8:
        return lambda bits, words, start, normal: _below_bytes(bits, words, start, normal)
    return lambda bits, words, start, normal: _below_wide(bits, normal)


def _sums(bits: Any, kind: Any, scale: Any, shift: Any) -> Any:
    """Σ(y − shift), Σ(y − shift)², Σ|y| of ``y = x · scale`` in float32, handed out as float64."""
    raise NotImplementedError


@overload(_sums)
def _sums_of(bits, kind, scale, shift):
    if bits.dtype == types.uint32:
        return lambda bits, kind, scale, shift: _sums_f32(bits, scale, shift)
    if bits.dtype == types.uint16:
        return lambda bits, kind, scale, shift: (
            _sums_bf16(bits, scale, shift) if kind == BF16 else _sums_f16(bits, shift)
        )
    return lambda bits, kind, scale, shift: _sums_e4m3(bits, shift) if kind == E4M3 else _sums_e5m2(bits, shift)


@_jit
def _sums_bf16(bits, scale, shift):
    s, q, a = np.float32(0), np.float32(0), np.float32(0)
    for k in range(len(bits)):
        y = np.uint32(np.uint32(bits[k]) << np.uint32(16)).view(np.float32) * scale
        s, q, a = s + (y - shift), q + (y - shift) * (y - shift), a + abs(y)
    return np.float64(s), np.float64(q), np.float64(a)


@_jit
def _sums_f32(bits, scale, shift):
    s, q, a = np.float32(0), np.float32(0), np.float32(0)
    for k in range(len(bits)):
        y = np.uint32(bits[k]).view(np.float32) * scale
        s, q, a = s + (y - shift), q + (y - shift) * (y - shift), a + abs(y)
    return np.float64(s), np.float64(q), np.float64(a)


@_jit
def _sums_f16(bits, shift):
    s, q, a = np.float32(0), np.float32(0), np.float32(0)
    for k in range(len(bits)):
        y = _half(bits[k])
        s, q, a = s + (y - shift), q + (y - shift) * (y - shift), a + abs(y)
    return np.float64(s), np.float64(q), np.float64(a)


@_jit
def _sums_e4m3(bits, shift):
    s, q, a = np.float32(0), np.float32(0), np.float32(0)
    for k in range(len(bits)):
        # sign and the other bits, moved apart to where float16 has them
        wide = np.uint16(np.uint16(bits[k]) << np.uint16(7))
        sign = np.uint16(np.uint16(wide << np.uint16(1)) & np.uint16(0x8000))
        y = _half(np.uint16(np.uint16(wide & np.uint16(0x3F80)) | sign))
        s, q, a = s + (y - shift), q + (y - shift) * (y - shift), a + abs(y)
    return np.float64(s), np.float64(q), np.float64(a)


@_jit
def _sums_e5m2(bits, shift):
    s, q, a = np.float32(0), np.float32(0), np.float32(0)
    for k in range(len(bits)):
        y = _half(np.uint16(np.uint16(bits[k]) << np.uint16(8)))
        s, q, a = s + (y - shift), q + (y - shift) * (y - shift), a + abs(y)
    return np.float64(s), np.float64(q), np.float64(a)


_BACK = (1.0, 1.0, 1.0, 256.0, 1.0)  # by kind: what the decoded value lacks


# ---- half to float ---------------------------------------------------------------------------------------------------


@intrinsic
def _half_native(context, bits):
    def generate(_, builder, signature, arguments):
        return builder.fpext(builder.bitcast(arguments[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), generate


@_jit
def _half_plain(bits):
    magnitude = np.uint32(bits) & np.uint32(0x7FFF)
    normal = np.uint32(np.uint32(magnitude << np.uint32(13)) + np.uint32(112 << 23)).view(np.float32)
    y = np.float32(np.int32(magnitude)) * np.float32(2.0**-24) if magnitude < np.uint32(0x400) else normal
    return -y if bits & np.uint16(0x8000) else y


def _converts_halves() -> bool:
    if platform.machine().lower() in ("arm64", "aarch64"):
        return True
    features: Any = binding.get_host_cpu_features()
    return bool(features.get("f16c"))


_half: Any = _half_native if _converts_halves() else _half_plain
