"""Causes A and B: names that did not match, and the optimizer's state."""

from __future__ import annotations

import math
from collections.abc import Iterator, Set
from statistics import median

from workbench.core.words import plural
from workbench.doctor.causes.case import (
    GONE,
    NEARLY_ALL,
    OUTSIDE,
    RELATED,
    RESTARTED,
    SET_ANEW,
    UNLIKE,
    Case,
    Counters,
    Match,
    below_stated,
    named_in,
    where_of,
)
from workbench.doctor.causes.cause import made
from workbench.doctor.causes.damage import counters_restarted, fresh, moments_lost, second_lost, wrong_steps
from workbench.doctor.facts.counted import may_count_anew
from workbench.doctor.facts.evidence import is_numbered
from workbench.doctor.ledger.roles import BLOCK_MAXIMA, FIRST, MASTERS, MAXIMA, MOMENTS, SECOND, STATE
from workbench.doctor.ledger.rows import LedgerLeg, Status
from workbench.doctor.ledger.sign import Sign
from workbench.doctor.passes.updates import passed
from workbench.names.weights import kinds

ECHO = "an echo, saved right after the load and before any update"
NEXT = "a checkpoint one update after the resume, because that update can be replayed exactly"
WHOLE = "load all of the optimizer's state, and its param groups, from one checkpoint"
FORGOTTEN = 0.25  #: share that the old one has in a second moment, below which fresh moments look like kept ones
WILD = 5.0  #: times the reach of the updates; reached if steps are divided by far too small second moments
KIN = 0.2  #: cosine similarity to the old weights from which new ones did not begin at random
SOON = 3  #: updates after which a fresh state may have the profile of the old one
FELL = 0.02  #: share of the elements of a second moment below their floor, from which it was lost
#: Forms of moments that another tensor's are.
OF_OTHERS = ("moved", "moved.name", "moved.layer", "moved.stack", "moved.expert", "moved.gate_up", "moved.tied")
ADAM = ("exp_avg", "exp_avg_sq")
FEW_STEPS = 0.1  #: share of the weights that moved too far
SUNK = "The second moments were lost, or became far too small."
SECOND_LOST = "The second moments were lost; other state was kept."  #: for optimizers that use other names
STATES_LOST = "The state of parameters was not restored; the param groups, which count the updates, were."
RATES_EXCHANGED = "The param groups have one another's learning rates."
OWN_RATES = "build the groups by name, and restore each group's own lr and initial_lr"
OF_RATES = "the first loss is right; after that, the loss follows the learning rates"
PART_LOST = "A part of the second moments was lost."
RUNNING = ("running_mean", "running_var", "num_batches_tracked")  #: statistics of normalised inputs
OTHER_ELEMENTS = "The optimizer's state belongs to other elements than those that it is stored for."
ONE_MAP = "read the optimizer's state by the same map as the weights: order of blocks, axes, shards"
SCALED = "were all moments scaled on purpose?"
RECALIBRATED = "were the running statistics computed anew on purpose?"
ADDED = "if the run uses the new tensors, nothing; if not, leave them out of the save"
OF_ADDED = "no loss shows tensors that are only stored; new weights of the model change the first loss"
SOME_ANEW = "The optimizer state of some parameters was not restored."
PART_ANEW = "A part of the optimizer's state began anew, as copies of the weights; the moments were kept."
OF_PART = "the first loss is right; those after the optimizer next uses this state are not"
ONE_SAVE = "load all weights from one save; check what changes them after the load"
COMPARE = "save an echo right after the load, and compare these weights with the stored ones"
OF_WEIGHTS = ("P05", "P11", "P12", "P18")  #: rules on where updates can move weights
NONE_LOADED = "None of the weights were loaded: they kept their initial values."


# ---- A: names --------------------------------------------------------------------------------------------------------


def _unlike(case: Case, change: LedgerLeg) -> frozenset[str]:
    """Return the weights that keep nothing of the old ones although their stored moments are right."""
    names = change.hit(change.weights, *UNLIKE)
    other = change.hit(change.weights, "other")
    if change.whole(change.weights, change.hit(change.weights)) and case.cosine(change, other) > RELATED:
        names -= other  # all weights changed: an average, or another step's
    if names and change.leg == "train":  # only a part of a fused weight
        names |= {name for name in change.hit(change.weights, "part") if not kinds([name]) <= {"embed", "head"}}
    lost = change.hit(MOMENTS, *GONE)
    if change.whole(MOMENTS, lost):
        return frozenset(names - (change.hit(MOMENTS) - lost))  # a fresh optimizer says nothing of single weights
    return frozenset(names - change.hit(MOMENTS))


def renamed(case: Case) -> Iterator[Match]:
    for change in case.changes:
        names = _unlike(case, change)
        if change.leg == "train" and _turned_alone(case):
            continue  # it does not show where the weights come from
        if names and change.hit(change.weights, "other") and change.whole(change.weights, names):
            prefix = case.fired("N1", info=True)
            reasons = case.against(
                ("A2", prefix[0].message if prefix else ""),
                ("G7 G6 B1", case.equal(change, MOMENTS, "moments")),
                ("A3", "not all of them are norms"),
            )
            title, remedy = "", ""
            if case.evidence.before.names.weights.keys() == case.later.names.weights.keys():
                title, remedy = NONE_LOADED, "load the stored weights into the model before the optimizer is made"
            strength, losses = 1.0 if prefix else 0.8, "the loss is that of a new model" if remedy else ""
            exact = bool(prefix)
            names |= case.restarted_with(names)
            yield Match(change.leg, strength, names, exact, reasons=reasons, title=title, remedy=remedy, losses=losses)


