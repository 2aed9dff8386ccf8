"""Counts, range, mean, spread and norms of stored elements, in one pass, as states that add up.

::

    n = nₐ + n_b      δ = mean_b − meanₐ      mean = meanₐ + δ·n_b/n      M₂ = M₂ₐ + M₂_b + δ²·nₐ·n_b/n

Every count, min and max are exact, and for integers their total and Σ|x|. Floats are added by numpy in float64;
compiled code adds eight elements of up to 32 bits in float32, and those sums in float64, and takes runs whose mean
outweighs their spread about their mean. Against float64 throughout, ``std``, ``norm`` and ``l1`` stay within
:data:`ACCURACY` relative, the mean within :data:`ACCURACY` of the mean magnitude; types of 8 bits and float64 within
rounding.

States merge by the formula above (Chan, Golub, LeVeque 1979), so pieces, threads, files and machines add up. The
arithmetic on a piece is in :mod:`workbench.analysis.plain_stats` (numpy, every type) and, for floats of up to 32 bits
in large passes, in :mod:`workbench.analysis.fast_stats` (numba): the same counts, min and max bit for bit.
"""

from __future__ import annotations

import numpy as np

from workbench.analysis import plain_stats
from workbench.analysis.moment import Moment
from workbench.core.arrays import Array
from workbench.core.dtypes import DType
from workbench.core.scan import Piece

ACCURACY = 1e-6  #: relative, of sums of floats of 16 and 32 bits


class Moments:
    """Reducer of :func:`workbench.core.scan.scan`: one :class:`Moment` per group.

    Args:
        engine: of :func:`workbench.core.engine.engine`.
    """

    def __init__(self, engine: str) -> None:
        self.engine = engine

    def begin(self, dtype: DType, other: DType | None = None) -> Moment:
        """Create empty moments."""
        return Moment(dtype)

    def fold(self, state: Moment, piece: Piece) -> None:
        """Take in a piece."""
        assert state.dtype is not None
        if state.dtype.packed:  # its pieces are bytes; the box determines the number of elements
            state.count += int(np.prod(piece.sizes)) if piece.start == 0 else 0
            return
        self.fold_bits(state, piece.bits)

    def fold_bits(self, state: Moment, bits: Array) -> None:
        """Take in elements as they are stored: flat and contiguous, of the raw type of ``state.dtype``."""
        assert state.dtype is not None
        if self.engine == "numba" and state.dtype.kind == "f":
            from workbench.analysis import fast_stats

            if state.dtype.name in fast_stats.FOLDS:
                fast_stats.fold(state, state.dtype, bits)
                return
        plain_stats.fold(state, state.dtype, bits)

    def merge(self, state: Moment, later: Moment) -> None:
        """Take in another state."""
        state.merge(later)
