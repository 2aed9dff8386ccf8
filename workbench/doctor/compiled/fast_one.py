"""The one-checkpoint pass compiled by numba: the same numbers as numpy's, bit for bit.

::

    float32 bits ── runs of 2,048 ──┬─ NaN, infinite, 0, 1, negative, the largest      wide instructions
                                    ├─ exponents ── bytes ──► eight tables of counts   one element at a time
                                    └─ low bits · rounding · digest · m² ≤ K·v         wide instructions
"""

from __future__ import annotations

import numpy as np

from workbench.core.arrays import Array
from workbench.core.kernels import kernel, loop, ready, reordered
from workbench.doctor.compiled import NEARLY, RUN
from workbench.doctor.laws import bounds

_MAGNITUDE, _INFINITY, _ONE = 0x7FFFFFFF, 0x7F800000, 0x3F800000
_SALT = 0x9E3779B97F4A7C15


def numbers(values: Array, low: int) -> tuple[list[int], Array]:
    """Collect the statistics of ``float32`` numbers.

    Args:
        low: mask of low bits; 0: they are not counted.

    Returns:
        How many are NaN, infinite, 0, 1 and below 0; the bits of the largest finite magnitude; how many have none of
        the low bits, and of how many (powers of two, 0, NaN and Inf say nothing of a rounding). And how many have each
        of 256 exponents.
    """
    found = np.zeros(8, np.int64)
    tables, exponents = np.zeros((8, 264), np.int32), np.empty(RUN, np.uint8)
    _numbers(ready(values, np.int32), np.int32(low), found, tables, exponents)
    return found.tolist(), tables.sum(axis=0, dtype=np.int64)[:256]


def state_bound(m: Array, v: Array, terms: tuple[float, float, float], known: float) -> bounds.Hits:
    """Check m² ≤ K·v for ``float32`` moments.

    Args:
        known: the worst ratio so far; one that is not larger is of no interest.
    """
    worst, at = np.full(1, known), np.full(1, -1, np.int64)
    broken = _bound(ready(m), ready(v), *terms, worst, at)
    return bounds.Hits(broken, len(m), float(worst[0]), int(at[0]))


def total(values: Array) -> float:
    """Add up ``float32`` numbers in float64."""
    return float(_total(ready(values)))


def rounding(master: Array, weight: Array) -> tuple[int, int]:
    """Count bfloat16 weights that differ from their ``float32`` master rounded to nearest even; and their largest
    distance in ulps.
    """
    count, ulps = _rounding(ready(master, np.uint32), ready(weight, np.uint16))
    return int(count), int(ulps)


def digest(bits: Array, start: int) -> int:
    """Compute Σ mix(bits, position) mod 2⁶⁴, with the first element at position ``start``."""
    return int(_digest(ready(bits, f"u{bits.itemsize}"), np.uint64(start)))


# ---- numbers ---------------------------------------------------------------------------------------------------------


@kernel
def _numbers(bits, low, found, tables, exponents):
    """Find the extents of a run first: they show whether it contains a 0, a 1, NaN or infinities."""
    for start in range(0, len(bits), RUN):
        run = bits[start : start + RUN]
        least, high, negative, short = _extent(run, low, exponents)
        if low:
            some, full = np.int32(0), np.int32(len(run))
            if short or high >= _INFINITY:
                some, full = _low_run(run, low)
            found[6] += some
            found[7] += full
        if least == 0 or high >= _ONE:
            zeros, ones, negative, odd, infinite, high = _counts(run)
            found[0] += odd - infinite
            found[1] += infinite
            found[2] += zeros
            found[3] += ones
        found[4] += negative
        found[5] = max(found[5], high)
        for i in range(len(run)):
            tables[i & 7, exponents[i]] += 1


@loop
def _extent(bits, low, exponents):
    """Return the least and the greatest magnitude as bits; how many have the sign, and how many no bits of ``low``."""
    least, high, negative, short = np.int32(_MAGNITUDE), np.int32(0), np.int32(0), np.int32(0)
    for i in range(len(bits)):
        size = np.int32(bits[i] & np.int32(_MAGNITUDE))
        least = min(least, size)
        high = max(high, size)
        negative = np.int32(negative + np.int32(bits[i] < np.int32(0)))
        short = np.int32(short + np.int32(np.int32(bits[i] & low) == np.int32(0)))
        exponents[i] = np.uint8(bits[i] >> np.int32(23))
    return least, high, negative, short


