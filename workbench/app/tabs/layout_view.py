"""Everything that is shown of one layout; the *Layout* tab wires it to the page, a notebook shows it as it is.

::

    mesh · placements · bytes · balance                   what is wrong
    [ All tensors | One tensor | Files | Mesh | Will it fit? ]
    the one that is chosen: controls, picture, what was tapped
    downloads
"""

from __future__ import annotations

from typing import Any

import panel as pn
import panel_material_ui as pmui
import param

from workbench.analysis.layout import Layout
from workbench.app import style
from workbench.app.jobs import Schedule
from workbench.app.layouts import Found, found_of
from workbench.app.save import csv_button, json_button
from workbench.app.tabs.layout_bytes_part import BytesPart
from workbench.app.tabs.layout_fit import FitPart
from workbench.app.tabs.layout_mesh_part import MeshPart
from workbench.app.tabs.layout_part import ONE_LINE, Part
from workbench.app.tabs.layout_shards_part import ShardsPart
from workbench.app.tabs.layout_shares_part import SharesPart
from workbench.checkpoint import Checkpoint
from workbench.views import layout_words

__all__ = ["SELECTED", "VIEWS", "LayoutView"]

#: The URL's word → the choice and what draws it.
VIEWS: dict[str, tuple[str, type[Part]]] = {
    "all": ("All tensors", SharesPart),
    "tensor": ("One tensor", ShardsPart),
    "files": ("Files", BytesPart),
    "mesh": ("Mesh", MeshPart),
    "fit": ("Will it fit?", FitPart),
}
SELECTED = ("view", "tensor", "rank", "pattern", "role", "axes", "by", "fit")


class LayoutView(pn.viewable.Viewer):
    """Pictures of a layout with their controls; its parameters are what is selected, as a link has them.

    Args:
        layout: the layout; ``found``: the same made ready, where a job has done that already.
        source: the checkpoint, for what the budget takes from its objects.
        file: what files to download are called.
        schedule: runs a callback on the page's thread.
    """

    view = param.String(default="", doc="Which picture; empty for the first.")
    tensor = param.String(default="", doc="Key of the selected tensor.")
    rank = param.String(default="", doc="The selected rank's number, or a holder's label where ranks are not stored.")
    pattern = param.String(default="", doc="Regular expression on keys.")
    role = param.String(default="", doc="Only this role; empty for all.")
    axes = param.String(default="", doc="Axes of the tensor that go down and across: 0,1.")
    by = param.String(default="", doc="What colours a box: rank or file.")
    fit = param.String(default="", doc="What the budget is asked: gpus=8,gb=80,tp=2.")

    def __init__(
        self,
        layout: Layout,
        found: Found | None = None,
        *,
        source: Checkpoint | None = None,
        file: str = "layout",
        schedule: Schedule | None = None,
        **params: Any,
    ) -> None:
        super().__init__(**params)
        self.layout, self.found = layout, found_of(layout) if found is None else found
        self.source, self.file, self.schedule = source, file, schedule
        self.later = schedule or (lambda callback: callback())
        self._made: dict[str, Part] = {}
        self._stale: set[str] = set()
        self._choice = pmui.RadioButtonGroup(
            options={title: name for name, (title, _) in VIEWS.items()}, value=self.looked_at, label="Picture",
            size="small", color="primary", margin=(10, 10), sx=ONE_LINE,
        )  # fmt: skip
        self._choice.param.watch(lambda event: self.param.update(view=event.new), "value")
        self._part = pn.Column(sizing_mode="stretch_width")
        self.param.watch(self._changed, list(SELECTED))
        odd = layout_words.wrong(layout)
        words = style.message(odd, "error") if odd else ""
        self._body = pn.Column(
            style.pane(words + layout_words.head(layout)),
            self._choice,
            self._part,
            pn.FlexBox(
                csv_button(f"{file}-ranks", lambda: layout.ranks, "CSV of ranks"),
                csv_button(f"{file}-files", lambda: layout.files, "CSV of files"),
                csv_button(f"{file}-tensors", lambda: layout.tensors, "CSV of tensors"),
                json_button(f"{file}-layout", layout.to_json),
            ),
            sizing_mode="stretch_width",
        )
        self._show()

    def __panel__(self) -> pn.viewable.Viewable:
        return self._body

    @property
    def looked_at(self) -> str:
        """Which of :data:`VIEWS`."""
        return self.view if self.view in VIEWS else next(iter(VIEWS))

    @property
    def part(self) -> Part:
        """What is looked at."""
        return self._made[self.looked_at]

    @property
    def holder(self) -> int | None:
        """Row of the selected rank, ``None`` where none is, or it stored nothing."""
        label = f"rank {self.rank}" if self.rank.isdecimal() and self.rank.isascii() else self.rank
        labels = self.layout.holders.label
        return labels.index(label) if label and label in labels else None

    def rank_of(self, holder: int) -> str:
        """What ``rank`` is when a holder is selected."""
        return self.layout.holders.label[holder].removeprefix("rank ")

    def close(self) -> None:
        """Stop what runs."""
        for part in self._made.values():
            if isinstance(part, FitPart):
                part.work.reset()

    def _changed(self, *events: Any) -> None:
        names = {event.name for event in events}
        self._stale |= {name for name, (_, kind) in VIEWS.items() if names & set(kind.follows)}
        self._show()

    def _show(self) -> None:
        name = self.looked_at
        self._choice.value = name
        fresh = name not in self._made
        if fresh:
            self._made[name] = VIEWS[name][1](self)
        part = self._made[name]
        if fresh or name in self._stale:
            self._stale.discard(name)
            part.draw()
        if list(self._part) != [part.body]:
            self._part[:] = [part.body]
