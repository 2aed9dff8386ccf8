"""Types of few bits as a table: the value of every bit pattern, how often each occurs, and the resulting statistics.

Counts of all patterns of a type of 8 or 16 bits determine all of its elements' statistics exactly.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from workbench.analysis.numbers import Decoder
from workbench.core.arrays import Array
from workbench.core.decoding.floats import fp8_table
from workbench.core.dtypes import DType

if TYPE_CHECKING:
    from workbench.analysis.moment import Moment

COUNTED = 31 << 10  #: elements that torch counts at a time: from 32 Ki on it starts threads
CONVERTED = 128 << 10  #: elements that numpy counts at a time, as 8 bytes each: they stay in a core's cache
WORTH_TORCH = 1 << 20  #: bytes of one piece from which importing torch to count them pays


class FloatBits(NamedTuple):
    """The limits of a float type's ordinary numbers, as patterns without the sign bit.

    Attributes:
        special: the first pattern that is not a finite number.
        infinite: whether that one is infinity (else NaN).
        normal: the first pattern that is not zero or subnormal.
        tiny: its value.
    """

    special: int
    infinite: bool
    normal: int
    tiny: float


LAYOUTS = {
    "bfloat16": FloatBits(0x7F80, True, 0x0080, 2.0**-126),
    "float16": FloatBits(0x7C00, True, 0x0400, 2.0**-14),
    "float32": FloatBits(0x7F800000, True, 0x00800000, 2.0**-126),
    "float64": FloatBits(0x7FF << 52, True, 1 << 52, 2.0**-1022),
    "float8_e4m3fn": FloatBits(0x7F, False, 0x08, 2.0**-6),
    "float8_e5m2": FloatBits(0x7C, True, 0x04, 2.0**-14),
}
_TINY = {"float8_e4m3fnuz": 2.0**-7, "float8_e5m2fnuz": 2.0**-15, "float8_e8m0fnu": 0.0}


def raw_only(dtype: DType) -> bool:
    """Return whether elements share a byte, so they have no numeric values."""
    return dtype.packed or dtype.name == "float4_e2m1fn_x2"


def float_steps(a: Array, b: Array) -> Array:
    """Count the steps between two floats, given as bits, in their type; both zeros are one value."""
    p, q = _ordered(a), _ordered(b)
    unsigned = f"u{p.itemsize}"
    found: Array = np.maximum(p, q).view(unsigned) - np.minimum(p, q).view(unsigned)
    return found


def _ordered(bits: Array) -> Array:
    """Convert float bits to signed integers in the order of the floats: the magnitude, negated if the sign is set."""
    found: Array = bits.view(f"i{bits.itemsize}").astype(np.int32 if bits.itemsize < 4 else np.int64)
    sign = found >> (8 * bits.itemsize - 1)  # −1 or 0
    found &= (1 << (8 * bits.itemsize - 1)) - 1
    found ^= sign
    found -= sign
    return found


def pattern_counts(bits: Array) -> Array:
    """Count how often each byte occurs, ``(256,) int64``."""
    found = np.zeros(256, np.int64)
    if "torch" in sys.modules or bits.nbytes >= WORTH_TORCH:  # five times faster than numpy
        import torch

        copy = np.empty(COUNTED, np.uint8)
        for start in range(0, len(bits), COUNTED):
            part = bits[start : start + COUNTED]
            np.copyto(copy[: len(part)], part)  # torch warns of memory that cannot be written
            found += torch.bincount(torch.from_numpy(copy[: len(part)]), minlength=256).numpy()
        return found
    for start in range(0, len(bits), CONVERTED):
        found += np.bincount(bits[start : start + CONVERTED], minlength=256)
    return found


def fold_counts(state: Moment, dtype: DType, counts: Array) -> None:
    """Take in counts of all bit patterns of a type of 8 or 16 bits (``state.count`` is the caller's)."""
    values = pattern_values(dtype)
    nonzero = np.flatnonzero(counts)
    values, times = values[nonzero], counts[nonzero]
    state.zero += int(times[values == 0].sum())
    if values.dtype.kind == "f":
        tiny = LAYOUTS[dtype.name].tiny if dtype.name in LAYOUTS else _TINY[dtype.name]
        state.subnormal += int(times[(np.abs(values) < tiny) & (values != 0)].sum())
        state.nan += int(times[np.isnan(values)].sum())
        state.posinf += int(times[values == np.inf].sum())
        state.neginf += int(times[values == -np.inf].sum())
        finite = np.isfinite(values)
        values, times = values[finite], times[finite]
    n = int(times.sum())
    if not n:
        return
    total, l1 = (times * values).sum(), (times * np.abs(values)).sum()
    mean = float(total) / n
    centred = values - mean
    whole = int(total) if values.dtype.kind == "i" else None
    m2 = float((times * (centred * centred)).sum())
    state.add(n, mean, m2, l1.item(), values.min().item(), values.max().item(), whole)


def pattern_value(name: str, pattern: int) -> float:
    """Return the value of one pattern of a float type."""
    if name.startswith("float8"):
        return float(fp8_table(name)[pattern])
    if name == "bfloat16":
        return float(np.uint32(pattern << 16).view(np.float32))
    bits = LAYOUTS[name].special.bit_length() + 1
    return float(np.array(pattern, f"<u{bits // 8}").view(f"<f{bits // 8}")[()])


@cache
def pattern_values(dtype: DType) -> Array:
    """Return the value of every bit pattern, ``(2**bits,)``: float64, or int64 for integers and bool."""
    codes = np.arange(1 << dtype.bits, dtype=dtype.raw)
    if dtype.name == "bool":
        return (codes != 0).astype(np.int64)
    if dtype.kind == "f" and dtype.bits == 8:
        return fp8_table(dtype.name).astype(np.float64)
    if dtype.kind == "f":
        with np.errstate(invalid="ignore"):
            return Decoder(dtype).numbers(codes.view(dtype.numpy)).astype(np.float64)
    signed = dtype.numpy_name or ("i1" if dtype.name == "qint8" else dtype.raw)
    return codes.view(signed).astype(np.int64)
