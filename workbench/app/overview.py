"""The *Overview* tab: what this checkpoint is, where its bytes are, and what is odd about it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

import numpy as np
import panel as pn

from workbench.app import plots, style
from workbench.app.state import WorkbenchState
from workbench.app.words import count, html, safe, size
from workbench.checkpoint import Checkpoint

__all__ = ["Overview", "bytes_by", "facts", "module_of", "oddities"]

BARS = 10  #: bars of one chart; the rest is summed up in a last one
DEPTH = 3  #: components of a module's name, unless a layer's number comes earlier
SHOWN = 12  #: names of objects that are listed


class Overview(pn.viewable.Viewer):
    """Reads the state's checkpoint and draws it; changes nothing."""

    def __init__(self, state: WorkbenchState, **params: Any) -> None:
        super().__init__(**params)
        self._state = state
        self._body = pn.Column(sizing_mode="stretch_width")
        state.param.watch(self._draw, "ckpt")
        self._draw()

    def __panel__(self) -> pn.viewable.Viewable:
        return self._body

    def _draw(self, *_: Any) -> None:
        ckpt = self._state.ckpt
        self._body[:] = [] if ckpt is None else self._parts(ckpt)

    def _parts(self, ckpt: Checkpoint) -> list[Any]:
        tiles = "".join(f"<div><small>{escape(k)}</small><span>{v}</span></div>" for k, v in facts(ckpt))
        head = f'<h2 class="name">{html(self._state.path)}</h2><div class="facts">{tiles}</div>'
        nbytes = ckpt.catalog.tensor_nbytes
        charts = [
            _chart("Bytes by role", bytes_by(ckpt.roles, nbytes), "role"),
            _chart("Bytes by element type", bytes_by((ckpt.catalog.dtype_of(t).name for t in range(len(ckpt))), nbytes), "type"),
        ]
        modules = bytes_by((module_of(f or k) for f, k in zip(ckpt.fqns, ckpt.catalog.keys, strict=True)), nbytes)
        return [
            style.pane(head),
            style.pane("".join(style.message(text, "warning") for text in oddities(ckpt))),
            style.two_columns(*charts),
            _chart("Bytes by module", modules, "module"),
            _files(ckpt),
            _objects(ckpt),
        ]


def facts(ckpt: Checkpoint) -> list[tuple[str, str]]:
    """What the checkpoint is, as pairs of label and HTML."""
    parameters = int(sum(n for n, role in zip(ckpt.catalog.numel.tolist(), ckpt.roles, strict=True) if role == "param"))
    ranks = np.unique(ckpt.catalog.rank[ckpt.catalog.rank >= 0])
    if ckpt.world_size is not None:
        world = count(ckpt.world_size)
    elif len(ranks):
        world = f"not stored; {count(len(ranks))} rank{'s' if len(ranks) > 1 else ''} wrote"
    else:
        world = "not stored"
    sizes = [stat.size for stat in ckpt.catalog.file_stats]
    return [
        ("format", html(ckpt.format)),
        ("step", "not stored" if ckpt.step is None else count(ckpt.step)),
        ("world size", world),
        ("parameters", count(parameters)),
        ("tensors", count(len(ckpt))),
        ("stored pieces", count(ckpt.catalog.chunks)),
        ("bytes of tensors", size(int(ckpt.catalog.tensor_nbytes.sum()))),
        ("files with tensors", f"{count(len(sizes))}, {size(sum(s for s in sizes if s > 0))}"),
        ("other objects", count(len(ckpt.objects))),
    ]


def oddities(ckpt: Checkpoint) -> list[str]:
    """Sentences on what one would want to know before trusting the checkpoint."""
    found = list(ckpt.notes)
    pieces = np.diff(ckpt.catalog.row_ptr)
    empty = np.flatnonzero((pieces == 0) & (ckpt.catalog.numel > 0))
    if len(empty):
        found.append(f"{len(empty):,} tensors have no stored piece and cannot be read; the first is {ckpt.catalog.keys[empty[0]]!r}")
    unknown = sum(fqn is None and role != "other" for fqn, role in zip(ckpt.fqns, ckpt.roles, strict=True))
    if unknown:
        found.append(f"{unknown:,} tensors do not say which parameter they belong to")
    lost = [name for name, stat in zip(ckpt.catalog.files, ckpt.catalog.file_stats, strict=True) if stat.size < 0]
    if lost:
        found.append(f"{len(lost):,} files are missing; the first is {lost[0]!r}")
    return found


def bytes_by(names: Iterable[str], nbytes: np.ndarray) -> list[tuple[str, int]]:
    """Bytes summed by name, largest first; beyond :data:`BARS` names the rest is one row."""
    total: dict[str, int] = {}
    for name, n in zip(names, nbytes.tolist(), strict=True):
        total[name] = total.get(name, 0) + n
    rows = sorted(total.items(), key=lambda item: (-item[1], item[0]))
    if len(rows) <= BARS:
        return rows
    rest = rows[BARS - 1 :]
    return [*rows[: BARS - 1], (f"{len(rest):,} others", sum(n for _, n in rest))]


def module_of(name: str) -> str:
    """The module that a chart by module counts a tensor to: up to the first number, else some components."""
    parts = name.split(".")
    for at, part in enumerate(parts[:-1]):
        if part.isdigit():
            return ".".join(parts[: at + 1])
    return ".".join(parts[:-1][:DEPTH]) or name


def _chart(title: str, rows: Sequence[tuple[str, int]], what: str) -> pn.Column:
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
            "pieces": np.bincount(catalog.file, minlength=len(catalog.files)),
        }
    )
    columns: dict[str, tuple[str, str, int | None]] = {
        "file": ("File", "text", None),
        "nbytes": ("Size", "bytes", 120),
        "pieces": ("Stored pieces", "count", 140),
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

