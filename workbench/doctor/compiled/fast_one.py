"""The one-checkpoint pass compiled by numba (the ``fast`` extra): the same numbers as numpy's, bit for bit.

::

    float32 bits ── runs of 4,096 ──┬─ NaN, infinite, 0, 1, negative, the largest      wide instructions
                                    ├─ exponents ── bytes ──► eight tables of counts   one element at a time
                                    └─ low bits · rounding · digest · m² ≤ K·v         wide instructions

Loops and kernels stay in one file, see :mod:`workbench.doctor.compiled.kernels`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from workbench.doctor.compiled.kernels import NEARLY, RUN, exact, ready, reordered

__all__ = ["digest", "fold", "low_bits", "numbers", "rounding", "state_bound"]

Array = np.ndarray[Any, Any]

_MAGNITUDE, _INFINITY, _ONE = 0x7FFFFFFF, 0x7F800000, 0x3F800000
_SALT = 0x9E3779B97F4A7C15
_NONE = np.zeros(0, np.int32)
_NONE.flags.writeable = False
MOST = 6  #: tensors of one parameter
PART = 1 << 16  #: elements of each tensor that are processed in one go
CHUNK = 512  #: elements that share one smallest and largest value
THIRD = 1024  #: length of each of three runs whose exponents are counted in one loop


def fold(
    tensors: list[Array],
    low: list[int],
    digested: Array | None,
    start: int,
    moments: tuple[int, int],
    terms: tuple[float, float, float] | None,
    known: float,
) -> tuple[Array, tuple[int, float, int], float, int]:
    """Look at one block.

    Args:
        tensors: ``float32``, of one length; :data:`MOST` at most.
        low: masks of low bits, 0 where they are not counted.
        digested: bits of the weights, the first of them at position ``start``.
        moments: which tensors are m and v; -1: none of them is.
        terms: of the state bound; ``None``: it is not looked at. known: the worst ratio so far.

    Returns:
        ``(tensors, 264) int64``: NaN, infinite, 0, 1, below 0, the bits of the largest, numbers without low bits and of
        how many, and 256 exponents; what :func:`state_bound` says; Σ v; the digest.
    """
    found = np.zeros((len(tensors), 264), np.int64)
    bits = [ready(tensor, np.int32) for tensor in tensors]
    main = next((k for k, one in enumerate(tensors) if digested is not None and _same(one, digested)), -1)
    first, second = moments if terms is not None else (-1, moments[1])
    masks, places = np.array(low, np.int32), np.array((main, first, second), np.int64)
    worst, at = np.full(1, known), np.full(1, -1, np.int64)
    every = [*bits, *[_NONE] * (MOST - len(bits))]
    broken, sum_v, mixed = _fold(
        *every, len(bits), masks, places, np.uint64(start), *(terms or (0.0, 0.0, 0.0)), found, worst, at
    )
    if main < 0 and digested is not None:
        mixed = digest(digested, start)
    return found, (int(broken), float(worst[0]), int(at[0])), float(sum_v), int(mixed)


def _same(values: Array, bits: Array) -> bool:
    """Whether numbers are their own bits, not decoded ones."""
    return values.itemsize == bits.itemsize and values.ctypes.data == bits.ctypes.data


def numbers(values: Array) -> tuple[list[int], Array]:
    """How many of ``float32`` numbers are NaN, infinite, 0, 1 and below 0, with the bits of the largest finite
    magnitude; and how many have each of 256 exponents."""
    found = np.zeros(264, np.int64)
    _numbers(ready(values, np.int32), np.int32(0), found[:8], found[8:])
    return found[:6].tolist(), found[8:]


def low_bits(values: Array, low: int) -> tuple[int, int]:
    """How many ``float32`` elements have zeros in all bits of ``low``, and how many were counted.

    Powers of two, 0, NaN and Inf are skipped: they say nothing of a rounding.
    """
    found = np.zeros(264, np.int64)
    _numbers(ready(values, np.int32), np.int32(low), found[:8], found[8:])
    return int(found[6]), int(found[7])


def rounding(master: Array, weight: Array) -> tuple[int, int]:
    """bfloat16 bits that are not their ``float32`` master rounded to nearest even; the most last bits between them."""
    count, ulps = _rounding(ready(master, np.uint32), ready(weight, np.uint16))
    return int(count), int(ulps)


def digest(bits: Array, start: int) -> int:
    """Σ mix(bits, position) mod 2⁶⁴ of 2- or 4-byte elements, the first at position ``start``."""
    kind = np.uint16 if bits.dtype.itemsize == 2 else np.uint32
    return int(_digest(ready(bits, kind), np.uint64(start)))


def state_bound(m: Array, v: Array, terms: tuple[float, float, float], known: float = 0.0) -> tuple[int, float, int]:
    """m² ≤ K·v of ``float32`` moments: elements that break it, the worst ratio and where it is (-1: nowhere).

    Args:
        known: the worst ratio so far; one that is not larger is of no interest.
    """
    worst, at = np.full(1, known), np.full(1, -1, np.int64)
    broken = _bound(ready(m, np.float32), ready(v, np.float32), *terms, 0, worst, at)
    return int(broken), float(worst[0]), int(at[0])


@exact
def _fold(a, b, c, d, e, f, count, low, places, start, limit, room, under, found, worst, at):
    """Process :data:`PART` elements of every tensor at a time, so that they stay in the core's cache."""
    every = (a, b, c, d, e, f)
    main, first, second = places
    broken, total, mixed = 0, 0.0, np.uint64(0)
    for begin in range(0, len(a), PART):
        stop = min(begin + PART, len(a))
        for k in range(count):
            part = every[k][begin:stop]
            _numbers(part, low[k], found[k, :8], found[k, 8:])
            if k == main:
                mixed += _digest(part.view(np.uint32), start + np.uint64(begin))
        if second >= 0:
            v = every[second][begin:stop].view(np.float32)
            total += _sum(v)
            if first >= 0:
                m = every[first][begin:stop].view(np.float32)
                broken += _bound(m, v, limit, room, under, begin, worst, at)
    return broken, total, mixed


