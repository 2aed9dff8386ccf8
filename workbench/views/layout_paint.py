"""Paint any number of boxes into the pixels of a window in milliseconds; chosen boxes are never thinner than a pixel.

::

    boxes (left, right, top, bottom, colour) ──► first and last pixel of each ──► runs ──► image
            1M                                     pixel centres decide; `least` keeps boxes between two centres

A later box covers an earlier one. A box costs as many writes as it has pixels; boxes that do not overlap cost no more
than the image.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from workbench.core.arrays import Array

__all__ = ["PaintBoxes", "PaintWindow", "colours", "raster"]


BOXES = 65_536  #: painted at a time: intermediate results stay in a core's cache
PIXELS = 4_000_000  #: written at a time, or those of one box: stacked boxes do not need memory for each


@dataclass(frozen=True, slots=True)
class PaintWindow:
    """The visible window: ``x0 … x1`` across, ``y0 … y1`` down, on ``width`` × ``height`` pixels."""

    x0: float
    x1: float
    y0: float
    y1: float
    width: int
    height: int


@dataclass(frozen=True, eq=False)
class PaintBoxes:
    """``(N,)`` edges, ``left`` < ``right`` and ``top`` < ``bottom`` unless a box is empty, and a code, 0 or more."""

    left: Array
    right: Array
    top: Array
    bottom: Array
    code: Array

    def __len__(self) -> int:
        return len(self.left)

    def take(self, rows: Array | slice) -> PaintBoxes:
        """Return the boxes at the given positions."""
        return PaintBoxes(self.left[rows], self.right[rows], self.top[rows], self.bottom[rows], self.code[rows])

    def at(self, x: float, y: float) -> Array:
        """Return the positions of the boxes that contain a point."""
        inside = (self.left <= x) & (x < self.right) & (self.top <= y) & (y < self.bottom)
        return np.flatnonzero(inside)


def raster(boxes: PaintBoxes, window: PaintWindow, least: int = 0, image: Array | None = None) -> Array:
    """Paint boxes; return ``(height, width) int32`` codes, the first row at ``y0``, -1 outside all boxes.

    Args:
        least: minimum width and height, in pixels, of a box that touches the window.
        image: paint onto this image instead of an empty one.
    """
    image = np.full((window.height, window.width), -1, np.int32) if image is None else image
    for start in range(0, len(boxes), BOXES):
        _paint(boxes.take(slice(start, start + BOXES)), window, least, image)
    return image


def colours(image: Array, palette: Array) -> Array:
    """Map codes to ``(height, width, 4) uint8``; ``palette`` is ``(codes, 4)``; -1 is transparent."""
    table = np.concatenate([palette.astype(np.uint8), np.zeros((1, 4), np.uint8)])
    return table[image]


def _paint(boxes: PaintBoxes, window: PaintWindow, least: int, image: Array) -> None:
    seen = (boxes.left < window.x1) & (boxes.right > window.x0)
    seen &= (boxes.top < window.y1) & (boxes.bottom > window.y0)
    mine = boxes if seen.all() else boxes.take(np.flatnonzero(seen))
    first, last = _pixels(mine.left, mine.right, window.x0, window.x1, window.width, least)
    upper, lower = _pixels(mine.top, mine.bottom, window.y0, window.y1, window.height, least)
    rows = np.flatnonzero((last > first) & (lower > upper))
    first, last, upper, lower = first[rows], last[rows], upper[rows], lower[rows]
    code, area = mine.code[rows], (last - first) * (lower - upper)
    if (area == 1).all():
        image[upper, first] = code
        return
    edges = [0, *(np.flatnonzero(np.diff(np.cumsum(area) // PIXELS)) + 1).tolist(), len(area)]
    for start, stop in itertools.pairwise(edges):
        here = slice(start, stop)
        line, row = _runs(upper[here], lower[here])  # one row of pixels of each box
        pixel, column = _runs(first[here][line], last[here][line])
        image.reshape(-1)[row[pixel] * window.width + column] = code[here][line[pixel]]


def _pixels(low: Array, high: Array, start: float, stop: float, pixels: int, least: int) -> tuple[Array, Array]:
    """Return the first pixel, and the one after the last, whose centres are in each range."""
    scale = pixels / (stop - start)
    a, b = (low - start) * scale, (high - start) * scale
    first, last = np.ceil(a - 0.5), np.ceil(b - 0.5)
    if least:
        thin = last - first < least
        first = np.where(thin, np.clip(np.floor(a), 0, pixels - least), first)
        last = np.where(thin, first + least, last)
    return np.clip(first, 0, pixels).astype(np.int64), np.clip(last, 0, pixels).astype(np.int64)


def _runs(first: Array, last: Array) -> tuple[Array, Array]:
    """Return all integers of each range, with the index of their range."""
    counts = last - first
    ends = np.cumsum(counts)
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - counts - first, counts)
