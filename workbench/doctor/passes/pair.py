"""Sums over two states, parameter by parameter, in one pass: the numbers behind the P rules.

::

    A  master m v ─┐                floor, transition, reach
                   ├─ block ──► PairState   replay (k = 1), ruler, same step
    B  master m v ─┘                how far the weights moved, how many are unchanged, the angle between them
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from workbench.core.arrays import Array
from workbench.doctor.laws.bounds import (
    PIECE,
    UNITS,
    Hits,
    bound,
    floor,
    floor_terms,
    has_slack,
    moved_by,
    reach,
    reach_terms,
    transition,
    transition_terms,
)
from workbench.doctor.laws.exact import Line, Replay, along, replay, ruler, same_step
from workbench.doctor.passes.blocks import BLOCK, WIDE, SlotBlock, TensorSlot

Betas = tuple[float, float]


@dataclass(frozen=True)
class Update:
    """The known properties of the updates between two states of one parameter.

    Attributes:
        k: number of updates.
        betas, eps: the values they used; ``None`` if unknown.
        before: updates that the optimizer had made at A; ``None`` if unknown. after: its counter at B.
        lr: least and greatest learning rate of the updates; ``None`` if unknown.
        certain: whether the files state the lr of every update; otherwise it is the peak, or a guess from both ends.
        decays: possible values of λ; empty if unknown, which allows any value from 0.
        stated: λ of its group in A and in B, if both are known.
        decoupled: AdamW. amsgrad: the denominator is another tensor. older: betas of the updates before A.
        between: other betas that some of the updates may have used, because a schedule changed them.
        barred: laws that do not hold for these updates whatever is stored, each with the reason.
        lag: by how many updates the trainer's count exceeds the parameter's; ``None`` if either is unknown.
        pace: how far an update moves a weight at most, in learning rates, for optimizers other than Adam.
        along: what an update moves a weight along: ``adam`` (the moments after it), ``momentum`` (the momentum after
            it), ``sign`` (by the learning rate itself, up or down), ``orthogonal`` (a matrix that is not stored, beside
            AdamW's weight decay) or ``other``.
        set_after: the trainer changes the weight after each update: it rounds it, or sets a part of it to zero.
    """

    k: int
    betas: Betas | None = None
    eps: float | None = None
    before: int | None = None
    after: int | None = None
    lr: tuple[float, float] | None = None
    certain: bool = False
    decays: tuple[float, ...] = ()
    stated: tuple[float, float] | None = None
    decoupled: bool | None = None
    amsgrad: bool = False
    older: Betas | None = None
    between: tuple[Betas, ...] = ()
    barred: tuple[tuple[str, str], ...] = ()
    lag: int | None = None
    pace: float | None = None
    along: str = "adam"
    set_after: bool = False

    def bars(self, law: str) -> bool:
        """Return whether a law does not hold for these updates."""
        return any(one == law for one, _ in self.barred)

    @property
    def fading(self) -> float:
        """Least β2 that any of the updates may have used; second moments keep that much in each, or more."""
        assert self.betas is not None
        return min(one[1] for one in (self.betas, self.older, *self.between) if one is not None)

    @property
    def factors(self) -> tuple[float, float]:
        """Least and greatest Π(1−lr·λ) over the stated decays."""
        if self.decoupled is False or self.lr is None:
            return 1.0, 1.0
        low, high = self.lr
        least = min((max(1 - high * decay, 0.0) ** self.k for decay in self.decays), default=0.0)
        most = max((max(1 - low * decay, 0.0) ** self.k for decay in self.decays), default=1.0)
        return least, most

    @property
    def most(self) -> float | None:
        """The largest possible change of a weight."""
        if self.lr is None or not math.isfinite(self.lr[1]):
            return None
        if self.along != "adam" or self.pace is not None:
            return None if self.pace is None else self.lr[1] * self.k * self.pace
        if self.betas is None:
            return None
        # moments from other betas may be larger, so use their K and the larger correction
        most = moved_by(self.betas, self.lr[1], self.k, self.before)
        others = {one for one in (self.older, *self.between) if one is not None} - {self.betas}
        if not others or not math.isfinite(most):
            return most
        limits = {one: bound(one) for one in (self.betas, *others)}
        if not all(map(math.isfinite, limits.values())):
            return None
        rates = {one: moved_by(one, self.lr[1], self.k, self.before) for one in self.between}
        every = {self.betas: most, **rates}
        return max(rate * math.sqrt(max(limits.values()) / limits[one]) for one, rate in every.items())


@dataclass(slots=True)
class PairState:
    """Sums over a parameter of two states.

    Attributes:
        floor, transition, reach: elements that break the law.
        skipped: law → why it was not checked.
        replay, ruler: sums of the equalities.
        same: elements that moved by the learning rate itself, of ``moved_of``.
        unchanged: weights that are equal in A and B, of ``count``. still: the same for elements of exp_avg_sq.
        nan: elements that are finite in A but not in B, over weights and moments.
        aa, bb, ab: Σ over the finite weights. dd: Σ of their squared differences.
        ratio: least v_B/v_A over elements with v_A > 0, whose floor is β2^k.
    """

    count: int = 0
    floor: Hits = field(default_factory=Hits)
    transition: Hits = field(default_factory=Hits)
    reach: Hits = field(default_factory=Hits)
    skipped: dict[str, str] = field(default_factory=dict)
    replay: Replay = field(default_factory=Replay)
    ruler: Line = field(default_factory=Line)
    same: int = 0
    moved_of: int = 0
    unchanged: int = 0
    still: int = 0
    nan: int = 0
    aa: float = 0.0
    bb: float = 0.0
    ab: float = 0.0
    dd: float = 0.0
    ratio: float = math.inf

    @property
    def moved(self) -> float:
        """RMS of W_B − W_A."""
        return math.sqrt(self.dd / self.count) if self.count else 0.0

    @property
    def cosine(self) -> float | None:
        """Cosine of the angle between W_A and W_B; ``None`` if either is zero."""
        size = math.sqrt(self.aa * self.bb)
        return self.ab / size if size > 0 else None


def weight_role(slot: TensorSlot) -> str | None:
    """Return the role that the optimizer updates: masters if both states have them, otherwise the weights."""
    for role in ("master", "param"):
        if (0, role) in slot.tensors and (1, role) in slot.tensors:
            return role
    return None


class PairFold:
    """Folds blocks of two sides into :class:`PairState`.

    Args:
        fast: use compiled code for values that fit float32; counts are the same, sums agree to within rounding.
    """

    def __init__(self, updates: Mapping[str, Update], fast: bool = False) -> None:
        self._updates, self._fast = updates, fast
        self.block = WIDE if fast else BLOCK

    def narrowed(self, fqns: Collection[str]) -> PairFold:
        """Return the fold of some parameters."""
        return PairFold({fqn: self._updates[fqn] for fqn in fqns if fqn in self._updates}, self._fast)

    def begin(self, slot: TensorSlot) -> PairState:
        """Determine which laws can be checked."""
        state, update = PairState(), self._updates[slot.fqn]
        kinds = [slot.dtype((side, role)) for side in (0, 1) for role in ("exp_avg", "exp_avg_sq")]
        kind = next((k for k in kinds if k is not None and k != "float32"), "float32")
        weight = weight_role(slot)
        updated = slot.dtype((1, weight)) if weight else None
        skip = state.skipped
        skip.update(update.barred)
        of_adam = update.along == "adam"
        if update.betas is None:
            for law in ("floor", "transition", *(("reach", "replay") if of_adam and update.pace is None else ())):
                skip.setdefault(law, "the betas are unknown")
        if update.k < 1:
            skip.update(
                dict.fromkeys(("floor", "transition", "reach", "replay", "ruler"), "there is no update in between")
            )
        if None in kinds:
            lost = "no moments of its name and shape are stored in both states"
            skip.update(dict.fromkeys(("floor", "transition", "ruler"), lost))
        elif kind not in UNITS:
            skip.setdefault("floor", f"moments are stored as {kind}")
        if update.betas is not None and (why := has_slack(update.betas, kind, update.k)):
            skip.setdefault("transition", why)
        if updated is None or updated not in UNITS:
            skip.update(
                dict.fromkeys(("reach", "replay", "ruler"), "no weight of its name and shape is stored in both states")
            )
        elif update.most is None:
            skip.setdefault("reach", "the learning rate is unknown")
        if update.k != 1:
            skip.setdefault("replay", f"there are {update.k:,} updates in between, not one")
        elif not of_adam:
            if update.along in ("other", "orthogonal"):
                skip.setdefault("replay", "an update of this optimizer does not follow from what it stores")
            elif update.along == "momentum" and slot.dtype((1, "momentum")) != "float32":
                skip.setdefault("replay", "no float32 momentum after the update is stored")
        elif kinds[2] is None or kinds[3] is None or kind != "float32":
            skip.setdefault("replay", "no float32 moments after the update are stored")
        elif update.eps is None or update.after is None:
            skip.setdefault("replay", "eps or the optimizer's step is unknown")
        elif update.after < 1:
            skip.setdefault("replay", f"the optimizer's step is {update.after}")
        elif update.amsgrad:
            skip.setdefault("replay", "AMSGrad divides by another tensor")
        return state

    def fold(self, state: PairState, slot: TensorSlot, block: SlotBlock) -> None:
        weight = weight_role(slot)
        roles = [role for role in ("exp_avg", "exp_avg_sq", "momentum", weight) if role]
        values = {
            (side, role): block.values[side, role] for role in roles for side in (0, 1) if (side, role) in block.values
        }
        if not values:
            return
        update = self._updates[slot.fqn]
        kinds = _kinds(slot, weight)
        other = update.along != "adam" and "replay" not in state.skipped
        if self._fast and not other and all(one.dtype == np.float32 for one in values.values()):
            _compiled(state, update, kinds, weight, values, block.start)
            return
        size = len(next(iter(values.values())))
        with np.errstate(all="ignore"):
            for first in range(0, size, PIECE):
                piece = {name: one[first : first + PIECE].astype(np.float64) for name, one in values.items()}
                _moments(state, update, kinds[0], piece, block.start + first)
                for role in roles:
                    if (0, role) in piece and (1, role) in piece:
                        fine = np.isfinite(piece[0, role])
                        state.nan += int(np.count_nonzero(fine & ~np.isfinite(piece[1, role])))
                if weight is not None:
                    _weights(state, update, kinds[1], weight, piece, block.start + first)

    def merge(self, state: PairState, later: PairState) -> None:
        for name in ("floor", "transition", "reach", "replay", "ruler"):
            getattr(state, name).add(getattr(later, name))
        for name in ("count", "same", "moved_of", "unchanged", "still", "nan", "aa", "bb", "ab", "dd"):
            setattr(state, name, getattr(state, name) + getattr(later, name))
        state.ratio = min(state.ratio, later.ratio)


def _kinds(slot: TensorSlot, weight: str | None) -> tuple[str, str]:
    """Return the stored types that determine the rounding of second moments and of weights."""
    kinds = {slot.dtype((side, "exp_avg_sq")) or "float32" for side in (0, 1)}
    kind = "float32" if kinds == {"float32"} else min(kinds, key=lambda name: -UNITS.get(name, 0.0))
    return kind, slot.dtype((1, weight or "")) or "float32"


def _moments(state: PairState, update: Update, kind: str, values: Mapping[tuple[int, str], Array], start: int) -> None:
    m_a, v_a = values.get((0, "exp_avg")), values.get((0, "exp_avg_sq"))
    m_b, v_b = values.get((1, "exp_avg")), values.get((1, "exp_avg_sq"))
    if v_a is None or v_b is None:
        return
    state.still += int(np.count_nonzero((v_a == v_b) & (v_a != 0)))
    state.ratio = float(np.fmin.reduce(v_b / v_a, initial=state.ratio, where=v_a > 0))
    if "floor" not in state.skipped:
        assert update.betas is not None
        state.floor.add(floor(v_a, v_b, update.fading, update.k, kind), start)
    if m_a is not None and m_b is not None and "transition" not in state.skipped:
        assert update.betas is not None
        state.transition.add(transition(m_a, v_a, m_b, v_b, update.betas, update.k, kind), start)


def _weights(
    state: PairState, update: Update, kind: str, weight: str, values: Mapping[tuple[int, str], Array], start: int
) -> None:
    w_a, w_b = values[0, weight], values[1, weight]
    state.unchanged += int(np.count_nonzero(w_a == w_b))
    x, y = w_a, w_b
    fine = np.isfinite(x) & np.isfinite(y)
    if not fine.all():
        x, y = x[fine], y[fine]
    moved = y - x
    state.count += len(x)
    state.aa += float(np.dot(x, x))
    state.bb += float(np.dot(y, y))
    state.ab += float(np.dot(x, y))
    state.dd += float(np.dot(moved, moved))
    if "reach" not in state.skipped:
        most = update.most
        assert most is not None
        state.reach.add(reach(w_a, w_b, most, update.factors, update.k, kind), start)
    if "replay" not in state.skipped:
        if update.along == "sign":
            state.replay.add(along(w_a, w_b, _up_or_down(w_a, w_b, update)))
        elif update.along == "momentum":
            state.replay.add(along(w_a, w_b, values[1, "momentum"]))
        else:
            assert update.betas is not None and update.eps is not None and update.after is not None
            m, v = values[1, "exp_avg"], values[1, "exp_avg_sq"]
            state.replay.add(replay(w_a, w_b, m, v, update.betas, update.eps, update.after))
    if (lr := _one_step(update, kind)) is not None:
        state.same += same_step(w_a, w_b, lr, update.decays[-1] if update.decays else 0.0)
        state.moved_of += len(w_a)
    if "ruler" not in state.skipped and kind == "float32":
        states = [values[side, role] for side in (0, 1) for role in ("exp_avg", "exp_avg_sq")]
        silent = (states[0] == 0) & (states[1] == 0) & (states[2] == 0) & (states[3] == 0)
        if silent.any():
            state.ruler.add(ruler(w_a, w_b, silent))


def _up_or_down(w_a: Array, w_b: Array, update: Update) -> Array:
    """Return the sign of each change; 0 if only the decay changed an element, as without a gradient."""
    decay = max(update.decays, default=0.0) * (update.lr[1] if update.lr is not None else 0.0)
    moved = w_a - w_b
    return np.where(np.abs(moved) > 1.01 * decay * np.abs(w_a), np.sign(moved), 0.0)


def _one_step(update: Update, kind: str) -> tuple[float, float] | None:
    """Return the learning rate of a single update of float32 weights by Adam, or ``None``."""
    if update.k != 1 or update.bars("reach") or update.pace is not None:  # signs always move weights by lr
        return None
    return update.lr if update.lr is not None and update.lr[0] > 0 and kind == "float32" else None


# ---- compiled --------------------------------------------------------------------------------------------------------


def _compiled(
    state: PairState,
    update: Update,
    kinds: tuple[str, str],
    weight: str | None,
    values: Mapping[tuple[int, str], Array],
    start: int,
) -> None:
    from workbench.doctor.compiled import fast_pair

    names = [(side, role) for side in (0, 1) for role in ("exp_avg", "exp_avg_sq")]
    tensors = (*(values.get(name) for name in names), *(values.get((side, weight or "")) for side in (0, 1)))
    m_a, v_a, m_b, v_b, w_a, w_b = (tensor is not None for tensor in tensors)
    seen = {
        "moments": v_a and v_b,
        "floor": v_a and v_b and "floor" not in state.skipped,
        "transition": m_a and v_a and m_b and v_b and "transition" not in state.skipped,
        "weights": w_a and w_b,
        "reach": w_a and w_b and "reach" not in state.skipped,
        "replay": w_a and w_b and "replay" not in state.skipped,
        "same": w_a and w_b and _one_step(update, kinds[1]) is not None,
        "ruler": w_a and w_b and "ruler" not in state.skipped and kinds[1] == "float32",
    }
    what = frozenset(law for law, wanted in seen.items() if wanted)
    known = (state.floor.worst, state.transition.worst, state.reach.worst, state.ratio)
    found = fast_pair.fold(tensors, sum(fast_pair.LAWS[law] for law in what), _terms(update, kinds, what), known)
    size = len(next(tensor for tensor in tensors if tensor is not None))
    counts = dict(zip(fast_pair.COUNTS, found[0], strict=True))
    sums = dict(zip(fast_pair.SUMS, found[1], strict=True))
    for law, worst, at in zip(("floor", "transition", "reach"), found[2], found[3], strict=True):
        if law in what:
            getattr(state, law).add(Hits(counts[law], size, worst, at), start)
    for name in ("still", "nan", "count", "unchanged", "same"):
        setattr(state, name, getattr(state, name) + counts[name])
    for name in ("aa", "bb", "ab", "dd"):
        setattr(state, name, getattr(state, name) + sums[name])
    state.moved_of += size if "same" in what else 0
    state.replay.add(
        Replay(counts["replay"], *(sums[f"replay_{name}"] for name in ("dd", "du", "dw", "uu", "uw", "ww")))
    )
    state.ruler.add(Line(counts["ruler"], *(sums[f"ruler_{name}"] for name in ("xx", "xy", "yy"))))
    state.ratio = min(state.ratio, found[4])


@lru_cache(1024)
def _terms(update: Update, kinds: tuple[str, str], what: frozenset[str]) -> Array:
    """Return the constants of the laws in the order of the compiled code; 0 for laws that are not checked."""
    terms = np.zeros(20)
    betas = update.betas or (0.0, 0.0)
    if "floor" in what:
        terms[0:3] = floor_terms(update.fading, update.k, kinds[0])
    if "transition" in what:
        terms[3:10] = transition_terms(betas, update.k, kinds[0])
    if "reach" in what:
        terms[10:14] = reach_terms(update.most or 0.0, update.factors, update.k, kinds[1])
    if "replay" in what:
        step = update.after or 1
        terms[14:17] = 1 - betas[0] ** step, 1 - betas[1] ** step, update.eps or 0.0
    if "same" in what:
        least, most = update.lr or (0.0, 0.0)
        decay = update.decays[-1] if update.decays else 0.0
        terms[17:20] = 1 - most * decay, 0.95 * least, 1.05 * most
    return terms
