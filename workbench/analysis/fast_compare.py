"""The differing piece in one pass, compiled by numba (the ``fast`` extra); the same results as the numpy way.

A piece is taken in blocks that stay in a core's first cache; each step is a loop of its own that the compiler turns
into wide instructions::

    bits ─ decode ─► float32 ─┬─ Σδ² Σa² Σb² in float64
                              ├─ |δ| ─► max, octave of |δ| ─┐
    bits ─ ordered keys ─► ulp distance ─► its octave ──────┴─► one byte ─► eight interleaved tables of counts

Counting one byte an element is what costs most: 16-bit types share a byte between both octaves (4 bits each), and the
few elements beyond its range are counted apart. Blocks with NaN or Inf take a slow path of their own.

Loops and kernels stay in one file: numba keeps compiled kernels until *their* file changes, and would go on using the
old code of a loop that was changed in another one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

__all__ = ["KINDS", "tally"]

Array = np.ndarray[Any, Any]

BLOCK = 1024
KINDS = {
    "bfloat16": 0, "float16": 1, "float8_e4m3fn": 2, "float8_e5m2": 2, "float8_e4m3fnuz": 2, "float8_e5m2fnuz": 2,
    "float32": 3,
}  # fmt: skip
_FAST = {"reassoc", "contract"}  # sums may be reordered; NaN, Inf and signed zeros keep their meaning


def _jit(function: Any) -> Any:
    return njit(nogil=True, cache=True, fastmath=_FAST, error_model="numpy")(function)


def tally(kind: int, a: Array, b: Array, table: Array, into: tuple[Array, ...], histograms: bool) -> None:
    """Fold one piece of two sides of one type into the tallies of :mod:`workbench.analysis.compare_numpy`.

    Args:
        kind: of :data:`KINDS`.
        a, b: bits, ``(N,)``.
        table: ``(256,) float32`` values of an 8-bit type; not used by others.
        into: mask ``(N,) uint8``, set to 1 where bits differ; ulps, octaves, counts, sums: added to, see there.
        histograms: whether ulps and octaves are wanted: they are half of the work.
    """
    (_wide if kind == 3 else _narrow)(kind, a, b, table, *into, histograms)


def _float_of(context, bits):
    """uint32 → the float32 of these bits, in a register: a view needs the numbers to be in memory."""
    del context, bits
    return types.float32(types.uint32), lambda _, builder, __, args: builder.bitcast(args[0], ir.FloatType())


def _bits_of(context, value):
    """float32 → its bits as int32."""
    del context, value
    return types.int32(types.float32), lambda _, builder, __, args: builder.bitcast(args[0], ir.IntType(32))


_as_float: Any = intrinsic(_float_of)
_as_bits: Any = intrinsic(_bits_of)


# ---- loops that become wide instructions -----------------------------------------------------------------------------


@_jit
def _shift(x, out):
    for i in range(len(x)):
        out[i] = np.uint32(x[i]) << np.uint32(16)


@_jit
def _half(x, out, scale):
    """float16 as float32: the fields moved, then the exponent's bias changed by a multiplication, exact throughout."""
    bits = out.view(np.uint32)
    for i in range(len(x)):
        bits[i] = (np.uint32(x[i]) & np.uint32(0x7FFF)) << np.uint32(13)
    for i in range(len(x)):
        out[i] = out[i] * scale
    for i in range(len(x)):
        big = bits[i] | np.uint32(0x7F800000)  # Inf and NaN had all exponent bits set
        bits[i] = (big if (x[i] & 0x7C00) == 0x7C00 else bits[i]) | (
            (np.uint32(x[i]) & np.uint32(0x8000)) << np.uint32(16)
        )


@_jit
def _look_up(x, table, out):
    for i in range(len(x)):
        out[i] = table[x[i]]


@_jit
def _differ(x, y, out):
    """Marks where bits differ; how many do."""
    found = np.int32(0)
    for i in range(len(x)):
        mark = np.uint8(x[i] != y[i])
        out[i] = mark
        found += np.int32(mark)
    return found


@_jit
def _top(x):
    found = np.int32(0)
    for i in range(len(x)):
        found = max(found, np.int32(x[i] & np.int32(0x7FFFFFFF)))
    return found


