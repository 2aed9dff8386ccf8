"""A layout as HTML sentences next to its pictures; every name is escaped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from workbench.analysis.layout import Layout
from workbench.analysis.layout.result import HolderView
from workbench.core.words import plural, some_of
from workbench.views import units
from workbench.views.layout_groups import GroupShares
from workbench.views.names import html, safe

MOST = 6  #: items of a list that are shown


def head(found: Layout) -> str:
    """Return the summary of a layout: mesh, proven placements, bytes, balance, copies."""
    s, balance = found.summary, found.balance
    noun = "rank" if found.holders.ranked else "holder"
    known = ", ".join(f"{s[name]:,} {name}" for name in ("proven", "partly", "unknown") if s[name]) or "none"
    facts = {
        "mesh": safe(found.mesh) if found.mesh.axes else "not stored",
        "placements": known,
        "stored": f"{_size(s['stored'])} in {plural(s['chunks'], 'chunk')}",
        "by": f"{plural(s['holders'], noun)}, {plural(s['files'], 'file')}",
    }
    if balance.count > 1:
        facts["balance"] = f"largest is {balance.ratio:.2f} × the mean"
    if s["copies"]:
        facts["duplicated"] = f"{_size(s['copies'])}, {units.percent(s['copies'], s['stored'])}"
    cells = "".join(f"<div><small>{escape(k)}</small><span>{escape(v)}</span></div>" for k, v in facts.items())
    source_line = (
        f'<p class="muted">The mesh comes from {html(found.mesh_source)}.</p>'
        if found.mesh.axes
        else (f'<p class="muted">{html(found.mesh_source[:1].upper() + found.mesh_source[1:])}.</p>')
    )
    return f'<div class="facts">{cells}</div>{source_line}'


def wrong(found: Layout) -> str:
    """Return the holes and overlaps in one sentence; empty if there are none."""
    holes, twice = len(found.covered.holes), len(found.covered.overlaps)
    tangled = len(found.covered.tangled)
    if not holes + twice + tangled:
        return ""
    catalog = found.catalog
    broken = [one[0] for one in found.covered.holes] + [one[0] for one in found.covered.overlaps]
    broken += found.covered.tangled
    keys = dict.fromkeys(catalog.keys[t] for t in broken)
    counts = (holes, "hole"), (twice, "overlap"), (tangled, "tensor not fully checked")
    parts = [plural(n, noun) for n, noun in counts if n]
    where = some_of(keys, MOST, safe)
    return f"{' and '.join(parts)}: some elements are stored in no chunk or in two different chunks; in {where}"


def tensor_words(found: Layout, key: str) -> str:
    """Return the shape and placement of one tensor, and how the placement is known."""
    placed, catalog = found.placed(key), found.catalog
    tensor = catalog.index[key]
    torch = (
        ""
        if placed.torch is None
        else f'<p>As DTensor: <span class="name">({html(", ".join(placed.torch))})</span></p>'
    )
    span = catalog.rows_of(tensor)
    facts = (
        f"{units.shape(catalog.shape_of(tensor))} of {units.dtype(catalog.dtype_of(tensor).name)}, "
        f"{_size(int(catalog.tensor_nbytes[tensor]))} in {plural(span.stop - span.start, 'chunk')}"
    )
    return (
        f'<h2 class="name placed">{html(key)}</h2><p>{facts}</p>'
        f'<p><span class="name">{html(placed)}</span> <span class="odd">{escape(placed.status)}</span></p>'
        f'<p class="muted">{html(placed.why[:1].upper() + placed.why[1:])}.</p>{torch}'
    )


def chunk_words(found: Layout, rows: Sequence[int]) -> str:
    """Return tensor, box, holder, file and bytes of each chunk."""
    catalog = found.catalog
    lines = []
    for row in list(rows)[:MOST]:
        tensor = int(catalog.tensor[row])
        ndim = int(catalog.ndim[tensor])
        box = ", ".join(
            f"{low:,}:{low + size:,}"
            for low, size in zip(catalog.offsets[row, :ndim].tolist(), catalog.sizes[row, :ndim].tolist(), strict=True)
        )
        start, stop = int(catalog.start[row]), int(catalog.stop[row])
        holder = found.holders.label[int(found.holders.of_chunk[row])]
        file = catalog.files[int(catalog.file[row])]
        copy = f", copy {int(catalog.replica[row])}" if catalog.replica[row] else ""
        by = "" if holder == file else f" by {html(holder)}"
        lines.append(
            f'<div class="tapped"><b class="name">{html(catalog.keys[tensor])}</b> [{box}] is stored{by} in '
            f'<span class="name">{html(file)}</span>, bytes {start:,}–{stop:,} '
            f"({_size(stop - start)}){copy}</div>"
        )
    if len(rows) > MOST:
        lines.append(f'<p class="muted">… {plural(len(rows) - MOST, "more chunk")} here</p>')
    return "".join(lines)


def group_words(found: Layout, share: GroupShares, row: int, column: int) -> str:
    """Return the contents of one cell of the share map: the holders, the bytes, and the tensors."""
    group, who = share.groups[row], found.holders.label[column * share.per : (column + 1) * share.per]
    held, whole = int(share.nbytes[row, column]), int(share.whole[row])
    name = html(who[0]) if len(who) == 1 else f"{html(who[0])} to {html(who[-1])}"
    many = len(group.tensors)
    text = f"stores {_size(held)} of the {_size(whole)}" if held else f"stores nothing of the {_size(whole)}"
    return (
        f'<div class="tapped">{name} {text} of <b class="name">{html(group.name)}</b>'
        f"{f', {many:,} tensors' if many > 1 else ''} ({units.percent(held, whole)})</div>"
    )


def holder_words(view: HolderView) -> str:
    """Return the position of a holder, the bytes it stores, and its peers."""
    at = ", ".join(f"{axis}={value}" for axis, value in view.coordinates.items())
    place = f"<p>At {html(at)}: " if at else "<p>"
    lines = [
        f'<h2 class="name holder">{html(view.label)}</h2>{place}{_size(view.nbytes)} in '
        f"{plural(len(view.pieces), 'chunk')} of {plural(view.pieces['key'].nunique(), 'tensor')}.</p>"
    ]
    for axis, peers in view.peers.items():
        lines.append(f"<p>Along <b>{html(axis)}</b>: {some_of(peers, 12, html)}</p>")
    return "".join(lines)


def mesh_words(found: Layout) -> str:
    """Return how to read the mesh picture."""
    if not found.mesh.axes:
        source = found.mesh_source[:1].upper() + found.mesh_source[1:]
        return f'<p class="muted">{html(source)}; each cell is a file or rank that stored something.</p>'
    names = " The files do not name its axes; axis0 is the outermost." if "axis0" in found.mesh.axes else ""
    words = f"Each cell is a rank on its mesh, {html(found.mesh)}.{names} Click one, or choose it above."
    return f'<p class="muted">{words}</p>'


def key_of_colours(colours: Mapping[str, str], note: str = "") -> str:
    """Return a legend; beyond twelve names, a colour bar from the first to the last."""
    names = list(colours)
    if len(names) > 12:
        some = [colours[names[at * (len(names) - 1) // 8]] for at in range(9)]
        bar = f'<span style="{_swatch(120)}background:linear-gradient(90deg,{",".join(some)})"></span>'
        shown = f"{html(names[0])} {bar} {html(names[-1])}"
    else:
        shown = "".join(
            f'<span style="margin-right:14px"><span style="{_swatch(12)}background:{escape(colour)}"></span>'
            f"{html(name)}</span> "
            for name, colour in colours.items()
        )
    return f'<p class="legend" style="font-size:13px">{shown}{f" {escape(note)}" if note else ""}</p>'


def _swatch(width: int) -> str:
    return f"display:inline-block;width:{width}px;height:12px;border:1px solid #777;margin:0 6px -1px 2px;"


def _size(nbytes: int) -> str:
    return units.nbytes(nbytes).replace(" ", "\u2009")
