"""Find rows in another order and rows that moved along their axis, without loading whole tensors.

::

    1  keys of 16 elements of some rows of a and of b         none was in a: no pattern, as for most changes
    2  keys of a slab (256 elements of each row)              different rows: no pattern
    3  a form of the keys                                     forms.py; of all elements' keys if some rows look alike
    4  proof                                                  b[i] against a[order[i]], all elements, block by block
"""

from __future__ import annotations

from math import isqrt
from typing import Any

import numpy as np

from workbench.analysis.patterns.evidence import MARGIN, entropy, pairs
from workbench.analysis.patterns.forms import Form, find_form
from workbench.analysis.patterns.found import Pattern, axis_words, box_text
from workbench.analysis.patterns.local import Difference
from workbench.analysis.patterns.long import LONGEST, reordered_units
from workbench.analysis.patterns.read import bits, differing, keys, runs_of, slab
from workbench.core.arrays import Array, Ints
from workbench.tensor import LazyTensor

SOME = 64  #: sampled rows; one or more must have existed before
FEW = 16  #: elements by which they are sought
AGREE = 32  #: rows of a long axis that are found in another order, on average


def reordered(a: LazyTensor, b: LazyTensor, seen: Difference) -> Pattern | None:
    """Return a pattern if ``b`` has the rows (columns, …) of ``a`` in another order, possibly only in a band."""
    if len(seen.shape) == 1 and seen.shape[0] > LONGEST:
        return reordered_units(a, b, seen)
    for axis, n in enumerate(seen.shape):
        if not 2 <= n <= LONGEST:
            continue
        low, high = [0] * len(seen.shape), list(seen.shape)
        if seen.complete:  # the change may be a band of the other axes
            low, high = list(seen.low), list(seen.high)
            low[axis], high[axis] = 0, n
        box = tuple(slice(*ends) for ends in zip(low, high, strict=True))
        left, right = a.lazy[box], b.lazy[box]
        whole = tuple(high) == seen.shape and not any(low)
        found = (
            _form(left, right, axis) if (_any_kept(a, b, axis, seen) if whole else _kept(left, right, axis)) else None
        )
        if found is None:
            continue
        form, gain = found
        surprise = max(seen.count * seen.bits_each, gain) - form.cost
        surprise -= sum(pairs(m) for m, k, h in zip(seen.shape, low, high, strict=True) if h - k != m)
        if surprise < MARGIN or not _proved(left, right, axis, form.order):
            continue
        words = axis_words(len(seen.shape), axis)
        sentence = form.say(*words)
        sentence += "" if whole else f"; only in {box_text(tuple(low), tuple(high), seen.shape)}"
        detail = {"axis": axis, **form.detail}
        if not whole:
            detail |= {"offsets": low, "sizes": [h - k for h, k in zip(high, low, strict=True)]}
        return Pattern(form.name, sentence, detail, evidence=surprise, make=_ordered(box, axis, form.order))
    return None


def moved(a: LazyTensor, b: LazyTensor, seen: Difference | None) -> Pattern | None:
    """Return a pattern if rows of ``a`` moved along their axis in ``b``, and others were removed or added."""
    for axis in range(len(a.shape)):
        rest = [k for k in range(len(a.shape)) if k != axis]
        if len(a.shape) != len(b.shape) or any(a.shape[k] != b.shape[k] for k in rest):
            continue
        if (seen is None and a.shape[axis] == b.shape[axis]) or max(a.shape[axis], b.shape[axis]) > LONGEST:
            continue
        found = _moved(a, b, axis, seen)
        if found is not None:
            return found
    return None


