"""Causes C and D: schedules, counters and data; precision and masters."""

from __future__ import annotations

import math
from collections.abc import Iterator

from workbench.analysis.patterns.rounding import FLOATS
from workbench.doctor.causes.case import ELSE, OUTSIDE, RELATED, Case, Match, below_stated, named_in, where_of
from workbench.doctor.causes.cause import made
from workbench.doctor.causes.damage import updates_lost
from workbench.doctor.facts.counted import began_anew, counts_anew, in_epochs
from workbench.doctor.facts.schedule import sets_rates
from workbench.doctor.ledger.roles import AVERAGES, MASTERS, MOMENTS, WEIGHTS, quantity
from workbench.doctor.ledger.rows import LedgerLeg
from workbench.doctor.ledger.sign import Sign
from workbench.doctor.passes.updates import counted_several, passed
from workbench.names.weights import kinds

ECHO = "an echo, saved right after the load and before any update"
ARGS = "the arguments of both launches"
EARLY, LATE = 0.6, 1.5  #: share of the expected position below which it restarted; from which it was stepped twice
SOME = 0.5  #: share of the parameters
LONGER = 3.0  #: times the reach of the updates; averages and weights of other steps are further away
VALUES = ("near", "other", "part", "ratio")  #: changes of values without another form
UNDECIDED = "The 16-bit weights and their fp32 masters do not match."
FROM_ONE = "load both from one save; do not make one from the other before it is known whether the masters are right"
OF_EITHER = "the first loss is wrong if the weights are stale; the second is wrong if the masters are"
UNTIL_COPIED = "every loss is wrong until the masters are copied: no update does it, since none reached these weights"
OF_SCALES = ("amax_history", "scale", "scale_inv", "extra_state")


# ---- C: schedules, counters, data ------------------------------------------------------------------------------------


def _positions(case: Case) -> Iterator[tuple[Sign, float | None]]:
    """Yield signs of a schedule's position, each with the ratio of that position to the expected one."""
    for sign in case.fired("S17", "R11", "P15"):
        found = sign.evidence
        if _step_is_off(case) and sign.rule != "R11":
            continue  # the schedule is where the optimizer is
        if sign.rule == "R11" and found.get("kind") != "schedule":
            continue
        if sign.rule == "P15" and found.get("kind") != "jump":
            continue
        ratio = found.get("ratio")
        if "before" in found:
            now, since = found.get("echo", found.get("after")), found.get("k", 0) * _unit(case)
            due = found["before"] + since
            ratio = 0.0 if since and abs(now - since) < _unit(case) / 2 else now / due if due else None
        yield sign, ratio


def _step_is_off(case: Case) -> bool:
    """Return whether the optimizer agrees with the schedule or the data's position, but not with the trainer's step."""
    before = case.evidence.before
    old = before.facts
    resets = [case.counters(leg).reset for leg in ("load", "train", case.resumed)]
    known = old.steps.by_name.keys()  # those of new parameters begin at 0
    if any(reset & known if known else reset for reset in resets):
        return False  # several of them restarted
    for state in (case.later, case.evidence.after):
        facts = state.facts if state is not None else old
        usual, step = facts.steps.usual, facts.step
        if state is None or step is None or not old.step:
            continue
        schedule = [(one.schedule.count if one.schedule else None) for one in (old, facts)]
        data = [[one.value(kind) for one in (old, facts)] for kind in ("loader", "consumed_samples")]
        if state is case.evidence.echo and usual is None and step != old.step and None not in schedule:
            return bool(schedule[0] == schedule[1])  # a load advances neither of them
        if usual is None and counts_anew(old, facts):
            return True
        if usual is None:  # then the schedule and the data's position must agree with one another
            within = in_epochs(before.counts, state.counts).values()
            data += [[then[1], now[1]] for then, now in within if then[0] == now[0]]
            due = [now * old.step / was for was, now in (schedule, *data) if was and now is not None]
            if len(due) > 1 and max(due) - min(due) < 1 and abs(due[0] - step) > 1 and max(due) > old.step:
                return True
            continue
        if usual == step or old.steps.usual != old.step or began_anew(old, facts):
            continue  # it agrees, or it restarted, and so may the others
        pairs = (schedule, *data)
        if any(was and now is not None and abs(now * old.step / was - usual) < 1 for was, now in pairs):
            return True
    return False


def _new_stage(case: Case) -> bool:
    """Return whether the trainer's step and the schedule both count from 0 again, as in a new stage of training."""
    old, new = case.evidence.before.facts, case.later.facts
    if not counts_anew(old, new) or old.schedule is None or new.schedule is None or new.schedule.count is None:
        return False
    return abs(new.schedule.count - (new.step or 0) * _unit(case)) <= 1


def _unit(case: Case) -> float:
    """Return how much the schedule counts per update."""
    facts = case.evidence.before.facts
    count = facts.schedule.count if facts.schedule else None
    return count / facts.step if count and facts.step else 1.0


