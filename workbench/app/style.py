"""The few pieces of HTML that the page draws itself, and the formats of table cells; colours follow the theme.

Text that may contain names from a checkpoint goes into plain HTML panes, escaped. It never goes through Markdown (as in
Material's ``Typography`` and ``Alert``): escaped text can still be a Markdown link there, ``[x](javascript:…)``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import panel as pn
import panel_material_ui as pmui
from bokeh.models.widgets.tables import HTMLTemplateFormatter

from workbench.app.words import THIN, html

HTML = """
:host { color: inherit; }
.facts { display: grid; grid-template-columns: repeat(auto-fill, minmax(125px, 1fr)); gap: 8px 18px; margin: 4px 0; }
.facts div { min-width: 0; }
.facts small { display: block; opacity: .75; font-size: 12px; }
.facts span { font-size: 16px; overflow-wrap: anywhere; }
.name { font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; overflow-wrap: anywhere; }
h2 { font-size: 17px; font-weight: 600; margin: 8px 0 4px; overflow-wrap: anywhere; }
h3 { font-size: 14px; font-weight: 600; margin: 8px 0 2px; }
p, ul, ol { margin: 4px 0; } ul, ol { padding-left: 22px; }
.muted { opacity: .8; font-size: 13px; }
.odd { border: 1px solid currentColor; border-radius: 4px; padding: 0 7px; font-weight: 600; white-space: nowrap; }
.said { border-left: 4px solid #56B4E9; padding: 6px 12px; margin: 4px 0; overflow-wrap: anywhere; }
.said.warning { border-color: #E69F00; } .said.error { border-color: #D55E00; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
td, th { text-align: left; padding: 1px 16px 1px 0; font-weight: 400; white-space: nowrap; } th { opacity: .75; }
td.n, th.n { text-align: right; }
.bar { display: flex; align-items: center; gap: 12px; min-height: 36px; }
.bar span { flex: none; width: 190px; font-size: 13px; opacity: .8; font-variant-numeric: tabular-nums; }
.bar progress { flex: auto; min-width: 40px; height: 6px; accent-color: #0072B2; }
"""

#: Links inside the page; underlined on hover, distinct without colour by their weight.
LINKS = """
a { color: inherit; font-weight: 600; text-decoration: underline; text-decoration-color: #0072B2;
  text-underline-offset: 3px; }
a:hover, a:focus-visible { text-decoration-thickness: 2px; }
.said.error { background: none; color: inherit; border-style: none none none solid; } /* Panel's own of this name */
nav a { text-decoration: none; } nav a:hover { text-decoration: underline; }
"""

ONE_LINE = {"& .MuiToggleButton-root": {"whiteSpace": "nowrap"}}  #: for a group of toggle buttons
WIDEST_NAME = 240  #: minimum width in pixels of a column without a fixed width

TABLE = """
.tabulator { font-size: 13px !important; }
.tabulator .tabulator-row { min-height: 28px !important; height: 28px !important; }
.tabulator .tabulator-row .tabulator-cell { padding: 5px 8px !important; height: 28px !important; }
.tabulator .tabulator-header .tabulator-col .tabulator-col-content { padding: 7px 8px !important; }
.tabulator .tabulator-footer .tabulator-footer-contents { padding: 2px 8px !important; }
"""

# `<%-` escapes, in the cell and in its tooltip; Tabulator's own tooltips do not escape.
_TEXT = '<span title="<%- value %>"><%- value %></span>'
# A missing value arrives as null, or as NaN in a numeric column; NaN as a value is written as text elsewhere.
_COUNT = "<%= value == null || Number.isNaN(value) ? '–' : Number(value).toLocaleString('en-US') %>"
_BYTES = (
    "<% var v = Number(value), u = 0; while (v >= 1023.95 && u < 5) { v /= 1024; u++ } %>"
    "<span title=\"<%= Number(value).toLocaleString('en-US') %> bytes\">"
    "<%= v.toFixed(1).replace('.0', '') + '\u2009' + ['B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB'][u] %></span>"
)
_TEMPLATES = {"text": _TEXT, "count": _COUNT, "bytes": _BYTES}


def pane(text: str, **params: Any) -> pn.pane.HTML:
    """Return an HTML pane in the page's style; foreign text in it must be escaped."""
    defaults = {"sizing_mode": "stretch_width", "margin": (0, 10), "stylesheets": [HTML]}
    return pn.pane.HTML(text, **{**defaults, **params})


def button(label: str, pressed: Callable[[Any], None], **params: Any) -> pmui.Button:
    """Return a small button with a frame; filled ones start the long jobs."""
    return pmui.Button(
        **{"label": label, "variant": "outlined", "color": "primary", "size": "small", "on_click": pressed, **params}
    )


def choice(options: Any, value: str, chosen: Callable[[Any], None], **params: Any) -> pmui.RadioButtonGroup:
    """Return a row of buttons, one of them chosen; ``chosen`` is called with the new value."""
    defaults = {"size": "small", "color": "primary", "margin": (10, 10), "sx": ONE_LINE}
    made = pmui.RadioButtonGroup(**{"options": options, "value": value, **defaults, **params})
    made.param.watch(lambda event: chosen(event.new), "value")
    return made


def message(text: str, kind: str = "info") -> str:
    """Return the HTML of a highlighted sentence, escaped; ``kind`` is info, warning or error."""
    words = THIN.join(map(html, text.split(THIN)))  # the space used in numbers, which is harmless
    role = "alert" if kind == "error" else "note"
    return f'<div class="said {kind}" role="{role}">{words}</div>'


def progress(verb: str, fraction: float, left: str = "") -> str:
    """Return the HTML of a progress bar behind words: ``reading, 34%, 2 min left``."""
    percent = round(100 * fraction)
    words = ", ".join([verb, f"{percent}%", *([left] if left else [])])
    bar = f'<progress aria-label="progress" max="100" value="{percent}"></progress>'
    return f'<div class="bar"><span>{html(words)}</span>{bar}</div>'


def table(
    frame: Any,
    columns: dict[str, tuple[str, str, int | None]],
    of: type[pn.widgets.Tabulator] = pn.widgets.Tabulator,
    least: Mapping[str, int] | None = None,
    **params: Any,
) -> pn.widgets.Tabulator:
    """Return a read-only table that sends one page at a time.

    Args:
        columns: name → title, kind (``text``, ``count``, ``bytes``, or an HTML template), width in pixels or ``None``.
            If the window is too narrow, the last columns are hidden, never squeezed.
        of: the class; :class:`workbench.app.paged.Paged` for tables of many thousands of rows.
        least: minimum width in pixels of columns without a width, where it is not :data:`WIDEST_NAME`.
    """
    layout = [
        {"field": name, "responsive": at, "minWidth": width or (least or {}).get(name, WIDEST_NAME)}
        for at, (name, (_, _, width)) in enumerate(columns.items())
    ]
    numbers = [name for name, (_, kind, _) in columns.items() if kind in ("count", "bytes")]
    defaults = {
        "titles": {name: title for name, (title, _, _) in columns.items()},
        "formatters": {
            name: HTMLTemplateFormatter(template=_TEMPLATES.get(kind, kind)) for name, (_, kind, _) in columns.items()
        },
        "text_align": dict.fromkeys(numbers, "right"),
        "header_align": dict.fromkeys(numbers, "right"),
        "widths": {name: width for name, (_, _, width) in columns.items() if width},
        "pagination": "remote" if frame is None or len(frame) > params.get("page_size", 20) else None,
        "disabled": True,
        "selectable": False,
        "show_index": False,
        "layout": "fit_columns",
        "configuration": {"responsiveLayout": "hide", "columns": layout},
        "sizing_mode": "stretch_width",
        "stylesheets": [TABLE],
        "margin": (4, 10),
    }
    return of(frame, **{**defaults, **params})


def two_columns(*children: Any, least: int = 440) -> pn.Column:
    """Arrange children side by side if each gets ``least`` pixels, otherwise one below the other."""
    sheet = (
        ":host { display: grid !important; gap: 4px 24px; align-items: start; "
        f"grid-template-columns: repeat(auto-fit, minmax(min(100%, {least}px), 1fr)); }}"
    )
    return pn.Column(*children, stylesheets=[sheet], sizing_mode="stretch_width")
