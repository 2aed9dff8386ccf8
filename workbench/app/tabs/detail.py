"""The selected tensor: statistics, histogram, heat map with the most extreme elements, chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import panel as pn

from workbench.analysis.heatmap import Heat
from workbench.analysis.summary import Summary
from workbench.app import plots, style
from workbench.app.jobs import Job, Schedule
from workbench.app.look import Look, look
from workbench.app.save import csv_button
from workbench.app.state import WorkbenchState
from workbench.app.tabs.slices import Slices
from workbench.app.words import count, html, number, safe, size
from workbench.core.codecs import CODECS
from workbench.tensor import LazyTensor
from workbench.views import units

if TYPE_CHECKING:
    import pandas as pd

CHUNK_ROWS = 5_000  #: maximum number of chunks in the table

CHUNKS: dict[str, tuple[str, str, int | None]] = {
    "offsets": ("Offsets", "text", 150),
    "sizes": ("Sizes", "text", 150),
    "rank": ("Rank", "count", 70),
    "file": ("File", "text", None),
    "start": ("From byte", "count", 130),
    "stop": ("To byte", "count", 130),
    "replica": ("Copy", "count", 70),
    "codec": ("Stored as", "text", 120),
}


class Detail(pn.viewable.Viewer):
    """Shows ``state.tensor``, which it reads in a job that can be cancelled."""

    def __init__(self, state: WorkbenchState, schedule: Schedule | None = None, **params: Any) -> None:
        super().__init__(**params)
        self._state = state
        self.job = Job(schedule)
        self._head, self._pictures, self._chunks = style.pane(""), pn.Column(sizing_mode="stretch_width"), pn.Column()
        self._chunks.sizing_mode = "stretch_width"
        self._bar = style.pane("")
        self._cancel = style.button("Cancel", lambda _: self.job.cancel(), size="medium")
        self._again = style.button("Read tensor", lambda _: self._start(), size="medium")
        self.slices = Slices(state, schedule)
        self._waiting = pn.Row(self._bar, self._cancel, sizing_mode="stretch_width", align="center")
        state.param.watch(self._turn, ["tensor", "ckpt"])
        self.job.param.watch(self._progressed, ["progress", "status"])
        self._turn()

    def __panel__(self) -> pn.viewable.Viewable:
        return pn.Column(self._head, self._pictures, self.slices, self._chunks, sizing_mode="stretch_width")

    def close(self) -> None:
        """End the session: stop reading."""
        self.job.reset()
        self.slices.job.reset()

    def _turn(self, *_: Any) -> None:
        """Switch to another tensor, or to none."""
        tensor = self._state.chosen()
        self.job.reset()
        if tensor is None:
            self._head.object, self._pictures[:], self._chunks[:] = "", [], []
            return
        self._head.object = _head(tensor)
        self._chunks[:] = _chunks(tensor)
        self._start()

    def _start(self) -> None:
        tensor = self._state.chosen()
        if tensor is not None:
            self.job.start(lambda progress: look(tensor, progress))

    def _progressed(self, *_: Any) -> None:
        job = self.job
        if job.status == "running":
            self._bar.object = style.progress("reading", job.progress, job.left)
            if self._waiting not in list(self._pictures):
                self._pictures[:] = [self._waiting]
        elif job.status == "done":
            self._pictures[:] = _pictures(job.result)
        elif job.status == "failed":
            self._pictures[:] = [style.pane(style.message(job.error, "error"))]
        elif job.status == "cancelled":
            self._pictures[:] = [
                pn.Row(style.pane('<p class="muted">Cancelled.</p>', width=100, sizing_mode="fixed"), self._again)
            ]


def statistics(summary: Summary) -> str:
    """Return the HTML of range, mean, deviation and zeros, with non-numbers and suspicious values spelled out."""
    if summary.kind == "raw bytes":
        return '<p class="muted">This dtype packs several elements into a byte; individual values are not shown.</p>'
    if not summary.numel:
        return '<p class="muted">The tensor has no elements.</p>'
    about = "" if summary.exact else "≈ "
    pairs = [
        ("smallest", number(summary.min)),
        ("largest", number(summary.max)),
        ("mean", about + number(summary.mean)),
        ("standard deviation", about + number(summary.std)),
        ("exactly zero", f"{count(summary.zero)} ({summary.zero / max(summary.seen, 1):.1%})"),
    ]
    tiles = "".join(f"<div><small>{name}</small><span>{value}</span></div>" for name, value in pairs)
    odd = [
        f'<span class="odd">{count(n)} {what}</span>'
        for n, what in ((summary.nan, "NaN"), (summary.posinf, "+Inf"), (summary.neginf, "−Inf"))
        if n
    ]
    if summary.zero == summary.seen:
        odd.append('<span class="odd">all zeros</span>')
    elif (
        summary.min is not None and summary.min == summary.max and summary.numel > 1 and summary.finite == summary.seen
    ):
        odd.append('<span class="odd">constant</span>')
    kind = '<p class="muted">The numbers are complex; magnitudes are shown.</p>' if summary.kind == "magnitudes" else ""
    return f'<div class="facts stats">{tiles}</div>{kind}' + (f"<p>{' '.join(odd)}</p>" if odd else "")


def worst_table(heat: Heat) -> str:
    """Return the HTML of the most extreme elements, by position."""
    rows = "".join(
        f'<tr><td class="name">[{", ".join(map(str, index))}]</td><td class="n">{_value(value)}</td></tr>'
        for index, value in heat.worst
    )
    return f'<table class="worst"><tr><th>element</th><th class="n">value</th></tr>{rows}</table>'


def _head(tensor: LazyTensor) -> str:
    pairs = [
        ("role", html(tensor.role)),
        ("type", html(units.dtype(tensor.element.name))),
        ("shape", " × ".join(map(count, tensor.shape)) or "scalar"),
        ("elements", count(tensor.numel())),
        ("bytes", size(tensor.nbytes)),
    ]
    if tensor.fqn and tensor.fqn != tensor.key:
        pairs.append(("of parameter", f'<span class="name" style="font-size:13px">{html(tensor.fqn)}</span>'))
    tiles = "".join(f"<div><small>{name}</small><span>{value}</span></div>" for name, value in pairs)
    return f'<h2 class="name selected">{html(tensor.key)}</h2><div class="facts">{tiles}</div>'


def _pictures(found: Look) -> list[Any]:
    summary, shown = found.profile.summary, [style.pane(statistics(found.profile.summary))]
    left, right = pn.Column(sizing_mode="stretch_width"), pn.Column(sizing_mode="stretch_width")
    if found.profile.histogram is not None and summary.finite:
        picture = plots.histogram(found.profile.histogram, summary)
        left.extend([style.pane("<h3>Histogram</h3>"), _plot(picture)])
    if found.heat.worst:
        left.extend([style.pane(f"<h3>Most extreme elements</h3>{worst_table(found.heat)}")])
    if found.heat.values.size:
        words = f"{html(found.heat.view)}; each cell shows its largest element"
        right.extend(
            [
                style.pane(f'<h3>Heat map</h3><p class="muted">{words}</p>'),
                _plot(plots.heat_map(found.heat, found.shape)),
                style.pane(_legend(found.heat)),
            ]
        )
    if len(left) or len(right):
        shown.append(style.two_columns(left, right))
    return shown


def _legend(heat: Heat) -> str:
    swatch = '<span style="display:inline-block;width:11px;height:11px;border:1px solid #888;background:{}"></span> {}'
    parts = []
    if (heat.values == 0).any():
        parts.append(swatch.format(plots.ZERO, "all exactly zero"))
    if not np.isfinite(heat.values).all():
        parts.append(swatch.format(plots.ODD, "NaN or infinite"))
    parts.append("○ most extreme elements")
    return f'<p class="muted">{" &emsp; ".join(parts)}</p>'


def _plot(picture: Any) -> pn.pane.HoloViews:
    return pn.pane.HoloViews(picture, linked_axes=False, sizing_mode="stretch_width")


def _chunks(tensor: LazyTensor) -> list[Any]:
    """Return heading, table and download of the chunks; the table is limited to the first ones."""
    rows = tensor._payloads.catalog.rows_of(tensor._tensor)
    stored = rows.stop - rows.start
    limit = "" if stored <= CHUNK_ROWS else f" (the first {count(CHUNK_ROWS)} of {count(stored)}; the CSV has all)"
    return [
        style.pane(f"<h3>Chunks{limit}</h3>"),
        style.table(chunk_rows(tensor, CHUNK_ROWS), CHUNKS, page_size=8),
        csv_button(f"{tensor.key}-chunks", lambda: tensor.chunks, "chunks CSV"),
    ]


def chunk_rows(tensor: LazyTensor, most: int) -> pd.DataFrame:
    """Return one row per chunk, as in the table, for the first ``most`` chunks."""
    import pandas as pd

    catalog, at = tensor._payloads.catalog, tensor._tensor
    rows = catalog.rows_of(at)
    rows, ndim = slice(rows.start, min(rows.stop, rows.start + most)), int(catalog.ndim[at])
    return pd.DataFrame(
        {
            "offsets": [str(box[:ndim]) for box in catalog.offsets[rows].tolist()],
            "sizes": [str(box[:ndim]) for box in catalog.sizes[rows].tolist()],
            "rank": np.where(catalog.rank[rows] < 0, np.nan, catalog.rank[rows]),
            "file": [safe(catalog.files[file]) for file in catalog.file[rows].tolist()],
            "start": catalog.start[rows],
            "stop": catalog.stop[rows],
            "replica": catalog.replica[rows].astype(np.int64),
            "codec": [CODECS[code] for code in catalog.codec[rows].tolist()],
        }
    )


def _value(value: float | int) -> str:
    if isinstance(value, float) and not np.isfinite(value):
        return f'<span class="odd">{"NaN" if np.isnan(value) else "+Inf" if value > 0 else "−Inf"}</span>'
    return number(value)
