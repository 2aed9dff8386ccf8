"""A memory budget in text and HTML."""

from __future__ import annotations

from html import escape

from workbench.core.words import plural
from workbench.memory import Budget
from workbench.memory.budget import PARTS
from workbench.views import units
from workbench.views.lines import wrap

SHOWN = 8  #: layouts and ranks that are listed


def budget_text(found: Budget) -> str:
    """Return the chosen layout, its ranks, the runners-up, and the omissions of the estimate."""
    lines = [headline(found), f"  precision   {_precision(found)}"]
    names = {name: f"{units.nbytes(size)}" for name, size in zip(PARTS, found.chosen.parts, strict=True) if size}
    lines.append(
        f"  largest     {units.nbytes(found.chosen.largest)}: " + ", ".join(f"{k} {v}" for k, v in names.items())
    )
    lines.append(f"  mean        {units.nbytes(int(found.chosen.mean))} per rank")
    lines.append("    gpus   tp   pp   dp   ep  stage     largest  fits")
    for c in found.choices[:SHOWN]:
        fits = "yes" if c.fits else "no"
        lines.append(
            f"  {c.gpus:>6,} {c.tp:>4} {c.pp:>4} {c.dp:>4} {c.ep:>4} {c.stage:>6}"
            f"  {units.nbytes(c.largest):>10}  {fits}"
        )
    if len(found.choices) > SHOWN:
        lines.append(f"  … {plural(len(found.choices) - SHOWN, 'more layout')}")
    for sentence in found.notes:
        lines += wrap("  note: ", sentence)
    return "\n".join(lines)


def budget_html(found: Budget) -> str:
    """Return the same facts as HTML tables."""
    table = found.frame().head(2 * SHOWN).to_html(index=False, border=0)
    ranks = found.ranks.head(4 * SHOWN).to_html(index=False, border=0)
    notes = "".join(f"<li>{escape(sentence)}</li>" for sentence in found.notes)
    return (
        f"<div><b>{escape(headline(found))}</b><div>{escape(_precision(found))}</div>{table}"
        f"<details><summary>ranks ({len(found.ranks):,})</summary>{ranks}</details><ul>{notes}</ul></div>"
    )


def headline(found: Budget) -> str:
    """Return in one line whether the model fits."""
    room = units.nbytes(found.memory - found.reserve)
    size = f"{units.count(found.parameters)} elements on {found.gpus:,} × {room}"
    if found.fits:
        return f"{size}: fits {plural(found.chosen.gpus, 'GPU')}, {found.chosen}"
    return f"{size}: fits no layout that was tried; closest is {found.chosen}, {units.nbytes(found.chosen.largest)}"


def _precision(found: Budget) -> str:
    p = found.precision
    return f"weights {p.weights}, grads {p.grads}, master {p.master}, {p.count} moments {p.moments}"
