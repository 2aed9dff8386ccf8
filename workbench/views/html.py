"""HTML reprs: collapsible through ``<details>``, without JavaScript or colours of their own.

They must be readable in light and dark notebooks, and on pages that strip styles and SVG (GitHub). Text therefore
carries every fact, colours are inherited, and styles only tidy up. Everything from a checkpoint is escaped twice: once
against control and bidi characters, once against markup. The size is bounded whatever the checkpoint contains.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from html import escape

from workbench.analysis.summary import Profile, profile
from workbench.checkpoint import Checkpoint
from workbench.core.codecs import CODECS
from workbench.core.words import plural
from workbench.errors import WorkbenchError
from workbench.tensor import LazyTensor
from workbench.views import facts, units
from workbench.views.names import safe, shorten
from workbench.views.spark import bars
from workbench.views.text import SAMPLE, anomalies, distribution
from workbench.views.tree import Node

BUDGET = 40_000  #: characters of a tree; nodes beyond are counted, not shown
SIBLINGS = 40  #: children of one module that are shown
LEVELS = 12  #: depth to which modules are shown
CHUNKS = 12  #: chunks of a tensor that are shown
NOTES = 8
BINS = 40  #: of the drawn histogram; the text histogram has a quarter as many
NAME = 100  #: characters of a name

_TABLE = 'style="border-collapse:collapse;text-align:left"'
_CELL = 'style="text-align:left;padding:0 1em 0 0;vertical-align:top"'
_ROW = 'style="text-align:left;padding:0 1em 0 0;white-space:pre-wrap"'


def checkpoint_html(ckpt: Checkpoint) -> str:
    """Return the checkpoint's description, size, contents and oddities, and its modules, which expand on click."""
    total = int(ckpt.catalog.tensor_nbytes.sum())
    rows = [(name, escape(value)) for name, value in facts.heading(ckpt)]
    rows += [
        ("by role", _shares(facts.by_role(ckpt), total)),
        ("by dtype", _shares(facts.by_dtype(ckpt), total)),
    ]
    odd = facts.oddities(ckpt)
    rows += [("note", escape(shorten(sentence, 400))) for sentence in odd[:NOTES]]
    if len(odd) > NOTES:
        rows.append(("", f"… {plural(len(odd) - NOTES, 'more note')}"))
    title = f"<b>{escape(ckpt.format)}</b> checkpoint <code>{_name(ckpt.path)}</code>"
    tree = _Tree(total).render(facts.nodes(ckpt.catalog))
    return f"<div>{title}{_facts(rows)}{tree}</div>"


def tensor_html(tensor: LazyTensor, *, limit: int | None = SAMPLE) -> str:
    """Return shape, dtype, size, the distribution of up to ``limit`` elements, and the chunks. Raises nothing."""
    kind = units.dtype(tensor.element.name)
    rows = [
        (
            "shape",
            f"{units.shape(tensor.shape)} {escape(kind)}, {plural(tensor.numel(), 'element')}, "
            f"{units.nbytes(tensor.nbytes)}",
        ),
        ("role", escape(safe(tensor.role)) + (f" of <code>{_name(tensor.fqn)}</code>" if tensor.fqn else "")),
    ]
    try:
        found = profile(tensor, BINS, limit=limit)
        words = " ".join(f"<b>{escape(word)}</b>" for word in anomalies(found.summary))
        if not found.summary.exact and found.summary.kind != "raw bytes":
            words += f" (a sample of {plural(found.summary.seen, 'element')})"
        rows.append(("values", f"{escape(distribution(_coarse(found)))} {words}"))
        if found.histogram is not None and found.summary.min != found.summary.max:
            rows.append(("", bars(found.histogram.counts)))
    except WorkbenchError as error:
        rows.append(("values", f"<b>unreadable</b>: {escape(shorten(safe(error), 600))}"))
    return f"<div><code>{_name(tensor.key)}</code>{_facts(rows)}{_chunks(tensor)}</div>"


def _coarse(found: Profile) -> Profile:
    if found.histogram is None:
        return found
    counts, edges = found.histogram.counts.reshape(-1, 4).sum(axis=1), found.histogram.edges[::4]
    return replace(found, histogram=replace(found.histogram, counts=counts, edges=edges))


