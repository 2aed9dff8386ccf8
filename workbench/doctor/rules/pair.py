"""Rules on the values of two checkpoints of a run, k updates apart: the P rules of the catalogue."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from statistics import median

import numpy as np

from workbench.analysis.patterns.rounding import rounded
from workbench.core.arrays import Array
from workbench.core.words import plural
from workbench.doctor.facts.evidence import Pair, State
from workbench.doctor.laws.bounds import ROUNDINGS, UNITS
from workbench.doctor.laws.exact import BLUNT, REST, Replay, ruler
from workbench.doctor.ledger.roles import MOMENTS
from workbench.doctor.ledger.sign import RULES, Rule, Sign, register
from workbench.doctor.origins.became import CASTS, grid_of
from workbench.doctor.origins.index import row_shape
from workbench.doctor.origins.samples import sampled, spread
from workbench.doctor.origins.tags import followers
from workbench.doctor.passes.blocks import TensorSlot
from workbench.doctor.passes.pair import PairState, Update, weight_role
from workbench.doctor.passes.updates import passed
from workbench.doctor.rules.stated import scaled
from workbench.errors import WorkbenchError
from workbench.names.roles import adapter_of

LAWS = "workbench.doctor.laws"
RULERS = 16  #: silent elements from which a ruler is read
TURNED = 0.9  #: cosine between the old and the new weight within 50 updates (catalogue, 3.2)
TURNED_FAR = 0.2  #: the same if the optimizer's laws are unknown
TURNED_ONCE, WIDE = 0.8, 64  #: the same after one update, of weights with that many elements
NUDGED = 0.98  #: the same after one update, of weights that moved far beyond the others
FEW = 5  #: least ratio of the updates before to those in between from which steady growth is small
LATE = 20  #: updates before, from which one update does not turn weights that far
SCALED = 1.25  #: factor of a weight's size that no few updates change it by
BY_RATE = 0.8  #: share of the weights that a fresh optimizer's update moves by the learning rate itself, at least
ENOUGH = 4  #: parameters
LEAST, MOVES = 8, 1e-5  #: elements; relative size of an update that is more than rounding
LITTLE = 0.01  #: least share of the learning rate by which updates move a weight, in the root mean square
STILL = 0.95  #: cosine of most weights below which a turned weight is not unusual
YOUNG = 3  #: least ratio of the updates before to those in between; younger weights may still turn far
APART = 4.0  #: times the median parameter's change (catalogue, 3.2)
SLIGHT = 1.5  #: factor within which a trainer may schedule the weight decay
STEADY = 5  #: updates from which steady gradients move a weight ∝ k, and changing ones ∝ √k
SOON = 50  #: updates
LIST = 100
BOUNDED = 16  #: other weights in which the bounds of one are searched
MOST = 0.9  #: share of the parameters

register(
    Rule("P03", "second moments fell too fast", ("B1", "B5", "B3", "G6"), "pair", "v_B ≥ β2^k·v_A",
         "exact, with rounding", LAWS, "error", "beta2 was lower and no file stores it",
         "load exp_avg_sq of the checkpoint that was resumed from",
         looked=lambda one: one.floor.of),
    Rule("P04", "moments that did not evolve from the older ones", ("B1", "B6", "B5", "E13", "G6"), "pair",
         "(m_B − β1^k·m_A)² ≤ K_k·(v_B − β2^k·v_A)", "exact, with rounding", LAWS, "error",
         "other betas in between, or a wrong number of updates", "load the optimizer's state of the same parameter",
         looked=lambda one: one.transition.of),
    Rule("P05", "weights the optimizer cannot have reached", ("D2", "A2", "E1", "E9", "F4", "G1"), "pair",
         "|W_B − W_A·Π(1−lr·λ)| ≤ √K·Σ lr·f", "exact, with rounding", LAWS, "error",
         "a learning rate in between that is larger than any stated one",
         "load the weights (and masters) from the same save",
         looked=lambda one: one.reach.of),
    Rule("P06", "one parameter changed much more", ("A2", "E3", "G1"), "pair", "Adam changes all parameters alike",
         f"RMS change > {APART:g}·max(1, √(k/{STEADY})) times the median parameter's, k ≤ {SOON}",
         "catalogue, 3.2", "warn",
         "if reach was not checked: a separate learning rate; parameters that only just got gradients",
         "check that parameter's reach"),
    Rule("P08", "weights that point in another direction", ("E1", "E2", "E4", "A2", "C2"), "pair",
         "a few updates turn a weight only a little, and move a norm little of the way back to where it began",
         f"cosine < {TURNED} within {SOON} updates; less than half left of how far norms were from 1", "catalogue, 3.2",
         "warn", "very early in training",
         "compare the rows of both: a permutation has a cosine near 1 row by row",
         looked=lambda one: one.count),
    Rule("P09", "numbers were lost", ("G1", "G3", "G9"), "pair", "finite values stay finite", "exact", "IEEE 754",
         "error", "none", "go back to the older checkpoint and check its moments",
         looked=lambda one: one.count),
    Rule("P10", "weights that do not change", ("D6",), "pair",
         "an update changes a weight by more than half an ulp",
         "more than half of the weights unchanged, in 16 bits", "catalogue, 3.4", "warn", "frozen parameters",
         "keep fp32 masters, or round stochastically"),
    Rule("P11", "untouched rows disagree", ("B7", "C1", "D2", "G5"), "pair",
         "without a gradient, W_B = W_A·Π(1−lr·λ) with one factor for all", "exact, with rounding", LAWS, "error",
         "code that changes weights outside the updates (a question, unless they were rounded)",
         "compare weight decay and its groups with the older checkpoint's",
         looked=lambda one: one.ruler.count),
    Rule("P12", "the update cannot be replayed", ("A2", "D2", "B7", "C5", "E1"), "pair",
         "k = 1: W_A − W_B = lr·(m̂/(√v̂+ε) + λ·W_A)", f"rest > max({REST:g}, 4u·‖W‖/‖ΔW‖)", LAWS, "error",
         "another optimizer, or code that changes weights after its step",
         "load weights and masters from the same save",
         looked=lambda one: one.replay.count),
    Rule("P13", "a learning rate other than the stated one", ("C1", "C2", "B8", "H1"), "pair",
         "k = 1: the replayed lr is the stated one",
         f"outside the stated range by more than {REST:g}", LAWS, "error", "parameters with their own lr scale",
         "rebuild the schedule after the optimizer is loaded",
         looked=lambda one: one.replay.count),
    Rule("P14", "a fresh optimizer's first update", ("B1",), "pair",
         "only Adam's first update changes weights by lr itself",
         f"more than {BY_RATE:.0%} of the weights changed by lr ± 5 %", "catalogue, B1", "error",
         "sign-based optimizers", "load the optimizer's state",
         looked=lambda one: one.moved_of),
    Rule("N13", "second moments that do not change", ("D5",), "pair", "each update decays v by (1−β2) of itself",
         "more than half equal bit for bit, in 16 bits", "catalogue, D5", "warn", "no update in between",
         "keep exp_avg_sq in float32"),
    Rule("P36", "parameters that did not change", ("G6", "G7", "H1"), "pair",
         "an update multiplies exp_avg_sq by β2 at least",
         "second moments or counters are equal, and those of other parameters or the weights not", LAWS, "error",
         "frozen parameters (a warning, unless their own counters advanced)",
         "check which buffers the saver copies from"),
    Rule("N25", "an older save under a new step", ("G7", "C9"), "pair", "updates change weights", "every weight equal",
         "catalogue, G7", "warn", "a learning rate of 0, or every update skipped", "check what the saver wrote",
         looked=lambda one: one.count),
)  # fmt: skip


def judge_pair(
    pair: Pair, updates: Mapping[str, Update], slots: Sequence[TensorSlot], found: Mapping[str, PairState]
) -> Iterator[Sign]:
    """Yield the signs of a pair's sums."""
    types = {slot.fqn: slot.dtype((1, weight_role(slot) or "")) or "" for slot in slots}
    right = {fqn for fqn, sums in found.items() if replayed(updates[fqn], sums, types[fqn])}
    yield from _laws(updates, found, right)
    rates = [state.facts.lr for state in (pair.a, pair.b)]
    yield from _counts(pair, updates, found, types, all(lr is not None and lr > 0 for lr in rates))
    moved = {f: sums for f, sums in found.items() if f not in right}
    # Rprop's elements have step sizes of their own, which may grow in each update; numbered state has no weight's name
    free = set(found) if any("step_size" in roles for roles in pair.b.params.values()) else set()
    yield from _sizes(updates, moved, adams(updates, slots) - right, free, pair.a.facts.step or 0)
    yield from _rulers(updates, found, slots)
    yield from _replays(updates, {f: sums for f, sums in found.items() if f not in pair.newly_trained}, types)


