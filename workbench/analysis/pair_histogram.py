"""The values of two tensors counted in the same bins, so that they can be laid over each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench.analysis.summary import Summary, histogram, summarise
from workbench.core.scan import Tick
from workbench.tensor import LazyTensor

__all__ = ["PairHistogram", "pair_histogram"]

Array = np.ndarray[Any, Any]
LIMIT = 1 << 24  #: elements of each side that are read; of longer ones, evenly spaced blocks


@dataclass(frozen=True, eq=False)
class PairHistogram:
    """Counts of the finite elements of both sides.

    Attributes:
        edges: ``(bins+1,) float64``, from the smallest to the largest element of both.
        a, b: ``(bins,) int64``; of a side without a finite element, zeros.
        summaries: of both sides: range, NaN, zeros.
        exact: whether every element was read.
    """

    edges: Array
    a: Array
    b: Array
    summaries: tuple[Summary, Summary]
    exact: bool


def pair_histogram(
    a: LazyTensor, b: LazyTensor, bins: int = 80, *, limit: int = LIMIT, tick: Tick | None = None
) -> PairHistogram | None:
    """Count both; ``None`` where neither has a finite number (empty tensors, packed types).

    Raises:
        HoleError, OpenError: an element that is needed is stored nowhere or cannot be read.
    """
    done = 0

    def step() -> None:
        nonlocal done
        done += 1
        if tick is not None:
            tick(done / 4)

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
