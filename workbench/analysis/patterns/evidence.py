"""How improbable a pattern would be in a random change, in bits; a name needs :data:`MARGIN` bits.

::

    evidence  =  changed elements × bits each        what the pattern predicts correctly
              −  log₂(number of patterns of its kind)  the cost of selecting one

Two swapped elements, or ones that became twos, have many explanations and get no name: the bits of an element are the
entropy of the observed values, so equal values count nothing. In addition, every name is *proved*; the evidence rejects
proofs that could be coincidences. The probability that a random change gets a name is below 2^-MARGIN.
"""

from __future__ import annotations

from math import lgamma, log, log2

import numpy as np

from workbench.core.arrays import Array

MARGIN = 40.0  #: bits
SAMPLE = 1 << 16  #: maximum values from which an entropy is estimated


def entropy(values: Array) -> float:
    """Return the bits of one value, from the observed counts: up to ``log2(len(values))``, so never too many."""
    if len(values) < 2:
        return 0.0
    _, counts = np.unique(values[:SAMPLE], return_counts=True)
    share = counts / counts.sum()
    return float(-(share * np.log2(share)).sum()) + 0.0


def choose(n: int, k: int) -> float:
    """Return ``log2`` of the number of ways to choose ``k`` of ``n``."""
    return (lgamma(n + 1) - lgamma(k + 1) - lgamma(n - k + 1)) / log(2)


def multinomial(counts: Array) -> float:
    """Return ``log2`` of the number of distinguishable orders of rows; ``counts[i]`` rows are equal."""
    inside = np.array([lgamma(c + 1) for c in np.unique(counts).tolist()])
    often = np.unique(counts, return_counts=True)[1]
    return float((lgamma(int(counts.sum()) + 1) - (inside * often).sum()) / log(2))


def ordinal(raw: Array, signed: bool, floating: bool) -> Array:
    """Return bits as ``int64`` in the order of their numbers; neighbors differ by one."""
    width = raw.dtype.itemsize * 8
    plain = raw.view(f"<i{raw.dtype.itemsize}" if signed or floating else raw.dtype).astype(np.int64)
    if floating:
        plain = np.where(plain < 0, np.int64(-(1 << (width - 1))) - plain, plain)  # sign and magnitude
    return plain


def steps(before: Array, after: Array, kind: str) -> float:
    """Return the bits for a correctly predicted element: log2 of the number of values between the old and the new."""
    if not len(before):
        return 0.0
    left, right = (ordinal(raw, kind == "i", kind == "f").astype(np.float64) for raw in (before, after))
    return float(np.log2(1 + np.abs(right - left)).mean())


def pairs(n: int) -> float:
    """Return ``log2`` of the number of ranges of an axis of ``n``."""
    return log2(max(n * (n + 1) / 2, 1))