def adams(updates: Mapping[str, Update], slots: Sequence[TensorSlot]) -> set[str]:
    """Return the parameters that Adam updates: both moments are stored and its betas are known."""
    moments = ("exp_avg", "exp_avg_sq")
    return {
        slot.fqn
        for slot in slots
        if any(all((side, role) in slot.tensors for role in moments) for side in (0, 1))
        and updates[slot.fqn].betas is not None
        and not updates[slot.fqn].bars("reach")
    }


def _laws(updates: Mapping[str, Update], found: Mapping[str, PairState], right: set[str]) -> Iterator[Sign]:
    """Yield the signs of broken laws; ``right``: a single update leads to these weights, however far it moves them."""
    texts = {
        "P03": (
            "floor",
            "in {0:,} of {1:,} elements exp_avg_sq fell below β2^k times its old value, which no gradient causes: {2}",
        ),
        "P04": (
            "transition",
            "exp_avg and exp_avg_sq cannot have evolved from the old ones in {0:,} of {1:,} elements: {2}",
        ),
        "P05": ("reach", "{0:,} of {1:,} elements of weights moved farther than the optimizer can move them: {2}"),
    }
    for rule, (law, text) in texts.items():
        hits = {fqn: getattr(sums, law) for fqn, sums in found.items() if getattr(sums, law).broken}
        if rule == "P05":
            hits = {fqn: one for fqn, one in hits.items() if fqn not in right}
            if hits.keys() <= followers(found):  # no optimizer holds them
                text = (
                    "{0:,} of {1:,} elements of weights moved farther than an optimizer with the stored settings does, "
                    "all of them in networks that follow others: {2}"
                )
        if not hits:
            continue
        count, of = sum(one.broken for one in hits.values()), sum(getattr(sums, law).of for sums in found.values())
        worst = max(one.worst for one in hits.values())
        evidence = {
            "elements": count,
            "looked_at": of,
            "worst": worst if math.isfinite(worst) else None,
            "first": {fqn: one.at for fqn, one in list(hits.items())[:8]},
            "k": sorted({updates[fqn].k for fqn in hits})[:8],
        }
        sure = rule != "P05" or any(updates[fqn].certain for fqn in hits)
        message = text.format(count, of, _names(list(hits)))
        if not sure:
            message += "; the learning rate in between is not stored"
        looked = sum(getattr(sums, law).of > 0 for sums in found.values())
        yield RULES[rule].sign(
            message, evidence, list(hits)[:LIST], severity=None if sure else "warn", hit=len(hits), of=looked
        )


