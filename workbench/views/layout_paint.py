"""Boxes of any number → the pixels of a window, in milliseconds; what is picked out is never thinner than a pixel.

::

    boxes (left, right, top, bottom, colour) ──► first and last pixel of each ──► runs ──► image
            1M                                     pixel centres decide; `least` keeps what lies between two of them

The later of two boxes covers the earlier one. A box costs as many writes as it has pixels, so that boxes which do not
overlap cost no more than the image.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Boxes", "Window", "colours", "raster"]

Array = np.ndarray[Any, Any]

BOXES = 65_536  #: painted at a time: what is worked out about them stays in a core's cache
PIXELS = 4_000_000  #: written at a time, or those of one box: boxes that lie on each other need no memory for each


@dataclass(frozen=True, slots=True)
class Window:
    """What is looked at: ``x0 … x1`` across, ``y0 … y1`` down, on ``width`` × ``height`` pixels."""

    x0: float
    x1: float
    y0: float
    y1: float
    width: int
    height: int


@dataclass(frozen=True, eq=False)
class Boxes:
    """``(N,)`` edges, ``left`` < ``right`` and ``top`` < ``bottom`` unless a box is empty, and a code, 0 or more."""

    left: Array
    right: Array
    top: Array
    bottom: Array
    code: Array

    def __len__(self) -> int:
        return len(self.left)

    def take(self, rows: Array | slice) -> Boxes:
        """Some of them."""
        return Boxes(self.left[rows], self.right[rows], self.top[rows], self.bottom[rows], self.code[rows])

    def at(self, x: float, y: float) -> Array:
        """Positions of those that a point lies in."""
        inside = (self.left <= x) & (x < self.right) & (self.top <= y) & (y < self.bottom)
        return np.flatnonzero(inside)


def raster(boxes: Boxes, window: Window, least: int = 0, image: Array | None = None) -> Array:
    """``(height, width) int32`` codes, the first row at ``y0``; -1 where no box is.

    Args:
        least: pixels that a box which touches the window has at least, each way.
        image: painted onto, instead of an empty one.
    """
    image = np.full((window.height, window.width), -1, np.int32) if image is None else image
    for start in range(0, len(boxes), BOXES):
        _paint(boxes.take(slice(start, start + BOXES)), window, least, image)
    return image


def colours(image: Array, palette: Array) -> Array:
    """``(height, width, 4) uint8`` of codes; ``palette`` is ``(codes, 4)``; -1 is transparent."""
    table = np.concatenate([palette.astype(np.uint8), np.zeros((1, 4), np.uint8)])
    return table[image]


def _paint(boxes: Boxes, window: Window, least: int, image: Array) -> None:
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
        line, row = _runs(upper[here], lower[here])  # a line of pixels of each box
        pixel, column = _runs(first[here][line], last[here][line])
        image.reshape(-1)[row[pixel] * window.width + column] = code[here][line[pixel]]


def _pixels(low: Array, high: Array, start: float, stop: float, pixels: int, least: int) -> tuple[Array, Array]:
    """First pixel, and the one after the last, whose centres lie in each range."""
    scale = pixels / (stop - start)
    a, b = (low - start) * scale, (high - start) * scale
    first, last = np.ceil(a - 0.5), np.ceil(b - 0.5)
    if least:
        thin = last - first < least
        first = np.where(thin, np.clip(np.floor(a), 0, pixels - least), first)
        last = np.where(thin, first + least, last)
    return np.clip(first, 0, pixels).astype(np.int64), np.clip(last, 0, pixels).astype(np.int64)


def _runs(first: Array, last: Array) -> tuple[Array, Array]:
    """All integers of each range, with the number of the range they are of."""
    counts = last - first
    ends = np.cumsum(counts)
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - counts - first, counts)
