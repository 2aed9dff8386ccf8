"""*Save*: how long each phase of the save took on each rank; only if the manifest of the checkpoint records it."""

from __future__ import annotations

from html import escape

import numpy as np
import panel as pn

from workbench.app import style
from workbench.app.tabs.layout_part import LayoutPart
from workbench.views import layout_words
from workbench.views.names import safe
from workbench.views.phases import rank_words, sentences
from workbench.views.phases_pictures import COLUMNS, ROWS, gantt_picture, heat_picture, phase_colours

__all__ = ["PhasesPart"]


class PhasesPart(LayoutPart):
    """Phases by rank, and ranks by time."""

    def build(self) -> None:
        found = self.view.found.phases
        assert found is not None  # the view offers this part only then
        self.phases = found
        first, *more = sentences(found)
        words = f'<h2 class="slowest">{escape(first)}</h2><p>{escape(" ".join(more))}</p>'
        words += "".join(f"<p>{escape(safe(note))}</p>" for note in found.notes)
        heat = "Serialise, hash, write and sync are parts of data, added up over the threads of a rank."
        if found.ranks > COLUMNS:
            heat += " A column is the slowest of several ranks."
        some = f" The {ROWS} slowest ranks are shown." if found.ranks > ROWS else ""
        self._time = pn.Column(sizing_mode="stretch_width")
        self.body[:] = [
            style.pane(f'{words}<p class="muted">{heat} Tap a cell.</p>'),
            self._plot,
            self.said,
            style.pane(layout_words.key_of_colours(phase_colours(found), f"Times are those of each host.{some}")),
            self._time,
        ]

    def draw(self) -> None:
        self.show(heat_picture(self.phases, self.marks), self.tapped)
        picture = gantt_picture(self.phases)
        self._time[:] = [pn.pane.HoloViews(picture, linked_axes=False, sizing_mode="stretch_width")]

    def tapped(self, x: float, y: float) -> None:
        per = max(-(-self.phases.ranks // COLUMNS), 1)
        column, row = int(np.floor(x)), int(np.floor(y))
        ranks = range(column * per, min((column + 1) * per, self.phases.ranks))
        if column < 0 or not ranks or not 0 <= row < len(self.phases.names):
            return
        name = self.phases.names[row]
        rank = max(ranks, key=lambda one: self.phases.seconds(one, name) or 0.0)
        self.said.object = rank_words(self.phases, rank)
        self.mark([(column, row, column + 1, row + 1)])
        self.set(rank=str(rank))
