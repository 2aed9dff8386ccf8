"""The pair pass compiled by numba: the same counts as numpy's, sums to within rounding.

::

    m_A v_A m_B v_B W_A W_B, float32 ── runs of 4,096, in a core's cache ──┬─ floor       least/right ─► worst, where
                                                                           ├─ transition      "
                                                                           ├─ reach           "
                                                                           └─ sums, counts, rulers

Each law is a loop of its own that the compiler vectorizes, in float64 and in the order of operations of
:mod:`workbench.doctor.laws.bounds`. Both implementations therefore agree on every element. Only sums may be reordered.
"""

from __future__ import annotations

import numpy as np

from workbench.core.arrays import Array
from workbench.core.kernels import kernel, loop, ready, reordered
from workbench.doctor.compiled import NEARLY, RUN
from workbench.doctor.laws import bounds

#: What may be looked at, as bits of ``what``.
LAWS = {"moments": 1, "floor": 2, "transition": 4, "weights": 8, "reach": 16, "replay": 32, "same": 64, "ruler": 128}
#: Order of the counts and sums that are handed out.
COUNTS = ("floor", "transition", "reach", "still", "nan", "count", "unchanged", "same", "replay", "ruler")
SUMS = (
    "aa", "bb", "ab", "dd", "replay_dd", "replay_du", "replay_dw", "replay_uu", "replay_uw", "replay_ww", "ruler_xx",
    "ruler_xy", "ruler_yy",
)  # fmt: skip
(_FLOOR, _TRANSITION, _REACH, _STILL, _NAN, _COUNT, _UNCHANGED, _SAME, _REPLAY, _RULER) = range(len(COUNTS))
_MOMENTS, _WITH_FLOOR, _WITH_TRANSITION, _WEIGHTS, _WITH_REACH, _WITH_REPLAY, _WITH_SAME, _WITH_RULER = LAWS.values()
_NONE = np.zeros(0, np.float32)
HUGE = 1e300  #: a ratio that is above all others, and 0 times it is 0


def fold(
    tensors: tuple[Array | None, ...], what: int, terms: Array, known: tuple[float, float, float, float]
) -> tuple[list[int], list[float], list[float], list[int], float]:
    """Look at one block.

    Args:
        tensors: m_A, v_A, m_B, v_B, W_A, W_B, flat ``float32`` of one length; ``None`` if absent.
        what: bits of :data:`LAWS`; each needs the tensors that it speaks of.
        terms: ``(20,) float64``: of floor (3), transition (7), reach (4), replay (3: 1−β1^t, 1−β2^t, ε) and same
            (3: 1−lr·λ, least, most).
        known: the worst ratios of floor, transition and reach so far, and the least v_B/v_A.

    Returns:
        counts, in the order of :data:`COUNTS`; sums, of :data:`SUMS`; of floor, transition and reach the worst ratios
        and where they are (-1: not in this block); and the least v_B/v_A.
    """
    size = next(len(one) for one in tensors if one is not None)
    sides = [ready(_NONE if one is None else one) for one in tensors]
    counts, sums = np.zeros(len(COUNTS), np.int64), np.zeros(len(SUMS))
    worst, at, least = np.array(known[:3]), np.full(3, -1, np.int64), np.array(known[3:])
    kept = [np.empty(length, np.float32) for length in (0, RUN, RUN, RUN, RUN)]  # what is finite of a run
    _fold(*sides, size, what, terms, counts, sums, worst, at, least, *kept)
    return counts.tolist(), sums.tolist(), worst.tolist(), at.tolist(), float(least[0])


_floor_sides, _transition_sides = loop(bounds.floor_sides), loop(bounds.transition_sides)
_reach_sides = loop(bounds.reach_sides)

# ---- laws: is there anything in a run that counts? -------------------------------------------------------------------
#
# A comparison that is false for NaN too: such a run is looked at element by element. `scale` is 1 and `with_room` is 1
# when only what breaks the law can still count, for all else is at most 1; before that it is what the worst ratio says.


@loop
def _fallen(v_a, v_b, least):
    """Count the second moments that are less than ``least`` times what they were."""
    found = 0
    for i in range(len(v_a)):
        found += not np.float64(v_b[i]) >= least * abs(np.float64(v_a[i]))
    return found


@loop
def _moments_above(m_a, v_a, m_b, v_b, least, fade_m, fade_v, limit, per_v, under, scale, with_room):
    """Count as :func:`_fallen`, and count the candidates for the transition: what is above √(x + y) + z is above √(x +
    y).
    """
    fallen, found = 0, 0
    limit, per_v, under = limit * scale, with_room * per_v, with_room * under
    for i in range(len(m_a)):
        a, b = np.float64(v_a[i]), np.float64(v_b[i])
        left = np.float64(m_b[i]) - fade_m * np.float64(m_a[i])
        gained = b - fade_v * a
        gained = 0.0 if gained < 0.0 else gained
        fallen += not b >= least * abs(a)
        found += not left * left <= limit * (gained + (per_v * abs(b) + under))
    return fallen, found


