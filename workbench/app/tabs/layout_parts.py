"""One picture of a layout with its controls and the description of the clicked item.

::

    LayoutView   tensor, rank, pattern, role, axes, by
       │ draw: the selection        ▲ set: a control or a tap
       Part         controls · picture with frames around the selection · text

A part is drawn when it is first shown, and again when its data changes.

::

    SharesPart   All tensors: how much of each module each rank stores
    ShardsPart   One tensor: which rank or file stores which box
    BytesPart    Files: what each byte is
    MeshPart     Mesh: the ranks' places, and who has equal parts
    PhasesPart   Save: how long each phase took, if the manifest records it
"""

from __future__ import annotations

import re
from html import escape
from typing import Any, ClassVar

import holoviews as hv
import numpy as np
import panel as pn
import panel_material_ui as pmui
import param

from workbench.analysis.layout import Layout
from workbench.app import style
from workbench.app.jobs import Schedule
from workbench.app.layouts import ReadyLayout
from workbench.app.save import csv_button
from workbench.app.search import LIMIT, Search
from workbench.app.words import count, html, safe
from workbench.checkpoint import Checkpoint
from workbench.core.words import plural
from workbench.errors import UsageError
from workbench.views import layout_words
from workbench.views.layout_bytes import CLASSES
from workbench.views.layout_canvas import HOLE, NO_TENSOR, OVERLAP, Marks
from workbench.views.layout_groups import GroupShares, TensorGroup, groups, shares
from workbench.views.layout_mesh import mesh_picture, peer_colours, standing
from workbench.views.layout_pictures import (
    FEW,
    bytes_picture,
    owner_colours,
    role_colours,
    shards_picture,
    shares_picture,
)
from workbench.views.layout_shards import TensorShards, axes_of, chunks_at, shards
from workbench.views.phases import rank_words, sentences
from workbench.views.phases_pictures import COLUMNS, ROWS, gantt_picture, heat_picture, phase_colours

MARKED = 2_000  #: maximum number of framed chunks
WIDE: dict[str, Any] = {"size": "small", "margin": (10, 10, 5, 10)}


class Looked(pn.viewable.Viewer):
    """The selection in a layout, in the form of a link; the parts draw it and change it."""

    view = param.String(default="", doc="The picture; empty for the first.")
    tensor = param.String(default="", doc="Key of the selected tensor.")
    rank = param.String(default="", doc="The selected rank's number, or a holder's label if ranks are not stored.")
    pattern = param.String(default="", doc="Regular expression on keys.")
    role = param.String(default="", doc="Only this role; empty for all.")
    axes = param.String(default="", doc="Axes of the tensor that go down and across: 0,1.")
    by = param.String(default="", doc="What the colour of a box means: rank or file.")
    fit = param.String(default="", doc="Request to the memory planner: gpus=8,gb=80,tp=2.")

    def __init__(
        self,
        layout: Layout,
        found: ReadyLayout,
        source: Checkpoint | None,
        file: str,
        schedule: Schedule | None,
        **params: Any,
    ) -> None:
        super().__init__(**params)
        self.layout, self.found = layout, found
        self.source, self.file, self.schedule = source, file, schedule
        self.later = schedule or (lambda callback: callback())

    @property
    def holder(self) -> int | None:
        """Row of the selected rank; ``None`` if none is selected, or if it stored nothing."""
        label = f"rank {self.rank}" if self.rank.isdecimal() and self.rank.isascii() else self.rank
        labels = self.layout.holders.label
        return labels.index(label) if label and label in labels else None

    def rank_of(self, holder: int) -> str:
        """Return the value of ``rank`` for a holder."""
        return self.layout.holders.label[holder].removeprefix("rank ")


