"""Infer the updates between two states from their facts: an `Update` for each parameter.

::

    A  step 240   optimizer 240   lr 2.4e-3   ┐ k = 20 updates of the optimizer, lag 0
    B  step 260   optimizer 260   lr 2.1e-3   ┘ lr: the plan's over those 20 if B states plan and position,
                                                    else anything up to the stated peak, which proves less

Each parameter has its own count: without a gradient, or if a scaler skipped updates, it was updated less often than the
trainer counts. If its counter fell, or rose by more than the trainer's, it does not count updates, and the trainer's
count is used.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import replace

from workbench.doctor.facts.counted import began_anew, counts_anew, lagging, may_count_anew, per_step
from workbench.doctor.facts.evidence import Pair, State
from workbench.doctor.facts.groups import TRAINED
from workbench.doctor.facts.optimizer import LIKE, UNKNOWN, Optimizer
from workbench.doctor.facts.schedule import plan_of
from workbench.doctor.facts.state import NAME, Group, TrainingState
from workbench.doctor.laws.bounds import LONGEST, bound, sound
from workbench.doctor.passes.pair import Update

Betas = tuple[float, float]
#: Law of an optimizer → the laws of a pair that depend on it.
_LAWS = {"moments": ("floor", "transition"), "reach": ("reach",), "replay": ("replay",), "ruler": ("ruler",)}
_UNTRAINED = tuple((law, "the optimizer has no state for it") for law in ("reach", "replay", "ruler"))
_SEVERAL = tuple((law, "which of several optimizers updates it is unknown") for law in ("reach", "replay", "ruler"))
_SHARED = (("replay", "the optimizer has state for only some of the weights of its shape"),)
_ANEW = (("ruler", "the optimizer's state began anew in between"),)
OFTEN = tuple(
    (law, "the optimizer's counters are below the updates in between: it may have begun anew")
    for law in ("floor", "transition", "reach", "replay", "ruler")
)
TIMES = 8  #: most updates that a trainer may make in what it counts as one step
#: Largest norm of the matrix that torch's Muon makes of a momentum: its coefficients take norms up to 1.21 to less.
ORTHOGONAL = 1.3
EXTRA = 3  #: most updates that a load itself makes, to create the optimizer's state
MOST = 1e300  #: most updates that a float holds


def between(pair: Pair, doubted: Collection[str] = ()) -> dict[str, Update]:
    """Return fqn → the updates from A to B; parameters with an unknown number of updates are left out.

    Args:
        doubted: those that had every update since the load, whatever their counters advanced by.
    """
    a, b = pair.a.facts, pair.b.facts
    trainer = passed(a, b)
    if doubted and may_count_anew(a, b):
        trainer = int(b.steps.usual or 0)
    ends = sorted({*a.beta_ends, *b.beta_ends})
    cycled = a.cycled or b.cycled
    found = {}
    surplus, shared = _surplus(pair), _shared(pair)
    grown = len(pair.b.numbered) > len(pair.a.numbered)  # some of the numbers are of parameters that had no updates
    several, rare = counted_several(a, b, trainer), lagging(a, b, trainer)
    for fqn in pair.b.params:
        first, second = _counter(a, fqn), _counter(b, fqn)
        own = None if first is None or second is None else second - first
        most = math.inf if trainer is None else several if own == several else trainer + EXTRA
        advanced = own is not None and 0 <= own <= most and (second != trainer or own == trainer or fqn in rare)
        anew = fqn in doubted
        if anew or (trainer is not None and not (_own(a, fqn) and _own(b, fqn))):
            advanced = False  # counters of others differ, and it may have had every update
        k = own if advanced else trainer  # a counter equal to the updates in between restarted
        if k is None or not 0 <= k <= MOST:
            continue
        lag = None if trainer is None or own is None else trainer - own
        lr, certain = lr_range(a, b, fqn, k)
        group, old = b.group_of(fqn), a.group_of(fqn)
        older, later = betas_of(pair.a, fqn), betas_of(pair.b, fqn)
        flags = [one.decoupled for one in (group, old) if one is not None and one.decoupled is not None]
        at = pair.b.params[fqn].get("param")
        shape = () if at is None else pair.b.shape(at)
        ways = {_way(one, shape) for one in ([group] if group is not None else b.groups)}
        way = ways.pop() if len(ways) == 1 else _way(None, shape)
        found[fqn] = Update(
            k,
            later or older,
            (group.eps if group is not None else None) or b.eps or a.eps,
            None if anew or (grown and not _own(b, fqn)) else _before(a, fqn, first),
            second,
            lr,
            certain,
            _decays(a, b, fqn),
            None if None in (own_decay := (a.weight_decay(fqn), b.weight_decay(fqn))) else own_decay,  # type: ignore[arg-type]
            {"sign": True, "orthogonal": True, "adam": flags[0] if flags else b.decoupled}.get(way[1], False),
            bool(b.amsgrad),
            older,
            () if (one := later or older) is None else tuple((end, one[1]) for end in ends),
            _barred(older, later, [one.optimizer_of(fqn) for one in (a, b)], cycled)
            + (_UNTRAINED if fqn in surplus else ())
            + (_SHARED if fqn in shared else ())
            + (_SEVERAL if ways else ())
            + (_ANEW if anew or (own is not None and own < 0) else ())
            + (OFTEN if advanced and fqn not in rare and _begins_often(a, b, trainer) else ()),
            lag,
            *way,
        )
    return found


def counted_several(a: TrainingState, b: TrainingState, trainer: int | None) -> int:
    """Return the updates that the optimizer counted where it counts two or more for each of the trainer's; else 0."""
    first, second = a.steps.usual, b.steps.usual
    if not trainer or first is None or second is None:
        return 0
    counted = int(second - first)
    if any(b.steps.by_name.get(name, value + counted) != value + counted for name, value in a.steps.by_name.items()):
        return 0  # of a part of them
    return counted if counted % trainer == 0 and 2 <= counted // trainer <= TIMES else 0  # more: it was changed


