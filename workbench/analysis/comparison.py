"""The comparison of two tensors: counts, exact sums and positions. Passes fill such values, and they can be merged.

Sums of squares are integers in units of 2⁻⁴⁸⁰⁰. Every product of two finite float64 is an integer in this unit, so
partial results from threads, files and machines add up to the same total in any order.

Cosine needs Σab, which follows from the other sums: 2·Σab = Σa² + Σb² − Σδ².
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from workbench.core.arrays import Ints
from workbench.core.dtypes import DType

_UNIT = 4800  #: sums are integers in units of 2**-_UNIT; even, so their roots have whole units too


@dataclass(eq=False)
class Comparison:
    """Comparison of the elements of one tensor on two sides. A pass fills it; read it afterwards.

    Attributes:
        a, b: element types.
        how: ``bits`` (one type); ``numbers`` (two types: values are compared, not bits); ``raw`` (a type whose
            elements share bytes: bytes are compared and counted); ``none`` (not comparable).
        seen: compared elements (bytes, if ``raw``).
        changed: elements that differ.
        same_number: elements with different bits of the same number: −0 and +0, NaN and another NaN.
        finite: pairs of two finite numbers, among ``looked``.
        looked: elements of pieces that differ somewhere. The other pieces are equal, and their NaNs are not counted
            (:func:`compare` counts them too if the tensor has changed).
        nan_a, nan_b, nan_new, inf_a, inf_b: numbers of elements; ``nan_new``: NaN only in b.
        max_at: position of the largest |δ| in the tensor, or ``None``; the first in row-major order.
        max_a, max_b: the two elements there.
        rounded: elements equal after rounding the wider of two float types to the narrower, or ``None``.
        furthest: largest distance in steps of the type between two finite numbers; that of −0 and +0 is 0.
        ulps: ``(66,)`` pairs of finite numbers by bit length of their distance in steps of the type: 0, 1, 2–3, 4–7 …;
            only for floats of one type, and only if histograms were requested.
        octaves: ``(256,)`` pairs with δ ≠ 0 by floor(log₂ |δ|) + 127; the first and last include all beyond. Only if
            histograms were requested.
        bands: ``(D, 64)`` changed elements along each axis.
        chunks: changed elements by (chunk row in a, chunk row in b).
        unread: elements that could not be read on one side.
    """

    a: DType
    b: DType
    shape: tuple[int, ...] = ()
    how: str = "bits"
    seen: int = 0
    changed: int = 0
    same_number: int = 0
    looked: int = 0
    finite: int = 0
    zeros: int = 0
    nan_a: int = 0
    nan_b: int = 0
    nan_new: int = 0
    inf_a: int = 0
    inf_b: int = 0
    rounded: int | None = None
    furthest: int = 0
    max_float: float = 0.0
    max_at: tuple[int, ...] | None = None
    max_a: Any = None
    max_b: Any = None
    squares: list[int] = field(default_factory=lambda: [0, 0, 0])
    ulps: Ints | None = None
    octaves: Ints | None = None
    bands: Ints | None = None
    chunks: dict[tuple[int, int], int] = field(default_factory=dict)
    unread: int = 0

    @property
    def equal(self) -> bool:
        """Whether every element was read and none differs."""
        return not self.changed and not self.unread

    @property
    def max_abs(self) -> float | int | None:
        """Largest |δ| over pairs of finite numbers; an integer for integer types.

        In types up to 32 bits, |δ| that are equal in float32 count as equal, and the first one is used.
        """
        if self.how in ("raw", "none"):
            return None
        return 0.0 if self.max_at is None else abs(self.max_b - self.max_a)

    @property
    def l2(self) -> float | None:
        """‖b − a‖₂."""
        return None if self.how in ("raw", "none") else _root(self.squares[0])

    @property
    def l2_a(self) -> float | None:
        """‖a‖₂ over the elements in ``looked``."""
        return None if self.how in ("raw", "none") else _root(self.squares[1])

    @property
    def l2_b(self) -> float | None:
        """‖b‖₂ over the elements in ``looked``."""
        return None if self.how in ("raw", "none") else _root(self.squares[2])

    @property
    def rel_l2(self) -> float | None:
        """‖b − a‖ / ‖a‖; infinite if a is zero and b is not; 0 for equal tensors."""
        if self.how in ("raw", "none"):
            return None
        dd, aa, _ = self.squares
        return ratio_of(dd, aa)

    @property
    def cosine(self) -> float | None:
        """Cosine of the angle between a and b, to about 1e-16 times the ratio of their norms; 1 for equal tensors.

        ``None`` if one of them is zero, or one norm is 2³² times the other.
        """
        if self.how in ("raw", "none"):
            return None
        dd, aa, bb = self.squares
        if dd == 0 and (aa or not self.looked):
            return 1.0
        if not min(aa, bb) or max(aa, bb).bit_length() - min(aa, bb).bit_length() > 64:
            return None
        root = math.isqrt(aa * bb)
        return max(-1.0, min(1.0, _quotient(aa + bb - dd, 2 * root)))

    @property
    def ulp_max(self) -> int | None:
        """Largest distance in steps of the type; ``None`` unless both sides have the same float type."""
        return self.furthest if self.how == "bits" and self.a.kind == "f" else None

    def tail(self) -> list[tuple[float, float]]:
        """Return ``(t, share of the elements with |δ| ≥ t)`` for powers of two ``t``, in descending order."""
        if self.octaves is None:
            return []
        filled = np.flatnonzero(self.octaves)
        if not len(filled) or not self.seen:
            return []
        found, total = [], 0
        for octave in range(int(filled[-1]), int(filled[0]) - 1, -1):
            total += int(self.octaves[octave])
            found.append((math.ldexp(1.0, octave - 127) if octave else 0.0, total / self.seen))
        return found


def exact(value: float, exponent: int = 0) -> int:
    """Return a float64 times a power of two, in units of ``2**-_UNIT``."""
    if value == 0.0:
        return 0
    mantissa, power = math.frexp(value)
    return int(mantissa * 2.0**53) << (power - 53 + exponent + _UNIT)


def ratio_of(above: int, below: int) -> float:
    """Return √(above / below) of two exact sums; 0 for 0 / 0, infinite if only ``below`` is 0."""
    if above == 0 or below == 0:
        return math.inf if above else 0.0
    shift = above.bit_length() - below.bit_length() - 128
    shift -= shift & 1
    quotient = (above << -shift) // below if shift < 0 else above // (below << shift)
    return _scaled(math.isqrt(quotient), shift // 2)


def _root(square: int) -> float:
    """Return the square root of an exact sum; infinite beyond float64."""
    if square <= 0:
        return 0.0
    shift = max(square.bit_length() - 128, 0) & ~1
    return _scaled(math.isqrt(square >> shift), (shift - _UNIT) // 2)


def _quotient(above: int, below: int) -> float:
    sign = -1.0 if above < 0 else 1.0
    shift = abs(above).bit_length() - below.bit_length() - 64
    quotient = (abs(above) << -shift) // below if shift < 0 else abs(above) // (below << shift)
    return sign * _scaled(quotient, shift)


def _scaled(value: int, exponent: int) -> float:
    try:
        return math.ldexp(float(value), exponent)
    except OverflowError:
        return math.inf