@loop
def _reach_above(w_a, w_b, middle, half, most):
    found = 0
    for i in range(len(w_a)):
        left, _, _ = _reach_sides(np.float64(w_a[i]), np.float64(w_b[i]), middle, half, most, 0.0)
        found += not left <= most
    return found


# ---- laws: what lies beyond the slack, and how much of the bound the worst element uses ------------------------------


@loop
def _floor(v_a, v_b, c, start, worst, at):
    broken, fade, lost, under = 0, c[0], c[1], c[2]
    for i in range(len(v_a)):
        left, right, allowed = _floor_sides(np.float64(v_a[i]), np.float64(v_b[i]), fade, lost, under)
        hit = left > allowed
        broken += hit
        _note(left / right, right > 0.0, hit, start + i, 0, worst, at)
    return broken


@loop
def _transition(m_a, v_a, m_b, v_b, c, start, worst, at):
    broken, fade_m, fade_v, limit, per_v, under, all_limit, per_m = 0, c[3], c[4], c[5], c[6], c[7], c[8], c[9]
    for i in range(len(m_a)):
        left, right, allowed = _transition_sides(
            np.float64(m_a[i]),
            np.float64(v_a[i]),
            np.float64(m_b[i]),
            np.float64(v_b[i]),
            fade_m,
            fade_v,
            limit,
            per_v,
            under,
            all_limit,
            per_m,
        )
        hit = left > allowed
        broken += hit
        _note(left / right, right > 0.0, hit, start + i, 1, worst, at)
    return broken


@loop
def _reach(w_a, w_b, c, start, worst, at):
    broken, middle, half, most, per_w = 0, c[10], c[11], c[12], c[13]
    for i in range(len(w_a)):
        left, right, allowed = _reach_sides(np.float64(w_a[i]), np.float64(w_b[i]), middle, half, most, per_w)
        hit = left > allowed
        broken += hit
        _note(left / right, right > 0.0, hit, start + i, 2, worst, at)
    return broken


@loop
def _note(plain, positive, hit, place, law, worst, at):
    """Note the place of a ratio that is larger than all before; it is capped at 1 unless it is a hit."""
    ratio = (1.0 if plain > 1.0 and not hit else plain) if positive else (np.inf if hit else 0.0)
    if ratio > worst[law]:
        worst[law] = ratio
        at[law] = place


@loop
def _ratio(v_a, v_b, least):
    for i in range(len(v_a)):
        ratio = np.float64(v_b[i]) / np.float64(v_a[i])
        if v_a[i] > np.float32(0) and ratio < least:
            least = ratio
    return least


# ---- counts and sums -------------------------------------------------------------------------------------------------


@loop
def _equal(a, b):
    """Count the elements that are equal, and those among them that are 0."""
    found, zeros = np.int32(0), np.int32(0)
    for i in range(len(a)):
        found = np.int32(found + np.int32(a[i] == b[i]))
        zeros = np.int32(zeros + np.int32((a[i] == b[i]) & (a[i] == np.float32(0))))
    return found, zeros


@loop
def _odd(b):
    found = np.int32(0)
    for i in range(len(b)):
        found = np.int32(found + np.int32(not abs(b[i]) < np.float32(np.inf)))
    return found


@loop
def _lost(a, b):
    """Count the elements that are finite in A and not in B."""
    found = 0
    if _odd(b):
        for i in range(len(a)):
            found += (abs(a[i]) < np.float32(np.inf)) & (not abs(b[i]) < np.float32(np.inf))
    return found


@reordered
def _weights(w_a, w_b, count):
    aa, bb, ab, dd = 0.0, 0.0, 0.0, 0.0
    for i in range(count):
        a, b = np.float64(w_a[i]), np.float64(w_b[i])
        d = b - a
        aa += a * a
        bb += b * b
        ab += a * b
        dd += d * d
    return aa, bb, ab, dd


@reordered
def _replay(w_a, w_b, m, v, first, second, eps, count):
    dd, du, dw, uu, uw, ww = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    for i in range(count):
        w = np.float64(w_a[i])
        d = w - np.float64(w_b[i])
        u = np.float64(m[i]) * first / (np.sqrt(np.float64(v[i]) * second) + eps)
        dd += d * d
        du += d * u
        dw += d * w
        uu += u * u
        uw += u * w
        ww += w * w
    return dd, du, dw, uu, uw, ww


@loop
def _finite(w_a, w_b, m, v, first, second, eps, kept_a, kept_b, kept_m, kept_v):
    """Move what has finite weights and steps to the front of what is kept, and say how many they are."""
    count = 0
    for i in range(len(w_a)):
        moved, step = np.float64(w_a[i]) - np.float64(w_b[i]), 0.0
        if len(m):
            step = np.float64(m[i]) * first / (np.sqrt(np.float64(v[i]) * second) + eps)
            kept_m[count], kept_v[count] = m[i], v[i]
        kept_a[count], kept_b[count] = w_a[i], w_b[i]
        count += int(abs(moved) < np.inf and abs(step) < np.inf)
    return count