def _way(group: Group | None, shape: tuple[int, ...]) -> tuple[float | None, str]:
    """Return how far an update moves a weight at most, in learning rates, and along what: ``pace`` and ``along``.

    Squares keep (1−α)·g² of the last gradient at least, so |g|/√v ≤ 1/√(1−α); a momentum sums up to 1/(1−μ) of these.
    No element of an orthogonal matrix is larger than its norm.
    """
    if group is None:
        return None, "adam"
    family, settings = group.optimizer.family, group.settings
    laws = group.optimizer.laws
    stated = settings.get("momentum")
    momentum = stated if isinstance(stated, (int, float)) and 0 < stated < 1 else 0.0
    along = "momentum" if momentum and "replay" in laws else "other"
    if family == "Lion" and "reach" in laws:
        return 1.0, "sign"
    if family == "Adagrad" and "reach" in laws:
        return 1.0, "other"
    if family == "Muon" and "reach" in laws and len(shape) == 2:
        way = settings["adjust_lr_fn"]
        spread = 0.2 * math.sqrt(max(shape)) if way == "match_rms_adamw" else math.sqrt(max(1, shape[0] / shape[1]))
        return ORTHOGONAL * spread, "orthogonal"
    if family == "RMSprop" and "reach" in laws:
        alpha = settings.get("alpha")
        if not isinstance(alpha, (int, float)) or not 0 < alpha < 1:
            return None, along
        return 1 / math.sqrt(1 - alpha) / (1 - momentum), along
    return (None, along) if family == "SGD" else (None, "adam")


def _surplus(pair: Pair) -> frozenset[str]:
    """Return the tensors without optimizer state that are called neither weight nor bias: no optimizer updates them."""
    bare = pair.b.unheld if pair.b.facts.states else pair.a.unheld
    return frozenset(f for f in bare - pair.a.facts.states.keys() if f.rpartition(".")[2] not in TRAINED)


