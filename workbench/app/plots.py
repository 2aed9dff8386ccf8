"""Pictures: data → HoloViews element; no state, no Panel, no file access.

There is one small set of colours: Okabe–Ito for classes, cividis for magnitudes, RdBu for signed values. Exact zeros
and non-numbers are never a shade of the scale: each has its own colour, the same in every picture. Text has the colour
of the page's theme, light or dark.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import holoviews as hv
import holoviews.plotting.bokeh  # registers the renderer without loading a notebook extension
import numpy as np
from bokeh.models import SaveTool

from workbench.analysis.heatmap import Heat
from workbench.analysis.summary import Histogram, Summary
from workbench.views.picture import OKABE_ITO

ZERO = "#F0E442"  #: exactly zero
ODD = "#CC79A7"  #: NaN and infinities
CLIP = 99.9  #: percentile of the cells' magnitudes at which a signed colour scale is clipped

hv.Store.set_current_backend("bokeh")
_FRAME: dict[str, Any] = {"responsive": True, "toolbar": "above", "show_grid": False, "show_frame": False}


def histogram(found: Histogram, summary: Summary) -> hv.Overlay:
    """Draw counts on a log scale; exact zeros have a separate bar and are not part of their bin."""
    counts, edges = found.counts.copy(), found.edges
    zero = summary.zero if edges[0] <= 0 <= edges[-1] else 0
    if zero:
        home = min(int(np.searchsorted(edges, 0.0, side="right")) - 1, len(counts) - 1)
        counts[home] -= min(zero, counts[home])
    full = np.flatnonzero(counts)
    floor = 0.7
    bins = [(edges[i], floor, edges[i + 1], counts[i], f"{edges[i]:.4g} … {edges[i + 1]:.4g}") for i in full]
    dims: list[Any] = ["value", "floor", "right", "elements"]
    top = max(counts.max(initial=1), zero, 1) * 1.6
    tips = [("values", "@range"), ("elements", "@elements{0,0}")]
    plot = hv.Rectangles(bins, kdims=dims, vdims=["range"], label="elements" if zero else "").opts(
        color=OKABE_ITO[0], line_width=0, tools=["hover"], hover_tooltips=tips
    )
    if zero:
        width = (edges[-1] - edges[0]) / 180
        line = hv.Rectangles(
            [(-width, floor, width, zero, "exactly 0")], kdims=dims, vdims=["range"], label="exactly zero"
        )
        plot = plot * line.opts(color=ZERO, line_color="#8A7F00", line_width=1, tools=["hover"], hover_tooltips=tips)
    return hv.Overlay([plot] if not isinstance(plot, hv.Overlay) else list(plot)).opts(
        logy=True,
        ylim=(floor, top),
        height=300,
        xlabel="value" if summary.kind != "magnitudes" else "magnitude",
        ylabel="elements (log scale)",
        title="",
        show_legend=bool(zero),
        legend_position="top_right",
        default_tools=["pan", "box_zoom", "save", "reset"],
        hooks=[_saved_as("histogram")],
        **_FRAME,
    )


def heat_map(heat: Heat, shape: tuple[int, ...]) -> hv.Overlay:
    """Draw the cells of a tensor, row 0 on top; axes count elements, circles mark the most extreme elements."""
    values = heat.values.astype(np.float64)
    rows, cols = heat.shape
    odd = ~np.isfinite(values)
    signed = bool((values[~odd] < 0).any())
    scale = float(np.percentile(np.abs(values[~odd]), CLIP)) if (~odd).any() else 0.0
    scale = scale or 1.0
    shown = np.where(odd | (values == 0), np.nan, values)
    limits = (-scale, scale) if signed else (0.0, scale)
    largest = hv.Dimension("largest", range=limits)  # set explicitly: cells may have no number
    image = hv.Image(shown[::-1], bounds=(0, 0, cols, rows), kdims=["column", "row"], vdims=[largest]).opts(
        cmap="RdBu_r" if signed else "cividis",
        clim=limits,
        clipping_colors={"NaN": ZERO},
        colorbar=True,
        colorbar_opts={"width": 10, "title": "largest"},
        tools=["hover"],
        hover_tooltips=[("row", "$y{0,0}"), ("column", "$x{0,0}"), ("largest in cell", "@image{0.0000e+0}")],
    )
    layers: list[Any] = [image]
    if odd.any():
        edges = heat.row_edges, heat.col_edges
        where = [(edges[1][c], edges[0][r], edges[1][c + 1], edges[0][r + 1]) for r, c in np.argwhere(odd)]
        layers.append(hv.Rectangles(where, kdims=["column", "row", "c1", "r1"]).opts(color=ODD, line_color=ODD))
    points = worst_points(heat, shape)
    for width, color in ((3.0, "#FFFFFF"), (1.2, "#000000")):  # a halo, visible on any colour
        ring = hv.Points(points, kdims=["column", "row"])
        layers.append(ring.opts(size=13, fill_alpha=0, line_color=color, line_width=width, marker="circle"))
    return hv.Overlay(layers).opts(
        invert_yaxis=True,
        xlim=(0, cols),
        ylim=(0, rows),
        height=150 if rows == 1 else 380,
        xlabel="column",
        ylabel="row",
        yticks=[(0, "0")] if rows == 1 else 5,
        show_legend=False,
        default_tools=["pan", "wheel_zoom", "box_zoom", "save", "reset"],
        hooks=[_saved_as("heat-map")],
        active_tools=[],
        **_FRAME,
    )


def worst_points(heat: Heat, shape: tuple[int, ...]) -> list[tuple[float, float]]:
    """Return the centres ``(column, row)``, in the matrix, of the most extreme elements of a tensor of this shape."""
    cols = heat.shape[1]
    flat = [int(np.ravel_multi_index(index, shape)) if index else 0 for index, _ in heat.worst]
    return [(at % cols + 0.5, at // cols + 0.5) for at in flat]


def _saved_as(name: str) -> Callable[[Any, Any], None]:
    """Return a hook that sets the file name of the save tool, which would otherwise ask for one."""

    def hook(plot: Any, _: Any) -> None:
        for tool in plot.state.tools:
            if isinstance(tool, SaveTool):
                tool.filename = name

    return hook
