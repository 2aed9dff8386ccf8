"""The *Integrity* tab: is this checkpoint whole, to the depth that is asked for; works on what does not open, too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import panel as pn
import panel_material_ui as pmui

from workbench.app import style
from workbench.app.jobs import Tick
from workbench.app.save import csv_button, json_button
from workbench.app.tabs.tab import Tab
from workbench.app.words import count, html, safe
from workbench.app.work import Work

if TYPE_CHECKING:
    import pandas as pd

    from workbench.analysis.report import Finding, Report

__all__ = ["DEPTHS", "Integrity", "finding_rows"]

#: What can be checked: the URL's word → the choice, and what it costs.
DEPTHS = {
    "structure": ("Structure", "names, sizes, headers, boxes, steps: no payload is read; seconds at any size"),
    "deep": ("Every byte", "also stored checksums, values, copies and masters: reads everything once or twice"),
}
COLUMNS: dict[str, tuple[str, str, int | None]] = {
    "severity": ("Severity", "text", 90),
    "message": ("Finding", "text", None),
    "rule": ("Rule", "text", 150),
    "where": ("Where", "text", 200),
}
PAGE = 12


class Integrity(Tab):
    """A verification as a job, and its findings; a click on one shows its numbers and what to do."""

    key = "integrity"
    follows = ("ckpt", "path")

    def build(self) -> None:
        self._report: Report | None = None
        self._depth = pmui.RadioButtonGroup(
            options={title: name for name, (title, _) in DEPTHS.items()}, value=self._chosen(), label="How deep",
            size="small", color="primary", margin=(10, 10),
        )  # fmt: skip
        self._depth.param.watch(lambda event: self.state.param.update(depth=event.new), "value")
        self.state.param.watch(self._follow, "depth")
        self._about = style.pane("")
        self.work = Work("Verify", self._verify, self._done, verb="checking", schedule=self.schedule)
        self._result = pn.Column(sizing_mode="stretch_width")
        self._one = style.pane("")
        self._follow()

    def draw(self) -> None:
        self.work.reset()
        self._report, self._result[:], self._one.object = None, [], ""
        self.body[:] = [self._depth, self._about, self.work, self._result]

    def close(self) -> None:
        self.work.reset()

    def _chosen(self) -> str:
        return self.state.depth if self.state.depth in DEPTHS else "structure"

    def _follow(self, *_: Any) -> None:
        self._depth.value = self._chosen()
        self._about.object = f'<p class="muted">{html(DEPTHS[self._chosen()][1])}.</p>'

    def _verify(self, tick: Tick) -> Report:
        from workbench.analysis.verify import verify

        state = self.state
        return verify(state.ckpt or state.jail.resolve(state.path), deep=self._chosen() == "deep", tick=tick)

    def _done(self, report: Report) -> None:
        self._report, self._one.object = report, ""
        name = f"{self.state.path}-integrity"
        saves = pn.Row(
            csv_button(name, lambda: finding_frame(report)), json_button(name, report.to_json), margin=(0, 5)
        )
        parts: list[Any] = [style.pane(_verdict(report))]
        if report.found:
            table = style.table(finding_rows(report), COLUMNS, page_size=PAGE, selectable=1)
            table.on_click(self._clicked)
            parts += [table, self._one]
        self._result[:] = [*parts, style.pane(_lists(report)), saves]

    def _clicked(self, event: Any) -> None:
        if self._report is not None and event.row is not None:
            self._one.object = _detail(self._report.found[event.row])


def finding_rows(report: Report) -> pd.DataFrame:
    """One row a finding, as the table shows it."""
    import pandas as pd

    rows = [{name: safe(getattr(one, name)) for name in COLUMNS} for one in report.found]
    return pd.DataFrame(rows, columns=list(COLUMNS), dtype="str")


def finding_frame(report: Report) -> pd.DataFrame:
    """The findings for a file: evidence as JSON."""
    import json

    frame = report.findings.copy()
    frame["evidence"] = [json.dumps(dict(one)) for one in frame["evidence"]]
    return frame


def _verdict(report: Report) -> str:
    from workbench.views.report import headline

    kind = {"error": "error", "warn": "warning"}.get(report.worst or "", "info")
    words = headline(report).removeprefix(f"{safe(report.subject)}: ")
    told = "Nothing was found" if not report.found else words[:1].upper() + words[1:]
    return style.message(f"{told}. {count(len(report.checked))} kinds of checks were made.", kind)


def _lists(report: Report) -> str:
    parts = []
    for title, told in (("Checked", report.checked), ("Not checked", report.not_checked)):
        if told:
            items = "".join(f"<li><b>{html(name)}</b>: {html(words)}</li>" for name, words in told.items())
            parts.append(f"<h3>{title}</h3><ul>{items}</ul>")
    return "".join(parts)


def _detail(one: Finding) -> str:
    rows = "".join(
        f"<tr><th>{html(name)}</th><td>{html(_short(what))}</td></tr>" for name, what in one.evidence.items()
    )
    hint = f"<p>→ {html(one.hint)}</p>" if one.hint else ""
    title = f'<h3 class="finding">{html(one.rule)}: {html(one.where)}</h3>'
    return f"{title}<p>{html(one.message)}</p>{hint}<table>{rows}</table>"


def _short(value: Any, longest: int = 400) -> str:
    text = str(dict(value) if isinstance(value, Mapping) else value)
    return text if len(text) <= longest else f"{text[:longest]} …"
