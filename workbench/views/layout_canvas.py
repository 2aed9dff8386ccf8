"""Shared by the pictures of a layout: colours of classes and errors, frames, and painting window by window.

Paint any number of boxes into the pixels of a window in milliseconds; chosen boxes are never thinner than a pixel.

::

    boxes (left, right, top, bottom, colour) ──► first and last pixel of each ──► runs ──► image
            1M                                     pixel centres decide; `least` keeps boxes between two centres

A later box covers an earlier one. A box costs as many writes as it has pixels; boxes that do not overlap cost no more
than the image."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import holoviews as hv
import numpy as np

from workbench.core import box
from workbench.core.arrays import Array
from workbench.views.picture import FRAME, OKABE_ITO, framed

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
    return np.repeat(np.arange(len(counts)), counts), box.spans(first, counts)


BLUE, ORANGE, GREEN, PINK, SKY, RED, YELLOW, _ = OKABE_ITO
CLASSES = (BLUE, ORANGE, GREEN, PINK, SKY)
HOLE, OVERLAP = RED, YELLOW  #: reserved for errors in every picture
NO_TENSOR = "#B0B0B0"  #: bytes of a file that belong to no tensor
TOOLS = ["pan", "box_zoom", "wheel_zoom", "reset", "save"]
SIDES = ["left", "upper", "right", "lower"]


class Marks:
    """Frames around the selection, in every rendering of a picture.

    They are drawn directly in Bokeh: HoloViews would send the whole picture again.
    """

    def __init__(self) -> None:
        self._boxes: Sequence[tuple[float, float, float, float]] = ()
        self._drawn: list[Any] = []

    def hook(self, plot: Any, element: Any) -> None:
        """Attach the frames to a rendering; pass this to the options of the picture."""
        if "marks" in plot.handles:
            return
        from bokeh.models import ColumnDataSource

        source = plot.handles["marks"] = ColumnDataSource(self._data())
        framed(plot, source)
        self._drawn.append(source)

    def show(self, boxes: Sequence[tuple[float, float, float, float]]) -> None:
        """Move the frames: left, top, right and bottom of each."""
        self._boxes = boxes
        for source in self._drawn:
            source.data = self._data()

    def _data(self) -> dict[str, list[float]]:
        sides = zip(*self._boxes, strict=True) if self._boxes else ((), (), (), ())
        left, top, right, bottom = ([float(one) for one in side] for side in sides)
        return {"left": left, "right": right, "top": top, "bottom": bottom}


def palette(count: int) -> list[str]:
    """Return a colour per class; above five, they are steps of one scale in the order of the classes."""
    if count <= len(CLASSES):
        return list(CLASSES[:count])
    from bokeh.palettes import Cividis256

    return [Cividis256[round(at * 255 / (count - 1))] for at in range(count)]


def ink(colour: str) -> str:
    """Return black or white, whichever is more legible on a colour."""
    r, g, b = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    light = 0.2126 * r**2.2 + 0.7152 * g**2.2 + 0.0722 * b**2.2
    return "#000000" if light > 0.18 else "#FFFFFF"


def painted(
    paint: Callable[[PaintWindow], Array], bounds: tuple[float, float, float, float], options: dict[str, Any]
) -> Any:
    """Return a picture that is repainted for every visible window."""
    x0, x1, y0, y1 = bounds
    shape = {"width": 900, "height": options["height"] - 60}  # until the browser reports its size

    def drawn(x_range: Any, y_range: Any, width: Any, height: Any, scale: Any = None) -> hv.RGB:
        left, right = _within(x_range, x0, x1)
        low, high = _within(y_range, y0, y1)
        wide = min(max(int(width or shape["width"]), 32), 2400)
        tall = min(max(int(height or shape["height"]), 16), 1600)
        image = paint(PaintWindow(left, right, low, high, wide, tall))
        return hv.RGB(image[::-1], bounds=(left, low, right, high), kdims=["left", "upper"])

    streams = [hv.streams.RangeXY(), hv.streams.PlotSize()]
    return hv.DynamicMap(drawn, streams=streams).opts(hv.opts.RGB(**options))


def _within(asked: Any, low: float, high: float) -> tuple[float, float]:
    """Clip a visible range to the data."""
    if asked is None or None in asked or not all(np.isfinite(asked)):
        return low, high
    a, b = max(min(asked), low), min(max(asked), high)
    return (a, b) if b > a else (low, high)


def options_of(marks: Marks | None) -> dict[str, Any]:
    hooks = [*FRAME["hooks"], *([] if marks is None else [marks.hook])]
    return {**FRAME, "default_tools": TOOLS, "active_tools": [], "hooks": hooks} | {"show_legend": False}


def rgba(names: Sequence[str]) -> Array:
    return np.array([[int(name[at : at + 2], 16) for at in (1, 3, 5)] + [255] for name in names], np.uint8)


def lighter(colour: str) -> str:
    """Return a lighter shade, still recognisable as the same class."""
    parts = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(part + 0.28 * (255 - part)):02X}" for part in parts)


def unit_of(largest: float) -> tuple[str, int]:
    power = 0
    while power < 4 and largest >= 1024 << (10 * power):
        power += 1
    return ("B", "KiB", "MiB", "GiB", "TiB")[power], 1 << (10 * power)