def _rates(case: Case) -> Iterator[tuple[Sign, float | None]]:
    """Yield signs of a learning rate, each with the ratio of that rate to the expected one."""
    for sign in case.fired("S16", "P15", "P13", "R14", "P19"):
        found = sign.evidence
        if (sign.rule == "P15" and found.get("kind") == "jump") or (sign.rule == "S16" and _step_is_off(case)):
            continue
        if found.get("uneven") or (sign.rule in ("R14", "P19") and found.get("kind") != "lr"):
            continue
        ratio = found.get("ratio")
        if sign.rule == "P13":
            low, high = found["stated"]
            ratio = found["lr"] / (high if found["lr"] > high else low) if low and high else None
        yield sign, ratio


def _declared(case: Case, signs: list[Sign]) -> bool:
    """Return whether a changed argument, or setting of the schedule, may be the reason."""
    return bool(any(map(sets_rates, case.declared)) or case.fired("P37")) or any(
        one.evidence.get("declared") for one in signs
    )


def _stands(case: Case) -> bool:
    """Return whether the schedule is where it was, however many updates were made."""
    sides = (case.evidence.before, case.evidence.after)
    counts = [side.facts.schedule.count if side is not None and side.facts.schedule else None for side in sides]
    return counts[0] is not None and counts[0] == counts[1]


def schedule_restarted(case: Case) -> Iterator[Match]:
    stands = _stands(case)
    behind = [
        sign
        for sign, ratio in _positions(case)
        if ratio is None or (ratio < EARLY and (not stands or ratio == 0))  # as many updates as it had counted
    ]
    slow = [sign for sign, ratio in _rates(case) if ratio is not None and ratio < 1]
    question = "was the learning-rate schedule restarted on purpose?"
    leg = "load" if any(one.rule in ("R11", "R14") for one in (*behind, *slow)) else case.resumed
    if behind:
        more = [sign for sign, _ in _rates(case)]
        title = "The learning-rate schedule restarted, or it was not stepped." if stands else ""
        yield Match(leg, 1.0, question=question, signs=(*behind, *more), title=title)
    elif inner := [one for one in case.fired("P34") if one.evidence["kind"] == "schedule"]:
        yield Match(leg, 1.0, question=question, signs=(*inner, *(sign for sign, _ in _rates(case))))
    elif slow and not case.fired("N6") and not all(map(below_stated, slow)):  # which no schedule set (B8)
        declared = _declared(case, slow)
        title = "The learning rate fell: its schedule was not restored, or a different one was set."
        question = "was the learning rate lowered on purpose?"
        if any(one.evidence.get("apart") for one in slow):
            title = "The learning rates of the param groups changed: some rose, and others fell."
            question = "were they changed on purpose?"
        yield Match(leg, 0.5 if declared else 0.85, signs=tuple(slow), title=title, question=question)


def schedule_lost(case: Case) -> Iterator[Match]:
    fast = [sign for sign, ratio in _rates(case) if ratio is not None and ratio > 1]
    behind = [sign for sign, ratio in _positions(case) if ratio is None or ratio < EARLY]
    if fast:
        declared = _declared(case, fast)
        leg = "load" if any(one.rule == "R14" for one in fast) else case.resumed
        doubt = declared or behind or case.fired("N6") or case.rescaled
        replayed = any(one.rule == "P13" for one in fast) and not case.fired("P12")
        if replayed:  # the weights are the old ones, moved along the update: only its length is another
            fast += case.fired("P05", "P11", where=where_of(fast[0]))
        yield Match(leg, 0.4 if doubt else 0.85, signs=tuple(fast), question="was the learning rate raised on purpose?")
    train = case.change("train")
    far = train.hit(train.weights) - case.untrained
    worst = [float(train.detail(train.weights, name).get("worst") or math.inf) for name in far]
    like = set(train.hit(train.weights, "near", "slight", "part"))
    length = bool(far) and far <= like and max(worst) < LONGER and train.whole(train.weights, far, SOME)
    if shrank := _shrank_more(case):  # the decay was larger too, so few weights need be beyond reach
        related = {n for n in far if float(train.detail(train.weights, n).get("cosine", 0)) > RELATED}
        length = length or (far <= related and max(worst, default=math.inf) < LONGER)
        like |= related
    if case.start == "echo":
        length = bool(far & like) and train.whole(train.weights, train.hit(train.weights, "near", "slight"))
    if length and not train.hit(MOMENTS):
        title = "The updates were larger than any stated learning rate allows."
        question = "was the learning rate raised without a record in the files?"
        if shrank:
            question = f"{question[:-1]}, or {OUTSIDE}"
        strength = 0.7 if case.start == "echo" else 0.92
        names = frozenset((far & like).union(*(one.tensors for one in shrank)))
        yield Match("train", strength, names, question=question, signs=tuple(shrank), title=title)