@_jit
def _below(x, limit):
    found = np.int64(0)
    for i in range(len(x)):
        found += x[i] < limit
    return found


@_jit
def _squares(x):
    """As _sums of equal sides."""
    found = 0.0
    for i in range(len(x)):
        p = np.float64(x[i])
        found += p * p
    return 0.0, found, found


@_jit
def _sums(x, y):
    dd, aa, bb = 0.0, 0.0, 0.0
    for i in range(len(x)):
        p, q = np.float64(x[i]), np.float64(y[i])
        t = q - p
        dd += t * t
        aa += p * p
        bb += q * q
    return dd, aa, bb


@_jit
def _sums_short(x, y):
    """As _sums, of bfloat16."""
    dd, aa, bb = 0.0, 0.0, 0.0
    for i in range(len(x)):
        p = np.float64(_as_float(np.uint32(np.uint32(x[i]) << np.uint32(16))))
        q = np.float64(_as_float(np.uint32(np.uint32(y[i]) << np.uint32(16))))
        t = q - p
        dd += t * t
        aa += p * p
        bb += q * q
    return dd, aa, bb


@_jit
def _distance_short(x, y):
    """As _distance, of bfloat16; the distances themselves are not kept."""
    high, zeros = np.int32(0), np.int32(0)
    for i in range(len(x)):
        p = _as_float(np.uint32(np.uint32(x[i]) << np.uint32(16)))
        q = _as_float(np.uint32(np.uint32(y[i]) << np.uint32(16)))
        bits = _as_bits(np.float32(abs(np.float32(q - p))))
        high = max(high, bits)
        zeros += np.int32(bits < np.int32(1))
    return high, zeros


@_jit
def _distance(x, y, out):
    """|δ|; the largest, as bits, and how many are 0."""
    bits = out.view(np.int32)
    for i in range(len(x)):
        out[i] = abs(y[i] - x[i])
    high, zeros = np.int32(0), np.int32(0)
    for i in range(len(x)):
        high = max(high, bits[i])
        zeros += np.int32(bits[i] < np.int32(1))
    return high, zeros


@_jit
def _ulps_narrow(x, y, sign, out):
    for i in range(len(x)):
        p, q = np.int32(x[i]), np.int32(y[i])
        p = p if p < sign else sign - p
        q = q if q < sign else sign - q
        out[i] = np.float32(abs(np.int32(p - q)))


@_jit
def _ulps_wide(x, y, out):
    """The leading bit of each distance as a float32: what follows it is cleared, so that nothing rounds upwards."""
    for i in range(len(x)):
        p, q = np.int32(x[i]), np.int32(y[i])
        p = p if p >= 0 else np.int32(np.int32(-0x80000000) - p)
        q = q if q >= 0 else np.int32(np.int32(-0x80000000) - q)
        d = np.uint32(np.uint32(p) - np.uint32(q)) if p > q else np.uint32(np.uint32(q) - np.uint32(p))
        out[i] = np.float32(d & ~(d >> np.uint32(1)))


@_jit
def _furthest_narrow(x, y, sign):
    found = np.int32(0)
    for i in range(len(x)):
        p, q = np.int32(x[i]), np.int32(y[i])
        p = p if p < sign else sign - p
        q = q if q < sign else sign - q
        found = max(found, np.int32(abs(np.int32(p - q))))
    return found


@_jit
def _furthest_wide(x, y):
    found = np.uint32(0)
    for i in range(len(x)):
        p, q = np.int32(x[i]), np.int32(y[i])
        p = p if p >= 0 else np.int32(np.int32(-0x80000000) - p)
        q = q if q >= 0 else np.int32(np.int32(-0x80000000) - q)
        d = np.uint32(np.uint32(p) - np.uint32(q)) if p > q else np.uint32(np.uint32(q) - np.uint32(p))
        found = max(found, d)
    return found


@_jit
def _both(octave, ulp, base, out):
    for i in range(len(octave)):
        low = min(max(np.int32((octave[i] >> np.int32(23)) - base), np.int32(0)), np.int32(15))
        high = min(max(np.int32((ulp[i] >> np.int32(23)) - np.int32(126)), np.int32(0)), np.int32(15))
        out[i] = np.uint8(low | (high << np.int32(4)))


