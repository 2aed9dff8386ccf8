"""Causes G and H: corruption and mixed saves; deliberate changes and the model itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from workbench.core.words import plural
from workbench.doctor.causes.case import NEARLY_ALL, OUTSIDE, SET_ANEW, Case, Match, leg_of, named_in
from workbench.doctor.causes.cause import made
from workbench.doctor.facts.evidence import State, is_numbered
from workbench.doctor.facts.schedule import sets_rates
from workbench.doctor.ledger.roles import BUFFERS, FIRST, MASTERS, MAXIMA, MOMENTS, SECOND, STATE, WEIGHTS
from workbench.doctor.ledger.rows import LedgerLeg, Status
from workbench.doctor.ledger.sign import Sign
from workbench.doctor.passes.updates import passed
from workbench.names.weights import kinds, parse

HASHES = "content hashes of the save (workbench manifest), or an echo"
RESTORE = "restore the file from a copy, or go back to the previous checkpoint"
MODELS = "compare the definitions of the two models"
FLIPPED = 2  #: most tensors in which bits flip in one accident
VALUES = ("near", "other", "part", "slight", "fill", "zero")
STATES = ("near", "other", "part", "fallen")  #: the same for moments
UNITS = "does the trainer begin units anew, with their optimizer state?"
PRUNED = "were the weights pruned on purpose?"
OF_DAMAGE = "damaged weights show in the first loss; damaged masters and moments show from the second on"
BEGINNINGS = ("zero", "swapped", "moved.", "zeros", "flip")  #: forms of moments that make later values explode
BORN_ZERO = ("bias", "lora_B.weight")  #: parameters that are zero when they are made


def _all(change: LedgerLeg) -> tuple[str, ...]:
    return (*change.weights, *MASTERS, *MOMENTS)


def _flips(case: Case, change: LedgerLeg) -> Iterator[tuple[bool, bool, frozenset[str]]]:
    """Yield flipped bits as ``(in a second moment, in the top exponent bit, names)``."""
    anew = case.counters(change.leg).reset if change.leg == "train" else frozenset()  # in which laws hold by chance
    for moment, quantities in ((False, (*change.weights, *MASTERS, *FIRST)), (True, SECOND)):
        names = frozenset(change.hit(quantities, "flip") - anew)
        if names:
            found = [change.detail(quantities, name) for name in names]
            top = any(one.get("top") or float(one.get("worst") or 0) > 1e4 for one in found)
            yield moment, top, names


def damaged(case: Case) -> Iterator[Match]:
    for change in case.changes:
        nan = frozenset(change.hit((*_all(change), *BUFFERS), "nan"))
        if change.leg != "load" and any(one.hit(MOMENTS, *BEGINNINGS) for one in case.changes):
            nan = frozenset()  # wrong moments make values non-finite a few updates later
        if nan and not case.fired("S03"):
            law = (
                f"elements of {plural(len(nan), 'parameter')} were finite before and are not in the echo"
                if change.exact
                else ""
            )
            every = (*_all(change), *BUFFERS)  # if others changed too, they may have overflowed in a narrower type
            exact = change.exact and all(change.detail(every, name).get("alone") for name in nan)
            yield Match(change.leg, 1.0, nan, exact, reasons=case.against(("G9 C2", law)))
        for moment, top, names in _flips(case, change):
            if not moment:
                yield Match(change.leg, 1.0 if top else 0.6, names, change.exact and top)
    if signs := case.fired("S01", "P09"):
        old = [one for one in signs if one.evidence.get("in") == "before"]
        reasons = case.against(("B1 C1 C2", "the checkpoint that was resumed from already has it" if old else ""))
        # wrong moments make values NaN a few updates later
        began = any(change.hit(MOMENTS, *BEGINNINGS) for change in case.changes)
        loaded = any(row.status in (Status.BEYOND, Status.ABSENT) for row in case.change("load").rows)
        began |= loaded and all(leg_of(one) in ("after", "train") for one in signs)
        leg, strength = "before" if old else case.resumed, 0.3 if began and not old else 0.9
        yield Match(leg, strength, named_in(signs), signs=tuple(signs), reasons=reasons)
    if signs := case.odd("S02"):
        beyond = any(one.severity == "error" for one in signs)
        yield Match(case.resumed, 0.99 if beyond else 0.7, named_in(signs), signs=tuple(signs))


def flipped(case: Case) -> Iterator[Match]:
    for change in case.changes:
        for moment, top, names in _flips(case, change):
            if not moment:
                yield Match(change.leg, 0.6 if top else 1.0, names, change.exact and not top)
            elif len(change.hit(MOMENTS)) <= FLIPPED:
                yield Match(change.leg, 0.6, names, False)
    few = [one for one in case.fired("S08") if int(one.evidence.get("elements", 9)) <= 8]
    if few and not case.change("load").hit((*WEIGHTS, *MASTERS)):
        yield Match(case.resumed, 0.8, named_in(few), signs=tuple(few))


def moment_flipped(case: Case) -> Iterator[Match]:
    for change in case.changes:
        for moment, _, names in _flips(case, change):
            if moment:
                worst = max(float(change.detail(SECOND, name).get("worst") or 2) for name in names)
                # a flipped exponent bit changes a number by a factor of 2 or more
                title = "" if worst >= 2 else "A second moment is smaller than the updates can make it."
                yield Match(change.leg, 1.0, names, change.exact, title=title)
    if signs := case.odd("S03"):
        nan = case.fired("S01", "P09")
        yield Match(case.resumed, 0.97, named_in(signs), signs=(*signs, *nan))
    few = [one for one in case.odd("S04") if int(one.evidence.get("elements", 9)) <= 8]
    if any(change.hit(FIRST, "flip") for change in case.changes):
        few = []  # it is the first moment that is too large
    if signs := [*few, *case.odd("N28")]:
        yield Match(case.resumed, 0.9, named_in(signs), signs=tuple(signs))


def zeroed(case: Case) -> Iterator[Match]:
    for change in case.changes:
        names = frozenset(change.hit(_all(change), "zeros") - case.counters(change.leg).reset)
        if change.exact:  # state that is zero in a part whose weights are others began there
            held = (*change.weights, *MASTERS)
            names -= change.hit(held) - change.hit(held, "zeros")
        anew = frozenset() if change.exact else _units_anew(change)
        anew -= named_in(case.fired("S04", where="after"))  # the first moments stayed
        names -= anew
        if units := frozenset(change.hit(_all(change), "units")):
            title = "Single rows and columns of tensors, here and there, were begun anew."
            yield Match(change.leg, 0.98, units, question=UNITS, title=title)
        pruned = frozenset(change.hit(WEIGHTS, "pruned"))
        masked = _masked(case, names, pruned)
        names -= masked
        parts = change.hit(MOMENTS, "part")  # in small ones, the new form of a part cannot be seen
        if names and len(parts) <= 2 * len(names & change.hit(MOMENTS, "zeros")):
            names |= parts
        if names:
            yield Match(change.leg, 0.98, names, False, title=_of_zeros(change, names))
        if pruned:
            yield Match(change.leg, 0.98, pruned | masked, question=PRUNED, title="The smallest weights became zero.")
        patch = frozenset(change.hit(_all(change), "patch") - change.hit(change.weights, "moved."))
        rows = patch & change.hit((*change.weights, *MASTERS), "part")
        patch -= {name for name in rows if kinds([name]) <= {"embed", "head"}}  # complete rows of a vocabulary
        patch |= anew
        if patch:
            # damage would be in one of them
            both = change.leg == "train" and patch <= change.hit(change.weights, "part", "other") & change.hit(MOMENTS)
            one = "one tensor is" if len(patch) == 1 else f"{len(patch):,} tensors is"
            title = f"A small part of {one} damaged."
            if both:
                title = "A part of a tensor, and of its optimizer state, did not continue."
            question = UNITS if both else ""
            if not both and _rows_replaced(case, change, patch):
                title, question = "Complete rows of a tensor were replaced.", OUTSIDE
            yield Match(change.leg, 0.97, patch, False, question, title=title)
        whole = frozenset(change.hit((*change.weights, *MASTERS), "zero"))
        whole = frozenset(name for name in whole if not name.endswith(BORN_ZERO))
        if whole and not kinds(whole) <= {"norm"}:
            # the updates after a start at zero are known, why it was zero is not: initial values often are
            title = "Weights became zero." if change.exact else "Weights are where updates from zero lead."
            yield Match(change.leg, 0.85 if change.exact else 0.7, whole, False, title=title)
    if signs := case.fired("S11"):
        yield Match(case.resumed, 0.9, named_in(signs), signs=tuple(signs))


def _masked(case: Case, names: frozenset[str], pruned: frozenset[str]) -> frozenset[str]:
    """Return those of ``names`` that are pruned weights, or state of their sizes whose owners are unknown."""
    sizes, later = {case.numel(name) for name in pruned}, case.later
    held = {name: later.params.get(name, {}) for name in names if is_numbered(name)}
    numels = {name: [int(later.ckpt.catalog.numel[held[name][r]]) for r in MOMENTS if r in held[name]] for name in held}
    return names & pruned | {name for name, own in numels.items() if own and set(own) <= sizes}


def _rows_replaced(case: Case, change: LedgerLeg, names: frozenset[str]) -> bool:
    """Return whether these are weights with complete rows that are others, while several updates continued the moments.

    Trainers begin units anew now and then; that one did at the very update after the load is unlikely.
    """
    k = passed(case.evidence.before.facts, case.later.facts)
    rows = all("tail" in change.detail(change.weights, name) for name in names)
    return change.leg == "train" and k is not None and k > 1 and rows and not change.hit(MOMENTS)


def _units_anew(change: LedgerLeg) -> frozenset[str]:
    """Return the weights with fewer than half of their rows replaced, where their moments began at zero."""
    found = set()
    for name in change.hit(change.weights, "part") & change.hit(MOMENTS, "zeros"):
        rows = change.detail(change.weights, name)
        if 2 * rows.get("rows", 0) < rows.get("of", 0):
            found.add(name)
    return frozenset(found)


def _of_zeros(change: LedgerLeg, names: frozenset[str]) -> str:
    """Return a title with the run of zeros and its tensor, if it was counted."""
    counts = {name: change.detail(_all(change), name) for name in names}
    name = max(counts, key=lambda one: int(counts[one].get("elements", 0)))
    found = counts[name]
    if "first" not in found:
        return ""
    more = f" and {len(names) - 1:,} more" if len(names) > 1 else ""
    start = f"{int(found['elements']):,} elements of {name!r}{more}, from element {int(found['first']):,} on,"
    return f"{start} were replaced by zeros."


def misread(case: Case) -> Iterator[Match]:
    """Match loads in which a part of a single tensor has other values, and all else is equal."""
    change = case.change("load")
    alone = change.hit((*_all(change), STATE, *BUFFERS))
    part = frozenset(alone & change.hit(_all(change), "part"))
    if len(alone) == 1 and part and change.exact and not kinds(part) <= {"embed", "head"}:  # not rows of a vocabulary
        yield Match("load", 0.95, part, False, title="A small part of one tensor was not loaded as it is stored.")


def _buffers_of(change: LedgerLeg, names: Iterable[str]) -> set[str]:
    """Return the changed buffers in the layers of these weights."""
    layers = {(one.stack, one.layer) for one in map(parse, names)}
    return {name for name in change.hit(("buffer",), *VALUES) if ((one := parse(name)).stack, one.layer) in layers}


def truncated(case: Case) -> Iterator[Match]:
    signs = [one for one in case.fired("V01") if "G8" not in one.causes[:1]]
    if signs:
        yield Match(case.resumed, 0.9, signs=tuple(signs))


def mixed(case: Case) -> Iterator[Match]:
    for change in case.changes:
        if change.leg == "load" and case.saved:
            continue
        weights = change.hit((*change.weights, *MASTERS), *VALUES) & case.displaced(change)
        moments, spots = change.hit(MOMENTS, *STATES), change.hit(MOMENTS, "spots")
        moments |= spots if case.of_layer(change, spots) else set()
        moments -= case.first_other(change)  # one of two: not by saves (B6)
        place = case.traits.get("place") if change.leg == "load" else None
        confined = place is not None and place.confined
        part = frozenset(change.hit(_all(change), "part") - change.hit(change.weights, "moved."))
        if change.leg == "train" and case.first_stayed(change):  # another save has other ones, too
            weights, moments, part = set(), moments - change.hit(SECOND, "fallen", "other"), frozenset()
        if sunk := case.sunk(change):  # updates divided by the roots of these second moments are large
            weights, moments, part = weights - sunk, moments - sunk, part - sunk
        if not weights and len(part) < len(moments - part) and part <= change.hit(MOMENTS, "part"):
            part = frozenset()  # all moments changed, but in some it shows only in places
        numbered = {name for name in moments if is_numbered(name)} if weights else set()
        both = frozenset(weights & moments or (weights | numbered if numbered else ()))
        both |= _buffers_of(change, both)
        odd = case.counters(change.leg)
        off = odd.ahead | odd.behind
        if change.leg == "train":  # with its counter, even one that only its second moments show
            moments |= change.hit(MOMENTS) & odd.behind
        counts = tuple(case.counted if change.leg == "train" else ())
        if counts and (weights or moments or all(one.evidence["after"] > one.evidence["before"] for one in counts)):
            names = frozenset(weights | moments | named_in(counts))
            yield Match(change.leg, 0.97, names, signs=counts)
            continue
        few = off if len(off) < 0.9 * len(odd.known) else frozenset()
        if change.leg == "load" and odd.ahead and change.whole(change.weights, weights):
            continue  # the load itself made updates
        outer = kinds(weights | moments | part) <= {"embed", "head"}  # rows of the vocabulary
        masters = case.masters_alone(change, *VALUES)  # which are state of the optimizer
        if change.exact and masters and weights <= masters and 2 * len(moments) > len(masters):
            yield Match("load", 0.97, frozenset(masters | moments), False)
        elif confined and (weights or moments) and not (part and outer):
            apart = weights | moments
            yield Match(change.leg, 0.97, frozenset(apart | _buffers_of(change, apart)), False)
        elif len(part) > 2 and not kinds(part) <= {"embed", "head"}:
            yield Match(change.leg, 0.93, frozenset(weights | moments | part), False)
        elif both and not numbered and _strangers(case, change):
            yield Match(change.leg, 0.8, both, False, title="Weights and moments are not from this run.")
        elif both and not change.whole(change.weights, both):
            words = f"the rest of {plural(len(change.seen(*change.weights)), 'weight')} is not affected"
            both |= few if both <= few else set()  # small ones whose counters are of the other save, too
            yield Match(change.leg, 0.95, both, False, reasons=case.against(("G7", words)))
        elif moments and not weights and case.still(change, moments):
            lagging = bool(odd.behind)
            yield Match(change.leg, 0.97 if lagging else 0.8, frozenset(moments), False)
        elif weights and change.leg == "load" and not change.whole(change.weights, weights):
            yield Match("load", 0.6, frozenset(weights), False)
        if few and not change.hit(MOMENTS) & few:
            yield Match(change.leg, 0.6, few, False)
        elif few and moments and moments <= few:  # counters and moments of the same parameters are of another step
            yield Match(change.leg, 0.95, few, False)
    files = [one for one in case.fired("S07") if one.evidence.get("files")]
    broken = {n for one in case.odd("S02") if one.severity == "error" for n in one.tensors}  # frozen, and damaged
    broken |= case.rewritten
    stands = [one for one in case.fired("P36") if one.evidence["kind"] != "frozen" and not broken >= set(one.tensors)]
    signs = [*case.fired("N24", "V04"), *files, *stands]
    lr = case.evidence.before.facts.lr
    if any(one.evidence["kind"] == "repeated" for one in stands) and lr is not None:  # its settings are old too
        signs += [one for one in case.fired("N6", "P15", "S16") if one.evidence.get("lr") == lr]
    if signs:
        names = named_in(signs)
        single = bool(names) and all(case.numel(name) == 1 for name in names)  # such as a temperature
        yield Match(case.resumed, 0.95, names, False, SET_ANEW if single else "", signs=tuple(signs))


def _strangers(case: Case, change: LedgerLeg) -> bool:
    """Return whether nearly all weights are different ones of the old size; too large steps would make them grow."""
    return change.whole(change.weights, change.hit(change.weights, "other"), NEARLY_ALL) and not case.grown(change)


def repeated(case: Case) -> Iterator[Match]:
    for change in case.changes:
        weights = frozenset(change.hit((*change.weights, *MASTERS), "near", "slight"))
        moments = change.hit(MOMENTS, *VALUES, "fallen")
        counters = case.counters(change.leg)
        update = change.leg == "load" and 0 < counters.by <= 3 and bool(counters.ahead)
        if (
            weights & moments
            and change.whole(change.weights, weights)
            and change.whole(MOMENTS, moments)
            and not counters.reset
            and not update
        ):
            numbered = {name for name in moments | counters.behind if is_numbered(name)}
            yield Match(change.leg, 0.9, weights | numbered, False)
    # after one step, a scaler may have skipped the update; but not what else a step changes
    quiet = [one for one in case.fired("N25", info=True) if one.severity == "info"]
    lr = case.evidence.before.facts.lr
    stale = [one for one in case.fired("P24") if one.evidence.get("stands")]
    stale += [one for one in case.fired("N6", "P15", "S16") if lr is not None and one.evidence.get("lr") == lr]
    if quiet and stale:
        yield Match("train", 0.97, exact=True, signs=(*quiet, *stale))
    if signs := case.fired("N25"):
        yield Match("train", 0.97, named_in(signs), signs=tuple(signs))


def incomplete(case: Case) -> Iterator[Match]:
    signs = [one for one in case.fired("V01") if "G8" in one.causes[:1]]
    if signs:
        yield Match(case.resumed, 0.9, signs=tuple(signs))


def computation(case: Case) -> Iterator[Match]:
    """Match only if the load is known to be right in everything stored, and what follows is wrong."""
    load, train = case.change("load"), case.change("train")
    groups = [quantity for quantity in (*WEIGHTS, *MASTERS, *MOMENTS) if load.seen(quantity)]
    clean = bool(groups) and not load.hit(groups) and not case.fired("S01", "S03", where="before")
    whole = not any(case.ledger.reasons("load", (quantity,)) for quantity in (*WEIGHTS, *MASTERS, *MOMENTS))
    broken = frozenset(train.hit(_all(train), "nan", "other", "flip"))
    if clean and whole and broken and set(groups) & set(MOMENTS):
        words = case.equal(load, groups, "weights and moments")
        yield Match("train", 0.8, broken, False, reasons=case.against(("G1 G3 A2 B1 B6", words)))


# ---- H: on purpose ---------------------------------------------------------------------------------------------------


def another_size(case: Case) -> Iterator[Match]:
    if case.upcycled:
        signs = case.fired("R01", "P02", "N3", "S14", "N26")
        names = named_in(signs)
        question = "was the model turned into a mixture of experts on purpose?"
        title = "The model has experts, and had none before."
        yield Match(case.leg, 1.0, names, question=question, signs=tuple(signs), title=title, remedy=MODELS)
        return
    more, what = (case.deeper, "layer") if case.deeper else (case.wider, "expert")
    words = {"are new", "appeared"} if more > 0 else {"are gone", "vanished"}
    words |= {"have another shape"} if what == "expert" else set()  # routers
    signs = [one for one in case.fired("R01", "P02", "N3") if one.evidence.get("kind") in words]
    change = case.change(case.leg)
    held = (*change.weights, *MASTERS, *MOMENTS)
    copies = change.hit(held, "moved.layer") if what == "layer" and more else set()  # or layers that moved down
    if what == "expert":
        copies = {name for name in change.hit(held) if parse(name).routed or kinds([name]) == {"router"}}
    if more > 0:
        signs += case.fired("S14")
        copies |= named_in(case.fired("S14"))
    if more and (signs or copies):
        number = plural(abs(more), f"more {what}" if more > 0 else f"fewer {what}")
        names, question = named_in(signs) | copies, f"was the number of {what}s changed on purpose?"
        title = f"The model has {number} than before{', in all layers together' if what == 'expert' else ''}."
        yield Match(case.leg, 1.0, names, question=question, signs=tuple(signs), title=title, remedy=MODELS)
    if shaped := [one for one in case.shaped if one not in case.tables]:
        names = named_in(shaped)
        title, question = "Some tensors of the model have another shape.", "was the model changed on purpose?"
        yield Match(case.leg, 0.9, names, question=question, signs=tuple(shaped), title=title, remedy=MODELS)
    counted = [one for one in case.fired("R01", "P02") if "param" in str(one.evidence.get("roles", "param"))]
    gone = [one for one in counted if one.evidence.get("kind") in ("are gone", "vanished")]
    new = [one for one in counted if one.evidence.get("kind") in ("are new", "appeared")]
    if gone and new and _shapes(case.evidence.before, gone) == _shapes(case.later, new):
        names = named_in((*gone, *new))
        title, question = "Some tensors of the model have another name.", "were they renamed on purpose?"
        renamed = (*gone, *new, *case.fired("N3"))
        yield Match(case.leg, 1.0, names, question=question, signs=renamed, title=title, remedy=MODELS)
    elif gone and case.regrouped and not case.deeper and not case.wider:
        names = named_in(gone)
        title, question = "The model has fewer parameters than before.", "were parameters removed on purpose?"
        yield Match(case.leg, 0.9, names, question=question, signs=tuple(gone), title=title, remedy=MODELS)


def _shapes(state: State, signs: Sequence[Sign]) -> list[tuple[int, ...]]:
    """Return the shapes of the weights that signs name, sorted."""
    names = named_in(signs)
    return sorted(state.shape(roles["param"]) for name in names if "param" in (roles := state.params.get(name, {})))


def settings(case: Case) -> Iterator[Match]:
    signs = [*case.fired("R12", info=True), *case.fired("P16", "R14", "P19", "N12", info=True)]
    signs = [one for one in signs if one.evidence.get("kind") not in ("groups", "lr")]
    if fell := [one for one in signs if one.rule == "P16" and one.evidence.get("kind") == "estimate"]:
        title = "The optimizer's estimate of its step size fell, which it never does."
        remedy = "restore d and d_max of the param groups together with the optimizer's state"
        yield Match("train", 0.95, signs=tuple(fell), title=title, remedy=remedy)
        signs = [one for one in signs if one not in fell]
    if sizes := [one for one in signs if one.evidence.get("kind") == "sizes"]:
        title, question = (
            "The optimizer holds other parameters.",
            "were parameters added, frozen or unfrozen on purpose?",
        )
        remedy = "compare which parameters require gradients, and which are given to the optimizer, in both launches"
        yield Match(case.resumed, 0.9, signs=tuple(sizes), title=title, remedy=remedy, question=question)
        signs = [one for one in signs if one not in sizes]
    if any(one.evidence.get("kind") == "decay" for one in signs):
        signs += [one for one in case.fired("P12") if "old" in one.evidence]
    if any(one.evidence.get("field") == "amsgrad" for one in signs):
        new = [one for one in case.fired("R01") if one.evidence["kind"] == "are new"]
        signs += [one for one in new if str(one.evidence["roles"]).endswith(MAXIMA)]
    if case.declared:
        signs += case.fired("P30")
    if signs:
        leg = "train" if case.evidence.after is not None else case.resumed
        yield Match(leg, 0.8, signs=tuple(signs), question="were the settings changed on purpose?")
    if thawed := [one for one in case.fired("S06", "S07", info=True) if "H1" in one.causes]:
        question = "these parameters had no optimizer state before: were they unfrozen on purpose?"
        title = "Parameters train that did not train before."
        remedy = "if this was not intended, freeze them again"
        yield Match("train", 0.9, signs=tuple(thawed), question=question, title=title, remedy=remedy)
    train = case.change("train")
    idle = [one for one in case.fired("P01") if one.evidence.get("kind") == "still"]
    idle += [one for one in case.fired("P36") if one.evidence["kind"] == "frozen"]
    still = frozenset(train.hit(MOMENTS, "still") | named_in(idle))
    went_on = {name for one in case.fired("P36") if one.evidence["kind"] == "repeated" for name in one.tensors}
    still -= went_on - case.rewritten
    if still:
        question = "these parameters did not train: were they frozen on purpose?"
        title = "No update reached some of the parameters."
        yield Match("train", 1.0, still, signs=tuple(idle), question=question, title=title)
    rates = [one for one in case.fired("P15", "S16", "P13", "P19", "R14") if one.evidence.get("kind") in (None, "lr")]
    stated = any(map(sets_rates, case.declared))
    if rates and (stated or case.rescaled or any(one.evidence.get("declared") for one in rates)):
        if case.rescaled:
            rates += [one for one in case.fired("N6", "R17") if one.rule == "N6" or _of_rates(one)]
        yield Match(case.resumed, 0.9, signs=tuple(rates), question="was the learning rate changed on purpose?")
    kinds_of_data = ("samples", "loader", "consumed_samples")
    moved = [one for one in case.fired("S18", "R11", "P20") if one.evidence.get("kind") in kinds_of_data]
    ahead = [one for one in moved if _later(one.evidence)]
    if ahead:
        yield Match(
            case.resumed, 0.9, signs=tuple(ahead), question="was data skipped on purpose?", title="Data was skipped."
        )
    clip = case.fired("S19")
    if clip:
        yield Match(
            case.resumed, 0.4, signs=tuple(clip), title="The second moments are larger than the stated clip allows."
        )


def _of_rates(sign: Sign) -> bool:
    """Return whether only the learning rates of a schedule changed."""
    return all("base_lrs" in path or "_last_lr" in path for path in sign.evidence["changed"])


def _later(found: Mapping[str, Any]) -> bool:
    now = found.get("echo", found.get("consumed", found.get("loader")))
    due = found.get("before", found.get("step", 0) * found.get("batch", 1))
    return now is not None and now > due


# ---- the catalogue ---------------------------------------------------------------------------------------------------

CORRUPTION = (
    made("G1", "A number is damaged: a flipped exponent bit, NaN or infinity.", "memory, network or storage",
         "NaN, or an explosion", RESTORE, HASHES, "catalogue G1",
         explains="S01 S02 S08 S12 R03 R06 R07 R09 P03 P04 P09 S04 P05 P06 P08 P11 P12 P13 P17 P18 P36",
         losses=OF_DAMAGE,
         pattern=damaged),
    made("G2", "A bit is flipped.", "memory, network or storage", "mostly none", RESTORE + "; or correct the element",
         HASHES, "catalogue G2",
         explains="S02 S08 S12 R06 R09 P05 P06 P08 P11 P12 P13 P17 P18 P36",
         losses=OF_DAMAGE,
         pattern=flipped),
    made("G3", "A bit of a second moment is flipped.", "memory, network or storage",
         "negative: NaN; smaller: a huge step; larger: a frozen weight", RESTORE, HASHES, "catalogue G3",
         explains="P30 S01 S02 S03 S04 R03 R06 R09 P03 P04 P09 N16 S19 P05 P06 P08 P11 P12 P13 P17 P18",
         losses=OF_DAMAGE,
         pattern=moment_flipped),
    made("G4", "A file is truncated or unreadable.", "an interrupted or failed write", "the load fails, or zeros",
         RESTORE, "the file's size at the save", "catalogue G4",
         explains="P03 P04 P05 P06 P08 P11 P12 P13 P17 P18 R02 R04 R05 R09 R13 N5 N17 S11 R01 R03 R08 P02 V01 "
                  "V02 V03 N18",
         losses=OF_DAMAGE,
         pattern=truncated),
    made("G5", "Stored bytes were replaced by zeros.",
         "a crash before the write, sparse holes, or a memory map of an overwritten file",
         "a small jump", RESTORE + "; call fsync before reporting the save as complete", HASHES, "SimpleTuner 2714",
         explains="P03 P04 P05 P06 P08 P11 P12 P13 P17 P18 P36 R02 R04 R05 R09 R13 N5 N17 S19 N28 V02 V03 S04 S05 "
                  "S08 S11 S12 S15 S03 R03 R08 N29 P09 N8",
         expects="S11 R08",
         losses=OF_DAMAGE,
         pattern=zeroed),
    made("G6", "Parts of the checkpoint come from different saves.",
         "one rank's file is older, or an asynchronous save was not consistent",
         "often invisible", "take all files from one save; copy tensors before an asynchronous save returns",
         "a comparison of the files with those of the previous checkpoint", "pytorch 144657, Lightning 20953",
         dcp="dcp.async_save must stage CPU tensors too; compare the time of .metadata with those of the files",
         deepspeed="all *_optim_states.pt must come from one save: compare their times",
         megatron="all mp_rank_* must come from one save: compare their times and iterations",
         explains="P24 P25 P26 P27 P33 P03 P04 P05 P06 P08 P11 P12 P13 P17 P18 R02 R04 R05 R09 R13 N5 N17 S19 V04 N28 "
                  "S04 S06 S07 "
                  "S08 S12 N24 R10 P01 ",
         losses=OF_DAMAGE,
         pattern=mixed),
    made("G7", "The weights and the optimizer's state are those of an older save.",
         "another save was loaded, or cached structures were written again", "the run goes back",
         "check which save the load opened; if it was the right one, hash two consecutive saves",
         "the older checkpoints", "NeMo-RL 3312",
         explains="P24 P03 P04 P05 P06 P08 P11 P12 P13 P17 P18 R02 R04 R05 R09 R13 N5 N17 S19 N24 N25 R10 R11 P01 "
                  "S06 S07 S16 S17 S18 P15 P20 P36 N6 R14 R17",
         expects="S07 N25 R09",
         losses="the loss is that of the older save",
         everywhere=True,
         pattern=repeated),
    made("G8", "The tracker points to an incomplete checkpoint.",
         "the tracker was written before the save was complete", "an old or partial resume",
         "write the tracker last; resume from the last complete save",
         "the files on disk", "speculators 739",
         explains="P03 P04 P05 P06 P08 P11 P12 P13 P17 P18 R02 R04 R05 R09 R13 N5 N17 S07 R01 P02 V01 V04 N18",
         losses="the loss is that of an older save, or of a model loaded in part",
         pattern=incomplete),
    made("G9", "The computation itself produced wrong numbers.", "a defective device", "bursts, or steady drift",
         "run the step again on another device; test the device", "the same step from another run", "catalogue G9",
         explains="P03 P04 P05 P06 P08 P11 P12 P13 P17 P18 S01 P09 S12",
         losses="bursts, or a steady drift",
         pattern=computation),
    made("G10", "The data that was read differs from the data that is stored.", "a damaged read was broadcast",
         "as for flipped bits", "read again; compare with hashes made before the upload", HASHES, "catalogue G10",
         explains="R06 R08 R09 V02 V03 S08 P03 P04 P05 P06 P08 P11 P12 P13 P17 P18",
         losses=OF_DAMAGE,
         pattern=misread),
)  # fmt: skip

CHANGES = (
    made(
        "H1", "Settings of the run changed.", "arguments of the new launch, or new defaults", "depends on the setting",
        "compare the arguments with the intended ones; if they differ, resume again with the previous arguments",
        "the arguments of both launches", "catalogue H1",
        explains="R11 R12 P30 P03 P04 P05 P08 P11 P12 P13 P15 P16 N12 S16 S17 S18 N6 S06 S07 N3",
        losses="the loss depends on the setting", everywhere=True, pattern=settings
    ),
    made(
        "H2", "The model's config changed in a way that no tensor shows.", "rope base, attention scale, ε of norms",
        "a jump from the first loss on", "compare the model's config files", "both config.json files", "catalogue H2",
        explains="R01 P02 N3 N30 P03 P04 P05 P06 P08 P11 P12 P13 P17 P18 P32 R02 R03 R04 R05 R09 R13 N5 N17 N28 S14",
        losses="the loss depends on the setting", pattern=another_size
    ),
    made(
        "H3", "The data has a stretch of bad samples.", "few tokens with large gradients",
        "a spike that a resume does not cause", "inspect the batches of those steps", "the data's position and log",
        "catalogue H3", losses="the loss depends on the setting"
    ),
    made(
        "H4", "The model itself becomes unstable.", "attention or output logits grow", "recurring spikes",
        "add q/k norms or a z-loss, or lower the lr", "older checkpoints", "catalogue H4",
        losses="the loss depends on the setting"
    ),
)  # fmt: skip
