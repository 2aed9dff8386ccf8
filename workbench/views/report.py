"""The report of a check as text and HTML: findings first, then what was checked and what was not."""

from __future__ import annotations

from html import escape

from workbench.analysis.report import Finding, Report
from workbench.core.words import plural
from workbench.views.lines import room, wrap
from workbench.views.names import html, safe, shorten

SHOWN = 50  #: findings that are shown; the rest are counted
_MARK = {"error": "ERROR", "warn": "WARN ", "info": "info "}


def report_text(report: Report) -> str:
    """Return findings, most severe first, each with its hint; then what was checked and what was not."""
    lines = [shorten(headline(report), room())]
    for one in list(report)[:SHOWN]:
        lines += wrap(f"  {_MARK[one.severity]} {one.rule}  ", _sentence(one))
        if one.hint:
            lines += wrap("        → ", safe(one.hint))
    if len(report) > SHOWN:
        lines.append(f"  … {plural(len(report) - SHOWN, 'more finding')}")
    for title, facts in (("checked", report.checked), ("not checked", report.not_checked)):
        if facts:
            lines.append(title)
            for name, words in facts.items():
                lines += wrap(f"  {safe(name)}: ", safe(words))
    return "\n".join(lines)


def report_html(report: Report) -> str:
    """Return the same as a table, in the colours of the page."""
    cell = 'style="text-align:left;padding:0 1em 0 0;vertical-align:top;white-space:pre-wrap"'
    rows = [
        f"<tr><td {cell}><b>{_MARK[one.severity].strip()}</b></td><td {cell}><code>{escape(one.rule)}</code></td>"
        f"<td {cell}>{escape(_sentence(one))}{f'<br>→ {html(one.hint)}' if one.hint else ''}</td></tr>"
        for one in list(report)[:SHOWN]
    ]
    if len(report) > SHOWN:
        more = plural(len(report) - SHOWN, "more finding")
        rows.append(f"<tr><td></td><td></td><td>… {more}</td></tr>")
    parts = [f"<b>{escape(headline(report))}</b>", f"<table>{''.join(rows)}</table>" if rows else ""]
    for title, facts in (("checked", report.checked), ("not checked", report.not_checked)):
        if facts:
            items = "".join(f"<li>{html(name)}: {html(words)}</li>" for name, words in facts.items())
            parts.append(f"<details open><summary>{title}</summary><ul>{items}</ul></details>")
    return f"<div>{''.join(parts)}</div>"


def headline(report: Report) -> str:
    """Return in one line the findings by severity, their subject, and whether values were left unchecked."""
    counts = [(report.count("error"), "error"), (report.count("warn"), "warning"), (report.count("info"), "remark")]
    counted = ", ".join(plural(count, noun) for count, noun in counts if count) or "nothing found"
    unread = (
        "values" if "values" in report.not_checked else "some tensors" if "unread tensors" in report.not_checked else ""
    )
    return f"{safe(report.subject)}: {counted}" + (f"; {unread} not checked" if unread else "")


def _sentence(one: Finding) -> str:
    return f"{safe(one.where)}: {safe(one.message)}" if one.where else safe(one.message)