def _counts(
    pair: Pair,
    updates: Mapping[str, Update],
    found: Mapping[str, PairState],
    types: Mapping[str, str],
    going_on: bool,
) -> Iterator[Sign]:
    """Yield signs from the counts of a pair; ``going_on``: both state a learning rate above 0."""
    lost = {fqn: sums.nan for fqn, sums in found.items() if sums.nan}
    if lost:
        count = sum(lost.values())
        were, are = ("was", "is") if count == 1 else ("were", "are")
        text = f"{plural(count, 'element')} of {_names(list(lost))} {were} finite and no longer {are}"
        yield _sign("P09", list(lost), text, len(found), count=count)
    # norm vectors alone show little, so shares are over all parameters
    due = {fqn: updates[fqn].k + max(updates[fqn].lag or 0, 0) for fqn in found}  # as the trainer counts
    going = {fqn: sums for fqn, sums in found.items() if due[fqn] > 0 and sums.count}
    # weights without optimizer state (frozen), and those made from masters, are not evidence
    mastered = any("master" in roles for roles in pair.b.params.values())
    half = {
        fqn: sums
        for fqn, sums in going.items()
        if types[fqn] in ("bfloat16", "float16") and math.isfinite(sums.ratio) and updates[fqn].k and not mastered
    }
    still, of = sum(sums.unchanged for sums in half.values()), sum(sums.count for sums in half.values())
    if of and still > of / 2:
        yield _sign(
            "P10",
            list(half),
            f"{still / of:.0%} of the elements of weights did not change",
            len(found),
            share=still / of,
        )
    # if everything is equal bit for bit, nothing was trained; weights without optimizer state are not evidence
    trained = {fqn: sums for fqn, sums in going.items() if math.isfinite(sums.ratio)}
    due_to_change = pair.due(trained or going)
    trained = {fqn: sums for fqn, sums in (trained or going).items() if fqn in due_to_change}
    if trained and all(sums.unchanged == sums.count for sums in trained.values()):
        joined = [sums for sums in trained.values() if math.isfinite(sums.ratio)]
        moved = any(sums.ratio != 1 for sums in joined)  # an update multiplies some second moment by less than 1
        skipped = max(due[fqn] for fqn in trained) == 1 and not any(updates[fqn].k for fqn in trained)
        skipped = skipped and (any(scaled(state.facts) for state in (pair.a, pair.b)) or _of_batches(pair.a))
        most, steps = passed(pair.a.facts, pair.b.facts), max(due[fqn] for fqn in trained)
        steps = steps if most is None else min(steps, most)  # where counters stand still, their lag is counted twice
        why = "although their moments changed" if moved else f"although the trainer made {plural(steps, 'step')}"
        equal = sum(sums.unchanged == sums.count for sums in going.values())
        text = f"{equal:,} of {plural(len(going), 'parameter')} are equal bit for bit, {why}"
        due_to_move = going_on and steps >= 1 and all(types[fqn] == "float32" for fqn in trained)
        added = any(adapter_of(fqn) for fqn in pair.b.params.keys() - pair.a.params.keys())  # these are trained instead
        counts = [state.facts.steps.by_name for state in (pair.a, pair.b)]
        added |= 0 < len(counts[0]) < len(counts[1]) and counts[0].items() <= counts[1].items()
        meant = skipped or added or (moved and not due_to_move)
        yield _sign("N25", list(trained), text, len(trained), severity="info" if meant else None)
        return
    yield from _still(pair, updates, trained, types)
    yield from _repeated(updates, trained)
    moments = {fqn: sums for fqn, sums in half.items() if sums.count and sums.still > sums.count / 2}
    if moments:
        text = f"exp_avg_sq of {_names(list(moments))} did not change in most elements"
        yield _sign("N13", list(moments), text, len(found))