def _shared(pair: Pair) -> frozenset[str]:
    """Return the weights of whose shape there are more than numbered states: a copy, such as a teacher, has none."""
    held = pair.b.numbered_shapes
    shapes = {
        fqn: pair.b.shape(roles["param"])
        for fqn, roles in (pair.b.params.items() if held else ())
        if roles.keys() == {"param"}
    }
    count = Counter(shapes.values())
    return frozenset(fqn for fqn, shape in shapes.items() if 0 < held[shape] < count[shape])


def passed(a: TrainingState, b: TrainingState) -> int | None:
    """Return the number of updates between two states.

    It comes from the trainer's step, or else its schedule, or else the most common optimizer counter; if these two
    agree, from them. ``None`` if none of them is stored.
    """
    k = scheduled(a, b)
    if began_anew(a, b):
        return int(b.steps.usual)  # type: ignore[arg-type]  # and maybe the schedule's count, too
    if counts_anew(a, b):
        return b.step
    if a.step is None or b.step is None or k == (b.steps.usual or 0) - (a.steps.usual or 0) > 0:
        if k is not None:
            return k
        first, second = a.steps.usual, b.steps.usual
        return None if first is None or second is None or second < first else int(second - first)
    steps = b.step - a.step
    ratio = per_step(a, b)
    if ratio is not None:
        return int(steps * ratio)
    # a name can number epochs or saves, and a trainer that went back gives no count
    named = NAME in (a.source("step"), b.source("step"))
    return None if steps < 0 or (named and _more(a, b, steps)) else steps


def scheduled(a: TrainingState, b: TrainingState) -> int | None:
    """Return the updates by a schedule whose count equalled the optimizer's counters in ``a``, or ``None``."""
    first, second = (None if one.schedule is None else one.schedule.count for one in (a, b))
    if first is None or second is None or first != a.steps.usual or second < first:
        return None
    if b.steps.usual is not None and second == b.steps.usual - first > second - first:
        return None  # it restarted, and counts the updates since
    return int(second - first)


def _more(a: TrainingState, b: TrainingState, steps: int) -> bool:
    """Return whether the optimizer counted more updates than that."""
    first, second = a.steps.usual, b.steps.usual
    return first is not None and second is not None and second - first > steps


def _before(state: TrainingState, fqn: str, count: int | None) -> int | None:
    """Return the updates that a parameter had; ``None`` if it has no counter and those of others differ."""
    return count if _own(state, fqn) and count is not None and count >= 0 else None


def _begins_often(a: TrainingState, b: TrainingState, trainer: int | None) -> bool:
    """Return whether the counters stay below the updates of the trainer, in number and in advance, in both states."""
    counts = [value for one in (a, b) for value in one.steps.counts]
    most = max(counts, default=math.inf)
    return trainer is not None and a.step is not None and most < min(trainer, a.step)


def _own(state: TrainingState, fqn: str) -> bool:
    """Return whether the count used for a parameter is its own: stored under its name, or the same for all."""
    return fqn in state.steps.by_name or not state.steps.by_name or len(state.steps.counts) == 1


def _barred(
    older: Betas | None, later: Betas | None, optimizers: Iterable[Optimizer], cycled: bool
) -> tuple[tuple[str, str], ...]:
    """Return the laws that do not apply: Adam's for another optimizer, those of one β if there were several."""
    barred: dict[str, str] = {}
    for betas in (older, later):
        if betas is not None and not sound(betas):
            why = f"betas {betas} are outside 0 ≤ beta1 < 1 and 0 < beta2 < 1"
            barred |= dict.fromkeys(("floor", "transition", "reach", "replay"), why)
    for one in optimizers:
        lost = [law for law, parts in _LAWS.items() if one.stored and law not in one.laws for law in parts]
        barred = dict.fromkeys(lost, _why(one)) | barred
    if None not in (older, later) and older != later:
        why = f"the two files state different betas: {older} and {later}"
        barred |= dict.fromkeys(("transition", "replay"), why)
    elif cycled:
        barred |= dict.fromkeys(("transition", "replay"), "a schedule changes beta1 at every update")
    return tuple(barred.items())


def _why(one: Optimizer) -> str:
    if one.family == UNKNOWN:
        return f"the optimizer is unknown: {one.why}"
    return f"this law is not known to hold for {one.family}: {one.why}"


