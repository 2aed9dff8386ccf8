"""Find where the rows of a tensor were before: in itself, or in any other tensor with rows of that length.

::

    before            keys (64 bits per row)           after: gate_proj          blocks
    gate_proj  g0 g1 g2 g3  ─┐                         g0 g1 u0 u1               rows 0:2 are gate_proj 0:2
    up_proj    u0 u1 u2 u3  ─┴─► sorted, searched  ──► up_proj                   rows 2:4 are up_proj 0:2
                                                       g2 g3 u2 u3               …

Memory is 16 bytes per row of the searched tensors, plus one block of rows. Rows with the same key are equal with near
certainty (xxh3, 64 bits). Constant rows (padding, moments of tokens that never occurred) carry no information. If a row
occurs at several places, the place that continues the row above is used.

A tensor with one axis is one row. Axes before the last are flattened: an expert of a stack is a block of rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import numpy as np

from workbench.analysis.patterns.read import bits, fold
from workbench.core.arrays import Array, Ints
from workbench.tensor import LazyTensor

BLOCK = 4 << 20  #: approximate bytes of rows in memory at a time
SHORT = 8  #: elements below which the last axis is not a row
FREE, NOWHERE = -2, -1  #: a row without information; a row that is not in before


@dataclass(frozen=True)
class MovedRows:
    """Rows ``start:stop`` that were rows ``first:…`` of tensor ``source`` (its number in the index)."""

    start: int
    stop: int
    source: int
    first: int


@dataclass(frozen=True, eq=False)
class Origins:
    """The origins of the rows of a tensor.

    Attributes:
        place: ``(n,)`` position in the index, :data:`FREE` or :data:`NOWHERE`.
        still: number of rows that did not move.
        looked: number of rows that moved or changed and carry information.
        found: number of those rows that exist in before.
    """

    blocks: tuple[MovedRows, ...]
    place: Ints
    still: int
    looked: int
    found: int

    @property
    def share(self) -> float:
        """Share of the changed rows that were found."""
        return self.found / self.looked if self.looked else 0.0


def row_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Return the number of rows and the elements per row."""
    if len(shape) < 2:
        return 1, prod(shape)
    if shape[-1] >= SHORT:
        return prod(shape[:-1]), shape[-1]
    return shape[0], prod(shape[1:])


def row_keys(tensor: LazyTensor) -> tuple[Array, Array]:
    """Return ``(n,) uint64`` keys of the rows, and ``(n,) bool`` for constant rows."""
    count, width = row_shape(tensor.shape)
    keys, plain = np.zeros(count, np.uint64), np.ones(count, bool)
    for at, part in _rows(tensor, count, width):
        keys[at : at + len(part)] = fold(keys[at : at + len(part)], part)
        plain[at : at + len(part)] = (part == part[:, :1]).all(axis=1)
    return keys, plain