def _of_batches(state: State) -> bool:
    """Return whether the trainer counts micro-batches, and an update takes several."""
    usual, step = state.facts.steps.usual, state.facts.step
    return usual is not None and step is not None and 0 < usual <= 2 * step / 3


def _still(
    pair: Pair, updates: Mapping[str, Update], trained: Mapping[str, PairState], types: Mapping[str, str]
) -> Iterator[Sign]:
    """Yield signs of parameters that did not move at all, although the updates reached others."""
    # their moments say how far the update moves them
    rates = {updates[fqn].lr for fqn, sums in trained.items() if 2 * sums.unchanged < sums.count}
    kept = [f for f, sums in trained.items() if types[f] == "float32" and _should_move(updates[f], sums, rates)]
    kept = [fqn for fqn in kept if _state_changed(pair, fqn)]  # SGD passes over what has no gradient
    others = [fqn for fqn in trained if fqn not in kept][:BOUNDED]
    kept = [fqn for fqn in kept if not _at_bounds(pair, fqn, others)]
    idle = [group for group in pair.b.facts.groups if group.lr == 0 and not group.initial_lr]
    kept = [] if any(group.params is None for group in idle) else kept  # it is not known which they are
    kept = [fqn for fqn in kept if not any(fqn in (group.params or ()) for group in idle)]
    if kept and 2 * len(kept) < len(trained):
        text = f"weights of {_names(kept)} are equal bit for bit, although their optimizer state changed"
        yield _sign("P36", kept, text, len(trained), None, kind="kept")
    wide = {fqn: sums for fqn, sums in trained.items() if types[fqn] == "float32" and sums.floor.of}
    stood = [f for f, sums in wide.items() if sums.unchanged == sums.count and sums.still and sums.ratio == 1]
    stood = [fqn for fqn in stood if updates[fqn].k]
    if not stood or len(stood) == len(wide):
        return
    facts = pair.b.facts
    counted = [fqn for fqn in stood if updates[fqn].lag == 0 and fqn in facts.steps.by_name]
    counted = [f for f in counted if (group := facts.group_of(f)) is None or group.step is None]  # a group's counts all
    sure = len(counted) == len(stood)
    text = f"weights and second moments of {_names(stood)} are equal bit for bit"
    text += ", although their own counters advanced" if sure else ": were they frozen?"
    yield _sign("P36", stood, text, len(wide), None if sure else "warn", kind="counted" if sure else "frozen")