def _shrank_more(case: Case) -> list[Sign]:
    """Return weights that no gradient reached and that shrank by more than any stated weight decay."""
    even = [one for one in case.fired("P11") if one.evidence.get("even")]
    return [one for one in even if 0 < one.evidence["allowed"][1] < float(one.evidence["shrink"])]


def stepped_twice(case: Case) -> Iterator[Match]:
    stands = _stands(case)
    ahead = [(sign, ratio) for sign, ratio in _positions(case) if ratio and (ratio >= EARLY or stands)]
    if ahead:
        strength = 1.0 if any(ratio >= LATE for _, ratio in ahead) else 0.8
        leg = "load" if any(sign.rule == "R11" for sign, _ in ahead) else case.resumed
        more = [sign for sign, ratio in _rates(case)]
        question = "was the position of the schedule changed on purpose?"
        less = all(ratio < 1 for _, ratio in ahead)
        title = f"The schedule was stepped {'less' if less else 'more'} often than the optimizer."
        title = "The schedule was not stepped." if stands else title
        remedy = "call the schedule's step() after each update" if stands else ""
        signs = (*(sign for sign, _ in ahead), *more)
        yield Match(leg, strength, question=question, signs=signs, title=title, remedy=remedy)


def another_length(case: Case) -> Iterator[Match]:
    signs = [sign for sign, _ in (*_rates(case), *_positions(case)) if sign.evidence.get("declared")]
    changed = case.fired("P37")
    rates = [sign for sign, _ in _rates(case)] if changed else []
    if signs or changed:
        what = "were the settings" if changed else "was the length"
        question = f"{what} of the schedule changed on purpose?"
        signs += [one for one in rates if one not in signs]
        yield Match(case.resumed, 0.9 if changed else 0.5, signs=(*changed, *signs), question=question)


def _data(case: Case) -> Iterator[tuple[Sign, bool]]:
    """Yield signs of the data's position, each with whether it is behind."""
    for sign in case.fired("S18", "R11", "P20"):
        found, kind = sign.evidence, sign.evidence.get("kind")
        if kind not in ("loader", "samples", "consumed_samples", "epoch"):
            continue
        if kind == "loader" and "before" not in found:
            yield sign, True
            continue
        now = found.get("echo", found.get("consumed", found.get("loader")))
        due = found.get("before", found.get("step", 0) * found.get("batch", 1))
        yield sign, not (now is not None and now > due)


def data_again(case: Case) -> Iterator[Match]:
    signs = [sign for sign, behind in _data(case) if behind and not _step_is_off(case)]
    signs += [one for one in case.fired("P34") if one.evidence["kind"] == "data"]
    signs += [
        one for one in case.fired("R17") if one.evidence["kind"] == "data" and len(one.evidence["fell"]) == one.hit
    ]
    if signs:
        stands = all(one.evidence.get("stands") for one in signs)
        title = "The position in the data did not advance." if stands else ""
        if any(_went_back(one) for one in signs):
            title = "The position in the data went back."
        question = "was a new epoch or a restart intended?"
        if all(one.evidence.get("fewer") for one in signs):
            title, question = (
                "The data advanced less than the updates.",
                "did the batch size or the number of ranks change?",
            )
        if stands:
            question = "the position stored with the data stayed the same: is it stored once an epoch?"
        yield Match(case.resumed, 0.95, signs=tuple(signs), question=question, title=title)


def _went_back(sign: Sign) -> bool:
    """Return whether a position is lower after a load, and not at the beginning."""
    found = sign.evidence
    texts = [found["changed"].get(path, "") for path in found["fell"]] if sign.rule == "R17" else []
    return bool(sign.rule == "R11" and found.get("echo")) or any(not text.endswith("→ 0") for text in texts)


def another_order(case: Case) -> Iterator[Match]:
    if signs := case.fired("N10"):
        what = "order" if any(one.evidence.get("kind") == "order" for one in signs) else "seed"
        yield Match(case.resumed, 0.9, signs=tuple(signs), question=f"was the {what} of the data changed on purpose?")


def random_states(case: Case) -> Iterator[Match]:
    equal = [one for one in case.fired("P51") if one.evidence.get("kind") == "equal"]
    if signs := [one for one in case.fired("P51") if one not in equal]:
        title = "A random generator was seeded again."
        remedy, losses = "restore the generators after all seeds are set", "no loss shows it"
        question = "was the seed set again on purpose?"
        yield Match(case.resumed, 0.9, signs=tuple(signs), title=title, remedy=remedy, losses=losses, question=question)
    signs = [
        *equal,
        *case.fired("N11"),
        *(one for one in case.fired("P29", "R11") if "C8" in one.causes or one.evidence.get("kind") == "generators"),
    ]
    if signs:
        title = "The random generators of all ranks are in the same state." if equal or case.fired("N11") else ""
        yield Match(case.resumed, 0.9, signs=tuple(signs), title=title)


