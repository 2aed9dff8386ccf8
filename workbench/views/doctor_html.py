"""A diagnosis as HTML: a fragment in the notebook's colours, or a standalone page with pictures and no links.

::

    <div>  verdict · causes (first one open) · compared · found correct · not checked · facts  </div>
    page:  the same, then the pictures, with inlined scripts: opens without a network, light or dark like the browser
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

from workbench.doctor.reasoning.diagnosis import Diagnosis, Suspect
from workbench.views import units
from workbench.views.doctor import (
    MARK,
    also_seen,
    cleared_sentence,
    most_excluding,
    reasons,
    suspect_rows,
    suspect_title,
)
from workbench.views.names import html, safe, shorten
from workbench.views.pages import page_of

CELL = 'style="text-align:left;padding:0 1em 0 0;vertical-align:top;white-space:pre-wrap"'
BAR = {"error": "4px solid", "warn": "4px dotted", "info": "1px dotted"}  #: beside a cause, in the colour of the text
LABEL = CELL.replace("pre-wrap", "nowrap;overflow-wrap:normal")
TENSORS = 20  #: names that are listed


def diagnosis_html(d: Diagnosis, *, brief: bool = False) -> str:
    """Return the diagnosis as HTML: the verdict, then one collapsible section per cause.

    Args:
        brief: leave out the verdict, which is shown elsewhere, and collapse everything except the first cause.
    """
    subjects = "".join(
        f"<tr><td {LABEL}>{html(one.which)}</td><td {LABEL}>{html(one.format)}</td>"
        f"<td {LABEL}>{'–' if one.step is None else f'step {one.step:,}'}</td>"
        f"<td {CELL}><code>{html(one.path)}</code></td></tr>"
        for one in d.subjects
    )
    parts = [f"<div><b>{html(d.verdict)}</b></div>"] if not brief else []
    parts.append(f"<table>{subjects}</table>")
    parts += [f"<div>{html(note)}</div>" for note in d.notes]
    if d.coverage:
        parts.append(f"<div>Compared: {html(d.coverage)}</div>")
    parts += [_suspect(number, one) for number, one in enumerate(d.causes, 1)]
    parts.append(_fold("also seen", also_seen(d), not brief))
    parts.append(_fold("found correct", map(cleared_sentence, most_excluding(d.ruled_out)), not brief))
    parts.append(_fold("not checked", reasons(d.not_checked), not brief))
    parts.append(_fold("not needed", reasons(d.not_applicable), not brief))
    parts.append(_fold("checked", reasons(d.checked), False))
    parts.append(_facts(d.facts))
    return f'<div class="workbench-doctor">{"".join(parts)}</div>'


def diagnosis_page(d: Diagnosis, pictures: Mapping[str, Any] | None = None) -> str:
    """Return a standalone page that needs no network.

    Args:
        pictures: name → HoloViews element, from :func:`workbench.views.doctor_pictures.doctor_pictures`; their
            script (Bokeh's, a megabyte) is then in the page.
    """
    figures = {}
    if pictures:
        import holoviews as hv
        from bokeh.document import Document

        renderer = hv.renderer("bokeh").instance(mode="server")  # in "default", documents are those of sessions
        figures = {name: renderer.get_plot(picture, Document()).state for name, picture in pictures.items()}
    drawn = "".join(f"<figure><!--{name}--></figure>" for name in figures)
    title = escape(safe(d.verdict) or "Resume doctor")
    more = f"<h2>Pictures</h2>{drawn}" if figures else ""
    return page_of("Resume doctor", diagnosis_html(d) + more, figures, hint=title)


def _suspect(number: int, one: Suspect) -> str:
    rows, before = [], ""
    for name, words in suspect_rows(one):
        rows.append(f"<tr><td {LABEL}>{'' if name == before else name}</td><td {CELL}>{escape(words)}</td></tr>")
        before = name
    if len(one.tensors) > 2:
        names = ", ".join(f"<code>{escape(shorten(safe(name), 100))}</code>" for name in one.tensors[:TENSORS])
        more = max(one.affected, len(one.tensors)) - min(len(one.tensors), TENSORS)
        rows.append(f"<tr><td {LABEL}>tensors</td><td {CELL}>{names}{f', … {more:,} more' if more else ''}</td></tr>")
    head = f"{MARK[one.severity]} <code>{html(one.cause)}</code> {escape(suspect_title(one))}"
    return (
        f'<details {"open" if number == 1 else ""} style="border-left:{BAR[one.severity]};'
        f'padding-left:.7em;margin:.5em 0"><summary><b>{head}</b></summary><table>{"".join(rows)}</table></details>'
    )


def _fold(name: str, sentences: Iterable[str], unfolded: bool) -> str:
    items = [f"<li>{escape(words)}</li>" for words in sentences]
    if not items:
        return ""
    head = f"<summary>{name}{'' if unfolded else f' ({len(items):,})'}</summary>"
    return f"<details {'open' if unfolded else ''}>{head}<ul>{''.join(items)}</ul></details>"


def _facts(facts: Mapping[str, Mapping[str, tuple[Any, str]]]) -> str:
    """Return the trainer's facts and where each is stored."""
    rows = [
        f"<tr><td {LABEL}>{html(which)}</td><td {LABEL}>{html(fact)}</td>"
        f"<td {CELL}>{escape(shorten(safe(fact_words(value)), 100))}</td><td {CELL}>{html(source)}</td></tr>"
        for which, values in facts.items()
        for fact, (value, source) in values.items()
    ]
    return f"<details><summary>facts</summary><table>{''.join(rows)}</table></details>" if rows else ""


def fact_words(value: Any) -> str:
    """Return a fact's value as text."""
    return units.number(value) if isinstance(value, float) else str(value)
