"""Shared by the pictures of a layout: colours of classes and errors, frames, and painting window by window."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import holoviews as hv
import numpy as np

from workbench.core.arrays import Array
from workbench.views.layout_paint import PaintWindow
from workbench.views.picture import FRAME, OKABE_ITO

__all__ = [
    "CLASSES", "HOLE", "NO_TENSOR", "OVERLAP", "SIDES", "TOOLS", "Marks", "ink", "lighter", "options_of", "painted",
    "palette", "rgba", "unit_of",
]  # fmt: skip

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
        for width, colour in ((5, "#FFFFFF"), (2.5, "#000000")):  # a halo, visible on any colour
            plot.state.quad(
                left="left", right="right", top="top", bottom="bottom", source=source, fill_alpha=0,
                line_color=colour, line_width=width, level="overlay",
            )  # fmt: skip
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
