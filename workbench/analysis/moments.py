"""Counts, range, mean, spread and norms of stored elements, in one pass, as states that add up.

::

    n = nₐ + n_b      δ = mean_b − meanₐ      mean = meanₐ + δ·n_b/n      M₂ = M₂ₐ + M₂_b + δ²·nₐ·n_b/n

What is exact: every count, min and max, and for integers their total and Σ|x|. Sums of floats are added in float32
over at most some thousand elements and in float64 from there on; runs whose mean outweighs their spread are
summed again about their mean. Against float64 throughout, ``std``, ``norm`` and ``l1`` stay within
:data:`ACCURACY` relative (seen: 1e-8), the mean within :data:`ACCURACY` of the mean magnitude; types of 8 bits and
float64 within rounding.

States merge by the formula above (Chan, Golub, LeVeque 1979), so pieces, threads, files and machines add up. The
arithmetic on a piece lies in :mod:`workbench.analysis.plain_stats` (numpy) and, with the extra ``fast``, in
:mod:`workbench.analysis.fast_stats` (numba): same counts, min and max bit for bit, sums within the accuracy.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from workbench.analysis.plain_stats import fold
from workbench.core.dtypes import DType
from workbench.core.scan import Piece

__all__ = ["ACCURACY", "Moment", "Moments", "engine"]

Array = np.ndarray[Any, Any]
ACCURACY = 1e-6  #: relative, of sums of floats of 16 and 32 bits
WORTH_NUMBA = 1 << 30  #: bytes from which importing numba and its compiled code (half a second) pays


@dataclass
class Moment:
    """What the elements seen so far are like.

    Attributes:
        dtype: their type; ``None`` for a merge over several.
        count: elements, all of them; of packed types nothing else is known.
        nan, posinf, neginf, zero, subnormal: how many are that (a complex element with an infinite part counts as
            ``posinf``, its magnitude; ``subnormal`` are not zero).
        finite: how many took part in what follows.
        min, max: integers for integer types; ``None`` while nothing finite was seen.
        mean, m2: and the sum of squared differences from it (``longdouble`` where squares leave float64).
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
        # the first have nothing to differ from, and their own mean squared could drown their M₂
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
        """√Σx² of all elements, as torch has it: NaN where one is, else infinite where one is."""
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


class Moments:
    """Reducer of :func:`workbench.core.scan.scan`: a :class:`Moment` a group.

    Args:
        engine: ``numpy``, ``numba``, or ``auto``: numba when this process has it imported already.
    """

    def __init__(self, engine: str = "auto") -> None:
        self.engine = _resolve(engine, 0)

    def begin(self, dtype: DType, other: DType | None = None) -> Moment:
        """Nothing seen."""
        return Moment(dtype)

    def fold(self, state: Moment, piece: Piece) -> None:
        """Take in a piece."""
        assert state.dtype is not None
        if state.dtype.packed:  # its pieces are bytes; the box says how many elements those are
            state.count += int(np.prod(piece.sizes)) if piece.start == 0 else 0
            return
        self.fold_bits(state, piece.bits)

    def fold_bits(self, state: Moment, bits: Array) -> None:
        """Take in elements as they are stored: flat and contiguous, of the raw type of ``state.dtype``."""
        assert state.dtype is not None
        if self.engine == "numba":
            from workbench.analysis.fast_stats import KINDS
            from workbench.analysis.fast_stats import fold as fold_fast

            if state.dtype.name in KINDS:
                fold_fast(state, state.dtype, bits)
                return
        fold(state, state.dtype, bits)

    def merge(self, state: Moment, later: Moment) -> None:
        """Take in another state."""
        state.merge(later)


def engine(nbytes: int) -> str:
    """``numba`` where it is installed and so many bytes are worth its import, else ``numpy``."""
    return _resolve("auto", nbytes)


def _resolve(wanted: str, nbytes: int) -> str:
    if wanted != "auto":
        return wanted
    if sys.modules.get("numba") is not None:
        return "numba"
    if nbytes < WORTH_NUMBA or importlib.util.find_spec("numba") is None:
        return "numpy"
    try:
        import numba  # noqa: F401
    except ImportError:  # installed, but not for this Python or numpy; results say which engine they are of
        return "numpy"
    return "numba"