def another_step(case: Case) -> Iterator[Match]:
    for change in case.changes:
        counters = case.counters(change.leg)
        names = counters.ahead | counters.behind
        if not names or len(names) < 0.9 * len(counters.known):
            continue
        fell = [one for one in case.fired("P01") if one.evidence.get("kind") == "fell"]
        if change.leg == "train" and fell:
            title, question = "The optimizer's step counters fell.", "are the two checkpoints in the wrong order?"
            yield Match("train", 0.6, frozenset(names), signs=tuple(fell), title=title, question=question)
            continue
        moved = change.hit(change.weights) if change.moments(change.hit(change.weights)) else set()
        if change.leg == "load" and moved and change.whole(change.weights, moved) and 0 < counters.by <= 3:
            title = f"The load itself made {counters.by:,.0f} update{'s' if counters.by > 1 else ''}."
            yield Match("load", 1.0, frozenset(names | moved), title=title)
            continue
        words = case.equal(change, MOMENTS, "moments")
        reasons = case.against(("B1 B3", words), ("G7 G6", case.equal(change, change.weights, "weights")))
        before, after = case.evidence.before.facts, case.evidence.after.facts if case.evidence.after else None
        trainer = passed(before, after) if after is not None and change.leg == "train" else None
        if after is not None and trainer and (several := counted_several(before, after, trainer)):
            title = f"The optimizer counted {several // trainer} updates for each step of the trainer."
            remedy = "find what calls optimizer.step() a second time, or what the trainer's step counts"
            yield Match("train", 0.95, frozenset(names), reasons=reasons, title=title, remedy=remedy)
            continue
        title = f"The optimizer's step counters were changed{'; the moments were kept' if words else ''}."
        remedy = "load the step counters together with the moments; nothing else counts the optimizer's updates"
        strength = 0.95 if words else 0.6
        yield Match(change.leg, strength, frozenset(names), reasons=reasons, title=title, remedy=remedy)
    if _step_is_off(case) and not case.counters("train").reset:
        off = case.fired("S07", "S16", "S17", "S18", "P01", "P15", "P20", "R11")
        first, last = (side.facts.steps.usual for side in (case.evidence.before, case.later))
        title = remedy = losses = ""
        if first is not None and last is not None and last < first:  # all of it is from an earlier step
            off += case.fired("P03", "P04", "P05", "P06", "P08", "P11", "P12", "P24", where="before → after")
            title, losses = "All but the trainer's step is that of an older save.", "the loss is that of the older save"
            remedy = "check which save the load opened, and from where the trainer's step was read"
        exact = any(one.rule == "R11" and one.evidence.get("kind") == "step" for one in off)
        words = "the optimizer's counters agree with the schedule, or with the data's position"
        leg, reasons = "load" if exact else case.resumed, case.against(("C1 C3 B2", words))
        yield Match(leg, 1.0, exact=exact, signs=tuple(off), reasons=reasons, title=title, remedy=remedy, losses=losses)
        return
    kinds = ("trainer", "stated", "folder", "step")
    signs = [one for one in case.fired("S07", "R11") if one.evidence.get("kind") in kinds]
    if signs and not any(case.counters(leg).reset for leg in ("load", "train", case.resumed)):
        question = "was a new stage begun on purpose, with a new schedule?" if _new_stage(case) else ""
        yield Match(case.resumed, 0.7, signs=tuple(signs), question=question)


def another_batch(case: Case) -> Iterator[Match]:
    if signs := case.fired("N12"):
        yield Match(case.resumed, 0.5, signs=tuple(signs), question="was the batch changed on purpose?")


# ---- D: precision and masters ----------------------------------------------------------------------------------------


def masters_rebuilt(case: Case) -> Iterator[Match]:
    if signs := _narrower(case, "D1"):
        yield Match("train", 0.9, signs=tuple(signs))
    for change in case.changes:
        names = frozenset(change.hit(MASTERS, "rounded") - change.hit(WEIGHTS, "rounded"))
        if names:
            words = f"they are the old masters rounded to {_through(change, names)}"
            yield Match(change.leg, 1.0, names, _typed(change, MASTERS, names), reasons=case.against(("D2", words)))
    slight = frozenset(case.change("train").hit(MASTERS, "slight"))
    uneven = _uneven(case)
    if case.mastered and (slight or uneven):
        question, title, remedy = ("", "", "") if slight else _outside(uneven)
        yield Match("train", 0.85, slight, False, question, signs=tuple(uneven), title=title, remedy=remedy)
    if signs := case.fired("S09"):
        strength = 0.9 if case.resumed == "before" or not case.change("load").rows else 0.4
        yield Match(case.resumed, strength, named_in(signs), signs=tuple(signs))


def _uneven(case: Case) -> list[Sign]:
    """Return weights that no gradient reached and that did not all shrink by the same factor."""
    return [one for one in case.fired("P11") if not one.evidence.get("even")]