@_jit
def _octave(x, base, out):
    for i in range(len(x)):
        out[i] = np.uint8(max(np.int32(x[i] >> np.int32(23)) - base, np.int32(0)))


@_jit
def _tables(words, tables):
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


# ---- what is rare ----------------------------------------------------------------------------------------------------


@_jit
def _without_odd(x, y, xs, ys, fa, fb, counts):
    """Count NaN and Inf; such pairs become 0 on both sides. Returns how many there were."""
    odd = 0
    for i in range(len(x)):
        xs[i], ys[i] = x[i], y[i]
        p, q = fa[i], fb[i]
        nan_a, nan_b = p != p, q != q
        inf_a, inf_b = abs(p) == np.inf, abs(q) == np.inf
        if not (nan_a or nan_b or inf_a or inf_b):
            continue
        counts[1] += nan_a and nan_b and x[i] != y[i]
        counts[10] += x[i] != y[i]
        counts[2] += nan_a
        counts[3] += nan_b
        counts[4] += nan_b and not nan_a
        counts[5] += inf_a
        counts[6] += inf_b
        xs[i] = ys[i] = 0
        fa[i] = fb[i] = np.float32(0)
        odd += 1
    return odd


@_jit
def _first(x, value):
    for i in range(len(x)):
        if x[i] == value:
            return i
    return -1


@_jit
def _flush(tables, base, ulps, octaves):
    """Counts of shared bytes into both histograms; the lowest octave holds what is counted apart."""
    for value in range(256):
        found = 0
        for k in range(8):
            found += tables[k, value]
            tables[k, value] = 0
        ulps[value >> 4] += found
        if value & 15 and base + (value & 15) < 256:
            octaves[base + (value & 15)] += found


# ---- kernels ---------------------------------------------------------------------------------------------------------


@_jit
def _narrow(kind, a, b, table, mask, ulps, octaves, counts, sums, histograms):
    """Types of 8 and 16 bits."""
    sign = np.int32(1) << np.int32(8 * a.itemsize - 1)
    scale = np.float32(2.0**112)
    fa_all, fb_all = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    d_all, k_all = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    xs, ys = np.empty(BLOCK, a.dtype), np.empty(BLOCK, a.dtype)
    packed = np.zeros(BLOCK, np.uint8)
    tables = np.zeros((8, 256), np.int32)
    base, largest, dd, aa, bb = np.int32(0), np.int32(0), 0.0, 0.0, 0.0
    fa, fb, d, k = fa_all, fb_all, d_all, k_all
    di, ki = d.view(np.int32), k.view(np.int32)
    for start in range(0, len(a), BLOCK):
        stop = min(start + BLOCK, len(a))
        n = stop - start
        x, y, marks = a[start:stop], b[start:stop], mask[start:stop]
        if n < BLOCK:  # the last; a slice costs as much as some hundred elements
            fa, fb, d, k = fa_all[:n], fb_all[:n], d_all[:n], k_all[:n]
            di, ki = d.view(np.int32), k.view(np.int32)
        changed = _differ(x, y, marks)
        counts[0] += changed
        if kind == 0:
            part = _sums_short(x, y)
        else:
            if kind == 1:
                _half(x, fa, scale)
                _half(y, fb, scale)
            else:
                _look_up(x, table, fa)
                _look_up(y, table, fb)
            part = _sums(fa, fb) if changed else _squares(fa)
        odd = 0
        if not part[1] + part[2] < np.inf:  # squares of float32 never leave float64: there is a NaN or an Inf
            if kind == 0:
                _shift(x, fa.view(np.uint32))
                _shift(y, fb.view(np.uint32))
            odd = _without_odd(x, y, xs, ys, fa, fb, counts)
            x, y = xs[:n], ys[:n]
            part = _sums(fa, fb)
        dd += part[0]
        aa += part[1]
        bb += part[2]
        counts[7] += n - odd
        if changed == 0:
            ulps[0] += n - odd
            counts[9] += n - odd
            continue
        if kind == 0:
            high, zeros = _distance_short(x, y)
            if histograms or high > largest:
                _shift(x, fa.view(np.uint32))
                _shift(y, fb.view(np.uint32))
                _distance(fa, fb, d)
        else:
            high, zeros = _distance(fa, fb, d)
        if high > largest:
            at = _first(di, high)
            counts[8], sums[3] = start + at, np.float64(d[at])
            largest = high
        counts[9] += zeros - odd
        counts[12] = max(counts[12], np.int64(_furthest_narrow(x, y, sign)))
        if not histograms:
            continue
        top = np.int32(high >> np.int32(23))
        if top > base + 15 or (top < base + 12 and base > 0 and high > 0):
            _flush(tables, base, ulps, octaves)
            base = max(np.int32(top - 14), np.int32(0))
        _ulps_narrow(x, y, sign, k)
        if _top(ki) >= 0x47000000:  # distances from 2**15 on do not fit the shared byte
            beyond = n - _below(ki, np.int32(0x47000000))
            more = n - _below(ki, np.int32(0x47800000))
            ulps[15] -= beyond
            ulps[16] += beyond - more
            ulps[17] += more
        _both(di, ki, base, packed)
        packed[n:] = 0
        _tables(packed.view(np.uint64), tables)
        ulps[0] -= BLOCK - n + odd
        low = _below(di, np.int32((base + 1) << 23)) - zeros
        octave = base
        while low > 0 and octave >= 0:
            found = _below(di, np.int32((octave + 1) << 23)) - max(_below(di, np.int32(octave << 23)), zeros)
            octaves[octave] += found
            low -= found
            octave -= 1
    _flush(tables, base, ulps, octaves)
    sums[0] += dd
    sums[1] += aa
    sums[2] += bb


