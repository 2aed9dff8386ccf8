"""Histograms of two tensors with common bins, for an overlay."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from workbench.analysis.summary import Summary, histogram, summarise
from workbench.core.arrays import Array
from workbench.core.scan import Progress
from workbench.tensor import LazyTensor

LIMIT = 1 << 24  #: maximum elements read per side; from longer tensors, evenly spaced blocks


@dataclass(frozen=True, eq=False)
class PairHistogram:
    """Counts of the finite elements of both sides.

    Attributes:
        edges: ``(bins+1,) float64``, from the smallest to the largest element of both.
        a, b: ``(bins,) int64``; zeros for a side without finite elements.
        summaries: of both sides: range, NaN, zeros.
        exact: whether every element was read.
    """

    edges: Array
    a: Array
    b: Array
    summaries: tuple[Summary, Summary]
    exact: bool


def pair_histogram(
    a: LazyTensor, b: LazyTensor, bins: int = 80, *, limit: int = LIMIT, progress: Progress | None = None
) -> PairHistogram | None:
    """Count both tensors; ``None`` if neither has a finite number (empty tensors, packed types).

    Raises:
        HoleError, OpenError: a needed element is not stored or cannot be read.
    """
    done = 0

    def step() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done / 4)

    summaries = []
    for side in (a, b):
        summaries.append(summarise(side, limit=limit))
        step()
    ends = [float(end) for one in summaries for end in (one.min, one.max) if end is not None]
    if not ends:
        return None
    low, high = min(ends), max(ends)
    if low == high:
        low, high = low - max(0.5, abs(low) * 2.0**-20), high + max(0.5, abs(high) * 2.0**-20)
    counts, edges = [], np.zeros(0)
    for side, summary in zip((a, b), summaries, strict=True):
        found = histogram(side, bins, limit=limit, summary=summary, span=(low, high))
        counts.append(np.zeros(bins, np.int64) if found is None else found.counts)
        edges = edges if found is None else found.edges
        step()
    return PairHistogram(edges, counts[0], counts[1], (summaries[0], summaries[1]), all(s.exact for s in summaries))
