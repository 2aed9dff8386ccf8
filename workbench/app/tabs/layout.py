"""The view of one layout; the *Layout* tab connects it to the page, a notebook shows it directly.

::

    mesh · placements · bytes · balance                   errors
    [ All tensors | One tensor | Files | Mesh | Save | Will it fit? ]
    the chosen part: controls, picture, the tapped item
    downloads"""

from __future__ import annotations

from typing import Any

import panel as pn

from workbench.analysis.layout import Layout
from workbench.app import layouts, style
from workbench.app.jobs import Progress, Schedule
from workbench.app.layouts import ReadyLayout, found_of
from workbench.app.save import csv_button, json_button
from workbench.app.tabs.layout_fit import FitPart
from workbench.app.tabs.layout_parts import (
    BytesPart,
    LayoutPart,
    Looked,
    MeshPart,
    PhasesPart,
    ShardsPart,
    SharesPart,
)
from workbench.app.tabs.tab import JobTab
from workbench.checkpoint import Checkpoint
from workbench.views import layout_words

#: Word in the URL → label and class.
VIEWS: dict[str, tuple[str, type[LayoutPart]]] = {
    "all": ("All tensors", SharesPart),
    "tensor": ("One tensor", ShardsPart),
    "files": ("Files", BytesPart),
    "mesh": ("Mesh", MeshPart),
    "save": ("Save", PhasesPart),
    "fit": ("Will it fit?", FitPart),
}
SELECTED = ("view", "tensor", "rank", "pattern", "role", "axes", "by", "fit")


class LayoutView(Looked):
    """Pictures of a layout with their controls; its parameters are the selection, as in a link.

    Args:
        layout: the layout; ``found``: the same prepared for display, if a job has done that already.
        source: the checkpoint, for the facts that the memory planner takes from its objects.
        file: base name of downloads.
        schedule: runs a callback on the page's thread.
    """

    def __init__(
        self,
        layout: Layout,
        found: ReadyLayout | None = None,
        *,
        source: Checkpoint | None = None,
        file: str = "layout",
        schedule: Schedule | None = None,
        **params: Any,
    ) -> None:
        super().__init__(layout, found_of(layout, source) if found is None else found, source, file, schedule, **params)
        self._made: dict[str, LayoutPart] = {}
        self._stale: set[str] = set()
        options = {VIEWS[name][0]: name for name in self.views}
        self._choice = style.choice(options, self.looked_at, lambda view: self.param.update(view=view), label="Picture")
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
                json_button(f"{file}-layout", layout.to_dict),
            ),
            sizing_mode="stretch_width",
        )
        self._show()

    def __panel__(self) -> pn.viewable.Viewable:
        return self._body

    @property
    def looked_at(self) -> str:
        """The current one of :data:`VIEWS`."""
        return self.view if self.view in self.views else next(iter(VIEWS))

    @property
    def views(self) -> list[str]:
        """Those of :data:`VIEWS` that there is something for."""
        return [name for name in VIEWS if name != "save" or self.found.phases is not None]

    @property
    def part(self) -> LayoutPart:
        """The current part."""
        return self._made[self.looked_at]

    def close(self) -> None:
        """Stop running jobs."""
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
        self._check_link()

    def _forward(self, *events: Any) -> None:
        self._check_link()
        super()._forward(*events)

    def _check_link(self) -> None:
        name = self.state.view
        if self.view is not None and name and name not in self.view.views:
            self.state.not_restored("view", f"the link names the picture {name!r}, which this layout does not have")