class _Tree:
    """Modules as nested ``<details>`` until the budget is spent."""

    def __init__(self, total: int) -> None:
        self._total, self._left = total, BUDGET

    def render(self, nodes: Sequence[Node], level: int = 0) -> str:
        parts: list[str] = []
        for shown, node in enumerate(nodes):
            if shown == SIBLINGS or self._left <= 0:
                rest = nodes[shown:]
                size = units.nbytes(sum(node.nbytes for node in rest))
                parts.append(
                    f"<div>… {len(rest):,} more, {plural(sum(n.tensors for n in rest), 'tensor')}, {size}</div>"
                )
                break
            parts.append(self._node(node, level, " open" if len(nodes) == 1 else ""))
        return "".join(parts)

    def _node(self, node: Node, level: int, unfolded: str) -> str:
        name = f"<code>{_name(node.name)}</code>"
        times = f" ×{node.times:,}" if node.times > 1 else ""
        size = units.nbytes(node.nbytes)
        if node.shape is not None:
            what = f"{times} {units.shape(node.shape)} {escape(units.dtype(node.dtype or ''))} {size}"
            line = f'<div style="margin-left:1em">{name}{what}</div>'
            self._left -= len(line)
            return line
        share = units.percent(node.nbytes, self._total)
        head = f"{name}{times} · {plural(node.tensors, 'tensor')}, {size} ({share})"
        self._left -= len(head) + 80
        if level >= LEVELS:
            return f'<div style="margin-left:1em">{head} …</div>'
        return (
            f'<details{unfolded} style="margin-left:1em"><summary>{head}</summary>'
            f"{self.render(node.children, level + 1)}</details>"
        )


def _facts(rows: Iterable[tuple[str, str]]) -> str:
    body = "".join(f"<tr><th {_CELL}>{name}</th><td {_ROW}>{value}</td></tr>" for name, value in rows)
    return f"<table {_TABLE}>{body}</table>"


def _shares(shares: Sequence[facts.Share], total: int) -> str:
    lines = [
        f"{escape(shorten(s.label, 40))} {units.nbytes(s.nbytes)} "
        f"({units.percent(s.nbytes, total)}, {plural(s.tensors, 'tensor')})"
        for s in shares[:8]
    ]
    if len(shares) > 8:
        lines.append(f"{len(shares) - 8} more")
    return " · ".join(lines) or "–"


def _chunks(tensor: LazyTensor) -> str:
    catalog, rows = tensor._payloads.catalog, tensor._payloads.catalog.rows_of(tensor._tensor)
    dims, count = int(catalog.ndim[tensor._tensor]), rows.stop - rows.start
    head = "".join(
        f"<th {_CELL}>{name}</th>" for name in ("offsets", "sizes", "file", "bytes", "rank", "copy", "codec")
    )
    lines = []
    for row in range(rows.start, min(rows.stop, rows.start + CHUNKS)):
        rank = int(catalog.rank[row])
        cells = (
            units.shape(tuple(catalog.offsets[row, :dims].tolist())),
            units.shape(tuple(catalog.sizes[row, :dims].tolist())),
            f"<code>{_name(catalog.files[catalog.file[row]])}</code>",
            f"{int(catalog.start[row]):,} – {int(catalog.stop[row]):,}",
            str(rank) if rank >= 0 else "–",
            str(int(catalog.replica[row])),
            CODECS[catalog.codec[row]],
        )
        lines.append("<tr>" + "".join(f"<td {_CELL}>{cell}</td>" for cell in cells) + "</tr>")
    if count > CHUNKS:
        lines.append(f'<tr><td colspan="7">… {count - CHUNKS:,} more</td></tr>')
    table = f"<table {_TABLE}><tr>{head}</tr>{''.join(lines)}</table>"
    return f"<details><summary>{plural(count, 'chunk')}</summary>{table}</details>"


def _name(text: str | None) -> str:
    """Return a name inside ``<bdi>``: right-to-left letters must not reverse their neighbours."""
    return f'<bdi dir="ltr">{escape(shorten(safe(text), NAME)) or "&#39;&#39;"}</bdi>'