def not_loaded(case: Case) -> Iterator[Match]:
    for change in case.changes:
        if change.hit(change.weights, "moved.trained"):
            title = "The weights are those of the copy that is not trained, such as a reference model."
            remedy = "load the trained weights, not those of the copy"
            yield Match(change.leg, 1.0, frozenset(change.hit(change.weights)), title=title, remedy=remedy)
            continue
        if anew := case.anew(change):
            title = "Some weights and their optimizer state are new."
            yield Match(change.leg, 0.99, anew | case.restarted_with(anew), question=RESTARTED, title=title)
        names = _unlike(case, change) - anew
        if not case.mastered:
            names |= _changed_some(change)  # initial values that are not constant
        whole = change.whole(change.weights, names)
        if names and change.leg == "train" and not case.mastered:  # rows without a gradient are others, too
            names |= {n for one in case.fired("P11") if not one.evidence.get("even") for n in one.tensors}
        if not names or (kinds(names) == {"norm"} and _initial(change, names)):
            continue
        large = {name for name in change.seen(*change.weights) if kinds([name]) != {"norm"}}
        if change.leg == "train" and case.mastered and large <= change.hit(change.weights):
            continue  # if weights are made from masters, masters of another run look the same (D2)
        reasons = case.against(
            ("B1 G6 G7 B6", case.equal(change, MOMENTS, "moments", names)), ("E1 E9 F4", _cosines(change, names))
        )
        strength = 0.7 if whole else 0.95 if change.hit(change.weights, "other") & names else 0.8
        title = question = remedy = ""
        if len(names) > 1:
            title = "Tensors were not loaded and kept their initial values."
        if not names & _unlike(case, change):
            title = "Some weights differ from the saved ones."
            question = OUTSIDE if change.leg == "train" else ""
            remedy = "" if question else ONE_SAVE
        elif change.leg == "load" and [case.numel(name) for name in names] == [1]:  # such as a temperature
            question = SET_ANEW
        elif kinds(names) == {"head"} and change.whole(MOMENTS, change.hit(MOMENTS, *GONE)):
            title, question = "The head is new.", "was it started anew on purpose, with a fresh optimizer?"
        elif change.leg == "train" and (found := _cosines_of(change, names)) and median(found) > KIN:
            title, question = "Weights moved far, and are still like the old ones.", OUTSIDE
        elif change.leg == "train" and _turned_alone(case):
            title, question = "The direction of some weights changed.", OUTSIDE
        remedy = COMPARE if question == OUTSIDE else remedy
        names |= case.restarted_with(names)
        # may be a deliberate new head
        yield Match(change.leg, strength, names, False, question, reasons, title=title, remedy=remedy)


def _turned_alone(case: Case) -> bool:
    """Return whether all that is known of the weights is that the direction of some changed."""
    return not case.fired(*OF_WEIGHTS) and not any(one.evidence.get("kind") for one in case.fired("P08"))


def _changed_some(change: LedgerLeg) -> frozenset[str]:
    """Return the changed weights if only some changed and all moments are right.
    An average or an older save would change all weights.
    """
    near = change.hit(change.weights, "near")
    if change.whole(change.weights, change.hit(change.weights), 0.9 if change.exact else NEARLY_ALL):
        return frozenset()
    alone = near and not change.hit(MOMENTS) and not change.hit(change.weights, "moved.", "part", "ratio", "zeros")
    alone = alone and len(change.hit(change.weights, "slight")) <= len(near)  # otherwise all moved a little too far
    return frozenset(near) if alone and not change.whole(change.weights, near) else frozenset()


def norms_at_one(case: Case) -> Iterator[Match]:
    for change in case.changes:
        ones = {name for name in change.hit(change.weights, "fill") if kinds([name]) == {"norm"}}
        if ones and _initial(change, ones) and not change.hit(change.weights, "other"):
            zeros = {name for name in change.hit(change.weights, "zero") if kinds([name]) == {"norm"}}
            names = frozenset(ones | {name for name in zeros if _initial(change, {name})})
            words = (
                f"all elements of {plural(len(ones), 'vector')} are 1" if change.proved(change.weights, "fill") else ""
            )
            reasons = case.against(("E12", words))
            alone = names == change.hit((*change.weights, *MASTERS, *MOMENTS))  # norms may be folded into matrices
            names |= case.restarted_with(names)
            yield Match(change.leg, 0.95, names, change.exact and alone, reasons=reasons)


def _initial(change: LedgerLeg, names: Set[str]) -> bool:
    """Return whether each of these vectors of norms became what it is in a new model: a weight 1, a bias 0."""
    biases = {name for name in names if name.endswith("bias")}
    found = [change.detail(change.weights, name).get("value") for name in names - biases]
    return biases <= change.hit(change.weights, "zero") and all(str(value) in ("1", "1.0") for value in found)


def _cosines_of(change: LedgerLeg, names: frozenset[str]) -> list[float]:
    return [c for name in names if (c := change.detail(change.weights, name).get("cosine")) is not None]


def _cosines(change: LedgerLeg, names: frozenset[str]) -> str:
    found = _cosines_of(change, names)
    return (
        f"their cosine similarity to the old values is at most {max(found):.2f}" if found and max(found) < 0.5 else ""
    )


def added(case: Case) -> Iterator[Match]:
    new = [one for one in case.fired("R01", "P02", "N3") if one.evidence.get("kind") in ("are new", "appeared")]
    new = [one for one in new if not str(one.evidence.get("roles")).endswith(MAXIMA)]  # of AMSGrad: a setting (H1)
    heads = [one for one in new if kinds(one.tensors) <= {"head"}]
    if new and not heads and case.deeper <= 0:
        question = "were tensors added to the model on purpose?"
        yield Match(case.leg, 0.8, question=question, signs=tuple(new), remedy=ADDED, losses=OF_ADDED)


def _reshaped_buffers(case: Case) -> Iterator[Match]:
    of_shape = ("have another shape", "buffers")
    shaped = [one for one in case.fired("R01", "P02") if one.evidence["kind"] in of_shape and one.causes == ("A5",)]
    if shaped:
        title, question = "Buffers have another shape.", "was their size changed on purpose?"
        remedy = "if it was not, make the model with the sizes of the checkpoint"
        rest = case.fired("R03", "R09", where="before → echo")
        rest = [one for one in rest if one.evidence.get("roles") == ["buffer"]]
        names = named_in(shaped)
        rest += [one for one in case.fired("N3") if names >= set(one.tensors)]
        yield Match(case.leg, 1.0, signs=(*shaped, *rest), title=title, question=question, remedy=remedy)


