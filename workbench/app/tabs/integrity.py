"""The *Integrity* tab: is this checkpoint intact, to the chosen depth; works even if it cannot be opened."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from workbench.app import style
from workbench.app.jobs import Progress
from workbench.app.tabs.report_view import ReportView
from workbench.app.tabs.tab import AT_ONCE, JobTab
from workbench.app.words import html

if TYPE_CHECKING:
    from workbench.analysis.report import Report

#: Depths: word in the URL → label, checks and their cost.
DEPTHS = {
    "structure": ("Structure", "names, sizes, headers, boxes, steps; no payload is read; takes seconds at any size"),
    "deep": ("Every byte", "also stored checksums, values, copies and masters; reads everything once or twice"),
}


class Integrity(JobTab):
    """A verification as a job, and its findings; clicking one shows its numbers and the remedy."""

    key = "integrity"
    follows = ("ckpt", "path")

    def build(self) -> None:
        options = {title: name for name, (title, _) in DEPTHS.items()}
        self._depth = style.choice(
            options, self._depth_chosen(), lambda depth: self.state.param.update(depth=depth), label="Depth"
        )
        self.state.param.watch(self._follow, "depth")
        self._about = style.pane("")
        self.prepare("Verify", self._verify, self._done, verb="checking", long=True)
        self._follow()

    def draw(self) -> None:
        self.body[:] = [self._depth, self._about, self.work, self.result]
        if self.view is not None or self._depth_chosen() != "structure":
            return
        if self.state.structure is not None:
            self._done(self.state.structure)
        elif self.state.ckpt is not None and self.state.ckpt.catalog.chunks <= AT_ONCE:
            self.work.start()

    def _depth_chosen(self) -> str:
        return self.state.depth if self.state.depth in DEPTHS else "structure"

    def _follow(self, *_: Any) -> None:
        self._depth.value = self._depth_chosen()
        self._about.object = f'<p class="muted">{html(DEPTHS[self._depth_chosen()][1])}.</p>'

    def _verify(self, progress: Progress) -> Report:
        from workbench.analysis.verify import verify

        state = self.state
        return verify(
            state.ckpt or state.jail.resolve(state.path), deep=self._depth_chosen() == "deep", progress=progress
        )

    def _done(self, report: Report) -> None:
        self.put(ReportView(report, file=f"{self.state.path}-integrity"))
