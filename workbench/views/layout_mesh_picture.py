"""The picture of a mesh: holders on its axes, coloured by stored bytes or by peer groups.

::

                 tp 0  1  2  3
    dp=0            ■  ■  ■  ■        a cell per holder, labelled with its rank if there is room;
    dp=1            ■  ■  ┈  ■        dotted if the rank stored nothing
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import holoviews as hv

from workbench.analysis.layout import Layout
from workbench.views import units
from workbench.views.layout_canvas import CLASSES, NO_TENSOR, SIDES, Marks, ink, options_of, unit_of
from workbench.views.layout_mesh import Standing
from workbench.views.names import safe
from workbench.views.picture import GREY, ticks

__all__ = ["mesh_picture", "peer_colours"]


def mesh_picture(
    found: Layout, at: Standing, peers: Mapping[str, Sequence[str]] | None = None, marks: Marks | None = None
) -> hv.Overlay:
    """Draw holders on their axes, coloured by stored bytes or, with ``peers``, by the axis that they share."""
    who = found.holders
    nbytes = found.ranks["nbytes"].to_numpy()
    tips = [("", "@who"), ("stores", "@words")]
    layers: list[Any] = []
    if len(at.empty):
        gone = [(x + 0.06, y + 0.06, x + 0.94, y + 0.94, "stored nothing") for x, y in at.empty.tolist()]
        layers.append(
            hv.Rectangles(gone, SIDES, ["words"]).opts(
                fill_alpha=0, line_color=GREY, line_dash="dotted", tools=["hover"], hover_tooltips=[("", "@words")]
            )
        )
    gap = 0.04 if len(who) <= 1024 else 0.0
    cells = [(x + gap, y + gap, x + 1 - gap, y + 1 - gap) for x, y in zip(at.x.tolist(), at.y.tolist(), strict=True)]
    words = [units.nbytes(int(size)) for size in nbytes]
    if peers is None:
        low, high = float(nbytes.min(initial=0)), float(nbytes.max(initial=1))
        unit, divisor = unit_of(high)
        data = [(*cell, size / divisor, safe(label), tip) for cell, size, label, tip in
                zip(cells, nbytes.tolist(), who.label, words, strict=True)]  # fmt: skip
        # starts at zero: balanced ranks should look alike
        low = 0.0 if low >= 0.5 * high else low
        layers.append(
            hv.Rectangles(data, SIDES, [hv.Dimension("stored", label="stored"), "who", "words"]).opts(
                color="stored", cmap="cividis", clim=(low / divisor, high / divisor or 1.0), colorbar=True,
                line_width=0, colorbar_opts={"width": 10, "title": f"stored, {unit}"}, tools=["hover"],
                hover_tooltips=tips,
            )
        )  # fmt: skip
        fills = [_cividis((size / divisor - low / divisor) / max(high / divisor - low / divisor, 1e-9))
                 for size in nbytes.tolist()]  # fmt: skip
    else:
        paint = peer_colours(peers)
        role = {label: axis for axis, labels in reversed(list(peers.items())) for label in labels}
        fills = [paint.get(role.get(label, ""), NO_TENSOR) for label in who.label]
        data = [(*cell, fill, safe(label), tip) for cell, fill, label, tip in
                zip(cells, fills, who.label, words, strict=True)]  # fmt: skip
        layers.append(
            hv.Rectangles(data, SIDES, ["fill", "who", "words"]).opts(
                color=hv.dim("fill"), line_width=0, tools=["hover"], hover_tooltips=tips
            )
        )
    if len(who) <= 256 and all(int(rank) >= 0 for rank in who.rank):
        middles = [(x + 0.5, y + 0.5, str(rank), ink(fill)) for x, y, rank, fill in
                   zip(at.x.tolist(), at.y.tolist(), who.rank.tolist(), fills, strict=True)]  # fmt: skip
        layers.append(
            hv.Labels(middles, SIDES[:2], ["text", "ink"]).opts(
                text_color=hv.dim("ink"), text_font_size="9pt", text_align="center", text_baseline="middle"
            )
        )
    return hv.Overlay(layers).opts(
        **options_of(marks),
        xlim=(-0.02, max(at.columns, 1) + 0.02),
        ylim=(-0.03, at.height + 0.03),
        xticks=ticks([str(n) for n in range(at.columns)], 16) if at.across else 0,
        yticks=_thinned(at.rows, 24),
        xlabel=at.across,
        ylabel="",
        invert_yaxis=True,
        height=round(90 + min(max(at.height, 2) * (44 if at.height <= 10 else 26), 700)),
    )


def peer_colours(peers: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return the colour of the peers along each axis."""
    axes = [axis for axis, labels in peers.items() if len(labels) > 1]
    return dict(zip(axes, (CLASSES * (1 + len(axes) // len(CLASSES)))[: len(axes)], strict=True))


def _cividis(share: float) -> str:
    from bokeh.palettes import Cividis256

    return str(Cividis256[min(max(round(255 * share), 0), 255)])


def _thinned(rows: Sequence[tuple[float, str]], most: int) -> Any:
    step = max(-(-len(rows) // most), 1)
    return [row for n, row in enumerate(rows) if n % step == 0] or 0
