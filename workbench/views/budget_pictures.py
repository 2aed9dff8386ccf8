"""A memory budget as stacked bars: what each rank would hold, part by part, against the memory of a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import holoviews as hv

from workbench.core.words import plural
from workbench.memory import Budget
from workbench.memory.budget import PARTS
from workbench.views import units
from workbench.views.layout_canvas import unit_of
from workbench.views.picture import FRAME, OKABE_ITO, legend

if TYPE_CHECKING:
    import pandas as pd

COLOURS = dict(zip(PARTS, OKABE_ITO, strict=False))
LIMIT = OKABE_ITO[5]
MOST = 96  #: bars


def bars(found: Budget) -> tuple[pd.DataFrame, str]:
    """Return the rows of ``Budget.ranks`` to draw, and their meaning; if too many, one bar per group of ranks."""
    ranks = found.ranks
    if len(ranks) <= MOST:
        return ranks, "Each bar is a rank."
    places = ranks.groupby(["pp", "ep", "tp"], sort=True)["nbytes"].idxmax()
    if len(places) <= MOST:
        return ranks.loc[places], f"Each bar is the largest of {plural(found.chosen.dp, 'data-parallel rank')}."
    step = -(-len(ranks) // MOST)
    top = ranks.groupby(ranks.index // step)["nbytes"].idxmax()
    return ranks.loc[top], f"Each bar is the largest of {plural(step, 'neighbouring rank')}."


def budget_picture(found: Budget) -> hv.Overlay:
    """Draw the ranks of the chosen layout as stacked bars, with a line at the memory of a GPU."""
    table, _ = bars(found)
    room = found.memory - found.reserve
    unit, divisor = unit_of(max(int(table["nbytes"].max()), room))
    layers: list[Any] = []
    base = [0.0] * len(table)
    rows = table.to_dict("records")
    for part in PARTS:
        sizes = [row[part] / divisor for row in rows]
        if not any(sizes):
            continue
        data = [
            (
                n + 0.08,
                low,
                n + 0.92,
                low + size,
                _rank_label(row),
                f"{part}: {units.nbytes(int(row[part]))}",
                f"{units.nbytes(int(row['nbytes']))} of {units.nbytes(room)}",
            )
            for n, (row, low, size) in enumerate(zip(rows, base, sizes, strict=True))
        ]
        layers.append(
            hv.Rectangles(data, ["at", "memory", "right", "top"], ["who", "part", "all"], label=part).opts(
                color=COLOURS[part],
                line_width=0,
                tools=["hover"],
                hover_tooltips=[("", "@who"), ("", "@part"), ("total", "@all")],
            )
        )
        base = [low + size for low, size in zip(base, sizes, strict=True)]
    line = hv.Curve([(0, room / divisor), (max(len(rows), 6), room / divisor)], "at", "memory", label="GPU memory")
    layers.append(line.opts(color=LIMIT, line_width=2.5, line_dash="dashed"))
    step = max(-(-len(rows) // 16), 1)
    return hv.Overlay(layers).opts(
        **{**legend(), "default_tools": ["box_zoom", "reset", "save"], "active_tools": [], "hooks": FRAME["hooks"]},
        xlim=(0, max(len(rows), 6)),
        ylim=(0, 1.15 * max(room / divisor, max(base, default=0.0))),
        xticks=[(n + 0.5, str(row["rank"])) for n, row in enumerate(rows) if n % step == 0],
        xlabel="rank",
        ylabel=f"memory, {unit}",
        height=330,
    )


def _rank_label(row: dict[Any, Any]) -> str:
    return f"rank {row['rank']}: pp={row['pp']} dp={row['dp']} ep={row['ep']} tp={row['tp']}"