def _form(left: LazyTensor, right: LazyTensor, axis: int) -> tuple[Form, float] | None:
    """Return the form of the order, and the bits of evidence in the rows alone."""
    part = slab(left.shape, axis, left.element.itemsize)
    before, after = keys(left.lazy[part], axis), keys(right.lazy[part], axis)
    if not (np.sort(before) == np.sort(after)).all():
        return None
    counts = np.unique(before, return_counts=True)[1]
    whole = left.lazy[part].shape == left.shape
    if not whole and len(counts) < len(before):
        before, after = keys(left, axis), keys(right, axis)
        counts = np.unique(before, return_counts=True)[1]
    form = find_form(before, after)
    if form is None:
        return None
    moved = before[form.order != np.arange(len(before))]
    counts = np.unique(moved, return_counts=True)[1]
    return form, float((counts * np.log2(len(moved) / counts)).sum())


def _any_kept(a: LazyTensor, b: LazyTensor, axis: int, seen: Difference | None) -> bool:
    """Call :func:`_kept`, and keep its result for both forms."""
    if seen is None:
        return _kept(a, b, axis)
    if axis not in seen.kept:
        seen.kept[axis] = _kept(a, b, axis)
    return seen.kept[axis]


def _kept(a: LazyTensor, b: LazyTensor, axis: int) -> bool:
    """Return whether one of some rows of ``b`` may have been a row of ``a``, by its first elements.

    The rows are ``SOME`` of ``b`` and all of ``a``, or, along a long axis, adjacent rows of ``b`` and every ``step``-th
    row of ``a``. Of ``step`` adjacent rows that moved together, one is found. The number of rows of another order that
    are found is on average ``AGREE``.
    """
    n, m = a.shape[axis], b.shape[axis]
    part = list(slab((*a.shape[:axis], max(n, m), *a.shape[axis + 1 :]), axis, a.element.itemsize, FEW))
    step = _step(n) if n == m else 1
    part[axis] = slice(None, None, step)
    before = keys(a.lazy[tuple(part)], axis, max(n, m))
    count = AGREE * step
    part[axis] = slice((n - count) // 2, (n + count) // 2) if step > 1 else slice(None, None, max(m // SOME, 1))
    after = np.sort(keys(b.lazy[tuple(part)], axis, max(n, m)))
    at = np.minimum(np.searchsorted(after, before), len(after) - 1)
    return bool((after[at] == before).any())


def _step(n: int) -> int:
    """Return the largest prime that does not divide ``n`` and leaves half of the rows unread, or 1."""
    for step in range(isqrt(n // AGREE), 1, -1):
        if n % step and all(step % k for k in range(2, step)) and 2 * (n // step + AGREE * step) <= n:
            return step
    return 1


def _proved(left: LazyTensor, right: LazyTensor, axis: int, order: Ints) -> bool:
    runs = runs_of(right.shape, right.element.itemsize)
    for run in runs.ends_first():
        key = list(run.key)
        if axis > runs.axis:  # the run contains the complete axis
            old = np.take(bits(left, run.key).reshape(run.sizes), order, axis)
        else:
            at = run.key[axis]
            key[axis] = int(order[at]) if isinstance(at, int) else order[at]
            old = bits(left, tuple(key)).reshape(run.sizes)
        if differing(old, bits(right, run.key).reshape(run.sizes)):
            return False
    return True


def _ordered(box: tuple[slice, ...], axis: int, order: Ints) -> Any:
    def make(array: Array, rest: Array | None) -> Array:
        out = array.copy()
        out[box] = np.take(array[box], order, axis)
        return out

    return make


def _moved(a: LazyTensor, b: LazyTensor, axis: int, seen: Difference | None) -> Pattern | None:
    if not _any_kept(a, b, axis, seen):
        return None
    n, m = a.shape[axis], b.shape[axis]
    longest = max(n, m)
    part = list(slab((*a.shape[:axis], longest, *a.shape[axis + 1 :]), axis, a.element.itemsize))
    part[axis] = slice(None)
    before, after = (keys(one.lazy[tuple(part)], axis, longest) for one in (a, b))
    by = _offset(before, after)
    if by is None or (by == 0 and n == m):
        return None
    first, last = max(0, -by), min(m, n - by)  # rows of b that were in a
    if last <= first or (before[first + by : last + by] != after[first:last]).any():
        return None
    other = _along(axis, first + by, last + by)
    old, new = a.lazy[other], b.lazy[_along(axis, first, last)]
    same = a.lazy[_along(axis, first, last)] if n == m else None
    changed, sample = _matched(old, new, same)
    if changed is None:
        return None
    each = entropy(sample)
    surprise = changed * each - pairs(longest)
    if surprise < MARGIN or 2 * (last - first) < min(n, m):
        return None
    sentence, detail = _words(b, axis, n, m, by, first, last)
    name = "resized" if last - first == min(n, m) else "shift"
    make = _shifted(axis, m, by, first, last)
    return Pattern(name, sentence, {"axis": axis, **detail}, evidence=surprise, make=make)


def _offset(before: Array, after: Array) -> int | None:
    """Return ``k`` with ``b[i] = a[i + k]`` for most unique rows."""
    (old, at), (new, to) = _single(before), _single(after)
    both, i, j = np.intersect1d(old, new, assume_unique=True, return_indices=True)
    if not len(both):
        return None
    offsets, counts = np.unique(at[i] - to[j], return_counts=True)
    return int(offsets[counts.argmax()])


def _single(names: Array) -> tuple[Array, Array]:
    """Return keys that occur once, and their positions."""
    values, index, counts = np.unique(names, return_index=True, return_counts=True)
    return values[counts == 1], index[counts == 1]


def _matched(old: LazyTensor, new: LazyTensor, same: LazyTensor | None) -> tuple[int | None, Array]:
    """Count elements that only the move predicts correctly; ``None`` if it predicts one incorrectly."""
    changed, samples = 0, np.empty(0, new.element.raw)
    for run in runs_of(new.shape, new.element.itemsize).ends_first():
        target = bits(new, run.key).reshape(-1)
        if differing(bits(old, run.key).reshape(-1), target):
            return None, samples
        moved = target if same is None else target[bits(same, run.key).reshape(-1) != target]
        changed += len(moved)
        if len(samples) < 1 << 16:
            samples = np.append(samples, moved[: 1 << 14])
    return changed, samples


def _words(b: LazyTensor, axis: int, n: int, m: int, by: int, first: int, last: int) -> tuple[str, dict[str, Any]]:
    _, rows = axis_words(len(b.shape), axis)
    new = [ends for ends in ((0, first), (last, m)) if ends[1] > ends[0]]
    detail: dict[str, Any] = {"by": -by, "kept": [first, last], "before": n, "after": m}
    filled = [_zero(b.lazy[_along(axis, *ends)]) for ends in new]
    new_rows = ", ".join(
        f"{rows} {x:,}:{y:,} {'are zero' if zero else 'are new'}" for (x, y), zero in zip(new, filled, strict=True)
    )
    detail["new"] = [[*ends, "zero" if zero else "new"] for ends, zero in zip(new, filled, strict=True)]
    if last - first == m:
        return f"{rows} {by:,}:{by + m:,} of the former {n:,}; the others were removed", detail
    if last - first == n:
        return f"{n:,} {rows} became {m:,}: the old ones are {first:,}:{last:,}; {new_rows}", detail
    gone = n - (last - first)
    return f"{rows} moved by {-by:+,}: {gone:,} were removed, {new_rows}", detail


def _zero(part: LazyTensor) -> bool:
    return not any(bits(part, run.key).any() for run in runs_of(part.shape, part.element.itemsize))


def _along(axis: int, first: int, last: int) -> tuple[slice, ...]:
    return (*(slice(None) for _ in range(axis)), slice(first, last))


def _shifted(axis: int, m: int, by: int, first: int, last: int) -> Any:
    def make(array: Array, rest: Array | None) -> Array:
        if last - first < m and rest is None:
            raise ValueError("the pattern does not determine the added rows; pass rest=b.numpy()")
        old = array[_along(axis, first + by, last + by)]
        if rest is None:
            return old.copy()
        out = rest.copy()
        out[_along(axis, first, last)] = old
        return out

    return make
