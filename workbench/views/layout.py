"""A layout as text and HTML: proven placements, bytes per rank, and what is wrong.

::

    layout of dcp checkpoint sample_ckpts/dcp_fsdp2
      mesh        ranks=4, from boxes of 117 tensors and their writers
      tensors     117 proven, 45 unknown of 162
"""

from __future__ import annotations

from html import escape

from workbench.analysis.layout import Layout, Placed
from workbench.analysis.layout.result import HolderView
from workbench.core.words import plural, some_of
from workbench.views import units
from workbench.views.lines import room, wrap
from workbench.views.names import pad, safe, shorten

PLACEMENTS = 12  #: placements that are listed
ROWS = 16  #: ranks and files that are listed
WORST = 6  #: holes and overlaps that are listed


def layout_text(found: Layout) -> str:
    """Return the layout as text: about 60 lines, 100 columns wide."""
    return "\n".join(layout_lines(found, ROWS))


def layout_lines(found: Layout, most: int | None = None) -> list[str]:
    """Return the layout as lines. ``most`` limits the rows of its tables."""
    lines = [shorten(f"layout of {found.format} checkpoint {safe(found.path)}", room())]
    for name, words in _heading(found):
        lines += wrap(f"  {name:<12}", words)
    return [*lines, *_placements(found), *_ranks(found, most), *_problems(found)]


def tensor_lines(found: Layout, key: str) -> list[str]:
    """Return the placement of one tensor, the reason, and its chunks. Raises the errors of :meth:`Layout.placed`."""
    placed, pieces = found.placed(key), found.pieces(key)
    lines = [f"{safe(key)}: {placed}, {placed.status}"]
    if placed.torch is not None:
        lines.append(f"  as DTensor  ({', '.join(placed.torch)}{',' if len(placed.torch) == 1 else ''})")
    lines += wrap("  why         ", placed.why)
    for row in pieces.to_dict("records"):
        again = f", copy {row['replica']}" if row["replica"] else ""
        lines.append(
            f"  {safe(row['holder'])}  {units.shape(row['offsets'])} + {units.shape(row['sizes'])}  "
            f"{safe(row['file'])} bytes {row['start']:,}–{row['stop']:,}{again}"
        )
    return lines


def holder_text(view: HolderView, most: int | None = ROWS) -> str:
    """Return the position of a rank on the mesh, its peers, and its contents, largest first."""
    at = ", ".join(f"{axis}={value}" for axis, value in view.coordinates.items())
    lines = [
        f"{safe(view.label)}{f' at {at}' if at else ''}: {units.nbytes(view.nbytes)} in "
        f"{plural(len(view.pieces), 'chunk')}"
    ]
    for axis, peers in view.peers.items():
        lines.append(f"  along {axis:<7} {some_of(peers, 8, safe)}")
    ordered = view.pieces.sort_values("nbytes", ascending=False, kind="stable")
    for row in ordered.head(most if most is not None else len(ordered)).to_dict("records"):
        where = f"{units.shape(row['offsets'])} + {units.shape(row['sizes'])}"
        lines.append(f"  {units.nbytes(row['nbytes']):>10}  {shorten(safe(row['key']), room() and 56)}  {where}")
    if most is not None and len(ordered) > most:
        lines.append(f"  … {plural(len(ordered) - most, 'more chunk')}")
    return "\n".join(lines)


def layout_html(found: Layout) -> str:
    """Return the same as tables, in the colours of the page."""
    cell = 'style="text-align:right;padding:0 1em 0 0;vertical-align:top"'
    left = 'style="text-align:left;padding:0 1em 0 0;vertical-align:top"'
    head = "".join(f"<tr><th {left}>{escape(n)}</th><td {left}>{escape(w)}</td></tr>" for n, w in _heading(found))
    rows = [
        f"<tr><td {left}><code>{escape(str(placed))}</code></td><td {cell}>{len(tensors):,}</td>"
        f"<td {cell}>{escape(size)}</td><td {left}>{escape(placed.status)}</td><td {left}>{escape(why)}</td></tr>"
        for placed, tensors, size, why in _rows(found)[: 2 * PLACEMENTS]
    ]
    placements = f"<tr><th {left}>placement</th><th {cell}>tensors</th><th {cell}>bytes</th><th {left}></th>" + (
        f"<th {left}>why</th></tr>{''.join(rows)}"
    )
    table = found.ranks.head(2 * ROWS)
    table = table.assign(label=[shorten(safe(label), 60) for label in table["label"]])
    ranks = table.to_html(index=False, escape=True, border=0, na_rep="–")
    more = f"<div>… {len(found.ranks) - 2 * ROWS:,} more</div>" if len(found.ranks) > 2 * ROWS else ""
    wrong = "".join(f"<div>{escape(line.strip())}</div>" for line in _problems(found))
    return (
        f"<div><b>{escape(f'layout of {found.format} checkpoint {safe(found.path)}')}</b><table>{head}</table>"
        f"<table>{placements}</table><details><summary>bytes per rank ({len(found.ranks):,})</summary>{ranks}{more}"
        f"</details>{wrong}</div>"
    )


