"""One picture of a layout with its controls and the description of the tapped item.

::

    LayoutView   tensor, rank, pattern, role, axes, by
       │ draw: the selection        ▲ set: a control or a tap
       Part         controls · picture with frames around the selection · text

A part is drawn when it is first shown, and again when its data changes.
"""

from __future__ import annotations

from typing import Any, ClassVar

import holoviews as hv
import panel as pn
import param

from workbench.analysis.layout import Layout
from workbench.app import style
from workbench.app.jobs import Schedule
from workbench.app.layouts import ReadyLayout
from workbench.checkpoint import Checkpoint
from workbench.views.layout_canvas import Marks

__all__ = ["MARKED", "ONE_LINE", "WIDE", "LayoutPart", "Looked"]

MARKED = 2_000  #: maximum number of framed chunks
ONE_LINE = {"& .MuiToggleButton-root": {"whiteSpace": "nowrap"}}
WIDE: dict[str, Any] = {"size": "small", "margin": (10, 10, 5, 10)}


class Looked(pn.viewable.Viewer):
    """The selection in a layout, in the form of a link; the parts draw it and change it."""

    view = param.String(default="", doc="The picture; empty for the first.")
    tensor = param.String(default="", doc="Key of the selected tensor.")
    rank = param.String(default="", doc="The selected rank's number, or a holder's label if ranks are not stored.")
    pattern = param.String(default="", doc="Regular expression on keys.")
    role = param.String(default="", doc="Only this role; empty for all.")
    axes = param.String(default="", doc="Axes of the tensor that go down and across: 0,1.")
    by = param.String(default="", doc="What the colour of a box means: rank or file.")
    fit = param.String(default="", doc="Request to the memory planner: gpus=8,gb=80,tp=2.")

    def __init__(
        self,
        layout: Layout,
        found: ReadyLayout,
        source: Checkpoint | None,
        file: str,
        schedule: Schedule | None,
        **params: Any,
    ) -> None:
        super().__init__(**params)
        self.layout, self.found = layout, found
        self.source, self.file, self.schedule = source, file, schedule
        self.later = schedule or (lambda callback: callback())

    @property
    def holder(self) -> int | None:
        """Row of the selected rank; ``None`` if none is selected, or if it stored nothing."""
        label = f"rank {self.rank}" if self.rank.isdecimal() and self.rank.isascii() else self.rank
        labels = self.layout.holders.label
        return labels.index(label) if label and label in labels else None

    def rank_of(self, holder: int) -> str:
        """Return the value of ``rank`` for a holder."""
        return self.layout.holders.label[holder].removeprefix("rank ")


class LayoutPart:
    """One picture of a layout with its controls.

    Attributes:
        body: the content.
        follows: the parameters of the view whose change redraws it.
    """

    follows: ClassVar[tuple[str, ...]] = ()

    def __init__(self, view: Looked) -> None:
        self.view, self.found, self.bytes = view, view.layout, view.found.bytes
        self.said = style.pane("")  # about the tapped item
        self.body = pn.Column(sizing_mode="stretch_width")
        self._plot = pn.Column(sizing_mode="stretch_width")
        self._busy = False
        self.marks = Marks()
        self.build()

    def build(self) -> None:
        """Create the controls."""

    def draw(self) -> None:
        """Update controls and picture from the view."""
        raise NotImplementedError

    def show(self, element: Any, tapped: Any = None) -> None:
        """Show a picture; ``tapped(x, y)`` runs on the page's thread."""
        if tapped is not None:
            source = element if isinstance(element, hv.DynamicMap) else next(iter(element))

            def tell(x: float | None = None, y: float | None = None) -> None:
                if x is not None and y is not None:
                    self.view.later(lambda: tapped(float(x), float(y)))  # HoloViews calls without the document's lock

            hv.streams.Tap(source=source).add_subscriber(tell)
        self._plot[:] = [pn.pane.HoloViews(element, linked_axes=False, sizing_mode="stretch_width")]

    def mark(self, boxes: list[tuple[float, float, float, float]]) -> None:
        """Frame the selection."""
        self.marks.show(boxes)
        if self._plot and pn.state.curdoc is None:
            pn.io.push_notebook(self._plot[0])  # changes below Panel must be pushed to a notebook explicitly

    def set(self, **values: str) -> None:
        """Apply a new selection from a control or a tap."""
        if not self._busy:
            self.view.param.update(**values)
