"""*All tensors*: how much of each module each rank stores.

A pattern or a role leaves fewer tensors, which are regrouped; *Look inside* filters by the names of one group.
"""

from __future__ import annotations

import re

import numpy as np
import panel as pn
import panel_material_ui as pmui

from workbench.app import style
from workbench.app.search import LIMIT, Search
from workbench.app.tabs.layout_part import WIDE, LayoutPart
from workbench.app.words import count, safe
from workbench.errors import UsageError
from workbench.views import layout_words
from workbench.views.layout_canvas import Marks
from workbench.views.layout_groups import GroupShares, TensorGroup, groups, shares
from workbench.views.layout_pictures import shares_picture

__all__ = ["SharesPart"]

EVERY = "every role"


class SharesPart(LayoutPart):
    """How much of each module each rank stores; of one tensor, if the filter leaves only one."""

    follows = ("pattern", "role")

    def build(self) -> None:
        roles = {EVERY: "", **{safe(role): role for role in sorted(set(self.found.roles))}}
        self._pattern = pmui.TextInput(
            label="Filter names",
            placeholder="regular expression, e.g. layers\\.0\\.",
            sizing_mode="stretch_width",
            **WIDE,
        )
        self._role = pmui.Select(label="Role", options=roles, width=150, **WIDE)
        self._pattern.param.watch(lambda event: self.set(pattern=event.new), "value")
        self._role.param.watch(lambda event: self.set(role=event.new), "value")
        self._words = style.pane("")
        self._inside = pmui.Button(
            label="Look inside", variant="outlined", color="primary", visible=False, size="small"
        )
        self._inside.on_click(lambda _: self._look_inside())
        self._back = pmui.Button(label="All tensors", variant="outlined", color="primary", visible=False, size="small")
        self._back.on_click(lambda _: self.set(pattern="", role=""))
        self._group: TensorGroup | None = None
        self.share: GroupShares | None = None
        self.body[:] = [
            pn.Row(self._pattern, self._role, sizing_mode="stretch_width"), self._words, self._plot, self.said,
            pn.Row(self._inside, self._back),
        ]  # fmt: skip

    def draw(self) -> None:
        view, found = self.view, self.found
        role = view.role if view.role in self._role.options.values() else ""
        self._busy = True
        try:
            self._pattern.param.update(value=view.pattern, error_state=False)
            self._role.value = role
        finally:
            self._busy = False
        words, chosen = "", np.arange(len(found.catalog))
        if view.pattern:
            try:
                search = Search(found.catalog.keys, view.pattern)
                if not search.run(LIMIT / 10):
                    raise UsageError("the pattern takes too long on these names")
                chosen = np.array(search.hits, np.int64)
            except UsageError as error:
                self._pattern.error_state, words = True, style.message(f"{error}; every tensor is shown", "error")
        if role:
            chosen = chosen[np.array([found.roles[t] == role for t in chosen.tolist()], bool)]
        rows = groups(found.catalog.keys, found.catalog.tensor_nbytes, chosen)
        self.said.object, self._group, self._inside.visible = "", None, False
        self._back.visible = bool(view.pattern or role)
        if not rows:
            self.share, self._plot[:] = None, []
            self._words.object = words + '<p class="muted">No tensor matches this name and role.</p>'
            return
        self.share = shares(found, rows)
        most = "" if len(rows) == len(chosen) else f" in {count(len(rows))} groups by name"
        noun = "ranks" if found.holders.ranked else "holders"
        per = "" if self.share.per == 1 else f" {count(self.share.per)} {noun} a column."
        self._words.object = (
            f'{words}<p class="muted">{count(len(chosen))} tensors{most}, {count(len(found.holders))} {noun}. An empty '
            f"place is one that stores nothing of it.{per} Tap a cell.</p>"
        )
        self.marks = Marks()
        self.show(shares_picture(self.share, found.holders.label, self.marks), self.tapped)

    def tapped(self, x: float, y: float) -> None:
        share, row, column = self.share, int(np.floor(y)), int(np.floor(x))
        if share is None or not (0 <= row < len(share.groups) and 0 <= column < share.nbytes.shape[1]):
            return
        group = share.groups[row]
        words = layout_words.group_words(self.found, share, row, column)
        values = {"rank": self.view.rank_of(column)} if share.per == 1 else {}
        if len(group.tensors) == 1:
            values["tensor"] = self.found.catalog.keys[int(group.tensors[0])]
            span = self.found.catalog.rows_of(int(group.tensors[0]))
            mine = self.found.holders.of_chunk[span] // share.per == column
            words += layout_words.chunk_words(self.found, (span.start + np.flatnonzero(mine)).tolist())
        self._group = group if len(group.tensors) > 1 else None
        self.said.object, self._inside.visible = words, self._group is not None
        self.set(**values)
        self.mark([(column, row, column + 1, row + 1)])

    def _look_inside(self) -> None:
        if self._group is not None:
            self.set(pattern=_pattern_of([self.found.catalog.keys[t] for t in self._group.tensors.tolist()]))


def _pattern_of(keys: list[str]) -> str:
    """Return a pattern for the common prefix of names, and for the one part in which they differ if values are few."""
    split = [key.split(".") for key in keys]
    depth = 0
    while all(len(parts) > depth and parts[depth] == split[0][depth] for parts in split):
        depth += 1
    head = "".join(f"{re.escape(part)}\\." for part in split[0][:depth])
    heads = list(dict.fromkeys(parts[depth] for parts in split if len(parts) > depth))
    if 1 < len(heads) <= 40:
        return f"^{head}(?:{'|'.join(re.escape(one) for one in heads)})(?:\\.|$)"
    return f"^{head}"
