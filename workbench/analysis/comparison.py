"""How two tensors compare: counts, exact sums, places. A value that passes fill and add up.

Sums of squares are integers in units of 2⁻⁴⁸⁰⁰, in which every product of two finite float64 is whole: partial results
from threads, files and machines make the same total in any order.

Cosine needs Σab, and has it: 2·Σab = Σa² + Σb² − Σδ².
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from workbench.core.dtypes import DType

__all__ = ["Comparison", "exact", "ratio_of"]

Ints = np.ndarray[Any, np.dtype[np.int64]]

_UNIT = 4800  #: sums are integers in units of 2**-_UNIT; even, so that their roots are whole units too


@dataclass(eq=False)
class Comparison:
    """How the elements of one tensor on two sides compare. Filled by a pass; to be read afterwards.

    Attributes:
        a, b: element types.
        how: ``bits`` (one type); ``numbers`` (two types: values are compared, not bits); ``raw`` (a type whose
            elements share bytes: bytes are compared and counted); ``none`` (nothing to compare by).
        seen: elements (bytes, if ``raw``) that were compared.
        changed: those that differ.
        same_number: differing bits that mean the same number: −0 and +0, NaN and another NaN.
        finite: pairs of two finite numbers, among ``looked``.
        looked: elements of pieces that differ somewhere; the rest is equal, and its NaN are not counted
            (:func:`compare` looks at them too once the tensor has changed at all).
        nan_a, nan_b, nan_new, inf_a, inf_b: elements; ``nan_new`` are NaN in b only.
        max_at: position of the largest |δ| in the tensor, or ``None``; the first in row-major order.
        max_a, max_b: the two elements there.
        rounded: elements equal after rounding the wider of two float types to the narrower, or ``None``.
        furthest: largest distance in steps of the type between two finite numbers; −0 and +0 are 0 apart.
        ulps: ``(66,)`` pairs of finite numbers by bit length of their distance in steps of the type: 0, 1, 2–3, 4–7 …;
            only for floats of one type, and only where histograms were asked for.
        octaves: ``(256,)`` pairs with δ ≠ 0 by floor(log₂ |δ|) + 127; the first and last take what lies beyond. Only
            where histograms were asked for.
        bands: ``(D, 64)`` changed elements along each axis.
        chunks: changed elements by (chunk row in a, chunk row in b).
        unread: elements that could not be read on one of the sides.
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
        """Largest |δ| over pairs of finite numbers ; an integer for integer types.

        Of types up to 32 bits, values that are one in float32 count as equal, and the first is taken.
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
        """‖a‖₂ over the elements looked at."""
        return None if self.how in ("raw", "none") else _root(self.squares[1])

    @property
    def l2_b(self) -> float | None:
        """‖b‖₂ over the elements looked at."""
        return None if self.how in ("raw", "none") else _root(self.squares[2])

    @property
    def rel_l2(self) -> float | None:
        """‖b − a‖ / ‖a‖; infinite where a is zero and b is not; 0 for equal tensors."""
        if self.how in ("raw", "none"):
            return None
        dd, aa, _ = self.squares
        return ratio_of(dd, aa)

    @property
    def cosine(self) -> float | None:
        """Cosine of the angle between a and b, to about 1e-16 times the ratio of their norms; 1 for equal tensors.

        ``None`` where one of them is zero, or 2³² times as long as the other.
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
        """Largest distance in steps of the type; ``None`` unless both sides are of one float type."""
        return self.furthest if self.how == "bits" and self.a.kind == "f" else None

    def tail(self) -> list[tuple[float, float]]:
        """``(t, share of the elements with |δ| ≥ t)`` for powers of two ``t``, falling."""
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
    """A float64 times a power of two, in units of ``2**-_UNIT``."""
    if value == 0.0:
        return 0
    mantissa, power = math.frexp(value)
    return int(mantissa * 2.0**53) << (power - 53 + exponent + _UNIT)


def ratio_of(above: int, below: int) -> float:
    """√(above / below) of two exact sums; 0 for 0 / 0, infinite where only ``below`` is 0."""
    if above == 0 or below == 0:
        return math.inf if above else 0.0
    shift = above.bit_length() - below.bit_length() - 128
    shift -= shift & 1
    quotient = (above << -shift) // below if shift < 0 else above // (below << shift)
    return _scaled(math.isqrt(quotient), shift // 2)


def _root(square: int) -> float:
    """Square root of an exact sum; infinite beyond float64."""
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
