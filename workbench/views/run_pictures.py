"""Pictures of a run: its curves with checkpoints, resumes and spikes on one axis, and its layers over the steps.

::

    loss      ╲___     ghost ┊╱╲ +0.41           one figure per metric, of one width and with one axis of steps
    lr        ▔▔▔▔▔▔▔▔▔▔▔▔▔▔▔┊▔▔▔▔
    saved      ●     ●     ●  ┊▲     ○           ● nothing found   ▲ finding   ○ incomplete   ◌ not checked yet

The figures are Bokeh's, for pages and standalone files; :mod:`workbench.views.run_plot` draws the same for print.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.analysis.run import Run
from workbench.views.names import safe
from workbench.views.picture import GREY, OKABE_ITO

if TYPE_CHECKING:
    import pandas as pd

MOST = 20_000  #: points of a line that are sent to a browser
RATIO = 30.0  #: ratio of the largest to the smallest value from which the loss is drawn on a log scale
WRONG, DOUBT = OKABE_ITO[5], OKABE_ITO[1]  #: findings and jumps; suspected ones
INK = {WRONG: "#C25500", DOUBT: "#A36A00"}  #: of words in these colours: 4.5 : 1 on white, 4.1 : 1 on black
RUNS = tuple(OKABE_ITO[at] for at in (0, 2, 3, 4, 6))  #: one colour per run; those that mark jumps are left out
MARKERS = {"sound": "circle", "unseen": "circle_dot", "incomplete": "circle", "finding": "triangle"}
HEIGHTS = {"first": 260, "more": 118, "saved": 60}
LETTERS = {"first": 40, "more": 14}  #: of a metric's name that fit beside the picture
PLAIN = 1e-5, 1e6  #: largest values of a metric between which its axis shows 0.0002 rather than 2.000e-4
#: Quantities of the picture of layers: name → column of ``wb.timeline(by="tensor")``, role, title.
LAYER_MEASURES: dict[str, tuple[str, str, str]] = {
    "weight norm": ("norm", "param", "norm of the weights"),
    "update": ("change", "param", "change of the weights since the step before, relative to their norm"),
    "second moment": ("norm", "exp_avg_sq", "norm of the second moment of the gradients"),
    "NaN": ("nan", "", "elements that are NaN"),
}
NAMED = 0.2  #: share of the picture's width that a word beside a line needs on a phone
LATE = 0.7  #: share of the steps after which the words about a jump are left of it, where a resume may be marked
ROWS = 48  #: rows of the picture of layers; more tensors are combined by layer


@dataclass(frozen=True)
class MetricLine:
    """One metric of one run: ``steps`` and ``values`` of equal length, and the abandoned branches."""

    steps: np.ndarray[Any, Any]
    values: np.ndarray[Any, Any]
    ghosts: Sequence[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]] = ()


@dataclass(frozen=True)
class Curves:
    """The data of a picture of one run or several.

    Attributes:
        lines: metric → name of the run → line.
        saves: step path state words of each checkpoint of the first run.
        resumes: step and sentence; spikes: step, value, label, whether it is certain, sentence.
    """

    lines: Mapping[str, Mapping[str, MetricLine]]
    saves: Sequence[tuple[int, str, str, str]] = ()
    resumes: Sequence[tuple[int, str]] = ()
    spikes: Sequence[tuple[int, float, str, bool, str]] = ()


def curves_of(
    run: Run,
    metrics: Sequence[str] | None = None,
    *,
    health: Mapping[str, tuple[str, str]] | None = None,
    others: Mapping[str, Run] | None = None,
    name: str = "",
    most: int = MOST,
) -> Curves:
    """Collect the data of a picture.

    Args:
        metrics: names in ``run.metrics``; by default the loss, the learning rate and the norm of the gradient.
        health: path of a checkpoint → its state (:class:`~workbench.analysis.health.StepHealth`) and a sentence.
        others: further runs, by name, whose lines are drawn over those of the first one.
        name: of the first run, if there are others.
        most: points of a line; longer ones are thinned as :func:`thinned` does.
    """
    from workbench.views.run import spike_sentence

    frame = run.metrics
    if metrics is None:
        metrics = [one for one in ("loss", "lr", "grad_norm") if one in frame] or list(frame.columns[:1])
    ghosts = run.ghosts
    lines: dict[str, dict[str, MetricLine]] = {}
    for metric in metrics:
        mine: dict[str, MetricLine] = {}
        for label, one in {name: run, **(others or {})}.items():
            if metric in one.metrics:
                series = one.metrics[metric].dropna()
                left = () if one is not run else tuple(_branches(ghosts[ghosts["metric"] == metric]))
                drawn = thinned(series.index.to_numpy("int64"), series.to_numpy("float64"), most)
                mine[label] = MetricLine(*drawn, left)
        if mine:
            lines[metric] = mine
    loss = run.metrics.get("loss")
    known = None if loss is None else loss[np.isfinite(loss)]
    marks = []
    for row in run.spikes.to_dict("records"):
        step = int(row["step"])
        at = step if row["kind"] == "nan" or row["peak_step"] != row["peak_step"] else int(row["peak_step"])
        upto = None if known is None else known.loc[:at]  # NaN has no height: marked at that of the point before it
        value = math.nan if upto is None or upto.empty else float(upto.iloc[-1])
        label = f"NaN at {step:,}" if row["kind"] == "nan" else f"+{row['height']:.2f} at {step:,}"
        certain = not row["suspected"] and row["kind"] != "level shift"
        marks.append((step, value, label, certain, spike_sentence(row)))
    resumes = [(int(row["step"]), safe(row["why"])) for row in run.resumes.to_dict("records")]
    saves = []
    for row in run.steps.to_dict("records"):
        plain = (
            ("unseen", "complete; not checked yet") if row["complete"] else ("incomplete", f"incomplete: {row['why']}")
        )
        state, words = (health or {}).get(row["path"], plain)
        saves.append((int(row["step"]), str(row["path"]), state, words))
    return Curves(lines, saves, resumes, marks)


def _branches(ghosts: pd.DataFrame) -> Iterable[tuple[Any, Any]]:
    for _, part in ghosts.groupby("attempt"):
        yield part["step"].to_numpy("int64"), part["value"].to_numpy("float64")


def thinned(steps: Any, values: Any, most: int = MOST) -> tuple[Any, Any]:
    """Return up to ``most`` points of a line: the smallest and the largest value of each stretch of steps."""
    if len(steps) <= most:
        return steps, values
    edges = np.linspace(0, len(steps), most // 2 + 1).astype(np.int64)[:-1]
    filled = np.where(np.isnan(values), -np.inf, values)
    stretch = np.repeat(np.arange(len(edges)), np.diff([*edges, len(steps)]))
    order = np.lexsort((filled, stretch))
    last = np.searchsorted(stretch[order], np.arange(len(edges)), side="right") - 1
    keep = np.unique(np.concatenate([order[edges], order[last]]))
    return steps[keep], values[keep]


# ---- the figures -----------------------------------------------------------------------------------------------------


def run_figure(
    curves: Curves,
    *,
    tapped: Callable[[str, Any], None] | None = None,
    window: tuple[float, float] | None = None,
) -> Any:
    """Return Bokeh's layout of the curves, one figure per metric, and of the checkpoints.

    Args:
        tapped: called with ``"spike"`` and its step, or ``"save"`` and its path, when a mark is clicked.
        window: the first and last step shown; by default all.
    """
    from bokeh.layouts import column
    from bokeh.models import Range1d

    low, high = _extent(curves)
    margin = max((high - low) * 0.02, 1.0)
    shown = window or (low - margin, high + margin)
    axis = Range1d(*shown, bounds=(low - 5 * margin, high + 5 * margin))
    names = list(dict.fromkeys(name for per_run in curves.lines.values() for name in per_run))
    colours = {name: RUNS[at % len(RUNS)] for at, name in enumerate(names)}
    figures = []
    for at, (metric, lines) in enumerate(curves.lines.items()):
        figures.append(_metric(metric, lines, colours, axis, "first" if at == 0 else "more"))
        _events(figures[-1], curves, metric, named=at == 0, tapped=tapped)
    if curves.saves:
        figures.append(_saves(curves.saves, axis, tapped))
    if not figures:
        return column(sizing_mode="stretch_width")
    figures[-1].xaxis.axis_label = "step"
    figures[-1].height += 32
    for figure in figures[:-1]:
        figure.xaxis.visible = False
    return column(*figures, sizing_mode="stretch_width", spacing=2)


def _extent(curves: Curves) -> tuple[float, float]:
    steps = [one[0] for one in curves.saves]
    for lines in curves.lines.values():
        for line in lines.values():
            steps += [int(line.steps[0]), int(line.steps[-1])] if len(line.steps) else []
    return (float(min(steps)), float(max(steps))) if steps else (0.0, 1.0)


def _figure(height: int, axis: Any, label: str, **more: Any) -> Any:
    from bokeh.models import NumeralTickFormatter
    from bokeh.plotting import figure

    made = figure(
        height=height,
        x_range=axis,
        sizing_mode="stretch_width",
        min_width=300,
        min_border_left=76,
        min_border_right=16,
        min_border_top=7,  # half the height of a number at the end of the axis
        min_border_bottom=7,
        tools="xpan,xbox_zoom,xwheel_zoom,reset",
        active_drag="xpan",
        toolbar_location="right",
        **more,
    )
    made.toolbar.autohide, made.toolbar.logo, made.toolbar.active_scroll = True, None, None
    made.background_fill_color = made.border_fill_color = made.outline_line_color = None
    made.grid.visible = False
    made.ygrid.visible, made.ygrid.grid_line_color, made.ygrid.grid_line_alpha = True, GREY, 0.18
    for one in made.axis:
        one.axis_label_text_color = one.major_label_text_color = GREY
        one.axis_line_color = one.major_tick_line_color = GREY
        one.minor_tick_line_color, one.axis_label_text_font_style = None, "normal"
        one.axis_label_text_font_size, one.major_label_text_font_size = "9.5pt", "9pt"
    made.yaxis.axis_label = label
    made.yaxis.ticker.desired_num_ticks = 5 if height > 200 else 3
    made.xaxis.formatter = NumeralTickFormatter(format="0,0")
    return made


def _metric(metric: str, lines: Mapping[str, MetricLine], colours: Mapping[str, str], axis: Any, size: str) -> Any:
    from bokeh.models import ColumnDataSource, HoverTool, Label, PrintfTickFormatter

    drawn = {name: (line.steps, line.values) for name, line in lines.items()}
    values = np.concatenate([values[np.isfinite(values)] for _, values in drawn.values()])
    spread = values.max() / values.min() if len(values) and values.min() > 0 else 1.0
    log = size == "first" and spread > RATIO
    kind = {"y_axis_type": "log"} if log else {}
    label, most = safe(metric), LETTERS[size]
    label = label if len(label) <= most else f"…{label[1 - most :]}"
    made = _figure(HEIGHTS[size], axis, label + (" (log)" if log else ""), **kind)
    largest = np.abs(values).max(initial=0)
    if not log and (largest == 0 or PLAIN[0] <= largest < PLAIN[1]):
        made.yaxis.formatter = PrintfTickFormatter(format="%.7g")
    made.y_range.range_padding = 0.12 if size == "first" else 0.06
    if len(values) and values.min() == values.max():  # Bokeh would show it in a range of 2, where 0.001 looks like 0
        made.y_range.default_span = 0.8 * abs(float(values[0])) or 1.0
    for name, (steps, points) in drawn.items():
        for ghost_steps, ghost_values in lines[name].ghosts:
            made.line(
                *thinned(ghost_steps, ghost_values, 4000), color=GREY, line_width=1.5, line_dash="dashed", alpha=0.8
            )
        source = ColumnDataSource({"step": steps, "value": points, "run": [safe(name)] * len(steps)})
        line = made.line("step", "value", source=source, color=colours[name], line_width=1.8)
        if len(steps) < 60:
            made.scatter("step", "value", source=source, color=colours[name], size=4)
        tips = [
            ("step", "@step{0,0}"),
            (safe(metric), "@value{0.0000a}" if np.abs(values).max(initial=1) >= 1e-3 else "@value{0.00e+0}"),
        ]
        made.add_tools(
            HoverTool(
                renderers=[line],
                tooltips=([("run", "@run")] if len(drawn) > 1 else []) + tips,
                mode="vline",
                line_policy="nearest",
                attachment="horizontal",
            )
        )
        if len(drawn) > 1 and len(steps) and size == "first":
            middle = (axis.start + axis.end) / 2
            made.add_layout(
                Label(
                    x=float(steps[-1]),
                    y=float(points[np.isfinite(points)][-1]),
                    text=safe(name),
                    text_align="right" if steps[-1] > middle else "left",
                    text_baseline="bottom",
                    text_color=colours[name],
                    text_font_size="10pt",
                    y_offset=4,
                )
            )
    if any(line.ghosts for line in lines.values()) and size == "first":
        steps, points = next(ghost for line in lines.values() for ghost in line.ghosts)
        made.add_layout(
            Label(
                x=float(steps[-1]),
                y=float(points[-1]),
                text="overwritten",
                text_color=GREY,
                text_font_size="9pt",
                x_offset=4,
                y_offset=10,  # the line that replaced it is about as high
                text_baseline="middle",
            )
        )
    return made


def _events(figure: Any, curves: Curves, metric: str, *, named: bool, tapped: Any) -> None:
    """Mark resumes and spikes in one figure; ``named`` writes words beside them."""
    from bokeh.models import ColumnDataSource, HoverTool, Label, LabelSet, TapTool

    if curves.resumes:
        source = ColumnDataSource(
            {"step": [one[0] - 0.5 for one in curves.resumes], "words": [one[1] for one in curves.resumes]}
        )
        line = figure.vspan("step", source=source, color=GREY, line_width=1.5, line_dash="dotted")
        if named:
            figure.add_tools(HoverTool(renderers=[line], tooltips=[("resumed", "@words")]))
            low, high = _extent(curves)
            free = low  # up to here there are words
            for step, _ in curves.resumes:
                if step - free < NAMED * (high - low):
                    continue
                free = step
                where = {"x": step - 0.5, "y": 3, "y_units": "screen", "x_offset": -4, "text_align": "right"}
                figure.add_layout(Label(text="resumed", text_color=GREY, text_font_size="9pt", **where))
    marks = [one for one in curves.spikes if math.isfinite(one[1])] if metric == "loss" else []
    if not marks:
        return
    low, high = _extent(curves)
    late = low + LATE * (high - low)
    source = ColumnDataSource(
        {
            "step": [one[0] for one in marks],
            "value": [one[1] for one in marks],
            "label": [one[2] for one in marks],
            "words": [one[4] for one in marks],
            "colour": [WRONG if one[3] else DOUBT for one in marks],
            "ink": [INK[WRONG if one[3] else DOUBT] for one in marks],
            "align": ["right" if one[0] > late else "left" for one in marks],
            "offset": [-10 if one[0] > late else 10 for one in marks],
        }
    )
    figure.vspan("step", source=source, color="colour", line_width=1, alpha=0.6)
    dots = figure.scatter(
        "step", "value", source=source, marker="triangle", size=13, color="colour", nonselection_alpha=1.0
    )
    figure.add_layout(
        LabelSet(
            x="step",
            y="value",
            text="label",
            source=source,
            x_offset="offset",
            y_offset=-6,
            text_align="align",
            text_color="ink",
            text_font_size="10pt",
            text_font_style="bold",
        )
    )
    figure.add_tools(HoverTool(renderers=[dots], tooltips=[("jump", "@words")]))
    if tapped is not None:
        figure.add_tools(TapTool(renderers=[dots]))
        steps = [one[0] for one in marks]
        source.selected.on_change("indices", lambda _, __, new: tapped("spike", steps[new[0]]) if new else None)


def _saves(saves: Sequence[tuple[int, str, str, str]], axis: Any, tapped: Any) -> Any:
    from bokeh.models import ColumnDataSource, HoverTool, TapTool

    made = _figure(HEIGHTS["saved"], axis, "saved", y_range=(-1, 1))
    made.yaxis.ticker, made.yaxis.axis_label_orientation = [], "horizontal"
    made.ygrid.visible = False
    twice = Counter(one[0] for one in saves)
    colours = {"finding": WRONG, "incomplete": GREY, "unseen": GREY, "sound": OKABE_ITO[0]}
    source = ColumnDataSource(
        {
            "step": [one[0] for one in saves],
            "at": [0.45 * (-1) ** at if twice[one[0]] > 1 else 0.0 for at, one in enumerate(saves)],
            "path": [safe(one[1]) for one in saves],
            "words": [safe(one[3])[:300] for one in saves],
            "marker": [MARKERS[one[2]] for one in saves],
            "line": [colours[one[2]] for one in saves],
            "fill": [colours[one[2]] if one[2] in ("sound", "finding") else None for one in saves],
        }
    )
    dots = made.scatter(
        "step",
        "at",
        source=source,
        marker="marker",
        size=12,
        line_color="line",
        fill_color="fill",
        line_width=1.5,
        nonselection_alpha=1.0,
    )
    tips = '<div style="max-width:340px"><b>@path</b><br>@words</div>'
    made.add_tools(HoverTool(renderers=[dots], tooltips=tips))
    if tapped is not None:
        made.add_tools(TapTool(renderers=[dots]))
        paths = [one[1] for one in saves]
        source.selected.on_change("indices", lambda _, __, new: tapped("save", paths[new[0]]) if new else None)
    return made


# ---- layers over steps -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerGrid:
    """Layers × steps: ``values`` is ``(rows, steps)``, NaN if unknown; ``keys`` names, for each cell, the
    tensor that contributes most."""

    rows: list[str]
    steps: list[int]
    paths: list[str]
    values: np.ndarray[Any, Any]
    keys: list[list[str]]
    spoilt: np.ndarray[Any, Any]


def layer_grid(frame: pd.DataFrame, measure: str) -> LayerGrid:
    """Arrange ``wb.timeline(by="tensor")`` for a picture; tensors of one layer are combined if there are many.

    Norms are combined as norms, changes by their largest, counts by their sum.
    """
    column, role, _ = LAYER_MEASURES[measure]
    part = frame[frame["role"] == role] if role else frame
    names = part["fqn"].where(part["fqn"].notna(), part["key"])
    if names.nunique() > ROWS:
        names = names.map(_layer)
    part = part.assign(row=names)
    rows = sorted(part["row"].unique().tolist(), key=_natural)
    saves = part[["step", "path"]].drop_duplicates().sort_values("step", kind="stable")
    at_row, at_step = {name: at for at, name in enumerate(rows)}, {path: at for at, path in enumerate(saves["path"])}
    values = np.full((len(rows), len(saves)), np.nan)
    largest = np.full(values.shape, -np.inf)
    spoilt = np.zeros(values.shape, bool)
    keys = [[""] * len(saves) for _ in rows]
    for row, path, key, value, nan in zip(
        part["row"], part["path"], part["key"], part[column].astype("float64"), part["nan"].astype("int64"), strict=True
    ):
        r, s = at_row[row], at_step[path]
        spoilt[r, s] |= nan > 0
        if value != value:
            continue
        old = values[r, s]
        if old != old:
            values[r, s] = value
        elif column == "norm":
            values[r, s] = math.hypot(old, value)
        else:
            values[r, s] = max(old, value) if column == "change" else old + value
        if value > largest[r, s]:
            largest[r, s], keys[r][s] = value, key
    return LayerGrid(rows, [int(one) for one in saves["step"]], saves["path"].tolist(), values, keys, spoilt)


def _layer(name: str) -> str:
    parts = name.split(".")
    for at, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: at + 1])
    return ".".join(parts[:-1]) or name


def _natural(name: str) -> list[Any]:
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in name.split(".")]


def layers_figure(grid: LayerGrid, measure: str, tapped: Callable[[int, int], None] | None = None) -> Any:
    """Return Bokeh's figure of layers × steps; ``tapped`` is called with row and column of a clicked cell."""
    from bokeh.models import (
        BasicTicker,
        ColorBar,
        ColumnDataSource,
        FixedTicker,
        HoverTool,
        LinearColorMapper,
        LogColorMapper,
        TapTool,
    )
    from bokeh.plotting import figure

    labels, count = _labels(grid.rows), len(grid.rows)
    steps = [f"{step:,}" for step in grid.steps]
    cells = [(r, s) for r in range(count) for s in range(len(steps))]
    values = np.array([grid.values[cell] for cell in cells])
    spoilt = np.array([grid.spoilt[cell] for cell in cells], bool)
    known = values[np.isfinite(values)]
    low, high = (float(known.min()), float(known.max())) if len(known) else (0.0, 1.0)
    log = low > 0 and high / low > RATIO
    mapper = (LogColorMapper if log else LinearColorMapper)(
        palette="Cividis256",
        low=low if log or low < high else 0.0,
        high=high if high > 0 else 1.0,
        nan_color="rgba(0,0,0,0)",
    )
    made = figure(
        x_range=(-0.5, len(steps) - 0.5),
        y_range=(count - 0.5, -0.5),
        height=70 + 18 * max(count, 3),
        sizing_mode="stretch_width",
        min_width=300,
        tools="",
        toolbar_location=None,
        x_axis_label="step",
    )
    made.background_fill_color = made.border_fill_color = made.outline_line_color = None
    made.grid.visible = False
    for one in made.axis:
        one.axis_label_text_color = one.major_label_text_color = GREY
        one.axis_line_color = one.major_tick_line_color = one.minor_tick_line_color = None
        one.axis_label_text_font_style, one.major_label_text_font_size = "normal", "9pt"
    shown = range(0, len(steps), -(-len(steps) // 16) or 1)
    made.xaxis.ticker, made.yaxis.ticker = FixedTicker(ticks=list(shown)), FixedTicker(ticks=list(range(count)))
    made.xaxis.major_label_overrides = {at: steps[at] for at in shown}
    made.yaxis.major_label_overrides = dict(enumerate(labels))
    source = ColumnDataSource(
        {
            "x": [s for _, s in cells],
            "y": [r for r, _ in cells],
            "step": [steps[s] for _, s in cells],
            "name": [safe(grid.rows[r]) for r, _ in cells],
            "value": values,
            "text": ["NaN" if bad else "–" if v != v else f"{v:.4g}" for v, bad in zip(values, spoilt, strict=True)],
        }
    )
    boxes = made.rect(
        "x",
        "y",
        width=0.96,
        height=0.9,
        source=source,
        line_color=None,
        nonselection_fill_alpha=1.0,
        fill_color={"field": "value", "transform": mapper},
    )
    if spoilt.any():
        bad = [at for at in range(len(cells)) if spoilt[at]]
        made.rect(
            [source.data["x"][at] for at in bad],
            [source.data["y"][at] for at in bad],
            width=0.96,
            height=0.9,
            fill_color=OKABE_ITO[3],
            line_color=None,
            level="annotation",
            nonselection_fill_alpha=1.0,
        )
    made.add_tools(HoverTool(renderers=[boxes], tooltips=[("", "@name"), ("step", "@step"), (measure, "@text")]))
    bar = ColorBar(
        color_mapper=mapper,
        width=10,
        title=measure,
        background_fill_color=None,
        title_text_color=GREY,
        major_label_text_color=GREY,
        title_text_font_style="normal",
    )
    if not log:
        bar.ticker = BasicTicker(desired_num_ticks=4)
    made.add_layout(bar, "right")
    if tapped is not None:
        made.add_tools(TapTool(renderers=[boxes]))
        source.selected.on_change("indices", lambda _, __, new: tapped(*cells[new[0]]) if new else None)
    return made


def histograms_figure(steps: Sequence[int], counts: np.ndarray[Any, Any], edges: np.ndarray[Any, Any]) -> Any:
    """Return Bokeh's figure of a tensor's histogram at each step.

    Args:
        counts: ``(steps, bins)``: elements of the tensor in each bin; rows of zeros if it is not stored.
        edges: ``(bins + 1,)``: of the values, the same at all steps.
    """
    from bokeh.models import ColorBar, ColumnDataSource, FixedTicker, HoverTool, LogColorMapper

    made = _figure(HEIGHTS["first"], (-0.5, len(steps) - 0.5), "value")
    shown = range(0, len(steps), -(-len(steps) // 16) or 1)
    made.xaxis.ticker = FixedTicker(ticks=list(shown))
    made.xaxis.major_label_overrides = {at: f"{steps[at]:,}" for at in shown}
    made.xaxis.axis_label = "step"
    at, bins = np.nonzero(counts)
    share = counts[at, bins] / np.maximum(counts.sum(axis=1), 1)[at]
    mapper = LogColorMapper(
        palette="Cividis256", low=float(share.min(initial=1.0)), high=float(share.max(initial=1e-9))
    )
    source = ColumnDataSource(
        {
            "left": at - 0.48,
            "right": at + 0.48,
            "bottom": edges[bins],
            "top": edges[bins + 1],
            "share": share,
            "count": counts[at, bins],
            "step": [f"{steps[one]:,}" for one in at.tolist()],
        }
    )
    boxes = made.quad(
        left="left",
        right="right",
        bottom="bottom",
        top="top",
        source=source,
        line_color=None,
        fill_color={"field": "share", "transform": mapper},
    )
    tips = [("step", "@step"), ("values", "@bottom{0.000e+0} to @top{0.000e+0}"), ("elements", "@count{0,0}")]
    made.add_tools(HoverTool(renderers=[boxes], tooltips=tips))
    bar = ColorBar(color_mapper=mapper, width=10, title="share", background_fill_color=None, title_text_color=GREY)
    bar.major_label_text_color, bar.title_text_font_style = GREY, "normal"
    made.add_layout(bar, "right")
    return made


def _labels(names: Sequence[str], most: int = 40) -> list[str]:
    """Return names without the components that all share at their beginning, and without the last if all share it; if
    need be, cut in what is before the layer number, never in the number or after it."""
    parts = [name.split(".") for name in names]
    shared = 0
    while len(names) > 1 and all(len(one) > shared + 1 and one[shared] == parts[0][shared] for one in parts):
        if parts[0][shared].isdigit():
            break
        shared += 1
    last = parts[0][-1] if parts else ""
    if len(names) > 1 and all(len(one) > shared + 1 and one[-1] == last and not last.isdigit() for one in parts):
        parts = [one[:-1] for one in parts]  # "weight" of all
    out = []
    for one in parts:
        text = safe(".".join(one[shared:]))
        out.append(text if len(text) <= most else f"…{text[-most:]}")
    return out
