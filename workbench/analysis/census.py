"""A histogram of bit patterns, from which every statistic follows.

Of types of 16 bits or less all patterns are counted, so quantiles, histogram, distinct values, entropy and all moments
are exact. Wider numbers are counted by the leading half of their float32: sign, exponent and seven bits of mantissa::

    float32   s eeeeeeee mmmmmmm│mmmmmmmmmmmmmmmm      the width of a bin is 2⁻⁷ of its values or less
              └── pattern ──────┘

which places quantiles within :data:`BOUND` relative (below 1e-38, within 1e-40; beyond 3e38 they are cut off).
Counts of parts add up to those of the whole. A state keeps all patterns in a table only while a box is read, and
those that occur from then on: a few thousand for an ordinary tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from workbench.analysis.bit_patterns import fold_counts, pattern_counts, pattern_values, raw_only
from workbench.analysis.moment import Moment
from workbench.analysis.numbers import BLOCK, Decoder, equal_edges
from workbench.core.arrays import Array
from workbench.core.dtypes import DType, by_name
from workbench.core.parts import storable
from workbench.core.scan import Piece

BOUND = 2.0**-8 + 2.0**-23  #: relative, of quantiles of types wider than 16 bits
_F32 = by_name("float32")
_MOST = float(np.finfo(np.float32).max)


@storable
@dataclass(eq=False)
class Counts:
    """The patterns seen so far.

    Attributes:
        dtype: the elements' type.
        exact: whether all of their bits are counted.
        patterns, times: those that occur, ascending, and how often; the table of all of them while it is open.
    """

    dtype: DType
    exact: bool
    patterns: Array
    times: Array
    table: Array | None = None

    @classmethod
    def of(cls, dtype: DType) -> Counts:
        """Create empty counts."""
        return cls(dtype, dtype.bits <= 16, np.empty(0, np.uint16), np.empty(0, np.int64))

    def open(self) -> Array:
        """Return the table of all patterns, ready to be added to; ``close`` makes it small again."""
        if self.table is None:
            self.table = np.zeros(1 << (self.dtype.bits if self.exact else 16), np.int64)
            self.table[self.patterns] = self.times
        return self.table

    def close(self) -> None:
        """Keep only the patterns that occur."""
        if self.table is not None:
            self.patterns = np.flatnonzero(self.table).astype(np.uint16)
            times, self.table = self.table[self.patterns], None
            self.times = times.astype(np.min_scalar_type(int(times.max(initial=0))))

    def merge(self, other: Counts) -> None:
        """Take in what another state has seen."""
        if other.table is not None:
            self.open()[:] += other.table
        elif len(other.patterns):
            self.open()[other.patterns] += other.times
        self.close()

    # ---- questions -----------------------------------------------------------------------------------------------

    def moment(self) -> Moment:
        """Compute the moments exactly.

        Raises:
            ValueError: of types wider than 16 bits, whose counts do not determine them.
        """
        if not self.exact:
            raise ValueError(f"the moments of {self.dtype} cannot be computed from counts")
        found = Moment(self.dtype)
        self.close()
        found.count = int(self.times.sum())
        table = np.zeros(1 << self.dtype.bits, np.int64)
        table[self.patterns] = self.times
        fold_counts(found, self.dtype, table)
        return found

    def values(self) -> tuple[Array, Array]:
        """Return the finite values in ascending order and how often each occurs; the middles of bins for wide types."""
        self.close()
        values = pattern_values(self.dtype) if self.exact else _middles()
        values, times = values[self.patterns], self.times.astype(np.int64)
        if values.dtype.kind == "f":
            finite = np.isfinite(values)
            values, times = values[finite], times[finite]
        order = np.argsort(values, kind="stable")
        return values[order], times[order]

    def quantiles(self, wanted: Array, low: float | int | None = None, high: float | int | None = None) -> Array | None:
        """Compute quantiles of the finite elements as ``np.quantile`` (linear) defines them; ``None`` without such
        elements.

        Args:
            wanted: between 0 and 1.
            low, high: the range, if known: middles of bins are kept inside it.
        """
        values, times = self.values()
        if not len(values):
            return None
        ends = np.cumsum(times)
        place = np.asarray(wanted, np.float64) * (int(ends[-1]) - 1)
        before = np.floor(place).astype(np.int64)
        after = np.minimum(before + 1, int(ends[-1]) - 1)
        a, b = (values[np.searchsorted(ends, at, side="right")].astype(np.float64) for at in (before, after))
        share = place - before
        found = np.where(share < 0.5, a + (b - a) * share, b - (b - a) * (1 - share))
        return found if low is None or high is None else np.clip(found, float(low), float(high))

    @property
    def distinct(self) -> int | None:
        """How many values occur: −0 is 0, and all NaN are one; ``None`` for wide types."""
        if not self.exact:
            return None
        self.close()
        values = pattern_values(self.dtype)[self.patterns]
        missing = np.isnan(values) if values.dtype.kind == "f" else np.zeros(len(values), bool)
        return len(np.unique(values[~missing])) + bool(missing.any())

    @property
    def entropy(self) -> float | None:
        """Bits per element that an ideal code of single elements needs; ``None`` for wide types or no elements."""
        if not self.exact:
            return None
        self.close()
        if not len(self.times):
            return None
        share = self.times / self.times.sum()
        return abs(float(-(share * np.log2(share)).sum()))

    def histogram(self, bins: int = 64) -> tuple[Array, Array] | None:
        """Return counts in ``bins`` equal bins between the smallest and the largest finite value, and the bins' edges.

        The last bin includes its right edge, as numpy's; a single value is in the middle.
        """
        values, times = self.values()
        if not len(values):
            return None
        low, high = float(values[0]), float(values[-1])
        if low == high:
            margin = max(0.5, abs(low) * 2.0**-20)
            low, high = low - margin, high + margin
        edges = equal_edges(low, high, bins)
        found = np.zeros(bins, np.int64)
        np.add.at(found, np.clip(np.searchsorted(edges, values, side="right") - 1, 0, bins - 1), times)
        return found, edges


class Census:
    """Reducer of :func:`workbench.core.scan.scan`: one :class:`Counts` per group; ``None`` for packed types.

    The states are large while they are open: pass work of ``order="group"``.

    Args:
        engine: of :func:`workbench.core.engine.engine`.
    """

    def __init__(self, engine: str) -> None:
        self.engine = engine

    def begin(self, dtype: DType, other: DType | None = None) -> Counts | None:
        """Create empty counts; ``None`` for types without numeric values."""
        return None if raw_only(dtype) else Counts.of(dtype)

    def fold(self, state: Counts | None, piece: Piece) -> None:
        """Take in a piece; at the end of its box the state becomes small."""
        if state is not None:
            self.fold_bits(state, piece.bits)
            if piece.start + len(piece.bits) >= int(np.prod(piece.sizes)):
                state.close()

    def fold_bits(self, state: Counts, bits: Array) -> None:
        """Take in elements as they are stored: flat and contiguous, of the raw type."""
        table = state.open()
        if state.dtype.bits == 8:
            table += self._bytes(bits)
        elif state.exact:
            self._add(table, bits)
        else:
            decoder = Decoder(state.dtype)
            for start in range(0, len(bits), BLOCK):
                self._add(table, _leading(decoder, state.dtype, bits[start : start + BLOCK]))

    def merge(self, state: Counts | None, later: Counts | None) -> None:
        """Take in another state."""
        if state is not None and later is not None:
            state.merge(later)

    def _add(self, table: Array, bits: Array) -> None:
        if self.engine == "numba":
            from workbench.analysis.fast_stats import count16

            count16(bits, table)
            return
        for start in range(0, len(bits), 2 * BLOCK):
            part = bits[start : start + 2 * BLOCK]
            table += np.bincount(part, minlength=len(table))

    def _bytes(self, bits: Array) -> Array:
        if self.engine == "numba":
            from workbench.analysis.fast_stats import count8

            return count8(bits)
        return pattern_counts(bits)


def _leading(decoder: Decoder, dtype: DType, bits: Array) -> Array:
    """Decode the leading half of each element as float32."""
    if dtype == _F32:
        narrow = bits
    else:
        with np.errstate(over="ignore", invalid="ignore"):
            wide = decoder.numbers(bits if dtype.kind == "c" else bits.view(dtype.numpy))
            values = wide.astype(np.float32)
            beyond = np.isinf(values) & np.isfinite(wide)
        if beyond.any():
            values[beyond] = np.copysign(np.float32(_MOST), values[beyond])
        narrow = values.view(np.uint32)
    return np.ascontiguousarray(narrow.view(np.uint16)[1::2])


@cache
def _middles() -> Array:
    """Return the middle of each bin of wide types, ``(65536,) float64``; zero's is zero."""
    with np.errstate(invalid="ignore"):  # signalling NaN
        lower = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32).astype(np.float64)
    width = np.ldexp(1.0, np.maximum((np.arange(1 << 16) >> 7) & 0xFF, 1) - 127 - 7)
    found = lower + np.copysign(width / 2, lower)
    found[~np.isfinite(lower)] = lower[~np.isfinite(lower)]
    found[[0, 0x8000]] = 0.0
    return found
