"""The same statistics compiled by numba, in one pass at the speed of memory. Import it only if numba can be imported.

A run of 4,096 elements stays in the first-level cache while two loops read it. The compiler vectorizes both: one finds
the range of the bits as signed and unsigned integers; the other adds Σx, Σx² and Σ|x| of eight elements in float32, and
these sums in float64. Rare cases leave the loop: a run whose mean is large compared with its spread is summed again
about its mean, and a run with NaN or infinities is left to numpy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.analysis import plain_stats
from workbench.analysis.bit_patterns import LAYOUTS, pattern_value
from workbench.core import fast_numbers
from workbench.core.arrays import Array
from workbench.core.dtypes import DType
from workbench.core.kernels import kernel, loop, ready, reordered

if TYPE_CHECKING:
    from workbench.analysis.moment import Moment

RUN = 4096  #: elements of a run
LANES = 8  #: elements that are added in float32: three roundings


def fold(state: Moment, dtype: DType, bits: Array) -> None:
    """Take in elements: flat, contiguous, of the raw type of one of :data:`FOLDS`."""
    if not len(bits):
        return
    bits = ready(bits, bits.dtype)
    layout, unsigned, sign = LAYOUTS[dtype.name], bits.dtype.type, 1 << (dtype.bits - 1)
    dirty = np.zeros(-(-len(bits) // RUN), np.bool_)
    sums, counts, found = np.zeros(3), np.zeros(7, np.int64), np.empty((3, RUN // LANES + LANES), np.float32)
    limits = unsigned(layout.special), unsigned(layout.normal), unsigned(sign)
    FOLDS[dtype.name](bits, bits.view(f"i{bits.itemsize}"), *limits, sums, counts, dirty, found)
    n, zero, subnormal, umin, umax, smin, smax = counts.tolist()
    state.count += n
    state.zero += zero
    state.subnormal += subnormal
    if n:
        lowest, highest, _, _ = plain_stats.ordered(umin, umax, smin, smax, sign)
        mean, m2, l1 = sums.tolist()
        state.add(n, mean, m2, l1, pattern_value(dtype.name, lowest), pattern_value(dtype.name, highest))
    if n < len(bits):
        edges = np.flatnonzero(np.diff(dirty, prepend=False, append=False)).reshape(-1, 2) * RUN
        for start, stop in edges.tolist():
            plain_stats.fold(state, dtype, bits[start:stop])


def count8(bits: Array) -> Array:
    """Count how often each byte occurs, ``(256,) int64``."""
    bits, counts = ready(bits, np.uint8), np.zeros((8, 256), np.int32)
    whole = len(bits) // 8 * 8
    words = bits[:whole].view(np.uint64)
    _count8(ready(words, np.uint64), counts)
    return counts.sum(axis=0, dtype=np.int64) + np.bincount(bits[whole:], minlength=256)


def count16(bits: Array, counts: Array) -> None:
    """Add how often each 16-bit pattern occurs to ``counts``, ``(65536,) int64``."""
    _count16(ready(bits, np.uint16), counts)


# ---- compiled --------------------------------------------------------------------------------------------------------


@kernel
def _count8(words, counts):
    byte = np.uint64(255)
    for k in range(len(words)):
        word = words[k]
        for place in range(8):  # separate tables, so equal neighbours do not wait for each other
            counts[place, (word >> np.uint64(8 * place)) & byte] += 1


@kernel
def _count16(bits, counts):
    for k in range(len(bits)):
        counts[bits[k]] += 1


_ordered = loop(plain_stats.ordered)


@loop
def _extremes(bits, signed):
    umin, umax, smin, smax = bits[0], bits[0], signed[0], signed[0]
    for k in range(len(bits)):
        umin, umax = min(umin, bits[k]), max(umax, bits[k])
        smin, smax = min(smin, signed[k]), max(smax, signed[k])
    return np.int64(umin), np.int64(umax), np.int64(smin), np.int64(smax)


@loop
def _below(bits, sign, normal):
    """Count the elements of a run that are zero, and those that are zero or subnormal, in lanes of 16 bits."""
    zero, small = np.uint16(0), np.uint16(0)
    for k in range(len(bits)):
        magnitude = bits[k] & ~sign
        zero = np.uint16(zero + np.uint16(magnitude == 0))
        small = np.uint16(small + np.uint16(magnitude < normal))
    return np.int64(zero), np.int64(small)


@reordered
def _sum(values):
    found = 0.0
    for k in range(len(values)):
        found += np.float64(values[k])
    return found


def _fold_of(number: Any, mantissa: int | None = None) -> Any:
    """Return the kernel of one type.

    Args:
        number: decodes its bits, from :mod:`workbench.core.fast_numbers`.
        mantissa: its bits, if squares could leave float32 without a scale.
    """

    @reordered
    def add_lanes(run, scale, shift, found):
        """Add up Σ(y − shift), Σ(y − shift)², Σ|y| of ``y = x · scale``, for every eighth of the run."""
        part = len(run) // LANES
        each, square, size = found[0], found[1], found[2]
        for k in range(part):
            s, q, a = np.float32(0), np.float32(0), np.float32(0)
            for lane in range(LANES):
                y = number(run[k + lane * part], run) * scale
                t = y - shift
                s, q, a = s + t, q + t * t, a + abs(y)
            each[k], square[k], size[k] = s, q, a
        for k in range(part * LANES, len(run)):
            y = number(run[k], run) * scale
            t = y - shift
            at = part + k - part * LANES
            each[at], square[at], size[at] = t, t * t, abs(y)
        return part + len(run) - part * LANES

    @loop
    def sums_of(run, scale, shift, found):
        count = add_lanes(run, scale, shift, found)
        return _sum(found[0, :count]), _sum(found[1, :count]), _sum(found[2, :count])

    @kernel
    def fold_runs(bits, signed, special, normal, sign, sums, counts, dirty, found):
        """Fold all runs; ``sums``: mean, M₂, Σ|x|; ``counts``: n, zero, subnormal, and the range of the bits."""
        mean, m2, l1, n = 0.0, 0.0, 0.0, 0
        for start in range(0, len(bits), RUN):
            run = bits[start : start + RUN]
            umin, umax, smin, smax = _extremes(run, signed[start : start + RUN])
            _, _, least, most = _ordered(umin, umax, smin, smax, np.int64(sign))
            if most >= special:
                dirty[start // RUN] = True
                continue
            if least < normal:
                zero, small = _below(run, sign, normal)
                counts[1] += zero
                counts[2] += small - zero
            if n == 0:
                counts[3], counts[4], counts[5], counts[6] = umin, umax, smin, smax
            counts[3], counts[4] = min(counts[3], umin), max(counts[4], umax)
            counts[5], counts[6] = min(counts[5], smin), max(counts[6], smax)
            scale = np.float32(1)
            if mantissa is not None:  # a power of two that brings the largest magnitude near 2³⁰
                scale = np.uint32(np.uint32(min(254, 284 - (most >> mantissa))) << np.uint32(23)).view(np.float32)
            m, shift = len(run), np.float32(0)
            s, q, a = sums_of(run, scale, shift, found)
            if s * (s / m) > q - s * (s / m):  # the mean outweighs the spread: the rest of q is rounding
                shift = np.float32(s / m)
                s, q, _ = sums_of(run, scale, shift, found)
            back, both = 1.0 / np.float64(scale), n + m
            delta = (np.float64(shift) + s / m) * back - mean
            mean += delta * (m / both)
            m2 += max(q - s * (s / m), 0.0) * back * back + (delta * delta * (n * (m / both)) if n else 0.0)
            l1 += a * back
            n = both
        sums[0], sums[1], sums[2], counts[0] = mean, m2, l1, n

    return fold_runs


FOLDS = {
    "bfloat16": _fold_of(fast_numbers.bfloat16, 7),
    "float16": _fold_of(fast_numbers.float16),
    "float32": _fold_of(fast_numbers.float32, 23),
    "float8_e4m3fn": _fold_of(fast_numbers.float8_e4m3fn),
    "float8_e5m2": _fold_of(fast_numbers.float8_e5m2),
}