def as_adam(pair: Pair, fqn: str, update: Update) -> Update:
    """Return the update without the bars of an optimizer that is only known to be like Adam."""
    found = {one.optimizer_of(fqn) for one in (pair.a.facts, pair.b.facts)}
    reasons = {_why(one) for one in found if one.family == LIKE}
    return replace(update, barred=tuple(one for one in update.barred if one[1] not in reasons))


def betas_of(state: State, fqn: str) -> Betas | None:
    """Return β1 and β2 of a parameter: its group's, or else those of all groups."""
    group = state.facts.group_of(fqn)
    return group.betas if group is not None and group.betas is not None else state.facts.betas


def limit_of(betas: Iterable[Betas | None]) -> float | None:
    """Return K of the state bound for moments that had those betas in turn; ``None`` if none is known."""
    known = [one for one in betas if one is not None]
    return max((bound(one) for one in known), default=None)


def lr_range(a: TrainingState, b: TrainingState, fqn: str, k: int) -> tuple[tuple[float, float] | None, bool]:
    """Return the least and greatest lr of the last k updates before B, and whether the files state it."""
    here = _lrs(b, fqn)
    plan = plan_of(b.schedule, b.args, b.statements)
    if plan is not None and here and k <= LONGEST:
        count = b.schedule.count if b.schedule is not None else None
        at = b.step if count is None else count / plan.per_update
        if at is not None and all(plan.allows(lr, at) for lr in here):
            # trainers count from 0 or 1 and store the lr before or after the step, so neighbours are allowed too
            reached = [plan.lr_at(at - back) for back in range(-1, k + 1)]
            return (min(reached) * (1 - 1e-6), max(reached) * (1 + 1e-6)), True
    there = _lrs(a, fqn)
    ends = [*here, *there]
    if not ends:
        return None, False
    peaks = [*_peaks(a), *_peaks(b)]
    if k == 1 and here and there:  # the one update used what A stores, or what B stores, by when it is set
        return (min(ends), max(ends)), False
    # an lr above the assumed peak: the schedule between the two is unknown
    return (0.0, max([*ends, *peaks])), bool(peaks) and max(ends) <= max(peaks) * (1 + 1e-6)


def _lrs(state: TrainingState, fqn: str) -> list[float]:
    group = state.group_of(fqn)
    if group is not None and group.lr is not None:
        return [group.lr]
    lrs = [one.lr for one in state.groups if one.lr is not None]
    return lrs or ([state.lr] if state.lr is not None else [])


def _peaks(state: TrainingState) -> list[float]:
    found = [one.initial_lr for one in state.groups if one.initial_lr is not None]
    tops = [one.settings.get("max_lr") for one in state.groups]  # OneCycleLR starts far below it
    if state.schedule is not None:
        cycled = state.schedule.settings.get("max_lrs")  # CyclicLR starts at the lowest
        tops += cycled if isinstance(cycled, (list, tuple)) else []
    found += [float(top) for top in tops if isinstance(top, (int, float)) and math.isfinite(top)]
    if state.schedule is not None:
        found += [*state.schedule.base_lrs, *([state.schedule.max_lr] if state.schedule.max_lr is not None else [])]
    plan = plan_of(state.schedule, state.args, state.statements)
    return found + ([plan.peak] if plan is not None else [])


def _decays(a: TrainingState, b: TrainingState, fqn: str) -> tuple[float, ...]:
    """Return λ as A and B state it, B's last; that of every group if a parameter's group is unknown."""
    found: list[float] = []
    for state in (a, b):
        one = state.weight_decay(fqn)
        if one is not None:
            found.append(one)
        elif state is b or b.weight_decay(fqn) is None:
            found += [group.weight_decay for group in state.groups if group.weight_decay is not None]
    return tuple(found)


def _counter(state: TrainingState, fqn: str) -> int | None:
    found = state.steps.by_name.get(fqn)
    if found is None:
        group = state.group_of(fqn)
        found = group.step if group is not None and group.step is not None else state.steps.usual
    return int(found) if found is not None and abs(found) <= MOST else None  # also excludes NaN, a damaged counter