class LayoutPart:
    """One picture of a layout with its controls.

    Attributes:
        body: the content.
        follows: the parameters of the view whose change redraws it.
    """

    follows: ClassVar[tuple[str, ...]] = ()

    def __init__(self, view: Looked) -> None:
        self.view, self.found, self.bytes = view, view.layout, view.found.bytes
        self.detail = style.pane("")  # about the tapped item
        self.body = pn.Column(sizing_mode="stretch_width")
        self._plot = pn.Column(sizing_mode="stretch_width")
        self._busy = False
        self.marks = Marks()
        self.build()

    def build(self) -> None:
        """Create the controls."""

    def draw(self) -> None:
        """Update controls and picture from the view."""
        raise NotImplementedError

    def show(self, element: Any, tapped: Any = None) -> None:
        """Show a picture; ``tapped(x, y)`` runs on the page's thread."""
        if tapped is not None:
            source = element if isinstance(element, hv.DynamicMap) else next(iter(element))

            def tell(x: float | None = None, y: float | None = None) -> None:
                if x is not None and y is not None:
                    self.view.later(lambda: tapped(float(x), float(y)))  # HoloViews calls without the document's lock

            hv.streams.Tap(source=source).add_subscriber(tell)
        self._plot[:] = [pn.pane.HoloViews(element, linked_axes=False, sizing_mode="stretch_width")]

    def mark(self, boxes: list[tuple[float, float, float, float]]) -> None:
        """Frame the selection."""
        self.marks.show(boxes)
        if self._plot and pn.state.curdoc is None:
            pn.io.push_notebook(self._plot[0])  # changes below Panel must be pushed to a notebook explicitly

    def set(self, **values: str) -> None:
        """Apply a new selection from a control or a tap."""
        if not self._busy:
            self.view.param.update(**values)


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
        self._inside = style.button("Look inside", lambda _: self._look_inside(), visible=False)
        self._back = style.button("All tensors", lambda _: self.set(pattern="", role=""), visible=False)
        self._group: TensorGroup | None = None
        self.share: GroupShares | None = None
        self.body[:] = [
            pn.Row(self._pattern, self._role, sizing_mode="stretch_width"),
            self._words,
            self._plot,
            self.detail,
            pn.Row(self._inside, self._back),
        ]

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
        self.detail.object, self._group, self._inside.visible = "", None, False
        self._back.visible = bool(view.pattern or role)
        if not rows:
            self.share, self._plot[:] = None, []
            self._words.object = words + '<p class="muted">No tensor matches this name and role.</p>'
            return
        self.share = shares(found, rows)
        most = "" if len(rows) == len(chosen) else f" in {count(len(rows))} groups by name"
        noun = "rank" if found.holders.ranked else "holder"
        per = "" if self.share.per == 1 else f" {plural(self.share.per, noun)} per column."
        self._words.object = (
            f'{words}<p class="muted">{plural(len(chosen), "tensor")}{most}, {plural(len(found.holders), noun)}. '
            f"A blank cell stores none of it.{per} Click a cell.</p>"
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
        self.detail.object, self._inside.visible = words, self._group is not None
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


OFFERED = 500  #: names in the drop-down list; others can be typed


class ShardsPart(LayoutPart):
    """One tensor on two of its axes."""

    follows = ("tensor", "axes", "by", "rank")

    def build(self) -> None:
        self._pick = pmui.AutocompleteInput(
            label="Tensor", min_characters=0, restrict=False, sizing_mode="stretch_width", **WIDE
        )
        options = {"by rank": "rank", "by file": "file"}
        self._by = style.choice(options, "rank", lambda by: self.set(by=by), label="Colour", margin=(10, 10, 5, 10))
        self._down = pmui.Select(label="Vertical axis", width=110, **WIDE)
        self._across = pmui.Select(label="Horizontal axis", width=110, **WIDE)
        catalog = self.found.catalog
        order = np.argsort(-catalog.tensor_nbytes, kind="stable")[:OFFERED]
        self._largest = catalog.keys[int(order[0])] if len(order) else ""
        self._offers = {safe(catalog.keys[t]): catalog.keys[t] for t in sorted(order.tolist())}
        self._pick.options = list(self._offers)
        self._pick.param.watch(self._picked, "value")
        for one in (self._down, self._across):
            one.param.watch(self._turned, "value")
        self._words, self._key = style.pane(""), style.pane("")
        self._controls = pn.FlexBox(self._down, self._across, self._by)
        self._shown: TensorShards | None = None
        self._drawn: tuple[Any, ...] = ()
        picture = pn.Column(self._controls, self._key, self._plot, sizing_mode="stretch_width")
        words = pn.Column(self._words, self.detail, sizing_mode="stretch_width")
        self.body[:] = [pn.Row(self._pick, sizing_mode="stretch_width"), style.two_columns(picture, words)]

    def draw(self) -> None:
        view, catalog = self.view, self.found.catalog
        key = view.tensor if view.tensor in catalog.index else self._largest
        if not key:
            self._words.object, self._plot[:] = '<p class="muted">This checkpoint contains no tensors.</p>', []
            return
        ndim, problem = len(catalog.shape_of(catalog.index[key])), ""
        by = view.by if view.by in ("rank", "file") else "rank"
        try:
            axes = axes_of(view.axes, ndim)
        except UsageError as error:
            axes, problem = None, style.message(str(error), "warning")
        if self._drawn != (key, axes, by):
            self._drawn = (key, axes, by)
            shown = self._shown = shards(self.found, key, axes, by)
            self._controls_of(shown, ndim, by)
            lead = "" if view.tensor == key else '<p class="muted">The largest tensor; choose another one above.</p>'
            many = " Boxes that differ only on other axes coincide." if ndim > 2 else ""
            note = f'<p class="muted">Click a box.{many}</p>'
            self._words.object = problem + lead + layout_words.tensor_words(self.found, key) + note
            paint = owner_colours(shown)
            wrong = {"hole": HOLE} if len(shown.holes) else {}
            wrong |= {"overlap": OVERLAP} if len(shown.overlaps) else {}
            self._key.object = layout_words.key_of_colours({name: paint[name] for name in shown.names} | wrong)
            self.marks, self.detail.object = Marks(), ""
            self.show(shards_picture(shown, self.marks), self.tapped)
        self._mark_rank()

    def tapped(self, x: float, y: float) -> None:
        if self._shown is None:
            return
        rows = chunks_at(self.found, self._shown, x, y)
        if len(rows):
            self.detail.object = layout_words.chunk_words(self.found, rows.tolist())
            self.set(tensor=self._shown.key, rank=self.view.rank_of(int(self.found.holders.of_chunk[rows[0]])))
        else:
            self.detail.object = '<div class="tapped">This is a hole: nothing is stored here.</div>'

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

    def _controls_of(self, shown: TensorShards, ndim: int, by: str) -> None:
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
            self.detail.object = style.message(f"there is no tensor {key!r}", "warning")
            return
        self.set(tensor=key, axes="")

    def _turned(self, event: Any) -> None:
        """Change an axis; if it is shown already, the two axes are swapped."""
        if self._busy or self._shown is None:
            return
        down, across = str(self._down.value), str(self._across.value)
        if down == across:
            other = str(event.old)
            down, across = (other, across) if event.obj is self._across else (down, other)
        self.set(axes=f"{down},{across}")


class BytesPart(LayoutPart):
    """Files as rows of bytes."""

    follows = ("tensor",)

    def build(self) -> None:
        index = self.bytes
        paint = {safe(name): colour for name, colour in role_colours(index).items()}
        note = ""
        if len(index) > FEW:
            note = "Zoomed out, a block shows the share of each role; zoom in to see the chunks. "
        if len(index.roles) > CLASSES:
            note += "Small roles are shown together. "
        words = layout_words.key_of_colours({**paint, "no tensor": NO_TENSOR}, f"{note}Click a byte.")
        self._key = style.pane(words)
        self.body[:] = [self._key, self._plot, self.detail]

    def draw(self) -> None:
        if not self._plot:
            self.show(bytes_picture(self.found, self.bytes, self.marks), self.tapped)
        catalog, key = self.found.catalog, self.view.tensor
        boxes: list[tuple[float, float, float, float]] = []
        if key in catalog.index:
            mine = self.bytes.boxes_of(self.bytes.of_tensor(self.found, catalog.index[key])[:MARKED])
            edges = (mine.left.tolist(), mine.top.tolist(), mine.right.tolist(), mine.bottom.tolist())
            boxes = list(zip(*edges, strict=True))
            span = catalog.rows_of(catalog.index[key])
            if f"{html(key)}</b>" not in str(self.detail.object):
                self.detail.object = layout_words.chunk_words(self.found, list(range(span.start, span.stop)))
        self.mark(boxes)

    def tapped(self, x: float, y: float) -> None:
        row = self.bytes.near(x, y, 0.004 * max(int(self.bytes.size.max(initial=1)), 1))
        if row is None:
            self.detail.object = (
                '<div class="tapped">These bytes belong to no tensor: header, objects or padding.</div>'
            )
            return
        self.detail.object = layout_words.chunk_words(self.found, [row])
        catalog = self.found.catalog
        holder = int(self.found.holders.of_chunk[row])
        self.set(tensor=catalog.keys[int(catalog.tensor[row])], rank=self.view.rank_of(holder))


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
        words = pn.Column(self._words, self.detail, sizing_mode="stretch_width")
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
            self._key.object = self.detail.object = ""
            self._table[:] = []
            if view.rank:
                self.detail.object = style.message(f"{view.rank!r} stored nothing here; choose another one", "warning")
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
        self.detail.object = layout_words.holder_words(one)
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
        chunks = plural(len(frame), "chunk")
        words = style.pane(f"<h3>What it stores</h3><p class='muted'>{chunks}, largest first{more}.</p>")
        save = csv_button(f"{self.view.file}-{one.label}", lambda: one.pieces, f"CSV of {safe(one.label)[:40]}")
        self._table[:] = [words, table, save]

    def tapped(self, x: float, y: float) -> None:
        holder = self._at.at(x, y)
        if holder is not None:
            self.set(rank=self.view.rank_of(holder))


def _box(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> str:
    return ", ".join(f"{low}:{low + size}" for low, size in zip(offsets, sizes, strict=True)) or "[]"


class PhasesPart(LayoutPart):
    """Phases by rank, and ranks by time."""

    def build(self) -> None:
        found = self.view.found.phases
        assert found is not None  # the view offers this part only then
        self.phases = found
        first, *more = sentences(found)
        words = f'<h2 class="slowest">{escape(first)}</h2><p>{escape(" ".join(more))}</p>'
        words += "".join(f"<p>{escape(safe(note))}</p>" for note in found.notes)
        heat = "Serialise, hash, write and sync are parts of data, added up over the threads of a rank."
        if found.ranks > COLUMNS:
            heat += " A column is the slowest of several ranks."
        some = f" The {ROWS} slowest ranks are shown." if found.ranks > ROWS else ""
        self._time = pn.Column(sizing_mode="stretch_width")
        self.body[:] = [
            style.pane(f'{words}<p class="muted">{heat} Click a cell.</p>'),
            self._plot,
            self.detail,
            style.pane(layout_words.key_of_colours(phase_colours(found), f"Times are those of each host.{some}")),
            self._time,
        ]

    def draw(self) -> None:
        self.show(heat_picture(self.phases, self.marks), self.tapped)
        picture = gantt_picture(self.phases)
        self._time[:] = [pn.pane.HoloViews(picture, linked_axes=False, sizing_mode="stretch_width")]

    def tapped(self, x: float, y: float) -> None:
        per = max(-(-self.phases.ranks // COLUMNS), 1)
        column, row = int(np.floor(x)), int(np.floor(y))
        ranks = range(column * per, min((column + 1) * per, self.phases.ranks))
        if column < 0 or not ranks or not 0 <= row < len(self.phases.names):
            return
        name = self.phases.names[row]
        rank = max(ranks, key=lambda one: self.phases.seconds(one, name) or 0.0)
        self.detail.object = rank_words(self.phases, rank)
        self.mark([(column, row, column + 1, row + 1)])
        self.set(rank=str(rank))