def _state_changed(pair: Pair, fqn: str) -> bool:
    """Return whether the optimizer's state of a parameter differs, or is in one of the two alone."""
    mine, theirs = pair.a.params.get(fqn, {}), pair.b.params[fqn]
    held = [role for role in MOMENTS if role in mine and role in theirs]
    for role in held:
        sides = pair.a.tensor(mine[role]), pair.b.tensor(theirs[role])
        try:
            one, two = (sampled(side, spread(tuple(side.shape))) for side in sides)
        except WorkbenchError:
            return False  # no equality was measured
        if one.shape != two.shape or (one != two).any():
            return True
    return not held


def _at_bounds(pair: Pair, fqn: str, others: Sequence[str]) -> bool:
    """Return whether a weight is at bounds: it has one or two values, which others do not exceed but reach."""
    ends = np.unique(_values(pair.b, fqn))
    ranges = [values for other in others if len(values := _values(pair.b, other))]
    reached = {float(edge) for values in ranges for edge in (values.min(), values.max())}
    return 0 < len(ends) <= 2 and set(ends.tolist()) <= reached


def _values(state: State, fqn: str) -> Array:
    """Return a weight's values, a sample of a large one; none if it cannot be read."""
    at = state.params[fqn].get("param")
    try:
        return np.empty(0) if at is None else sampled(state.tensor(at), spread(state.shape(at)))
    except WorkbenchError:
        return np.empty(0)


def _should_move(update: Update, sums: PairState, rates: Collection[object]) -> bool:
    """Return whether no element moved, not all being zero, although updates move them by more than rounding.

    How far a single update moves them follows from its moments. Several updates whose gradients changed the second
    moments are assumed to move them by :data:`LITTLE` of the learning rate or more.

    Args:
        rates: bounds of the learning rates of parameters that did move.
    """
    if sums.unchanged < sums.count or sums.count < LEAST or update.lr is None or sums.aa <= 0:
        return False
    if update.k > 1 and sums.floor.of and sums.ratio != 1:
        return update.lr in rates and update.lr[1] * LITTLE * math.sqrt(sums.count) > MOVES * math.sqrt(sums.aa)
    return update.lr[0] * math.sqrt(sums.replay.uu) > MOVES * math.sqrt(sums.replay.ww)


def _repeated(updates: Mapping[str, Update], trained: Mapping[str, PairState]) -> Iterator[Sign]:
    """Yield a sign if weights moved although their counters, or their second moments bit for bit, are the old ones."""
    late = {fqn for fqn in trained if not updates[fqn].k and (updates[fqn].lag or 0) > 0}
    moved = [
        f for f, sums in trained.items() if sums.unchanged < sums.count and (math.isfinite(sums.ratio) or f in late)
    ]
    same = [fqn for fqn in moved if trained[fqn].ratio == 1 and 2 * trained[fqn].still > trained[fqn].count]
    behind = [fqn for fqn in moved if fqn in late]
    what = "second moments are equal bit for bit" if same else "counters did not advance"
    same = same or behind
    if behind or len(same) >= MOST * max(len(moved), 1):
        text = f"the weights of {plural(len(same), 'parameter')} changed; their {what}"
        sure = all(updates[fqn].betas is not None and not updates[fqn].bars("floor") for fqn in same)
        yield _sign("P36", same, text, len(moved), None if sure else "warn", kind="repeated")