@loop
def _counts(bits):
    zeros, ones, negative, odd, infinite = np.int32(0), np.int32(0), np.int32(0), np.int32(0), np.int32(0)
    high = np.int32(0)
    for i in range(len(bits)):
        size = np.int32(bits[i] & np.int32(_MAGNITUDE))
        finite = size < np.int32(_INFINITY)
        below = (bits[i] < np.int32(0)) & (size > np.int32(0)) & (size <= np.int32(_INFINITY))
        zeros = np.int32(zeros + np.int32(size == np.int32(0)))
        ones = np.int32(ones + np.int32(bits[i] == np.int32(_ONE)))
        negative = np.int32(negative + np.int32(below))
        odd = np.int32(odd + np.int32(not finite))
        infinite = np.int32(infinite + np.int32(size == np.int32(_INFINITY)))
        high = max(high, size if finite else np.int32(0))
    return zeros, ones, negative, odd, infinite, high


@kernel
def _total(values):
    return _sum(values)


@reordered
def _sum(values):
    found = 0.0
    for i in range(len(values)):
        found += np.float64(values[i])
    return found


# ---- bits ------------------------------------------------------------------------------------------------------------


@loop
def _low_run(bits, low):
    """Count the finite numbers that have a mantissa, first only those without any of the bits of ``low``."""
    some, full = np.int32(0), np.int32(0)
    for i in range(len(bits)):
        mantissa = np.int32(bits[i] & np.int32(0x7FFFFF))
        counts = (mantissa != np.int32(0)) & (np.int32(bits[i] & np.int32(_INFINITY)) != np.int32(_INFINITY))
        full = np.int32(full + np.int32(counts))
        some = np.int32(some + np.int32(counts & (np.int32(mantissa & low) == np.int32(0))))
    return some, full


@kernel
def _rounding(master, weight):
    count, ulps = 0, 0
    for start in range(0, len(master), RUN):
        run, held = master[start : start + RUN], weight[start : start + RUN]
        differ = _differ(run, held)
        if differ:
            count += differ
            ulps = max(ulps, _furthest(run, held))
    return count, ulps


@loop
def _rounded(bits):
    even = np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(1))
    return np.uint32(np.uint32(bits + np.uint32(0x7FFF) + even) >> np.uint32(16))


@loop
def _differ(master, weight):
    found = np.int32(0)
    for i in range(len(master)):
        number = np.uint32(master[i] & np.uint32(_MAGNITUDE)) <= np.uint32(_INFINITY)
        found = np.int32(found + np.int32((_rounded(master[i]) != np.uint32(weight[i])) & number))
    return found


@loop
def _furthest(master, weight):
    found = np.int64(0)
    for i in range(len(master)):
        if (master[i] & np.uint32(_MAGNITUDE)) <= np.uint32(_INFINITY):
            p, q = np.int64(_rounded(master[i])), np.int64(weight[i])
            p = p if p < 32768 else 32768 - p
            q = q if q < 32768 else 32768 - q
            found = np.int64(max(found, abs(p - q)))
    return found


@kernel
def _digest(bits, start):
    total, salt, one = np.uint64(0), np.uint64(_SALT), np.uint64(1)
    place = start * salt
    for i in range(len(bits)):
        mixed = (np.uint64(bits[i]) + one) * (place | one)
        total += mixed ^ (mixed >> np.uint64(29))
        place += salt
    return total * salt


# ---- m² ≤ K·v --------------------------------------------------------------------------------------------------------

_sides = loop(bounds.state_bound_sides)


@kernel
def _bound(m, v, limit, room, under, worst, at):
    """Count violations; only runs with a ratio above the worst so far are divided, as every violation is in one."""
    broken = 0
    for start in range(0, len(m), RUN):
        stop = min(start + RUN, len(m))
        if _bound_above(m[start:stop], v[start:stop], min(worst[0], 1.0) * limit * NEARLY):
            broken += _bound_run(m[start:stop], v[start:stop], limit, room, under, start, worst, at)
    return broken


@loop
def _bound_above(m, v, limit):
    """Count the elements whose m² exceeds limit·v, or is NaN; runs with any are checked element by element."""
    found = 0
    for i in range(len(m)):
        first = np.float64(m[i])
        found += not first * first <= limit * np.float64(v[i])
    return found


@loop
def _bound_run(m, v, limit, room, under, start, worst, at):
    broken = 0
    for i in range(len(m)):
        left, right, allowed = _sides(np.float64(m[i]), np.float64(v[i]), limit, room, under)
        hit = left > allowed
        broken += hit
        plain = left / right
        ratio = (1.0 if plain > 1.0 and not hit else plain) if right > 0.0 else (np.inf if hit else 0.0)
        if ratio > worst[0]:
            worst[0] = ratio
            at[0] = start + i
    return broken
