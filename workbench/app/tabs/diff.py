"""The *Diff* tab: this checkpoint, A, beside another one of ROOT, B; every element is compared, in a job.

Of two steps the earlier one is A, whichever of them is open: a change reads from before to after.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import panel as pn
import panel_material_ui as pmui

from workbench.analysis.diff import diff
from workbench.analysis.diff_result import Diff
from workbench.app import style
from workbench.app.jobs import Tick
from workbench.app.others import Others
from workbench.app.tabs.diff_view import DiffView, table_rows
from workbench.app.tabs.tab import Tab
from workbench.app.words import html
from workbench.app.work import Work
from workbench.errors import UsageError
from workbench.views.diff_grid import Board

__all__ = ["DiffTab"]

AT_ONCE = 256 << 20  #: bytes of A up to which a link's comparison starts by itself
NONE = "choose a checkpoint"
SELECTED = ("tensor", "pattern", "role")


@dataclass(frozen=True)
class Compared:
    """A difference with what its pictures and tables are made from."""

    diff: Diff
    board: Board
    rows: Any
    turned: bool  #: the checkpoint that is open is B, as its step is the later one


class DiffTab(Tab):
    """Choose B, compare, look; a result is kept while A and B stay."""

    key = "diff"
    follows = ("ckpt", "other")

    def build(self) -> None:
        self.view: DiffView | None = None
        self._turned = False
        self._others = Others(self.schedule, self._listed)
        self._choice = pmui.Select(
            label="B, to compare with",
            options={NONE: ""},
            value="",
            searchable=True,
            size="small",
            sizing_mode="stretch_width",
            margin=(10, 10),
        )
        self._choice.param.watch(lambda event: self.state.param.update(other=event.new), "value")
        self._swap = pmui.Button(
            label="Swap A and B", variant="outlined", color="primary", on_click=lambda _: self.swap(), margin=(14, 10)
        )
        self._words = style.pane("")
        self.work = Work(
            "Compare",
            self._compare,
            self._done,
            verb="comparing",
            ready=self._why_not,
            schedule=self.schedule,
            long=True,
        )
        self._result = pn.Column(sizing_mode="stretch_width")
        self._body_parts = [pn.Row(self._choice, self._swap, sizing_mode="stretch_width"), self._words]
        self.state.param.watch(self._drop, ["ckpt", "other"])
        self.state.param.watch(self._forward, [*SELECTED, "tab"])

    def draw(self) -> None:
        state = self.state
        if state.ckpt is None:
            self.body[:] = []
            return
        self._others.start(state.jail)
        self._offer()
        self._swap.disabled = not state.other
        self._arrange()
        small = int(state.ckpt.catalog.tensor_nbytes.sum()) <= AT_ONCE
        if self.work.job.status == "idle" and self.view is None and small and not self._why_not():
            self.work.start()

    def _arrange(self) -> None:
        """The button is there as long as there is something to compare that is not compared."""
        work = [self.work] if not self._why_not() and self.view is None else []
        self.body[:] = [*self._body_parts, *work, self._result]

    def close(self) -> None:
        self.work.reset()
        self._others.job.reset()
        if self.view is not None:
            self.view.close()

    def swap(self) -> None:
        """B becomes A."""
        state = self.state
        if state.other:
            tensor = self.view.tensor if self.view is not None else ""
            state.show(state.other, other=state.path, tensor=tensor, role=state.role)

    # ---- which B -----------------------------------------------------------------------------------------------------

    def _listed(self, error: str) -> None:
        if error:
            self._words.object = style.message(error, "error")
        else:
            self._offer()

    def _offer(self) -> None:
        """What B may be, and what is still to be said."""
        state = self.state
        options = self._others.options(state.path, state.other, NONE)
        self._choice.param.update(options=options, value=state.other)
        if self._others.job.status == "done" and len(options) == 1:
            self._words.object = "<p>There is no other checkpoint under ROOT to compare with.</p>"
        elif not state.other:
            self._words.object = (
                f'<p>A is <span class="name">{html(state.path)}</span>. Choose B: steps of the same run come first. '
                "Of two steps the earlier one is shown as A.</p>"
                '<p class="muted">Every element of both is then read and compared bit by bit, whatever their formats '
                "and shardings.</p>"
            )
        elif why := self._why_not():
            self._words.object = style.message(why, "warning")
        else:
            self._words.object = ""

    def _why_not(self) -> str:
        if not self.state.other:
            return "choose a checkpoint to compare with"
        return "A and B are the same checkpoint; choose another B" if self.state.other == self.state.path else ""

    # ---- comparison --------------------------------------------------------------------------------------------------

    def _compare(self, tick: Tick) -> Compared:
        first = self.state.ckpt
        if first is None:
            raise UsageError("the checkpoint is not open any more")
        second = self.state.borrow("other")
        turned = first.step is not None and second.step is not None and first.step > second.step
        a, b = (second, first) if turned else (first, second)
        found = diff(a, b, tick=lambda share: tick(0.97 * share))
        board = Board(found)
        return Compared(found, board, table_rows(board), turned)

    def _done(self, found: Compared) -> None:
        state = self.state
        names = (state.other, state.path) if found.turned else (state.path, state.other)
        self._turned = found.turned
        view = DiffView(
            found.diff,
            found.board,
            found.rows,
            file=f"{names[0]}-{names[1]}-diff",
            names=names,
            schedule=self.schedule,
            pattern=state.pattern,
            role=state.role,
        )
        view.tensor = view.find(state.tensor)
        view.param.watch(self._chosen, list(SELECTED))
        self.view, self._result[:] = view, [view]
        self._arrange()

    def _drop(self, *_: Any) -> None:
        """Another A or B: what was found is of no use, and its checkpoint may be closed."""
        self.work.reset()
        if self.view is not None:
            self.view.close()
        self.view, self._result[:] = None, []

    def _chosen(self, *events: Any) -> None:
        """The view's selection becomes the page's; its tensor under the name in the open checkpoint, as all tabs do."""
        words = {event.name: event.new for event in events}
        if self.view is not None and words.get("tensor"):
            row = self.view.diff.tensor(words["tensor"])
            words["tensor"] = row.key_b if self._turned else row.keys_a[0]
        self.state.param.update(**words)

    def _forward(self, *_: Any) -> None:
        """The page's selection becomes the view's."""
        view, state = self.view, self.state
        if view is None or state.tab != self.key:
            return
        tensor = view.find(state.tensor)
        if view.tensor and state.tensor in view.diff.tensor(view.tensor).keys_a:
            tensor = view.tensor  # one of several pairs that share a tensor of A
        view.param.update(tensor=tensor, pattern=state.pattern, role=state.role)