# ---- numbers ---------------------------------------------------------------------------------------------------------


@exact
def _numbers(bits, low, found, octaves):
    """Extents by chunk first: they tell which chunks hold a 0, a 1, NaN or infinities, and which octaves are met."""
    chunks = (len(bits) + CHUNK - 1) // CHUNK
    lows = np.empty(chunks, np.int32)
    top = np.int32(0)
    for k in range(chunks):
        chunk = bits[k * CHUNK : (k + 1) * CHUNK]
        least, high, negative, short = _extent(chunk, low)
        if low:
            if short or high >= _INFINITY:
                some, full = _low_run(chunk, low)
                found[6] += some
                found[7] += full
            else:
                found[7] += len(chunk)
        if least == 0 or high >= _ONE:
            zeros, ones, negative, odd, high = _counts(chunk)
            found[2] += zeros
            found[3] += ones
            if odd:
                infinite = _infinite(chunk)
                found[0] += odd - infinite
                found[1] += infinite
        found[4] += negative
        found[5] = max(found[5], high)
        lows[k] = least >> np.int32(23)
        top = max(top, high >> np.int32(23))
    if found[0] + found[1]:  # NaN and infinities lie far above the rest
        _below(bits, np.int32(255), octaves)
    else:
        _octaves(bits, lows, max(top - np.int32(15), np.int32(0)), octaves)


@exact
def _extent(bits, low):
    """The least and the greatest magnitude as bits; how many have the sign, and how many no bits of ``low``."""
    least, high, negative, short = np.int32(_MAGNITUDE), np.int32(0), np.int32(0), np.int32(0)
    for i in range(len(bits)):
        size = np.int32(bits[i] & np.int32(_MAGNITUDE))
        least = min(least, size)
        high = max(high, size)
        negative = np.int32(negative + np.int32(bits[i] < np.int32(0)))
        short = np.int32(short + np.int32(np.int32(bits[i] & low) == np.int32(0)))
    return least, high, negative, short


@exact
def _counts(bits):
    zeros, ones, negative, odd, high = np.int32(0), np.int32(0), np.int32(0), np.int32(0), np.int32(0)
    for i in range(len(bits)):
        size = np.int32(bits[i] & np.int32(_MAGNITUDE))
        finite = size < np.int32(_INFINITY)
        below = (bits[i] < np.int32(0)) & (size > np.int32(0)) & (size <= np.int32(_INFINITY))
        zeros = np.int32(zeros + np.int32(size == np.int32(0)))
        ones = np.int32(ones + np.int32(bits[i] == np.int32(_ONE)))
        negative = np.int32(negative + np.int32(below))
        odd = np.int32(odd + np.int32(not finite))
        high = max(high, size if finite else np.int32(0))
    return zeros, ones, negative, odd, high


@exact
def _infinite(bits):
    found = 0
    for i in range(len(bits)):
        found += (bits[i] & np.int32(_MAGNITUDE)) == np.int32(_INFINITY)
    return found


@exact
def _octaves(bits, lows, base, octaves):
    """Count exponents three at a time: the sixteen octaves from ``base`` on are four bits each of a table's index."""
    table = np.zeros(4096, np.int32)
    index = np.empty(THIRD, np.uint16)
    whole = len(bits) // (3 * THIRD) * (3 * THIRD)
    for start in range(0, whole, 3 * THIRD):
        middle, last = start + THIRD, start + 2 * THIRD
        _indices(bits[start:middle], bits[middle:last], bits[last : last + THIRD], base, index)
        for i in range(THIRD):
            table[index[i]] += np.int32(1)
    pairs = np.zeros(256, np.int32)
    for k in range(16):
        for j in range(256):
            pairs[j] += table[256 * k + j]
    for k in range(1, 16):
        octaves[base + k] += _total(table[256 * k : 256 * k + 256]) + _total(pairs[16 * k : 16 * k + 16])
        octaves[base + k] += _total(pairs[k::16])
    for k in range(len(lows)):  # what is at the base or below it fell together
        if lows[k] <= base:
            _below(bits[k * CHUNK : min((k + 1) * CHUNK, whole)], base, octaves)
    _below(bits[whole:], np.int32(255), octaves)


