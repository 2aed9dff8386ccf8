"""Casts between float types, rounded to nearest, ties to even, and their errors.

::

    float32   s eeeeeeee mmmmmmmmmmmmmmmm|mmmmmmm     bfloat16 keeps the upper half:
                              bfloat16   |dropped     + 0x7fff + (lowest kept bit), then >> 16

    float32   s eeeeeeee mmm|mmmmmmmmmmmmmmmmmmmm      e4m3fn (2⁻⁹ … 448): normal codes are the upper bits, rounded,
                                                       exponent − 120; below 2⁻⁶, multiples of 2⁻⁹, rounded

Every cast goes through float32, as torch's do (float64 → bfloat16 is rounded twice there, and so it is here). Overflows
become infinite. NaN remain NaN with the same sign; torch makes them 0x7fc0 or 0xffff, depending on the instructions
used.

Source: torch 2.13, ``c10/util/BFloat16.h`` (``round_to_nearest_even``), ``c10/util/Half.h``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench.core.arrays import Array
from workbench.core.decoding.floats import fp8_table
from workbench.core.dtypes import DType, by_name
from workbench.errors import UnsupportedFormatError, UsageError

GRAIN = 32_768  #: elements up to which torch starts no threads (``at::internal::GRAIN_SIZE``)
FLOATS = ("bfloat16", "float16", "float32")  #: types that can be written
SOURCES = (*FLOATS, "float64")  #: types that are cast; integers and 8-bit floats (which have scales) stay unchanged
LARGEST = 448.0  #: of e4m3fn
_SMALLEST_NORMAL = np.uint32(0x3C800000)  # 2⁻⁶
_REBIAS = np.uint32(120 << 3)
_TO_STEPS = np.float32(1 << 14)  # whose last digit is 2⁻⁹
_STEPS = _TO_STEPS.view(np.uint32)
_NAN, _LARGEST_CODE = np.uint8(0x7F), np.uint32(0x7E)


@dataclass
class CastError:
    """What a cast changed, summed over all elements, and what adapters changed before it.

    Attributes:
        elements: number of elements cast.
        changed: number of elements whose value changed (NaN that remain NaN are not counted).
        overflowed: number of finite elements that became infinite; they also count as changed, or as updated.
        max_abs: largest difference of the elements that remained finite.
        updated: number of elements whose value adapters changed, in float32 and before the cast.
        max_update: largest difference of the updated elements that remained finite.
    """

    elements: int = 0
    changed: int = 0
    overflowed: int = 0
    max_abs: float = 0.0
    updated: int = 0
    max_update: float = 0.0

    def merge(self, other: CastError) -> None:
        """Add another part of the tensor."""
        self.elements += other.elements
        self.changed += other.changed
        self.overflowed += other.overflowed
        self.max_abs = max(self.max_abs, other.max_abs)
        self.updated += other.updated
        self.max_update = max(self.max_update, other.max_update)


def target(name: object) -> DType:
    """Return the target type of a cast: ``bf16``, ``f16``, ``fp16``, torch's names, or a ``torch.dtype``.

    Raises:
        UsageError: any other type.
    """
    short = {"bf16": "bfloat16", "fp16": "float16", "f16": "float16", "fp32": "float32", "f32": "float32"}
    try:
        found = by_name(short.get(str(name), name))
    except UnsupportedFormatError:
        found = None
    if found is None or found.name not in FLOATS:
        raise UsageError(f"casting to {found or repr(name)} is not supported; choose {', '.join(FLOATS)}")
    return found


def cast_codes(codes: Array, name: object) -> Array:
    """Return the types of tensors after a cast: 16, 32 and 64-bit floats get the new type, others keep their own.

    Args:
        codes: ``(T,) uint8``, of :mod:`workbench.core.dtypes`.

    Raises:
        UsageError: as :func:`target`.
    """
    wanted, found = target(name), codes.copy()
    found[np.isin(codes, [by_name(source).code for source in SOURCES])] = wanted.code
    return found


def cast(raw: Array, source: DType, wanted: DType) -> tuple[Array, CastError]:
    """Cast elements between float types, both given as unsigned integers of their bits.

    Args:
        raw: flat, of ``source.raw``.

    Returns:
        the new bits, and what changed.
    """
    before = widened(raw, source)
    with np.errstate(over="ignore", invalid="ignore"):
        out = narrowed(before if before.dtype == np.float32 else before.astype(np.float32), wanted)
    if wanted.name == "float32" and source.bits <= 32:
        return out, CastError(len(raw))
    return out, costs(before, widened(out, wanted))


def costs(before: Array, after: Array) -> CastError:
    """Return the error of a cast; both arguments are flat values of one type."""
    error = CastError(len(before))
    with np.errstate(over="ignore", invalid="ignore"):
        gaps = np.subtract(after, before)  # exact: the digits that were dropped; zero only where both are equal
        np.abs(gaps, out=gaps)
        largest = float(gaps.max(initial=0.0))
        if np.isfinite(largest):
            error.changed, error.max_abs = int(np.count_nonzero(gaps)), largest
        else:
            _count_odd(error, before, after)
    return error


def _count_odd(error: CastError, before: Array, after: Array) -> None:
    """Count the cast's errors if some elements are, or become, infinite or NaN."""
    differ = after != before
    differ &= ~(np.isnan(before) & np.isnan(after))
    old, new = before[differ], after[differ]
    finite = np.isfinite(new)
    error.changed = len(old)
    error.overflowed = int(np.count_nonzero(~finite & np.isfinite(old)))
    error.max_abs = float(np.abs(old[finite] - new[finite]).max(initial=0.0))


