"""*One tensor*: the rank or file that stores each box, on two of its axes.

Controls choose the tensor, the axes and the meaning of the colours; the boxes of the selected rank are framed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import panel as pn
import panel_material_ui as pmui

from workbench.app import style
from workbench.app.tabs.layout_part import MARKED, ONE_LINE, WIDE, LayoutPart
from workbench.app.words import safe
from workbench.errors import UsageError
from workbench.views import layout_words
from workbench.views.layout_canvas import HOLE, OVERLAP, Marks
from workbench.views.layout_pictures import owner_colours, shards_picture
from workbench.views.layout_shards import TensorShards, axes_of, chunks_at, shards

__all__ = ["ShardsPart"]

OFFERED = 500  #: names in the drop-down list; others can be typed


class ShardsPart(LayoutPart):
    """One tensor on two of its axes."""

    follows = ("tensor", "axes", "by", "rank")

    def build(self) -> None:
        self._pick = pmui.AutocompleteInput(
            label="Tensor", min_characters=0, restrict=False, sizing_mode="stretch_width", **WIDE
        )
        self._by = pmui.RadioButtonGroup(
            options={"by rank": "rank", "by file": "file"}, value="rank", label="Colour", size="small", color="primary",
            margin=(10, 10, 5, 10), sx=ONE_LINE,
        )  # fmt: skip
        self._down = pmui.Select(label="Vertical axis", width=110, **WIDE)
        self._across = pmui.Select(label="Horizontal axis", width=110, **WIDE)
        catalog = self.found.catalog
        order = np.argsort(-catalog.tensor_nbytes, kind="stable")[:OFFERED]
        self._largest = catalog.keys[int(order[0])] if len(order) else ""
        self._offers = {safe(catalog.keys[t]): catalog.keys[t] for t in sorted(order.tolist())}
        self._pick.options = list(self._offers)
        self._pick.param.watch(self._picked, "value")
        self._by.param.watch(lambda event: self.set(by=event.new), "value")
        for one in (self._down, self._across):
            one.param.watch(self._turned, "value")
        self._words, self._key = style.pane(""), style.pane("")
        self._controls = pn.FlexBox(self._down, self._across, self._by)
        self._shown: TensorShards | None = None
        self._drawn: tuple[Any, ...] = ()
        picture = pn.Column(self._controls, self._key, self._plot, sizing_mode="stretch_width")
        words = pn.Column(self._words, self.said, sizing_mode="stretch_width")
        self.body[:] = [pn.Row(self._pick, sizing_mode="stretch_width"), style.two_columns(picture, words)]

    def draw(self) -> None:
        view, catalog = self.view, self.found.catalog
        key = view.tensor if view.tensor in catalog.index else self._largest
        if not key:
            self._words.object, self._plot[:] = '<p class="muted">This checkpoint contains no tensors.</p>', []
            return
        ndim, problem = len(catalog.shape_of(catalog.index[key])), ""
        by = view.by if view.by in ("rank", "file") else "rank"
        try:
            axes = axes_of(view.axes, ndim)
        except UsageError as error:
            axes, problem = None, style.message(str(error), "warning")
        if self._drawn != (key, axes, by):
            self._drawn = (key, axes, by)
            shown = self._shown = shards(self.found, key, axes, by)
            self._controls_of(shown, ndim, by)
            lead = "" if view.tensor == key else '<p class="muted">The largest tensor; choose another one above.</p>'
            many = " Boxes that differ only on other axes coincide." if ndim > 2 else ""
            note = f'<p class="muted">Tap a box.{many}</p>'
            self._words.object = problem + lead + layout_words.tensor_words(self.found, key) + note
            paint = owner_colours(shown)
            wrong = {"hole": HOLE} if len(shown.holes) else {}
            wrong |= {"overlap": OVERLAP} if len(shown.overlaps) else {}
            self._key.object = layout_words.key_of_colours({name: paint[name] for name in shown.names} | wrong)
            self.marks, self.said.object = Marks(), ""
            self.show(shards_picture(shown, self.marks), self.tapped)
        self._mark_rank()

    def tapped(self, x: float, y: float) -> None:
        if self._shown is None:
            return
        rows = chunks_at(self.found, self._shown, x, y)
        if len(rows):
            self.said.object = layout_words.chunk_words(self.found, rows.tolist())
            self.set(tensor=self._shown.key, rank=self.view.rank_of(int(self.found.holders.of_chunk[rows[0]])))
        else:
            self.said.object = '<div class="tapped">This is a hole: nothing is stored here.</div>'

    def _mark_rank(self) -> None:
        shown, holder = self._shown, self.view.holder
        if shown is None:
            return
        span = self.found.catalog.rows_of(self.found.catalog.index[shown.key])
        mine = np.flatnonzero(self.found.holders.of_chunk[span] == holder) if holder is not None else np.zeros(0, int)
        boxes = []
        for row in (span.start + mine[:MARKED]).tolist():
            low, size = self.found.catalog.offsets[row].tolist(), self.found.catalog.sizes[row].tolist()
            left, wide = (0, 1) if shown.across is None else (low[shown.across], size[shown.across])
            top, high = (0, 1) if shown.down is None else (low[shown.down], size[shown.down])
            boxes.append((left, top, left + wide, top + high))
        self.mark(list(dict.fromkeys(boxes)))

    def _controls_of(self, shown: TensorShards, ndim: int, by: str) -> None:
        self._busy = True
        try:
            self._pick.value = safe(shown.key)
            self._by.value = by
            options = {f"{axis} of {size:,}": str(axis) for axis, size in enumerate(shown.shape)}
            for widget, axis in ((self._down, shown.down), (self._across, shown.across)):
                widget.visible = ndim > 1
                if ndim > 1:
                    widget.param.update(options=options, value=str(axis))
        finally:
            self._busy = False

    def _picked(self, event: Any) -> None:
        key = self._offers.get(event.new, event.new)
        if self._busy or not key:
            return
        if key not in self.found.catalog.index:
            self.said.object = style.message(f"there is no tensor {key!r}", "warning")
            return
        self.set(tensor=key, axes="")

    def _turned(self, event: Any) -> None:
        """Change an axis; if it is shown already, the two axes are swapped."""
        if self._busy or self._shown is None:
            return
        down, across = str(self._down.value), str(self._across.value)
        if down == across:
            other = str(event.old)
            down, across = (other, across) if event.obj is self._across else (down, other)
        self.set(axes=f"{down},{across}")
