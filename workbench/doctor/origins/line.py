"""Locate windows of a later tensor in the flat line of before, tolerating updates, by cross-correlation.

::

    before   … a a a a a a │ b b b b │ c c c c …     tensors end to end
    after            [ w w w w ]                     cosine of the window with the line at every place,
                                                     by Fourier transform, piece by piece
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from workbench.analysis.numbers import Decoder
from workbench.analysis.patterns.read import runs_of
from workbench.core.arrays import Array
from workbench.tensor import LazyTensor

WINDOW = 256  #: elements
PIECE = 1 << 17  #: elements of the line that are transformed at a time
SLACK, ABOVE = 0.01, 0.98  #: rounding of 16-bit squares; share of a window that is above its floor
LINE = 256 << 20  #: most bytes of the line


class Stood(NamedTuple):
    """A window at ``at`` of its tensor; the best match is at ``place`` of tensor ``number`` of before."""

    at: int
    number: int
    place: int
    cosine: float


def stood(
    after: Sequence[LazyTensor], before: Sequence[LazyTensor], floors: Sequence[float] = ()
) -> list[Stood | None]:
    """Locate the window in the middle of each tensor; ``None`` if it is too short or all zero.

    Args:
        floors: for each tensor of squares, the least share of an element that its updates leave. Squares have a high
            cosine with any others, so a window must be above the floor of its place.
    """
    windows = [_window(tensor) for tensor in after]
    found: list[Stood | None] = [None] * len(windows)
    for line, starts in _line(before):
        size = 1 << max(len(line) - 1, 1).bit_length()
        squares = np.concatenate([[0.0], np.cumsum(line * line)])
        lengths = np.sqrt(np.maximum(squares[WINDOW:] - squares[:-WINDOW], 0))
        known = lengths > 0
        spectrum = np.fft.rfft(line, size)
        for at, one in enumerate(windows):
            if one is None:
                continue
            first, window, length = one
            products = np.fft.irfft(spectrum * np.conj(np.fft.rfft(window, size)), size)[: len(lengths)]
            cosines = np.where(known, products / np.where(known, lengths, 1), 0)
            top = int(cosines.argmax())
            best = found[at]
            if best is None or cosines[top] > best.cosine:
                here = line[top : top + WINDOW]
                if floors and np.mean(window * length >= floors[at] * (1 - SLACK) * here) < ABOVE:
                    continue
                number, offset, begin = max(start for start in starts if start[1] <= top)
                found[at] = Stood(first, number, begin + top - offset, float(cosines[top]))
    return found


def _window(tensor: LazyTensor) -> tuple[int, Array, float] | None:
    """Return position, direction and length of a window in the middle."""
    if tensor.numel() < 2 * WINDOW:
        return None
    runs = runs_of(tensor.shape, tensor.element.itemsize, 64 << 10)
    run = runs[len(runs) // 2]
    part = _numbers(tensor, run.key)
    at = max((len(part) - WINDOW) // 2, 0)
    window = part[at : at + WINDOW]
    length = float(np.linalg.norm(window))
    return None if len(window) < WINDOW or length == 0 else (run.start + at, window / length, length)


def _line(tensors: Sequence[LazyTensor]) -> Iterator[tuple[Array, list[tuple[int, int, int]]]]:
    """Yield pieces of the line, which overlap by a window, with ``(tensor, place here, place in it)`` of each part."""
    parts: list[Array] = []
    starts: list[tuple[int, int, int]] = []
    count = spent = 0
    for number, tensor in enumerate(tensors):
        spent += tensor.nbytes
        if spent > LINE:
            break
        for run in runs_of(tensor.shape, 1, PIECE // 2):
            part = _numbers(tensor, run.key)
            starts.append((number, count, run.start))
            parts.append(part)
            count += len(part)
            if count >= PIECE:
                yield np.concatenate(parts), starts
                keep = part[-WINDOW + 1 :]
                parts, count = [keep], len(keep)
                starts = [(number, 0, run.start + len(part) - len(keep))]
    if count >= WINDOW:
        yield np.concatenate(parts), starts


def _numbers(tensor: LazyTensor, key: Any) -> Array:
    part = tensor.lazy[key]
    with np.errstate(all="ignore"):
        found = Decoder(part.element).numbers(part.numpy().reshape(-1)).astype(np.float64)
    return np.clip(np.nan_to_num(found, nan=0.0), -1e15, 1e15)
