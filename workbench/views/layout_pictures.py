"""Pictures of a layout: boxes of a tensor by rank, shares of modules by rank, and bytes of files by role.

::

    shares   modules × ranks, the share as a colour           bytes   files × bytes, the role as a colour
    shards   one tensor on two of its axes, rank by rank

Holes and overlaps are computed exactly before drawing, painted last, and never thinner than a pixel. Up to
:data:`FEW` boxes are rectangles with tooltips; more are painted, window by window.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import holoviews as hv
import numpy as np

from workbench.analysis.layout import Layout
from workbench.core.arrays import Array
from workbench.core.words import plural
from workbench.views import units
from workbench.views.layout_bytes import Bytes
from workbench.views.layout_canvas import (
    HOLE,
    NO_TENSOR,
    OVERLAP,
    SIDES,
    TOOLS,
    Marks,
    PaintBoxes,
    PaintWindow,
    colours,
    ink,
    lighter,
    options_of,
    painted,
    palette,
    raster,
    rgba,
)
from workbench.views.layout_groups import GroupShares
from workbench.views.layout_shards import SEVERAL, TensorShards
from workbench.views.names import safe, shorten_all
from workbench.views.picture import ticks

FEW = 10_000  #: boxes that are drawn one by one
LABELS = 64  #: boxes up to which each is labelled with its owner
NAME = 38  #: characters of a name beside an axis; the tooltip has the full name


# ---- modules and ranks -----------------------------------------------------------------------------------------------


def shares_picture(share: GroupShares, labels: Sequence[str], marks: Marks | None = None) -> hv.Overlay:
    """Draw modules down and holders across, coloured by the share of the module's bytes that the holder stores.

    A holder that stores nothing of a module has no cell. Modules with holes or overlaps are framed.

    Args:
        labels: of the holders.
    """
    rows, columns = share.nbytes.shape
    percent = 100 * share.nbytes / np.maximum(share.whole, 1)[:, None]
    heads = [_column(labels, at * share.per, share.per) for at in range(columns)]
    nonempty = np.argwhere(share.nbytes > 0)
    top = max(float(percent.max(initial=0)), 1e-9)
    scale: dict[str, Any] = {
        "cmap": "cividis",
        "clim": (0, top),
        "colorbar": True,
        "colorbar_position": "top",  # beside the cells, it would take most of a phone's width
        "colorbar_opts": {"height": 8, "title": "% of module"},
    }
    layers: list[Any] = []
    value = hv.Dimension("share", label="share, %")
    if len(nonempty) <= FEW:
        gap = 0.04 if columns <= 64 else 0.0
        data = [
            (
                c + gap,
                r + 0.05,
                c + 1 - gap,
                r + 0.95,
                percent[r, c],
                share.groups[r].name,
                heads[c],
                f"{units.nbytes(int(share.nbytes[r, c]))} of {units.nbytes(int(share.whole[r]))}, "
                f"{percent[r, c]:.3g} %",
            )
            for r, c in nonempty.tolist()
        ]
        tips = [("", "@module"), ("", "@who"), ("stores", "@words")]
        layers.append(
            hv.Rectangles(data, SIDES, [value, "module", "who", "words"]).opts(
                color="share", line_width=0, tools=["hover"], hover_tooltips=tips, **scale
            )
        )
    else:
        grid = np.where(share.nbytes > 0, percent, np.nan).astype(np.float32)
        image = hv.Image(grid[::-1], bounds=(0, 0, columns, rows), kdims=["left", "upper"], vdims=[value])
        layers.append(image.opts(**scale))
    wrong = [
        (0.0, r + 0.0, float(columns), r + 1.0, f"{plural(n, 'hole')} or overlaps in {share.groups[r].name}")
        for r, n in enumerate(share.wrong.tolist())
        if n
    ]
    if wrong:
        layers.append(
            hv.Rectangles(wrong, SIDES, ["words"]).opts(
                fill_alpha=0, line_color=HOLE, line_width=3, tools=["hover"], hover_tooltips=[("", "@words")]
            )
        )
    names = shorten_all([group.name for group in share.groups], [NAME] * rows)
    return hv.Overlay(layers).opts(
        **options_of(marks),
        xlim=(0, max(columns, 1)),
        ylim=(0, max(rows, 1)),
        xticks=ticks(_short(heads), 16),
        yticks=ticks(names, 60),
        xlabel="",
        ylabel="",
        invert_yaxis=True,
        height=130 + 15 * max(rows, 4),
    )


# ---- one tensor ------------------------------------------------------------------------------------------------------


def shards_picture(shown: TensorShards, marks: Marks | None = None) -> Any:
    """Draw the boxes of a tensor, coloured by the rank or file that stores them."""
    across, down = shown.extent
    paint = owner_colours(shown)
    wrong = (("hole", shown.holes, HOLE), ("overlap", shown.overlaps, OVERLAP))
    options: dict[str, Any] = {
        **options_of(marks),
        "xlim": (0, across),
        "ylim": (0, down),
        "xlabel": "" if shown.across is None else f"axis {shown.across} of {across:,}",
        "ylabel": "" if shown.down is None else f"axis {shown.down} of {down:,}",
        "invert_yaxis": True,
        "xformatter": "%d",
        "yformatter": "%d",
        "height": 420 if shown.down is not None else 150,
    }
    if shown.down is None:
        options["yticks"] = 0
        options["yaxis"] = None
    if len(shown.boxes) > FEW:
        table = rgba([*(paint[name] for name in shown.names), HOLE, OVERLAP])

        def drawn(window: PaintWindow) -> Array:
            image = raster(shown.boxes, window)
            for n, (_, boxes, _colour) in enumerate(wrong):
                code = np.full(len(boxes), len(shown.names) + n, np.int32)
                raster(PaintBoxes(boxes.left, boxes.right, boxes.top, boxes.bottom, code), window, 2, image)
            return colours(image, table)

        return painted(drawn, (0, across, 0, down), options)
    b = shown.boxes
    names = [shown.names[code] for code in b.code.tolist()]
    sides = (b.left.tolist(), b.top.tolist(), b.right.tolist(), b.bottom.tolist())
    data = [
        (*edges, paint[name], safe(name), _box_words(*edges), count)
        for *edges, name, count in zip(*sides, names, shown.chunks.tolist(), strict=True)
    ]
    tips = [("", "@who"), ("down, across", "@words"), ("chunks", "@count")]
    layers: list[Any] = [
        hv.Rectangles(data, SIDES, ["fill", "who", "words", "count"]).opts(
            color=hv.dim("fill"),
            line_color="#FFFFFF" if len(data) <= 400 else None,
            line_width=1,
            tools=["hover"],
            hover_tooltips=tips,
        )
    ]
    if 0 < len(data) <= LABELS:
        middles = [
            ((a + c) / 2, (t + d) / 2, _initial(safe(n)), ink(paint[n]))
            for (a, t, c, d, *_), n in zip(data, names, strict=True)
        ]
        layers.append(
            hv.Labels(middles, SIDES[:2], ["text", "ink"]).opts(
                text_color=hv.dim("ink"), text_font_size="9pt", text_align="center", text_baseline="middle"
            )
        )
    for what, boxes, colour in wrong:
        edges = zip(boxes.left.tolist(), boxes.top.tolist(), boxes.right.tolist(), boxes.bottom.tolist(), strict=True)
        rows = [(*one, f"{what} {_box_words(*one)}") for one in edges]
        if rows:
            layers.append(
                hv.Rectangles(rows, SIDES, ["words"]).opts(
                    fill_color=colour, line_color=colour, line_width=2, tools=["hover"], hover_tooltips=[("", "@words")]
                )
            )
    return hv.Overlay(layers).opts(**options)


def owner_colours(shown: TensorShards) -> dict[str, str]:
    """Return the colour of each name of a shard map."""
    own = [name for name in shown.names if name != SEVERAL]
    return {**dict(zip(own, palette(len(own)), strict=True)), SEVERAL: NO_TENSOR}


# ---- bytes -----------------------------------------------------------------------------------------------------------


def bytes_picture(found: Layout, index: Bytes, marks: Marks | None = None) -> Any:
    """Draw files down and bytes across, coloured by the role of the chunk's tensor."""
    from bokeh.models import AdaptiveTicker, CustomJSTickFormatter

    files, longest = len(index.files), max(int(index.size.max(initial=1)), 1)
    names = shorten_all([safe(name) for name in index.files], [NAME] * files)
    options: dict[str, Any] = {
        **options_of(marks),
        "xlim": (0, longest),
        "ylim": (0, max(files, 1)),
        "xticks": AdaptiveTicker(base=1024, mantissas=[1 << n for n in range(10)], desired_num_ticks=6),
        "xformatter": CustomJSTickFormatter(code=BYTES),
        "yticks": ticks(names, 40),
        "default_tools": ["xwheel_zoom" if tool == "wheel_zoom" else tool for tool in TOOLS],  # keeps names visible
        "xlabel": "byte of the file",
        "ylabel": "",
        "invert_yaxis": True,
        "height": 110 + min(max(26 * files, 60), 520),
    }
    paint = role_colours(index)
    table = rgba([*(paint[role] for role in index.roles), NO_TENSOR, *(lighter(paint[role]) for role in index.roles)])
    twice = index.twice(found)
    if len(index) > FEW:
        table = np.concatenate([table, rgba([OVERLAP])])
        last = PaintBoxes(
            twice.left, twice.right, twice.top, twice.bottom, np.full(len(twice), len(table) - 1, np.int32)
        )

        def drawn(window: PaintWindow) -> Array:
            return colours(raster(last, window, 2, index.paint(window)), table)

        return painted(drawn, (0, longest, 0, files), options)
    whole = [
        (0.0, n + 0.1, float(max(size, 1)), n + 0.9, safe(index.files[n])) for n, size in enumerate(index.size.tolist())
    ]
    layers: list[Any] = [
        hv.Rectangles(whole, SIDES, ["file"]).opts(
            color=NO_TENSOR,
            line_color=None,
            tools=["hover"],
            hover_tooltips=[("", "@file"), ("", "no tensor data: header, objects or padding")],
        )
    ]
    b, catalog = index.boxes, found.catalog
    shades = paint, {role: lighter(colour) for role, colour in paint.items()}
    data = [
        (
            float(left),
            top,
            float(right),
            bottom,
            shades[n % 2][index.roles[code]],
            safe(catalog.keys[int(catalog.tensor[row])]),
            f"bytes {left:,}–{right:,}, {units.nbytes(right - left)}",
            safe(found.holders.label[int(found.holders.of_chunk[row])]),
        )
        for n, (left, top, right, bottom, code, row) in enumerate(
            zip(
                b.left.tolist(),
                b.top.tolist(),
                b.right.tolist(),
                b.bottom.tolist(),
                b.code.tolist(),
                index.rows.tolist(),
                strict=True,
            )
        )
    ]
    layers.append(
        hv.Rectangles(data, SIDES, ["fill", "tensor", "words", "who"]).opts(
            color=hv.dim("fill"),
            line_color=hv.dim("fill"),
            line_width=1,
            tools=["hover"],
            hover_tooltips=[("", "@tensor"), ("", "@words"), ("", "@who")],
        )
    )
    if len(twice):
        edges = zip(twice.left.tolist(), twice.top.tolist(), twice.right.tolist(), twice.bottom.tolist(), strict=True)
        layers.append(
            hv.Rectangles([(float(a), b, float(c), d) for a, b, c, d in edges], SIDES).opts(
                fill_alpha=0, line_color=OVERLAP, line_width=3
            )
        )
    return hv.Overlay(layers).opts(**options)


