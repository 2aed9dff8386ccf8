"""The view of a report; the *Integrity* tab connects it to the page, a notebook shows it directly.

::

    verdict
    table of findings
    the clicked finding: its numbers and the remedy
    checked · not checked        downloads
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import panel as pn

from workbench.app import style
from workbench.app.jail import relative_values
from workbench.app.save import csv_button, json_button
from workbench.app.words import count, html, safe

if TYPE_CHECKING:
    import pandas as pd

    from workbench.analysis.report import Finding, Report

COLUMNS: dict[str, tuple[str, str, int | None]] = {
    "severity": ("Severity", "text", 90),
    "message": ("Finding", "text", None),
    "where": ("Where", "text", None),
    "rule": ("Rule", "text", 150),
}
PAGE = 12


class Findings(pn.viewable.Viewer):
    """A table of findings; clicking a row shows its numbers below."""

    def __init__(self, found: tuple[Finding, ...], page_size: int = PAGE, **params: Any) -> None:
        super().__init__(**params)
        self._found = found
        self.table = style.table(finding_rows(found), COLUMNS, least={"where": 200}, page_size=page_size, selectable=1)
        self.table.on_click(self._clicked)
        self.one = style.pane("")

    def __panel__(self) -> pn.viewable.Viewable:
        return pn.Column(self.table, self.one, sizing_mode="stretch_width")

    def _clicked(self, event: Any) -> None:
        if event.row is not None:
            self.one.object = _detail(self._found[event.row])


class ReportView(pn.viewable.Viewer):
    """A report.

    Args:
        file: base name of downloads.
    """

    def __init__(self, report: Report, *, file: str = "report", **params: Any) -> None:
        super().__init__(**params)
        saves = pn.Row(
            csv_button(file, lambda: finding_frame(report)), json_button(file, report.to_dict), margin=(0, 5)
        )
        found = [Findings(tuple(report))] if report else []
        parts = [style.pane(_verdict(report)), *found, style.pane(_lists(report)), saves]
        self._body = pn.Column(*parts, sizing_mode="stretch_width")

    def __panel__(self) -> pn.viewable.Viewable:
        return self._body


def finding_rows(found: tuple[Finding, ...]) -> pd.DataFrame:
    """Return one row per finding, as in the table."""
    import pandas as pd

    rows = [{name: safe(getattr(one, name)) for name in COLUMNS} for one in found]
    return pd.DataFrame(rows, columns=list(COLUMNS), dtype="str")


def finding_frame(report: Report) -> pd.DataFrame:
    """Return the findings for a file, with evidence as JSON."""
    import json

    frame = report.findings.copy()
    frame["evidence"] = [json.dumps(relative_values(dict(one)), default=str) for one in frame["evidence"]]
    return frame


def _verdict(report: Report) -> str:
    from workbench.views.report import headline

    kind = {"error": "error", "warn": "warning"}.get(report.worst or "", "info")
    words = headline(report).removeprefix(f"{safe(report.subject)}: ")
    verdict = words[:1].upper() + words[1:] if report else words.replace("nothing found", "Nothing was found", 1)
    return style.message(f"{verdict}. {count(len(report.checked))} kinds of checks were run.", kind)


def _lists(report: Report) -> str:
    parts = []
    for title, facts in (("Checked", report.checked), ("Not checked", report.not_checked)):
        if facts:
            items = "".join(f"<li><b>{html(name)}</b>: {html(words)}</li>" for name, words in facts.items())
            parts.append(f"<h3>{title}</h3><ul>{items}</ul>")
    return "".join(parts)


def _detail(one: Finding) -> str:
    rows = "".join(
        f"<tr><th>{html(name)}</th><td>{html(_short(what))}</td></tr>" for name, what in one.evidence.items()
    )
    hint = f"<p>→ {html(one.hint)}</p>" if one.hint else ""
    title = f'<h3 class="finding">{html(one.rule)}: {html(one.where)}</h3>'
    return f'{title}<p>{html(one.message)}</p>{hint}<div style="overflow-x:auto"><table>{rows}</table></div>'


def _short(value: Any, longest: int = 400) -> str:
    text = str(dict(value) if isinstance(value, Mapping) else value)
    return text if len(text) <= longest else f"{text[:longest]} …"