@loop
def _same(w_a, w_b, keep, least, most):
    found = 0
    for i in range(len(w_a)):
        moved = abs(np.float64(w_b[i]) - np.float64(w_a[i]) * keep)
        found += (moved >= least) & (moved <= most)
    return found


@reordered
def _ruler(m_a, v_a, m_b, v_b, w_a, w_b):
    count, xx, xy, yy = np.int64(0), 0.0, 0.0, 0.0
    zero = np.float32(0)
    for i in range(len(w_a)):
        silent = (m_a[i] == zero) & (v_a[i] == zero) & (m_b[i] == zero) & (v_b[i] == zero)
        silent &= (w_a[i] != zero) & (w_b[i] != zero)
        x, y = np.float64(w_a[i]) if silent else 0.0, np.float64(w_b[i]) if silent else 0.0
        count += np.int64(silent)
        xx += x * x
        xy += x * y
        yy += y * y
    return count, xx, xy, yy


# ---- kernel ----------------------------------------------------------------------------------------------------------


@loop
def _scale(worst):
    """Return the factor on a bound that lets all candidates for the worst ratio count, and whether rounding has its
    room.
    """
    return (NEARLY, 1.0) if worst >= 1.0 else (worst * NEARLY, 0.0)


@loop
def _lowest(least, worst, fade, lost):
    """Return the ratio v_B/v_A below which an element may be the minimum, or count for the floor."""
    scale, room = _scale(worst)
    floor = fade * (1.0 - room * lost) / scale if scale > 0.0 else HUGE
    return min(max(least, floor) * (2.0 - NEARLY), HUGE)


@kernel
def _fold(
    m_a, v_a, m_b, v_b, w_a, w_b, size, what, c, counts, sums, worst, at, least, none, kept_a, kept_b, kept_m, kept_v
):
    for start in range(0, size, RUN):
        stop = min(start + RUN, size)
        ma, va, mb, vb = m_a[start:stop], v_a[start:stop], m_b[start:stop], v_b[start:stop]
        wa, wb = w_a[start:stop], w_b[start:stop]
        silent = 1
        if what & _MOMENTS:
            still, silent = _equal(va, vb)
            counts[_STILL] += still - silent
            low = _lowest(least[0], worst[0], c[0], c[1])
            if what & _WITH_TRANSITION:
                scale, room = _scale(worst[1])
                fallen, above = _moments_above(ma, va, mb, vb, low, c[3], c[4], c[5], c[6], c[7], scale * scale, room)
                if above:
                    counts[_TRANSITION] += _transition(ma, va, mb, vb, c, start, worst, at)
            else:
                fallen = _fallen(va, vb, low)
            if fallen:
                least[0] = _ratio(va, vb, least[0])
                if what & _WITH_FLOOR:
                    counts[_FLOOR] += _floor(va, vb, c, start, worst, at)
        if len(ma) and len(mb):
            counts[_NAN] += _lost(ma, mb)
        if len(va) and len(vb):
            counts[_NAN] += _lost(va, vb)
        if not what & _WEIGHTS:
            continue
        counts[_UNCHANGED] += _equal(wa, wb)[0]
        count = stop - start
        aa, bb, ab, dd = _weights(wa, wb, count)
        if not aa + bb < np.inf:
            counts[_NAN] += _lost(wa, wb)
            count = _finite(wa, wb, none, none, 0.0, 0.0, 0.0, kept_a, kept_b, kept_m, kept_v)
            aa, bb, ab, dd = _weights(kept_a, kept_b, count)
        counts[_COUNT] += count
        sums[0] += aa
        sums[1] += bb
        sums[2] += ab
        sums[3] += dd
        if what & _WITH_REACH and _reach_above(wa, wb, c[10], c[11], c[12] * _scale(worst[2])[0]):
            counts[_REACH] += _reach(wa, wb, c, start, worst, at)
        if what & _WITH_REPLAY:
            first, second, count = 1.0 / c[14], 1.0 / c[15], stop - start
            dd, du, dw, uu, uw, ww = _replay(wa, wb, mb, vb, first, second, c[16], count)
            if not dd + uu < np.inf:
                count = _finite(wa, wb, mb, vb, first, second, c[16], kept_a, kept_b, kept_m, kept_v)
                dd, du, dw, uu, uw, ww = _replay(kept_a, kept_b, kept_m, kept_v, first, second, c[16], count)
            counts[_REPLAY] += count
            sums[4] += dd
            sums[5] += du
            sums[6] += dw
            sums[7] += uu
            sums[8] += uw
            sums[9] += ww
        if what & _WITH_SAME:
            counts[_SAME] += _same(wa, wb, c[17], c[18], c[19])
        if what & _WITH_RULER and silent:
            count, xx, xy, yy = _ruler(ma, va, mb, vb, wa, wb)
            counts[_RULER] += count
            sums[10] += xx
            sums[11] += xy
            sums[12] += yy
