"""*Mesh*: ranks on the mesh axes; the peers of the selected one and, in a table, every chunk that it stores."""

from __future__ import annotations

import panel as pn
import panel_material_ui as pmui

from workbench.app import style
from workbench.app.save import csv_button
from workbench.app.tabs.layout_part import WIDE, LayoutPart
from workbench.app.words import count, safe
from workbench.views import layout_words
from workbench.views.layout_canvas import Marks
from workbench.views.layout_mesh import standing
from workbench.views.layout_mesh_picture import mesh_picture, peer_colours

__all__ = ["MeshPart"]

PIECES: dict[str, tuple[str, str, int | None]] = {
    "key": ("Tensor", "text", None),
    "nbytes": ("Bytes", "bytes", 90),
    "box": ("Box", "text", 190),
    "role": ("Role", "text", 100),
    "file": ("File", "text", 200),
    "start": ("From byte", "count", 120),
    "stop": ("To byte", "count", 120),
}


class MeshPart(LayoutPart):
    """Ranks on the mesh axes; the selected one with its peers and its chunks."""

    follows = ("rank",)

    def build(self) -> None:
        found = self.found
        noun = "Rank" if found.holders.ranked else "Holder"
        options = {"none": "", **{safe(label): self.view.rank_of(n) for n, label in enumerate(found.holders.label)}}
        self._pick = pmui.Select(label=noun, options=options, value="", searchable=True, width=260, **WIDE)
        self._pick.param.watch(lambda event: self.set(rank=event.new), "value")
        self._at = standing(found)
        self._words = style.pane(layout_words.mesh_words(found))
        self._key, self._table = style.pane(""), pn.Column(sizing_mode="stretch_width")
        picture = pn.Column(self._pick, self._key, self._plot, sizing_mode="stretch_width")
        words = pn.Column(self._words, self.said, sizing_mode="stretch_width")
        self.body[:] = [style.two_columns(picture, words), self._table]

    def draw(self) -> None:
        view, holder = self.view, self.view.holder
        self._busy = True
        try:
            self._pick.value = "" if holder is None else view.rank_of(holder)
        finally:
            self._busy = False
        self.marks = Marks()
        if holder is None:
            self._key.object = self.said.object = ""
            self._table[:] = []
            if view.rank:
                self.said.object = style.message(f"{view.rank!r} stored nothing here; choose another one", "warning")
            self.show(mesh_picture(self.found, self._at, None, self.marks), self.tapped)
            return
        one = self.found.rank(self.found.holders.label[holder])
        peers = {axis: labels for axis, labels in one.peers.items() if len(labels) > 1}
        paint = peer_colours(peers)
        self._key.object = (
            layout_words.key_of_colours({f"along {axis}": paint[axis] for axis in peers}) if peers else ""
        )
        self.show(mesh_picture(self.found, self._at, peers, self.marks), self.tapped)
        self.mark([(self._at.x[holder], self._at.y[holder], self._at.x[holder] + 1, self._at.y[holder] + 1)])
        self.said.object = layout_words.holder_words(one)
        frame = one.pieces.sort_values("nbytes", ascending=False, kind="stable")
        shown = frame.head(5_000).assign(
            key=[safe(key) for key in frame["key"].head(5_000)],
            file=[safe(name) for name in frame["file"].head(5_000)],
            box=[_box(low, size) for low, size in zip(frame["offsets"][:5_000], frame["sizes"][:5_000], strict=True)],
        )[list(PIECES)]
        table = style.table(shown, PIECES, page_size=10, selectable=1, pagination="remote")
        keys = frame["key"].tolist()
        table.on_click(lambda event: self.set(tensor=keys[event.row]) if event.row is not None else None)
        more = f"; the table has the {count(5_000)} largest" if len(frame) > 5_000 else ""
        words = style.pane(
            f"<h3>What it stores</h3><p class='muted'>{count(len(frame))} chunks, largest first{more}.</p>"
        )
        save = csv_button(f"{self.view.file}-{one.label}", lambda: one.pieces, f"CSV of {safe(one.label)[:40]}")
        self._table[:] = [words, table, save]

    def tapped(self, x: float, y: float) -> None:
        holder = self._at.at(x, y)
        if holder is not None:
            self.set(rank=self.view.rank_of(holder))


def _box(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> str:
    return ", ".join(f"{low}:{low + size}" for low, size in zip(offsets, sizes, strict=True)) or "[]"
