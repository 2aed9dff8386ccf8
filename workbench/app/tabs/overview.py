"""The *Overview* tab: a description of the checkpoint, whether it is intact, where its bytes are, and its run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np
import panel as pn

from workbench.app import style
from workbench.app.glance import Glance
from workbench.app.jail import relative_words
from workbench.app.jobs import Progress
from workbench.app.save import csv_button
from workbench.app.tabs.run import RunTab
from workbench.app.tabs.tab import AT_ONCE, Tab
from workbench.app.words import count, html, safe, size
from workbench.app.work import JobButton
from workbench.checkpoint import Checkpoint
from workbench.core.jsonable import jsonable
from workbench.core.words import Ordinary
from workbench.views.doctor_html import fact_words
from workbench.views.names import shorten, shorten_all

if TYPE_CHECKING:
    import pandas as pd

    from workbench.analysis.report import Report
    from workbench.doctor.facts.state import TrainingState

BARS = 10  #: bars of one chart; the last one sums up the rest
NAME = 44  #: characters of a bar's name; longer names are cut in the middle
LONGEST = 0.8  #: share of a chart's width that the longest bar takes; its size follows it
SHOWN = 12  #: names of objects that are listed
VALUES, VALUE = 2_000, 200  #: values of objects that are listed, and characters of one
VALUES_ARE = (
    f'<p class="muted">Plain values, at most {VALUES:,}, without random generators, logs and optimizer switches; '
    "<code>workbench objects</code> shows everything.</p>"
)
SHEET = """
.charts { display: grid; gap: 4px 24px; grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr)); }
.charts table { width: 100%; margin: 12px 0; font-size: 12px; }
.charts th { text-align: right; padding: 0 10px 0 4px; }
.charts td { width: 100%; padding: 0; line-height: 24px; } .charts td span { opacity: .75; }
.charts i { display: inline-block; height: 19px; margin-right: 4px; vertical-align: middle; background: #0072B2;
  border-left: 1px solid #0072B2; }
"""


class Overview(Tab):
    """Draws the state's checkpoint; changes nothing."""

    key = "overview"

    def build(self) -> None:
        self.work = JobButton("Check the structure", self._verify, self._done, verb="checking", schedule=self.schedule)
        self.badge = style.pane("")
        self._more = style.button("Open Integrity", lambda _: self.state.param.update(tab="integrity"), margin=(5, 10))
        self._health = pn.Column(sizing_mode="stretch_width")
        self._training = style.pane("")
        self._objects = pn.Column(sizing_mode="stretch_width")
        self.run = RunTab(self.state, self.schedule)

    def draw(self) -> None:
        ckpt, lease = self.state.ckpt, self.state.lease
        self.work.reset()
        if ckpt is None or lease is None:
            self.body[:] = []
            return
        self._health[:], self._training.object, self._objects[:] = [self.work], "", [_names(ckpt)]
        if ckpt.catalog.chunks <= AT_ONCE:
            self.work.start()
        self.body[:] = self._parts(ckpt, lease.glance)
        self.run.look()

    def close(self) -> None:
        self.work.reset()
        self.run.work.reset()

    def _verify(self, progress: Progress) -> tuple[Report, TrainingState, pd.DataFrame]:
        from workbench.analysis.verify import verify
        from workbench.doctor.facts.gather import gather

        assert self.state.ckpt is not None
        report = verify(self.state.ckpt, progress=progress)
        return report, gather(self.state.ckpt), object_frame(self.state.ckpt)

    def _done(self, found: tuple[Report, TrainingState, pd.DataFrame]) -> None:
        report, state, values = found
        self.state.structure = report
        self.badge.object = health(report)
        self._health[:] = [self.badge, self._more]
        self._training.object = training(state)
        if len(values):
            columns: dict[str, tuple[str, str, int | None]] = {
                "name": ("Name", "text", None),
                "value": ("Value", "text", None),
            }
            self._objects[1:] = [style.table(values, columns, page_size=8), style.pane(VALUES_ARE)]

    def _parts(self, ckpt: Checkpoint, seen: Glance) -> list[Any]:
        tiles = "".join(f"<div><small>{escape(k)}</small><span>{v}</span></div>" for k, v in seen.facts)
        head = f'<h2 class="name">{html(self.state.path)}</h2><div class="facts">{tiles}</div>'
        return [
            style.pane(head),
            style.pane(
                "".join(style.message(t, "info" if isinstance(t, Ordinary) else "warning") for t in seen.oddities)
            ),
            self._health,
            self._training,
            self.run,
            style.pane(charts(seen), stylesheets=[style.HTML, SHEET]),
            csv_button(f"{self.state.path}-bytes", lambda: bytes_frame(seen), "bytes CSV"),
            _files(ckpt),
            self._objects,
        ]


def health(report: Report) -> str:
    """Return the HTML of the outcome of a quick check, in one sentence."""
    errors, warnings, made = report.count("error"), report.count("warn"), len(report.checked)
    if not errors and not warnings:
        return style.message(f"Structure: intact; values not checked. {count(made)} kinds of checks found nothing.")
    found = [f"{count(n)} {noun}{'' if n == 1 else 's'}" for n, noun in ((errors, "error"), (warnings, "warning")) if n]
    first = safe(report[0].message)
    return style.message(
        f"Structure: {' and '.join(found)}; values not checked. {first}", "error" if errors else "warning"
    )


def training(state: TrainingState) -> str:
    """Return the HTML of the facts about the training in the objects, each with its source."""
    from workbench.doctor.facts.gather import FACTS

    rows = "".join(
        f'<tr title="{html(FACTS[fact])}"><th>{html(fact)}</th><td>{html(shorten(fact_words(first.value), 60))}</td>'
        f'<td class="muted">{html(first.source)}</td></tr>'
        for fact, statements in state.statements.items()
        for first in statements[:1]
    )
    return f'<h3>Training</h3><div style="overflow-x:auto"><table>{rows}</table></div>' if rows else ""


def bytes_frame(seen: Glance) -> pd.DataFrame:
    """Return all bars of the charts as rows: by name nbytes."""
    import pandas as pd

    parts = {"role": seen.roles, "type": seen.dtypes, "module": seen.modules, "rank": seen.ranks}
    rows = [(by, safe(name), n) for by, shares in parts.items() for name, n in shares]
    return pd.DataFrame(rows, columns=["by", "name", "nbytes"])


def charts(seen: Glance) -> str:
    """Return the HTML of the bytes by role, dtype, module and, if any, rank, side by side if they fit."""
    pairs = [
        _chart("Bytes by role", seen.roles) + _chart("Bytes by dtype", seen.dtypes),
        _chart("Bytes by module", seen.modules) + (_chart("Bytes by rank", seen.ranks) if seen.ranks else ""),
    ]
    return "".join(f'<div class="charts">{pair}</div>' for pair in pairs)


def _chart(title: str, rows: Sequence[tuple[str, int]]) -> str:
    if len(rows) > BARS:
        rest = rows[BARS - 1 :]
        rows = [*rows[: BARS - 1], (f"{len(rest):,} others", sum(n for _, n in rest))]
    names = [safe(name) for name, _ in rows]
    most = max((n for _, n in rows), default=0) or 1
    bars = "".join(
        f'<tr title="{escape(name)}: {size(n)}"><th scope="row">{escape(short)}</th>'
        f'<td><i style="width:{100 * LONGEST * n / most:.2f}%"></i><span>{size(n)}</span></td></tr>'
        for name, short, (_, n) in zip(names, shorten_all(names, [NAME] * len(rows)), rows, strict=True)
    )
    return f"<div><h3>{escape(title)}</h3><table>{bars}</table></div>"


def _files(ckpt: Checkpoint) -> pn.Column:
    import pandas as pd

    catalog = ckpt.catalog
    frame = pd.DataFrame(
        {
            "file": [safe(name) for name in catalog.files],
            "nbytes": [max(stat.size, 0) for stat in catalog.file_stats],
            "chunks": np.bincount(catalog.file, minlength=len(catalog.files)),
        }
    )
    columns: dict[str, tuple[str, str, int | None]] = {
        "file": ("File", "text", None),
        "nbytes": ("Size", "bytes", 120),
        "chunks": ("Chunks", "count", 140),
    }
    table = style.table(frame, columns, page_size=8)
    return pn.Column(style.pane("<h3>Files</h3>"), table, sizing_mode="stretch_width")


def object_frame(ckpt: Checkpoint) -> pd.DataFrame:
    """Return values in the objects as rows, name by value; for an object that cannot be read, the reason."""
    import pandas as pd

    from workbench.doctor.facts.flat import leaves

    found, unreadable = leaves(ckpt.objects)
    reasons = ((name, relative_words(why)) for name, why in unreadable.items())
    rows = [*reasons, *((leaf.source, leaf.value) for leaf in found)][:VALUES]
    return pd.DataFrame([(safe(name), safe(_text(value))) for name, value in rows], columns=["name", "value"])


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(jsonable(value, max_nodes=VALUE), ensure_ascii=False)
    return text if len(text) <= VALUE else f"{text[:VALUE]}…"


def _names(ckpt: Checkpoint) -> pn.pane.HTML:
    names = [str(name) for _, name in zip(range(SHOWN), ckpt.objects, strict=False)]
    if not names:
        return style.pane('<h3>Other objects</h3><p class="muted">none; only tensors are stored</p>')
    more = len(ckpt.objects) - len(names)
    words = ", ".join(f'<span class="name">{html(name)}</span>' for name in names)
    return style.pane(f"<h3>Other objects</h3><p>{words}{f' … {count(more)} more' if more else ''}</p>")