def _outside(uneven: list[Sign]) -> tuple[str, str, str]:
    """Return a question, a title and a remedy for such weights, all empty if they were rounded to a narrower type."""
    if any(one.evidence.get("through") for one in uneven):
        return "", "", ""
    return OUTSIDE, "Weights that no gradient reached changed, and not by weight decay.", ELSE


def _through(change: LedgerLeg, names: frozenset[str]) -> str:
    return str(change.detail(MASTERS, min(names)).get("through", "16 bits"))


def other_masters(case: Case) -> Iterator[Match]:
    for change in case.changes:
        names = frozenset(change.hit(MASTERS, *VALUES, "fill", "zero", "moved."))
        if not names:
            continue
        if change.leg == "load":
            if change.hit(WEIGHTS) & names:
                continue
            words = case.equal(change, WEIGHTS, "weights", names)
            moved = change.hit(MASTERS, "moved.") & names  # the partitions of the optimizer were read at other places
            alone = names == change.hit((*MASTERS, *MOMENTS)) and not moved
            exact = bool(words) and alone and change.whole(MASTERS, names)  # a part may be of another save
            strength = 0.6 if 2 * len(moved) > len(names) else 0.95
            yield Match("load", strength, names, exact, reasons=case.against(("D3 E1 A2", words)))
        elif change.leg == "train" and not change.hit(MASTERS, "moved."):
            kept = case.equal(change, MOMENTS, "moments", names)
            large = {name for name in change.seen(*MASTERS) if kinds([name]) != {"norm"}}
            whole = large <= names and not change.hit(MASTERS, "part")  # a part of them: names that did not match
            yield Match("train", 0.9 if whole else 0.5, names, reasons=case.against(("B1 B6 G6", kept)))
    known = case.change("train").hit(MASTERS, "moved.", "other", "fill", "zero")
    if case.mastered and (rows := [one for one in case.stale_rows if not set(one.tensors) <= known]):
        yield Match("train", 0.8, named_in(rows), signs=tuple(rows))
    signs = [one for one in case.fired("S08") if int(one.evidence.get("elements", 0)) > 8]
    names = named_in(signs)
    if signs and not case.change("load").hit((*WEIGHTS, *MASTERS)) and not _masters_right(case, names):
        title, remedy, losses = ("", "", "") if _masters_wrong(case, names) else (UNDECIDED, FROM_ONE, OF_EITHER)
        yield Match(case.resumed, 0.7, names, signs=tuple(signs), title=title, remedy=remedy, losses=losses)


def _masters_right(case: Case, names: frozenset[str]) -> bool:
    """Return whether these masters moved as the updates allow. Weights that are unlike them are then wrong."""
    return bool(names & case.change("train").seen(*MASTERS)) and not _masters_wrong(case, names)


def _masters_wrong(case: Case, names: frozenset[str]) -> bool:
    """Return whether some of these masters, or their moments, did not move as the updates allow."""
    wrong = case.change("train").hit((*MASTERS, *MOMENTS))
    return bool(names & wrong.union(*(sign.tensors for sign in case.fired("P11", "P12"))))


def other_weights(case: Case) -> Iterator[Match]:
    later = [one for one in case.fired("S08", where="after") if int(one.evidence.get("elements", 0)) > 8]
    names = named_in(later)
    if later and not case.change("load").hit((*WEIGHTS, *MASTERS)) and _masters_right(case, names):
        sums = case.pairs.get(f"{case.start} → after", {})
        still = all(name in sums and sums[name].unchanged == sums[name].count for name in names)
        yield Match("train", 0.95, names, signs=tuple(later), losses=UNTIL_COPIED if still else "")
    change = case.change("load")
    names = frozenset(change.hit(WEIGHTS, *VALUES, "fill", "zero"))
    held = names & change.seen(*MASTERS)
    if names and held and not change.hit(MASTERS) & names:
        words = case.equal(change, MASTERS, "masters", held)
        part = bool(case.traits.get("place")) and case.traits["place"].confined
        yield Match("load", 0.8 if part else 1.0, names, reasons=case.against(("D2 A2 F4", words)))


def _narrower(case: Case, cause: str) -> list[Sign]:
    """Return signs of tensors with as many elements as before and a smaller type, if that cause fits them."""

    def fits(one: Sign) -> bool:
        some = {quantity(role) for role in one.evidence.get("rounded") or ()}
        return bool(some) and cause == ("D4" if some & set(MOMENTS) else "D1" if some <= set(MASTERS) else "D7")

    return list(filter(fits, case.fired("N3")))


