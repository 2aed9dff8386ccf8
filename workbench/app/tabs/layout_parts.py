"""The four maps of a layout: each its controls, its picture, and the words of what was tapped.

A part reads what is selected from its :class:`~workbench.app.tabs.layout_view.LayoutView` and sets it there; it is
drawn when it is looked at, and again when what it shows changes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import holoviews as hv
import numpy as np
import panel as pn
import panel_material_ui as pmui

from workbench.app import style
from workbench.app.save import csv_button
from workbench.app.search import LIMIT, Search
from workbench.app.words import count, html, safe
from workbench.errors import UsageError
from workbench.views import layout_pictures, layout_words
from workbench.views.layout_bytes import CLASSES
from workbench.views.layout_groups import Group, Share, groups, shares
from workbench.views.layout_mesh import standing
from workbench.views.layout_pictures import FEW, Marks
from workbench.views.layout_shards import Shards, axes_of, chunks_at, shards

if TYPE_CHECKING:
    from workbench.app.tabs.layout_view import LayoutView

__all__ = ["ONE_LINE", "BytesPart", "MeshPart", "Part", "ShardsPart", "SharesPart"]

OFFERED = 500  #: names in a list to choose from; any other may be typed
MARKED = 2_000  #: chunks that are framed at most
EVERY = "every role"
PIECES: dict[str, tuple[str, str, int | None]] = {
    "key": ("Tensor", "text", None),
    "nbytes": ("Bytes", "bytes", 90),
    "box": ("Box", "text", 190),
    "role": ("Role", "text", 100),
    "file": ("File", "text", 200),
    "start": ("From byte", "count", 120),
    "stop": ("To byte", "count", 120),
}
ONE_LINE = {"& .MuiToggleButton-root": {"whiteSpace": "nowrap"}}
WIDE: dict[str, Any] = {"size": "small", "margin": (10, 10, 5, 10)}


class Part:
    """One way to look at a layout.

    Attributes:
        body: what is shown.
        follows: of the view's parameters, those that it draws anew for.
    """

    follows: ClassVar[tuple[str, ...]] = ()

    def __init__(self, view: LayoutView) -> None:
        self.view, self.found, self.bytes = view, view.layout, view.found.bytes
        self.said = style.pane("")  # of what was tapped
        self.body = pn.Column(sizing_mode="stretch_width")
        self._plot = pn.Column(sizing_mode="stretch_width")
        self._busy = False
        self.marks = Marks()
        self.build()

    def build(self) -> None:
        """Make the controls."""

    def draw(self) -> None:
        """Bring controls and picture in line with the view."""
        raise NotImplementedError

    def show(self, element: Any, tapped: Any = None) -> None:
        """Put up a picture; ``tapped(x, y)`` runs on the page's thread."""
        if tapped is not None:
            source = element if isinstance(element, hv.DynamicMap) else next(iter(element))

            def tell(x: float | None = None, y: float | None = None) -> None:
                if x is not None and y is not None:
                    self.view.later(lambda: tapped(float(x), float(y)))  # HoloViews tells outside the document's lock

            hv.streams.Tap(source=source).add_subscriber(tell)
        self._plot[:] = [pn.pane.HoloViews(element, linked_axes=False, sizing_mode="stretch_width")]

    def mark(self, boxes: list[tuple[float, float, float, float]]) -> None:
        """Frame what is selected."""
        self.marks.show(boxes)
        if self._plot and pn.state.curdoc is None:
            pn.io.push_notebook(self._plot[0])  # a notebook hears of changes beneath Panel only when it is told

    def set(self, **values: str) -> None:
        """A control's or a tap's new selection."""
        if not self._busy:
            self.view.param.update(**values)


class SharesPart(Part):
    """Which rank stores how much of which module; of one tensor, where the filter or its name leaves one."""

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
        self._group: Group | None = None
        self.share: Share | None = None
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
            self._words.object = words + '<p class="muted">No tensor has such a name and role.</p>'
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
        self.show(layout_pictures.shares_picture(self.share, found.holders.label, self.marks), self.tapped)

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


