"""Statistics of a piece with numpy alone: every type, a block at a time, in float64.

The bits are enough. Read as signed and unsigned integers, floats are ordered on either side of zero, so four
reductions over the bits give the range. Below one pattern, numbers are zero or subnormal; from another one on, they are
infinite or NaN::

    unsigned   0 ─ smallest ─ … ─ largest │ −0 ─ … ─ most negative        umin, umax
    signed     −0 ─ … ─ most negative │ 0 ─ smallest ─ … ─ largest        smin, smax

Types of 8 bits are counted: every statistic follows exactly from the 256 counts
(:mod:`workbench.analysis.bit_patterns`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from workbench.analysis.bit_patterns import LAYOUTS, fold_counts, pattern_counts, pattern_value, raw_only
from workbench.analysis.numbers import Decoder
from workbench.core.arrays import Array
from workbench.core.dtypes import DType

if TYPE_CHECKING:
    from workbench.analysis.moment import Moment

BLOCK = 32 << 10  #: elements at a time: 256 KiB of float64 stay in a core's cache
SMALL, HUGE = 1e-140, 1e140  #: magnitudes beyond which squares may leave float64


def fold(state: Moment, dtype: DType, bits: Array) -> None:
    """Take in elements: flat, contiguous, of the raw type."""
    state.count += len(bits)
    if raw_only(dtype) or not len(bits):
        return
    if dtype.bits == 8:
        fold_counts(state, dtype, pattern_counts(bits))
        return
    decoder = Decoder(dtype)
    kind = dtype.numpy_name or ("<i4" if dtype.name == "qint32" else dtype.raw)
    for start in range(0, len(bits), BLOCK):
        block = bits[start : start + BLOCK]
        block = block if block.flags.aligned else block.copy()
        if dtype.kind not in "fc":
            _integers(state, block.view(kind))
            continue
        with np.errstate(invalid="ignore"):  # signalling NaN, which the conversion makes quiet
            values = decoder.numbers(block if dtype.kind == "c" else block.view(dtype.numpy)).astype(np.float64)
        if dtype.kind == "c":  # magnitudes are not subnormal in any stored type
            subnormal = state.subnormal
            _floats(state, "float64", values.view(np.uint64), values)
            state.subnormal = subnormal
        else:
            _floats(state, dtype.name, block, values)


def ordered(umin: int, umax: int, smin: int, smax: int, sign: int) -> tuple[int, int, int, int]:
    """Return the bit patterns of the smallest and the largest value, and of the smallest and the largest magnitude.

    Args:
        umin, umax, smin, smax: the range of the bits as unsigned and as signed integers.
        sign: the pattern of the sign alone.
    """
    negative, positive = umax >= sign, smax >= 0
    lowest, highest = umax if negative else umin, smax if positive else umin
    least = min(umin if positive else sign, smin + sign if negative else sign)
    most = max(smax if positive else 0, umax - sign if negative else 0)
    return lowest, highest, least, most


def _floats(state: Moment, name: str, bits: Array, values: Array) -> None:
    """Take in a block: its bits, and the same as float64, which may be overwritten."""
    layout, sign = LAYOUTS[name], 1 << (bits.itemsize * 8 - 1)
    magnitude = bits & bits.dtype.type(sign - 1)
    zero = len(bits) - int(np.count_nonzero(magnitude))
    state.zero += zero
    state.subnormal += int(np.count_nonzero(magnitude < bits.dtype.type(layout.normal))) - zero
    if magnitude.max() >= layout.special:
        finite = magnitude < bits.dtype.type(layout.special)
        state.nan += int(np.count_nonzero(magnitude > bits.dtype.type(layout.special)))
        state.posinf += int(np.count_nonzero(values == np.inf))
        state.neginf += int(np.count_nonzero(values == -np.inf))
        bits, values = bits[finite], values[finite]
        if not len(bits):
            return
    signed = bits.view(f"i{bits.itemsize}")
    lowest, highest, _, _ = ordered(int(bits.min()), int(bits.max()), int(signed.min()), int(signed.max()), sign)
    low, high = pattern_value(name, lowest), pattern_value(name, highest)
    if not SMALL < max(abs(low), abs(high)) < HUGE:
        values = values.astype(np.longdouble)  # its exponent is wide enough for the squares
    mean, l1 = values.mean(), np.abs(values).sum()
    values -= mean
    state.add(len(bits), mean, np.einsum("i,i->", values, values), l1, low, high)


# ---- integers --------------------------------------------------------------------------------------------------------


def _integers(state: Moment, values: Array) -> None:
    low, high = int(values.min()), int(values.max())
    state.zero += len(values) - int(np.count_nonzero(values)) if low <= 0 <= high else 0
    total = _exact(values)
    l1 = total if low >= 0 else -total if high <= 0 else total - 2 * _exact(np.minimum(values, 0))
    steps: Array
    if values.itemsize == 8:  # exact for any two 64-bit integers
        steps = values.view(np.uint64) - np.uint64(low % (1 << 64))
    else:
        steps = values.astype(np.int64) - low
    centred = steps.astype(np.float64)
    centred -= centred.mean()
    state.add(len(values), 0.0, np.square(centred).sum(), l1, low, high, total)


def _exact(values: Array) -> int:
    if values.itemsize < 8:
        return int(values.sum(dtype=np.int64))
    low, high = values & values.dtype.type(0xFFFFFFFF), values >> values.dtype.type(32)
    return (int(high.sum()) << 32) + int(low.sum())