def moments_rounded(case: Case) -> Iterator[Match]:
    if signs := _narrower(case, "D4"):
        yield Match("train", 0.9, signs=tuple(signs))
    for change in case.changes:
        names = frozenset(change.hit(MOMENTS, "rounded"))
        if change.leg == "train":  # weights that moved far did so by more than rounded moments
            held = (*change.weights, *MASTERS)
            names -= change.hit(held) - change.hit(held, "slight")
        spots = frozenset(change.hit(MOMENTS, "spots"))
        if case.of_layer(change, spots):
            continue  # an older save of that layer (G6)
        if spots or (names and change.leg == "train" and 2 * len(names) < len(change.seen(*MOMENTS))):
            title = "Some second moments fell farther than updates let them."  # rounding spares none
            question = "does the trainer set moments to zero, as with masks of weights?"
            yield Match("train", 0.9, spots or names, False, question, title=title, remedy="restore the moments")
        elif names:
            exact, asked = _typed(change, MOMENTS, names), _meant(change, MOMENTS, names)
            through = {str(change.detail(MOMENTS, name).get("through")) for name in names}
            losses = "no loss shows it" if through == {"bfloat16"} else ""
            yield Match(change.leg, 1.0, names, exact, asked, losses=losses)
    if signs := case.fired("S10"):
        yield Match(case.resumed, 0.5, named_in(signs), signs=tuple(signs))


def weights_cast(case: Case) -> Iterator[Match]:
    if signs := _narrower(case, "D7"):
        averages = all(one in AVERAGES for sign in signs for one in map(quantity, sign.evidence["rounded"]))
        title = "The averaged weights were cast to a narrower type." if averages else ""
        remedy = "restore the averages in the type in which they were saved; small steps are lost in 16 bits"
        yield Match("train", 0.9, signs=tuple(signs), title=title, remedy=remedy if averages else "")
    if signs := case.fired("P31"):
        rest = case.fired("P05", "P12", where=where_of(signs[0]))  # what the rounding moved
        yield Match("train", 1.0, named_in(signs), signs=(*signs, *rest))
    uneven = _uneven(case)
    if uneven and not case.mastered:
        question, title, remedy = _outside(uneven)
        names = named_in(uneven)
        yield Match("train", 0.4, names, False, question, signs=tuple(uneven), title=title, remedy=remedy)
    for change in case.changes:
        names = frozenset(change.hit(WEIGHTS, "rounded"))
        if names and not change.hit(MASTERS) - change.hit(MASTERS, "rounded"):
            exact = _typed(change, WEIGHTS, names)
            yield Match(change.leg, 0.95, names, exact, _meant(change, WEIGHTS, names))


def _typed(change: LedgerLeg, quantities: tuple[str, ...], names: frozenset[str]) -> bool:
    """Return whether values were rounded to a type as it is. With a scale, as in quantised state, more forms fit."""
    return change.exact and all(change.detail(quantities, name).get("through") in FLOATS for name in names)


def _meant(change: LedgerLeg, quantities: tuple[str, ...], names: frozenset[str]) -> str:
    """Return a question if rounded tensors are also stored in the narrower type, as after a change of precision."""
    narrower = all(change.detail(quantities, name).get("narrower") for name in names)
    return "they are also stored in a narrower type: was the precision changed on purpose?" if narrower else ""


def loss_scale(case: Case) -> Iterator[Match]:
    signs = [*case.fired("N14"), *(one for one in case.fired("R11") if one.evidence.get("kind") == "loss_scale")]
    signs += [one for one in case.fired("R11", "P29") if one.evidence.get("part") == "loss scale"]
    fell = any(one.rule == "N14" and one.evidence.get("scale", 0) < one.evidence.get("before", 0) for one in signs)
    if fell and (still := case.fired("N25")):
        title = "No update was applied: the loss scale fell, as it does when gradients overflow."
        remedy = "find where gradients become infinite or NaN; at no scale were they finite"
        yield Match("train", 1.0, signs=(*signs, *still), title=title, remedy=remedy)
    elif signs:
        yield Match(case.resumed, 0.95, signs=tuple(signs))


def fp8_scales(case: Case) -> Iterator[Match]:
    new = [one for one in case.fired("R01") if one.evidence["kind"] == "are new" and _of_scales(one)]
    if new:
        question, title = "does training in fp8 begin here?", "fp8 scales were added, and are not set yet."
        yield Match("load", 1.0, signs=(*new, *case.fired("N15")), question=question, title=title)
        return
    for change in case.changes:
        names = frozenset(change.hit(OF_SCALES))
        if names and not (change.hit(change.weights) and change.hit(MOMENTS)):
            yield Match(change.leg, 0.95, names)  # scales may be recomputed on purpose
    if signs := [*case.fired("N15"), *(one for one in case.fired("P24") if one.causes[:1] == ("D9",))]:
        yield Match(case.resumed, 0.9, named_in(signs), signs=tuple(signs))


def _of_scales(sign: Sign) -> bool:
    """Return whether a sign on tensors is about those of fp8 alone."""
    return {part.rpartition(" ")[2] for part in str(sign.evidence["roles"]).split(", ")} <= set(OF_SCALES)


# ---- the catalogue ---------------------------------------------------------------------------------------------------