def _sizes(
    updates: Mapping[str, Update], found: Mapping[str, PairState], alike: set[str], free: set[str], step: int
) -> Iterator[Sign]:
    soon = {fqn: sums for fqn, sums in found.items() if 0 < updates[fqn].k <= SOON and sums.count >= 8}
    # the updates of other optimizers are unknown
    known = {fqn for fqn in soon if not updates[fqn].bars("reach") and updates[fqn].most is not None}
    least = {fqn: TURNED if fqn in known else TURNED_FAR for fqn in soon}
    least |= {f: TURNED_ONCE for f, sums in soon.items() if updates[f].k == 1 and f not in known and sums.count >= WIDE}
    turned = {fqn: c for fqn, sums in soon.items() if (c := sums.cosine) is not None and c < least[fqn]}
    turned = {fqn: c for fqn, c in turned.items() if not _may_turn(updates[fqn], found[fqn])}
    turned |= {
        fqn: found[fqn].cosine or 0.0 for fqn in soon if fqn not in known and _is_scaled(updates[fqn], found[fqn])
    }
    unknown = [c for fqn in soon if fqn not in known and (c := found[fqn].cosine) is not None]
    if unknown and TURNED_FAR <= median(unknown) < STILL:  # that optimizer turns many weights
        turned = {
            f: c for f, c in turned.items() if f in known or (updates[f].k == 1 and (updates[f].before or step) >= LATE)
        }
    young = {fqn for fqn in turned if fqn not in known and YOUNG * updates[fqn].k > (updates[fqn].before or math.inf)}
    young = {fqn for fqn in young if not _is_redrawn(found[fqn])}
    turned = {fqn: c for fqn, c in turned.items() if fqn not in young} | _alone(updates, soon, known | free)
    if turned:
        lowest = min(turned.values())
        text = (
            f"the direction of {_names(list(turned))} changed: cosine similarity to the old values down to {lowest:.3f}"
        )
        yield _sign("P08", list(turned), text, len(soon), cosine=lowest)
    # a parameter within its reach is lawful, however much more it changed than others
    moved = {fqn: sums.moved for fqn, sums in soon.items() if sums.moved > 0 and fqn in alike}
    lawful = {fqn for fqn in moved if found[fqn].reach.of and not found[fqn].reach.broken}
    usual = median(moved.values()) if len(moved) >= 5 else math.inf
    far = {fqn: size for fqn, size in moved.items() if size > _room(updates[fqn]) * usual}
    apart = {fqn: size / usual for fqn, size in far.items() if fqn not in lawful}
    if apart:
        most = max(apart.values())
        text = f"{_names(list(apart))} changed up to {most:.1f} times as much as the median parameter"
        yield _sign("P06", list(apart), text, len(moved), most=most)


def _is_redrawn(sums: PairState) -> bool:
    """Return whether a weight has nothing of the old one but its size: what began at zero grows while it turns."""
    alike = sums.aa > 0 and 1 / SCALED < math.sqrt(sums.bb / sums.aa) < SCALED
    return alike and sums.count >= WIDE and (sums.cosine or 1.0) < TURNED_FAR


def _alone(updates: Mapping[str, Update], soon: Mapping[str, PairState], known: Collection[str]) -> dict[str, float]:
    """Return the cosines of weights that turned, and moved far beyond the others, whatever their optimizer is."""
    moved = [sums.moved for sums in soon.values() if sums.moved > 0]
    usual = median(moved) if len(moved) >= ENOUGH else math.inf
    wide = {f: one for f, one in soon.items() if one.count >= WIDE and not (f in known or updates[f].set_after)}
    far = {f: c for f, one in wide.items() if one.moved > _room(updates[f]) * usual and (c := one.cosine) is not None}
    return {f: c for f, c in far.items() if c < (NUDGED if updates[f].k == 1 else TURNED)}


def _room(update: Update) -> float:
    """Return how many times as far as the median weight others move."""
    return APART * max(1.0, math.sqrt(update.k / STEADY))


def _is_scaled(update: Update, sums: PairState) -> bool:
    """Return whether a weight is a multiple of the old one, and little else; decay alone may shrink it a little."""
    early = update.k > 1 and FEW * update.k > (update.before or 0)  # what begins at 0 grows in proportion
    if sums.count < WIDE or sums.aa <= 0 or early:
        return False
    scale = sums.ab / sums.aa
    rest, least = sums.bb - scale * sums.ab, (update.factors[0] if update.lr is not None else 1.0)
    return not least / SCALED <= scale <= SCALED and 16 * rest < sums.dd


def _may_turn(update: Update, sums: PairState) -> bool:
    """Return whether half of the optimizer's reach can turn a weight that far: sin(angle) is up to moved/size."""
    size = math.sqrt(sums.aa / sums.count)
    return update.most is not None and update.most / 2 > size * math.sqrt(1 - TURNED**2)


