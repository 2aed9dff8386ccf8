"""A run's curves for print: PNG, SVG and PDF, through Matplotlib (extra ``figures``).

The picture is that of :mod:`workbench.views.run_pictures`, from the same data.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from workbench.analysis.run import Run, RunComparison
from workbench.errors import MissingExtraError, UsageError, WriteError
from workbench.views.names import safe
from workbench.views.picture import OKABE_ITO
from workbench.views.run_pictures import DOUBT, RATIO, RUNS, WRONG, MetricLine, curves_of

WIDTH, FIRST, MORE, SAVED = 9.0, 2.8, 1.2, 0.5  #: inches: of the picture, and heights of its parts
POINTS = 4_000
MARKERS = {"sound": "o", "unseen": "o", "incomplete": "o", "finding": "^"}


def run_plot(runs: Sequence[Run], metrics: Sequence[str] | None = None) -> Any:
    """Return the figure of one run, or of several over each other; see :meth:`workbench.Run.plot`."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtraError("run.plot() needs Matplotlib: pip install 'ckpt-workbench[figures]'") from None

    class RunFigure(Figure):
        """Matplotlib's figure, which notebooks show, and which saves itself."""

        def save(self, path: str | os.PathLike[str]) -> None:
            """Write PNG, SVG or PDF, by the path's ending.

            Raises:
                WriteError: the file cannot be written. UsageError: another ending.
            """
            ending = os.path.splitext(path)[1].lower()
            if ending not in (".png", ".svg", ".pdf"):
                raise UsageError(f"{os.fspath(path)!r}: the name has to end in .png, .svg or .pdf")
            try:
                self.savefig(path, dpi=150, metadata={"Date": None} if ending == ".svg" else None)
            except OSError as error:
                raise WriteError(f"{os.fspath(path)!r} cannot be written: {error.strerror}") from None

        def _repr_png_(self) -> bytes:
            from io import BytesIO

            stream = BytesIO()
            self.savefig(stream, format="png", dpi=100)
            return stream.getvalue()

    first, names = runs[0], [safe(name) for name in RunComparison(tuple(runs)).names]
    known = {name for run in runs for name in run.metrics.columns}
    if strange := [name for name in metrics or () if name not in known]:
        raise UsageError(f"metric {strange[0]!r} was not logged; logged are {', '.join(map(repr, sorted(known)[:12]))}")
    others = dict(zip(names[1:], runs[1:], strict=True))
    curves = curves_of(first, metrics, others=others, name=names[0], most=POINTS)
    heights = [FIRST if at == 0 else MORE for at in range(len(curves.lines))] + [SAVED] * bool(curves.saves)
    figure = RunFigure(figsize=(WIDTH, sum(heights) + 0.5), layout="constrained")
    if not heights:
        return figure
    axes = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for at, (metric, lines) in enumerate(curves.lines.items()):
        _metric(axes[at], metric, lines, names, first=at == 0)
        for step, _ in curves.resumes:
            axes[at].axvline(step - 0.5, color="0.5", linestyle=":", linewidth=1)
        for step, value, label, certain, _ in curves.spikes if metric == "loss" else ():
            colour = WRONG if certain else DOUBT
            axes[at].axvline(step, color=colour, linewidth=0.8, alpha=0.6)
            if np.isfinite(value):
                axes[at].plot([step], [value], "^", color=colour, markersize=7)
                axes[at].annotate(label, (step, value), (6, 0), textcoords="offset points", color=colour, weight="bold")
    if curves.saves:
        _saves(axes[-1], curves.saves)
    axes[-1].set_xlabel("step")
    axes[-1].xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    return figure


def _metric(axis: Any, metric: str, lines: Any, names: Sequence[str], *, first: bool) -> None:
    values: list[Any] = []
    for name, line in lines.items():
        colour = RUNS[list(names).index(name) % len(RUNS)]
        _line(axis, line, colour, name if len(names) > 1 else None)
        values.append(line.values[np.isfinite(line.values)])
    known = np.concatenate(values) if values else np.empty(0)
    if first and len(known) and known.min() > 0 and known.max() / known.min() > RATIO:
        axis.set_yscale("log")
    axis.set_ylabel(safe(metric)[:24])
    axis.grid(axis="y", alpha=0.25, linewidth=0.6)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    if len(names) > 1 and first:
        axis.legend(frameon=False, fontsize="small")


def _line(axis: Any, line: MetricLine, colour: str, label: str | None) -> None:
    for steps, values in line.ghosts:
        axis.plot(steps, values, color="0.5", linestyle="--", linewidth=1)
    axis.plot(line.steps, line.values, color=colour, linewidth=1.3, label=label)


def _saves(axis: Any, saves: Sequence[tuple[int, str, str, str]]) -> None:
    colours = {"finding": WRONG, "sound": OKABE_ITO[0]}
    for state in MARKERS:
        steps = [one[0] for one in saves if one[2] == state]
        colour = colours.get(state, "0.5")
        fill = colour if state in colours else "none"
        axis.plot(steps, [0] * len(steps), MARKERS[state], color=colour, markerfacecolor=fill, markersize=6)
    axis.set_yticks([])
    axis.set_ylim(-1, 1)
    axis.set_ylabel("saved", rotation=0, ha="right", va="center")
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
