"""Everything the Tensors tab shows of one tensor, in one cancellable pass through a job.

The analysis is unaware of jobs; it reads block by block. A thin wrapper around the tensor counts these reads, reports
progress, and stops a cancelled job.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from workbench.analysis.heatmap import Heat, heatmap
from workbench.analysis.summary import Profile, profile
from workbench.app.jobs import Progress
from workbench.tensor import LazyTensor

ROWS, COLS = 96, 128  #: maximum number of cells of the heat map
PASSES = 3  #: passes over the elements: range and moments, histogram, heat map


@dataclass(frozen=True)
class Look:
    """Numbers and pictures of one tensor.

    Attributes:
        key: stored name.
        shape: of the tensor.
        profile: summary and histogram of every element.
        heat: the tensor as a small matrix with its most extreme elements.
    """

    key: str
    shape: tuple[int, ...]
    profile: Profile
    heat: Heat


def look(tensor: LazyTensor, progress: Progress) -> Look:
    """Read a tensor and summarise it.

    Args:
        progress: called with the fraction done before and after each read; raise to cancel.

    Raises:
        HoleError, OpenError: an element is stored nowhere or cannot be read.
    """
    watched = cast(LazyTensor, _Watched(tensor, _Meter(progress, PASSES * max(tensor.numel(), 1))))
    return Look(tensor.key, tensor.shape, profile(watched), heatmap(watched, ROWS, COLS))


class _Meter:
    def __init__(self, progress: Progress, total: int) -> None:
        self._tick, self._total, self._done = progress, total, 0

    def add(self, elements: int) -> None:
        self._done += elements
        self._tick(self._done / self._total)


class _Watched:
    """A lazy tensor that reports its reads to a meter."""

    def __init__(self, tensor: LazyTensor, meter: _Meter) -> None:
        self._tensor, self._meter = tensor, meter

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tensor, name)

    @property
    def lazy(self) -> _WatchedLazy:
        return _WatchedLazy(self._tensor, self._meter)

    def numpy(self) -> Any:
        self._meter.add(0)
        found = self._tensor.numpy()
        self._meter.add(self._tensor.numel())
        return found


class _WatchedLazy:
    def __init__(self, tensor: LazyTensor, meter: _Meter) -> None:
        self._tensor, self._meter = tensor, meter

    def __getitem__(self, key: Any) -> _Watched:
        return _Watched(self._tensor.lazy[key], self._meter)
