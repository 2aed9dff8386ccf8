"""How surprising a pattern would be in a random change, in bits; a name needs :data:`MARGIN` of them.

::

    evidence  =  changed elements × bits each        what the pattern predicts rightly
              −  log₂(how many patterns of its kind)  what it costs to say which one

A tensor of two elements that come swapped, or of ones that became twos, has many stories and no name: the bits of an
element are the entropy of the values seen, so that equal values count nothing. Every name is *proved* besides; the
evidence only keeps proofs that chance would give away. Under a random change the chance of a name is below 2^-MARGIN.
"""

from __future__ import annotations

from math import lgamma, log, log2
from typing import Any

import numpy as np

__all__ = ["MARGIN", "choose", "entropy", "multinomial", "pairs", "steps"]

Array = np.ndarray[Any, Any]

MARGIN = 40.0  #: bits
SAMPLE = 1 << 16  #: values that an entropy is estimated from, at most


def entropy(values: Array) -> float:
    """Bits of one value, from the counts of those seen: never more than ``log2(len(values))``, so never too many."""
    if len(values) < 2:
        return 0.0
    _, counts = np.unique(values[:SAMPLE], return_counts=True)
    share = counts / counts.sum()
    return float(-(share * np.log2(share)).sum()) + 0.0


def choose(n: int, k: int) -> float:
    """``log2`` of the ways to choose ``k`` of ``n``."""
    return (lgamma(n + 1) - lgamma(k + 1) - lgamma(n - k + 1)) / log(2)


def multinomial(counts: Array) -> float:
    """``log2`` of the distinguishable orders of rows, of which ``counts[i]`` are equal to each other."""
    inside = np.array([lgamma(c + 1) for c in np.unique(counts).tolist()])
    often = np.unique(counts, return_counts=True)[1]
    return float((lgamma(int(counts.sum()) + 1) - (inside * often).sum()) / log(2))


def ordinal(raw: Array, signed: bool, floating: bool) -> Array:
    """Bits as ``int64`` in the order of their numbers: neighbours differ by one."""
    width = raw.dtype.itemsize * 8
    plain = raw.view(f"<i{raw.dtype.itemsize}" if signed or floating else raw.dtype).astype(np.int64)
    if floating:
        plain = np.where(plain < 0, np.int64(-(1 << (width - 1))) - plain, plain)  # a sign and a magnitude
    return plain


def steps(before: Array, after: Array, kind: str) -> float:
    """Bits that rightly saying a changed element is worth: how many values lie between the old and the new, log2."""
    if not len(before):
        return 0.0
    left, right = (ordinal(raw, kind == "i", kind == "f").astype(np.float64) for raw in (before, after))
    return float(np.log2(1 + np.abs(right - left)).mean())


def pairs(n: int) -> float:
    """``log2`` of the ranges that an axis of ``n`` has."""
    return log2(max(n * (n + 1) / 2, 1))