def widened(raw: Array, dtype: DType) -> Array:
    """Return the values in a numpy type that holds them exactly: float64 for float64, otherwise float32."""
    if dtype.bits == 8 and dtype.kind == "f":
        return np.take(fp8_table(dtype.name), raw)
    if dtype.name == "bfloat16":
        wide = raw.astype(np.uint32)
        wide <<= np.uint32(16)
        return wide.view(np.float32)
    if dtype.name == "float16":
        return _converted(raw.view(np.float16), np.float32)
    return raw.view(dtype.numpy)


def narrowed(single: Array, wanted: DType) -> Array:
    """Return the bits of the nearest values in one of :data:`FLOATS` or in e4m3fn, from float32."""
    if wanted.name == "float8_e4m3fn":
        return _e4m3(single)
    if wanted.name == "float32":
        return single.view(wanted.raw)
    if wanted.name == "float16":
        return _converted(single, np.float16).view(wanted.raw)
    bits = single.view(np.uint32)
    nan = np.isnan(single)
    rounded = bits >> np.uint32(16)  # in place from here on: pages of new arrays cost more than the arithmetic
    rounded &= np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += bits
    rounded >>= np.uint32(16)
    out = rounded.astype(np.uint16)
    if nan.any():  # rounding could carry a NaN over to zero; keep its sign and set the quiet bit
        out[nan] = (bits[nan] >> np.uint32(16)).astype(np.uint16) | np.uint16(0x0040)
    return out


def _e4m3(single: Array) -> Array:
    """Return the nearest codes of flat float32 values (``uint8``), ties to even; NaN keep their sign.

    Values larger than 448, including infinite ones, become 448: torch's cast of values clamped to ±448.
    """
    bits = single.view(np.uint32)
    size = bits & np.uint32(0x7FFFFFFF)
    normal = ((size + np.uint32(0x7FFFF) + ((size >> np.uint32(20)) & np.uint32(1))) >> np.uint32(20)) - _REBIAS
    with np.errstate(invalid="ignore"):  # the addition rounds to multiples of 2⁻⁹
        steps = (size.view(np.float32) + _TO_STEPS).view(np.uint32) - _STEPS
    out = np.minimum(np.where(size < _SMALLEST_NORMAL, steps, normal), _LARGEST_CODE).astype(np.uint8)
    nan = np.isnan(single)
    if nan.any():
        out[nan] = _NAN
    return out | (bits >> np.uint32(24)).astype(np.uint8) & np.uint8(0x80)


def _converted(values: Array, wanted: type[np.floating[Any]]) -> Array:
    """Convert between float16 and float32 with torch, which uses the processor's instructions (40 times as fast as
    numpy 2.4).
    """
    import torch

    out = np.empty(len(values), wanted)
    source = torch.from_numpy(values if values.flags.writeable else values.copy())
    target = torch.from_numpy(out)
    for at in range(0, len(out), GRAIN):
        target[at : at + GRAIN].copy_(source[at : at + GRAIN])
    return out
