"""Files as rows of bytes, chunk by chunk; as shares of the roles if chunks are narrower than pixels.

::

    __0_0.distcp  │████ param ████│▒▒ exp_avg ▒▒│  ·  │        zoomed in: each chunk; gaps belong to no tensor
    __1_0.distcp  │██▒▒│██▒▒│███▒│██▒▒│██▒▒│                   zoomed out: the share of each role in each block

Roles in random order, painted pixel by pixel, look like noise; their shares per block of pixels do not.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from workbench.analysis.layout import Layout
from workbench.core import box
from workbench.core.arrays import Array
from workbench.views.layout_canvas import PaintBoxes, PaintWindow, raster

CLASSES = 5  #: roles that have their own colour
OTHER = "other roles"
BLOCK = 16  #: pixels
CROWDED = 0.25  #: chunks per pixel above which blocks are shown
GAP = 0.1  #: of a row's height, on either side


class Bytes:
    """The chunks of a layout in byte order.

    Attributes:
        size: ``(F,)`` bytes of each file; for an absent file, the end of its last chunk.
        roles: the roles that are distinguished, most bytes first; further roles share :data:`OTHER`, the last.
        rows: chunk rows by file and byte; ``file``, ``start``, ``stop``, ``code`` (of the role) follow them.
    """

    def __init__(self, found: Layout) -> None:
        catalog = found.catalog
        self.files = list(catalog.files)
        self.rows = np.lexsort((catalog.start, catalog.file))
        self.file = catalog.file[self.rows].astype(np.int64)
        self.start, self.stop = catalog.start[self.rows], catalog.stop[self.rows]
        reach = np.zeros(len(self.files), np.int64)
        np.maximum.at(reach, self.file, self.stop)
        self.size = np.maximum(reach, [max(stat.size, 0) for stat in catalog.file_stats])
        self.roles, code = _classes(found)
        self.code = code[catalog.tensor[self.rows]]
        self.first = np.searchsorted(self.file, np.arange(len(self.files) + 1))

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def boxes(self) -> PaintBoxes:
        """Every chunk: bytes across, files down."""
        return self.boxes_of(np.arange(len(self)))

    def boxes_of(self, places: Array) -> PaintBoxes:
        """Return the chunks at the given positions of the byte order."""
        file = self.file[places]
        code = self.code[places].astype(np.int32)
        return PaintBoxes(self.start[places], self.stop[places], file + GAP, file + 1 - GAP, code)

    def of_tensor(self, found: Layout, tensor: int) -> Array:
        """Return the positions of a tensor's chunks in the byte order."""
        span = found.catalog.rows_of(tensor)
        return np.sort(self._place[span.start : span.stop])

    def twice(self, found: Layout) -> PaintBoxes:
        """Return chunks with elements that another chunk stores, too."""
        rows = sorted({row for *_, a, b in found.covered.overlaps for row in (a, b)})
        return self.boxes_of(self._place[np.array(rows, np.int64)])

    @cached_property
    def _place(self) -> Array:
        """Position of each chunk row in the byte order."""
        found = np.empty(len(self.rows), np.int64)
        found[self.rows] = np.arange(len(self.rows))
        return found

    def at(self, byte: float, file: float) -> int | None:
        """Return the chunk row that contains a byte; if several do, the one that begins last."""
        if (found := self._after(byte, file)) is None:
            return None
        low, k, _ = found
        for place in range(k - 1, max(low, k - 64) - 1, -1):
            if self.stop[place] > byte:
                return int(self.rows[place])
        return None

    def near(self, byte: float, file: float, reach: float) -> int | None:
        """Return the chunk row at a byte, or the nearest within ``reach`` bytes: a tap may miss a narrow chunk."""
        if (hit := self.at(byte, file)) is not None:
            return hit
        if (found := self._after(byte, file)) is None:
            return None
        low, k, high = found
        neighbours = [(abs(float(self.start[k]) - byte), k)] if k < high else []
        neighbours += [(abs(byte - float(self.stop[k - 1])), k - 1)] if k > low else []
        distance, place = min(neighbours, default=(np.inf, -1))
        return int(self.rows[place]) if distance <= reach else None

    def _after(self, byte: float, file: float) -> tuple[int, int, int] | None:
        """Return the first place of a file, the first that begins after a byte, and the one after the last."""
        n = int(np.floor(file))
        if not 0 <= n < len(self.files):
            return None
        low, high = int(self.first[n]), int(self.first[n + 1])
        return low, low + int(np.searchsorted(self.start[low:high], byte, side="right")), high

    def crowded(self, window: PaintWindow) -> bool:
        """Return whether a window has more chunks than it can show."""
        files = self._visible(window)
        seen = 0
        for file in files.tolist():
            part = slice(int(self.first[file]), int(self.first[file + 1]))
            seen += int(np.searchsorted(self.start[part], window.x1) - np.searchsorted(self.start[part], window.x0))
        return seen > CROWDED * window.width * max(len(files), 1)

    def paint(self, window: PaintWindow) -> Array:
        """Return ``(height, width)`` codes of roles, the first row at ``y0``; -1 is the gap between files.

        ``len(roles)`` marks bytes of no tensor. Higher codes are the same roles again, for every second chunk.
        """
        files = self._visible(window)
        image = self._extent(window, files)
        if self.crowded(window):
            return self._shares(window, files, image)
        inside = np.zeros(len(self.files), bool)
        inside[files] = True
        places = np.flatnonzero(inside[self.file] & (self.start < window.x1) & (self.stop > window.x0))
        mine = self.boxes_of(places)
        mine.code[places % 2 == 1] += len(self.roles) + 1  # neighbours of the same role get different shades
        flat = raster(mine, window, image=image)
        thin = (mine.right - mine.left) * window.width < window.x1 - window.x0
        return raster(mine.take(np.flatnonzero(thin)), window, 1, flat) if thin.any() else flat

    def _visible(self, window: PaintWindow) -> Array:
        """Return the files visible in some row of pixels; no more than there are rows."""
        centres = window.y0 + (np.arange(window.height) + 0.5) * (window.y1 - window.y0) / window.height
        found = np.unique(np.floor(centres).astype(np.int64))
        return found[(found >= 0) & (found < len(self.files))]

    def _extent(self, window: PaintWindow, files: Array) -> Array:
        size = self.size[files].astype(np.float64)
        code = np.full(len(files), len(self.roles), np.int32)
        return raster(PaintBoxes(np.zeros(len(files)), size, files + GAP, files + 1 - GAP, code), window)

    def _shares(self, window: PaintWindow, files: Array, image: Array) -> Array:
        """Fill blocks of pixels with roles in proportion to their bytes, always in the same order."""
        blocks = -(-window.width // BLOCK)
        step = (window.x1 - window.x0) / window.width
        edges = window.x0 + np.arange(blocks + 1) * BLOCK * step
        inside = np.zeros((len(files), blocks, len(self.roles)))
        for code in range(len(self.roles)):
            before = self._before(code, files, edges)
            inside[:, :, code] = np.diff(before, axis=1)
        ends = np.cumsum(inside, axis=2) / (BLOCK * step)  # of the block, where each role's part ends
        whole = ends[:, :, -1:]
        ends = np.where(whole > 1, ends / np.maximum(whole, 1e-300), ends)
        centres = (np.arange(BLOCK) + 0.5) / BLOCK
        code = (centres[None, None, :, None] > ends[:, :, None, :]).sum(axis=3).astype(np.int32)
        line = code.reshape(len(files), -1)[:, : window.width]
        row = np.floor(window.y0 + (np.arange(window.height) + 0.5) * (window.y1 - window.y0) / window.height)
        mask = np.isin(row, files)
        at = np.searchsorted(files, row[mask])
        image[mask] = np.where(image[mask] >= 0, line[at], -1)
        return image

    def _before(self, code: int, files: Array, edges: Array) -> Array:
        """Return ``(files, edges)`` bytes of a role before each byte of each file."""
        base, start, length, total = self._lines[code]
        query = base[files][:, None] + np.clip(edges[None, :], 0, self.size[files][:, None])
        k = np.searchsorted(start, query.ravel(), side="right") - 1
        clipped = np.maximum(k, 0)
        found = np.where(k >= 0, total[clipped] + np.minimum(query.ravel() - start[clipped], length[clipped]), 0.0)
        return found.reshape(query.shape)

    @cached_property
    def _lines(self) -> list[tuple[Array, Array, Array, Array]]:
        """By role: where files begin on one long line of bytes; start, length, bytes before it of each chunk."""
        base = np.concatenate([[0], np.cumsum(self.size + 1)])[:-1].astype(np.float64)
        found = []
        for code in range(len(self.roles)):
            mine = np.flatnonzero(self.code == code)
            length = (self.stop[mine] - self.start[mine]).astype(np.float64)
            start = base[self.file[mine]] + self.start[mine]
            total = np.concatenate([[0.0], np.cumsum(length)])
            # a sentinel at the end: an empty role has one chunk of zero bytes
            found.append(
                (base, start, length, total[:-1]) if len(mine) else (base, np.zeros(1), np.zeros(1), np.zeros(1))
            )
        return found


def _classes(found: Layout) -> tuple[list[str], Array]:
    """Return the roles that have their own colour, and the code of each tensor."""
    catalog = found.catalog
    names: dict[str, int] = {}
    code = np.array([names.setdefault(role, len(names)) for role in found.roles], np.int64)
    held = box.sums(code, catalog.tensor_nbytes, len(names))
    order = sorted(range(len(names)), key=lambda n: -int(held[n]))
    listed = list(names)
    kept = order if len(order) <= CLASSES else order[: CLASSES - 1]
    rank = np.full(max(len(names), 1), len(kept), np.int64)
    rank[kept] = np.arange(len(kept))
    roles = [listed[n] for n in kept] + ([OTHER] if len(order) > len(kept) else [])
    return roles or [OTHER], rank[code] if len(code) else code
