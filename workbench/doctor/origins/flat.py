"""Find where elements were in the flat line of many tensors, for an optimizer partition cut at other places.

::

    line before   │ a a a a a a │ b b b b │ c c c c c c │         cut at the tensors' ends
    line after    │ a a a a a a │ p b b b │ b c c c c c │         shifted by one from b on, by new padding

Windows of elements from several places of each tensor are searched in all tensors of that role, in one pass over up to
:data:`LINE` bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from workbench.analysis.patterns.read import bits, runs_of
from workbench.core.arrays import Array
from workbench.tensor import LazyTensor

WINDOW = 12  #: elements per window
PLACES = 6  #: windows per tensor
VARIED = 8  #: fewest different values in a window
LINE = 1 << 30  #: most bytes of the line
_ODD = tuple(np.uint64(odd) for odd in (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9))


@dataclass(frozen=True)
class FoundWindow:
    """A window at ``at`` of tensor ``number`` that was at ``first`` of tensor ``source`` (-1: nowhere)."""

    number: int
    at: int
    source: int
    first: int


def find_windows(after: Sequence[LazyTensor], before: Sequence[LazyTensor]) -> list[FoundWindow]:
    """Find windows of ``after`` in ``before``; tensors are identified by their positions in the two sequences."""
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
    return [FoundWindow(number, at, *places.get(k, (-1, -1))) for k, (number, at, _) in enumerate(windows)]


def _windows(tensor: LazyTensor) -> list[tuple[int, Array]]:
    """Return ``(flat position, elements)`` of several windows with enough different values, spread out."""
    found = []
    runs = runs_of(tensor.shape, tensor.element.itemsize, 1 << 12)
    if not len(runs):
        return []
    for number in sorted({len(runs) * k // PLACES for k in range(PLACES)} | {len(runs) - 1}):
        run = runs[number]
        part = bits(tensor, run.key).reshape(-1)
        # the ends of a tensor are most informative: if the cuts moved, they hold elements of its neighbours
        starts = [0, len(part) // 2, len(part) - WINDOW] if len(runs) <= PLACES else [len(part) // 2]
        for at in dict.fromkeys(starts):
            window = part[at : at + WINDOW] if at >= 0 else part[:0]
            if len(window) == WINDOW and len(np.unique(window)) >= VARIED:
                found.append((run.start + at, window.copy()))
    return found


def _names(part: Array) -> Array:
    """Return ``(n - WINDOW + 1,) uint64``, a hash of the first three elements of each window."""
    count = len(part) - WINDOW + 1
    wide = part.astype(np.uint64)
    found = wide[:count] * _ODD[0]
    for k in (1, 2):
        found ^= (found >> np.uint64(29)) + wide[k : count + k] * _ODD[k]
        found *= _ODD[0]
    return np.asarray(found)
