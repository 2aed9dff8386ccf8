"""The *Layout* tab: what each rank, file and byte stores; computed in a job, shown by one :class:`LayoutView`."""

from __future__ import annotations

from workbench.app import layouts
from workbench.app.jobs import Progress
from workbench.app.tabs.layout_view import SELECTED, LayoutView
from workbench.app.tabs.tab import JobTab

__all__ = ["LayoutTab"]


class LayoutTab(JobTab):
    """Starts automatically: only the catalog is used, so even a million chunks take seconds."""

    key = "layout"
    mirrored = SELECTED

    def build(self) -> None:
        self.prepare("Find the layout", self._find, self._done, verb="placing")

    def draw(self) -> None:
        if self.state.ckpt is None:
            self.body[:] = []
        elif self.view is None:
            self.body[:] = [self.work, self.result]
            self.work.start()

    def _find(self, progress: Progress) -> layouts.ReadyLayout:
        return layouts.found(self.opened(), progress)

    def _done(self, found: layouts.ReadyLayout) -> None:
        state = self.state
        file = f"{state.path}-layout"
        view = LayoutView(found.layout, found, source=state.ckpt, file=file, schedule=self.schedule, **self.of_state())
        self.put(view)
        self.body[:] = [self.result]