def buffers_lost(case: Case) -> Iterator[Match]:
    yield from _reshaped_buffers(case)
    for change in case.changes:
        names = frozenset(change.hit(("buffer",)))
        new = change.hit(("buffer",), "zero", "fill")  # as they are made; other values may be copies
        if new or (names and not (change.hit(change.weights) and change.hit(MOMENTS))):
            running = all(name.endswith(RUNNING) for name in names)
            question = RECALIBRATED if running and not new else ""
            yield Match(change.leg, 0.9 if names <= new else 0.6, names, question=question)
    if signs := [*case.fired("N4", "N26"), *case.refilled]:
        defined = all(one.evidence.get("kind") == "constant" for one in signs)
        title = "Buffers that the model's config defines changed." if defined else ""
        k = passed(case.evidence.before.facts, case.later.facts)
        counted = k is not None and all(
            one.evidence.get("after", 0) > k + 1 and all(name.endswith(RUNNING) for name in one.tensors)
            for one in signs
        )
        names = named_in(signs)
        yield Match("train", 0.7, names, question=RECALIBRATED if counted else "", signs=tuple(signs), title=title)


# ---- B: the optimizer's state ----------------------------------------------------------------------------------------


def fresh_optimizer(case: Case) -> Iterator[Match]:
    for change in case.changes:
        counters = case.counters(change.leg)
        first, second = case.lost(change)
        broken = (change.hit(MOMENTS) - change.hit(MOMENTS, "still")) & counters.reset
        copies = change.hit((STATE,), "weights") & change.clean(MOMENTS) - change.hit(MOMENTS)
        if copies:
            yield Match(change.leg, 0.95, frozenset(copies), title=PART_ANEW, remedy=WHOLE, losses=OF_PART)
        names = frozenset((first & second) | (change.hit((STATE,), "weights") - copies))
        if change.leg == "train" and broken:
            names |= counters.reset  # for the others the laws hold by chance
        quantised = change.hit(("state1", "state2"), *GONE)
        names |= quantised
        apart = case.grouped and change.leg == "train"
        fell = change.hit(SECOND, "fallen")
        names |= fell if apart and 2 * len(fell) >= len(change.hit(MOMENTS)) else set()
        kept = names & counters.kept if not apart else frozenset()
        advanced = bool(case.traits.get("advanced"))
        if names and len(kept) < len(names):
            whole = change.whole(MOMENTS, names) and not advanced
            words = (
                f"the step counters of {len(names & counters.reset):,} of {plural(len(names), 'parameter')} restarted"
            )
            reasons = case.against(
                ("B3", words if names <= counters.reset else ""),
                ("B2", f"the moments of {plural(len(names), 'parameter')} are lost too"),
                ("E13 B5 E1", case.equal(change, change.weights, "weights")),
            )
            question = "was the optimizer started fresh on purpose?" if whole and not apart else ""
            title = STATES_LOST if apart else "" if change.whole(MOMENTS, names) else SOME_ANEW
            yield Match(change.leg, 1.0, names, False, question, reasons, title=title)
        rest = counters.reset - names
        if rest and (2 * len(_measured(case, change) & rest) < len(rest) or _forgotten(case, change)):
            question = "were the optimizer's counters reset on purpose?"
            whole = _whole(case, change)
            yield Match(change.leg, 0.6, rest, False, question if whole else "", title="" if whole else SOME_ANEW)
    if signs := [one for one in case.fired("P34") if one.evidence["kind"] == "optimizer"]:
        yield Match("train", 0.9, signs=tuple(signs), question="was the optimizer started fresh on purpose?")
    train = case.change("train")
    other = frozenset(train.hit(MOMENTS, "other", "near", "part", "fallen", "zeros", "patch", "spots"))
    related = 2 * len(train.hit(train.weights, "near", "slight", "part")) >= len(train.hit(train.weights))
    if (
        other
        and related
        and may_count_anew(case.evidence.before.facts, case.later.facts, seeded=bool(case.fired("N10")))
    ):
        signs = case.fired("P03", "P04", "P05", "P06", "P08", "P11", where="before → after")
        question = "was a new stage begun on purpose, in which optimizer, schedule and data are counted anew?"
        # exact: the counts, which show a fresh optimizer otherwise, are not silent against it
        yield Match("train", 1.0, other, True, question, signs=tuple(signs))
    if not case.counters("train").reset and (young := _since_then(case)):
        names = named_in(young)
        title = "The state of some parameters began anew, or only its counters did."
        yield Match("after", 0.6, names, signs=tuple(young), title=title, remedy=WHOLE)
    absent = [one for one in case.fired("S06") if one.evidence.get("kind") in ("absent", "never", "gone")]
    for one in case.fired("R03", "R01", "N3", "V05", "P33"):
        gone = one.evidence.get("gone")
        if gone and (not isinstance(gone, list) or set(gone) - {"buffer", "ema", "rng", "other"}):
            absent.append(one)
    if absent:
        never = any(one.evidence.get("kind") == "never" for one in absent)
        saved = any(where_of(one) != "before" for one in absent)  # otherwise the load had nothing to restore
        grave = any(one.severity == "error" for one in absent) and saved
        question = "" if grave else "was the optimizer left out, or emptied, on purpose?"
        some = any(one.rule == "R03" and one.hit < one.of for one in absent)
        title = (
            (SOME_ANEW if some else "")
            if saved
            else "The checkpoint holds the optimizer's param groups, but not its state."
        )
        title = "No checkpoint holds the optimizer's state, so it starts fresh." if never else title
        yield Match(case.resumed, 0.9, signs=tuple(absent), question=question, title=title)