@_jit
def _wide(kind, a, b, table, mask, ulps, octaves, counts, sums, histograms):
    """float32, whose ulp distances need more than four bits."""
    fa_all, fb_all = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    d_all, k_all = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    xs, ys = np.empty(BLOCK, a.dtype), np.empty(BLOCK, a.dtype)
    packed = np.zeros(BLOCK, np.uint8)
    near, far = np.zeros((8, 256), np.int32), np.zeros((8, 256), np.int32)
    largest, dd, aa, bb = np.int32(0), 0.0, 0.0, 0.0
    d, k = d_all, k_all
    di, ki = d.view(np.int32), k.view(np.int32)
    for start in range(0, len(a), BLOCK):
        stop = min(start + BLOCK, len(a))
        n = stop - start
        x, y, marks = a[start:stop], b[start:stop], mask[start:stop]
        if n < BLOCK:
            d, k = d_all[:n], k_all[:n]
            di, ki = d.view(np.int32), k.view(np.int32)
        changed = _differ(x, y, marks)
        counts[0] += changed
        fa, fb = x.view(np.float32), y.view(np.float32)
        odd = 0
        part = _sums(fa, fb) if changed else _squares(fa)
        if not part[1] + part[2] < np.inf:  # as above
            fa_all[:n], fb_all[:n] = fa, fb
            odd = _without_odd(x, y, xs, ys, fa_all[:n], fb_all[:n], counts)
            x, y, fa, fb = xs[:n], ys[:n], fa_all[:n], fb_all[:n]
            part = _sums(fa, fb)
        dd += part[0]
        aa += part[1]
        bb += part[2]
        counts[7] += n - odd
        if changed == 0:
            ulps[0] += n - odd
            counts[9] += n - odd
            continue
        high, zeros = _distance(fa, fb, d)
        if high > largest:
            at = _first(di, high)
            counts[8], sums[3] = start + at, np.float64(d[at])
            largest = high
        counts[9] += zeros - odd
        counts[12] = max(counts[12], np.int64(_furthest_wide(x.view(np.int32), y.view(np.int32))))
        if not histograms:
            continue
        _ulps_wide(x.view(np.int32), y.view(np.int32), k)
        packed[n:] = 0
        _octave(di, np.int32(0), packed[:n])
        _tables(packed.view(np.uint64), far)
        octaves[0] -= BLOCK - n + zeros
        _octave(ki, np.int32(126), packed[:n])
        _tables(packed.view(np.uint64), near)
        ulps[0] -= BLOCK - n + odd
    for value in range(256):
        for t in range(8):
            octaves[value] += far[t, value]
            if value < len(ulps):
                ulps[value] += near[t, value]
    sums[0] += dd
    sums[1] += aa
    sums[2] += bb