def _rulers(
    updates: Mapping[str, Update], found: Mapping[str, PairState], slots: Sequence[TensorSlot]
) -> Iterator[Sign]:
    uneven, outside, measured, of = [], [], {}, 0
    for fqn, sums in found.items():
        slope, update = sums.ruler.slope, updates[fqn]
        if sums.ruler.count < RULERS or slope is None or sums.unchanged == sums.count:
            continue  # parameters that the optimizer skips do not decay either
        of += 1
        slack = ROUNDINGS * UNITS["float32"] * update.k + 1e-7
        if sums.ruler.rest > slack:
            uneven.append(fqn)
            continue
        low, high = update.factors
        measured[fqn] = 1 - slope
        if update.certain and update.decays and not low - slack <= slope <= high + slack:
            outside.append(fqn)
    if uneven:
        text = f"weights of {_names(uneven)} that no gradient reached did not all shrink by the same factor"
        held = {slot.fqn: slot for slot in slots}
        through = {fqn: kind for fqn in uneven[:LIST] if (kind := _through(held[fqn], updates[fqn].k))}
        kinds = sorted(set(through.values()))
        if through:
            which = "they" if len(through) == len(uneven) else f"those of {_names(list(through))}"
            text += f"; {which} were rounded to {' or '.join(kinds)} before they shrank"
        yield _sign("P11", uneven, text, of, even=False, through=kinds)
    if outside:
        shrink, (low, high) = measured[outside[0]], updates[outside[0]].factors
        change = f"shrank by {shrink:.3e}" if shrink >= 0 else f"grew by {-shrink:.3e}"
        text = (
            f"weights of {_names(outside)} that no gradient reached {change}, "
            f"but lr and weight decay allow a shrinkage of {1 - high:.3e} to {1 - low:.3e}"
        )
        # weights with gradients also moved less than the stated learning rate allows
        reaches = {fqn: update.lr[1] * update.k for fqn in outside if (update := updates[fqn]).lr is not None}
        paces = [found[fqn].moved / most for fqn, most in reaches.items() if most > 0]
        slow = bool(paces) and 0 < shrink < 1 - high and 2 * median(paces) <= shrink / (1 - high)
        yield _sign("P11", outside, text, of, even=True, shrink=shrink, allowed=[1 - high, 1 - low], slow=slow)


@np.errstate(all="ignore")  # wide numbers overflow in narrow types
def _through(slot: TensorSlot, k: int) -> str:
    """Return the type to which all weights that no gradient reached were rounded before they shrank; empty if none."""
    states = [(side, role) for side in (0, 1) for role in ("exp_avg", "exp_avg_sq")]
    weights = [(side, weight_role(slot) or "") for side in (0, 1)]
    try:
        shape = slot.tensors[weights[0]].shape
        rows = spread(shape)
        silent = np.all([sampled(slot.tensors[name], rows) == 0 for name in states], axis=0)
        a, b = (sampled(slot.tensors[name], rows) for name in weights)
    except WorkbenchError:
        return ""
    slack = ROUNDINGS * UNITS["float32"] * k + 1e-7
    for kind in CASTS:
        line = ruler(rounded(a, kind), b, silent)
        if line.count >= RULERS and line.slope is not None and line.rest <= slack:
            return kind
    slope, width = ruler(a, b, silent).slope, row_shape(shape)[1]
    if not slope or width < RULERS or len(a) % width:
        return ""
    whole = np.repeat(silent.reshape(-1, width).all(1), width)  # rows with a scale of their own
    return (grid_of(a[whole], b[whole] / slope, width) if whole.any() else None) or ""


