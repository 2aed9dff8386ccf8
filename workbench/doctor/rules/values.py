"""Turn passes over values into signs, and record what was not examined and why.

::

    State ──slots──► stream(OneFold)  ──► rules_one  ──┐
    Pair  ──slots──► stream(PairFold) ──► rules_pair ──┴─► Values(signs, checked, not_checked, states)
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from workbench.analysis.patterns.rounding import rounded
from workbench.core.scan import Progress
from workbench.core.words import plural
from workbench.doctor.facts.counted import fell_back, may_count_anew
from workbench.doctor.facts.evidence import Pair, State
from workbench.doctor.laws.bounds import Hits
from workbench.doctor.laws.exact import REST, along
from workbench.doctor.ledger.sign import Inapplicable, Sign
from workbench.doctor.origins.became import cast_before, direction
from workbench.doctor.origins.samples import sampled, spread
from workbench.doctor.passes.blocks import StoredTensors, TensorSlot, compiled, stream
from workbench.doctor.passes.one import OneFold, OneState
from workbench.doctor.passes.pair import PairFold, PairState, Update, weight_role
from workbench.doctor.passes.updates import as_adam, between, limit_of, passed
from workbench.doctor.rules.one import judge_one
from workbench.doctor.rules.pair import adams, judge_pair
from workbench.errors import WorkbenchError
from workbench.names.weights import kinds

#: Of a decaying maximum: tensors and elements that are looked at, distance from β2^k·v, change of exp_avg, share.
MAXIMA, SAMPLED, EXACT, CHANGED, SHARE = 8, 1 << 13, 5e-7, 0.01, 0.05
#: Share and number of the parameters that an update of Adam explains; relative difference of their learning rates.
FITTING, ENOUGH, ALIKE = 0.75, 3, 0.01
LARGEST = 0.95  #: share of the elements whose second moment is no smaller than their gradient, if it is the largest one
#: Of rows that keep their length: rows, tensors that are looked at first and at most, change of length per step.
ROWS, TABLES, MOST, LENGTH = 8, 8, 512, 1e-2
ADAM = {"exp_avg", "exp_avg_sq"}
STEPS = ("reach", "replay", "ruler")  #: laws of what an update does to a weight
LAWS = ("floor", "transition", "reach", "replay")
ROLES = ("param", "master", "exp_avg", "exp_avg_sq")
ALONE = (*ROLES, "max_exp_avg_sq", "ema")  #: roles that are read from a single checkpoint


@dataclass(frozen=True)
class PassValues:
    """The result of a pass.

    Attributes:
        checked, not_checked: rule or law → sentence; for ``not_checked``, the reason.
        states: fqn → the pass's sums, for pictures.
        updates: fqn → the updates between the two states of a pair.
    """

    signs: tuple[Sign, ...]
    checked: Mapping[str, str]
    not_checked: Mapping[str, str]
    states: Mapping[str, Any]
    updates: Mapping[str, Update] = field(default_factory=dict)


def check_one(
    state: State,
    earlier: State | None = None,
    *,
    threads: int | None = None,
    progress: Progress | None = None,
    fast: bool | None = None,
) -> PassValues:
    """Check the laws that hold within one checkpoint.

    Args:
        earlier: a checkpoint of the same run; if its betas differ, they widen the state bound.
        fast: use the compiled code; by default if numba is installed and there is much to read.

    Raises:
        MissingExtraError: ``fast`` is requested but numba is not installed.
    """
    every = [one for one in (state, earlier) if one is not None]
    known = [one.facts.betas for one in every if one.facts.betas is not None]
    known += [group.betas for one in every for group in one.facts.groups if group.betas is not None]
    # the moments saw every beta1 of the schedule
    moved = [(end, one[1]) for state in every for end in state.facts.beta_ends for one in known[:1]]
    slots = [
        _slot(fqn, [state], [roles], ALONE)
        for fqn, roles in state.params.items()
        if "param" in roles or "exp_avg" in roles
    ]
    fold = OneFold(known[0] if known else None, limit_of([*known, *moved]), fast=compiled(slots, fast))
    found: dict[str, OneState] = {}
    unread: dict[str, str] = {}
    for slot, sums in stream(slots, fold, threads=threads, progress=progress, on_error=_note(unread)):
        sums.close(slot.fqn)
        optimizer = state.facts.optimizer_of(slot.fqn)
        if "moments" not in optimizer.laws and sums.bound.of:
            sums.bound, sums.unbound = Hits(), f"m² ≤ K·v is not a law of this optimizer: {optimizer.why}"
        found[slot.fqn] = sums
    why = Counter(sums.unbound for sums in found.values() if sums.unbound)
    return PassValues(
        tuple(judge_one(state, slots, found, earlier)),
        {"values": f"{plural(len(found), 'parameter')} of {state.ckpt.path!r} were read"},
        _reasons({"S04": why}, unread),
        found,
    )


def _without_maxima(pair: Pair, updates: Mapping[str, Update]) -> dict[str, Update]:
    """Bar Adam's laws where the second moment is the largest gradient so far, which decays, under Adam's names.

    max(β2·v, |g|) leaves exactly β2·v in many elements, although their gradients changed exp_avg. Squares that are
    averaged grow wherever exp_avg changes.
    """
    known = [
        (fqn, roles)
        for fqn, roles in pair.shared()
        if fqn in updates
        and {"exp_avg", "exp_avg_sq"} <= roles.keys()
        and updates[fqn].betas is not None
        and updates[fqn].k > 0
        and not updates[fqn].bars("transition")
    ]
    seen = hit = 0
    for fqn, roles in known[:: max(len(known) // MAXIMA, 1)]:
        betas, k = updates[fqn].betas or (0.0, 0.0), updates[fqn].k
        try:
            m_a, m_b, v_a, v_b = (
                sampled(side.tensor(at), spread(side.shape(at), SAMPLED), SAMPLED)
                for role in ("exp_avg", "exp_avg_sq")
                for side, at in zip((pair.a, pair.b), roles[role], strict=True)
            )
        except WorkbenchError:
            continue
        if len({len(one) for one in (m_a, m_b, v_a, v_b)}) > 1:
            continue
        if k == 1:  # a gradient, or its square, that is larger would have become the second moment
            g = np.abs(m_b - betas[0] * m_a) / (1 - betas[0])
            if max(np.mean(g <= v_b * (1 + CHANGED)), np.mean(g * g <= v_b * (1 + CHANGED))) < LARGEST:
                continue
        decayed = np.abs(v_b - betas[1] ** k * v_a) <= EXACT * v_a
        hit += int(np.count_nonzero(decayed & (np.abs(m_b - betas[0] ** k * m_a) > CHANGED * np.abs(m_a)) & (v_a > 0)))
        seen += int(np.count_nonzero(v_a > 0))
    if not hit or hit < SHARE * seen:
        return dict(updates)
    barred = tuple((law, "exp_avg_sq is the largest gradient so far") for law in LAWS)
    names = {fqn for fqn, _ in known}
    return {f: replace(one, barred=(*barred, *one.barred)) if f in names else one for f, one in updates.items()}


def _without_projected(pair: Pair, updates: Mapping[str, Update]) -> dict[str, Update]:
    """Bar the laws of steps for weights whose rows turn but keep their length, as a trainer keeps it after each update.

    An update alone changes the length of a row by about its share of the direction of the row: of 100 columns, a tenth.
    """
    held = [
        (fqn, places)
        for fqn, roles in pair.shared()
        if fqn in updates and (places := roles.get("master") or roles.get("param"))
    ]
    held = [(fqn, places) for fqn, places in held if len(shape := pair.b.shape(places[1])) == 2 and min(shape) >= ROWS]
    if not any(_keeps_length(pair, places) for _, places in held[:: max(len(held) // TABLES, 1)]):
        return dict(updates)
    names = {fqn for fqn, places in held[:MOST] if _keeps_length(pair, places)}
    return _set_after(updates, names, "rows keep their length, which an update alone changes")


def _without_rounded(pair: Pair, updates: Mapping[str, Update]) -> dict[str, Update]:
    """Bar the laws of steps for float32 weights that only hold values of bfloat16, before as well as later.

    The trainer rounds them after each update, which moves them by up to half an ulp of bfloat16.
    """
    held = {
        fqn: roles["param"]
        for fqn, roles in pair.shared()
        if fqn in updates and "param" in roles and "master" not in roles
    }
    held = {
        fqn: (one, two) for fqn, (one, two) in held.items() if {pair.a.dtype(one), pair.b.dtype(two)} == {"float32"}
    }
    large = [fqn for fqn, (_, two) in held.items() if math.prod(pair.b.shape(two)) >= ROWS]
    if not large or not all(_is_bfloat16(pair, held[fqn]) for fqn in large[:: max(len(large) // TABLES, 1)]):
        return dict(updates)
    return _set_after(updates, held, "the weights are rounded to bfloat16 after each update")


def _without_zeroed(pair: Pair, updates: Mapping[str, Update]) -> dict[str, Update]:
    """Bar the laws of steps for weights with many exact zeros, before as well as later, although updates move these.

    The trainer sets them after each update: by a mask, or because they are below a threshold.
    """
    names = set()
    for fqn, roles in pair.shared():
        weight = "master" if "master" in roles else "param"
        if fqn in updates and roles.keys() >= {weight, "exp_avg"}:
            held = [[state.params[fqn][role] for role in (weight, "exp_avg")] for state in (pair.a, pair.b)]
            if all(_sets_zeros(state, *at) for state, at in zip((pair.a, pair.b), held, strict=True)):
                names.add(fqn)
    return _set_after(updates, names, "weights are set to zero after each update")


def _set_after(updates: Mapping[str, Update], names: Collection[str], why: str) -> dict[str, Update]:
    """Bar the laws of steps for weights that the trainer changes after each update."""
    barred = tuple((law, why) for law in STEPS)
    return {
        fqn: replace(one, barred=(*barred, *one.barred), set_after=True) if fqn in names else one
        for fqn, one in updates.items()
    }


def _sets_zeros(state: State, weight: int, moment: int) -> bool:
    """Return whether many elements of a weight are exactly zero whose moments are not: the last update moved these."""
    rows = spread(state.shape(weight), SAMPLED)
    try:
        w, m = (sampled(state.tensor(at), rows, SAMPLED) for at in (weight, moment))
    except WorkbenchError:
        return False
    return len(w) == len(m) and int(np.count_nonzero((w == 0) & (m != 0))) >= ROWS


def _is_bfloat16(pair: Pair, places: tuple[int, int]) -> bool:
    try:
        values = [
            np.ascontiguousarray(sampled(side.tensor(at), spread(side.shape(at), SAMPLED), SAMPLED), np.float32)
            for side, at in zip((pair.a, pair.b), places, strict=True)
        ]
    except WorkbenchError:
        return False
    # weights of 0 or 1 have no low bits, and are no proof
    return all(not (one.view(np.uint32) & 0xFFFF).any() and len(np.unique(one)) > 2 for one in values)


def _keeps_length(pair: Pair, places: tuple[int, int]) -> bool:
    try:
        a, b = (
            sampled(side.tensor(at), np.arange(ROWS)).reshape(ROWS, -1)
            for side, at in zip((pair.a, pair.b), places, strict=True)
        )
    except WorkbenchError:
        return False
    lengths = np.linalg.norm(a, axis=1), np.linalg.norm(b, axis=1)
    turned = np.linalg.norm(b - a, axis=1)
    return bool((turned > 0).all() and (np.abs(lengths[1] - lengths[0]) < LENGTH * turned).all())


def _without_idle(pair: Pair, updates: Mapping[str, Update]) -> dict[str, Update]:
    """Bar Adam's laws for embeddings whose optimizer leaves the rows of absent tokens as they are.

    Adam moves every row in every update, by its momentum. Such rows are between rows that were updated; what was not
    saved is one run of rows.
    """
    barred = tuple((law, "rows without a gradient are left as they are") for law in (*LAWS, "ruler"))
    found = dict(updates)
    for fqn, roles in pair.shared():
        known = fqn in updates and updates[fqn].k > 0 and kinds([fqn]) <= {"embed"}
        if known and {"exp_avg", "exp_avg_sq"} <= roles.keys() and _rests(pair, roles):
            found[fqn] = replace(found[fqn], barred=(*barred, *found[fqn].barred))
    return found


def _rests(pair: Pair, roles: Mapping[str, tuple[int, int]]) -> bool:
    alike = []
    for role in ("exp_avg", "exp_avg_sq"):
        one, two = (side.tensor(at) for side, at in zip((pair.a, pair.b), roles[role], strict=True))
        if (
            one.ndim != 2
            or one.shape != two.shape
            or {pair.a.dtype(roles[role][0]), pair.b.dtype(roles[role][1])} != {"float32"}
        ):
            return False  # in 16 bits, a decay of 1 - 0.999 is rounded away
        rows = spread(one.shape)
        try:
            a, b = (sampled(side, rows).reshape(-1, one.shape[1]) for side in (one, two))
        except WorkbenchError:
            return False
        alike.append(((a == b) & (a != 0)).all(axis=1))
    idle = np.flatnonzero(alike[0] & alike[1])
    return len(idle) > 2 and int(idle[-1] - idle[0]) >= len(idle) + 2  # others are between them


def _as_replayed(pair: Pair, updates: Mapping[str, Update]) -> dict[str, Update]:
    """Lift the bars of an optimizer that looks like Adam if its single update, replayed, is Adam's.

    LAMB has the same state and fields, and moves each parameter by a rate of its own. Where the update began from the
    old weights rounded to a narrower type, it is Adam's all the same.
    """
    freed = {fqn: as_adam(pair, fqn, one) for fqn, one in updates.items()}
    known = [
        (fqn, {role: tuple(zip((pair.a, pair.b), at, strict=True)) for role, at in roles.items()})
        for fqn, roles in pair.shared()
        if fqn in freed and len(freed[fqn].barred) < len(updates[fqn].barred) and updates[fqn].k == 1
    ]
    known = [(f, roles) for f, roles in known if roles.keys() >= ADAM and roles.keys() & {"master", "param"}]
    rates: dict[tuple[float, float], list[float]] = {}  # stated learning rates → those of the replayed updates
    looked = 0
    for fqn, roles in known[:: max(len(known) // MAXIMA, 1)]:
        update, weight = freed[fqn], roles["master" if "master" in roles else "param"]
        if update.lr is None or {side.dtype(at) for side, at in weight} != {"float32"}:
            continue
        rows = spread(pair.b.shape(weight[1][1]), SAMPLED)
        try:
            a, b, m, v = (
                sampled(side.tensor(at), rows, SAMPLED)
                for side, at in (*weight, roles["exp_avg"][1], roles["exp_avg_sq"][1])
            )
        except WorkbenchError:
            continue
        way = direction(update, [m, v])
        if way is None or len(way) != len(b) or len(b) < ROWS:
            continue
        looked += 1
        start = rounded(a, through) if (through := cast_before(a, b, way, update)) else a
        sums = along(start, b, way)
        rate = sums.follows({*update.decays, 0.0}, sums.noise("float32"))
        if rate is not None and update.lr[0] * (1 - REST) <= rate <= update.lr[1] * (1 + REST):
            rates.setdefault(update.lr, []).append(rate)
    alike = sum(abs(one / median(found) - 1) <= ALIKE for found in rates.values() for one in found)
    return freed if alike > FITTING * looked and alike >= ENOUGH else dict(updates)


class _Sweep(NamedTuple):
    updates: dict[str, Update]
    slots: list[TensorSlot]
    found: dict[str, PairState]
    unread: dict[str, str]
    apart: Counter[str]


def _sweep(
    pair: Pair, updates: dict[str, Update], threads: int | None, progress: Progress | None, fast: bool | None
) -> _Sweep:
    """Sum over a pair, by the laws that these updates leave."""
    updates = _without_maxima(pair, _as_replayed(pair, updates))
    updates = _without_projected(pair, _without_zeroed(pair, updates))
    updates = _without_idle(pair, _without_rounded(pair, updates))
    slots, apart = [], Counter[str]()
    for fqn, roles in pair.shared():
        if fqn not in updates:
            apart["the number of updates in between is unknown"] += 1
            continue
        sides = [{role: places[side] for role, places in roles.items()} for side in (0, 1)]
        rolling = updates[fqn].along == "momentum" and updates[fqn].k == 1
        wanted = (*ROLES, "momentum") if rolling else ROLES
        slot = _slot(fqn, (pair.a, pair.b), sides, wanted)
        weight = weight_role(slot)
        if weight == "master":  # the optimizer updates masters; weights are checked against them
            slot = _slot(fqn, (pair.a, pair.b), sides, wanted[1:])
        if weight or (0, "exp_avg") in slot.tensors:
            slots.append(slot)
    found: dict[str, PairState] = {}
    unread: dict[str, str] = {}
    fold = PairFold(updates, compiled(slots, fast))
    for slot, sums in stream(slots, fold, threads=threads, progress=progress, on_error=_note(unread)):
        found[slot.fqn] = sums
    return _Sweep(updates, slots, found, unread, apart)


def _broken(found: Mapping[str, PairState]) -> set[str]:
    """Return the parameters whose moments cannot have evolved from the old ones in the updates that were assumed."""
    return {fqn for fqn, sums in found.items() if sums.floor.broken or sums.transition.broken}


def _doubted(pair: Pair, swept: _Sweep) -> set[str]:
    """Return the parameters whose moments show that they had more updates than their counters advanced by."""
    broken = _broken(swept.found)
    if may_count_anew(pair.a.facts, pair.b.facts):
        held = {fqn for fqn, sums in swept.found.items() if sums.floor.of or sums.transition.of}
        return set(swept.found) if 2 * len(broken) > len(held) else set()
    return fell_back(pair.a.facts, pair.b.facts, broken, passed(pair.a.facts, pair.b.facts))


def check_pair(
    pair: Pair, *, threads: int | None = None, progress: Progress | None = None, fast: bool | None = None
) -> PassValues:
    """Check the laws that hold between two checkpoints of a run, A the earlier one.

    Args:
        fast: use the compiled code; by default if numba is installed and there is much to read.

    Raises:
        MissingExtraError: ``fast`` is requested but numba is not installed.
    """
    swept = _sweep(pair, between(pair), threads, progress, fast)
    if doubted := _doubted(pair, swept):
        again = _sweep(pair, between(pair, doubted), threads, None, fast)
        if 2 * len(_broken(again.found)) > len(_broken(swept.found)):  # otherwise it says nothing of where they began
            swept = again
    updates, slots, found, unread, apart = swept
    _stood_still(pair, updates, slots, found)
    skipped: dict[str, Counter[str]] = {"updates": apart} if apart else {}
    for sums in found.values():
        for law, why in sums.skipped.items():
            skipped.setdefault(law, Counter())[why] += 1
    missed = _reasons(skipped, unread)
    if slots and not adams(updates, slots):
        missed["P06"] = Inapplicable(
            "no parameter has exp_avg, exp_avg_sq and known betas: only Adam moves all parameters alike"
        )
    return PassValues(
        tuple(judge_pair(pair, updates, slots, found)),
        {"updates": f"{plural(len(found), 'parameter', 'were')} compared: {pair.a.ckpt.path!r}, {pair.b.ckpt.path!r}"},
        missed,
        found,
        updates,
    )


def _stood_still(
    pair: Pair, updates: Mapping[str, Update], slots: Sequence[TensorSlot], found: Mapping[str, PairState]
) -> None:
    """Count the elements of Adam's moments that changed without an update, as others' had: of frozen parameters."""
    counts = pair.a.facts.steps.by_name, pair.b.facts.steps.by_name
    if not any(update.k for update in updates.values()):
        return
    for slot in slots:
        sums = found.get(slot.fqn)
        own = [one.get(slot.fqn) for one in counts]
        still = sums is not None and sums.count == sums.unchanged and own[0] is not None and own[0] == own[1]
        sides = [slot.tensors.get((side, role)) for role in sorted(ADAM) for side in (0, 1)]
        if sums is None or not still or updates[slot.fqn].k or updates[slot.fqn].bars("floor") or None in sides:
            continue
        try:
            m_a, m_b, v_a, v_b = (sampled(one, spread(one.shape)) for one in sides if one is not None)
        except WorkbenchError:
            continue  # reported by the pass
        changed = (m_a != m_b) | (v_a != v_b)
        sums.transition = Hits(int(np.count_nonzero(changed)), len(changed), math.inf, int(changed.argmax()))


def _slot(fqn: str, sides: Sequence[State], roles: Sequence[Mapping[str, int]], wanted: Sequence[str]) -> TensorSlot:
    """Return the tensors of one shape: the moments' shape, which the updated weights share, or else the weights'."""
    positions = {}
    shape: tuple[int, ...] | None = None
    for side, (state, held) in enumerate(zip(sides, roles, strict=True)):
        shape = shape or next((state.shape(held[r]) for r in ("exp_avg", "master", "param") if r in held), None)
        for role in wanted:
            if role in held and state.shape(held[role]) == shape:
                positions[side, role] = held[role]
    return TensorSlot(fqn, StoredTensors([state.ckpt for state in sides], positions))


def _note(unread: dict[str, str]) -> Any:
    def note(fqn: str, error: WorkbenchError) -> None:
        unread[fqn] = str(error)

    return note


def _reasons(skipped: Mapping[str, Counter[str]], unread: Mapping[str, str]) -> dict[str, str]:
    words = {}
    for law, why in skipped.items():
        if why:
            words[law] = "; ".join(f"{reason} ({plural(count, 'parameter')})" for reason, count in why.most_common(3))
    if unread:
        fqn, reason = next(iter(unread.items()))
        words["values"] = f"{plural(len(unread), 'parameter')} could not be read; the first is {fqn!r}: {reason}"
    return words