def _since_then(case: Case) -> list[Sign]:
    """Return signs of counters that the load did not compare and that count no more than the updates since then."""
    k = passed(case.evidence.before.facts, case.later.facts)
    odd = [one for one in case.fired("S06", "S07", where="after") if one.evidence.get("kind") in ("fresh", "among")]
    usual = case.later.facts.steps.usual
    others = [count for count in case.later.facts.steps.counts if count != usual]
    return odd if k is not None and usual is not None and max(others, default=usual) <= k < usual else []


def _forgotten(case: Case, change: LedgerLeg) -> bool:
    """Return whether so many updates came in between that the moments no longer show where they began.

    ``v`` of few updates is small, and has a small share in what it becomes: β2^k·(1−β2^n) beside 1−β2^k.
    """
    before, facts = case.evidence.before.facts, case.later.facts
    betas, count = facts.betas or before.betas, passed(before, facts)
    if change.leg != "train" or betas is None or not count or not 0 < betas[1] < 1:
        return False
    fade = betas[1] ** count
    old = fade * (1 - betas[1] ** (before.steps.usual or math.inf))
    return old < FORGOTTEN * (old + 1 - fade)


def _measured(case: Case, change: LedgerLeg) -> set[str]:
    """Return the parameters whose moments were compared, all that are stored.

    That other squares than Adam's have the profile of the old ones proves little after some updates: a fresh state has
    it, too.
    """
    count = passed(case.evidence.before.facts, case.later.facts)
    soon = change.exact or (count is not None and count <= SOON)
    rows = [row for row in change.rows if row.quantity in MOMENTS and row.status is Status.SKIPPED]
    return change.seen(*(MOMENTS if soon else (*FIRST, "exp_avg_sq"))) - {name for row in rows for name in row.names}


def counters_reset(case: Case) -> Iterator[Match]:
    if signs := _of_groups(case):
        yield Match("train", 0.9, signs=(*signs, *case.fired("P01", "S07")), remedy=WHOLE)
    for change in case.changes:
        if single := _single(change):
            title = "A number with which the optimizer counts its updates changed."
            yield Match(change.leg, 0.95, single, title=title, remedy=WHOLE)
        counters = case.counters(change.leg)
        broken = (change.hit(MOMENTS) - change.hit(MOMENTS, "still")) & counters.reset
        names = frozenset(counters.reset - change.hit(MOMENTS, *GONE, "fallen"))
        if not names or (broken and change.leg == "train"):
            continue
        measured = set() if _forgotten(case, change) else names & _measured(case, change)
        measured = measured if 2 * len(measured) >= len(names) else set()
        words = case.equal(change, MOMENTS, "moments", measured) if measured else ""
        reasons = case.against(("B1 B3 B4", words), ("G6", case.equal(change, change.weights, "weights", names)))
        question = "were the optimizer's counters reset on purpose?" if not measured and _whole(case, change) else ""
        exact = bool(words) and change.exact
        title = "The optimizer's step counters were reset; the moments were kept." if words else ""
        yield Match(change.leg, 1.0 if words else 0.45, names, exact, question, reasons, title=title)


def _single(change: LedgerLeg) -> frozenset[str]:
    """Return the parameters whose state of a single number, as NAdam's product of its betas, changed in the load."""
    own = [row for row in change.rows if row.quantity == STATE and row.elements == len(row.names)]
    return frozenset(n for row in own if change.exact and row.status is Status.BEYOND for n in row.names)


def _of_groups(case: Case) -> list[Sign]:
    """Return counters of the param groups themselves, and products in their place, that restarted."""
    return [one for one in case.fired("P34") if one.evidence["kind"] in ("groups", "products")]


def _whole(case: Case, change: LedgerLeg) -> bool:
    """Return whether all counters restarted, as they do if the optimizer is created anew on purpose."""
    counters = case.counters(change.leg)
    return bool(counters.reset) and len(counters.reset) >= 0.9 * len(counters.known)


def moments_zero(case: Case) -> Iterator[Match]:
    for change in case.changes:
        counters = case.counters(change.leg)
        if case.grouped and change.leg == "train":
            counters = Counters()  # of the groups, whatever was loaded for a parameter
        first, second = case.lost(change)
        both, alone = first & second, (first - second) & change.seen(*SECOND)
        kept = both & (counters.kept | (set() if change.leg in ("load", "train") else both - counters.reset))
        absent = change.hit(MOMENTS, "absent")
        names = frozenset((kept | alone) - absent)
        fell = change.hit(MOMENTS, "fallen") & counters.kept
        words = f"exp_avg_sq of {plural(len(fell), 'parameter')} fell and kept its profile"
        if case.sank and change.whole(MOMENTS, change.hit(MOMENTS, "fallen", "other")):
            fell = change.hit(MOMENTS, "fallen", "other") & counters.kept
            words = "most elements of exp_avg_sq fell; those of other parameters would be larger as often"
        stayed = case.first_stayed(change) or case.too_small
        if not names and change.leg == "train" and not stayed and fell and 2 * len(fell) >= len(change.hit(MOMENTS)):
            adam = bool(change.hit(("exp_avg_sq",), "fallen", "other"))
            reasons = case.against(
                ("B6 E13", words if adam else ""), ("B1", f"the counters of {plural(len(fell), 'parameter')} continued")
            )
            yield Match("train", 0.9, frozenset(change.hit(MOMENTS)), False, reasons=reasons)
        if names:
            words = f"the counters of {len(names & counters.kept):,} of {plural(len(names), 'parameter')} continued"
            reasons = case.against(
                ("B1", words if names <= counters.kept else ""),
                ("B4", f"exp_avg of {plural(len(names), 'parameter')} is lost" if change.hit(FIRST) else ""),
            )
            title = remedy = ""
            if names <= alone:
                title, remedy = "The first moments were lost.", "restore the first moments together with the second"
                if change.seen(*(role for role in FIRST if not change.hit((role,), *GONE))) & names:
                    title = "Some of the first moments were lost; others of the same parameters were kept."
            yield Match(change.leg, 1.0, names, reasons=reasons, title=title, remedy=remedy)