def role_colours(index: Bytes) -> dict[str, str]:
    """Return the colour of each role of a byte map."""
    return dict(zip(index.roles, palette(len(index.roles)), strict=True))


BYTES = """
let v = Math.abs(tick), u = 0;
while (v >= 1023.95 && u < 5) { v /= 1024; u++ }
const step = ticks.length > 1 ? Math.abs(ticks[1] - ticks[0]) / Math.pow(1024, u) : 1;
const digits = Math.min(Math.max(Math.ceil(-Math.log10(step)) + 1, 0), 9);
return +v.toFixed(digits) + "\\u2009" + ["B", "KiB", "MiB", "GiB", "TiB", "PiB"][u];
"""


# ---- parts -----------------------------------------------------------------------------------------------------------


def _box_words(left: float, top: float, right: float, bottom: float) -> str:
    return f"{int(top):,}:{int(bottom):,}, {int(left):,}:{int(right):,}"


def _column(labels: Sequence[str], first: int, per: int) -> str:
    mine = labels[first : first + per]
    return safe(mine[0]) if len(mine) == 1 else f"{safe(mine[0])} to {safe(mine[-1])}"


def _short(heads: Sequence[str]) -> list[str]:
    """Return the labels below the columns: bare numbers if all are ranks."""
    if all(head.startswith("rank ") for head in heads):
        return [
            f"{'rank ' if n == 0 else ''}{head.removeprefix('rank ').split(' ')[0]}" for n, head in enumerate(heads)
        ]
    return shorten_all(list(heads), [14] * len(heads))


def _initial(label: str) -> str:
    return label if len(label) <= 12 else f"…{label[-11:]}"
