"""*Files*: the role of each byte of each file; the chunks of the selected tensor are framed."""

from __future__ import annotations

from workbench.app import style
from workbench.app.tabs.layout_part import MARKED, LayoutPart
from workbench.app.words import html, safe
from workbench.views import layout_words
from workbench.views.layout_bytes import CLASSES
from workbench.views.layout_canvas import NO_TENSOR
from workbench.views.layout_pictures import FEW, bytes_picture, role_colours

__all__ = ["BytesPart"]


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
        words = layout_words.key_of_colours({**paint, "no tensor": NO_TENSOR}, f"{note}Tap a byte.")
        self._key = style.pane(words)
        self.body[:] = [self._key, self._plot, self.said]

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
            if f"{html(key)}</b>" not in str(self.said.object):
                self.said.object = layout_words.chunk_words(self.found, list(range(span.start, span.stop)))
        self.mark(boxes)

    def tapped(self, x: float, y: float) -> None:
        row = self.bytes.near(x, y, 0.004 * max(int(self.bytes.size.max(initial=1)), 1))
        if row is None:
            self.said.object = '<div class="tapped">These bytes belong to no tensor: header, objects or padding.</div>'
            return
        self.said.object = layout_words.chunk_words(self.found, [row])
        catalog = self.found.catalog
        holder = int(self.found.holders.of_chunk[row])
        self.set(tensor=catalog.keys[int(catalog.tensor[row])], rank=self.view.rank_of(holder))