class ShardsPart(Part):
    """One tensor on two of its axes."""

    follows = ("tensor", "axes", "by", "rank")

    def build(self) -> None:
        self._pick = pmui.AutocompleteInput(
            label="Tensor", min_characters=0, restrict=False, sizing_mode="stretch_width", **WIDE
        )
        self._by = pmui.RadioButtonGroup(
            options={"by rank": "rank", "by file": "file"}, value="rank", label="Colour", size="small", color="primary",
            margin=(10, 10, 5, 10), sx=ONE_LINE,
        )  # fmt: skip
        self._down = pmui.Select(label="Axis down", width=110, **WIDE)
        self._across = pmui.Select(label="Axis across", width=110, **WIDE)
        catalog = self.found.catalog
        order = np.argsort(-catalog.tensor_nbytes, kind="stable")[:OFFERED]
        self._largest = catalog.keys[int(order[0])] if len(order) else ""
        self._offers = {safe(catalog.keys[t]): catalog.keys[t] for t in sorted(order.tolist())}
        self._pick.options = list(self._offers)
        self._pick.param.watch(self._picked, "value")
        self._by.param.watch(lambda event: self.set(by=event.new), "value")
        for one in (self._down, self._across):
            one.param.watch(self._turned, "value")
        self._words, self._key = style.pane(""), style.pane("")
        self._controls = pn.FlexBox(self._down, self._across, self._by)
        self._shown: Shards | None = None
        self._drawn: tuple[Any, ...] = ()
        picture = pn.Column(self._controls, self._key, self._plot, sizing_mode="stretch_width")
        words = pn.Column(self._words, self.said, sizing_mode="stretch_width")
        self.body[:] = [pn.Row(self._pick, sizing_mode="stretch_width"), style.two_columns(picture, words)]

    def draw(self) -> None:
        view, catalog = self.view, self.found.catalog
        key = view.tensor if view.tensor in catalog.index else self._largest
        if not key:
            self._words.object, self._plot[:] = '<p class="muted">This checkpoint holds no tensor.</p>', []
            return
        ndim, told = len(catalog.shape_of(catalog.index[key])), ""
        by = view.by if view.by in ("rank", "file") else "rank"
        try:
            axes = axes_of(view.axes, ndim)
        except UsageError as error:
            axes, told = None, style.message(str(error), "warning")
        if self._drawn != (key, axes, by):
            self._drawn = (key, axes, by)
            shown = self._shown = shards(self.found, key, axes, by)
            self._controls_of(shown, ndim, by)
            lead = "" if view.tensor == key else '<p class="muted">The largest tensor; choose another one above.</p>'
            many = " Boxes that differ on the other axes alone lie on each other." if ndim > 2 else ""
            note = f'<p class="muted">Tap a box.{many}</p>'
            self._words.object = told + lead + layout_words.tensor_words(self.found, key) + note
            paint = layout_pictures.owner_colours(shown)
            wrong = {"hole": layout_pictures.HOLE} if len(shown.holes) else {}
            wrong |= {"overlap": layout_pictures.OVERLAP} if len(shown.overlaps) else {}
            self._key.object = layout_words.key_of_colours({name: paint[name] for name in shown.names} | wrong)
            self.marks, self.said.object = Marks(), ""
            self.show(layout_pictures.shards_picture(shown, self.marks), self.tapped)
        self._mark_rank()

    def tapped(self, x: float, y: float) -> None:
        if self._shown is None:
            return
        rows = chunks_at(self.found, self._shown, x, y)
        if len(rows):
            self.said.object = layout_words.chunk_words(self.found, rows.tolist())
            self.set(tensor=self._shown.key, rank=self.view.rank_of(int(self.found.holders.of_chunk[rows[0]])))
        else:
            self.said.object = '<div class="tapped">Nothing is stored here: a hole.</div>'

    def _mark_rank(self) -> None:
        shown, holder = self._shown, self.view.holder
        if shown is None:
            return
        span = self.found.catalog.rows_of(self.found.catalog.index[shown.key])
        mine = np.flatnonzero(self.found.holders.of_chunk[span] == holder) if holder is not None else np.zeros(0, int)
        boxes = []
        for row in (span.start + mine[:MARKED]).tolist():
            low, size = self.found.catalog.offsets[row].tolist(), self.found.catalog.sizes[row].tolist()
            left, wide = (0, 1) if shown.across is None else (low[shown.across], size[shown.across])
            top, high = (0, 1) if shown.down is None else (low[shown.down], size[shown.down])
            boxes.append((left, top, left + wide, top + high))
        self.mark(list(dict.fromkeys(boxes)))

    def _controls_of(self, shown: Shards, ndim: int, by: str) -> None:
        self._busy = True
        try:
            self._pick.value = safe(shown.key)
            self._by.value = by
            options = {f"{axis} of {size:,}": str(axis) for axis, size in enumerate(shown.shape)}
            for widget, axis in ((self._down, shown.down), (self._across, shown.across)):
                widget.visible = ndim > 1
                if ndim > 1:
                    widget.param.update(options=options, value=str(axis))
        finally:
            self._busy = False

    def _picked(self, event: Any) -> None:
        key = self._offers.get(event.new, event.new)
        if self._busy or not key:
            return
        if key not in self.found.catalog.index:
            self.said.object = style.message(f"there is no tensor {key!r}", "warning")
            return
        self.set(tensor=key, axes="")

    def _turned(self, event: Any) -> None:
        """Another axis; the one that was there goes where this one was."""
        if self._busy or self._shown is None:
            return
        down, across = str(self._down.value), str(self._across.value)
        if down == across:
            other = str(event.old)
            down, across = (other, across) if event.obj is self._across else (down, other)
        self.set(axes=f"{down},{across}")


