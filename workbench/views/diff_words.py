"""The HTML text of a diff: both sides, one tensor, non-tensor state, tensors without a counterpart.

Everything from a checkpoint is escaped. Long lists end with the number of further items in the JSON.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from workbench.analysis.comparison import Comparison
from workbench.analysis.diff_objects import ObjectChange
from workbench.analysis.diff_pairs import RENAMED
from workbench.analysis.diff_result import Diff
from workbench.analysis.diff_rows import TensorDiff
from workbench.core.words import plural
from workbench.views import units
from workbench.views.names import html, safe

MOST = 300  #: entries of one list
OPEN = 40  #: object changes up to which everything is shown expanded
STATUS = {
    "equal": "bitwise equal",
    "rounded": "equal up to rounding",
    "changed": "values changed",
    "type": "different dtype",
    "shape": "different shape: values were not compared",
    "unknown": "not read, no other evidence",
    "unread": "could not be compared",
}


def sides_html(diff: Diff, names: tuple[str, str] | None = None) -> str:
    """Return a table of A and B: their paths, unless other names are given, and their steps."""
    rows = []
    for letter, path, name, step in zip("AB", names or (diff.a, diff.b), diff.formats, diff.steps, strict=True):
        when = "no step stored" if step is None else f"step {step:,}"
        rows.append(f'<tr><th>{letter}</th><td class="name">{html(path)}</td><td>{html(name)}</td><td>{when}</td></tr>')
    return f"<table>{''.join(rows)}</table>"


def tensor_html(row: TensorDiff) -> str:
    """Return the full name, the numbers, and the pattern of the change (a fact) with its usual cause (a guess)."""
    title = f'<h2 class="name changed">{html(row.key_b)}</h2>'
    if row.key_a != row.key_b:
        title += f'<p class="muted">in A: <span class="name">{html(row.key_a)}</span></p>'
    tiles = "".join(
        f"<div><small>{escape(name)}</small><span>{escape(text)}</span></div>" for name, text in _tiles(row)
    )
    words = [f'<div class="facts">{tiles}</div>', *(f"<p>{escape(sentence)}</p>" for sentence in _sentences(row))]
    if row.pattern is not None:
        likely = f"<br>Likely: {html(row.pattern.likely)}" if row.pattern.likely else ""
        text = f"<b>{html(row.pattern.name)}</b>: {html(row.pattern.sentence)}{likely}"
        words.append(f'<div class="said warning pattern" role="note">{text}</div>')
    if row.rounding is not None:
        words.append(f"<p>{html(row.rounding.sentence)}</p>")
    if row.why:
        words.append(f'<div class="said error" role="note">{html(row.why)}</div>')
    return title + "".join(words)


def objects_html(changes: Sequence[ObjectChange]) -> str:
    """Return a collapsible section per object with the changed paths inside it, before and after."""
    if not changes:
        return '<p class="muted">Non-tensor state is the same on both sides.</p>'
    groups: dict[str, list[ObjectChange]] = {}
    for change in changes[: 4 * MOST]:
        groups.setdefault(_root(change.path), []).append(change)
    unfolded = " open" if len(changes) <= OPEN else ""
    parts = []
    for name, inside in groups.items():
        rows = "".join(_change(change, name) for change in inside[:MOST]) + _more(len(inside) - MOST, 3)
        head = "<tr><th>path</th><th>before</th><th>after</th></tr>"
        words = f"{html(name)} ({plural(len(inside), 'change')})"
        parts.append(f"<details{unfolded}><summary>{words}</summary><table>{head}{rows}</table></details>")
    left = len(changes) - 4 * MOST
    return "".join(parts) + (f'<p class="muted">{left:,} more in the JSON</p>' if left > 0 else "")


def lists_html(diff: Diff) -> str:
    """Return collapsible lists: only in A, only in B, renamed, notes, checked, not checked; empty ones are left out."""
    renamed = [row for row in diff.rows if row.by == RENAMED]
    lists: list[tuple[str, int, Iterable[str]]] = [
        ("Only in A", len(diff.removed), (_named(key, why) for key, why in diff.removed.items())),
        ("Only in B", len(diff.added), (_named(key, why) for key, why in diff.added.items())),
        ("Renamed", len(renamed), (f"{_named(row.key_a)} → {_named(row.key_b)}" for row in renamed)),
        ("Notes", len(diff.notes), map(html, diff.notes)),
        ("Checked", len(diff.checked), (_fact(*item) for item in diff.checked.items())),
        ("Not checked", len(diff.not_checked), (_fact(*item) for item in diff.not_checked.items())),
    ]
    parts = []
    for title, many, items in lists:
        if many:
            shown = "".join(f"<li>{item}</li>" for item, _ in zip(items, range(MOST), strict=False))
            more = f'<li class="muted">{many - MOST:,} more in the JSON</li>' if many > MOST else ""
            summary = f"<summary>{title} ({many:,})</summary>"
            parts.append(f"<details>{summary}<ul>{shown}{more}</ul></details>")
    return "".join(parts)


def _tiles(row: TensorDiff) -> list[tuple[str, str]]:
    a, b = units.dtype(row.dtype_a), units.dtype(row.dtype_b)
    shapes = [" × ".join(map(units.number, shape)) or "scalar" for shape in (row.shape_a, row.shape_b)]
    found = [
        ("status", STATUS.get(row.status, row.status)),
        ("role", safe(row.role)),
        ("type", a if a == b else f"{a} → {b}"),
        ("shape", shapes[0] if shapes[0] == shapes[1] else " → ".join(shapes)),
    ]
    c = row.comparison
    if c is None or not c.changed:
        return [*found, ("elements", units.number(row.numel))]
    noun = "bytes" if c.how == "raw" else "elements"
    found.append((f"{noun} changed", f"{c.changed:,} of {c.seen:,} ({_share(c.changed, c.seen)})"))
    for name, value in (("relative change", c.rel_l2), ("max |Δ|", c.max_abs)):
        if value is not None:
            found.append((name, _number(value)))
    if c.cosine is not None:
        nearly_one = 0.9999 < c.cosine < 1
        found.append(("cosine", f"1 − {_number(1 - c.cosine)}" if nearly_one else _number(c.cosine)))
    if c.ulp_max is not None:
        found.append(("largest change in ULPs", units.number(c.ulp_max)))
    return found


def _sentences(row: TensorDiff) -> list[str]:
    c: Comparison | None = row.comparison
    found = []
    if c is None or not c.changed:
        return [f"Source: {row.source}. No payload was read."] if row.source else []
    if c.max_at is not None:
        at = ", ".join(map(str, c.max_at))
        found.append(f"The largest change is at [{at}]: {_number(c.max_a)} → {_number(c.max_b)}.")
    for name, before, after in (("NaN", c.nan_a, c.nan_b), ("infinite", c.inf_a, c.inf_b)):
        if before or after:
            found.append(f"{name}: {before:,} → {plural(after, 'element')}.")
    if c.same_number:
        found.append(f"{c.same_number:,} of them represent the same number (signs of zero, NaN payloads).")
    if c.rounded is not None:
        found.append(f"{c.rounded:,} are equal after rounding to the narrower dtype.")
    return found


def _change(change: ObjectChange, root: str) -> str:
    inner = change.path.removeprefix(root).removeprefix(".") or change.path
    path = f'<td class="name" title="{html(change.path)}">{html(inner)}</td>'
    if change.kind == "added":
        return f'<tr>{path}<td class="muted">–</td><td>{html(change.text.removeprefix("only in b: "))}</td></tr>'
    if change.kind == "removed":
        return f'<tr>{path}<td>{html(change.text.removeprefix("only in a: "))}</td><td class="muted">–</td></tr>'
    before, arrow, after = change.text.partition(" → ")
    if arrow and " → " not in after:
        return f"<tr>{path}<td>{html(before)}</td><td>{html(after)}</td></tr>"
    return f'<tr>{path}<td colspan="2">{html(change.text)}</td></tr>'


def _root(path: str) -> str:
    """Return the object's name, which begins a path: everything up to the first key or index."""
    ends = [at for at in (path.find("."), path.find("[")) if at > 0]
    return path[: min(ends)] if ends and path[0] not in "'\"" else path


def _more(many: int, columns: int) -> str:
    return f'<tr><td colspan="{columns}" class="muted">{many:,} more in the JSON</td></tr>' if many > 0 else ""


def _named(key: str, why: str = "") -> str:
    return f'<span class="name">{html(key)}</span>' + (f" ({html(why)})" if why else "")


def _fact(name: str, words: str) -> str:
    return f"<b>{html(name)}</b>: {html(words)}"


def _share(part: int, whole: int) -> str:
    text = units.percent(part, whole)
    return ">99 %" if text == "100 %" and part < whole else text


def _number(value: object) -> str:
    if isinstance(value, bool | int):
        return units.number(int(value)).replace("-", "−")
    if isinstance(value, float):
        return f"{value:.5g}".replace("-", "−").replace("inf", "∞")
    return f"{value:.4g}".replace("-", "−") if isinstance(value, complex) else str(value)
