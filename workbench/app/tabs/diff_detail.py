"""One pair of tensors: its numbers and pattern immediately, its pictures once it has been read in a job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import panel as pn

from workbench.analysis.comparison import Comparison
from workbench.analysis.diff_rows import TensorDiff
from workbench.analysis.pair_histogram import PairHistogram, pair_histogram
from workbench.app import style
from workbench.app.jobs import Progress, Schedule
from workbench.app.words import count
from workbench.app.work import JobButton
from workbench.views.diff_pictures import band_picture, tail_picture, value_picture
from workbench.views.diff_words import tensor_html

AT_ONCE = 256 << 20  #: bytes of a tensor up to which it is read automatically


@dataclass(frozen=True)
class PairRead:
    """The data read from a pair."""

    row: TensorDiff
    comparison: Comparison | None
    values: PairHistogram | None


def see(row: TensorDiff, progress: Progress) -> PairRead:
    """Read both tensors: histograms of their difference, then of their values.

    Raises:
        HoleError, OpenError: an element is stored nowhere or cannot be read.
    """
    found = row.look(lambda share: progress(0.5 * share))
    progress(0.5)
    values = None
    if row.sides is not None:
        values = pair_histogram(*row.sides(), progress=lambda share: progress(0.5 + 0.5 * share))
    return PairRead(row, found, values)


class PairDetail:
    """The selected pair; a bitwise equal pair is reported as such and not read.

    Attributes:
        words: its numbers and pattern.
        pictures: of its values and their change, once read.

    Args:
        names: of the two sides.
    """

    def __init__(self, names: tuple[str, str], schedule: Schedule | None = None) -> None:
        self._names = names
        self._row: TensorDiff | None = None
        self._lead, self._told = style.pane(""), style.pane("")
        self.words = pn.Column(self._lead, self._told, sizing_mode="stretch_width")
        self.pictures = pn.Column(sizing_mode="stretch_width")
        self.work = JobButton("Read both tensors", self._see, self._seen, schedule=schedule)

    def show(self, row: TensorDiff | None, lead: str = "") -> None:
        """Show a pair; ``lead`` is an HTML sentence above it."""
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

    def _see(self, progress: Progress) -> PairRead:
        assert self._row is not None
        return see(self._row, progress)

    def _seen(self, found: PairRead) -> None:
        self.pictures[:] = [style.two_columns(*_pictures(found, self._names))]


def _pictures(found: PairRead, names: tuple[str, str]) -> list[Any]:
    shown: list[Any] = []
    if (values := found.values) is not None:
        some = "" if values.exact else f" ({count(values.summaries[0].seen)} sampled elements)"
        shown.append(_plot(f"Values before and after{some}", value_picture(values, names)))
    c = found.comparison
    if c is not None and (tail := tail_picture(c)) is not None:
        shown.append(_plot("Distribution of changes", tail))
    if c is not None and (bands := band_picture(c, found.row.shape_b)) is not None:
        shown.append(_plot("Where the changed elements are", bands))
    return shown


def _plot(title: str, picture: Any) -> pn.Column:
    plot = pn.pane.HoloViews(picture, linked_axes=False, sizing_mode="stretch_width")
    return pn.Column(style.pane(f"<h3>{title}</h3>"), plot, sizing_mode="stretch_width")