SCHEDULES = (
    made("C1", "The learning-rate schedule restarted.",
         "the scheduler's state was not saved or not loaded", "a plateau, no spike",
         "save and load scheduler.state_dict()", ECHO, "verl 7953; transformers 27749",
         megatron="resume without --finetune and --no-load-optim: both skip the scheduler",
         deepspeed="load_checkpoint(load_lr_scheduler_states=True)",
         hf="resume_from_checkpoint with scheduler.pt in the folder", dcp="add the scheduler to the state that "
         "dcp saves; torchtitan: 'lr_scheduler' among the loaded states",
         explains="P29 P34 S16 S17 N6 N9 R11 P11 P13 P15 P05 P10",
         expects="S17 R11 P15 N6",
         losses="the first loss is right; after that, the loss follows the learning rate",
         everywhere=True,
         pattern=schedule_restarted),
    made("C2", "The schedule was lost: the learning rate is back at its peak or on another curve.",
         "a new default set another decay length or none", "a spike or divergence",
         "restore the schedule's length and position; go back to the previous checkpoint", ARGS, "catalogue C2",
         megatron="pass the same --lr-decay-iters and --train-iters, or --use-checkpoint-opt_param-scheduler",
         explains="S16 S17 N6 R11 R12 P05 P06 P08 P11 P13 P15",
         losses="the first loss is right; after that, the loss follows the learning rate",
         everywhere=True,
         pattern=schedule_lost),
    made("C3", "The schedule was stepped more often, or less often, than the optimizer.",
         "it was stepped once more on load or once per rank, or a count was used as an increment",
         "the learning rate is too low (or decays too soon)", "set the schedule to the trainer's step after the load",
         ECHO, "slime 1547, miles 1627",
         megatron="opt_param_scheduler.step(increment=…) takes samples: call it once per update",
         deepspeed="let the engine step the scheduler; do not step it yourself as well",
         explains="S16 S17 N6 N9 R11 P11 P13 P15",
         expects="S17 R11 P15",
         losses="the first loss is right; after that, the loss follows the learning rate",
         everywhere=True,
         pattern=stepped_twice),
    made("C4", "The length of the schedule changed, and so did its curve.", "total steps or epochs changed",
         "a kink", "if this was intended, nothing; otherwise restore the number of steps", ARGS, "catalogue C4",
         explains="P37 S16 S17 R11 R12 P11 P13 P15",
         losses="the first loss is right; after that, the loss follows the learning rate",
         everywhere=True,
         pattern=another_length),
    made("C5", "Weight decay was stale in the first update.", "the groups' value is set by the first scheduler step",
         "not visible", "step the scheduler (or set the decay) before the first update",
         "a checkpoint one update after the resume", "Megatron-LM 7468, 5213; Automodel 3882",
         explains="P11 P12",
         losses="no loss shows it",
         everywhere=True),
    made("C6", "The data restarted from the beginning.", "the data loader's position was not restored",
         "the loss drops on data seen before, then returns", "restore the loader's state, or skip consumed samples",
         "the data loader's state in the checkpoint", "catalogue C6",
         dcp="save the state of a StatefulDataLoader; torchtitan: 'dataloader' among the loaded states",
         megatron="args.consumed_train_samples must be restored: resume without --finetune",
         hf="ignore_data_skip=False", deepspeed="pass the loader's position through client_state",
         lightning="save the loader's position with a StatefulDataLoader",
         explains="P29 P34 S18 R11 N10",
         losses="the loss drops on data seen before",
         everywhere=True,
         pattern=data_again),
    made("C7", "The order of the data changed.", "the sampler's seed, epoch or world size was not restored",
         "repeated or missing samples; the loss changes within its noise", "restore the sampler's seed and epoch",
         "the sampler's state in the checkpoint", "catalogue C7",
         explains="N10 R11",
         losses="the loss changes only within its noise",
         everywhere=True,
         pattern=another_order),
    made("C8", "Random-generator states are missing, or equal on all ranks.", "one rank's state was loaded everywhere",
         "not visible in the loss; dropout is correlated", "save and restore one generator state per rank",
         "the generator state of each rank", "catalogue C8", megatron="resume without --no-load-rng",
         explains="N11 R11 P29 P51",
         losses="no loss shows it",
         everywhere=True,
         pattern=random_states),
    made("C9", "The trainer's step is not the step of the stored state.",
         "the step was read late in an asynchronous save, or a name and a file disagree",
         "the run resumes at the wrong point",
         "set the trainer's step to the optimizer's count; read the step before the save begins",
         "the trainer's log of the last saves", "Megatron-Bridge 3267, 5738",
         explains="S06 S07 S16 S17 S18 R10 R11 P01 P15 P05 P12 P20",
         expects="S07",
         losses="the first loss is that of the stored state, logged under another step",
         everywhere=True,
         pattern=another_step),
    made("C10", "The batch size changed.", "the global batch size or the gradient accumulation changed",
         "the gradient noise changes", "if this was intended, scale the lr as well; otherwise restore the batch size",
         ARGS,
         "catalogue C10",
         explains="N12 R12 S18 R11 S17",
         losses="the first loss is right; after that, the loss is more or less noisy",
         everywhere=True,
         pattern=another_batch),
)  # fmt: skip