class BytesPart(Part):
    """Files as rows of bytes."""

    follows = ("tensor",)

    def build(self) -> None:
        index = self.bytes
        paint = {safe(name): colour for name, colour in layout_pictures.role_colours(index).items()}
        note = ""
        if len(index) > FEW:
            note = "Zoomed out, a block shows how much of it is of which role; zoom in to see the chunks. "
        if len(index.roles) > CLASSES:
            note += "Roles of few bytes are taken together. "
        words = layout_words.key_of_colours({**paint, "no tensor's": layout_pictures.NO_TENSOR}, f"{note}Tap a byte.")
        self._key = style.pane(words)
        self.body[:] = [self._key, self._plot, self.said]

    def draw(self) -> None:
        if not self._plot:
            self.show(layout_pictures.bytes_picture(self.found, self.bytes, self.marks), self.tapped)
        catalog, key = self.found.catalog, self.view.tensor
        boxes: list[tuple[float, float, float, float]] = []
        if key in catalog.index:
            mine = self.bytes.boxes_of(self.bytes.of_tensor(self.found, catalog.index[key])[:MARKED])
            edges = (mine.left.tolist(), mine.top.tolist(), mine.right.tolist(), mine.bottom.tolist())
            boxes = list(zip(*edges, strict=True))
            span = catalog.rows_of(catalog.index[key])
            if f"{html(key)}</b>" not in str(self.said.object):
                self.said.object = layout_words.chunk_words(self.found, list(range(span.start, span.stop)))
        self.mark(boxes)

    def tapped(self, x: float, y: float) -> None:
        row = self.bytes.near(x, y, 0.004 * max(int(self.bytes.size.max(initial=1)), 1))
        if row is None:
            self.said.object = '<div class="tapped">No tensor has these bytes: a header, objects, or a gap.</div>'
            return
        self.said.object = layout_words.chunk_words(self.found, [row])
        catalog = self.found.catalog
        holder = int(self.found.holders.of_chunk[row])
        self.set(tensor=catalog.keys[int(catalog.tensor[row])], rank=self.view.rank_of(holder))


class MeshPart(Part):
    """Ranks on their axes; the chosen one with its peers and all that it stores."""

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
            self.show(layout_pictures.mesh_picture(self.found, self._at, None, self.marks), self.tapped)
            return
        one = self.found.rank(self.found.holders.label[holder])
        peers = {axis: labels for axis, labels in one.peers.items() if len(labels) > 1}
        paint = layout_pictures.peer_colours(peers)
        self._key.object = (
            layout_words.key_of_colours({f"along {axis}": paint[axis] for axis in peers}) if peers else ""
        )
        self.show(layout_pictures.mesh_picture(self.found, self._at, peers, self.marks), self.tapped)
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


def _pattern_of(keys: list[str]) -> str:
    """An expression that matches these names' common beginning, and the one part in which they differ if few do."""
    import re

    split = [key.split(".") for key in keys]
    depth = 0
    while all(len(parts) > depth and parts[depth] == split[0][depth] for parts in split):
        depth += 1
    head = "".join(f"{re.escape(part)}\\." for part in split[0][:depth])
    heads = list(dict.fromkeys(parts[depth] for parts in split if len(parts) > depth))
    if 1 < len(heads) <= 40:
        return f"^{head}(?:{'|'.join(re.escape(one) for one in heads)})(?:\\.|$)"
    return f"^{head}"
