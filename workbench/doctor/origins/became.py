"""Find the form of changes between two checkpoints that a law says no update made.

::

    moments, k = 1    m' = β1·m + (1−β1)·g,  v' = β2·v + (1−β2)·g²: one gradient, two equations. A hypothesis (m, v)
                      about the loaded state holds if both give the same g in every element: the stored state, zeros,
                      both swapped, rounded to 16 bits. Exact except for rounding.
    moments, k > 1    v fell below β2^k·v: a part was lost if only a few rows or columns fell; v restarted if it has
                      the old profile; with a different profile, it belongs to another parameter
    weights           at k = 1 the update is undone (W + lr·u); then constants, one factor, rounding, parts

A form is proved on every element that was examined; ``other`` and ``near`` are the remaining cases.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from workbench.analysis.patterns.rounding import rounded
from workbench.core.arrays import Array
from workbench.doctor.laws.bounds import (
    ROUNDINGS,
    TINY,
    UNITS,
    floor_terms,
    transition,
    transition_sides,
    transition_terms,
)
from workbench.doctor.laws.exact import BLUNT, REST, along
from workbench.doctor.origins.index import row_shape
from workbench.doctor.origins.samples import sampled, spread
from workbench.doctor.passes.pair import PairState, Update
from workbench.tensor import LazyTensor

FEW = 8  #: most elements with flipped bits
PAGE = 512  #: elements from which zeros are a lost write, not a coincidence
PARTLY = 0.98  #: share of elements that either follow or started from zero
EXACT = 0.995  #: share of the elements in which a hypothesis about the moments holds
CHANCE = 20.0  #: e-folds of improbability that elements keep a law by chance
ENOUGH = 24  #: fewest elements to examine
ALIKE = 0.5  #: correlation of log v with its past, for one parameter several saves apart
BEGAN = 0.5  #: correlation of log v with its past from which v kept its profile
NEAR, LIKE = 0.9, 0.5  #: cosines: the same weights, changed; and weights that still contain some of the old ones
NEARER = 0.7  #: ratio of the distance to the stored average to that to the old weights
EXACTLY = 0.1  #: the same if the update was undone
UNDONE = 4e-6  #: by how much weights may be off after their update was undone
LEAST, APART = 8, 6.0  #: elements of a constant; spread of the old weights, in reaches of the updates
VALUES = 8  #: different numbers that a cast leaves
ABOVE, OFTEN = 1.25, 10  #: times the floor that are right above it; so many times as often as below
LARGE, FADED = 0.05, 0.5  #: share below a floor of half the old value or less; others' moments keep as much of theirs
RANKS = 65  #: numbers of shards to try
ROW_LIKE = 0.5  #: cosine of a row with itself below which it is another row
GRID = 256  #: elements from which a grid is searched
FACTORS = (2.0, 0.5, 4.0, 0.25, 8.0, 0.125)  #: of moments added or averaged over ranks that hold the same values
BLOCKS = (32, 64, 128, 256)  #: elements that share a scale
STEP = 2e-3  #: distance from a step of a grid, for rounding of float32
#: Type of small floats that share a scale → bits of its mantissa, its least exponent, its largest number; the coarsest
#: first, because its numbers are also numbers of the next.
SCALED_TO = {"float4_e2m1": (1, 0, 6.0), "float8_e5m2": (2, -14, 57344.0), "float8_e4m3": (3, -6, 448.0)}
FEW_WHOLE = 0.1  #: share of the rows that pruning may have emptied
FOUR = 4  #: of that many elements in a row, pruning for sparse tensor cores keeps two
POWERED = 0.1  #: least variance of logarithms in which a power is searched
STRAIGHT = 0.05  #: distance of a power from 1, and of logarithms from its line; 16-bit numbers are within 0.004
INSIDE = 0.9  #: share of the elements within half a step
SCALED = 0.02  #: relative distance of a factor from 1 that is reported
CASTS = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")  #: types that values may have passed through


@dataclass(frozen=True)
class Became:
    """A form and its evidence.

    Attributes:
        form: of moments ``still swapped second_other flip part spots fallen other``, and ``zero rounded ratio``, also
            as ``first_zero`` … if only one of the two has it, and ``first_other``; of weights ``zero fill ratio rounded
            average part flip zeros pruned near other``.
        exact: whether the form was proved on every examined element.
        cosine: between the weights and those of before. looked: number of examined elements.
        detail: numbers of the form: ``value`` (fill), ``ratio``, ``rows`` and ``of`` (part), ``share``.
    """

    form: str
    exact: bool = False
    cosine: float | None = None
    looked: int = 0
    detail: Mapping[str, Any] = field(default_factory=dict)


# ---- moments ---------------------------------------------------------------------------------------------------------


@np.errstate(all="ignore")  # NaN and Inf keep no law
def moments_became(
    before: tuple[LazyTensor, LazyTensor], after: tuple[LazyTensor, LazyTensor], update: Update, sums: PairState
) -> Became:
    """Return the form of ``exp_avg`` and ``exp_avg_sq`` of a parameter that break the floor or the transition.

    Args:
        before, after: ``(exp_avg, exp_avg_sq)`` of one shape.
    """
    rows = spread(after[0].shape)
    m_a, v_a, m_b, v_b = (sampled(tensor, rows) for tensor in (*before, *after))
    if np.array_equal(m_a, m_b) and np.array_equal(v_a, v_b):
        return Became("still", True, looked=len(v_b))
    if update.k == 0:
        return _unmoved((m_a, v_a), (m_b, v_b), after[0].shape if rows is None else ())
    broken = max(sums.floor.broken, sums.transition.broken)
    few = 0 < broken <= FEW and broken < 0.05 * max(sums.floor.of, sums.transition.of)
    if update.betas is not None and update.k == 1 and not update.bars("floor"):
        seen, own = (m_b != 0) | (v_b != 0), _follows(m_a, v_a, m_b, v_b, update.betas)
        for form, (m, v), detail in _hypotheses(m_a, v_a) if seen.any() else []:
            holds = _follows(m, v, m_b, v_b, update.betas)
            if (share := float(holds[seen].mean())) >= EXACT:
                return Became(form, True, looked=len(v_b), detail={"share": share, **detail})
            zeros = form in ("zero", "first_zero", "second_zero")  # in a part of the elements
            if zeros and (own | holds)[seen].mean() >= PARTLY and holds[seen & ~own].sum() >= PAGE // 8:
                return Became("zeros", True, looked=len(v_b), detail={"share": share})
        for at in arrangements(after[0].shape) if rows is None and not few and seen.any() else ():
            if all(
                _follows(m_a[at][:n], v_a[at][:n], m_b[:n], v_b[:n], update.betas)[seen[:n]].mean() >= EXACT
                for n in (PAGE, len(v_b))
            ):
                return Became("moved.rows", True, looked=len(v_b))
        if not few and _second_alone(m_a, v_a, m_b, v_b, update.betas):
            return Became("second_other", looked=len(v_b))
    if update.k > 1 and update.betas is not None and _first_gone(v_a, m_b, v_b, update, sums, after[1].element.name):
        return Became("first_zero", looked=len(v_b))
    if not sums.floor.broken and sums.transition.broken > FEW:  # others break their floor as well
        return Became("first_other", looked=len(v_b))
    if few:
        # a second moment that is smaller breaks its floor, and a larger one no law
        form, hits = ("second_flip", sums.floor) if sums.floor.broken else ("first_flip", sums.transition)
        return Became(form, looked=len(m_b), detail={"elements": broken, "worst": hits.worst})
    if update.k > 1 and (found := _multiplied(m_a, v_a, m_b, v_b, update)) is not None:
        return Became(found[0], True, looked=len(v_b), detail={"ratio": found[1]})
    if update.k > 1 and update.betas is not None and (kind := _vanished(after[1], v_a, v_b, update)):
        return Became("rounded", looked=len(v_b), detail={"through": kind})
    lost = (v_b == 0) & (v_a != 0)
    if PAGE <= np.count_nonzero(lost) < 0.9 * len(v_b):
        return Became("zeros", True, looked=len(v_b), detail={"elements": int(np.count_nonzero(lost))})
    if update.k > 1 and update.betas is not None and (inside := _below(after[1], v_a, v_b, update)) is not None:
        settled = replace(update, before=None)  # parts of an early save are below what was settled by then, too
        began = _began(v_a[inside], v_b[inside], settled) and not _began(v_a[~inside], v_b[~inside], settled)
        detail = {"elements": int(inside.sum()), "depth": sums.floor.worst}
        return Became("zeros" if began else "part", looked=len(v_b), detail=detail)
    if update.k > 1 and update.betas is not None and _in_spots(v_a, v_b, update, after[1].element.name):
        return Became("spots", looked=len(v_b), detail={"elements": sums.floor.broken})
    like = _likeness(v_a, v_b)
    share = sums.floor.broken / max(sums.floor.of, 1)
    fell = share > 0.02 and update.k > 1 and _began(v_a, v_b, update) and like >= BEGAN
    if share > LARGE and update.betas is not None and (fade := update.fading**update.k) < FADED:
        kept = v_b >= fade * v_a  # gradients have grown since: other moments would still be below in fewer elements
        fell |= _likeness(v_a[kept], v_b[kept]) >= BEGAN
    detail = {"likeness": like, "share": share, "depth": sums.floor.worst}
    if update.k > 1 and update.betas is not None:
        detail |= _of_first(m_a, m_b, v_b, update, after[1].element.name)
    return Became("fallen" if fell else "other", False, looked=len(v_b), detail=detail)


def _of_first(m_a: Array, m_b: Array, v_b: Array, update: Update, kind: str) -> dict[str, int]:
    """Return in how many elements exp_avg cannot have begun at zero, and in how many not at its old value.

    Both are taken to have come with an exp_avg_sq of zero: one that was kept in part allows less. Where there was no
    gradient, exp_avg shrank by β1 alone, which it does from its old value only.
    """
    assert update.betas is not None
    none = np.zeros_like(m_a)
    began, kept = (transition(m, none, m_b, v_b, update.betas, update.k, kind).broken for m in (none, m_a))
    left = update.betas[0] ** update.k * m_a
    shrank = np.count_nonzero((np.abs(m_b - left) <= _rounding(update) * np.abs(left)) & (left != 0))
    return {"not_from_zero": began + (int(shrank) if shrank >= ENOUGH else 0), "not_from_old": kept}


def _rounding(update: Update) -> float:
    return ROUNDINGS * UNITS["float32"] * (update.k + 1)


def _multiplied(m_a: Array, v_a: Array, m_b: Array, v_b: Array, update: Update) -> tuple[str, float] | None:
    """Return the form and the factor of moments that were multiplied, if some elements had no gradient since.

    Those are all at one multiple of what updates leave of the old values, and no element is below it.
    """
    some = (v_a > TINY["float32"]) & (m_a != 0)
    if update.betas is None or not some.any():
        return None
    first, second = m_b[some] / m_a[some] / update.betas[0] ** update.k, v_b[some] / v_a[some] / update.fading**update.k
    least, room = float(second.min()), _rounding(update)
    at = second <= least * (1 + room)
    if np.count_nonzero(at) < ENOUGH or not least > 0 or abs(least - 1) < SCALED:
        return None
    for form, factor in (("second_ratio", 1.0), ("ratio", least)):
        if float(np.mean(np.abs(first[at] - factor) <= room * factor)) >= EXACT:
            return form, least
    return None


def arrangements(shape: Sequence[int]) -> Iterator[Array]:
    """Yield flat orders in which a matrix is read along the other axis, or as blocks of other ranks."""
    if len(shape) < 2 or min(shape[:2]) < 2:
        return
    at = np.arange(math.prod(shape)).reshape(shape)
    yield at.swapaxes(0, 1).reshape(-1)
    for axis in (0, 1):
        for order in _orders(shape[axis]):
            yield np.take(at, order, axis).reshape(-1)


def _orders(rows: int) -> Iterator[Array]:
    """Yield the orders of rows that result if blocks of several ranks, or of interleaved parts, are read otherwise."""
    for blocks in {4, 8, 16, rows}:
        if rows % blocks or rows < blocks:
            continue
        each = np.arange(rows).reshape(blocks, -1)
        for parts in (2, 4, 8):
            if blocks % parts == 0 and 1 < parts < blocks:
                yield each.reshape(parts, blocks // parts, -1).swapaxes(0, 1).ravel()
                yield each.reshape(blocks // parts, parts, -1).swapaxes(0, 1).ravel()
    if rows % 2 == 0:
        yield np.roll(np.arange(rows), rows // 2)


def _unmoved(old: tuple[Array, Array], new: tuple[Array, Array], shape: tuple[int, ...]) -> Became:
    """Return the form of moments that changed although no update was made."""
    looked, same = len(new[1]), [np.array_equal(a, b) for a, b in zip(old, new, strict=True)]
    for form, both, detail in _hypotheses(*old):
        if all(map(np.array_equal, both, new)):
            return Became(form, True, looked=looked, detail=detail)
    for at in arrangements(shape):
        if all(np.array_equal(a[at], b) for a, b in zip(old, new, strict=True)):
            return Became("moved.rows", True, looked=looked)
    changed = [int(np.count_nonzero(a != b)) for a, b in zip(old, new, strict=True)]
    if any(same) and max(changed) <= FEW:
        return Became("second_flip" if same[0] else "first_flip", looked=looked, detail={"elements": max(changed)})
    factors = {_factor(a, b, 0.0, 1) for a, b, one in zip(old, new, same, strict=True) if not one}
    if len(factors) == 1 and (factor := factors.pop()) is not None:
        form = "second_ratio" if same[0] else "first_ratio" if same[1] else "ratio"
        return Became(form, True, looked=looked, detail={"ratio": factor})
    form = "second_other" if same[0] else "first_other" if same[1] else "other"
    return Became(form, looked=looked)


def _began(v_a: Array, v_b: Array, update: Update) -> bool:
    """Return whether v is closer to the sum of ``k`` updates from zero than to that of all updates until then.

    The latter still grows as long as they are few; if their number is unknown, it is taken to be the old value.
    """
    both = (v_a > 0) & (v_b > 0)
    if update.betas is None or not both.any():
        return False
    old, since = update.betas[1] ** (update.before or math.inf), update.betas[1] ** update.k
    sums = 1 - old * since, 1 - since
    return float(np.median(v_b[both] / v_a[both])) < sum(sums) / 2 / (1 - old)


def _below(tensor: LazyTensor, v_a: Array, v_b: Array, update: Update) -> Array | None:
    """Return the part of exp_avg_sq that holds all elements below their floor, or ``None``."""
    fade, lost, under = floor_terms(update.fading, update.k, tensor.element.name)
    broken = v_b < fade * v_a * (1 - lost) - under
    return confined(tensor.shape, broken, broken | (v_b > fade * v_a * (1 + 1e-3) + under))


def confined(shape: tuple[int, ...], broken: Array, seen: Array) -> Array | None:
    """Return the rows or columns that hold all broken elements, if by chance others would have some too.

    Args:
        seen: elements that carry information.
    """
    width = row_shape(shape)[1] if len(shape) > 1 else 0
    if width < 2 or len(broken) % width or not broken.any():
        return None
    broken, seen = broken.reshape(-1, width), seen.reshape(-1, width)
    for axis in (0, 1):
        places = np.flatnonzero(broken.any(1 - axis))
        if len(places) < 2:
            continue
        first, stop = int(places[0]), int(places[-1]) + 1
        inside = np.zeros(broken.shape, bool)
        inside[(slice(first, stop), slice(None))[:: 1 if axis == 0 else -1]] = True
        share = np.count_nonzero(broken) / np.count_nonzero(seen & inside)
        if np.count_nonzero(seen & ~inside) * -math.log1p(-min(share, 0.99)) > CHANCE:
            return inside.reshape(-1)
    return None


def columns_apart(weight: Array, moments: Array, seen: Array) -> tuple[int, ...]:
    """Return the columns, here and there, that hold all broken elements, if by chance others would have some too.

    Args:
        weight, moments: where a tensor, and its moments, are beyond their laws.
        seen: elements that carry information.
    """
    sides = [np.moveaxis(one, 1, 0).reshape(one.shape[1], -1) for one in (weight, moments, seen)]
    live = sides[2].any(1)
    odd = np.any(sides[0] | sides[1], axis=1, keepdims=True)[live, 0]
    rest, number = int(np.count_nonzero(~odd)), int(odd.sum())
    few = np.flatnonzero(odd == (number <= rest))  # of the columns that are broken, and those that are not
    if not rest or not number or 2 * (1 + np.count_nonzero(np.diff(few) > 1)) <= len(few):
        return ()
    folds = -math.log(math.comb(rest + number, number))
    for one in sides[:2]:
        share = np.count_nonzero(one[live][odd]) / (number * one.shape[1])
        if not share:
            return ()
        folds -= rest * one.shape[1] * math.log1p(-min(share, 0.99))
    return tuple(np.flatnonzero(live)[odd].tolist()) if folds > CHANCE else ()


def _in_spots(v_a: Array, v_b: Array, update: Update, kind: str) -> bool:
    """Return whether the floor holds for the elements in general, and single ones are below it.

    Many of the others are then right above it, as they would not be if the second moments were of another origin.
    """
    fade, lost, under = floor_terms(update.fading, update.k, kind)
    least = fade * v_a * (1 - lost) - under
    broken = int(np.count_nonzero(v_b < least))
    near = int(np.count_nonzero((v_b >= least) & (v_b < ABOVE * fade * v_a) & (v_a > 0)))
    return broken > 0 and near > max(OFTEN * broken, PAGE // 8)


def _second_alone(m: Array, v: Array, m_b: Array, v_b: Array, betas: tuple[float, float]) -> bool:
    """Return whether the gradient from exp_avg leaves an exp_avg_sq that is positive everywhere and similar to the old
    one.

    If exp_avg were replaced as well, the gradient would be wrong, and its square too large in many elements.
    """
    first, second = betas
    g = (m_b - first * m) / (1 - first)
    loaded = (v_b - (1 - second) * g * g) / second
    seen = (v > 0) & (v_b > 0)
    room = 1e-4 * v_b
    return bool(seen.sum() >= ENOUGH and (loaded[seen] >= -room[seen]).all() and _likeness(v, loaded) >= ALIKE)


def _first_gone(v_a: Array, m_b: Array, v_b: Array, update: Update, sums: PairState, kind: str) -> bool:
    """Return whether exp_avg_sq continued, and exp_avg can have evolved from zeros but not from its old values."""
    if sums.floor.broken or sums.transition.broken < 2 or kind not in UNITS:
        return False
    assert update.betas is not None
    return not transition(np.zeros_like(m_b), v_a, m_b, v_b, update.betas, update.k, kind).broken


def _hypotheses(m: Array, v: Array) -> Iterator[tuple[str, tuple[Array, Array], dict[str, Any]]]:
    """Yield the form, the moments that were loaded, and the numbers of the form."""
    none = np.zeros_like(m)
    for form, other in (("zero", (none, none)), ("swapped", (v, m))):
        yield form, other, {}
    whole: list[tuple[str, dict[str, Any], tuple[Array, Array]]]
    whole = [("rounded", {"through": kind}, (rounded(m, kind), rounded(v, kind))) for kind in CASTS]
    whole += [("ratio", {"ratio": n}, (n * m, n * v)) for n in FACTORS]
    parts = [("zero", {}, (none, none)), *whole]
    yield from ((form, both, detail) for form, detail, both in whole)
    yield from ((f"first_{form}", (one, v), detail) for form, detail, (one, _) in [*parts, ("ratio", {}, (-m, v))])
    yield from ((f"second_{form}", (m, two), detail) for form, detail, (_, two) in parts)


def _vanished(tensor: LazyTensor, v_a: Array, v_b: Array, update: Update) -> str:
    """Return the type below whose smallest number all elements of exp_avg_sq that fell were, if others would have some
    by chance, and not all that did are in one part of the tensor.
    """
    fade, lost, under = floor_terms(update.fading, update.k, tensor.element.name)
    fell = v_b < fade * v_a * (1 - lost) - under
    for through in CASTS:
        small = (rounded(v_a, through) == 0) & (v_a > 0)
        share = float(fell.sum()) / max(float(small.sum()), 1.0)
        if not share or (fell & ~small).any() or confined(tensor.shape, fell, small) is not None:
            continue
        if np.count_nonzero(~small) * -math.log1p(-min(share, 0.99)) > CHANCE:
            return through
    return ""


@np.errstate(all="ignore")  # NaN and Inf keep no law
def beyond(sides: Sequence[tuple[LazyTensor, LazyTensor]], update: Update) -> Array | None:
    """Return where a weight is beyond the reach of its updates, or both moments beyond their laws; ``None`` if unknown.

    Args:
        sides: of the weight, or of ``exp_avg`` and ``exp_avg_sq``: before and after.

    Raises:
        OpenError: a tensor cannot be read.
    """
    shape = sides[0][1].shape
    if any(one.shape != shape or spread(shape) is not None for two in sides for one in two):
        return None
    values = [sampled(one, None) for two in sides for one in two]
    if len(sides) == 1:
        most = update.most
        return None if most is None else (np.abs(values[1] - values[0]) > most * 1.001).reshape(shape)
    m_a, m_b, v_a, v_b = values
    if update.betas is None:
        return None
    if update.k == 1:
        return ~_follows(m_a, v_a, m_b, v_b, update.betas).reshape(shape)
    fade, lost, under = floor_terms(update.fading, update.k, sides[1][1].element.name)
    left, _, allowed = transition_sides(
        m_a, v_a, m_b, v_b, *transition_terms(update.betas, update.k, sides[1][1].element.name)
    )
    return ((v_b < fade * v_a * (1 - lost) - under) | (left > allowed)).reshape(shape)


def one_gradient(m: Array, v: Array, m_b: Array, v_b: Array, betas: tuple[float, float]) -> float:
    """Return the share of elements in which one gradient leads from ``(m, v)`` to ``(m_b, v_b)``."""
    seen = (m_b != 0) | (v_b != 0)
    return float(_follows(m, v, m_b, v_b, betas)[seen].mean()) if seen.any() else 0.0


def _follows(m: Array, v: Array, m_b: Array, v_b: Array, betas: tuple[float, float]) -> Array:
    """Return in which elements one gradient leads from ``(m, v)`` to ``(m_b, v_b)``."""
    first, second = betas
    with np.errstate(all="ignore"):
        g = (m_b - first * m) / (1 - first)
        made = second * v + (1 - second) * g * g
        # rounding of m_b and of the products affects g and its square
        room_g = 2 * ROUNDINGS * UNITS["float32"] * (np.abs(m_b) + first * np.abs(m)) / (1 - first)
        room = (1 - second) * (2 * np.abs(g) + room_g) * room_g + 2 * ROUNDINGS * UNITS["float32"] * (
            np.abs(v_b) + made
        )
        return np.asarray(np.abs(made - v_b) <= room + 3 * TINY["float32"])


# ---- weights ---------------------------------------------------------------------------------------------------------


def weights_became(
    before: LazyTensor,
    after: LazyTensor,
    update: Update,
    sums: PairState,
    moments: tuple[LazyTensor, ...] | None = None,
    average: LazyTensor | None = None,
) -> Became:
    """Return the form of a weight that its updates cannot have reached.

    Args:
        moments: ``exp_avg`` and ``exp_avg_sq``, or the momentum, after one update, to undo it; ``None`` if not stored.
        average: the average of the weights stored in ``before``, if any.
    """
    rows = spread(after.shape)
    a, b = sampled(before, rows), sampled(after, rows)
    room = update.most if update.most is not None and math.isfinite(update.most) else None
    known = moments is not None and not update.bars("replay")
    way = direction(update, [sampled(tensor, rows) for tensor in moments or ()]) if known else None
    undone = [] if way is None or len(way) != len(b) else _taken_back(b, a, update, way)
    back = undone[0] if undone and _settled(update) else None
    loaded, slack = (b, room) if back is None else (back, UNDONE)
    cosine = _cosine(a, loaded)
    broken = sums.reach.broken
    mean = None if average is None or average.shape != before.shape else sampled(average, rows)
    if back is not None and mean is not None and _nearer(mean, a, loaded, EXACTLY):
        return Became("average", cosine=cosine, looked=len(b))
    if 0 < broken <= FEW and broken < 0.05 * max(sums.reach.of, 1) and _rest_stays(a, b, room):
        return Became("flip", cosine=cosine, looked=len(b), detail={"elements": broken, "worst": sums.reach.worst})
    form = next(filter(None, (_constant(a, one, UNDONE) for one in undone)), None)
    if form is None and slack is not None:
        form = _constant(a, loaded, slack) or _gone(a, loaded, slack)
    if form is not None:
        return Became(form[0], True, cosine, len(b), form[1])
    if cosine is not None and cosine > NEAR:
        found = _replayed_factor(update, sums, after.element.name)
        found = _factor(a, loaded, slack, len(before.shape)) if found is None else found
        if found is not None:
            return Became("ratio", True, cosine, len(b), {"ratio": found})
    if way is not None and len(way) == len(b) and cosine is not None and cosine > NEAR:
        kind = cast_before(a, b, way, update)
        if kind:
            return Became("rounded", True, cosine, len(b), {"through": kind})
    if room is not None and broken > FEW and (through := _cast(a, b, room)):
        return Became("rounded", False, cosine, len(b), {"through": through})
    if back is None and mean is not None and _nearer(mean, a, loaded, NEARER):
        return Became("average", cosine=cosine, looked=len(b))
    if room is not None and rows is None and (run := _near_zero(a, b, room)) is not None:
        return Became("zeros", cosine=cosine, looked=len(b), detail=run)
    if room is not None and broken > FEW and (b[np.abs(b - a) > room * 1.001] == 0).all() and smallest(before, after):
        return Became("pruned", cosine=cosine, looked=len(b))
    part = _part(before, a, loaded, slack)
    if part is not None and part.pop("zero"):
        return Became("zeros", cosine=cosine, looked=len(b), detail={"rows": part["rows"], "of": part["of"]})
    if part is not None:
        whole = {} if rows is None else {"tail": False, "at": ()}  # which rows they are is known of all rows alone
        return Became("part", cosine=cosine, looked=len(b), detail={**part, **whole})
    if room is not None and broken > FEW:
        inside = confined(after.shape, np.abs(b - a) > room * 1.001, np.ones(len(a), bool))
        if inside is not None:
            width = row_shape(after.shape)[1]
            count = int(inside.reshape(-1, width).any(1).sum())
            return Became("part", cosine=cosine, looked=len(b), detail={"rows": count, "of": len(b) // width})
    like = cosine is not None and cosine >= NEAR
    return Became("near" if like else "other", cosine=cosine, looked=len(b))


def direction(update: Update, state: Sequence[Array]) -> Array | None:
    """Return along what a single update moved a weight, if that follows from the state after it; else ``None``.

    Args:
        state: the two moments of Adam, or the momentum.
    """
    if update.k != 1 or any(one.shape != state[0].shape for one in state):
        return None
    if update.along == "momentum" and len(state) == 1:
        return state[0]
    if update.along != "adam" or len(state) != 2 or update.amsgrad:
        return None
    if update.betas is None or update.eps is None or (update.after or 0) < 1:
        return None
    with np.errstate(all="ignore"):
        root = np.sqrt(state[1] / (1 - update.betas[1] ** (update.after or 1))) + update.eps
        return state[0] / (1 - update.betas[0] ** (update.after or 1)) / root


def cast_before(a: Array, b: Array, way: Array, update: Update) -> str:
    """Return the type to which the old weights were rounded before a single update led to the new ones; or empty."""
    decays = {*update.decays, 0.0}
    sums = along(a, b, way)
    if sums.follows(decays, sums.noise("float32")) is not None:
        return ""
    for kind in CASTS:
        cast = rounded(a, kind)
        sums = along(cast, b, way)
        noise = sums.noise("float32")
        if np.ptp(cast) > 0 and noise < BLUNT and sums.follows(decays, noise) is not None:
            return kind
    return ""


def _taken_back(b: Array, a: Array, update: Update, way: Array) -> list[Array]:
    """Return the weights before a single update along ``way``, if its learning rate is stored.

    If the two checkpoints state different learning rates, the one that leads closer to the old weights comes first.
    """
    if update.lr is None:
        return []
    low, high = update.lr
    if high <= 0:
        return []
    adam = update.along == "adam" and update.decoupled is not False
    decay = update.decays[-1] if update.decays and adam else 0.0
    found = [(b + lr * way) / (1 - lr * decay) for lr in {low, high}]
    if not all(np.isfinite(one).all() for one in found):
        return []
    return sorted(found, key=lambda one: float(np.median(np.abs(one - a))))


def _settled(update: Update) -> bool:
    """Return whether both checkpoints state about the same learning rate: the weights follow from either."""
    return update.lr is not None and update.lr[1] - update.lr[0] <= 0.2 * update.lr[1]


def _rest_stays(a: Array, b: Array, room: float | None) -> bool:
    """Return whether the elements within reach are the old weights, and not others that happen to be close."""
    kept = np.abs(b - a) <= (math.inf if room is None else room)
    cosine = _cosine(a[kept], b[kept])
    return cosine is None or cosine >= NEAR


def _nearer(average: Array, a: Array, b: Array, most: float) -> bool:
    """Return whether weights are clearly closer to a stored average than to their old values, and not beyond it."""
    way = average - a
    size, moved = float(np.dot(way, way)), float(np.dot(b - a, way))
    return bool(np.linalg.norm(b - average) < most * np.linalg.norm(b - a)) and size / 2 < moved < 1.5 * size


def _cast(a: Array, b: Array, room: float) -> str:
    """Return the type so that the updates reach all weights from the old ones rounded to it, but not from these."""
    for kind in CASTS:
        cast = rounded(a, kind)
        if (np.abs(b - cast) <= room * 1.001).all() and len(np.unique(cast)) >= min(VALUES, len(a)):
            return kind  # few values are also those of other weights, as of a constant
    return ""


def _constant(a: Array, b: Array, slack: float) -> tuple[str, dict[str, Any]] | None:
    """Return the form of weights that became all one number, to within the updates."""
    for form, value in (("zero", 0.0), ("fill", 1.0)):
        off = np.abs(a - value)
        if np.abs(b - value).max() <= slack * 1.001 and off.max() > 1.5 * slack and off.mean() > 0.5 * slack:
            return form, {"value": value}
    if len(b) >= LEAST and np.ptp(b) <= 2.002 * slack and np.ptp(a) > APART * slack:
        return "fill", {"value": float(f"{np.median(b):.3g}")}
    return None


def _gone(a: Array, b: Array, slack: float) -> tuple[str, dict[str, Any]] | None:
    """Return the form of weights with a run of a page or more that became 0, to within the updates."""
    lost = (np.abs(b) <= slack) & (np.abs(a) > 4 * slack)
    if np.count_nonzero(lost) < PAGE // 4:
        return None
    still = np.abs(b) <= slack
    edges = np.flatnonzero(np.diff(np.concatenate([[False], still, [False]]).astype(np.int8)))
    longest = int((edges[1::2] - edges[::2]).max(initial=0))
    if longest < PAGE // 2 or longest >= 0.95 * len(b):
        return None
    at = int(edges[::2][(edges[1::2] - edges[::2]).argmax()])
    changed = np.count_nonzero(lost[at : at + longest])
    return ("zeros", {"elements": longest, "first": at}) if changed >= 0.5 * longest else None


def _near_zero(a: Array, b: Array, room: float) -> dict[str, Any] | None:
    """Return the run of elements that holds all that moved too far, if all of it is within the updates of 0."""
    far = np.flatnonzero(np.abs(b - a) > room * 1.001)
    if len(far) < LEAST or 2 * (far[-1] + 1 - far[0]) > len(b):
        return None
    first, stop = int(far[0]), int(far[-1]) + 1
    near = np.abs(b) <= room
    rest = np.count_nonzero(near) - np.count_nonzero(near[first:stop])
    share = rest / (len(b) - (stop - first))  # of the other elements: how often that happens by chance
    if not near[first:stop].all() or (stop - first) * -math.log(max(share, 1e-9)) < CHANCE:
        return None
    return {"elements": stop - first, "first": first}


def _replayed_factor(update: Update, sums: PairState, kind: str) -> float | None:
    """Return the factor of the old weights from which one update with a stated learning rate leads to the new ones."""
    fit = sums.replay.fit(None) if sums.replay.count >= LEAST and update.lr is not None and kind in UNITS else None
    if fit is None or update.lr is None or fit[2] > max(REST, sums.replay.noise(kind)):
        return None
    rate, decay, _ = fit
    stated = update.lr[0] * (1 - SCALED) <= rate <= update.lr[1] * (1 + SCALED)
    return 1 - rate * decay if stated and abs(rate * decay) > SCALED else None


def _factor(a: Array, b: Array, slack: float | None, dims: int) -> float | None:
    """Return one factor for all elements, to within the updates; an exact one for vectors near 1, as those of norms."""
    size = float(np.dot(a, a))
    if size <= 0 or len(a) < 2:
        return None
    ratio = float(np.dot(a, b)) / size
    rest = math.sqrt(float(np.mean((b - ratio * a) ** 2)))
    moved = math.sqrt(float(np.mean((b - a) ** 2)))
    if abs(ratio - 1) < SCALED or not rest < 0.25 * moved:
        return None
    # quantised codes have one factor, plus their own rounding
    coded = 0.07 if dims > 1 else 1e-6
    wide = dims > 1 or (len(a) >= LEAST and abs(a.mean()) < a.std())
    room = max(coded * abs(ratio) * math.sqrt(size / len(a)), 2 * (slack or 0.0) if wide else 0.0)
    return ratio if rest <= room else None


def one_factor(before: LazyTensor, after: LazyTensor) -> float | None:
    """Return the factor that all elements share, up to rounding to few bits (fp8 codes), or ``None``."""
    rows = spread(after.shape)
    return _factor(sampled(before, rows), sampled(after, rows), 0.0, len(before.shape))


@np.errstate(all="ignore")  # zeros have no logarithm
def power(before: LazyTensor, after: LazyTensor) -> float | None:
    """Return the power that all magnitudes were raised to, up to one factor, or ``None``."""
    rows = spread(after.shape)
    a, b = (np.abs(sampled(tensor, rows)) for tensor in (before, after))
    both = (a > 0) & (b > 0) & np.isfinite(a) & np.isfinite(b)
    if np.count_nonzero(both) < max(ENOUGH, 0.5 * np.count_nonzero(a)):
        return None
    x, y = np.log(a[both].astype(np.float64)), np.log(b[both].astype(np.float64))
    spread_of = float(x.var())
    if spread_of < POWERED:
        return None
    slope = float(((x - x.mean()) * (y - y.mean())).mean()) / spread_of
    rest = np.abs(y - y.mean() - slope * (x - x.mean()))
    other = abs(slope - 1) > STRAIGHT and abs(slope) > STRAIGHT
    return slope if other and np.quantile(rest, INSIDE) < STRAIGHT else None


def on_grid(before: LazyTensor, after: LazyTensor) -> str | None:
    """Return ``int8`` or ``float8_e4m3`` if ``after`` is ``before`` rounded to such numbers times a scale, ``10 bits``
    if only that many bits of the mantissas are left, else ``None``.

    A scale may belong to a row, a column, a block or the entire tensor. Symmetric scales are the largest magnitude over
    2^(b-1) - 1, others the range over 2^b - 1, as in torchao, bitsandbytes and torch.ao. If a tensor has more than
    ``SAMPLED`` elements, rows are sampled; a common scale is found if they hold the largest magnitude.
    """
    if after.element.name not in ("float32", "float64") or after.numel() < ENOUGH:
        return None
    rows = spread(after.shape)
    a, b = sampled(before, rows), sampled(after, rows)
    if after.element.name == "float32" and (bits := _mantissa(a, b)):
        return f"{bits} bits"
    if after.numel() < GRID:
        return None
    width = row_shape(after.shape)[1] if len(after.shape) > 1 else after.numel()
    return grid_of(a, b, width)


def grid_of(a: Array, b: Array, width: int) -> str | None:
    """Return what :func:`on_grid` does, of rows of ``width`` elements, one after the other."""
    ways = list(zip(_groups(a, width), _groups(b, width), strict=True))
    whole = next((f"int{bits}" for bits in (8, 4) for old, new in ways if _rounded_to(new, old, bits)), None)
    floats = ((name, _scaled_to(new, old, *form)) for name, form in SCALED_TO.items() for old, new in ways)
    return whole or next((name for name, found in floats if found), None)


def _mantissa(old: Array, new: Array) -> int:
    """Return how many bits of float32 mantissas are left if ``new`` is ``old`` cut or rounded to them, otherwise 0."""
    whole, zeros = (int(np.bitwise_or.reduce(x.astype(np.float32).view(np.int32))) for x in (old, new))
    cut = (zeros & -zeros).bit_length() - 1  # low bits that are 0 in all elements
    if not (8 <= cut < 23 and whole & 0xFF):
        return 0
    return 23 - cut if (np.abs(new - old) <= 2.0 ** (cut - 23) * np.abs(old)).all() else 0


def _groups(x: Array, width: int) -> list[Array]:
    """Return the elements as ``(groups, elements)`` for each way to share a scale: all, blocks, rows, columns."""
    ways = [x.reshape(1, -1), *(x[: len(x) - len(x) % n].reshape(-1, n) for n in BLOCKS if len(x) >= 2 * n)]
    return [*ways, x.reshape(-1, width), x.reshape(-1, width).T] if width > 1 and len(x) % width == 0 else ways


@np.errstate(all="ignore")  # a group of zeros has no step
def _rounded_to(new: Array, old: Array, bits: int) -> bool:
    """Return whether the new elements, but not the old, are on their group's grid and moved by half a step or less.

    A zero point is rounded too, which moves elements at the ends of the range by up to a step.
    """
    top, low = np.abs(new).max(1, keepdims=True), new.min(1, keepdims=True)
    for start, step in ((0.0, top / (2 ** (bits - 1) - 1)), (low, (new.max(1, keepdims=True) - low) / (2**bits - 1))):
        whole, was = (np.abs((q := (x - start) / step) - np.rint(q)) < STEP for x in (new, old))
        away = np.abs(new - old) / step
        if whole.mean() >= EXACT > 2 * was.mean() and (away <= 0.5 + STEP).mean() >= INSIDE and away.max() <= 1 + STEP:
            return True
    return False


@np.errstate(all="ignore")  # a group of zeros has no step
def _scaled_to(new: Array, old: Array, mantissa: int, least: int, largest: float) -> bool:
    """Return whether the new elements, but not the old, are small floats times their group's scale."""
    scale = np.abs(new).max(1, keepdims=True) / largest
    on = []
    for x in (new, old):
        step = scale * 2.0 ** (np.maximum(np.floor(np.log2(np.abs(x) / scale) + 1e-6), least) - mantissa)
        on.append(np.abs((q := x / step) - np.rint(q)) < STEP)
    whole, was = on
    return bool(whole.mean() >= EXACT > 2 * was.mean() and (np.abs(new - old) <= step * (1 + STEP)).all())