def _replays(updates: Mapping[str, Update], found: Mapping[str, PairState], types: Mapping[str, str]) -> Iterator[Sign]:
    failed: dict[str, float] = {}
    rates: dict[str, float] = {}
    off, changed, of = {}, {}, 0
    for fqn, sums in found.items():
        update, noise = updates[fqn], sums.replay.noise(types[fqn]) if types[fqn] in UNITS else math.inf
        if not sums.replay.count or noise > BLUNT:
            continue
        decays: list[float | None] = list(dict.fromkeys(update.decays)) or [None]
        if update.decoupled is not True and 0.0 not in decays:
            decays.append(0.0)  # Adam's L2 is part of the gradient
        fits = {decay: fit for decay in decays if (fit := sums.replay.fit(decay)) is not None}
        if not fits:
            continue
        of += 1
        best = min(fits, key=lambda decay: fits[decay][2])
        lr, _, rest = fits[best]
        free = sums.replay.fit(None) if update.decoupled is not False else None
        if rest > max(REST, noise) and free is not None and _of_own_size(update, sums.replay, noise):
            off[fqn] = free[0]
            continue
        if rest > max(REST, noise) and free is not None and free[2] <= max(REST, noise) and -REST <= free[1] < 1:
            changed[fqn] = (decays[0] or 0.0, max(float(f"{free[1]:.3g}"), 0.0))  # with a decay that is not stated
            continue
        if rest > max(REST, noise):
            failed[fqn] = rest
            continue
        if update.along == "momentum" and abs(lr - 1) <= REST:
            continue  # the momentum holds the learning rate, as TensorFlow's does
        rates[fqn] = lr
        if update.stated is not None and best == update.stated[1] and max(update.stated) > SLIGHT * min(update.stated):
            changed[fqn] = update.stated
        tolerance = REST + 3 * rest
        if update.lr is not None and not update.lr[0] * (1 - tolerance) <= lr <= update.lr[1] * (1 + tolerance):
            off[fqn] = lr
    if failed:
        most = max(failed.values())
        share = f"up to {100 * most:.3g}% of the change is left over"
        text = f"the moments do not explain the update of {_names(list(failed))}: {share}"
        yield _sign("P12", list(failed), text, of, rest=most)
    if changed:
        old, new = next(iter(changed.values()))
        by_change: dict[tuple[float, float], list[str]] = {}
        for fqn, change in changed.items():
            by_change.setdefault(change, []).append(fqn)
        parts = [f"{_names(names)} decayed by {b} and not by {a} as before" for (a, b), names in by_change.items()]
        text = f"the replayed update shows that {'; '.join(parts[:2])}"
        text += f"; {plural(len(parts) - 2, 'further change')}" if len(parts) > 2 else ""
        yield _sign("P12", list(changed), text, of, "warn", old=old, new=new)
    off = {fqn: lr for fqn, lr in off.items() if found[fqn].replay.count > 1}  # one number fits any rate
    if off:
        value = median(off.values())
        low, high = updates[next(iter(off))].lr or (0.0, 0.0)
        sure = all(updates[fqn].certain for fqn in off)
        made = f"with lr {value:.4g}" if value >= 0 else "against the direction of the moments"
        text = f"the update was made {made} in {_names(list(off))}; the stated lr is {low:.4g} to {high:.4g}"
        by_stated: dict[object, list[str]] = {}
        for fqn, lr in off.items():
            by_stated.setdefault(updates[fqn].lr, []).append(f"{lr:.2g}")
        every = max(by_stated.values(), key=len)
        # where parameters of one stated lr have each their own, the optimizer scales its steps
        own = value > 0 and len(every) >= max(ENOUGH, of / 2) and 2 * len(set(every)) > len(every)
        severity = "info" if own else None if sure else "warn"
        yield _sign("P13", list(off), text, of, severity, lr=value, stated=[low, high])
    of_all = {fqn: sums for fqn, sums in found.items() if sums.moved_of and (updates[fqn].before or 0) > 0}
    # steady gradients move weights by lr too, with moments that continue
    of_all = {f: one for f, one in of_all.items() if not one.transition.of or one.transition.broken or one.floor.broken}
    same, total = sum(s.same for s in of_all.values()), sum(s.moved_of for s in of_all.values())
    if total and same > BY_RATE * total:
        sure = all(updates[fqn].certain for fqn in of_all)
        text = (
            f"{same / total:.0%} of the weights changed by the learning rate itself, as in an optimizer's first update"
        )
        yield _sign("P14", list(of_all), text, len(of_all), None if sure else "warn", share=same / total)


def replayed(update: Update, sums: PairState, kind: str) -> bool:
    """Return whether a single update with one of the stated decays leads from the old weights to the new ones."""
    noise = sums.replay.noise(kind) if kind in UNITS else math.inf
    if not sums.replay.count or noise > BLUNT:
        return False
    followed = sums.replay.follows({*update.decays, 0.0}, noise)
    return followed is not None or _of_own_size(update, sums.replay, noise)


def _of_own_size(update: Update, sums: Replay, noise: float) -> bool:
    """Return whether an update is a step of another size along the moments, with the decay that is stated."""
    free = sums.fit(None)
    if update.lr is None or update.decoupled is False or free is None or free[0] <= 0 or free[2] > max(REST, noise):
        return False
    shrinkages = {lr * decay for lr in update.lr for decay in update.decays}
    fits = [sums.fit(shrinkage / free[0]) for shrinkage in shrinkages]
    return any(fit is not None and fit[2] <= max(REST, noise) for fit in fits)


def _sign(rule: str, names: Sequence[str], text: str, of: int, severity: str | None = None, **evidence: object) -> Sign:
    return RULES[rule].sign(text, evidence, names[:LIST], severity=severity, hit=len(names), of=of)


def _names(names: Sequence[str]) -> str:
    more = f" and {len(names) - 2:,} more" if len(names) > 2 else ""
    return ", ".join(map(repr, names[:2])) + more
