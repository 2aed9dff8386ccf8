"""Where elements stood before in the flat line of many tensors: an optimizer's partition that was cut elsewhere.

::

    line before   │ a a a a a a │ b b b b │ c c c c c c │         cut at the tensors' ends
    line after    │ a a a a a a │ p b b b │ b c c c c c │         from b on shifted by one: padding that was not there

At some places of each tensor a window of elements is looked for in all tensors of that role: one pass over them, of at
most :data:`LINE` bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench.analysis.patterns.read import bits, runs_of
from workbench.tensor import LazyTensor

__all__ = ["LINE", "Found", "find_windows"]

Array = np.ndarray[Any, Any]

WINDOW = 12  #: elements of a window
PLACES = 6  #: windows of a tensor
VARIED = 8  #: different values that a window must have
LINE = 1 << 30  #: bytes of the line, at most
_ODD = tuple(np.uint64(odd) for odd in (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9))


@dataclass(frozen=True)
class Found:
    """A window: it stands at ``at`` of tensor ``number``, and stood at ``first`` of tensor ``source`` (-1: nowhere)."""

    number: int
    at: int
    source: int
    first: int


def find_windows(after: Sequence[LazyTensor], before: Sequence[LazyTensor]) -> list[Found]:
    """Where windows of ``after`` stood in ``before``; tensors are known by their numbers in the two.

    Raises:
        HoleError, OpenError: an element is stored nowhere or cannot be read.
    """
    windows = [(number, at, window) for number, one in enumerate(after) for at, window in _windows(one)]
    if not windows:
        return []
    names = np.concatenate([_names(window) for _, _, window in windows])
    order = np.argsort(names, kind="stable")
    ordered = names[order]
    small = np.zeros(1 << 16, bool)
    small[(ordered >> np.uint64(48)).astype(np.int64)] = True
    places: dict[int, tuple[int, int]] = {}
    spent = 0
    for source, tensor in enumerate(before):
        spent += tensor.nbytes
        if spent > LINE:
            break
        tail = np.zeros(0, tensor.element.raw)
        for run in runs_of(tensor.shape, tensor.element.itemsize):
            part = np.concatenate([tail, bits(tensor, run.key).reshape(-1)])
            start = run.start - len(tail)
            tail = part[-WINDOW + 1 :]
            if len(part) < WINDOW:
                continue
            here = _names(part)
            likely = np.flatnonzero(small[(here >> np.uint64(48)).astype(np.int64)])
            lows = np.minimum(np.searchsorted(ordered, here[likely]), len(ordered) - 1)
            hits = ordered[lows] == here[likely]
            for at, low in zip(likely[hits].tolist(), lows[hits].tolist(), strict=True):
                while low < len(ordered) and ordered[low] == here[at]:
                    which = int(order[low])
                    low += 1
                    window = windows[which][2]
                    if which not in places and (part[at : at + WINDOW] == window).all():
                        places[which] = (source, start + at)
    return [Found(number, at, *places.get(k, (-1, -1))) for k, (number, at, _) in enumerate(windows)]


def _windows(tensor: LazyTensor) -> list[tuple[int, Array]]:
    """``(flat position, elements)`` of some windows, spread out, that say something."""
    found = []
    runs = runs_of(tensor.shape, tensor.element.itemsize, 1 << 12)
    if not len(runs):
        return []
    for number in sorted({len(runs) * k // PLACES for k in range(PLACES)} | {len(runs) - 1}):
        run = runs[number]
        part = bits(tensor, run.key).reshape(-1)
        # the ends of a tensor tell most: there a line that was cut elsewhere has elements of its neighbours
        starts = [0, len(part) // 2, len(part) - WINDOW] if len(runs) <= PLACES else [len(part) // 2]
        for at in dict.fromkeys(starts):
            window = part[at : at + WINDOW] if at >= 0 else part[:0]
            if len(window) == WINDOW and len(np.unique(window)) >= VARIED:
                found.append((run.start + at, window.copy()))
    return found


def _names(part: Array) -> Array:
    """``(n - WINDOW + 1,) uint64``: a mix of the first three elements of each window."""
    count = len(part) - WINDOW + 1
    wide = part.astype(np.uint64)
    found = wide[:count] * _ODD[0]
    for k in (1, 2):
        found ^= (found >> np.uint64(29)) + wide[k : count + k] * _ODD[k]
        found *= _ODD[0]
    return np.asarray(found)
