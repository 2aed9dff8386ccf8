"""The *Overview* tab: what this checkpoint is, where its bytes are, and what is odd about it."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np
import panel as pn

from workbench.app import plots, style
from workbench.app.tabs.tab import Tab
from workbench.app.words import count, html, safe, size
from workbench.checkpoint import Checkpoint
from workbench.views import facts as shared

__all__ = ["Overview", "bytes_by_module", "facts", "module_of"]

BARS = 10  #: bars of one chart; the rest is summed up in a last one
DEPTH = 3  #: components of a module's name, unless a layer's number comes earlier
SHOWN = 12  #: names of objects that are listed


class Overview(Tab):
    """Reads the state's checkpoint and draws it; changes nothing."""

    key = "overview"

    def draw(self) -> None:
        ckpt = self.state.ckpt
        self.body[:] = [] if ckpt is None else self._parts(ckpt)

    def _parts(self, ckpt: Checkpoint) -> list[Any]:
        tiles = "".join(f"<div><small>{escape(k)}</small><span>{v}</span></div>" for k, v in facts(ckpt))
        head = f'<h2 class="name">{html(self.state.path)}</h2><div class="facts">{tiles}</div>'
        charts = [
            _chart("Bytes by role", [(share.label, share.nbytes) for share in shared.by_role(ckpt)], "role"),
            _chart("Bytes by element type", [(share.label, share.nbytes) for share in shared.by_dtype(ckpt)], "type"),
        ]
        return [
            style.pane(head),
            style.pane("".join(style.message(text, "warning") for text in shared.oddities(ckpt))),
            style.two_columns(*charts),
            _chart("Bytes by module", bytes_by_module(ckpt), "module"),
            _files(ckpt),
            _objects(ckpt),
        ]


def facts(ckpt: Checkpoint) -> list[tuple[str, str]]:
    """What the checkpoint is, as pairs of label and HTML; the words are those of its text repr."""
    told = [(name, html(value)) for name, value in shared.heading(ckpt) if name not in ("files", "objects")]
    used = np.unique(ckpt.catalog.file).tolist()
    sizes = [max(ckpt.catalog.file_stats[file].size, 0) for file in used]
    return [
        ("format", html(ckpt.format)),
        *told,
        ("files with tensors", f"{count(len(sizes))}, {size(sum(sizes))}"),
        ("other objects", count(len(ckpt.objects))),
    ]


def bytes_by_module(ckpt: Checkpoint) -> list[tuple[str, int]]:
    """Bytes summed by module, optimizer state with its parameter; largest first."""
    total: dict[str, int] = {}
    sizes = ckpt.catalog.tensor_nbytes.tolist()
    for fqn, key, n in zip(ckpt.fqns, ckpt.catalog.keys, sizes, strict=True):
        name = module_of(fqn or key)
        total[name] = total.get(name, 0) + n
    return sorted(total.items(), key=lambda item: (-item[1], item[0]))


def module_of(name: str) -> str:
    """The module that a chart by module counts a tensor to: up to the first number, else some components."""
    parts = name.split(".")
    for at, part in enumerate(parts[:-1]):
        if part.isdigit():
            return ".".join(parts[: at + 1])
    return ".".join(parts[:-1][:DEPTH]) or name


def _chart(title: str, rows: Sequence[tuple[str, int]], what: str) -> pn.Column:
    if len(rows) > BARS:
        rest = rows[BARS - 1 :]
        rows = [*rows[: BARS - 1], (f"{len(rest):,} others", sum(n for _, n in rest))]
    shown = [(safe(name), n) for name, n in rows]
    pane = pn.pane.HoloViews(plots.bytes_bars(shown, what), linked_axes=False, sizing_mode="stretch_width")
    return pn.Column(style.pane(f"<h3>{escape(title)}</h3>"), pane, sizing_mode="stretch_width")


def _files(ckpt: Checkpoint) -> pn.Column:
    import pandas as pd

    catalog = ckpt.catalog
    frame = pd.DataFrame(
        {
            "file": [safe(name) for name in catalog.files],
            "nbytes": [max(stat.size, 0) for stat in catalog.file_stats],
            "chunks": np.bincount(catalog.file, minlength=len(catalog.files)),
        }
    )
    columns: dict[str, tuple[str, str, int | None]] = {
        "file": ("File", "text", None),
        "nbytes": ("Size", "bytes", 120),
        "chunks": ("Chunks", "count", 140),
    }
    table = style.table(frame, columns, page_size=8)
    return pn.Column(style.pane("<h3>Files</h3>"), table, sizing_mode="stretch_width")


def _objects(ckpt: Checkpoint) -> pn.pane.HTML:
    names = [str(name) for _, name in zip(range(SHOWN), ckpt.objects, strict=False)]
    if not names:
        return style.pane('<h3>Other objects</h3><p class="muted">none: only tensors are stored</p>')
    more = len(ckpt.objects) - len(names)
    words = ", ".join(f'<span class="name">{html(name)}</span>' for name in names)
    return style.pane(f"<h3>Other objects</h3><p>{words}{f' … {count(more)} more' if more else ''}</p>")
