"""Summarize one tensor as a few numbers or a histogram; it is streamed, so its size does not matter.

Blocks are summarized one by one and merged exactly (Chan, Golub, LeVeque 1979)::

    n = nₐ + n_b      δ = mean_b − meanₐ      mean = meanₐ + δ·n_b/n      M₂ = M₂ₐ + M₂_b + δ²·nₐ·n_b/n

Sums are kept in float64 (integers: exactly). With ``limit``, evenly spaced blocks are read instead of everything, and
``exact`` is false. This module handles single tensors, not whole checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np

from workbench.analysis.blocks import MatrixBlocks
from workbench.analysis.numbers import BLOCK, Decoder, equal_edges
from workbench.core.arrays import Array
from workbench.tensor import LazyTensor

HUGE = 1e140  #: magnitudes whose squares may leave float64


@dataclass(frozen=True)
class Summary:
    """Statistics of the elements of a tensor.

    Attributes:
        numel: elements of the tensor.
        seen: elements that were read.
        exact: whether all were read.
        kind: what the numbers below describe: ``numbers``; ``magnitudes`` (complex); ``raw bytes`` (packed types,
            which are not read).
        nan, posinf, neginf, zero: counts among those seen (a complex element with an infinite part counts as
            ``posinf``, its magnitude).
        min, max: of the finite elements; integers for integer types; ``None`` if there are none.
        mean, std: of the finite elements, population standard deviation; ``None`` if there are none.
    """

    numel: int
    seen: int
    exact: bool
    kind: str
    nan: int = 0
    posinf: int = 0
    neginf: int = 0
    zero: int = 0
    min: float | int | None = None
    max: float | int | None = None
    mean: float | None = None
    std: float | None = None

    @property
    def finite(self) -> int:
        """Number of finite elements among those seen."""
        return self.seen - self.nan - self.posinf - self.neginf


@dataclass(frozen=True, eq=False)
class Histogram:
    """Counts of the finite elements seen.

    Attributes:
        counts: ``(bins,) int64``.
        edges: ``(bins+1,) float64``, finite; the last bin includes its right edge, as in numpy.
        exact: whether every element was read.
    """

    counts: Array
    edges: Array
    exact: bool


@dataclass(frozen=True, eq=False)
class Profile:
    """A summary and the histogram of the same elements; ``None`` if there is no finite number."""

    summary: Summary
    histogram: Histogram | None


def summarise(tensor: LazyTensor, *, limit: int | None = None) -> Summary:
    """Return count, range, mean and standard deviation of a tensor, or of a sample of about ``limit`` elements.

    Raises:
        HoleError, OpenError: a needed element is not stored or cannot be read.
    """
    decoder = Decoder(tensor.element)
    return _summarise(tensor, decoder, MatrixBlocks(tensor, limit) if decoder.kind != "raw bytes" else None)


def histogram(
    tensor: LazyTensor,
    bins: int = 64,
    *,
    limit: int | None = None,
    summary: Summary | None = None,
    span: tuple[float, float] | None = None,
) -> Histogram | None:
    """Return counts in ``bins`` equal bins between the smallest and the largest finite element.

    Needs two passes, or one if a ``summary`` of the same elements is given.

    Args:
        span: another range of the bins, to compare two tensors; it must contain every finite element.

    Returns:
        ``None`` if no finite number was seen (empty tensors, packed types).
    """
    return _profile(tensor, bins, limit, summary, span).histogram


def profile(tensor: LazyTensor, bins: int = 64, *, limit: int | None = None) -> Profile:
    """Return :func:`summarise` and :func:`histogram` of the same elements; a small sample is read only once."""
    return _profile(tensor, bins, limit, None)


def _profile(
    tensor: LazyTensor, bins: int, limit: int | None, summary: Summary | None, span: tuple[float, float] | None = None
) -> Profile:
    decoder = Decoder(tensor.element)
    if decoder.kind == "raw bytes":
        return Profile(_summarise(tensor, decoder, None), None)
    blocks = MatrixBlocks(tensor, limit)
    summary = summary or _summarise(tensor, decoder, blocks)
    if summary.min is None or summary.max is None:
        return Profile(summary, None)
    low, high = span or (float(summary.min), float(summary.max))
    if low == high:
        margin = max(0.5, abs(low) * 2.0**-20)
        low, high = max(low - margin, -_MAX), min(high + margin, _MAX)
    edges = equal_edges(low, high, bins)
    counts = np.zeros(bins, np.int64)
    for block in blocks:
        for values in _parts(block.values):
            counts += _count(decoder.numbers(values), edges)
    return Profile(summary, Histogram(counts, edges, not blocks.sampled))


def _summarise(tensor: LazyTensor, decoder: Decoder, blocks: MatrixBlocks | None) -> Summary:
    empty = Summary(tensor.numel(), 0, tensor.numel() == 0, decoder.kind)
    if blocks is None:
        return empty
    state: Summary = empty
    moments = _Moments()
    buffer = np.empty(BLOCK, np.float64)
    for block in blocks:
        for values in _parts(block.values):
            state = moments.add(state, decoder.numbers(values), buffer)
    return replace(state, exact=not blocks.sampled, mean=moments.final_mean(), std=moments.final_std())


class _Moments:
    """n, mean and M₂ of the finite elements so far; for integers, the exact total."""

    def __init__(self) -> None:
        self.n, self.mean, self.m2 = 0, 0.0, 0.0
        self.total: int | None = None

    def add(self, state: Summary, values: Array, buffer: Array) -> Summary:
        """Fold in one block; return the summary with updated counts and range."""
        seen = state.seen + len(values)
        zero = state.zero + len(values) - int(np.count_nonzero(values))
        with np.errstate(invalid="ignore"):
            low, high = values.min(), values.max()
        nan = posinf = neginf = 0
        if values.dtype.kind == "f" and not (np.isfinite(low) and np.isfinite(high)):
            nan = int(np.count_nonzero(np.isnan(values)))
            posinf = int(np.count_nonzero(values == np.inf))
            neginf = int(np.count_nonzero(values == -np.inf))
            values = values[np.isfinite(values)]
            low, high = (values.min(), values.max()) if len(values) else (None, None)
        if len(values):
            self._merge(*(_integer_moments if values.dtype.kind in "iu" else _float_moments)(values, buffer))
        return replace(
            state,
            seen=seen,
            zero=zero,
            nan=state.nan + nan,
            posinf=state.posinf + posinf,
            neginf=state.neginf + neginf,
            min=_least(state.min, low, min),
            max=_least(state.max, high, max),
        )

    def final_mean(self) -> float | None:
        if not self.n:
            return None
        return self.total / self.n if self.total is not None else float(self.mean)

    def final_std(self) -> float | None:
        return float(np.sqrt(self.m2 / self.n)) if self.n else None

    def _merge(self, n: int, mean: Any, m2: Any, total: int | None) -> None:
        both = self.n + n
        if total is not None:
            before = self.total or 0
            delta = float(Fraction(total, n) - (Fraction(before, self.n) if self.n else 0))
            self.total = before + total
        else:
            delta = mean - self.mean
            self.mean = self.mean + delta * (n / both)
        # the first block has no earlier mean, and its squared mean could swamp its M₂
        self.m2 = self.m2 + m2 + (delta * delta * (self.n * n / both) if self.n else 0)
        self.n = both


def _float_moments(values: Array, buffer: Array) -> tuple[int, Any, Any, None]:
    if values.dtype == np.float64 and max(abs(values.min()), abs(values.max())) > HUGE:
        wide = values.astype(np.longdouble)  # its exponent is wide enough for the squares
        mean = wide.mean()
        return len(wide), mean, ((wide - mean) ** 2).sum(), None
    work = buffer[: len(values)]
    work[:] = values
    mean = work.sum() / len(work)
    work -= mean
    mean += work.sum() / len(work)  # corrects the rounding of the first sum
    return len(work), float(mean), float(np.dot(work, work)), None


def _integer_moments(values: Array, buffer: Array) -> tuple[int, float, float, int]:
    low = int(values.min())
    steps: Array
    if values.dtype.itemsize == 8:
        steps = values.view(np.uint64) - np.uint64(low % (1 << 64))  # exact for any two 64-bit integers
        total = (int((steps >> 32).sum()) << 32) + int((steps & np.uint64(0xFFFFFFFF)).sum()) + low * len(steps)
    else:
        steps = values.astype(np.int64) - low
        total = int(steps.sum()) + low * len(steps)
    work = buffer[: len(values)]
    work[:] = steps
    work -= work.sum() / len(work)
    return len(work), 0.0, float(np.dot(work, work)), total


def _least(old: float | int | None, new: Any, pick: Any) -> float | int | None:
    if new is None:
        return old
    number: float | int = new.item()
    return number if old is None else pick(old, number)


def _parts(values: Array) -> list[Array]:
    return [values[start : start + BLOCK] for start in range(0, len(values), BLOCK)]


def _count(values: Array, edges: Array) -> Array:
    """Return ``np.histogram(values, edges)[0]`` for equal bins, about five times faster; empty bins are 0."""
    bins = len(edges) - 1
    if values.dtype.kind == "f" and not (finite := np.isfinite(values)).all():
        values = values[finite]
    span = edges[-1] / 2 - edges[0] / 2
    if not 1e-280 < span < 1e280:
        return np.histogram(values.astype(np.float64), edges)[0]
    where = values * 0.5
    where -= edges[0] / 2
    where *= bins / span
    index = where.astype(np.int64)
    np.clip(index, 0, bins - 1, out=index)
    index -= values < edges[index]
    index += (values >= edges[index + 1]) & (index < bins - 1)
    return np.bincount(index, minlength=bins)


_MAX = float(np.finfo(np.float64).max)
