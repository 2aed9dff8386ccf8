"""The differing piece in one pass, compiled by numba: the same results as the numpy way.

A piece is processed in blocks that stay in a core's first-level cache; each step is a separate loop that the compiler
vectorizes. Blocks with NaN or Inf are copied, and such pairs become 0 there.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from workbench.analysis import compare_numpy as flat
from workbench.core import fast_numbers
from workbench.core.arrays import Array
from workbench.core.decoding.floats import fp8_table
from workbench.core.kernels import kernel, loop, ready, reordered

BLOCK = 1024
_NO_TABLE = np.zeros(0, np.float32)
_CHANGED, _NAN_NAN, _NAN_A, _NAN_B, _NAN_NEW = flat.CHANGED, flat.NAN_NAN, flat.NAN_A, flat.NAN_B, flat.NAN_NEW
_INF_A, _INF_B, _ODD_CHANGED = flat.INF_A, flat.INF_B, flat.ODD_CHANGED
_FINITE, _AT, _ZEROS, _FURTHEST = flat.FINITE, flat.AT, flat.ZEROS, flat.FURTHEST


def tally(name: str, a: Array, b: Array, into: tuple[Array, ...], histograms: bool) -> None:
    """Fold one piece of two sides of one type into the tallies of :mod:`workbench.analysis.compare_numpy`.

    Args:
        name: name of the type, one of :data:`TALLIES`.
        a, b: bits, ``(N,)``.
        into: mask ``(N,) uint8``, set to 1 where bits differ; ulps, octaves, counts and sums, which are added to.
        histograms: whether to fill ulps and octaves, which are half of the work.
    """
    table = ready(fp8_table(name) if a.itemsize == 1 else _NO_TABLE)
    mask, ulps, octaves, counts, sums = into
    # eight neighbours use separate rows, to avoid waiting for each other; rows are not a power of two apart
    by_ulp, by_octave = np.zeros((8, len(ulps)), np.int64), np.zeros((8, len(octaves) + 8), np.int64)
    blocks = [np.empty((2, BLOCK), kind) for kind in (a.dtype, np.float32, np.uint8)]
    TALLIES[name](
        ready(a, a.dtype), ready(b, b.dtype), table, *blocks, mask, by_ulp, by_octave, counts, sums, histograms
    )
    ulps += by_ulp.sum(axis=0)
    octaves += by_octave.sum(axis=0)[: len(octaves)]


@loop
def _differ(x, y, out):
    """Mark where bits differ, and count the marks."""
    found = np.int32(0)
    for i in range(len(x)):
        mark = np.uint8(x[i] != y[i])
        out[i] = mark
        found += np.int32(mark)
    return found


@loop
def _identity(value, table):
    return value


def _tally_of(number: Any, signed: Any, decoded: bool = False) -> Any:
    """Return the kernel of one type.

    Args:
        number: decodes its bits, from :mod:`workbench.core.fast_numbers`.
        signed: integers of the size of the type.
        decoded: whether blocks are decoded once, before the loops, which then see float32.
    """
    value, lowest = _identity if decoded else number, int(np.iinfo(signed).min)

    @loop
    def steps(x, y):
        """Count the steps between two numbers in their type; both zeros are one value."""
        p, q = np.int32(signed(x)), np.int32(signed(y))
        p = p if p >= 0 else np.int32(lowest - p)
        q = q if q >= 0 else np.int32(lowest - q)
        return np.uint32(np.uint32(max(p, q)) - np.uint32(min(p, q)))

    @loop
    def furthest(x, y):
        found = np.uint32(0)
        for i in range(len(x)):
            found = max(found, steps(x[i], y[i]))
        return found

    @loop
    def decode(x, table, out):
        for i in range(len(x)):
            out[i] = number(x[i], table)

    @reordered
    def sums_of(x, y, table):
        dd, aa, bb = 0.0, 0.0, 0.0
        for i in range(len(x)):
            p, q = np.float64(value(x[i], table)), np.float64(value(y[i], table))
            t = q - p
            dd += t * t
            aa += p * p
            bb += q * q
        return dd, aa, bb

    @loop
    def distance(x, y, i, table):
        """Compute |δ| in float32, as bits."""
        return np.float32(abs(value(y[i], table) - value(x[i], table))).view(np.int32)

    @loop
    def distances(x, y, table):
        """Return the largest |δ|, as bits, and how many are 0."""
        high, zeros = np.int32(0), np.int32(0)
        for i in range(len(x)):
            bits = distance(x, y, i, table)
            high = max(high, bits)
            zeros += np.int32(bits < np.int32(1))
        return high, zeros

    @loop
    def without_odd(x, y, table, xs, ys, counts):
        """Count NaN and Inf; such pairs become 0 on both sides. Returns how many there were."""
        odd = 0
        for i in range(len(x)):
            xs[i], ys[i] = x[i], y[i]
            p, q = number(x[i], table), number(y[i], table)
            if abs(p) < np.inf and abs(q) < np.inf:
                continue
            nan_a, nan_b, changed = p != p, q != q, x[i] != y[i]
            counts[_NAN_NAN] += nan_a and nan_b and changed
            counts[_ODD_CHANGED] += changed
            counts[_NAN_A] += nan_a
            counts[_NAN_B] += nan_b
            counts[_NAN_NEW] += nan_b and not nan_a
            counts[_INF_A] += abs(p) == np.inf
            counts[_INF_B] += abs(q) == np.inf
            xs[i] = ys[i] = 0
            odd += 1
        return odd

    @loop
    def histograms_of(a, b, x, y, table, ulp_bins, octave_bins, ulps, octaves):
        """Count δ of bits a, b and their decoded values by magnitude; the exponent of 2n + 1 is the bit length of n."""
        for i in range(len(x)):
            octave_bins[i] = np.uint8(distance(x, y, i, table) >> np.int32(23))
            ulp_bins[i] = np.uint8((np.float64(2 * np.int64(steps(a[i], b[i])) + 1).view(np.int64) >> 52) - 1023)
        for i in range(len(x)):
            octaves[i & 7, octave_bins[i]] += 1
            ulps[i & 7, ulp_bins[i]] += 1

    @kernel
    def tally_blocks(a, b, table, cleaned, numbers, places, mask, ulps, octaves, counts, sums, histograms):
        largest, dd, aa, bb = np.int32(0), 0.0, 0.0, 0.0
        for start in range(0, len(a), BLOCK):
            stop = min(start + BLOCK, len(a))
            left, right = a[start:stop], b[start:stop]
            n, odd = stop - start, 0
            changed = _differ(left, right, mask[start:stop])
            counts[_CHANGED] += changed
            for _ in range(2):
                if decoded:
                    x, y = numbers[0, :n], numbers[1, :n]
                    decode(left, table, x)
                    decode(right, table, y)
                else:
                    x, y = left, right
                part = sums_of(x, y, table)
                if part[1] + part[2] < np.inf:  # squares of float32 never leave float64
                    break
                odd = without_odd(left, right, table, cleaned[0], cleaned[1], counts)
                left, right = cleaned[0, :n], cleaned[1, :n]
            dd, aa, bb = dd + part[0], aa + part[1], bb + part[2]
            counts[_FINITE] += n - odd
            ulps[0, 0] -= odd
            if changed == 0:
                counts[_ZEROS] += n - odd
                ulps[0, 0] += n
                continue
            high, zeros = distances(x, y, table)
            counts[_ZEROS] += zeros - odd
            if high > largest:
                largest = high
                for i in range(n):
                    if distance(x, y, i, table) == high:
                        counts[_AT], sums[3] = start + i, np.float64(np.int32(high).view(np.float32))
                        break
            counts[_FURTHEST] = max(counts[_FURTHEST], np.int64(furthest(left, right)))
            if histograms:
                octaves[0, 0] -= zeros  # these pairs are in none
                histograms_of(left, right, x, y, table, places[0], places[1], ulps, octaves)
        sums[0] += dd
        sums[1] += aa
        sums[2] += bb

    return tally_blocks


_EIGHT_BITS = _tally_of(fast_numbers.looked_up, np.int8, decoded=True)
TALLIES = {
    "bfloat16": _tally_of(fast_numbers.bfloat16, np.int16),
    "float16": _tally_of(fast_numbers.float16, np.int16),
    "float32": _tally_of(fast_numbers.float32, np.int32),
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"), _EIGHT_BITS),
}