def _rows(tensor: LazyTensor, count: int, width: int) -> Iterator[tuple[int, Array]]:
    """Yield rows in order: the number of the first, and ``(m, width)`` bits."""
    if not count * width:
        return
    if len(tensor.shape) < 2:
        yield 0, bits(tensor).reshape(1, -1)
        return
    lead = tensor.shape[0]
    each = count // lead  # rows of one index of the first axis
    step = max(BLOCK // (width * each * tensor.element.itemsize), 1)
    for first in range(0, lead, step):
        part = bits(tensor, (slice(first, min(first + step, lead)),))
        yield first * each, part.reshape(-1, width)


class RowIndex:
    """A searchable index of the keys of the rows of several tensors."""

    def __init__(self, tensors: Iterable[LazyTensor]) -> None:
        found = [row_keys(tensor) for tensor in tensors]
        self._keys = np.concatenate([keys for keys, _ in found] or [np.zeros(0, np.uint64)])
        plain = np.concatenate([one for _, one in found] or [np.zeros(0, bool)])
        self.starts = np.cumsum([0, *(len(keys) for keys, _ in found)]).astype(np.int64)
        speaking = np.flatnonzero(~plain)
        self._order: Ints = speaking[np.argsort(self._keys[speaking], kind="stable")]
        self._sorted = self._keys[self._order]

    def keys(self, number: int) -> Array:
        """Return the keys of one tensor."""
        return np.asarray(self._keys[self.starts[number] : self.starts[number + 1]])

    def holds(self, keys: Array) -> Array:
        """Return ``(n,) bool``: whether a row with that key exists."""
        return np.asarray(self._anywhere(keys) >= 0)

    def origins(self, number: int, keys: Array, plain: Array) -> Origins:
        """Find the origins of rows with these keys, which are now in tensor ``number`` of the index.

        Args:
            plain: rows without information.
        """
        low, high = int(self.starts[number]), int(self.starts[number + 1])
        still = np.zeros(len(keys), bool)
        both = min(high - low, len(keys))
        still[:both] = keys[:both] == self._keys[low : low + both]
        looked = ~still & ~plain
        here = np.arange(low, low + len(keys))
        place = np.where(plain, FREE, np.where(still, here, self._within(low, high, keys)))
        lost = looked & (place < 0)
        if lost.any():
            place[lost] = self._anywhere(keys[lost])
        self._extend(place, keys, still & ~plain)
        place[still & (place < 0)] = here[still & (place < 0)]
        found = int((looked & (place >= 0)).sum())
        return Origins(tuple(self._blocks(place)), place, int(still.sum()), int(looked.sum()), found)

    def _within(self, low: int, high: int, keys: Array) -> Ints:
        order = np.argsort(self._keys[low:high], kind="stable")
        return _search(self._keys[low:high][order], order + low, keys)

    def _anywhere(self, keys: Array) -> Ints:
        return _search(self._sorted, self._order, keys)

    def _extend(self, place: Ints, keys: Array, fixed: Array) -> None:
        """Let rows with several possible places continue the row above (or else below), if that is one of them."""
        count, total = len(place), len(self._keys)
        for way in (1, -1):
            # only breaks of a run may need a correction
            breaks = np.flatnonzero(np.diff(place) != 1) + (way == 1)
            for at in breaks[::way].tolist():
                while 0 <= at < count and 0 <= at - way < count and place[at - way] >= 0 and not fixed[at]:
                    follow = int(place[at - way]) + way
                    if place[at] == follow or not 0 <= follow < total or self._keys[follow] != keys[at]:
                        break
                    place[at] = follow
                    at += way

    def _blocks(self, place: Ints) -> Iterator[MovedRows]:
        """Yield runs of rows that were neighbours before."""
        source = np.searchsorted(self.starts, place, side="right") - 1
        cut = (np.diff(place) != 1) | (np.diff(source) != 0)
        edges = [0, *(np.flatnonzero(cut) + 1).tolist(), len(place)]
        for start, stop in pairwise(edges):
            if stop > start and place[start] >= 0:
                number = int(source[start])
                yield MovedRows(start, stop, number, int(place[start] - self.starts[number]))


def _search(ordered: Array, places: Ints, keys: Array) -> Ints:
    if not len(ordered):
        return np.full(len(keys), NOWHERE, np.int64)
    at = np.minimum(np.searchsorted(ordered, keys), len(ordered) - 1)
    return np.where(ordered[at] == keys, places[at], NOWHERE)


def blocks_text(blocks: Sequence[MovedRows], names: Sequence[str], most: int = 4) -> str:
    """Return ``rows 0:96 are gate_proj 0:96, rows 96:192 are up_proj 0:96``."""
    words = []
    for one in blocks[:most]:
        start, first = one.start + max(-one.first, 0), max(one.first, 0)
        words.append(f"rows {start:,}:{one.stop:,} are {names[one.source]} {first:,}:{first + one.stop - start:,}")
    return ", ".join(words) + (f" … {len(blocks) - most:,} more blocks" if len(blocks) > most else "")
