"""The phases of a save in words: which rank was the slowest, why, and a table.

::

    Rank 5 was the slowest: its data took 4.61 s, 1.6 × the median (2.88 s); its sync 1.92 s instead of 212 ms.
    The save took 5.02 s for 9.31 GiB, 1.85 GiB/s.
      rank      stage       plan  serialise       hash      write       sync       data     gather   metadata
      0        310 ms     121 ms      52 ms     1.02 s     2.31 s     212 ms     2.88 s     1.73 s      98 ms
"""

from __future__ import annotations

from html import escape

from workbench.analysis.phases import SavePhases
from workbench.core.words import plural
from workbench.views import units
from workbench.views.lines import wrap
from workbench.views.names import html, pad, safe

ROWS = 16  #: ranks that are listed


def sentences(found: SavePhases) -> list[str]:
    """Return which rank was the slowest, and how long the save took."""
    lines, slow = [], found.slowest
    if slow is not None and found.ranks == 1:
        part = f", {slow.part} {units.seconds(slow.part_seconds)} of it" if slow.part else ""
        lines.append(f"One rank saved; its data took {units.seconds(slow.seconds)}{part}.")
    elif slow is not None and slow.even:
        low = min(found.of("data").values())
        lines.append(
            f"All {plural(found.ranks, 'rank')} took about equally long: {units.seconds(low)} to "
            f"{units.seconds(slow.seconds)} for their data."
        )
    elif slow is not None:
        times = f", {slow.seconds / slow.typical:.3g} × the median ({units.seconds(slow.typical)})"
        part = f"; its {slow.part} {units.seconds(slow.part_seconds)} instead of {units.seconds(slow.part_typical)}"
        lines.append(
            f"Rank {slow.rank} was the slowest: its data took {units.seconds(slow.seconds)}"
            f"{times if slow.typical else ''}{part if slow.part else ''}."
        )
    speed = f", {units.nbytes(int(found.nbytes / found.total))}/s" if found.total else ""
    lines.append(f"The save took {units.seconds(found.total)} for {units.nbytes(found.nbytes)}{speed}.")
    staged = found.of("stage")
    if staged:
        lines.append(f"Before that, the training waited up to {units.seconds(max(staged.values()))} for the copy.")
    return lines


def phases_text(found: SavePhases, most: int | None = ROWS) -> str:
    """Return the sentences, and the seconds of each phase on each rank; of more than ``most`` ranks, the slowest."""
    lines = [line for one in sentences(found) for line in wrap("", one)]
    ranks = shown_ranks(found, most)
    lines.append(f"  {'rank':<6}" + "".join(f"{safe(name)[:10]:>11}" for name in found.names))
    for rank in ranks:
        cells = (found.seconds(rank, name) for name in found.names)
        lines.append(
            pad(f"  {rank}", 8) + "".join(f"{'–' if one is None else units.seconds(one):>11}" for one in cells)
        )
    if len(ranks) < found.ranks:
        lines.append(f"  … {plural(found.ranks - len(ranks), 'faster rank')}")
    lines += [safe(note) for note in found.notes]
    return "\n".join(lines)


def phases_html(found: SavePhases) -> str:
    """Return the same for a notebook."""
    first, *more = phases_text(found).split("\n")
    return f"<p><b>{escape(first)}</b></p><pre>{escape(chr(10).join(more))}</pre>"


def shown_ranks(found: SavePhases, most: int | None) -> list[int]:
    """Return the ranks in order; if there are more than ``most``, those whose data took longest, slowest first."""
    ranks = sorted({row.rank for row in found.rows})
    if most is None or len(ranks) <= most:
        return ranks
    data = found.of("data")
    return sorted(ranks, key=lambda rank: -data.get(rank, 0.0))[:most]


def rank_words(found: SavePhases, rank: int) -> str:
    """Return the phases of one rank, as HTML."""
    rows = [(name, one) for name in found.names if (one := found.seconds(rank, name)) is not None]
    nbytes = sum(row.nbytes for row in found.rows if row.rank == rank and row.name == "data")
    words = ", ".join(f"{html(name)} {units.seconds(one)}" for name, one in rows)
    return f'<div class="tapped"><b>rank {rank}</b> wrote {units.nbytes(nbytes)}: {words}</div>'
