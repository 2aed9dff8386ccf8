"""A diff as text and HTML: the largest relative change first, equal tensors only counted.

::

    2 of 42 tensors changed, 40 equal; 1 object
      rel L2  changed  max |Δ|  cosine  type  tensor
     1.2e-01    100 %  3.1e-02  0.9927  bf16  layers.0.wq.weight [64, 64]
        ↳ rows are the 2 halves exchanged
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from html import escape
from typing import Any

import numpy as np

from workbench.analysis.diff import Diff
from workbench.analysis.diff_objects import ObjectChange
from workbench.analysis.diff_pairs import RENAMED
from workbench.analysis.diff_rows import TensorDiff
from workbench.core.words import plural
from workbench.errors import WorkbenchError
from workbench.views import units
from workbench.views.lines import room, wrap
from workbench.views.names import columns, safe, shorten, shorten_all
from workbench.views.spark import spark

SHOWN = 20  #: rows of a repr; the command line's ``--all`` shows all
NAMED = 8  #: added and removed tensors that are named
HEADS = ("rel L2", "changed", "max |Δ|", "cosine", "type")
INDENT = 4


def diff_text(diff: Diff) -> str:
    """Return the diff as text: about 60 lines, 100 columns wide."""
    return "\n".join(diff_lines(diff, SHOWN))


def diff_lines(diff: Diff, most: int | None = None) -> list[str]:
    """Return the differences as lines. ``most`` limits the rows of each table."""
    lines = [*_sides(diff), *wrap("", headline(diff))]
    rows = diff.changed_rows
    lines += _table(rows[:most])
    if most is not None and len(rows) > most:
        lines.append(f"  … {plural(len(rows) - most, 'more tensor')} that differ")
    unread = [row for row in diff.rows if row.status == "unread"]
    for row in unread[:most]:
        lines += wrap("  not compared: ", f"{safe(row.key_b)}: {safe(row.why)}")
    if most is not None and len(unread) > most:
        lines.append(f"  … {plural(len(unread) - most, 'more tensor')} not compared")
    lines += _left_over("only in a", diff.removed, most) + _left_over("only in b", diff.added, most)
    if diff.objects:
        lines.append(f"  {plural(len(diff.objects), 'change')} in non-tensor state")
        for change in diff.objects[:most]:
            lines += wrap("    ", _object(change))
        if most is not None and len(diff.objects) > most:
            lines.append(f"    … {len(diff.objects) - most:,} more")
    for sentence in diff.notes:
        lines += wrap("  note: ", safe(sentence))
    for title, facts in (("checked", diff.checked), ("not checked", diff.not_checked)):
        for name, words in list(facts.items())[: most or None]:
            lines += wrap(f"  {title}  {safe(name)}: ", safe(words))
    return lines


def headline(diff: Diff) -> str:
    """Return the counts in one sentence."""
    s = diff.summary
    pairs = sum(diff.count(name) for name in ("equal", "rounded", "changed", "type", "shape", "unknown", "unread"))
    parts = []
    if s["changed"]:
        parts.append(f"{s['changed']:,} of {plural(pairs, 'tensor')} changed")
    for name, words in (("type", "with a different dtype"), ("shape", "with a different shape")):
        if s[name]:
            parts.append(f"{s[name]:,} {words}")
    equal = f"{s['equal']:,} equal" if parts else f"{plural(s['equal'], 'tensor')} equal"
    if s["equal"] or (pairs and not parts and not s["rounded"]):
        parts.append(equal + _sources(diff))
    if s["rounded"]:
        types = sorted({row.rounding.scheme for row in diff.rows if row.status == "rounded" and row.rounding})
        parts.append(f"{s['rounded']:,} equal up to rounding ({', '.join(map(units.dtype, types))})")
    for name, words in (
        ("unknown", "unknown (not read)"),
        ("unread", "could not be compared"),
        ("removed", "only in a"),
        ("added", "only in b"),
        ("renamed", "renamed"),
        ("moved", "stored elsewhere"),
        ("objects", "changed in objects"),
    ):
        if s[name]:
            parts.append(f"{s[name]:,} {words}")
    if diff.skipped:
        parts.append(f"{len(diff.skipped):,} in objects not compared")
    if not parts:
        parts.append("no tensors on either side")
    return ("no difference: " if diff.exit_code == 0 else "") + ", ".join(parts)


def tensor_text(row: TensorDiff) -> str:
    """Return one tensor in detail: counts, norms, histograms, and where it changed."""
    name = safe(row.key_b) if row.key_a == row.key_b else f"{safe(row.key_a)} → {safe(row.key_b)}"
    lines = [shorten(f"{name} {_shapes(row)} {_types(row)}: {row.status}", room())]
    c = row.comparison
    with suppress(WorkbenchError):  # files were removed meanwhile: the results so far stay
        c = row.detail
    if c is not None and c.changed:
        noun = "bytes" if c.how == "raw" else "elements"
        lines.append(f"  {c.changed:,} of {c.seen:,} {noun} differ ({units.percent(c.changed, c.seen)})")
        if c.same_number:
            lines.append(f"  {c.same_number:,} of them represent the same number (signs of zero, NaN payloads)")
        if c.rounded is not None:
            lines.append(f"  {c.rounded:,} are equal after rounding to the narrower dtype")
        if c.max_at is not None:
            place = units.shape(c.max_at)
            lines.append(f"  max |Δ| {_number(c.max_abs)} at {place}: {_number(c.max_a)} → {_number(c.max_b)}")
        if c.rel_l2 is not None:
            lines.append(f"  L2 {_number(c.l2)}, relative {_number(c.rel_l2)}, cosine {_cosine(c.cosine)}")
        odd = [
            f"{words} {before:,} → {after:,}"
            for words, before, after in (("NaN", c.nan_a, c.nan_b), ("Inf", c.inf_a, c.inf_b))
            if before or after
        ]
        lines += [f"  {', '.join(odd)}; {c.nan_new:,} newly NaN"] if odd else []
        if c.ulps is not None:
            top = int(np.flatnonzero(c.ulps)[-1]) + 1 if c.ulps.any() else 1
            lines.append(f"  ULPs  0 {spark(c.ulps[:top])} {c.furthest:,}")
        for axis, counts in enumerate(c.bands if c.bands is not None else ()):
            size = row.shape_b[axis]
            each = max(-(-size // len(counts)), 1)
            lines.append(f"  axis {axis}  0 {spark(counts[: -(-size // each)])} {size:,}")
    for words in _remarks(row):
        lines += wrap("  ", words)
    return "\n".join(lines)


def diff_html(diff: Diff) -> str:
    """Return the same as collapsible tables, in the colours of the page."""
    cell = 'style="text-align:right;padding:0 1em 0 0;vertical-align:top"'
    left = 'style="text-align:left;padding:0 1em 0 0;vertical-align:top"'
    heads = "".join(f"<th {cell}>{escape(head)}</th>" for head in HEADS) + f"<th {left}>tensor</th>"
    body = []
    for row in diff.changed_rows[: 2 * SHOWN]:
        cells = "".join(f"<td {cell}>{escape(text)}</td>" for text in _cells(row))
        more = "".join(f"<br>{escape(words)}" for words in _remarks(row))
        name = _renamed(row, 80) if row.by == RENAMED else shorten(safe(row.key_b), 80)
        body.append(f"<tr>{cells}<td {left}><code>{escape(name)}</code> {escape(_shapes(row))}{more}</td></tr>")
    if len(diff.changed_rows) > 2 * SHOWN:
        body.append(f"<tr><td colspan=6>… {len(diff.changed_rows) - 2 * SHOWN:,} more</td></tr>")
    parts = [f"<b>{escape(headline(diff))}</b>", *(f"<div>{escape(line)}</div>" for line in _sides(diff))]
    if body:
        parts.append(f"<table><tr>{heads}</tr>{''.join(body)}</table>")
    folds: list[tuple[str, Sequence[str]]] = [
        ("only in a", [safe(key) for key in diff.removed]),
        ("only in b", [safe(key) for key in diff.added]),
        ("objects", [_object(change) for change in diff.objects]),
        ("not compared", [f"{safe(row.key_b)}: {safe(row.why)}" for row in diff.rows if row.status == "unread"]),
        ("notes", [safe(sentence) for sentence in diff.notes]),
        ("checked", [f"{safe(name)}: {safe(words)}" for name, words in diff.checked.items()]),
        ("not checked", [f"{safe(name)}: {safe(words)}" for name, words in diff.not_checked.items()]),
    ]
    for title, items in folds:
        if items:
            rows = "".join(f"<li>{escape(shorten(item, 400))}</li>" for item in items[: 2 * SHOWN])
            more = f"<li>… {len(items) - 2 * SHOWN:,} more</li>" if len(items) > 2 * SHOWN else ""
            parts.append(f"<details><summary>{title} ({len(items):,})</summary><ul>{rows}{more}</ul></details>")
    return f"<div>{''.join(parts)}</div>"


# ---- parts -----------------------------------------------------------------------------------------------------------


def _sides(diff: Diff) -> list[str]:
    lines = []
    for letter, path, name, step in zip("ab", (diff.a, diff.b), diff.formats, diff.steps, strict=True):
        when = "" if step is None else f", step {step:,}"
        lines.append(shorten(f"{letter}  {name} {safe(path)}{when}", room()))
    return lines


def _table(rows: Sequence[TensorDiff]) -> list[str]:
    """Return the table with columns as narrow as their content; tensor names get the rest of the width."""
    if not rows:
        return []
    table = [_cells(row) for row in rows]
    widths = [max(columns(row[at]) for row in (HEADS, *table)) for at in range(len(HEADS))]
    width = room()
    left = None if width is None else width - sum(widths) - 2 * len(widths) - 2
    lines = [f"  {_joined(HEADS, widths)}  tensor"]
    shapes = [_shapes(row) if left is None else _shape_beside(row, left) for row in rows]
    spaces = [None if left is None else left - (columns(shape) + 1 if shape else 0) for shape in shapes]
    names = shorten_all([safe(row.key_b) for row in rows], spaces)
    for row, cells, shape, space, name in zip(rows, table, shapes, spaces, names, strict=True):
        name = _renamed(row, space) if row.by == RENAMED else name
        lines.append(f"  {_joined(cells, widths)}  {name} {shape}".rstrip())
        for words in _remarks(row):
            lines += wrap(" " * INDENT + "↳ ", words)
    return lines


def _joined(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(" " * (width - columns(text)) + text for text, width in zip(cells, widths, strict=True))


def _cells(row: TensorDiff) -> list[str]:
    c = row.comparison
    if c is None:
        return ["", "yes" if row.source else "", "", "", _types(row)]
    share = units.percent(c.changed, c.seen) if c.seen else ""
    nan = "NaN!" if c.nan_new else _number(c.max_abs)
    return [_number(c.rel_l2), share, nan, _cosine(c.cosine), _types(row)]


def _types(row: TensorDiff) -> str:
    a, b = units.dtype(row.dtype_a), units.dtype(row.rounding.scheme if row.rounding else row.dtype_b)
    return a if a == b else f"{a}→{b}"


def _shapes(row: TensorDiff) -> str:
    a, b = units.shape(row.shape_a), units.shape(row.shape_b)
    return a if a == b else f"{a} → {b}"


def _shape_beside(row: TensorDiff, room: int) -> str:
    """Return the shape, unless it is unchanged and the name needs the room."""
    shape = _shapes(row)
    tight = columns(safe(row.key_b)) + 1 + columns(shape) > room
    return "" if tight and (row.shape_a == row.shape_b or columns(shape) > room // 2) else shape


def _renamed(row: TensorDiff, width: int | None) -> str:
    half = None if width is None else max((width - 3) // 2, 8)
    return f"{shorten(safe(row.key_a), half)} → {shorten(safe(row.key_b), half)}"


def _remarks(row: TensorDiff) -> list[str]:
    """Return the pattern of the change, what rounding explains, and why a tensor was not compared."""
    found = []
    if row.pattern is not None:
        found.append(row.pattern.sentence + (f" ({row.pattern.likely})" if row.pattern.likely else ""))
    if row.rounding is not None:
        found.append(row.rounding.sentence)
    return [safe(words) for words in (*found, row.why) if words]


def _object(change: ObjectChange) -> str:
    return f"{safe(change.path)}  {safe(change.text)}"


def _sources(diff: Diff) -> str:
    found = sorted({row.source for row in diff.rows if row.status == "equal" and row.source})
    return f" (by {' and '.join(found)})" if found else ""


def _left_over(title: str, keys: Any, most: int | None) -> list[str]:
    lines = []
    shown = list(keys.items())[: NAMED if most is not None else None]
    for key, why in shown:
        lines += wrap(f"  {title}: ", safe(key) + (f" ({safe(why)})" if why else ""))
    if len(keys) > len(shown):
        lines.append(f"  {title}: … {len(keys) - len(shown):,} more")
    return lines


def _number(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, (bool, int)):
        return f"{int(value):,}" if abs(int(value)) < 10_000_000 else f"{float(value):.2g}"
    if isinstance(value, complex):
        return f"{value:.3g}"
    return "0" if value == 0 else f"{value:.1e}" if not 0.01 <= abs(value) < 1000 else f"{value:.3g}"


def _cosine(value: float | None) -> str:
    if value is None:
        return ""
    if 0.9999 < value < 1:
        return f"1-{1 - value:.1e}"
    return f"{value:.4f}"