# ---- parts -----------------------------------------------------------------------------------------------------------


def _heading(found: Layout) -> list[tuple[str, str]]:
    s = found.summary
    mesh = f"{found.mesh}, from {safe(found.mesh_source)}" if found.mesh.axes else safe(found.mesh_source)
    known = ", ".join(f"{s[name]:,} {name}" for name in ("proven", "partly", "unknown") if s[name]) or "none"
    noun = "rank" if found.holders.ranked else "holder"
    balance = found.balance
    lines = [
        ("mesh", mesh),
        ("placements", f"{known} of {plural(s['tensors'], 'tensor')}"),
        (
            "stored",
            f"{units.nbytes(s['stored'])} in {plural(s['chunks'], 'chunk')} of "
            f"{plural(s['files'], 'file')}, by {plural(s['holders'], noun)}",
        ),
    ]
    if balance.count > 1:
        even = f"the largest is {balance.ratio:.2f} × the mean"
        lines.append(("balance", f"{units.nbytes(balance.smallest)} to {units.nbytes(balance.largest)}; {even}"))
    if s["copies"]:
        share = units.percent(s["copies"], s["stored"])
        lines.append(("copies", f"{units.nbytes(s['copies'])} ({share}) stored more than once"))
    return lines


def _rows(found: Layout) -> list[tuple[Placed, list[int], str, str]]:
    nbytes = found.catalog.tensor_nbytes
    rows = []
    for placed, tensors in found.placements():
        reasons = {found.inferred.placed[found.inferred.of_tensor[t]].why for t in tensors}
        why = placed.why if len(reasons) == 1 else f"{placed.why}; similarly for the others"
        rows.append((placed, tensors, units.nbytes(int(nbytes[tensors].sum())), safe(why)))
    return rows


def _placements(found: Layout) -> list[str]:
    rows, width = _rows(found), room()
    if not rows:
        return []
    first = max(9, *(len(safe(placed)) for placed, *_ in rows[:PLACEMENTS]))
    first = first if width is None else min(first, 48)
    lines = [f"  {pad('placement', first)}  tensors       bytes"]
    for placed, tensors, size, _ in rows[:PLACEMENTS]:
        status = placed.status
        example = shorten(safe(found.catalog.keys[tensors[0]]), None if width is None else max(width - first - 37, 12))
        lines.append(
            f"  {pad(shorten(safe(placed), first), first)}  {len(tensors):>7,}  {size:>10}  {status:<7}  {example}"
        )
    if len(rows) > PLACEMENTS:
        lines.append(f"  … {plural(len(rows) - PLACEMENTS, 'more placement')}")
    return lines


def _ranks(found: Layout, most: int | None) -> list[str]:
    frame = found.ranks if most is None else found.ranks.head(most)
    if not len(frame):
        return []
    axes = [axis for axis in found.mesh.axes if axis in frame.columns]
    first = max(len(safe(label)) for label in frame["label"])
    first = first if room() is None else min(first, 48)
    heads = "".join(f"  {axis:>5}" for axis in axes)
    lines = [f"  {pad('holder', first)}{heads}  tensors  chunks       bytes"]
    for row in frame.to_dict("records"):
        at = "".join(f"  {_coordinate(row[axis]):>5}" for axis in axes)
        lines.append(
            f"  {pad(shorten(safe(row['label']), first), first)}{at}  {row['tensors']:>7,}  {row['chunks']:>6,}  "
            f"{units.nbytes(row['nbytes']):>10}"
        )
    if most is not None and len(found.ranks) > most:
        lines.append(f"  … {len(found.ranks) - most:,} more")
    return lines


def _coordinate(value: object) -> str:
    return str(value) if isinstance(value, int) else "–"


def _problems(found: Layout) -> list[str]:
    lines = []
    for what, frame in (("hole", found.holes), ("overlap", found.overlaps)):
        for row in frame.head(WORST).to_dict("records"):
            box = f"{units.shape(row['offsets'])} + {units.shape(row['sizes'])}"
            lines.append(f"  {what.upper()}  {box} of {shorten(safe(row['key']), room() and 60)}")
        if len(frame) > WORST:
            lines.append(f"  … {plural(len(frame) - WORST, f'more {what}')}")
    for tensor in found.covered.tangled[:WORST]:
        key = shorten(safe(found.catalog.keys[tensor]), room() and 60)
        lines.append(f"  HOLES NOT CHECKED  in {key}: it has too many overlaps or holes")
    return lines
