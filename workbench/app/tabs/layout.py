"""The *Layout* tab: what each rank, file and byte stores; computed in a job, shown by one :class:`LayoutView`."""

from __future__ import annotations

from typing import Any

import panel as pn

from workbench.app import layouts
from workbench.app.jobs import Progress
from workbench.app.tabs.layout_view import SELECTED, LayoutView
from workbench.app.tabs.tab import Tab
from workbench.app.work import JobButton
from workbench.errors import UsageError

__all__ = ["LayoutTab"]


class LayoutTab(Tab):
    """Starts automatically: only the catalog is used, so even a million chunks take seconds."""

    key = "layout"
    follows = ("ckpt",)

    def build(self) -> None:
        self.view: LayoutView | None = None
        self.work = JobButton("Find the layout", self._find, self._done, verb="placing", schedule=self.schedule)
        self._result = pn.Column(sizing_mode="stretch_width")
        self.state.param.watch(self._drop, "ckpt")
        self.state.param.watch(self._forward, [*SELECTED, "tab"])

    def draw(self) -> None:
        if self.state.ckpt is None:
            self.body[:] = []
            return
        if self.view is None:
            self.body[:] = [self.work, self._result]
            self.work.start()

    def close(self) -> None:
        self.work.reset()
        if self.view is not None:
            self.view.close()

    def _find(self, progress: Progress) -> layouts.ReadyLayout:
        ckpt = self.state.ckpt
        if ckpt is None:
            raise UsageError("the checkpoint is no longer open")
        return layouts.found(ckpt, progress)

    def _done(self, found: layouts.ReadyLayout) -> None:
        state = self.state
        chosen = {name: str(getattr(state, name)) for name in SELECTED}
        view = LayoutView(
            found.layout, found, source=state.ckpt, file=f"{state.path}-layout", schedule=self.schedule, **chosen
        )
        view.param.watch(self._chosen, list(SELECTED))
        self.view, self._result[:] = view, [view]
        self.body[:] = [self._result]

    def _drop(self, *_: Any) -> None:
        """Drop the layout of another checkpoint."""
        self.work.reset()
        if self.view is not None:
            self.view.close()
        self.view, self._result[:] = None, []

    def _chosen(self, *events: Any) -> None:
        """Copy the view's selection to the page."""
        self.state.param.update(**{event.name: event.new for event in events})

    def _forward(self, *_: Any) -> None:
        """Copy the page's selection to the view."""
        if self.view is not None and self.state.tab == self.key:
            self.view.param.update(**{name: str(getattr(self.state, name)) for name in SELECTED})
