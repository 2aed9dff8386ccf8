"""The pair pass compiled by numba (the ``fast`` extra): the same counts as numpy's, sums to within rounding.

::

    m_A v_A m_B v_B W_A W_B, float32 ── runs of 4,096, in a core's cache ──┬─ floor       least/right ─► worst, where
                                                                           ├─ transition      "
                                                                           ├─ reach           "
                                                                           └─ sums, counts, rulers

Each law is a loop of its own that the compiler turns into wide instructions, in float64 and in the order in which
:mod:`workbench.doctor.laws.bounds` writes it, so that both ways agree on every element. Only sums may be reordered.

Loops and kernel stay in one file, see :mod:`workbench.doctor.passes.compiled`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from workbench.doctor.passes.compiled import RUN, clean, exact, ready, reordered

__all__ = ["COUNTS", "LAWS", "SUMS", "fold"]

Array = np.ndarray[Any, Any]

#: What may be looked at, as bits of ``what``.
LAWS = {"moments": 1, "floor": 2, "transition": 4, "weights": 8, "reach": 16, "replay": 32, "same": 64, "ruler": 128}
#: Order of the counts and sums that are handed out.
COUNTS = ("floor", "transition", "reach", "still", "nan", "count", "unchanged", "same", "replay", "ruler")
SUMS = ("aa", "bb", "ab", "dd", "replay_dd", "replay_du", "replay_dw", "replay_uu", "replay_uw", "replay_ww",
        "ruler_xx", "ruler_xy", "ruler_yy")  # fmt: skip
(_FLOOR, _TRANSITION, _REACH, _STILL, _NAN, _COUNT, _UNCHANGED, _SAME, _REPLAY, _RULER) = range(len(COUNTS))
_MOMENTS, _WITH_FLOOR, _WITH_TRANSITION, _WEIGHTS, _WITH_REACH, _WITH_REPLAY, _WITH_SAME, _WITH_RULER = LAWS.values()
_NONE = np.zeros(0, np.float32)


def fold(
    tensors: tuple[Array | None, ...], what: int, terms: Array
) -> tuple[list[int], list[float], list[float], list[int], float]:
    """Look at one block.

    Args:
        tensors: m_A, v_A, m_B, v_B, W_A, W_B, flat ``float32`` of one length; ``None`` where there is none.
        what: bits of :data:`LAWS`; each needs the tensors that it speaks of.
        terms: ``(20,) float64``: of floor (3), transition (7), reach (4), replay (3: 1−β1^t, 1−β2^t, ε) and same
            (3: 1−lr·λ, least, most).

    Returns:
        counts, in the order of :data:`COUNTS`; sums, of :data:`SUMS`; of floor, transition and reach the worst ratios
        and where they are (-1: nowhere); and the least v_B/v_A.
    """
    size = next(len(one) for one in tensors if one is not None)
    sides = [ready(_NONE if one is None else one) for one in tensors]
    counts, sums = np.zeros(len(COUNTS), np.int64), np.zeros(len(SUMS))
    worst, at, least = np.zeros(3), np.full(3, -1, np.int64), np.full(1, np.inf)
    _fold(*sides, size, what, terms, counts, sums, worst, at, least)
    return counts.tolist(), sums.tolist(), worst.tolist(), at.tolist(), float(least[0])


# ---- laws: what lies beyond the slack, and how much of the bound each element uses -----------------------------------


@exact
def _floor(v_a, v_b, fade, lost, under, out):
    broken = 0
    for i in range(len(out)):
        right = np.float64(v_b[i])
        left = fade * np.float64(v_a[i])
        hit = left > right + lost * left + under
        plain = left / right
        capped = 1.0 if plain > 1.0 and not hit else plain
        ratio = capped if right > 0.0 else (np.inf if hit else 0.0)
        out[i] = ratio if ratio == ratio else 0.0
        broken += hit
    return broken


@exact
def _transition(m_a, v_a, m_b, v_b, fade_m, fade_v, limit, per_v, under, all_limit, per_m, out):
    broken = 0
    for i in range(len(out)):
        b = np.float64(v_b[i])
        first = np.float64(m_a[i])
        left = abs(np.float64(m_b[i]) - fade_m * first)
        gained = b - fade_v * np.float64(v_a[i])
        gained = 0.0 if gained < 0.0 else gained
        room_v = per_v * abs(b) + under
        room_m = per_m * (abs(first) + np.sqrt(all_limit * (abs(b) + under)))
        right = np.sqrt(limit * gained)
        hit = left > np.sqrt(limit * (gained + room_v)) + room_m
        plain = left / right
        capped = 1.0 if plain > 1.0 and not hit else plain
        ratio = capped if right > 0.0 else (np.inf if hit else 0.0)
        out[i] = ratio if ratio == ratio else 0.0
        broken += hit
    return broken


@exact
def _reach(w_a, w_b, middle, half, most, per_w, out):
    broken = 0
    for i in range(len(out)):
        a = np.float64(w_a[i])
        size = abs(a)
        left = abs(np.float64(w_b[i]) - middle * a) - half * size
        hit = left > most + per_w * (size + most)
        plain = left / most
        capped = 1.0 if plain > 1.0 and not hit else plain
        ratio = capped if most > 0.0 else (np.inf if hit else 0.0)
        out[i] = ratio if ratio == ratio else 0.0
        broken += hit
    return broken


@clean
def _highest(x):
    found = 0.0
    for i in range(len(x)):
        found = x[i] if x[i] > found else found
    return found


@clean
def _lowest(x):
    found = np.inf
    for i in range(len(x)):
        found = x[i] if x[i] < found else found
    return found


@exact
def _note(out, start, law, worst, at):
    """The first of the largest, where it is larger than all before."""
    high = _highest(out)
    if high > worst[law]:
        worst[law] = high
        for i in range(len(out)):
            if out[i] == high:
                at[law] = start + i
                break


# ---- counts and sums -------------------------------------------------------------------------------------------------


@exact
def _still(v_a, v_b, out):
    """How many are equal and not 0; ``out``: v_B/v_A, infinite where there is none."""
    found = 0
    for i in range(len(out)):
        a, b = v_a[i], v_b[i]
        found += (a == b) & (a != np.float32(0))
        ratio = np.float64(b) / np.float64(a)
        out[i] = ratio if (a > np.float32(0)) & (ratio == ratio) else np.inf
    return found


@exact
def _lost(a, b):
    """How many are finite in A and not in B."""
    found = 0
    for i in range(len(a)):
        found += (abs(a[i]) < np.float32(np.inf)) & (not abs(b[i]) < np.float32(np.inf))
    return found


@exact
def _equal(a, b):
    found = 0
    for i in range(len(a)):
        found += a[i] == b[i]
    return found


@reordered
def _weights(w_a, w_b):
    count, aa, bb, ab, dd = np.int64(0), 0.0, 0.0, 0.0, 0.0
    for i in range(len(w_a)):
        a, b = np.float64(w_a[i]), np.float64(w_b[i])
        fine = (abs(a) < np.inf) & (abs(b) < np.inf)
        x, y = a if fine else 0.0, b if fine else 0.0
        d = y - x
        count += np.int64(fine)
        aa += x * x
        bb += y * y
        ab += x * y
        dd += d * d
    return count, aa, bb, ab, dd


@reordered
def _replay(w_a, w_b, m, v, first, second, eps):
    count, dd, du, dw, uu, uw, ww = np.int64(0), 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    for i in range(len(w_a)):
        before = np.float64(w_a[i])
        moved = before - np.float64(w_b[i])
        step = np.float64(m[i]) / first / (np.sqrt(np.float64(v[i]) / second) + eps)
        fine = (abs(step) < np.inf) & (abs(moved) < np.inf)
        w, d, u = before if fine else 0.0, moved if fine else 0.0, step if fine else 0.0
        count += np.int64(fine)
        dd += d * d
        du += d * u
        dw += d * w
        uu += u * u
        uw += u * w
        ww += w * w
    return count, dd, du, dw, uu, uw, ww


@exact
def _same(w_a, w_b, keep, least, most):
    found = 0
    for i in range(len(w_a)):
        moved = abs(np.float64(w_b[i]) - np.float64(w_a[i]) * keep)
        found += (moved >= least) & (moved <= most)
    return found


@exact
def _silent(m_a, v_a, m_b, v_b, w_a):
    found = 0
    zero = np.float32(0)
    for i in range(len(w_a)):
        found += (m_a[i] == zero) & (v_a[i] == zero) & (m_b[i] == zero) & (v_b[i] == zero) & (w_a[i] != zero)
    return found


@reordered
def _ruler(m_a, v_a, m_b, v_b, w_a, w_b):
    xx, xy, yy = 0.0, 0.0, 0.0
    zero = np.float32(0)
    for i in range(len(w_a)):
        silent = (m_a[i] == zero) & (v_a[i] == zero) & (m_b[i] == zero) & (v_b[i] == zero) & (w_a[i] != zero)
        x, y = np.float64(w_a[i]) if silent else 0.0, np.float64(w_b[i]) if silent else 0.0
        xx += x * x
        xy += x * y
        yy += y * y
    return xx, xy, yy


# ---- kernel ----------------------------------------------------------------------------------------------------------


@exact
def _fold(m_a, v_a, m_b, v_b, w_a, w_b, size, what, c, counts, sums, worst, at, least):
    buffer = np.empty(RUN, np.float64)
    for start in range(0, size, RUN):
        stop = min(start + RUN, size)
        out = buffer[: stop - start]
        ma, va, mb, vb = m_a[start:stop], v_a[start:stop], m_b[start:stop], v_b[start:stop]
        wa, wb = w_a[start:stop], w_b[start:stop]
        if what & _MOMENTS:
            counts[_STILL] += _still(va, vb, out)
            least[0] = min(least[0], _lowest(out))
        if what & _WITH_FLOOR:
            counts[_FLOOR] += _floor(va, vb, c[0], c[1], c[2], out)
            _note(out, start, 0, worst, at)
        if what & _WITH_TRANSITION:
            counts[_TRANSITION] += _transition(ma, va, mb, vb, c[3], c[4], c[5], c[6], c[7], c[8], c[9], out)
            _note(out, start, 1, worst, at)
        if len(ma) and len(mb):
            counts[_NAN] += _lost(ma, mb)
        if len(va) and len(vb):
            counts[_NAN] += _lost(va, vb)
        if not what & _WEIGHTS:
            continue
        counts[_NAN] += _lost(wa, wb)
        counts[_UNCHANGED] += _equal(wa, wb)
        count, aa, bb, ab, dd = _weights(wa, wb)
        counts[_COUNT] += count
        sums[0] += aa
        sums[1] += bb
        sums[2] += ab
        sums[3] += dd
        if what & _WITH_REACH:
            counts[_REACH] += _reach(wa, wb, c[10], c[11], c[12], c[13], out)
            _note(out, start, 2, worst, at)
        if what & _WITH_REPLAY:
            count, dd, du, dw, uu, uw, ww = _replay(wa, wb, mb, vb, c[14], c[15], c[16])
            counts[_REPLAY] += count
            sums[4] += dd
            sums[5] += du
            sums[6] += dw
            sums[7] += uu
            sums[8] += uw
            sums[9] += ww
        if what & _WITH_SAME:
            counts[_SAME] += _same(wa, wb, c[17], c[18], c[19])
        if what & _WITH_RULER:
            found = _silent(ma, va, mb, vb, wa)
            counts[_RULER] += found
            if found:
                xx, xy, yy = _ruler(ma, va, mb, vb, wa, wb)
                sums[10] += xx
                sums[11] += xy
                sums[12] += yy
