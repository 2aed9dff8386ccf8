"""The position of each holder of a layout on the page: its coordinates as rows and columns.

::

    dp=2, tp=4              tp 0  1  2  3
                   dp=0        0  1  2  3        the innermost axis across, the others down;
                   dp=1        4  5  6  7        more than WIDEST are wrapped"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import holoviews as hv
import numpy as np

from workbench.analysis.layout import Layout
from workbench.core.arrays import Array
from workbench.views import units
from workbench.views.layout_canvas import CLASSES, NO_TENSOR, SIDES, Marks, ink, options_of, unit_of
from workbench.views.names import safe
from workbench.views.picture import GREY, ticks

WIDEST = 32
GAP = 0.35  #: of a row, between blocks of the outer axes


@dataclass(frozen=True, eq=False)
class Standing:
    """Unit cells, one for each holder.

    Attributes:
        x, y: ``(H,)`` left and upper edges.
        empty: ``(E, 2)`` cells of the mesh whose rank stored nothing.
        rows: middle of each row and its label: the coordinates that its holders share.
        across: label of the axis that goes across.
        columns, height: of the whole picture.
    """

    x: Array
    y: Array
    empty: Array
    rows: list[tuple[float, str]]
    across: str
    columns: int
    height: float

    def at(self, x: float, y: float) -> int | None:
        """Return the holder whose cell contains a point."""
        hit = np.flatnonzero((self.x <= x) & (x < self.x + 1) & (self.y <= y) & (y < self.y + 1))
        return int(hit[0]) if len(hit) else None


def standing(found: Layout) -> Standing:
    """Place the holders of a layout; those without coordinates follow below the others, in their order."""
    places, mesh = found.inferred.places, found.mesh
    count = len(found.holders)
    x, y = np.zeros(count), np.zeros(count)
    axes = [axis for axis, size in enumerate(mesh.shape) if size > 1]
    known = (places[:, axes] >= 0).all(axis=1) if axes else np.zeros(count, bool)
    rows: list[tuple[float, str]] = []
    empty = np.zeros((0, 2))
    across, width, top = "", 1, 0.0
    if axes and known.any():
        inner, outer = axes[-1], axes[:-1]
        size = mesh.shape[inner]
        width, lines = min(size, WIDEST), -(-size // WIDEST)
        across = "" if mesh.axes[inner] == "ranks" else mesh.axes[inner]
        blocks = int(np.prod([mesh.shape[axis] for axis in outer], dtype=np.int64))
        last = mesh.shape[outer[-1]] if outer else 1

        def high(block: Array, line: Array) -> Array:
            gaps = block // last if lines == 1 else block
            return np.asarray(block * lines + line + GAP * gaps)

        block = np.zeros(count, np.int64)
        for axis in outer:
            block = block * mesh.shape[axis] + places[:, axis]
        here = places[:, inner]
        x = np.where(known, here % WIDEST, 0).astype(np.float64)
        y = np.where(known, high(block, here // WIDEST), 0.0)
        if blocks * size <= 4096:
            every = np.arange(blocks * size)
            occupied = np.zeros(len(every), bool)
            occupied[(block * size + here)[known]] = True
            lack = every[~occupied]
            empty = np.stack([lack % size % WIDEST, high(lack // size, lack % size // WIDEST)], axis=1)
        for number in sorted(set(block[known].tolist())):
            rest, words = number, []
            for axis in reversed(outer):
                words.append(f"{mesh.axes[axis]}={rest % mesh.shape[axis]}")
                rest //= mesh.shape[axis]
            rows.append((float(high(np.array(number), np.array(0))) + 0.5 * lines, " ".join(reversed(words))))
        top = float(high(np.array(blocks - 1), np.array(lines - 1))) + 1 + GAP
    left = np.flatnonzero(~known)
    if len(left):
        wide = min(len(left), 16)
        width = max(width, wide)
        x[left], y[left] = np.arange(len(left)) % wide, top + np.arange(len(left)) // wide
        if known.any():
            rows.append((top + 0.5, "position not stored"))
        top += -(-len(left) // wide) + GAP
    return Standing(x, y, empty, rows, across, width, max(top - GAP, 1.0))


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
        data = [
            (*cell, size / divisor, safe(label), tip)
            for cell, size, label, tip in zip(cells, nbytes.tolist(), who.label, words, strict=True)
        ]
        # starts at zero: balanced ranks should look the same
        low = 0.0 if low >= 0.5 * high else low
        layers.append(
            hv.Rectangles(data, SIDES, [hv.Dimension("stored", label="stored"), "who", "words"]).opts(
                color="stored",
                cmap="cividis",
                clim=(low / divisor, high / divisor or 1.0),
                colorbar=True,
                line_width=0,
                colorbar_opts={"width": 10, "title": f"stored, {unit}"},
                tools=["hover"],
                hover_tooltips=tips,
            )
        )
        fills = [
            _cividis((size / divisor - low / divisor) / max(high / divisor - low / divisor, 1e-9))
            for size in nbytes.tolist()
        ]
    else:
        paint = peer_colours(peers)
        role = {label: axis for axis, labels in reversed(list(peers.items())) for label in labels}
        fills = [paint.get(role.get(label, ""), NO_TENSOR) for label in who.label]
        data = [
            (*cell, fill, safe(label), tip)
            for cell, fill, label, tip in zip(cells, fills, who.label, words, strict=True)
        ]
        layers.append(
            hv.Rectangles(data, SIDES, ["fill", "who", "words"]).opts(
                color=hv.dim("fill"), line_width=0, tools=["hover"], hover_tooltips=tips
            )
        )
    if len(who) <= 256 and all(int(rank) >= 0 for rank in who.rank):
        middles = [
            (x + 0.5, y + 0.5, str(rank), ink(fill))
            for x, y, rank, fill in zip(at.x.tolist(), at.y.tolist(), who.rank.tolist(), fills, strict=True)
        ]
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
