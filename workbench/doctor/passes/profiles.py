"""Sums over rows and columns of a matrix, which show how its numbers arose.

::

    exp_avg_sq   mean of log2 v by row and by column      v of a matrix is nearly row × column: its gradient is δ·xᵀ
                 the element farthest above row + column  shows a flipped exponent bit
                 rows without a gradient                  padding of a vocabulary
    weights      mean square by row and by column, E x⁴   alike everywhere in fresh numbers, but not in trained ones

Blocks are runs of rows. log2 is taken from the bits of a float32, with exponent and mantissa as one fixed-point number,
which is within 0.09 of the exact value.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from workbench.core.arrays import Array
from workbench.doctor.passes.blocks import BLOCK, SlotBlock, TensorSlot
from workbench.names.roles import adapter_of
from workbench.names.weights import parse

LEAST = 16  #: rows and columns below which a matrix has no profile
WIDEST = 1 << 16  #: columns from which a block is not a run of rows
BACKGROUND = 8  #: rows of a block from which a column's mean is meaningful
RUNS = 1000  #: most runs of idle rows that are kept
#: Kinds of weights that keep row profiles, and column profiles (without experts); other matrices keep a few numbers.
ROWED = ("q", "k", "v", "qkv")
COLUMNED = ("gate", "up", "gate_up", "fc1")
#: E x⁴ / (E x²)² of the distributions that weights are initialized from.
DRAWN = {"normal": 3.0, "normal, cut at 3σ": 2.829, "normal, cut at 2σ": 2.366, "uniform": 1.8}


@dataclass(frozen=True)
class Independence:
    """How far a matrix is from independent, identically distributed numbers, in standard deviations of each measure.

    Attributes:
        rows, columns: of the spread of their mean squares; about 0 for fresh numbers, and large if rows were trained by
            different gradients.
        tails: distance from the nearest of :data:`DRAWN`, which ``law`` names.
    """

    rows: float
    columns: float
    tails: float
    law: str

    @property
    def worst(self) -> float:
        return max(abs(self.rows), abs(self.columns), abs(self.tails))


@dataclass
class MatrixProfile:
    """The numbers that are kept for a matrix.

    Attributes:
        drawn: independence of the weights; ``None`` if there are none, or all are alike.
        rows: ``(rows,)`` mean of log2 v. columns: ``(halves, columns)`` for its upper and lower half of rows.
        idle: runs ``(start, stop)`` of rows whose v is 0.
        above: octaves by which the largest v exceeds the value its row and column suggest. next: the same for the
            second largest. at: flat position of the largest. spread: standard deviation of all.
    """

    shape: tuple[int, int]
    drawn: Independence | None = None
    rows: Array | None = None
    columns: Array | None = None
    idle: tuple[tuple[int, int], ...] = ()
    above: float = 0.0
    next: float = 0.0
    at: int = -1
    spread: float = 0.0


@dataclass
class Sums:
    """Running sums; merge in the order of blocks."""

    shape: tuple[int, int]
    count: int = 0
    fourth: float = 0.0
    squares: list[Array] = field(default_factory=list)
    square_columns: Array | None = None
    logs: list[Array] = field(default_factory=list)
    log_columns: Array | None = None
    alive: list[Array] = field(default_factory=list)
    above: float = -math.inf
    next: float = -math.inf
    at: int = -1
    spread: float = 0.0
    seen: int = 0

    @classmethod
    def of(cls, slot: TensorSlot) -> Sums | None:
        """Create sums for a slot's matrix (leading axes are flattened to rows), or ``None`` if it has no profile."""
        shape = slot.shape
        if len(shape) < 2 or not LEAST <= shape[-1] <= WIDEST:
            return None
        rows = math.prod(shape[:-1])
        return cls((rows, shape[-1])) if rows >= LEAST else None

    def take(self, block: SlotBlock, weights: Array | None, v: Array | None, *, fast: bool = False) -> None:
        """Add a block, with ``v`` as float32; ``fast`` uses compiled code."""
        width = self.shape[1]
        if weights is not None:
            self._weights(weights.reshape(-1, width), fast)
        if v is not None:
            step = max(BLOCK // width, 1)  # rows that share a background, whatever the block size
            for first in range(0, len(v) // width, step):
                rows = v[first * width : (first + step) * width].reshape(-1, width)
                self._squares(rows, block.start + first * width, fast)

    def merge(self, later: Sums) -> None:
        self.count, self.fourth = self.count + later.count, self.fourth + later.fourth
        self.squares, self.logs, self.alive = (
            self.squares + later.squares,
            self.logs + later.logs,
            self.alive + later.alive,
        )
        self.square_columns = _plus(self.square_columns, later.square_columns)
        self.log_columns = _plus(self.log_columns, later.log_columns)
        high, low = (self, later) if self.above >= later.above else (later, self)
        self.above, self.next, self.at = high.above, max(high.next, low.above), high.at
        self.spread, self.seen = self.spread + later.spread, self.seen + later.seen

    def close(self, fqn: str) -> MatrixProfile:
        """Return the profile to keep: means by row of queries, keys and values, by column of gate and up."""
        found = MatrixProfile(self.shape, self._drawn())
        if self.logs:
            found.idle = _runs(~np.concatenate(self.alive))[:RUNS]
            weight = parse(fqn)
            kind = "" if adapter_of(fqn) else weight.kind  # an adapter's rows are not those of the weight
            if kind in ROWED:
                found.rows = np.concatenate(self.logs)
            if kind in COLUMNED and "expert" not in weight.module and self.log_columns is not None:
                found.columns = self.log_columns.astype(np.float32)
        if self.seen:
            found.above, found.next, found.at = self.above, max(self.next, 0.0), self.at
            found.spread = math.sqrt(self.spread / self.seen)
        return found

    def _weights(self, x: Array, fast: bool) -> None:
        self.count += x.size
        if fast and x.dtype == np.float32:
            from workbench.doctor.compiled import fast_rows

            rows, columns, fourth = fast_rows.square_sums(x)
        else:
            with np.errstate(over="ignore", invalid="ignore"):  # S01 reports NaN and infinities
                square = np.square(x, dtype=np.float32)
                rows, columns = square.mean(axis=1, dtype=np.float64), square.sum(axis=0, dtype=np.float64)
                fourth = float(np.vdot(square, square))
        self.squares.append(rows)
        self.square_columns = _plus(self.square_columns, columns)
        self.fourth += fourth

    def _squares(self, v: Array, start: int, fast: bool) -> None:
        first = start // self.shape[1]
        cut = min(max(self.shape[0] // 2 - first, 0), len(v))
        if fast and v.dtype == np.float32:
            from workbench.doctor.compiled import fast_rows

            rows, sums, rest = fast_rows.logs(v, cut, BACKGROUND)
        else:
            rows, sums, rest = _logs(v, cut)
        self.log_columns = _plus(self.log_columns, sums)
        self.logs.append(rows)
        self.alive.append(rows > 0)
        if rest is None:
            return
        high, after, at, spread = rest
        self.spread += spread
        self.seen += v.size
        if high > self.above:
            self.above, self.next, self.at = high, max(self.above, after), start + at
        else:
            self.next = max(self.next, high)

    def _drawn(self) -> Independence | None:
        if not self.count or self.square_columns is None:
            return None
        rows, columns = np.concatenate(self.squares), self.square_columns / self.shape[0]
        mean = float(rows.mean())
        if not (math.isfinite(self.fourth) and mean > 0 and self.fourth > 0):
            return None
        tails = self.fourth / self.count / mean**2
        law = min(DRAWN, key=lambda name: abs(DRAWN[name] - tails))
        error = math.sqrt(24.0 / self.count)  # of a normal sample; the others have smaller errors
        each = max(tails - 1, 1e-9) * mean**2
        return Independence(
            _excess(rows, mean, each / self.shape[1]),
            _excess(columns, mean, each / self.shape[0]),
            (tails - DRAWN[law]) / error,
            law,
        )


def _excess(means: Array, mean: float, variance: float) -> float:
    """Return the excess of the spread of means over chance, in standard deviations of χ²."""
    return float((np.square(means - mean).sum() / variance - (len(means) - 1)) / math.sqrt(2 * len(means)))


def _logs(v: Array, cut: int) -> tuple[Array, Array, tuple[float, float, int, float] | None]:
    """Return means by row, sums by column before and after ``cut``, and the largest residuals if meaningful."""
    logs = (v.view(np.int32).astype(np.float32) if v.dtype == np.float32 else np.log2(v + 1e-45)) / (1 << 23)
    rows = logs.mean(axis=1)
    sums = np.stack([half.sum(axis=0, dtype=np.float64) for half in (logs[:cut], logs[cut:])])
    if len(v) < BACKGROUND or not (rows > 0).all():
        return rows, sums, None
    logs -= rows[:, None]
    logs -= (sums.sum(axis=0) / len(v) - rows.mean()).astype(np.float32)
    return rows, sums, _largest(logs.reshape(-1))


def _largest(flat: Array) -> tuple[float, float, int, float]:
    """Return the largest and the next one, the position of the first, and Σ² of all others."""
    at = int(flat.argmax())
    high = float(flat[at])
    flat[at] = -math.inf
    after = float(flat.max())
    flat[at] = 0.0
    return high, after, at, float(np.vdot(flat, flat))


def _plus(a: Array | None, b: Array | None) -> Array | None:
    return b if a is None else a if b is None else a + b


def _runs(mask: Array) -> tuple[tuple[int, int], ...]:
    edges = np.flatnonzero(np.diff(np.concatenate(([False], mask, [False])).astype(np.int8)))
    return tuple((int(a), int(b)) for a, b in edges.reshape(-1, 2))