def smallest(before: LazyTensor, after: LazyTensor) -> bool:
    """Return whether the elements that became zero were the smallest of the tensor, of its rows, or of each four."""
    if len(before.shape) < 2:
        return False
    rows = spread(before.shape)
    old, new = (np.abs(sampled(one, rows)) for one in (before, after))
    lost, width = (new == 0) & (old > 0), row_shape(before.shape)[1]
    for size in (len(old), width, FOUR):
        if size < 2 or len(old) % size or width % min(size, width):
            continue
        gone = np.where(lost, old, 0.0).reshape(-1, size).max(1)
        left = np.where(lost | (old == 0), np.inf, old).reshape(-1, size).min(1)
        whole = np.count_nonzero((gone > 0) & np.isinf(left))  # a run of zeros leaves nothing to compare with
        if (gone <= left).all() and whole <= FEW_WHOLE * np.count_nonzero(gone):
            return True
    return False


def _part(tensor: LazyTensor, a: Array, b: Array, slack: float | None) -> dict[str, Any] | None:
    """Return numbers of replaced rows if the other rows are unchanged, otherwise ``None``.

    ``rows`` of ``of`` rows were replaced; ``tail``: they are the last, smaller shard of an uneven split; ``zero``: they
    became 0 to within ``slack``; ``at``: which they are; ``apart``: whether most are next to none of the others.
    """
    if len(tensor.shape) < 2:
        return None
    width = row_shape(tensor.shape)[1]
    if width < 8 or len(a) % width:
        return None
    x, y = a.reshape(-1, width), b.reshape(-1, width)
    length = np.sqrt((x * x).sum(1) * (y * y).sum(1))
    with np.errstate(all="ignore"):
        cosine = np.where(length > 0, (x * y).sum(1) / length, 1.0)
    other, same = int(np.count_nonzero(cosine < ROW_LIKE)), int(np.count_nonzero(cosine > NEAR))
    if other < 2 or same < 2 or other + same < 0.95 * len(cosine):
        return None
    count, first = len(cosine), int(np.flatnonzero(cosine < ROW_LIKE)[0])
    last = {-(-count // ranks) * (ranks - 1) for ranks in range(2, min(count, RANKS)) if count % ranks}
    odd = cosine < ROW_LIKE
    zero = slack is not None and bool(np.abs(y[odd]).max() <= slack < np.abs(x[odd]).max() / 4)
    tail = count - first <= other + 1 and bool({first, first - 1} & last)
    at = np.flatnonzero(odd)
    runs = 1 + np.count_nonzero(np.diff(at) > 1)
    apart = bool(runs > 1 and 2 * runs > other)
    return {"rows": other, "of": count, "tail": tail, "zero": zero, "at": tuple(at.tolist()), "apart": apart}


# ---- numbers ---------------------------------------------------------------------------------------------------------


def _cosine(a: Array, b: Array) -> float | None:
    length = math.sqrt(float(np.dot(a, a)) * float(np.dot(b, b)))
    return float(np.dot(a, b)) / length if length > 0 and math.isfinite(length) else None


def _likeness(a: Array, b: Array) -> float:
    """Return the correlation of the logarithms, −1 for too few elements."""
    both = (a > 0) & (b > 0)
    if np.count_nonzero(both) < 8:
        return -1.0
    x, y = np.log(a[both]), np.log(b[both])
    x, y = x - x.mean(), y - y.mean()
    length = math.sqrt(float(np.dot(x, x)) * float(np.dot(y, y)))
    return float(np.dot(x, y)) / length if length > 0 else -1.0