def second_gone(case: Case) -> Iterator[Match]:
    for change in case.changes:
        first, second = case.lost(change)
        names = frozenset(second - first)
        held, part = names & change.seen(*FIRST), names & change.partly(*GONE)
        moved = len(change.hit(SECOND, "moved.", "moved")) > len(names)  # these zeros are of other parameters, too
        if names and (held or part) and not moved:
            words = f"the first moments of {len(held):,} of {plural(len(names), 'parameter')} are not zero"
            reasons = case.against(("B1 B3", words if held else ""))
            title = "" if names & change.hit(("exp_avg_sq",)) else SECOND_LOST if held else PART_LOST
            yield Match(change.leg, 1.0, names, reasons=reasons, title=title)
        if sunk := case.sunk(change):
            names = sunk | change.hit((*change.weights, *MASTERS))
            yield Match(change.leg, 0.96, names, title=SUNK)
        elif case.first_stayed(change) and (case.sank or change.whole(SECOND, change.hit(SECOND, "fallen", "other"))):
            words = "exp_avg cannot have begun at zero, and can be what became of its old value"
            names = frozenset(change.hit((*change.weights, *MASTERS, *MOMENTS)))
            yield Match(change.leg, 0.97, names, reasons=case.against(("B1 B3", words)), title=SUNK)
    train = case.change("train")
    signs = [one for one in case.fired("P25") if one.causes[:1] == ("B4",)]
    names = named_in(signs)
    held = names & train.clean(FIRST)
    if held or (signs and not case.grouped and not names & train.hit(FIRST)):
        yield Match("train", 0.97, names, signs=tuple(signs), title=SECOND_LOST if held else SUNK)
    wild = case.fired("S04", where="after")
    fell = {name: float(train.detail(SECOND, name).get("share", 1.0)) for name in train.hit(SECOND, "fallen", "other")}
    fallen = {name for name, share in fell.items() if share > FELL}  # otherwise they continued: the first are wrong
    far = train.hit(train.weights) - train.hit(train.weights, "flip")
    worst = sorted(float(train.detail(train.weights, name).get("worst") or 0) for name in far)
    wild_steps = bool(worst) and worst[len(worst) // 2] > WILD
    if case.too_small and case.sank and train.whole(SECOND, fallen) and not train.seen(*train.weights):
        words = f"exp_avg of {plural(len(fallen), 'parameter')} is larger than gradients from zero make it"
        yield Match("train", 0.97, frozenset(fallen), reasons=case.against(("B1 B3", words)), title=SUNK)
    elif wild and fallen and train.hit(train.weights) and train.whole(SECOND, fallen):
        yield Match("train", 0.97 if wild_steps else 0.7, frozenset(fallen))
    elif fallen and train.whole(train.weights, train.hit(train.weights, "other"), NEARLY_ALL) and case.grown(train):
        yield Match("train", 0.97, frozenset(fallen | train.hit(train.weights)))
    elif fell and wild_steps and case.far < FEW_STEPS and 2 * len(far) > len(train.seen(*train.weights)):
        # of other weights all elements are others; divided by second moments near zero, some steps are huge
        yield Match("train", 0.97, frozenset(fell.keys() | far), title=SUNK)


def other_binding(case: Case) -> Iterator[Match]:
    for change in case.changes:
        names = frozenset(change.hit(MOMENTS, "moved.", "moved") - change.hit(MOMENTS, "moved.shift", "moved.flat"))
        found = names
        if any(map(is_numbered, names)) and change.hit(change.weights, "moved."):
            continue  # the owner is unknown: they moved with the weights
        if names and not change.exact and not case.counters(change.leg).reset:
            names |= change.hit(MOMENTS, "other", "fallen", "near")  # the source of small ones cannot be found
        odd = case.displaced(change) & names
        if change.leg == "load":  # masters are state of the optimizer, and move with it
            odd -= case.masters_alone(change, *OF_OTHERS)
        if names and not 4 * len(odd) > len(names):  # steps by wrong moments are too long
            still = change.seen(*change.weights) & names
            words = case.equal(change, change.weights, "weights", names) if still else ""
            reasons = case.against(
                ("E1 E3 E4 E9", words),
                ("B6", f"the moments of {plural(len(found), 'parameter')} belong to other parameters"),
            )
            others = not change.hit(MOMENTS, "moved.") - change.hit(MOMENTS, *OF_OTHERS)  # not their own rows
            exact = change.exact or (bool(case.fired("P17")) and not case.displaced(change) & names)
            exact = exact and others
            title, remedy = ("", "") if others else (OTHER_ELEMENTS, ONE_MAP)
            yield Match(change.leg, 1.0, names, exact, reasons=reasons, title=title, remedy=remedy)
    if signs := case.fired("N5"):
        yield Match(case.resumed, 0.6, named_in(signs), signs=tuple(signs))


def mixed_moments(case: Case) -> Iterator[Match]:
    for change in case.changes:
        swapped = frozenset(change.hit(ADAM, "swapped"))
        if swapped:
            yield Match(change.leg, 1.0, swapped, change.exact, title="exp_avg and exp_avg_sq were exchanged.")
        older = case.counters(change.leg).behind
        second = frozenset(change.hit(SECOND, "second_other") - case.displaced(change) - older)
        if second:
            words = f"exp_avg of {plural(len(second), 'parameter')} implies gradients that fit"
            yield Match(change.leg, 0.95, second, reasons=case.against(("G6 B5", words)))
        held = (*change.weights, *MASTERS)  # wrong steps lead anywhere, but not to values that are found elsewhere
        if first := frozenset(case.first_other(change) - change.hit(held, "moved.", "other")):
            words = f"exp_avg_sq of {plural(len(first), 'parameter')} continued"
            yield Match(change.leg, 0.97, first, reasons=case.against(("G6 B5", words)))
        values = frozenset(change.hit(MOMENTS, "other", "near", "fallen", "ratio", "power"))
        part = change.hit(MOMENTS, "part")
        if len(part) < len(values) and not change.hit((*change.weights, *MASTERS)) - change.hit(MASTERS, "slight"):
            values |= part
        if any(map(is_numbered, values)) and change.hit(change.weights):
            continue
        odd = case.displaced(change) & values  # steps by wrong moments may be too long
        if 2 * len(odd) < len(values) and not case.counters(change.leg).reset:
            words = case.equal(change, change.weights, "weights", values)
            large = {n for n in change.seen(*MOMENTS) if kinds([n]) != {"norm"} and not n.endswith("bias")}
            whole = len(values & large) >= NEARLY_ALL * len(large)  # otherwise one rank's part of an older save
            scaled = values <= change.hit(MOMENTS, "ratio", "power")
            ruled = change.exact or case.fired("P03", "P04")
            if not scaled and not (case.adam and ruled):
                continue  # no law shows that one of the moments continued and the other did not
            strength = 0.97 if scaled else 0.85 if whole else 0.7
            power = "raised to a power" if values & change.hit(MOMENTS, "power") else "multiplied by a factor"
            title = f"The moments were {power}." if scaled else ""
            alone = not change.hit((*change.weights, *MASTERS)) and values >= change.seen(*MOMENTS)
            question = SCALED if scaled and alone else ""
            reasons = case.against(("E1 E9 A2 F4", words))
            yield Match(change.leg, strength, values, question=question, reasons=reasons, title=title)
    if signs := case.fired("P21"):
        ways = {"power": "raised to a power", "level": "set to one number"}
        way = ways.get(str(signs[0].evidence["kind"]), "multiplied by a factor")
        title = f"The second moments were {way}."
        yield Match("train", 0.97, named_in(signs), signs=tuple(signs), title=title)
    if signs := [one for one in case.odd("S04") if one.hit > 2 or int(one.evidence.get("elements", 0)) > 8]:
        yield Match(case.resumed, 0.8, named_in(signs), signs=tuple(signs))


def other_groups(case: Case) -> Iterator[Match]:
    stated = [one for one in case.fired("R12", info=True) if one.evidence.get("kind") == "groups"]
    whole = any(one.evidence.get("kind") == "decay" for one in case.fired("R12", info=True))  # another setting (H1)
    if exchanged := [one for one in case.fired("R14", "P19") if one.evidence.get("kind") == "groups"]:
        names = named_in(exchanged)
        found = (*exchanged, *(one for one in case.fired("R12") if set(one.tensors) & names))
        rates = any(one.evidence["field"] != "weight_decay" for one in exchanged)
        question = f"{'were the learning rates' if rates else 'was the weight decay'} exchanged on purpose?"
        leg = "load" if any(one.rule == "R14" for one in exchanged) else case.resumed
        title, remedy, losses = (RATES_EXCHANGED, OWN_RATES, OF_RATES) if rates else ("", "", "")
        yield Match(leg, 1.0, names, False, question, signs=found, title=title, remedy=remedy, losses=losses)
    played = [one for one in case.fired("P12") if "old" in one.evidence and not whole]
    signs = [*stated, *played, *case.fired("N27")]
    if signs and not any("weight_decay" in name for name in case.declared):
        names = named_in(signs)
        title = "" if names else "Parameters moved to other param groups."
        question = "was the weight decay of these parameters changed on purpose?"
        question = question if names else "were parameters moved to other groups on purpose?"
        yield Match("train", 1.0, names, question=question, signs=(*signs, *_untouched(case)), title=title)
    elif rows := _untouched(case):
        yield Match("train", 0.5, named_in(rows), signs=tuple(rows))


def _untouched(case: Case) -> list[Sign]:
    """Return rows that no gradient reached and that did not shrink as weight decay requires."""
    return [one for one in case.fired("P11") if one.evidence.get("even") and float(one.evidence.get("shrink", 0)) >= 0]


def orphan_groups(case: Case) -> Iterator[Match]:
    if (signs := case.fired("N6")) and not case.rescaled:
        follows = [one for one in case.fired("S16", "P15", "P13", "P19", "R14") if one.evidence.get("kind") != "jump"]
        yield Match(case.resumed, 0.95, signs=(*signs, *follows))
    if uneven := [one for one in case.fired("P15") if one.evidence.get("uneven")]:
        yield Match("train", 0.95, signs=tuple(uneven))
    signs = [one for one in case.fired("P11") if one.evidence.get("slow")]
    signs += filter(below_stated, case.fired("P13"))
    if signs:
        title = "The updates were made with a lower learning rate than is stored."
        yield Match("train", 0.8, named_in(signs), signs=tuple(signs), title=title)


def gradients_scaled(case: Case) -> Iterator[Match]:
    signs = case.fired("P30")
    if signs and not case.change("train").hit(MOMENTS) and not case.declared:  # otherwise ask about those (H1)
        times = float(signs[0].evidence["times"])
        if signs[0].evidence["kind"] == "alone":
            names = frozenset(signs[0].tensors)
            title = f"The gradients of {plural(len(signs[0].tensors), 'parameter')} grew far beyond those before."
            remedy = "look for what made them, such as a bad batch, an overflow or a defective device"
            yield Match("train", 0.6, names, signs=tuple(signs), title=title, remedy=remedy)
            return
        words = f"{times:.3g} times larger" if times > 1 else f"{1 / max(times, 1e-30):.3g} times smaller"
        title = f"The gradients are {words} than those before."
        question = "were the loss, the batch or the data changed on purpose?"
        yield Match("train", 0.6, named_in(signs), signs=tuple(signs), question=question, title=title)


def compressed(case: Case) -> Iterator[Match]:
    fell = [one for one in case.fired("P25") if one.evidence.get("roles") == [MAXIMA]]
    if scales := [one for one in case.fired("P25") if one.evidence.get("roles") == [BLOCK_MAXIMA]]:
        yield Match("train", 0.97, named_in(scales), signs=tuple(scales))
    for change in case.changes:
        maxima = frozenset(change.hit((MAXIMA,)))
        if (maxima or fell) and not change.hit([role for role in MOMENTS if role != MAXIMA]) - _single(change):
            title = "The largest second moments (max_exp_avg_sq, of AMSGrad) are not those that were stored."
            maxima |= {name for sign in fell for name in sign.tensors}
            yield Match(change.leg, 0.97, maxima, signs=tuple(fell), title=title)
            continue
        packed = ("state1", "state2", STATE)
        names = change.hit(packed) - change.hit(packed, *GONE, "weights") - _single(change)
        names |= change.hit(packed, *GONE) & change.partly(*GONE)
        crossed = change.hit([role for role in MOMENTS if role not in ADAM], "swapped")
        if crossed:
            yield Match(change.leg, 0.97, frozenset(crossed), title="Two states of the same parameters were exchanged.")
        elif names:
            title = "A part of the optimizer's state is not that of these parameters."
            title = "" if names & change.hit(packed[:2]) else title
            yield Match(change.leg, 0.9, frozenset(names), title=title)  # any change of it looks the same


# ---- the catalogue ---------------------------------------------------------------------------------------------------

NAMES = (
    made(
        "A1", "The weights were renamed, so none of them were loaded.",
        "a prefix (module., _orig_mod., model., base_model.model.) differs and the load was not strict",
        "the loss is that of a new model, about ln(vocabulary)",
        "load with the prefix mapped and strict=True; check the list of missing keys", ECHO,
        "torchgeo 4036, lerobot 3459",
        hf="call from_pretrained with output_loading_info=True and map the prefix; missing_keys must be empty",
        deepspeed="load_checkpoint(load_module_strict=True); save the module inside the compile wrapper, if any",
        lightning="load_from_checkpoint(strict=True); save the module inside torch.compile",
        explains="P05 P06 P08 P11 P12 P13 P17 P18 P24 P36 N1 N29 R01 R09 P02 S13 S15 S08 N4",
        losses="the first losses are wrong; they recover over hundreds of updates", everywhere=True, pattern=renamed
    ),
    made(
        "A2", "A tensor was not loaded and kept its initial value.", "a key is missing and the load was not strict",
        "a jump that depends on the tensor's importance",
        "list the keys that the load did not read, restore them from the older checkpoint, and load with strict=True",
        ECHO, "catalogue A2",
        dcp="dcp.load with a planner that refuses missing keys (DefaultLoadPlanner(allow_partial_load=False))",
        megatron="--dist-ckpt-strictness raise_all", hf="check missing_keys of from_pretrained's loading info",
        explains="P05 P06 P08 P11 P12 P13 P17 P18 P24 P36 N29 R01 R02 R03 R09 R13 P02 N3 P01 P03 P04 R10 S06 S07",
        losses="the first losses are wrong; they recover over hundreds of updates", pattern=not_loaded
    ),
    made(
        "A3", "Norm weights were not loaded and kept their initial value of 1.",
        "their keys have other names or are not in the file", "a small jump; the loss recovers in hundreds of steps",
        "restore the norms from the older checkpoint; the unread keys show which", ECHO,
        "catalogue A3; Model-Optimizer 2322", explains="P05 P06 P08 P11 P12 P13 P17 P18 P24 P36 S15 R03 R08 R09 N29",
        expects="S15", losses="the first losses are wrong; they recover over hundreds of updates", pattern=norms_at_one
    ),
    made(
        "A4", "The checkpoint holds tensors that it did not hold before.",
        "a second adapter, an average or a copied head was saved as well", "none; the file grows", ADDED,
        "the trainer's arguments of both saves", "diffusers 6366", explains="R01 P02 N3 S14 S06", losses=OF_ADDED,
        pattern=added
    ),
    made(
        "A5", "Buffers were not saved or not restored.",
        "persistent=False, or a list of keys without buffers (expert_bias, running statistics, fp8 extra state)",
        "unbalanced routing, slow drift", "register the buffers as persistent and restore them", ECHO, "FlagScale 411",
        megatron="keep expert_bias and _extra_state in the state dict; --dist-ckpt-strictness raise_all",
        explains="N4 R01 R09 R03 P24",
        losses="whatever reads these buffers is off until they have filled again; constants stay wrong",
        pattern=buffers_lost
    ),
)  # fmt: skip

OPTIMIZER = (
    made("B1", "The optimizer state was not restored.",
         "it was not saved, not requested, or loaded into an optimizer that had no state yet",
         "the first loss is right, then a bump, because the first updates have full size",
         "load the optimizer too; if its state is lost, warm up the lr again over 1/(1−β2) updates", ECHO,
         "KempnerForge 115, AReaL 1468, Megatron-Bridge 5680",
         dcp="create the state before dcp.load with torch.distributed.checkpoint.state_dict.get_optimizer_state_dict, "
             "then call set_optimizer_state_dict; torchtitan does both when 'optimizer' is in the loaded states",
         torch="call optimizer.load_state_dict(saved['optimizer']) after creating the optimizer with the final "
               "parameters",
         megatron="resume without --no-load-optim and --finetune, and save without --no-save-optim",
         deepspeed="engine.load_checkpoint(load_optimizer_states=True, load_module_only=False)",
         hf="call trainer.train(resume_from_checkpoint=…) with optimizer.pt in the folder; save with "
            "save_only_model=False",
         accelerate="call accelerator.load_state after accelerator.prepare(model, optimizer)",
         lightning="use trainer.fit(ckpt_path=…) and save_weights_only=False",
         paddle="call optimizer.set_state_dict with the .pdopt; PaddleNLP: ignore_load_lr_and_optim=False",
         bytecheckpoint="include 'optimizer' in the states passed to bytecheckpoint.load",
         explains="P33 P25 P26 P03 P04 P05 P06 P08 P12 P13 S05 S06 S07 S17 P01 P14 R01 R03 R10 N3 N13 S19 N16",
         expects="S05 S06 R10 P01",
         losses="the first loss is right, then a slow bump",
         everywhere=True,
         pattern=fresh_optimizer, damage=fresh),
    made("B2", "The optimizer's step counters were reset.",
         "step was not restored", "with β2 = .95, a bump; with β2 = .999, a plateau of a thousand steps",
         "restore step with exp_avg and exp_avg_sq", ECHO, "catalogue B2",
         dcp="save and load state.*.step; capturable or fused optimizers keep it as a tensor",
         megatron="keep 'step' of every param group when the optimizer's state is loaded",
         deepspeed="let load_checkpoint restore the base optimizer's state: 'step' is in state and param_groups",
         explains="P34 S06 S07 P01 P05 P12 P13 P14 R10 R09 S19",
         expects="S07 S06 R10 P01",
         losses="the first loss is right; the following losses depend on the size of the updates",
         everywhere=True,
         pattern=counters_reset, damage=counters_restarted),
    made("B3", "The moments were lost; the counters were kept.",
         "the moments were loaded as zeros, but the counters imply that no bias correction is needed",
         "with β2 = .999, updates several times their size after about ten steps; with .95, mild",
         "load exp_avg and exp_avg_sq; never restore the counters alone", ECHO, "catalogue B3",
         dcp="create the state before dcp.load; otherwise missing moments are skipped while 'step' is found",
         megatron="resume without --no-load-optim; if the moments are lost, reset the step of the groups as well",
         deepspeed="load_checkpoint(load_optimizer_states=True); if the moments are lost, reset the step as well",
         explains="P33 P25 P26 P03 P04 P05 P06 P08 P12 P13 S05 R03 P14 S19 S04 N16",
         losses="the first loss is right, then a slow bump",
         everywhere=True,
         pattern=moments_zero, damage=moments_lost),
    made("B4", "exp_avg_sq was lost; exp_avg was kept.",
         "one of the two moments was not loaded or was zeroed", "a catastrophic jump at the second step",
         "go back to the previous checkpoint and restore both moments from one save", ECHO, "catalogue B4",
         explains="P33 P25 P03 P04 P05 P06 P08 P11 P12 P13 P18 S02 S04 S05 S19 P09 R03 R09 N16",
         expects="S04 S05",
         losses="the first loss is right; the second is wrong",
         everywhere=True,
         pattern=second_gone, damage=second_lost),
    made("B5", "The optimizer's state is assigned to the wrong parameters.",
         "torch's optimizers identify parameters by position, and the order changed", "a small bump, slow damage",
         "save and load the state by name", ECHO, "threads of hiyouga and mli0603; catalogue B5",
         dcp="use get/set_optimizer_state_dict (by name), not optimizer.state_dict() (by position)",
         torch="build the param groups in the same order as at the save, or save the state by parameter name",
         hf="build the groups in the same order as at the save; a changed decay rule reorders optimizer.pt",
         deepspeed="keep the order of the param groups, because ZeRO's flat buffers follow it",
         explains="P01 S07 S08 P32 P25 P26 P03 P04 P05 P06 P08 P11 P12 P13 P17 P18 R02 R04 R05 R09 R13 N5 N17 S04 N28",
         expects="P17 P32 R02 N5",
         losses="the first loss is right, then a slow bump",
         pattern=other_binding, damage=wrong_steps),
    made("B6", "exp_avg and exp_avg_sq come from different steps or tensors.",
         "one of them was taken from another save or shard", "a bump", "load both moments from one save",
         "the checkpoint before the one that was resumed from", "catalogue B6",
         explains="P33 P25 P26 S04 S19 N5 P03 P04 P05 P12 R09 R02 P21",
         losses="the first loss is right, then a slow bump",
         pattern=mixed_moments),
    made("B7", "Parameters moved to other param groups, so weight decay applies to the wrong ones.",
         "the groups were rebuilt by another rule or in another order", "norms drift slowly, matrices grow",
         "build the groups by name, and restore each group's own weight_decay", NEXT, "catalogue B7",
         megatron="check the rule that selects no-decay parameters (biases and 1-D tensors) in both versions",
         explains="P05 P11 P12 P13 R12",
         expects="R12 P11 P12",
         losses="the first loss is right; the effect is slow",
         pattern=other_groups),
    made("B8", "The optimizer's learning rate is not the one that its schedule set.",
         "it was overwritten after the load, or the scheduler refers to groups that load_state_dict replaced",
         "the learning rate stays constant or jumps",
         "create both, load the optimizer and then the scheduler, and keep no param groups from before the load", NEXT,
         "rat-sql 45, apex LARC 766",
         explains="N6 S16 P13 P15 P11 P12",
         losses="the first loss is right; after that, the loss follows the learning rate",
         everywhere=True,
         pattern=orphan_groups),
    made("B9", "Two optimizers share storage.", "a state dict was loaded without a copy",
         "two runs influence each other", "deepcopy the state dict before loading it", ECHO, "pytorch 35047",
         losses="the first loss is right, then a slow bump"),
    made("B10", "The second moments lag behind the gradients.",
         "the loss is summed where it was averaged, its scale is not removed, or the data shifted",
         "a spike several steps after the gradients grew",
         "compare how the loss and the gradients are scaled and averaged before and after the resume; after a shift in "
         "the data, lower β2 (.95) and clip updates",
         "checkpoints closer to the spike", "catalogue B10",
         explains="P30 P06 P08",
         losses="the first loss is right; a spike several updates after the gradients grew",
         everywhere=True,
         pattern=gradients_scaled),
    made("B11", "The optimizer's compressed state is inconsistent.",
         "codes, scales or factors of 8-bit, factored or AMSGrad states come from different saves", "a bump or NaN",
         "restore all parts of the state from one save", ECHO, "catalogue B11",
         explains="P32 P33 R02 R09 R03 P25 N8 S04",
         losses="the first loss is right, then a bump or NaN",
         pattern=compressed),
)  # fmt: skip
