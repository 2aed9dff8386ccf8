"""One pair of tensors: its numbers and the pattern at once, its pictures when it has been read in a job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import panel as pn

from workbench.analysis.comparison import Comparison
from workbench.analysis.diff_rows import TensorDiff
from workbench.analysis.pair_histogram import PairHistogram, pair_histogram
from workbench.app import style
from workbench.app.jobs import Schedule, Tick
from workbench.app.words import count
from workbench.app.work import Work
from workbench.views.diff_pictures import band_picture, tail_picture, value_picture
from workbench.views.diff_words import tensor_html

__all__ = ["PairDetail", "Seen", "see"]

AT_ONCE = 256 << 20  #: bytes of a tensor that is read without being asked for


@dataclass(frozen=True)
class Seen:
    """What was read of a pair."""

    row: TensorDiff
    comparison: Comparison | None
    values: PairHistogram | None


def see(row: TensorDiff, tick: Tick) -> Seen:
    """Read both tensors: the histograms of their difference, then those of their values.

    Raises:
        HoleError, OpenError: an element is stored nowhere or cannot be read.
    """
    found = row.look(lambda share: tick(0.5 * share))
    tick(0.5)
    values = None
    if row.sides is not None:
        values = pair_histogram(*row.sides(), tick=lambda share: tick(0.5 + 0.5 * share))
    return Seen(row, found, values)


class PairDetail:
    """The selected pair; what is equal to the bit is said, and not read.

    Attributes:
        words: its numbers and the pattern found.
        pictures: of its values and their change, once they are read.

    Args:
        names: of the two sides.
    """

    def __init__(self, names: tuple[str, str], schedule: Schedule | None = None) -> None:
        self._names = names
        self._row: TensorDiff | None = None
        self._lead, self._told = style.pane(""), style.pane("")
        self.words = pn.Column(self._lead, self._told, sizing_mode="stretch_width")
        self.pictures = pn.Column(sizing_mode="stretch_width")
        self.work = Work("Read both tensors", self._see, self._seen, schedule=schedule)

    def show(self, row: TensorDiff | None, lead: str = "") -> None:
        """Turn to a pair; ``lead`` is a sentence above it, in HTML."""
        self._lead.object = lead
        if row is self._row:
            return
        self.work.reset()
        self._row = row
        self._told.object = "" if row is None else tensor_html(row)
        readable = row is not None and row.sides is not None and row.status not in ("equal", "unread", "unknown")
        self.pictures[:] = [self.work] if readable else []
        if readable and row is not None and row.nbytes <= AT_ONCE:
            self.work.start()

    def close(self) -> None:
        """Stop reading."""
        self.work.reset()

    def _see(self, tick: Tick) -> Seen:
        assert self._row is not None
        return see(self._row, tick)

    def _seen(self, found: Seen) -> None:
        self.pictures[:] = [style.two_columns(*_pictures(found, self._names))]


def _pictures(found: Seen, names: tuple[str, str]) -> list[Any]:
    shown: list[Any] = []
    if (values := found.values) is not None:
        some = "" if values.exact else f" ({count(values.summaries[0].seen)} sampled elements)"
        shown.append(_plot(f"Values before and after{some}", value_picture(values, names)))
    c = found.comparison
    if c is not None and (tail := tail_picture(c)) is not None:
        shown.append(_plot("How many elements changed by how much", tail))
    if c is not None and (bands := band_picture(c, found.row.shape_b)) is not None:
        shown.append(_plot("Where the changed elements lie", bands))
    return shown


def _plot(title: str, picture: Any) -> pn.Column:
    plot = pn.pane.HoloViews(picture, linked_axes=False, sizing_mode="stretch_width")
    return pn.Column(style.pane(f"<h3>{title}</h3>"), plot, sizing_mode="stretch_width")
