"""Find where two tensors differ, and local changes: flipped bits, fills, replaced blocks.

::

    · · · · · ·      count 4, first 7, last 14 (flat)
    · x x · · ·      hull  rows 1:3, columns 1:3
    · x x · · ·      touched  rows {1, 2}, columns {1, 2}

A few small boxes spread over both tensors come first: they refute most random changes. Otherwise one pass over both,
the ends first, which stops as soon as no local or elementwise pattern remains possible.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import log2, prod
from typing import Any, Protocol

import numpy as np

from workbench.analysis.patterns.evidence import MARGIN, choose, entropy, pairs
from workbench.analysis.patterns.flips import flip_text, one_flip
from workbench.analysis.patterns.found import Pattern, axis_words, box_text
from workbench.analysis.patterns.read import bits, runs_of
from workbench.analysis.patterns.rounding import half_step, numbers
from workbench.core.arrays import Array, Ints
from workbench.core.executors import in_order
from workbench.core.plan import slices
from workbench.core.runs import ElementRun
from workbench.core.words import plural
from workbench.tensor import LazyTensor

SMALL = 1 << 16  #: elements of a tensor that is compared without testing a few boxes first
SPREAD = 16  #: such boxes; a power of two
FLIPS = 8  #: maximum flipped bits listed
ENOUGH = 64  #: minimum elements per flipped bit: in smaller tensors, any update looks like flipped bits
MASK = 1 << 20  #: longest axis for which a mask of touched indices is kept
KEPT = 1 << 16  #: maximum changed elements kept for estimates
LISTED = 64  #: maximum indices of replaced rows listed


class PatternWatcher(Protocol):
    """A hypothesis about all elements, which receives the blocks of the pass."""

    alive: bool

    def feed(self, left: Array, right: Array) -> None:
        """Check the same elements of both tensors; clear ``alive`` if the hypothesis fails."""


class Difference:
    """Where ``b`` differs from ``a``, which has the same shape and element type.

    Attributes:
        complete: whether every element was seen.
        count: number of differing elements seen.
        first, last: flat positions of the first and the last differing element.
        low, high: their hull, a box.
        before, after: the bits of some differing elements, for estimates.
        flips: position and bits of the differing elements, as long as there are no more than ``FLIPS``.
        constant: the bits that every differing element of ``b`` has, or ``None``.
        touched: for each axis, a mask of indices with differing elements, or ``None`` for very long axes.
        kept: for each examined axis, whether rows of ``b`` may have been rows of ``a`` (``patterns.moved``).
    """

    def __init__(self, a: LazyTensor, b: LazyTensor) -> None:
        self.a, self.b = a, b
        self.shape = a.shape
        self.complete, self.count = False, 0
        self.first, self.last = a.numel(), -1
        self.low, self.high = list(self.shape), [0] * len(self.shape)
        self.before = self.after = np.empty(0, a.element.raw)
        self.flips: list[tuple[int, int, int]] = []
        self.constant: Any = None
        self._several = False
        self.kept: dict[int, bool] = {}
        self.touched = [np.zeros(n, bool) if n <= MASK else None for n in self.shape]
        self._seen = [np.zeros(n, bool) if n <= MASK else None for n in self.shape]

    def refutes(self, watchers: Sequence[PatternWatcher]) -> bool:
        """Return whether a few boxes show that no local change and no hypothesis of the watchers is possible.

        The pass is then not worth its reads: the attributes describe the boxes, and ``complete`` is false. A local
        change affects half of the rows or fewer; it is missed if it affects more than three quarters of those sampled.
        """
        if self.a.numel() < SMALL:
            return False
        offsets, sizes = _spread(self.shape)
        left, right = (_boxes(one, offsets, sizes) for one in (self.a, self.b))
        different = left != right
        if not different.any(axis=tuple(range(1, different.ndim))).all():
            return False
        for axis, size in enumerate(sizes[0].tolist()):
            others = tuple(k for k in range(1, different.ndim) if k != axis + 1)
            if 4 * np.count_nonzero(different.any(axis=others)) <= 3 * len(sizes) * size:
                return False
        before, after, changed = left.reshape(-1), right.reshape(-1), different.reshape(-1)
        new = after[changed]
        if (new == new[0]).all():
            return False
        for watcher in watchers:
            if watcher.alive:
                watcher.feed(before, after)
            if watcher.alive:
                return False
        self.count, self.before, self.after = len(new), before[changed], new
        return True

    def run(self, watchers: Sequence[PatternWatcher]) -> None:
        """Run the pass."""
        equal: list[ElementRun] = []  # passed at the end to watchers that are still alive
        for run in runs_of(self.shape, self.a.element.itemsize).ends_first():
            left, right = bits(self.a, run.key), bits(self.b, run.key)
            if not self._look(left.reshape(run.sizes), right.reshape(run.sizes), run):
                equal.append(run)
                continue
            for watcher in watchers:
                if watcher.alive:
                    watcher.feed(left.reshape(-1), right.reshape(-1))
            if not (self._local() or any(watcher.alive for watcher in watchers)):
                return
        self.complete = True
        for run in equal if self.count else []:
            left = bits(self.a, run.key).reshape(-1)
            for watcher in watchers:
                if watcher.alive:
                    watcher.feed(left, left)
            if not any(watcher.alive for watcher in watchers):
                return

    @property
    def bits_each(self) -> float:
        """Entropy of a changed element's new value."""
        return entropy(self.after)

    def _look(self, left: Array, right: Array, run: ElementRun) -> int:
        different = left != right
        count = int(np.count_nonzero(different))
        for axis, seen in enumerate(self._seen):
            if seen is not None:
                seen[run.low[axis] : run.low[axis] + run.sizes[axis]] = True
        if not count:
            return 0
        flat = np.flatnonzero(different) if count < different.size else None
        ends = (0, different.size - 1) if flat is None else (int(flat[0]), int(flat[-1]))
        self.first, self.last = min(self.first, run.start + ends[0]), max(self.last, run.start + ends[1])
        self._hull(different, flat is None, run)
        room = slice(0, max(KEPT - len(self.before), 0) if self.count else KEPT)
        picked = slice(None, None, max(count // (KEPT // 4), 1))  # spread over the block
        where = picked if flat is None else flat[picked]
        old, new = left.reshape(-1)[where], right.reshape(-1)[where]
        self.before, self.after = np.append(self.before, old[room]), np.append(self.after, new[room])
        if not self._several:
            after = right.reshape(-1) if flat is None else right.reshape(-1)[flat]
            self.constant = after[0] if self.constant is None else self.constant
            if (after != self.constant).any():
                self.constant, self._several = None, True
        self.count += count
        if self.count <= FLIPS:
            places = range(different.size) if flat is None else flat.tolist()
            self.flips += [(run.start + k, int(left.reshape(-1)[k]), int(right.reshape(-1)[k])) for k in places]
        else:
            self.flips = []
        return count

    def _hull(self, different: Array, everything: bool, run: ElementRun) -> None:
        for axis in range(different.ndim):
            at, size = run.low[axis], run.sizes[axis]
            others = tuple(k for k in range(different.ndim) if k != axis)
            inside: Array = np.ones(size, bool) if everything else np.asarray(different.any(axis=others))
            hits = np.flatnonzero(inside)
            self.low[axis] = min(self.low[axis], at + int(hits[0]))
            self.high[axis] = max(self.high[axis], at + int(hits[-1]) + 1)
            touched = self.touched[axis]
            if touched is not None:
                touched[at : at + size] |= inside

    def _local(self) -> bool:
        """Return whether the change may still be local."""
        if self.count <= FLIPS or self.constant is not None:
            return True
        if 2 * prod(h - low for h, low in zip(self.high, self.low, strict=True)) <= self.a.numel():
            return True
        for touched, seen in zip(self.touched, self._seen, strict=True):
            if touched is None or seen is None:
                continue
            if 2 * np.count_nonzero(touched) <= np.count_nonzero(seen):
                return True
        return False


def _boxes(tensor: LazyTensor, offsets: Ints, sizes: Ints) -> Array:
    """Read boxes of one size; those in a store at the same time, as each is a request or more."""
    if not tensor._far:
        return np.stack([box.view(tensor.element.raw) for box in map(np.array, tensor.boxes(offsets, sizes))])
    keys = [slices(low, size) for low, size in zip(offsets.tolist(), sizes.tolist(), strict=True)]
    with ThreadPoolExecutor(len(keys)) as threads:
        return np.stack(list(in_order(threads, partial(bits, tensor), keys)))


def _spread(shape: tuple[int, ...]) -> tuple[Array, Array]:
    """Return ``SPREAD`` boxes ``(offsets, sizes)``; on each axis they start at equal distances, in different orders."""
    inner = (1,) * (len(shape) - 2) + (16, 256)[-len(shape) :]
    sizes = np.array([max(min(most, n // 8), 1) for most, n in zip(inner, shape, strict=True)])
    order = np.arange(SPREAD)[:, None] * (2 * np.arange(len(shape)) + 1) % SPREAD
    offsets = order * (np.array(shape) - sizes) // (SPREAD - 1)
    return offsets, np.tile(sizes, (SPREAD, 1))


def flipped(seen: Difference) -> Pattern | None:
    """Return a pattern if up to ``FLIPS`` elements differ, each in one bit, among many equal ones."""
    if not seen.complete or not 0 < seen.count <= FLIPS or seen.a.numel() < ENOUGH * seen.count:
        return None
    if any((old ^ new).bit_count() != 1 for _, old, new in seen.flips):
        return None
    found = [one_flip(seen.a.element, seen.shape, *flip) for flip in sorted(seen.flips)]
    listed = sorted(seen.flips)

    def make(array: Array, rest: Array | None) -> Array:
        out = array.copy()
        raw = out.view(seen.a.element.raw).reshape(-1)
        for at, old, new in listed:
            raw[at] ^= raw.dtype.type(old ^ new)
        return out

    surprise = _untouched(seen)
    if surprise < MARGIN:
        return None
    name = "bit_flip" if len(found) == 1 else "bit_flips"
    return Pattern(name, flip_text(found, seen.a.numel()), {"flips": found}, evidence=surprise, make=make)


def replaced(seen: Difference) -> Pattern | None:
    """Return a pattern if one block, or some rows or columns, differ and the rest is equal bit for bit."""
    if not seen.complete or not seen.count:
        return None
    volume = prod(h - low for h, low in zip(seen.high, seen.low, strict=True))
    best: tuple[float, Pattern] | None = None
    if 2 * volume <= seen.a.numel() and 2 * seen.count >= volume:
        surprise = seen.count * log2(seen.a.numel() / volume) - sum(pairs(n) for n in seen.shape)
        low, high = tuple(seen.low), tuple(seen.high)
        box = tuple(slice(*ends) for ends in zip(low, high, strict=True))
        sentence = f"{box_text(low, high, seen.shape)}: {plural(seen.count, 'element', 'differ')}; all others are equal"
        detail = {"offsets": list(low), "sizes": [h - k for h, k in zip(high, low, strict=True)], "changed": seen.count}
        best = surprise, Pattern("replaced", sentence, detail, evidence=surprise, make=_with_rest(box))
    for axis, touched in enumerate(seen.touched):
        n, k = seen.shape[axis], 0 if touched is None else int(np.count_nonzero(touched))
        if touched is None or not 0 < 2 * k <= n or 2 * seen.count < k * (seen.a.numel() // n):
            continue
        surprise = seen.count * log2(n / k) - choose(n, k)
        if best is not None and seen.high[axis] - seen.low[axis] == k:
            continue  # a range: the block describes it already
        if best is None or surprise > best[0] + 1e-9:
            which = np.flatnonzero(touched)
            words = axis_words(len(seen.shape), axis)
            listed = ", ".join(f"{w:,}" for w in which[:8].tolist()) + (" …" if k > 8 else "")
            sentence = f"{words[k > 1]} {listed} ({k:,} of {n:,}): {seen.count:,} elements differ; all others are equal"
            detail = {"axis": axis, "indices": which[:LISTED].tolist(), "number": k, "changed": seen.count}
            key = (*(slice(None) for _ in range(axis)), which)
            best = surprise, Pattern("replaced", sentence, detail, evidence=surprise, make=_with_rest(key))
    return best[1] if best is not None and best[0] >= MARGIN else None


def _with_rest(key: Any) -> Any:
    def make(array: Array, rest: Array | None) -> Array:
        if rest is None:
            raise ValueError("the pattern does not determine the replaced block; pass rest=b.numpy()")
        out = array.copy()
        out[key] = rest[key]
        return out

    return make


def _untouched(seen: Difference) -> float:
    """Return how improbable it is that an addition as large as the flip would leave the other elements unchanged.

    A small addition to all elements first changes the smallest ones, whose neighbors are closest, often in one bit. So
    a change of only the smallest element proves nothing, but one that would have been visible in others does.
    """
    element = seen.a.element
    with np.errstate(all="ignore"):
        old, new = (
            numbers(np.array([flip[side] for flip in seen.flips], element.raw), element).astype(np.float64)
            for side in (1, 2)
        )
        change = np.abs(new - old).max() * (0.5 if element.kind == "f" else 1.0)  # half of it may be rounding
        some = bits(seen.a, runs_of(seen.shape, 1, KEPT)[0].key).reshape(-1)
        values = numbers(some, element).astype(np.float64)
        values = values[np.isfinite(values)]
        worth = np.log2(np.fmax(change / half_step(values, element), 1.0)) if change > 0 else np.zeros(1)
    # NaN: the flip created or removed one, which a small addition cannot
    return float(16.0 * len(values) if np.isnan(change) else np.fmin(worth, 16.0).sum())
