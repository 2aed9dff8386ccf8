"""Find a constant factor: the interval that every element allows, then a proof by computation.

::

    a₁  ├──────────────┤
    a₂        ├─────────────┤           intervals of factors c that round(c·a) == b allows
    a₃     ├───────┤
              ▲▲▲▲▲                     1/8? 1/3? 0.1? …: the simplest numbers here are tested
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from math import inf, isfinite, log2, sqrt
from typing import Any

import numpy as np

from workbench.analysis.patterns.evidence import MARGIN, steps
from workbench.analysis.patterns.found import Pattern, made
from workbench.analysis.patterns.local import Difference
from workbench.analysis.patterns.read import bits, parts, runs_of
from workbench.analysis.patterns.rounding import FLOATS, encode, half_step, numbers, rounded
from workbench.core.arrays import Array
from workbench.core.dtypes import DType

PLAIN = 4096  #: largest numerator or denominator of a factor shown as a fraction
NEIGHBOURS = 16  #: maximum numbers of a type in the interval to test them one by one


class Ratio:
    """The interval of factors that all elements so far allow."""

    def __init__(self, element: DType) -> None:
        self._element = element
        self.alive = element.name in FLOATS or (element.kind in "iu" and element.bits <= 32)
        self._low, self._high = -inf, inf
        # a product rounded to float32 first has a relative error up to 2⁻²⁴; in float64 much less
        self._slack = 2.0**-23 if element.bits <= 16 else 2.0**-50

    def feed(self, left: Array, right: Array) -> None:
        """Narrow the interval."""
        for start, stop in parts(len(left)):
            self._narrow(left[start:stop], right[start:stop])
            if not self.alive:
                return

    def pattern(self, seen: Difference) -> Pattern | None:
        """Return the simplest factor that yields every bit of ``b``, if there is one."""
        if not (isfinite(self._low) and isfinite(self._high)) or self._low > self._high:
            return None
        each = min(steps(seen.before, seen.after, self._element.kind), seen.bits_each)
        tried: set[tuple[float, str]] = set()
        for factor, text, cost in _candidates(self._low, self._high, self._element):
            surprise = seen.count * each - cost
            if surprise < MARGIN or factor in (0.0, 1.0):
                continue
            for how, of in _multiplications(self._element, factor):
                if (factor, how) in tried or not _proved(seen, of):
                    tried.add((factor, how))
                    continue
                words = text if text == f"{factor:.9g}" else f"{text} = {factor:.9g}"
                sentence = f"every element times {words}, {how}, rounded to {self._element.name}"
                detail = {"ratio": factor, "told": text, "computed": how, "changed": seen.count}
                return Pattern(
                    "ratio", sentence, detail, evidence=surprise, make=made(of, self._element, self._element)
                )
        return None

    def _narrow(self, left: Array, right: Array) -> None:
        if not len(left):
            return
        with np.errstate(invalid="ignore"):  # signalling NaNs
            x, y = (numbers(part, self._element).astype(np.float64) for part in (left, right))
        usable = np.isfinite(x) & (x != 0) & np.isfinite(y)
        if (np.isfinite(x) & (x == 0) & (y != 0)).any() or (~np.isfinite(x) & np.isfinite(y)).any():
            self.alive = False
            return
        x, y = x[usable], y[usable]
        if not len(x):
            return
        with np.errstate(all="ignore"):
            half = half_step(y, self._element)
            ends = (y - half) / x, (y + half) / x
            low, high = np.minimum(*ends), np.maximum(*ends)
            low -= np.abs(low) * self._slack
            high += np.abs(high) * self._slack
        self._low, self._high = max(self._low, float(low.max())), min(self._high, float(high.min()))
        self.alive = self._low <= self._high


def _candidates(low: float, high: float, element: DType) -> list[tuple[float, str, float]]:
    """Return factors in an interval, simplest first: number, text, and its cost in bits."""
    sign = -1.0 if high < 0 else 1.0
    if low < 0 < high:
        return []
    low, high = sorted((abs(low), abs(high)))
    found: list[tuple[float, str, float]] = []
    if low > 0 and isfinite(1 / low):
        plain = _simplest(Fraction(low), Fraction(high))
        if max(plain.numerator, plain.denominator) <= PLAIN or _is_power(plain):
            found.append((float(plain), str(plain), _cost(plain)))
        squared = _simplest(Fraction(low) ** 2, Fraction(high) ** 2)
        if max(squared.numerator, squared.denominator) <= PLAIN:
            found.append((sqrt(squared), f"√({squared})", _cost(squared) + 4))
    for digits in range(1, 17):
        short = float(f"{(low + high) / 2:.{digits}g}")
        if low <= short <= high:
            found.append((short, f"{short:.{digits}g}", 8 + 4.0 * digits))
            break
    middle = (low + high) / 2
    found.append((middle, repr(middle), 64.0))
    if element.kind == "f":
        # torch and jax convert a factor to float32 before they multiply
        found += [(float(np.float32(value)), text, cost) for value, text, cost in found]
        for value in _between(low, high, np.float32):
            plain = Fraction(value).limit_denominator(64)
            squared = (Fraction(value) ** 2).limit_denominator(64)
            text, cost = str(np.float32(value)), 40.0
            if float(np.float32(float(plain))) == value:
                text, cost = str(plain), _cost(plain)
            elif float(np.float32(sqrt(squared))) == value:
                text, cost = f"√({squared})", _cost(squared) + 4
            found.append((value, f"{text} as float32", cost))
        found += [(value, repr(value), 64.0) for value in _between(low, high, np.float64)]
    found.sort(key=lambda one: one[2])
    return [(sign * value, text if sign > 0 else f"−{text}", cost) for value, text, cost in found]


def _cost(plain: Fraction) -> float:
    return 8 + (0 if _is_power(plain) else 2 * log2(plain.numerator * plain.denominator))


def _simplest(low: Fraction, high: Fraction) -> Fraction:
    """Return the fraction with the smallest denominator in an interval of positive numbers (Stern–Brocot)."""
    whole = low.numerator // low.denominator
    if whole == low:
        return Fraction(whole) if whole else high
    if whole + 1 <= high:
        return Fraction(whole + 1)
    return whole + 1 / _simplest(1 / (high - whole), 1 / (low - whole))


def _is_power(plain: Fraction) -> bool:
    return all(number & (number - 1) == 0 for number in (plain.numerator, plain.denominator))


def _between(low: float, high: float, kind: Any) -> list[float]:
    """Return the numbers of a type in an interval, if they are few."""
    found: list[float] = []
    value = kind(low)
    value = value if value >= low else np.nextafter(value, kind(inf))
    while value <= high and len(found) <= NEIGHBOURS:
        found.append(float(value))
        value = np.nextafter(value, kind(inf))
    return found if len(found) <= NEIGHBOURS else []


def _multiplications(element: DType, factor: float) -> list[tuple[str, Callable[[Array], Array]]]:
    """Return the ways to multiply: name, and function from bits to bits."""
    wide = [np.float64] if element.bits > 32 or element.kind != "f" else [np.float64, np.float32]
    ways: list[tuple[str, Callable[[Array], Array]]] = []
    for kind in wide:
        ways.append((f"product in {kind.__name__}", _multiplication(element, factor, kind, False)))
        if 1 / factor == round(1 / factor):
            ways.append(
                (f"division by {1 / factor:,.0f} in {kind.__name__}", _multiplication(element, 1 / factor, kind, True))
            )
    return ways


def _multiplication(element: DType, factor: float, kind: Any, divide: bool) -> Callable[[Array], Array]:
    def of(raw: Array) -> Array:
        with np.errstate(all="ignore"):
            x = numbers(raw, element)
            y = x.astype(kind) / kind(factor) if divide else x.astype(kind) * kind(factor)
            if element.kind != "f":
                info = np.iinfo(element.numpy)
                return np.clip(np.rint(y), info.min, info.max).astype(element.numpy).view(element.raw)
            new = encode(rounded(y, element.name), element)
        return np.where(np.isnan(x), raw, new)

    return of


def _proved(seen: Difference, of: Callable[[Array], Array]) -> bool:
    for run in runs_of(seen.shape, seen.a.element.itemsize).ends_first():
        left, right = bits(seen.a, run.key).reshape(-1), bits(seen.b, run.key).reshape(-1)
        for start, stop in parts(len(left)):
            if (of(left[start:stop]) != right[start:stop]).any():
                return False
    return True
