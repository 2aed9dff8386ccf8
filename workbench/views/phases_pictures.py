"""Pictures of the phases of a save.

::

    heat map   phases × ranks, seconds as a colour       Gantt   ranks × time, the phase as a colour
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import holoviews as hv

from workbench.analysis.phases import PARTS, SavePhase, SavePhases
from workbench.views import units
from workbench.views.layout_canvas import SIDES, Marks, ink, options_of, palette
from workbench.views.names import safe
from workbench.views.phases import shown_ranks
from workbench.views.picture import ticks

COLUMNS = 512  #: ranks, or groups of them, beside each other
LABELS = 8  #: ranks up to which each cell has its seconds
ROWS = 48  #: ranks in a Gantt chart


def phase_colours(found: SavePhases) -> dict[str, str]:
    """Return the colour of each phase of the Gantt chart, without phases that are parts of another."""
    names = [name for name in found.names if name not in PARTS]
    return {safe(name): colour for name, colour in zip(names, palette(len(names)), strict=True)}


def heat_picture(found: SavePhases, marks: Marks | None = None) -> hv.Overlay:
    """Draw phases down and ranks across, coloured by seconds; of a group of ranks, the slowest."""
    per = max(-(-found.ranks // COLUMNS), 1)
    columns = -(-found.ranks // per)
    worst: dict[tuple[int, int], tuple[float, int]] = {}
    for r, name in enumerate(found.names):
        for rank, seconds in found.of(name).items():
            worst[rank // per, r] = max(worst.get((rank // per, r), (-1.0, 0)), (seconds, rank))
    top = max((seconds for seconds, _ in worst.values()), default=0.0) or 1e-9
    scale, unit = (1.0, "seconds") if top >= 1 else (1e3, "ms")
    gap = 0.04 if columns <= 64 else 0.0
    names = [safe(name) for name in found.names]
    data = [
        (c + gap, r + 0.05, c + 1 - gap, r + 0.95, scale * seconds, f"rank {rank}", names[r], units.seconds(seconds))
        for (c, r), (seconds, rank) in sorted(worst.items())
    ]
    layers: list[Any] = [
        hv.Rectangles(data, SIDES, [unit, "who", "phase", "words"]).opts(
            color=unit,
            cmap="cividis",
            clim=(0, scale * top),
            colorbar=True,
            line_width=0,
            tools=["hover"],
            colorbar_opts={"width": 10, "title": unit},
            hover_tooltips=[("", "@who"), ("@phase", "@words")],
        )
    ]
    if columns <= LABELS:
        layers.append(_labels(data, scale * top))
    heads = [str(column * per) for column in range(columns)]
    return hv.Overlay(layers).opts(
        **options_of(marks),
        xlim=(0, columns),
        ylim=(0, len(names)),
        xticks=ticks(heads, 16 if columns < 100 else 8),
        invert_yaxis=True,
        yticks=ticks(names),
        xlabel="rank" if per == 1 else f"first of {per} ranks",
        ylabel="",
        height=100 + 26 * len(names),
    )


def _labels(cells: Sequence[tuple[Any, ...]], top: float) -> hv.Labels:
    from bokeh.palettes import Cividis256

    rows = [
        (
            (left + right) / 2,
            (upper + lower) / 2,
            f"{value:.{0 if value >= 9.95 else 1 if value >= 0.995 else 2}f}",
            ink(Cividis256[min(int(255 * value / top), 255)]),
        )
        for left, upper, right, lower, value, *_ in cells
    ]
    return hv.Labels(rows, SIDES[:2], ["text", "ink"]).opts(
        text_color=hv.dim("ink"), text_font_size="8pt", text_align="center", text_baseline="middle"
    )


def gantt_picture(found: SavePhases) -> hv.Overlay:
    """Draw ranks down and time across; of many ranks, those whose data took longest."""
    paint, ranks = phase_colours(found), shown_ranks(found, ROWS)
    at = {rank: row for row, rank in enumerate(ranks)}
    rows = [row for row in found.rows if row.name not in PARTS and row.rank in at]
    begin = min((row.start for row in rows), default=0.0)
    end = max((row.start + row.seconds - begin for row in rows), default=0.0) or 1e-9
    data = [
        (
            row.start - begin,
            at[row.rank] + 0.12,
            row.start + row.seconds - begin,
            at[row.rank] + 0.88,
            paint[safe(row.name)],
            f"rank {row.rank}",
            safe(row.name),
            _bar(found, row),
        )
        for row in rows
    ]
    tips = [("", "@who"), ("@phase", "@words")]
    slow = found.slowest
    names = [
        f"slowest: {rank}" if slow is not None and not slow.even and rank == slow.rank else str(rank) for rank in ranks
    ]
    bars = hv.Rectangles(data, SIDES, ["fill", "who", "phase", "words"]).opts(
        color=hv.dim("fill"), line_width=0, tools=["hover"], hover_tooltips=tips
    )
    return hv.Overlay([bars]).opts(
        **options_of(None),
        xlim=(0, end * 1.01),
        ylim=(0, len(ranks)),
        yticks=ticks(names),
        invert_yaxis=True,
        xlabel="seconds",
        ylabel="rank",
        height=100 + 22 * max(len(ranks), 3),
    )


def _bar(found: SavePhases, row: SavePhase) -> str:
    took = units.seconds(row.seconds)
    if row.name != "data":
        return took
    parts = ((name, found.seconds(row.rank, name)) for name in PARTS)
    words = ", ".join(f"{name} {units.seconds(one)}" for name, one in parts if one is not None)
    return f"{took} for {units.nbytes(row.nbytes)}; over its threads {words}"
