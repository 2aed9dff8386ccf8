"""The *Diff* tab: this checkpoint, A, and another one under ROOT, B; every element is compared, in a job.

Of two steps, the earlier one is A, whichever is open: changes read from before to after.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import panel as pn
import panel_material_ui as pmui

from workbench.analysis.diff import diff
from workbench.analysis.diff_result import Diff
from workbench.app import style
from workbench.app.jobs import Progress
from workbench.app.others import Others
from workbench.app.tabs.diff_view import DiffView, table_rows
from workbench.app.tabs.tab import JobTab
from workbench.app.words import html
from workbench.views.diff_grid import Board

AT_ONCE = 256 << 20  #: bytes of A up to which a comparison from a link starts automatically
NONE = "choose a checkpoint"
SELECTED = ("tensor", "pattern", "role")


@dataclass(frozen=True)
class Compared:
    """A diff with the data of its pictures and tables."""

    diff: Diff
    board: Board
    rows: Any
    turned: bool  #: the open checkpoint is B because its step is the later one


class DiffTab(JobTab):
    """Choose B, compare, inspect; the result is kept until A or B changes."""

    key = "diff"
    follows = ("ckpt", "other")
    mirrored = SELECTED
    view: DiffView | None

    def build(self) -> None:
        self._turned = False
        self._words = style.pane("")
        self._others = Others(self.schedule, self._words, self._offer)
        self._choice = pmui.Select(
            label="B (compare with)",
            options={NONE: ""},
            value="",
            searchable=True,
            size="small",
            sizing_mode="stretch_width",
            margin=(10, 10),
        )
        self._choice.param.watch(lambda event: self.state.param.update(other=event.new), "value")
        self._swap = style.button("Swap A and B", lambda _: self.swap(), size="medium", margin=(14, 10))
        self.prepare("Compare", self._compare, self._done, verb="comparing", ready=self._why_not, long=True)
        self._body_parts = [pn.Row(self._choice, self._swap, sizing_mode="stretch_width"), self._words]

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
        """Show the button while there is something left to compare."""
        work = [self.work] if not self._why_not() and self.view is None else []
        self.body[:] = [*self._body_parts, *work, self.result]

    def close(self) -> None:
        super().close()
        self._others.job.reset()

    def swap(self) -> None:
        """Swap A and B."""
        state = self.state
        if state.other:
            tensor = self.view.tensor if self.view is not None else ""
            state.show(state.other, other=state.path, tensor=tensor, role=state.role)

    # ---- which B -----------------------------------------------------------------------------------------------------

    def _offer(self) -> None:
        """Offer the choices of B, and state what is still missing."""
        state = self.state
        options = self._others.options(state.path, state.other, NONE)
        self._choice.param.update(options=options, value=state.other)
        if self._others.job.status == "done" and len(options) == 1:
            self._words.object = "<p>ROOT contains no other checkpoint to compare with.</p>"
        elif not state.other:
            self._words.object = (
                f'<p>A is <span class="name">{html(state.path)}</span>. Choose B; steps of the same run come first. '
                "Of two steps, the earlier one is A.</p>"
                '<p class="muted">Every element of both is read and compared bit by bit, regardless of format '
                "and sharding.</p>"
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

    def _compare(self, progress: Progress) -> Compared:
        first, second = self.opened(), self.state.borrow("other")
        turned = first.step is not None and second.step is not None and first.step > second.step
        a, b = (second, first) if turned else (first, second)
        found = diff(a, b, progress=lambda share: progress(0.97 * share))
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
        self.put(view)
        self._arrange()

    def of_view(self, words: dict[str, Any]) -> dict[str, Any]:
        """Name a tensor as the open checkpoint does, as in all tabs."""
        if self.view is not None and words.get("tensor"):
            row = self.view.diff.tensor(words["tensor"])
            words["tensor"] = row.key_b if self._turned else row.keys_a[0]
        return words

    def of_state(self) -> dict[str, Any]:
        view, words = self.view, super().of_state()
        assert view is not None
        words["tensor"] = view.find(self.state.tensor)
        if view.tensor and self.state.tensor in view.diff.tensor(view.tensor).keys_a:
            words["tensor"] = view.tensor  # one of several pairs with the same tensor of A
        return words
