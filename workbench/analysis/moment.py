"""Statistics of the elements seen so far: a mergeable state, filled by :mod:`workbench.analysis.moments`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from workbench.core.dtypes import DType
from workbench.core.parts import storable


@storable
@dataclass
class Moment:
    """Statistics of the elements seen so far.

    Attributes:
        dtype: their type; ``None`` for a merge over several.
        count: elements, all of them; of packed types nothing else is known.
        nan, posinf, neginf, zero, subnormal: how many are that (a complex element with an infinite part counts as
            ``posinf``, its magnitude; ``subnormal`` are not zero).
        finite: number of elements that the fields below describe.
        min, max: integers for integer types; ``None`` while nothing finite was seen.
        mean, m2: the mean, and the sum of squared differences from it (``longdouble`` if squares leave float64).
        l1: Σ|x|.
        total: Σx of integers, exactly; ``None`` for floats.
    """

    dtype: DType | None = None
    count: int = 0
    nan: int = 0
    posinf: int = 0
    neginf: int = 0
    zero: int = 0
    subnormal: int = 0
    finite: int = 0
    min: float | int | None = None
    max: float | int | None = None
    mean: Any = 0.0
    m2: Any = 0.0
    l1: Any = 0
    total: int | None = None

    def add(self, n: int, mean: Any, m2: Any, l1: Any, low: Any, high: Any, total: int | None = None) -> None:
        """Take in ``n`` finite elements; the other counts are the caller's."""
        if not n:
            return
        both = self.finite + n
        if total is not None and (self.total is not None or not self.finite):
            before = self.total or 0
            delta: Any = float(Fraction(total, n) - Fraction(before, self.finite)) if self.finite else 0.0
            self.total = before + total
            self.mean = self.total / both
        else:  # integers that meet floats become floats
            delta = mean - self.mean if self.finite else 0.0
            self.mean = self.mean + delta * (n / both) if self.finite else mean
            self.total = None
        # the first elements have no earlier mean, and the square of their own could drown their M₂
        self.m2 = self.m2 + m2 + (delta * delta * (self.finite * (n / both)) if self.finite else 0.0)
        self.l1 = self.l1 + l1
        self.finite = both
        self.min = low if self.min is None else min(self.min, low)
        self.max = high if self.max is None else max(self.max, high)

    def merge(self, other: Moment) -> None:
        """Take in all that another state has seen."""
        if self.dtype != other.dtype:
            self.dtype = other.dtype if not self.count else self.dtype if not other.count else None
        for name in ("count", "nan", "posinf", "neginf", "zero", "subnormal"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.add(other.finite, other.mean, other.m2, other.l1, other.min, other.max, other.total)

    # ---- what follows from it; ``None`` while nothing finite was seen ----------------------------------------------

    @property
    def average(self) -> float | None:
        """Mean of the finite elements."""
        return float(self.mean) if self.finite else None

    @property
    def std(self) -> float | None:
        """Population standard deviation of the finite elements."""
        return float(np.sqrt(self.m2 / self.finite)) if self.finite else None

    @property
    def norm(self) -> float | None:
        """√Σx² of all elements, as in torch: NaN if any is NaN, else infinite if any is infinite."""
        if self.nan or self.posinf or self.neginf:
            return math.nan if self.nan else math.inf
        return float(np.sqrt(self._rms2()) * math.sqrt(self.finite)) if self.finite else None

    @property
    def rms(self) -> float | None:
        """√(Σx² / n) of all elements, as :attr:`norm`."""
        if self.nan or self.posinf or self.neginf:
            return math.nan if self.nan else math.inf
        return float(np.sqrt(self._rms2())) if self.finite else None

    @property
    def absmean(self) -> float | None:
        """Σ|x| / n."""
        return float(self.l1 / self.finite) if self.finite else None

    @property
    def absmax(self) -> float | int | None:
        """Largest magnitude."""
        return None if self.min is None or self.max is None else max(abs(self.min), abs(self.max))

    def _rms2(self) -> Any:
        return self.m2 / self.finite + self.mean * self.mean
