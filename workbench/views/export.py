"""An export as text and HTML: what was, or would be, written, and the proof."""

from __future__ import annotations

from collections import defaultdict
from html import escape

from workbench.core.words import plural
from workbench.export.report import ExportReport, TensorReport
from workbench.views import units
from workbench.views.lines import room
from workbench.views.names import pad, safe, shorten

FILES = 20  #: files that are listed
CASTS = 10  #: casts that are listed


def export_text(report: ExportReport) -> str:
    """Return the summary, the cost, the files, and what a cast changed."""
    width = room()
    lines = [shorten(safe(str(report)), width and 4 * width)]
    lines += [f"  {pad(name, 9)} {text}" for name, text in export_facts(report, width=width)]
    lines += _files(report, width)
    lines += [shorten(f"  note: {safe(sentence)}", width and 3 * width) for sentence in report.notes]
    return "\n".join(lines)


def export_html(report: ExportReport) -> str:
    """Return the same for a notebook."""
    return f"<pre>{escape(export_text(report))}</pre>"


def export_facts(report: ExportReport, *, width: int | None) -> list[tuple[str, str]]:
    """Return the facts as ``(name, text)``; further lines of the same fact follow it with an empty name."""
    size = units.nbytes
    facts = [
        ("reads", f"{size(report.read_nbytes)} in {report.copies:,} {'copy' if report.copies == 1 else 'copies'}"),
        ("writes", f"{size(report.nbytes)} in {plural(len(report.files), 'file')}"),
        ("memory", f"up to {size(report.peak_nbytes)}"),
    ]
    if report.mesh is not None:
        facts.append(("mesh", report.mesh or "one rank"))
    if report.copied:
        facts.append(("copied", ", ".join(safe(name) for name in report.copied)))
    if report.carried:
        facts.append(("carried", _names_text(report.carried, "object")))
    if report.renamed_out:
        why = next(iter(report.renamed_out.values()))
        facts.append(("no place", f"{_names_text(tuple(report.renamed_out), 'tensor')}: {safe(why)}"))
    left = [(report.unselected, "tensor", 2), (report.left_out, "object", 4)]
    texts = [_names_text(names, noun, most) for names, noun, most in left if names]
    facts += [("" if at else "left out", text) for at, text in enumerate(texts)]
    casts = _casts(report, width and width - 12)
    facts += [("" if at else "changed", text) for at, text in enumerate(casts[:CASTS])]
    if len(casts) > CASTS:
        facts.append(("", f"… {len(casts) - CASTS:,} more"))
    return [(name, shorten(text, width and width - 12)) for name, text in facts]


def cast_words(old: str, new: str) -> str:
    """Return ``f32 → bf16`` for two dtypes, or ``f32`` if they are the same."""
    return units.dtype(old) if old == new else f"{units.dtype(old)} → {units.dtype(new)}"


def _casts(report: ExportReport, width: int | None) -> list[str]:
    """Return one line per tensor that was cast or changed, largest change first; its pieces are summed."""
    pieces: dict[tuple[str, str, str], list[TensorReport]] = defaultdict(list)
    for one in report.casts:
        pieces[one.name, one.source_dtype, one.dtype].append(one)
    found = sorted(pieces.items(), key=lambda pair: -max(max(one.max_update, one.max_abs) for one in pair[1]))
    lines = []
    for (name, old, new), parts in found:
        line = f": {cast_words(old, new)}"
        if parts[0].target is not None:
            updated, changed, lost = (
                sum(getattr(one, name) for one in parts) for name in ("updated", "changed", "overflowed")
            )
            if updated:
                line += f", {updated:,} changed by up to {max(one.max_update for one in parts):.3g}"
            if changed or old != new:
                line += f", {changed:,} rounded by up to {max(one.max_abs for one in parts):.3g}"
            line += f", {lost:,} overflowed" if lost else ""
        lines.append(shorten(safe(name), width and max(width - len(line), 12)) + line)
    return lines


def _files(report: ExportReport, width: int | None) -> list[str]:
    """Return the largest files, in the order of their names; with a mesh, each belongs to a rank."""
    shown = {one.name for one in sorted(report.files, key=lambda one: -one.nbytes)[:FILES]}
    rows = [one for one in report.files if one.name in shown]
    names = [shorten(safe(one.name), width and 60) for one in rows]
    wide = max(map(len, names), default=0)
    lines = [
        f"  {pad(name, wide)}  {units.nbytes(one.nbytes):>10}  {plural(one.tensors, 'tensor'):>14}"
        for name, one in zip(names, rows, strict=True)
    ]
    rest = [one for one in report.files if one.name not in shown]
    if rest:
        lines.append(f"  … {plural(len(rest), 'smaller file')}, {units.nbytes(sum(one.nbytes for one in rest))}")
    return lines


def _names_text(names: tuple[str, ...], noun: str, most: int = 4) -> str:
    shown = ", ".join(safe(name) for name in names[:most])
    return f"{plural(len(names), noun)}: {shown}" + (", …" if len(names) > most else "")
