"""Shared by all pictures: colours, axes, and their look on light and dark pages.

There is one small set of colours: Okabe–Ito for classes, cividis for magnitudes. Text and axes are a grey that is
legible on white and on black; the background is the page's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import holoviews as hv
import holoviews.plotting.bokeh  # registers the renderer without loading a notebook extension
import numpy as np

OKABE_ITO = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000")
LINE = 80  #: characters of a legend that fit on one line of 800 pixels
GREY = "#777777"  #: 4.5 : 1 on white, 4.1 : 1 on black
hv.Store.set_current_backend("bokeh")


def _page(plot: Any, element: Any) -> None:
    """Use the page's background, and text that is legible on any."""
    figure = plot.state
    figure.background_fill_color = figure.border_fill_color = None
    figure.outline_line_color = None
    figure.title.text_color, figure.title.text_font_size = GREY, "11pt"
    for axis in figure.axis:
        axis.axis_label_text_color = axis.major_label_text_color = GREY
        axis.axis_line_color, axis.major_tick_line_color, axis.minor_tick_line_color = GREY, GREY, None
        axis.axis_label_text_font_style = "normal"
    for one in figure.select({"type": _model("Legend")}):
        one.background_fill_alpha, one.border_line_color, one.label_text_color = 0.0, None, GREY
        one.location, one.padding, one.margin, one.spacing = "left", 2, 2, 14
        one.label_text_font_size = "9pt"
        if one.items:  # a line wider than the page would make it scroll sideways
            one.ncols = max(LINE // (max(len(_words(item)) for item in one.items) + 6), 1)
    for one in figure.select({"type": _model("ColorBar")}):
        one.background_fill_color, one.title_text_color, one.major_label_text_color = None, GREY, GREY
        one.title_text_font_style = "normal"


def _words(item: Any) -> str:
    label = item.label
    return str(label.get("value", "") if isinstance(label, Mapping) else getattr(label, "value", label))


def _model(name: str) -> Any:
    import bokeh.models

    return getattr(bokeh.models, name)


FRAME: dict[str, Any] = {
    "responsive": True,
    "min_width": 320,
    "toolbar": "right",
    "default_tools": ["pan", "box_zoom", "reset"],
    "show_grid": False,
    "hooks": [_page],
}


def legend(**more: Any) -> dict[str, Any]:
    """Return the options of an overlay whose legend is above the data, where it covers nothing."""
    return {
        **FRAME,
        "show_legend": True,
        "legend_position": "top",
        "legend_opts": {"orientation": "horizontal"},
        **more,
    }


def framed(plot: Any, source: Any) -> None:
    """Draw the rectangles of a source (``left``, ``right``, ``top``, ``bottom``) over a plot, as frames with a halo."""
    for width, colour in ((5, "#FFFFFF"), (2.5, "#000000")):  # visible on any colour
        plot.state.quad(
            left="left",
            right="right",
            top="top",
            bottom="bottom",
            source=source,
            fill_alpha=0,
            line_color=colour,
            line_width=width,
            level="overlay",
        )


def ticks(names: Sequence[str], most: int = 60) -> list[tuple[float, str]]:
    """Return ticks with names in the middle of unit cells, as many as are legible."""
    step = max(-(-len(names) // most), 1)
    return [(at + 0.5, name) for at, name in enumerate(names) if at % step == 0]


def boxes(
    cells: Mapping[str, Sequence[tuple[Any, ...]]], colours: Mapping[str, str], axes: tuple[str, str], says: str
) -> hv.Overlay:
    """Draw unit cells of a grid by class; each class has a colour and a legend entry.

    Args:
        cells: class → ``(column, row, text)``.
    """
    layers = []
    for words, rows in cells.items():
        data = [(x + 0.03, y + 0.03, x + 0.97, y + 0.97, text) for x, y, text in rows]
        made = hv.Rectangles(data, kdims=[axes[0], axes[1], "right", "bottom"], vdims=[says], label=words)
        tips = [(says, f"@{{{says}}}")]
        layers.append(made.opts(color=colours[words], line_width=0, tools=["hover"], hover_tooltips=tips))
    return hv.Overlay(layers)


def curves(
    lines: Mapping[str, tuple[Sequence[float], Sequence[float]]], axes: tuple[str, str], colours: Mapping[str, str]
) -> list[Any]:
    """Draw lines with a mark at every point, which makes single points visible, too."""
    made: list[Any] = []
    for words, (x, y) in lines.items():
        data = (np.asarray(x, float), np.asarray(y, float))
        made.append(hv.Curve(data, *axes, label=words).opts(color=colours[words], line_width=2))
        made.append(hv.Scatter(data, *axes, label=words).opts(color=colours[words], size=6, tools=["hover"]))
    return made
