"""Laws that no run of Adam or AdamW can break, whatever its gradients, as pure functions on flat arrays.

::

    m ← β1·m + (1−β1)·g      v ← β2·v + (1−β2)·g²      W ← W·(1 − lr·λ) − lr·m̂/(√v̂ + ε)      ρ = β1²/β2

    state bound   m² ≤ K·v                                      K_k = (1−β1)²/(1−β2) · (1−ρ^k)/(1−ρ)
    floor         v_B ≥ β2^k·v_A                                A, B: two states, k updates apart
    transition    (m_B − β1^k·m_A)² ≤ K_k·(v_B − β2^k·v_A)
    reach         |W_B − W_A·Π(1−lr·λ)| ≤ √K·Σ lr·f(t)          f(t) = √(1−β2^t)/(1−β1^t)
    replay        k = 1: W_A − W_B = lr·m̂_B/(√v̂_B + ε) + lr·λ·W_A
    ruler         no gradient ever: W_B = W_A·Π(1−lr·λ), the same factor everywhere

Proof of the first four: m and v are sums over the gradients with weights (1−β1)·β1^j and (1−β2)·β2^j, and
Cauchy–Schwarz bounds the square of the one by the other times Σ (weight of m)²/(weight of v) = K. Equality is reached
by gradients ∝ (β1/β2)^j, so K cannot be smaller. Increments between two states are the same sums over k gradients.

They hold for constant β (after a change, with the larger K, because the bound is a convex combination of both, and the
floor with the smaller β2), and for any lr, clipping, accumulation, loss scale and skipped steps (k counts the updates
that were made). Adam with L2 in the gradient obeys the same laws without decay, which is then a gradient. AMSGrad obeys
all except replay (its denominator is only larger). They do not hold for 8-bit, factored or sign-based optimizers.

The slack is the worst case of rounding only, from the unit u of the stored type (2⁻²⁴ for fp32): kernels of GPUs hold
the betas in fp32, an update makes up to four roundings of relative size u, a gradient leaves a trace for up to
``ln(range)/(1−β)`` updates, and a number that underflows is below the smallest normal number. With bfloat16 moments,
this slack exceeds the law in every case except the floor, which rounding preserves because it is monotone. The other
laws are then not checked.

Kingma & Ba (2014), Algorithm 1; torch 2.13 ``torch/optim/adamw.py`` (``_single_tensor_adam``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from workbench.core.arrays import Array

Betas = tuple[float, float]
Sides = tuple[Array, Any, Array]

#: Rounding unit of stored types: half the distance from 1 to the next number.
UNITS = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
#: Smallest normal number: what kernels that flush to zero lose at most.
TINY = {"float64": 2.0**-1022, "float32": 2.0**-126, "float16": 2.0**-14, "bfloat16": 2.0**-126}
ROUNDINGS = 4  #: of relative size u in one update of a moment or a weight, at most
FOLDS = 180.0  #: e-folds from the largest to the smallest number of float32: after that a gradient has left no trace
PIECE = (
    1 << 13
)  #: elements that numpy looks at together: what it makes of them stays in a core's cache, and in the heap
LONGEST = 1 << 20  #: maximum number of updates that are summed one by one
USELESS = 0.5  #: relative slack from which a law shows nothing


@dataclass(slots=True)
class Hits:
    """Elements that break a law.

    Attributes:
        broken, of: number of elements that break it, and number that were checked.
        worst: largest left side over right side without slack (1 is the bound); 0 if nothing was checked.
        at: flat position of the worst element; -1 if nothing was checked.
    """

    broken: int = 0
    of: int = 0
    worst: float = 0.0
    at: int = -1

    def add(self, later: Hits, offset: int = 0) -> None:
        """Add the result for elements that begin ``offset`` later."""
        if later.worst > self.worst:
            self.worst, self.at = later.worst, later.at + offset
        self.broken += later.broken
        self.of += later.of


def sound(betas: Betas) -> bool:
    """Return whether the betas define a mean: 0 ≤ β1 < 1 and 0 < β2 < 1. With β2 = 0, no law applies."""
    return 0 <= betas[0] < 1 and 0 < betas[1] < 1


def bound(betas: Betas, steps: int | None = None) -> float:
    """Return K after this many updates, or its limit, which is infinite if β1² ≥ β2 or a beta is invalid."""
    if not sound(betas):
        return math.inf
    first, second = betas
    ratio = first**2 / second
    scale = (1 - first) ** 2 / (1 - second)
    if steps is None:
        return scale / (1 - ratio) if ratio < 1 else math.inf
    if math.isclose(ratio, 1.0, rel_tol=1e-12):
        return scale * steps
    return float(scale * np.expm1(steps * math.log(ratio)) / (ratio - 1)) if ratio > 0 else scale * min(steps, 1)


def bias_factor(betas: Betas, step: int) -> float:
    """Return f(t), the factor by which bias correction multiplies m/√v at update ``step`` (from 1)."""
    return math.sqrt(1 - betas[1] ** step) / (1 - betas[0] ** step)


def aged(beta: float, unit: float, steps: int | None = None) -> float:
    """Return the largest relative rounding of a moving average of positive numbers."""
    longest = FOLDS / (1 - beta)
    return ROUNDINGS * unit * (longest if steps is None else min(steps, longest))


def has_slack(betas: Betas, dtype: str, k: int | None = None) -> str | None:
    """Return why state bound, transition and reach do not apply to moments of this type, or ``None`` if they do."""
    unit = UNITS.get(dtype)
    if unit is None:
        return f"moments are stored as {dtype}"
    if not sound(betas):
        return f"betas {betas} are invalid: 0 ≤ beta1 < 1 and 0 < beta2 < 1 is required"
    if not math.isfinite(bound(betas)):
        return f"beta1² ≥ beta2 ({betas[0]}, {betas[1]}): nothing bounds m²/v"
    if aged(betas[1], unit, k) > USELESS:
        return f"{dtype} rounds moments by more than the law allows for"
    return None


# ---- the inequalities ------------------------------------------------------------------------------------------------
#
# Of float64, arrays or single numbers (``doctor.compiled`` compiles them): left side, right side, and the right side
# with the slack of rounding.


def state_bound_sides(m: Array, v: Array, limit: float, room: float, under: float) -> Sides:
    """Return both sides of m² ≤ K·v."""
    return m * m, limit * v, room * (v + under)


def floor_sides(v_a: Array, v_b: Array, fade: float, lost: float, under: float) -> Sides:
    """Return both sides of β2^k·v_A ≤ v_B."""
    left = fade * v_a
    return left, v_b, v_b + lost * left + under


def transition_sides(
    m_a: Array,
    v_a: Array,
    m_b: Array,
    v_b: Array,
    fade_m: float,
    fade_v: float,
    limit: float,
    per_v: float,
    under: float,
    all_limit: float,
    per_m: float,
) -> Sides:
    """Return both sides of |m_B − β1^k·m_A| ≤ √(K_k·(v_B − β2^k·v_A)); they are equal at k = 1."""
    size, gained = np.abs(v_b), np.maximum(v_b - fade_v * v_a, 0.0)
    room_m = per_m * (np.abs(m_a) + np.sqrt(all_limit * (size + under)))
    allowed = np.sqrt(limit * (gained + (per_v * size + under))) + room_m
    return np.abs(m_b - fade_m * m_a), np.sqrt(limit * gained), allowed


def reach_sides(w_a: Array, w_b: Array, middle: float, half: float, most: float, per_w: float) -> Sides:
    """Return both sides of |W_B − W_A·Π(1−lr·λ)| ≤ √K·Σ lr·f(t)."""
    size = np.abs(w_a)
    return np.abs(w_b - middle * w_a) - half * size, most, most + per_w * (size + most)


def state_bound(m: Array, v: Array, limit: float, betas: Betas, dtype: str = "float32") -> Hits:
    """Check m² ≤ K·v for flat moments; other arguments are as in :func:`state_bound_terms`."""
    found, terms = Hits(), state_bound_terms(limit, betas, dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, len(m), PIECE):
            first, second = wide(m[start : start + PIECE]), wide(v[start : start + PIECE])
            found.add(_hits(*state_bound_sides(first, second, *terms)), start)
    return found


def state_bound_terms(limit: float, betas: Betas, dtype: str) -> tuple[float, float, float]:
    """Return K, K with the slack of rounding, and what may be lost below the smallest number.

    Args:
        limit: K; the larger one after a change of β.
        dtype: type that the moments are stored in.
    """
    unit = UNITS[dtype]
    room = (1 + aged(betas[0], unit)) ** 2 * (1 + aged(betas[1], unit))
    return limit, limit * room, 3 * TINY[dtype] / (1 - betas[1])


def floor(v_a: Array, v_b: Array, beta2: float, k: int, dtype: str = "float32") -> Hits:
    """Check v_B ≥ β2^k·v_A. ``worst`` is the right side over the left; moments may be of any stored type."""
    return _hits(*floor_sides(wide(v_a), wide(v_b), *floor_terms(beta2, k, dtype)))


def floor_terms(beta2: float, k: int, dtype: str) -> tuple[float, float, float]:
    """Return β2^k, the share of it that rounding may take, and what may be lost below the smallest number."""
    lost = -math.expm1(3 * k * math.log1p(-UNITS[dtype]))  # β2, the product and the sum are each rounded once an update
    return beta2**k, lost, 3 * TINY[dtype] * min(k, 1 / (1 - beta2))


def transition(m_a: Array, v_a: Array, m_b: Array, v_b: Array, betas: Betas, k: int, dtype: str = "float32") -> Hits:
    """Check (m_B − β1^k·m_A)² ≤ K_k·(v_B − β2^k·v_A)."""
    terms = transition_terms(betas, k, dtype)
    return _hits(*transition_sides(wide(m_a), wide(v_a), wide(m_b), wide(v_b), *terms))


def transition_terms(betas: Betas, k: int, dtype: str) -> tuple[float, ...]:
    """Return β1^k, β2^k, K_k; the effect of rounding on v, per v_B and in all; K, and that on m, per size of m."""
    unit = UNITS[dtype]
    limit, fade = bound(betas, k), betas[0] / math.sqrt(betas[1])
    # each update rounds v by 4u of what it then was, which has decayed to at most 4u of v_B
    under = 3 * TINY[dtype] * min(k, 1 / (1 - betas[1]))
    # and m by 4u of itself and of (1−β1)·|g|, both at most √(K·v) then: by now (β1/√β2)^age of that
    ages = min(k, 1 / (1 - fade)) if fade < 1 else k
    per_m = 2 * ROUNDINGS * unit * ages
    limit *= 1 + _of_betas(betas)
    return betas[0] ** k, betas[1] ** k, limit, ROUNDINGS * unit * k, under, bound(betas), per_m


def _of_betas(betas: Betas) -> float:
    """Return how much K may grow by betas that a kernel holds in float32: 1 − 0.999 is then 0.00099998713.

    Source: torch 2.11 to 2.13 ``native/cuda/fused_adam_utils.cuh``; apex and TransformerEngine hold them so, too.
    """
    first, second = betas
    ratio = first**2 / second
    if ratio >= 1:
        return 0.0  # nothing is bounded
    return UNITS["float32"] * (second / (1 - second) + 2 * first / (1 - first) + 3 * ratio / (1 - ratio))


def reach(w_a: Array, w_b: Array, most: float, decay: tuple[float, float], k: int, dtype: str = "float32") -> Hits:
    """Check |W_B − W_A·Π(1−lr·λ)| ≤ most.

    Args:
        most: √K·Σ lr·f(t), from :func:`moved_by`.
        decay: least and greatest Π(1−lr·λ) that can be; both 1 without decay.
        dtype: type of the weights that the optimizer updates.
    """
    return _hits(*reach_sides(wide(w_a), wide(w_b), *reach_terms(most, decay, k, dtype)))


def reach_terms(most: float, decay: tuple[float, float], k: int, dtype: str) -> tuple[float, float, float, float]:
    """Return the middle and half width of the decays, how far a weight can move, and the rounding per size."""
    return (decay[0] + decay[1]) / 2, abs(decay[1] - decay[0]) / 2, most, ROUNDINGS * UNITS[dtype] * k


@lru_cache(4096)
def moved_by(betas: Betas, lr: float, k: int, step: int | None, dtype: str = "float32") -> float:
    """Return the most that k updates at learning rate ``lr`` or less can move a weight: Σ lr·√K_t·f(t).

    Args:
        step: updates that the optimizer had done before; ``None`` where not known: then the worst of all.
    """
    if not sound(betas):
        return math.inf
    unit = UNITS.get(dtype, UNITS["float32"])
    slack = (1 + aged(betas[0], unit)) * math.sqrt(1 + aged(betas[1], unit)) * (1 + 8 * UNITS["float32"])
    if step is None or step < 0:
        each = max(math.sqrt(bound(betas, t)) * bias_factor(betas, t) for t in range(1, 2000))
        return lr * k * max(each, math.sqrt(bound(betas))) * slack
    late = math.ceil(60 / (1 - betas[1]))  # the factor is 1 from here on
    stop = min(step + k + 1, late, step + 1 + LONGEST)  # a damaged counter says 10^12, and there is nothing to sum
    times = range(step + 1, max(stop, step + 1))
    total = sum(math.sqrt(bound(betas, t)) * bias_factor(betas, t) for t in times)
    rest = k - len(times)
    # f(t) ≤ 1/(1−β1^t), which matters only where the sum was cut short
    factor = 1.0 if times.stop >= min(step + k + 1, late) else 1 / (1 - betas[0] ** times.stop)
    return lr * (total + rest * factor * math.sqrt(bound(betas))) * slack


def _hits(left: Array, right: Array | float, allowed: Array) -> Hits:
    """Return where ``left`` exceeds ``allowed``. NaN does not count: other rules report it."""
    if not len(left):
        return Hits()
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        broken = left > allowed
        count = int(np.count_nonzero(broken))
        ratio = left / right
        np.minimum(ratio, 1.0, out=ratio, where=~broken if count else True)
        if not np.all(positive := right > 0):
            ratio = np.where(positive, ratio, np.where(broken, np.inf, 0.0))
    np.fmax(ratio, 0.0, out=ratio)  # of NaN too
    at = int(ratio.argmax())
    worst = float(ratio[at])
    return Hits(count, len(left), worst, at if worst > 0 else -1)


def wide(values: Array) -> Array:
    return values.astype(np.float64, copy=False)