PRECISION = (
    made("D1", "The fp32 masters were rebuilt from 16-bit weights.",
         "masters were not saved or not loaded, and were recreated from the model's weights",
         "none visible, but each restart loses all updates so far that are below half an ulp",
         "load the masters", ECHO, "OpenTau 185; catalogue D1",
         deepspeed="zero_optimization: load_from_fp32_weights=true, and the optim_states files present",
         megatron="resume without --no-load-optim: the masters are in the distributed optimizer's 'param'",
         dcp="keep parameters in fp32 (FSDP2 MixedPrecisionPolicy), so the saved tensors are the masters",
         paddle="load master_weights with the optimizer (.pdopt, or unified checkpoint's master_weights)",
         explains="P05 P06 P08 P11 P12 P13 P17 P18 S09 R07 R09",
         expects="S09 R07",
         losses="no loss shows it",
         pattern=masters_rebuilt, damage=updates_lost),
    made("D2", "The fp32 master weights do not match the weights.",
         "the masters are stale, random or from another tensor, while the 16-bit weights are right",
         "the first loss is right; the second is wrong",
         "load the masters from the same save as the weights; masters rebuilt from the weights lose their low bits",
         ECHO, "DeepSpeed 762, 3742; apex 180",
         deepspeed="after loading weights alone, call engine.optimizer.refresh_fp32_params(); otherwise set "
                   "load_from_fp32_weights",
         megatron="call optimizer.reload_model_params() after loading weights alone",
         explains="P05 P06 P08 P11 P12 P13 P17 P18 S08 S15 S13 N29 R02 R04 R05 R09 R13 R03 S09",
         expects="S08",
         losses="the first loss is right; the second is wrong",
         pattern=other_masters),
    made("D3", "The 16-bit weights do not match their fp32 masters.",
         "the weights are stale or damaged, while the masters are right",
         "the first loss is wrong; from the second step on, it is right",
         "copy the masters into the weights before the first forward pass", ECHO, "DeepSpeed 4141; catalogue D3",
         explains="S08 S12 R06 R08 R09",
         expects="S08",
         losses="the first loss is wrong; the second is right",
         pattern=other_weights),
    made("D4", "The moments were rounded to 16 bits.", "they were saved or loaded as bfloat16 or float16",
         "with bfloat16, hardly any; with float16, second moments below 6e-8 become 0 and the first updates are "
         "far too large",
         "save and load the moments in float32", ECHO, "catalogue D4",
         explains="S10 R07 R08 P03 P04 P05 P06 P09 N3 S02 S04 S19",
         expects="S10 R07",
         losses="with bfloat16, no loss shows it; with float16, the second loss is wrong",
         pattern=moments_rounded),
    made("D5", "bf16 second moments cannot decay.", "(1−β2) is below half an ulp of bf16",
         "frozen step sizes", "keep exp_avg_sq in float32, or β2 ≤ .995", "an earlier checkpoint", "catalogue D5",
         explains="N13 S10"),
    made("D6", "16-bit weights without masters do not change.", "updates are below half an ulp",
         "the loss stops falling", "keep fp32 masters, or round stochastically",
         "an earlier checkpoint", "catalogue D6",
         explains="P10"),
    made("D7", "The weights were cast to a narrower type.",
         "fp32 was converted to bf16, as by an export used to resume",
         "as for masters: small updates so far are lost",
         "load the weights in the type that the training uses; do not resume from an export",
         ECHO, "catalogue D7",
         explains="P31 P27 P05 P06 P08 P11 P12 P13 P17 P18 S09 R07 N3",
         pattern=weights_cast),
    made("D8", "The loss scale was reset.", "the scaler's state was not restored", "skipped steps, then normal",
         "save and load the scaler's state", ECHO, "transformers 34053, composer 1376, Lightning 10766",
         explains="P29 N14 N25 R11 P01",
         pattern=loss_scale),
    made("D9", "fp8 scales or amax histories were lost.", "_extra_state is missing, empty or in another layout",
         "NaN or an explosion at the first step", "restore _extra_state of every module, or recompute the scales first",
         ECHO, "TransformerEngine 982, Megatron-Bridge 1730, NeMo 6929",
         megatron="set --dist-ckpt-strictness raise_all, which raises an error if _extra_state is missing",
         explains="N15 P24 R03 R07 R09 N4 R01",
         pattern=fp8_scales),
    made("D10", "ε dominates the update.", "√v is below ε", "updates vanish", "lower ε, or scale the loss",
         "an earlier checkpoint", "catalogue D10",
         explains="N16"),
)  # fmt: skip
