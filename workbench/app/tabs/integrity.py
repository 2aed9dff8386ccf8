"""The *Integrity* tab: is this checkpoint intact, to the chosen depth; works even if it cannot be opened."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import panel as pn
import panel_material_ui as pmui

from workbench.app import style
from workbench.app.jobs import Progress
from workbench.app.tabs.report_view import ReportView
from workbench.app.tabs.tab import Tab
from workbench.app.words import html
from workbench.app.work import JobButton

if TYPE_CHECKING:
    from workbench.analysis.report import Report

__all__ = ["DEPTHS", "Integrity"]

#: Depths: word in the URL → label, what is checked and its cost.
DEPTHS = {
    "structure": ("Structure", "names, sizes, headers, boxes, steps; no payload is read; takes seconds at any size"),
    "deep": ("Every byte", "also stored checksums, values, copies and masters; reads everything once or twice"),
}


class Integrity(Tab):
    """A verification as a job, and its findings; clicking one shows its numbers and the remedy."""

    key = "integrity"
    follows = ("ckpt", "path")

    def build(self) -> None:
        self._depth = pmui.RadioButtonGroup(
            options={title: name for name, (title, _) in DEPTHS.items()}, value=self._chosen(), label="Depth",
            size="small", color="primary", margin=(10, 10),
        )  # fmt: skip
        self._depth.param.watch(lambda event: self.state.param.update(depth=event.new), "value")
        self.state.param.watch(self._follow, "depth")
        self._about = style.pane("")
        self.work = JobButton("Verify", self._verify, self._done, verb="checking", schedule=self.schedule, long=True)
        self._result = pn.Column(sizing_mode="stretch_width")
        self._follow()

    def draw(self) -> None:
        self.work.reset()
        self._result[:] = []
        self.body[:] = [self._depth, self._about, self.work, self._result]

    def close(self) -> None:
        self.work.reset()

    def _chosen(self) -> str:
        return self.state.depth if self.state.depth in DEPTHS else "structure"

    def _follow(self, *_: Any) -> None:
        self._depth.value = self._chosen()
        self._about.object = f'<p class="muted">{html(DEPTHS[self._chosen()][1])}.</p>'

    def _verify(self, progress: Progress) -> Report:
        from workbench.analysis.verify import verify

        state = self.state
        return verify(state.ckpt or state.jail.resolve(state.path), deep=self._chosen() == "deep", progress=progress)

    def _done(self, report: Report) -> None:
        self._result[:] = [ReportView(report, file=f"{self.state.path}-integrity")]
