"""The one-checkpoint pass compiled by numba (the ``fast`` extra): the same numbers as numpy's, bit for bit.

::

    float32 bits ── runs of 4,096 ──┬─ NaN, infinite, 0, 1, negative, the largest      wide instructions
                                    ├─ exponents ── bytes ──► eight tables of counts   one element at a time
                                    └─ low bits · rounding · digest · m² ≤ K·v         wide instructions

Loops and kernels stay in one file, see :mod:`workbench.doctor.passes.compiled`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from workbench.doctor.passes.compiled import RUN, clean, exact, ready

__all__ = ["digest", "low_bits", "numbers", "rounding", "state_bound"]

Array = np.ndarray[Any, Any]

_MAGNITUDE, _INFINITY, _ONE = 0x7FFFFFFF, 0x7F800000, 0x3F800000
_SALT = 0x9E3779B97F4A7C15


def numbers(values: Array, octaves: Array) -> tuple[int, int, int, int, int, float]:
    """How many of ``float32`` numbers are NaN, infinite, 0, 1 and below 0, and the largest finite magnitude.

    Args:
        octaves: ``(256,) int64``, to which the exponents of all are added.
    """
    found = np.zeros(6, np.int64)
    _numbers(ready(values, np.int32), found, octaves)
    nan, infinite, zeros, ones, negative, high = found.tolist()
    return nan, infinite, zeros, ones, negative, float(np.int32(high).view(np.float32))


def low_bits(values: Array, low: int) -> tuple[int, int]:
    """``float32`` bits of which those of ``low`` are 0, and of how many; powers of two, 0, NaN and Inf left out."""
    some, full = _low_bits(ready(values, np.uint32), np.uint32(low))
    return int(some), int(full)


def rounding(master: Array, weight: Array) -> tuple[int, int]:
    """bfloat16 bits that are not their ``float32`` master rounded to nearest even; the most last bits between them."""
    count, ulps = _rounding(ready(master, np.uint32), ready(weight, np.uint16))
    return int(count), int(ulps)


def digest(bits: Array, start: int) -> int:
    """Σ mix(bits, position) mod 2⁶⁴ of 2- or 4-byte elements, the first at position ``start``."""
    kind = np.uint16 if bits.dtype.itemsize == 2 else np.uint32
    return int(_digest(ready(bits, kind), np.uint64(start)))


def state_bound(m: Array, v: Array, terms: tuple[float, float, float]) -> tuple[int, float, int]:
    """m² ≤ K·v of ``float32`` moments: elements that break it, the worst ratio and where it is (-1: nowhere)."""
    worst, at = np.zeros(1), np.full(1, -1, np.int64)
    broken = _bound(ready(m, np.float32), ready(v, np.float32), *terms, worst, at)
    return int(broken), float(worst[0]), int(at[0])


# ---- numbers ---------------------------------------------------------------------------------------------------------


@exact
def _numbers(bits, found, octaves):
    tables = np.zeros((8, 256), np.int32)
    packed = np.zeros(RUN, np.uint8)
    words = packed.view(np.uint64)
    for start in range(0, len(bits), RUN):
        run = bits[start : start + RUN]
        zeros, ones, negative, odd, high = _counts(run)
        found[2] += zeros
        found[3] += ones
        found[4] += negative
        found[5] = max(found[5], high)
        if odd:
            infinite = _infinite(run)
            found[0] += odd - infinite
            found[1] += infinite
        _exponents(run, packed)
        if len(run) < RUN:
            packed[len(run) :] = 0
            tables[0, 0] -= np.int32(RUN - len(run))
        _tables(words, tables)
        if (start // RUN) % 65536 == 65535:  # 32 bits would overflow after 2³¹ elements
            _add(tables, octaves)
    _add(tables, octaves)


@exact
def _counts(bits):
    zeros, ones, negative, odd, high = np.int32(0), np.int32(0), np.int32(0), np.int32(0), np.int32(0)
    for i in range(len(bits)):
        size = bits[i] & np.int32(_MAGNITUDE)
        finite = size < np.int32(_INFINITY)
        zeros += np.int32(size == np.int32(0))
        ones += np.int32(bits[i] == np.int32(_ONE))
        negative += np.int32((bits[i] < np.int32(0)) & (size > np.int32(0)) & (size <= np.int32(_INFINITY)))
        odd += np.int32(not finite)
        high = max(high, size if finite else np.int32(0))
    return zeros, ones, negative, odd, high


@exact
def _infinite(bits):
    found = 0
    for i in range(len(bits)):
        found += (bits[i] & np.int32(_MAGNITUDE)) == np.int32(_INFINITY)
    return found


@exact
def _exponents(bits, out):
    for i in range(len(bits)):
        out[i] = np.uint8((bits[i] >> np.int32(23)) & np.int32(255))


@exact
def _tables(words, tables):
    """One table a byte of the word: a count that was just written is not read again at once."""
    a, b, c, d = tables[0], tables[1], tables[2], tables[3]
    e, f, g, h = tables[4], tables[5], tables[6], tables[7]
    byte = np.uint64(255)
    for i in range(len(words)):
        w = words[i]
        a[w & byte] += 1
        b[(w >> np.uint64(8)) & byte] += 1
        c[(w >> np.uint64(16)) & byte] += 1
        d[(w >> np.uint64(24)) & byte] += 1
        e[(w >> np.uint64(32)) & byte] += 1
        f[(w >> np.uint64(40)) & byte] += 1
        g[(w >> np.uint64(48)) & byte] += 1
        h[w >> np.uint64(56)] += 1


@exact
def _add(tables, octaves):
    for k in range(8):
        for value in range(256):
            octaves[value] += tables[k, value]
            tables[k, value] = 0


# ---- bits ------------------------------------------------------------------------------------------------------------


@exact
def _low_bits(bits, low):
    some, full = 0, 0
    for start in range(0, len(bits), RUN):
        found = _low_run(bits[start : start + RUN], low)
        some += found[0]
        full += found[1]
    return some, full


@exact
def _low_run(bits, low):
    some, full = np.int32(0), np.int32(0)
    for i in range(len(bits)):
        mantissa = bits[i] & np.uint32(0x7FFFFF)
        counts = (mantissa != np.uint32(0)) & ((bits[i] & np.uint32(_INFINITY)) != np.uint32(_INFINITY))
        full += np.int32(counts)
        some += np.int32(counts & ((mantissa & low) == np.uint32(0)))
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
    even = (bits >> np.uint32(16)) & np.uint32(1)
    return np.uint32(bits + np.uint32(0x7FFF) + even) >> np.uint32(16)


@exact
def _differ(master, weight):
    found = np.int32(0)
    for i in range(len(master)):
        number = (master[i] & np.uint32(_MAGNITUDE)) <= np.uint32(_INFINITY)
        found += np.int32((_rounded(master[i]) != np.uint32(weight[i])) & number)
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
    for i in range(len(bits)):
        mixed = (np.uint64(bits[i]) + one) * (((start + np.uint64(i)) * salt) | one)
        total += (mixed ^ (mixed >> np.uint64(29))) * salt
    return total


# ---- m² ≤ K·v --------------------------------------------------------------------------------------------------------


@exact
def _bound(m, v, limit, room, under, worst, at):
    broken = 0
    buffer = np.empty(RUN, np.float64)
    for start in range(0, len(m), RUN):
        stop = min(start + RUN, len(m))
        out = buffer[: stop - start]
        broken += _bound_run(m[start:stop], v[start:stop], limit, room, under, out)
        high = _highest(out)
        if high > worst[0]:
            worst[0] = high
            for i in range(len(out)):
                if out[i] == high:
                    at[0] = start + i
                    break
    return broken


@exact
def _bound_run(m, v, limit, room, under, out):
    broken = 0
    for i in range(len(out)):
        first, second = np.float64(m[i]), np.float64(v[i])
        left, right = first * first, limit * second
        hit = left > room * (second + under)
        plain = left / right
        capped = 1.0 if plain > 1.0 and not hit else plain
        ratio = capped if right > 0.0 else (np.inf if hit else 0.0)
        out[i] = ratio if ratio == ratio else 0.0
        broken += hit
    return broken


@clean
def _highest(x):
    found = 0.0
    for i in range(len(x)):
        found = x[i] if x[i] > found else found
    return found
