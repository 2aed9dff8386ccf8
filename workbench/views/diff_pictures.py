"""Pictures of a diff: where the changes are, how large they are, and the values before and after.

::

    heat    layer × module, the relative change as a colour       values   the two histograms, solid and dashed
                                                                  tail     how many elements changed by how much
                                                                  bands    which rows, which columns changed

Equal tensors are empty frames, which cannot be mistaken for a shade. Cells without a number have colours off the scale.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import holoviews as hv
import numpy as np

from workbench.analysis.comparison import Comparison
from workbench.analysis.diff_result import Diff
from workbench.analysis.diff_rows import TensorDiff
from workbench.analysis.pair_histogram import PairHistogram
from workbench.core.words import plural
from workbench.views import units
from workbench.views.diff_grid import Grid, GridCell
from workbench.views.names import safe, shorten_all
from workbench.views.picture import FRAME, GREY, OKABE_ITO, framed, legend, ticks

BLUE, ORANGE, GREEN, PINK, SKY, RED, YELLOW, _ = OKABE_ITO
KINDS = {
    "equal": GREY,
    "not compared": ORANGE,
    "changed, not measured": SKY,
    "NaN in B only": PINK,
    "different shape": RED,
}
TOOLS = ["pan", "box_zoom", "wheel_zoom", "reset", "save"]
DIMS = ["layer", "module", "right", "bottom"]
GAP = 0.04
ROW = 24  #: pixels
NAME = 30  #: characters of a row's name; the tooltip has the full name
TIPS = [("tensor", "@tensor"), ("change", "@words")]


def heat_picture(grid: Grid, rows: Sequence[TensorDiff], frame: Frame | None = None) -> hv.Overlay:
    """Draw cells by layer and module; the tooltip of a cell names its most changed tensor."""
    measured = [cell for cell in grid.cells if cell.kind == "changed"]
    value = hv.Dimension("value", label="‖b − a‖ / ‖a‖")
    layers: list[Any] = []
    if measured:
        low, high = _decades([cell.value for cell in measured])
        data = [(*_box(cell), min(max(cell.value, low), high), *_tooltip(cell, rows)) for cell in measured]
        layers.append(
            hv.Rectangles(data, DIMS, [value, "tensor", "words"]).opts(
                color="value",
                cmap="cividis",
                cnorm="log",
                clim=(low, high),
                colorbar=True,
                line_width=0,
                colorbar_opts={"width": 10, "title": "‖b−a‖ / ‖a‖", **_powers(low, high)},
                tools=["hover"],
                hover_tooltips=TIPS,
            )
        )
    for kind, colour in KINDS.items():
        cells = [cell for cell in grid.cells if cell.kind == kind]
        if cells:
            made = hv.Rectangles(
                [(*_box(cell), *_tooltip(cell, rows)) for cell in cells], DIMS, ["tensor", "words"], label=kind
            )
            fill = 0.0 if kind == "equal" else 1.0
            layers.append(
                made.opts(
                    fill_color=colour,
                    fill_alpha=fill,
                    line_color=colour,
                    line_width=1,
                    tools=["hover"],
                    hover_tooltips=TIPS,
                )
            )
    names = shorten_all(list(grid.modules), [NAME] * len(grid.modules))
    options = legend(default_tools=TOOLS, active_tools=[])
    options["show_legend"] = any(cell.kind != "changed" for cell in grid.cells)
    options["hooks"] = [*options["hooks"], *([] if frame is None else [frame.hook])]
    return hv.Overlay(layers).opts(
        **options,
        xlabel="layer (–: none)" if "–" in grid.layers else "layer",
        ylabel="",
        xlim=(0, max(len(grid.layers), 1)),
        ylim=(0, max(len(grid.modules), 1)),
        xticks=ticks(grid.layers, 16),
        yticks=ticks(names, 60),
        invert_yaxis=True,
        height=110 + ROW * max(min(len(grid.modules), 30), 4),
    )


class Frame:
    """The frame around the selected cell, in every rendering of a picture.

    It is drawn directly in Bokeh. HoloViews would send the whole picture again and replace the page's colours and text
    sizes with its own.
    """

    def __init__(self) -> None:
        self._cell: GridCell | None = None
        self._drawn: list[Any] = []

    def hook(self, plot: Any, element: Any) -> None:
        """Attach the frame to a rendering; pass this to the options of the picture."""
        if "frame" not in plot.handles:
            from bokeh.models import ColumnDataSource

            source = plot.handles["frame"] = ColumnDataSource(self._data())
            framed(plot, source)
            self._drawn.append(source)

    def show(self, cell: GridCell | None) -> None:
        """Move the frame; ``None`` removes it."""
        self._cell = cell
        for source in self._drawn:
            source.data = self._data()

    def _data(self) -> dict[str, list[float]]:
        at = [] if self._cell is None else [self._cell]
        x, y = [float(cell.column) for cell in at], [float(cell.row) for cell in at]
        return {"left": x, "right": [left + 1 for left in x], "top": y, "bottom": [top + 1 for top in y]}


def value_picture(found: PairHistogram, names: tuple[str, str]) -> hv.Overlay:
    """Draw both histograms as steps over the same bins.

    Args:
        names: of the two sides, for the legend.
    """
    layers: list[Any] = []
    for counts, name, colour, dash in ((found.a, names[0], BLUE, "solid"), (found.b, names[1], ORANGE, "dashed")):
        heights = np.where(counts > 0, counts, np.nan).astype(float)
        x = np.repeat(found.edges, 2)[1:-1]
        line = hv.Curve((x, np.repeat(heights, 2)), "value", "elements", label=name)
        layers.append(line.opts(color=colour, line_dash=dash, line_width=2.2))
    top = max(int(found.a.max(initial=1)), int(found.b.max(initial=1)), 1)
    return hv.Overlay(layers).opts(
        **{**legend(), "default_tools": TOOLS[:2] + TOOLS[3:], "active_tools": []},
        logy=True,
        ylim=(0.7, top * 1.6),
        xlabel="value",
        ylabel="elements",
        height=270,
    )


def tail_picture(found: Comparison) -> hv.Overlay | None:
    """Draw the share of elements by minimum change; return ``None`` if no change has a number."""
    points = [(t, share) for t, share in found.tail() if t > 0]
    if not points:
        return None
    t = np.array([point[0] for point in points])
    share = 100 * np.array([point[1] for point in points])
    one = 100 / max(found.seen, 1)
    line = hv.Curve((t, share), "change", "share").opts(color=BLUE, line_width=2.2)
    words = [plural(round(value / one), "element") for value in share.tolist()]
    marks = hv.Scatter((t, share, words), "change", ["share", "words"]).opts(
        color=BLUE,
        size=6,
        tools=["hover"],
        hover_tooltips=[("|Δ| at least", "@change{0.00e+0}"), ("share", "@share{0.00e+0} %"), ("elements", "@words")],
    )
    return hv.Overlay([line, marks]).opts(
        **{**FRAME, "default_tools": TOOLS[:2] + TOOLS[3:], "active_tools": [], "show_legend": False},
        logx=True,
        logy=True,
        xlim=(t.min() / 2, t.max() * 2),
        ylim=(min(one, share.min()) / 2, 200),
        xlabel="|Δ| at least",
        ylabel="share of the elements, %",
        height=270,
    )


def band_picture(found: Comparison, shape: tuple[int, ...]) -> hv.Overlay | None:
    """Draw the changed elements along each axis, one strip per axis; return ``None`` if positions are unknown."""
    if found.bands is None or not found.changed or found.changed == found.seen:
        return None
    axes = [axis for axis, size in enumerate(shape) if size > 1 and axis < len(found.bands)]
    if not axes:
        return None
    rows = []
    for place, axis in enumerate(axes):
        size, counts = shape[axis], found.bands[axis]
        width = max(-(-size // len(counts)), 1)
        per_index = int(np.prod(shape)) // size
        for n, count in enumerate(counts[: -(-size // width)].tolist()):
            low, high = n * width, min((n + 1) * width, size)
            share = 100 * count / max((high - low) * per_index, 1)
            words = f"{low:,} to {high - 1:,}: {count:,} of {(high - low) * per_index:,} elements"
            rows.append((low / size, place + 0.1, high / size, place + 0.9, share, words))
    share_dim = hv.Dimension("share", label="changed, %")
    cells = hv.Rectangles(rows, ["along", "axis", "right", "bottom"], [share_dim, "words"]).opts(
        color="share",
        cmap="cividis",
        clim=(0, max(row[4] for row in rows)),
        line_width=0,
        colorbar=True,
        colorbar_opts={"width": 10, "title": "changed, %"},
        tools=["hover"],
        hover_tooltips=[("", "@words")],
    )
    return hv.Overlay([cells]).opts(
        **{**FRAME, "default_tools": TOOLS[:2] + TOOLS[3:], "active_tools": [], "show_legend": False},
        xlim=(0, 1),
        ylim=(0, len(axes)),
        xticks=[(0, "first"), (0.5, "middle"), (1, "last")],
        yticks=[(place + 0.5, f"axis {axis} of {shape[axis]:,}") for place, axis in enumerate(axes)],
        xlabel="",
        ylabel="",
        invert_yaxis=True,
        height=90 + 42 * len(axes),
    )


def side_names(diff: Diff) -> tuple[str, str]:
    """Return ``A, step 2`` and ``B, step 4``."""
    first, second = (
        letter if step is None else f"{letter}, step {step:,}" for letter, step in zip("AB", diff.steps, strict=True)
    )
    return first, second


def _box(cell: GridCell) -> tuple[float, float, float, float]:
    return cell.column + GAP, cell.row + GAP, cell.column + 1 - GAP, cell.row + 1 - GAP


def _tooltip(cell: GridCell, rows: Sequence[TensorDiff]) -> tuple[str, str]:
    """Return the tensor's full name and its numbers."""
    row, c = rows[cell.at], rows[cell.at].comparison
    words = cell.kind
    if cell.kind == "changed" and c is not None:
        words = f"{_short(cell.value)} relative, {units.percent(c.changed, c.seen)} of {c.seen:,} elements"
        words += "" if c.max_abs is None else f", max |Δ| {_short(c.max_abs)}"
    elif cell.kind == "different shape":
        words = f"{units.shape(row.shape_a)} → {units.shape(row.shape_b)}"
    if cell.tensors > 1:
        words += f"; the largest change of {cell.tensors:,} tensors here ({cell.changed:,} differ)"
    return safe(row.key_b), words


def _short(value: float | int) -> str:
    if not math.isfinite(value):
        return "∞"
    return "0" if not value else f"{value:.3g}" if 0.001 <= abs(value) < 1000 else f"{value:.1e}"


def _decades(values: Sequence[float]) -> tuple[float, float]:
    """Return the powers of ten that enclose the finite values, two or more decades apart."""
    finite = [math.log10(value) for value in values if 0 < value < math.inf]
    if not finite:
        return 1e-6, 1.0
    low, high = max(math.floor(min(finite)), -300), min(math.ceil(max(finite)), 300)
    while high - low < 2:
        low -= 1
    return 10.0**low, 10.0**high


def _powers(low: float, high: float) -> dict[str, Any]:
    """Return the ticks of a colour bar at powers of ten."""
    from bokeh.models import FixedTicker

    first, last = round(math.log10(low)), round(math.log10(high))
    step = max(-(-(last - first) // 8), 1)
    marks = [10.0**power for power in range(first, last + 1, step)]
    small = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
    words = {at: f"10{str(round(math.log10(at))).translate(small)}" for at in marks}
    return {"ticker": FixedTicker(ticks=marks, minor_ticks=[]), "major_label_overrides": words}