@exact
def _total(counts):
    found = np.int64(0)
    for i in range(len(counts)):
        found += counts[i]
    return found


@exact
def _indices(x, y, z, base, out):
    none = np.int32(0)
    for i in range(len(out)):
        a = max(np.int32((np.int32(x[i] >> np.int32(23)) & np.int32(255)) - base), none)
        b = max(np.int32((np.int32(y[i] >> np.int32(23)) & np.int32(255)) - base), none)
        c = max(np.int32((np.int32(z[i] >> np.int32(23)) & np.int32(255)) - base), none)
        out[i] = np.uint16(np.int32(a | np.int32(b << np.int32(4))) | np.int32(c << np.int32(8)))


@exact
def _below(bits, base, octaves):
    for i in range(len(bits)):
        octave = (bits[i] >> np.int32(23)) & np.int32(255)
        if octave <= base:
            octaves[octave] += 1


@reordered
def _sum(values):
    found = 0.0
    for i in range(len(values)):
        found += np.float64(values[i])
    return found


# ---- bits ------------------------------------------------------------------------------------------------------------


@exact
def _low_run(bits, low):
    """Numbers that have none of the bits of ``low``, of those that have a mantissa."""
    some, full = np.int32(0), np.int32(0)
    for i in range(len(bits)):
        mantissa = np.int32(bits[i] & np.int32(0x7FFFFF))
        counts = (mantissa != np.int32(0)) & (np.int32(bits[i] & np.int32(_INFINITY)) != np.int32(_INFINITY))
        full = np.int32(full + np.int32(counts))
        some = np.int32(some + np.int32(counts & (np.int32(mantissa & low) == np.int32(0))))
    return some, full


@exact
def _rounding(master, weight):
    count, ulps = 0, 0
    for start in range(0, len(master), RUN):
        run, held = master[start : start + RUN], weight[start : start + RUN]
        differ = _differ(run, held)
        if differ:
            count += differ
            ulps = max(ulps, _furthest(run, held))
    return count, ulps


@exact
def _rounded(bits):
    even = np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(1))
    return np.uint32(np.uint32(bits + np.uint32(0x7FFF) + even) >> np.uint32(16))


@exact
def _differ(master, weight):
    found = np.int32(0)
    for i in range(len(master)):
        number = np.uint32(master[i] & np.uint32(_MAGNITUDE)) <= np.uint32(_INFINITY)
        found = np.int32(found + np.int32((_rounded(master[i]) != np.uint32(weight[i])) & number))
    return found


@exact
def _furthest(master, weight):
    found = np.int64(0)
    for i in range(len(master)):
        if (master[i] & np.uint32(_MAGNITUDE)) <= np.uint32(_INFINITY):
            p, q = np.int64(_rounded(master[i])), np.int64(weight[i])
            p = p if p < 32768 else 32768 - p
            q = q if q < 32768 else 32768 - q
            found = np.int64(max(found, abs(p - q)))
    return found


@exact
def _digest(bits, start):
    total, salt, one = np.uint64(0), np.uint64(_SALT), np.uint64(1)
    place = start * salt
    for i in range(len(bits)):
        mixed = (np.uint64(bits[i]) + one) * (place | one)
        total += mixed ^ (mixed >> np.uint64(29))
        place += salt
    return total * salt


# ---- m² ≤ K·v --------------------------------------------------------------------------------------------------------


@exact
def _bound(m, v, limit, room, under, place, worst, at):
    """Only runs with a ratio above the worst so far are divided; what breaks the law is above all that do not."""
    broken = 0
    for start in range(0, len(m), RUN):
        stop = min(start + RUN, len(m))
        if _bound_above(m[start:stop], v[start:stop], min(worst[0], 1.0) * limit * NEARLY):
            broken += _bound_run(m[start:stop], v[start:stop], limit, room, under, place + start, worst, at)
    return broken


@exact
def _bound_above(m, v, limit):
    """False for NaN too: such runs are looked at element by element."""
    found = 0
    for i in range(len(m)):
        first = np.float64(m[i])
        found += not first * first <= limit * np.float64(v[i])
    return found


@exact
def _bound_run(m, v, limit, room, under, start, worst, at):
    broken = 0
    for i in range(len(m)):
        first, second = np.float64(m[i]), np.float64(v[i])
        left, right = first * first, limit * second
        hit = left > room * (second + under)
        plain = left / right
        ratio = (1.0 if plain > 1.0 and not hit else plain) if right > 0.0 else (np.inf if hit else 0.0)
        broken += hit
        if ratio > worst[0]:
            worst[0] = ratio
            at[0] = start + i
    return broken
