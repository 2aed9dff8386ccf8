"""One way to look at a layout: its controls, its picture, and the words of what was tapped.

::

    LayoutView   tensor, rank, pattern, role, axes, by
       │ draw: what is selected     ▲ set: a control or a tap
    Part         controls · picture with frames around what is selected · words

A part is drawn when it is looked at, and again when what it shows changes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import holoviews as hv
import panel as pn

from workbench.app import style
from workbench.views.layout_canvas import Marks

if TYPE_CHECKING:
    from workbench.app.tabs.layout_view import LayoutView

__all__ = ["MARKED", "ONE_LINE", "WIDE", "Part"]

MARKED = 2_000  #: chunks that are framed at most
ONE_LINE = {"& .MuiToggleButton-root": {"whiteSpace": "nowrap"}}
WIDE: dict[str, Any] = {"size": "small", "margin": (10, 10, 5, 10)}


class Part:
    """One way to look at a layout.

    Attributes:
        body: what is shown.
        follows: of the view's parameters, those that it draws anew for.
    """

    follows: ClassVar[tuple[str, ...]] = ()

    def __init__(self, view: LayoutView) -> None:
        self.view, self.found, self.bytes = view, view.layout, view.found.bytes
        self.said = style.pane("")  # of what was tapped
        self.body = pn.Column(sizing_mode="stretch_width")
        self._plot = pn.Column(sizing_mode="stretch_width")
        self._busy = False
        self.marks = Marks()
        self.build()

    def build(self) -> None:
        """Make the controls."""

    def draw(self) -> None:
        """Bring controls and picture in line with the view."""
        raise NotImplementedError

    def show(self, element: Any, tapped: Any = None) -> None:
        """Put up a picture; ``tapped(x, y)`` runs on the page's thread."""
        if tapped is not None:
            source = element if isinstance(element, hv.DynamicMap) else next(iter(element))

            def tell(x: float | None = None, y: float | None = None) -> None:
                if x is not None and y is not None:
                    self.view.later(lambda: tapped(float(x), float(y)))  # HoloViews tells outside the document's lock

            hv.streams.Tap(source=source).add_subscriber(tell)
        self._plot[:] = [pn.pane.HoloViews(element, linked_axes=False, sizing_mode="stretch_width")]

    def mark(self, boxes: list[tuple[float, float, float, float]]) -> None:
        """Frame what is selected."""
        self.marks.show(boxes)
        if self._plot and pn.state.curdoc is None:
            pn.io.push_notebook(self._plot[0])  # a notebook hears of changes beneath Panel only when it is told

    def set(self, **values: str) -> None:
        """A control's or a tap's new selection."""
        if not self._busy:
            self.view.param.update(**values)
