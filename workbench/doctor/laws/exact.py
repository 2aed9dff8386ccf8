"""Equalities between weights, masters and moments, as additive sums: replay, ruler, rounding, low bits.

::

    replay   W_A − W_B = a·U + b·W_A      U = m̂_B/(√v̂_B + ε)      a = lr, b = lr·λ (0: no decay, or Adam's L2)
             sums of d·d d·U d·W U·U U·W W·W over the elements give a, b and the residual, for any guess of b
    ruler    elements whose moments are 0 in A and B got no gradient in between: W_B = r·W_A, one r for all

The residual is rounding alone: ‖rest‖ ≤ 4u·‖W‖ if the optimizer updates the stored weights (fp32 masters).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from workbench.analysis.bit_patterns import float_steps
from workbench.analysis.verify.pairs import Rounding
from workbench.core.arrays import Array
from workbench.doctor.laws.bounds import ROUNDINGS, UNITS, wide

Betas = tuple[float, float]
REST = 1e-3  #: share of a replayed update's norm, 15 times the worst in healthy runs (catalogue, I5)
BLUNT = 0.1  #: rounding from which a replay proves nothing
LOW = {"bfloat16": 0xFFFF, "float16": 0x1FFF}  #: bits of a float32 that a 16-bit type cannot hold


@dataclass(slots=True)
class Line:
    """A fit of ``y = r·x`` over ``count`` elements, from Σxx, Σxy, Σyy."""

    count: int = 0
    xx: float = 0.0
    xy: float = 0.0
    yy: float = 0.0

    def add(self, later: Line) -> None:
        self.count += later.count
        self.xx += later.xx
        self.xy += later.xy
        self.yy += later.yy

    @property
    def slope(self) -> float | None:
        """r, or ``None`` if every x is 0."""
        return self.xy / self.xx if self.xx > 0 else None

    @property
    def rest(self) -> float:
        """‖y − r·x‖/‖x‖, or 0 if every x is 0. The sums cancel, so values below 1e-7 are not resolved."""
        return math.sqrt(max(self.yy - self.xy**2 / self.xx, 0.0) / self.xx) if self.xx > 0 else 0.0


@dataclass(slots=True)
class Replay:
    """Sums over the elements of one parameter, ``d`` = W_A − W_B, ``u`` = m̂/(√v̂+ε), ``w`` = W_A."""

    count: int = 0
    dd: float = 0.0
    du: float = 0.0
    dw: float = 0.0
    uu: float = 0.0
    uw: float = 0.0
    ww: float = 0.0

    def add(self, later: Replay) -> None:
        for name in ("count", "dd", "du", "dw", "uu", "uw", "ww"):
            setattr(self, name, getattr(self, name) + getattr(later, name))

    def fit(self, decay: float | None) -> tuple[float, float, float] | None:
        """Return ``(lr, decay, ‖rest‖/‖d‖)``, or ``None`` if nothing moved.

        With ``decay`` (λ) given, ``d = lr·(u + λ·w)`` has one unknown; with ``None``, the λ that fits best is used.
        """
        if self.dd <= 0 or self.uu <= 0:
            return None
        if decay is None:
            det = self.uu * self.ww - self.uw**2
            if det <= 1e-12 * self.uu * self.ww:
                return self.fit(0.0)
            a = (self.du * self.ww - self.dw * self.uw) / det
            b = (self.dw * self.uu - self.du * self.uw) / det
            return a, b / a if a else math.inf, self._rest(a, b)
        along = self.uu + 2 * decay * self.uw + decay**2 * self.ww
        a = (self.du + decay * self.dw) / along
        return a, decay, self._rest(a, a * decay)

    def follows(self, decays: Iterable[float], noise: float) -> float | None:
        """Return the learning rate if one update with one of these λ leads from A to B, apart from rounding."""
        for decay in decays:
            fit = self.fit(decay)
            if fit is not None and fit[0] > 0 and fit[2] <= max(REST, noise):
                return fit[0]
        return None

    def noise(self, dtype: str) -> float:
        """Return the largest ``‖rest‖/‖d‖`` that rounding alone causes."""
        return ROUNDINGS * UNITS[dtype] * math.sqrt(self.ww / self.dd) if self.dd > 0 else math.inf

    def _rest(self, a: float, b: float) -> float:
        found = self.dd - 2 * a * self.du - 2 * b * self.dw + a * a * self.uu + 2 * a * b * self.uw + b * b * self.ww
        return math.sqrt(max(found, 0.0) / self.dd)


def replay(w_a: Array, w_b: Array, m_b: Array, v_b: Array, betas: Betas, eps: float, step: int) -> Replay:
    """Return the sums of one block; ``step`` is the optimizer's at B, counted from 1."""
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        root = np.sqrt(wide(v_b) / (1 - betas[1] ** step))
        return along(w_a, w_b, wide(m_b) / (1 - betas[0] ** step) / (root + eps))


def along(w_a: Array, w_b: Array, direction: Array) -> Replay:
    """Return the sums of one block for an update along ``direction``."""
    w, u = wide(w_a), wide(direction)
    d = w - wide(w_b)
    with np.errstate(invalid="ignore"):
        ok = np.isfinite(u) & np.isfinite(d)
    if not ok.all():
        w, d, u = w[ok], d[ok], u[ok]
    return Replay(len(w), _dot(d, d), _dot(d, u), _dot(d, w), _dot(u, u), _dot(u, w), _dot(w, w))


def ruler(w_a: Array, w_b: Array, silent: Array) -> Line:
    """Return the fit of W_B over W_A where ``silent`` (no gradient) and neither is 0, as where weights are pruned."""
    keep = silent & (w_a != 0) & (w_b != 0)
    x, y = wide(w_a[keep]), wide(w_b[keep])
    return Line(len(x), _dot(x, x), _dot(x, y), _dot(y, y))


def same_step(w_a: Array, w_b: Array, lr: tuple[float, float], decay: float) -> int:
    """Count the elements that moved by the learning rate ± 5 %, as in a fresh Adam's first update."""
    moved = np.abs(wide(w_b) - wide(w_a) * (1 - lr[1] * decay))
    return int(np.count_nonzero((moved >= 0.95 * lr[0]) & (moved <= 1.05 * lr[1])))


def rounding(master: Array, weight: Array, half: bool) -> tuple[int, int]:
    """Return the number of weights that differ from their rounded float32 master, and the largest distance in ulps.

    Args:
        master: ``uint32`` bits, rounded to nearest even.
        weight: ``uint16`` (or ``uint32``) bits.
        half: IEEE half, otherwise bfloat16.
    """
    rounded = Rounding.rounded(weight.dtype.itemsize, half, master)
    differ = (rounded != weight) & ~np.isnan(master.view(np.float32))
    count = int(np.count_nonzero(differ))
    if not count:
        return 0, 0
    return count, int(float_steps(rounded[differ], weight[differ]).max())


def low_bits(values: Array, kind: str) -> tuple[int, int]:
    """Count the float32 numbers (as bits) that a 16-bit type holds exactly, and all, without powers of two and 0."""
    mantissa = values & np.uint32(0x7FFFFF)
    special = (values & np.uint32(0x7F800000)) == 0x7F800000
    if special.any():  # NaN and infinities do not show where numbers came from
        mantissa = mantissa[~special]
    full = np.count_nonzero(mantissa)
    low = np.count_nonzero((mantissa != 0) & ((mantissa & np.uint32(LOW[kind])) == 0))
    return int(low), int(full)


def _dot(x: Array, y: Array) -> float:
    return float(np.dot(x, y))
