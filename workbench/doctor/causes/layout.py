"""Causes E and F: layouts of sharded tensors; replicas, tying, averages, adapters, vocabulary."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial

from workbench.core.words import plural
from workbench.doctor.causes.case import ELSE, NEARLY_ALL, OUTER, OUTSIDE, RELATED, Case, Match, named_in
from workbench.doctor.causes.cause import made
from workbench.doctor.causes.damage import wrong_steps
from workbench.doctor.facts.evidence import is_numbered
from workbench.doctor.facts.groups import OF_AVERAGES
from workbench.doctor.ledger.roles import AVERAGES, FIRST, MASTERS, MOMENTS, SECOND, WEIGHTS
from workbench.doctor.ledger.rows import LedgerLeg
from workbench.doctor.origins.tags import is_follower, is_reference
from workbench.names.roles import adapter_of
from workbench.names.weights import kinds

ALIKE = 0.9  #: cosine similarity of adapters to their old values from which they went on
MANY_TAGS = 4  #: number of kinds of moves that only a flat line cut at other places explains
SOME = 0.7  #: share of the weights
ONE_MORE = 0.2  #: distance of a factor from 2 within which 1 may have been added to norms
ONE_ADDED = "The norms were doubled, or 1 was added, as if they were stored as offsets from 1."
SCALED = "were they scaled on purpose, together with what they are multiplied with?"
FEW_FAR = 0.1  #: share of the elements that moved too far, below which the weights are not taken for others
FAR = 0.1  #: distance of a factor of norms from 1 that updates do not reach
ECHO = "an echo, saved right after the load and before any update"
#: Rules that see elements of weights at other places, those of them that say where, and what the loss does.
OF_ELEMENTS = "P03 P04 P05 P06 P08 P11 P12 P13 P17 P25 P32 P36 P18 R02 R04 R05 R09 R13 N5 N17"
OF_PLACES = "P17 P32 R02 R04 R05 R13 N17 N20"
RECOVERS = "the first losses are wrong; they recover over hundreds of updates"
ONE_FACTOR = 0.01  #: relative distance of factors that were estimated after an update
#: Tag of where rows moved → how well each cause fits it.
TAGS = {
    "layer": {"E9": 1.0},
    "stack": {"E9": 0.95},
    "followed": {"F4": 1.0, "A2": 0.5},
    "led": {"F4": 1.0},
    "reference": {"F6": 1.0},
    "trained": {"A2": 1.0},
    "expert": {"E10": 1.0},
    "gate_up": {"E3": 1.0, "E2": 0.5},
    "gate_up_mixed": {"E2": 1.0},
    "qkv": {"E4": 1.0, "E1": 0.5},
    "heads": {"E6": 1.0, "E1": 0.6},
    "rope": {"E5": 1.0, "E6": 0.6},
    "vocab": {"F7": 1.0, "E1": 0.5},
    "uneven": {"E8": 1.0, "F7": 0.5},
    "padding": {"E11": 0.9, "F7": 0.8},
    "ranks": {"E1": 1.0},
    "rows": {"E1": 0.6, "F7": 0.5},
    "name": {"E9": 0.8, "A1": 0.7},
    "mixed": {"E1": 0.9, "E13": 0.5},
    "flat": {"E13": 0.9, "E7": 0.8},
    "shift": {"E7": 1.0, "E13": 0.6},
    "axis": {"E1": 1.0},
    "transposed": {"E1": 1.0},
    "order": {"E1": 0.9},
    "tied": {"F2": 0.95},
}

BY_TOKEN = "copy each row, and its optimizer state, to the number that its token has now"
TOGETHER = "Experts and their router changed places."
REBALANCED = "does the trainer place experts anew, together with all that belongs to them?"
#: Tags of moves that no conversion on purpose makes, unlike those of gates, heads or experts to another layout.
SURE = {"layer", "axis"}


def _moved(cause: str) -> Callable[[Case], Iterator[Match]]:
    """Return a pattern: all rows, columns or elements of weights are present, but at other places."""

    def pattern(case: Case) -> Iterator[Match]:
        for change in case.changes:
            by_tag: dict[str, set[str]] = {}
            for form, names in change.forms((*change.weights, *MASTERS)).items():
                if form.startswith("moved.") and change.leg == "load":  # masters alone: a partition of the optimizer
                    names = names - case.masters_alone(change, form)
                if form.startswith("moved.") and names:
                    by_tag.setdefault(form.removeprefix("moved."), set()).update(names)
            if _cut_anew(change):
                continue
            for tag, names in by_tag.items():
                strength = TAGS.get(tag, {}).get(cause, 0.0)
                if not strength or (tag == "layer" and case.deeper):  # copies make a model deeper, others move down
                    continue
                moments = change.hit(MOMENTS, "moved.", "moved") & names
                weights = set(names)
                names |= {name for name in change.hit(MOMENTS) if is_numbered(name)}  # the owner is unknown
                if change.leg == "train":  # in a bias, the rows of its weight are single elements: not recognized
                    biases = {f"{name.removesuffix('weight')}bias" for name in weights if name.endswith(".weight")}
                    names |= biases & change.hit((*change.weights, *MASTERS, *MOMENTS), "other", "near", "part")
                words = f"the moments of {len(moments):,} of {len(names):,} moved with them" if moments else ""
                reasons = case.against(("A1 A2 F4 D2 G6", _placed(change, weights)), ("B5 E13", words))
                router = {name for name in change.hit(change.weights) if kinds([name]) == {"router"}}
                title, question = (TOGETHER, REBALANCED) if tag == "expert" and router else ("", "")
                # after updates, rows are only more like others than like their own old ones
                exact = change.exact and strength == 1.0 and tag in SURE
                names |= router if title else set()
                yield Match(change.leg, strength, frozenset(names), exact, question, reasons, title=title)

    return pattern


def _cut_anew(change: LedgerLeg) -> bool:
    """Return whether the flat line was cut at other places; some pieces are then rows of another tensor by chance."""
    tags = {form for form in change.forms((*change.weights, *MASTERS)) if form.startswith("moved.")}
    return len(tags) >= MANY_TAGS and "moved.flat" in tags


def _placed(change: LedgerLeg, names: set[str]) -> str:
    rows = f"the rows of {plural(len(names), 'weight')} are"
    if change.exact:
        return f"{rows} at other places of the earlier checkpoint, bit for bit"
    return f"{rows} closer to rows at other places of the earlier checkpoint than to their own"


def layers(case: Case) -> Iterator[Match]:
    yield from _moved("E9")(case)
    apart = [one for one in case.fired("S14", where="after") if one.evidence.get("apart")]
    if apart and case.evidence.after is not None:  # updates would have made copies of the load differ
        question, remedy = "does the trainer set them equal, as when it merges branches?", SAVER
        title = "Weights of several layers are equal, although they were trained apart."
        yield Match("after", 0.9, named_in(apart), question=question, signs=tuple(apart), title=title, remedy=remedy)


def partition(cause: str) -> Callable[[Case], Iterator[Match]]:
    """Return a pattern: the flat line of the optimizer state (or of everything) is cut at other places."""

    def pattern(case: Case) -> Iterator[Match]:
        for change in case.changes:
            quantities = (*change.weights, *MASTERS, *MOMENTS)
            shifted, cut = (frozenset(change.hit(quantities, f"moved.{tag}")) for tag in ("shift", "flat"))
            if names := shifted | cut:  # of a line that is shifted as a whole, the first and last pieces look cut
                strength = TAGS["shift" if shifted else "flat"][cause]
                if not shifted and _cut_anew(change):
                    names = frozenset(change.hit(quantities, "moved."))
                words = case.equal(change, change.weights, "weights", names) if case.still(change, names) else ""
                # in small ones, a shift is not visible; numbered ones have no known owner
                rest = change.hit(MOMENTS, "other", "fallen", "near", "part") if shifted else set()
                names |= rest | {n for n in change.hit(MOMENTS) if change.leg == "train" and is_numbered(n)}
                exact = change.exact and strength == 1.0
                yield Match(change.leg, strength, names, exact, reasons=case.against(("E1 E4 E9", words)))
            if cause == "E13":
                masters = frozenset(case.masters_alone(change, "moved."))
                if masters and change.leg == "load":  # complete ones are assigned to others (B5)
                    yield Match(change.leg, 0.95, masters, False)

    return pattern


def uneven(case: Case) -> Iterator[Match]:
    yield from _moved("E8")(case)
    for change in case.changes:
        names = frozenset(
            name
            for name in change.hit(change.weights, "part", "zeros", "other")
            if change.detail(change.weights, name).get("tail")
        )
        names -= case.first_other(change)  # whose steps were wrong
        if names:
            yield Match(change.leg, 0.97, names, False)
    if signs := case.fired("N18"):
        yield Match(case.resumed, 0.9, named_in(signs), signs=tuple(signs))


def scaled(case: Case) -> Iterator[Match]:
    for change in case.changes:
        near = change.hit(change.weights, "near")
        norms = {name for name in near if kinds([name]) == {"norm"} and case.numel(name) > 1}
        scales = [float(change.detail(change.weights, name).get("scale", 1)) for name in norms]
        if norms and norms == change.hit(change.weights) and all(abs(one - 1) > FAR for one in scales):
            one_more = all(abs(one - 2) < ONE_MORE for one in scales)  # norms are about 1
            yield Match(change.leg, 0.93, frozenset(norms), False, title=ONE_ADDED if one_more else "")
        for quantities in ((*change.weights, *MASTERS), MOMENTS):
            names, every = frozenset(change.hit(quantities, "ratio")), change.hit(quantities)
            factors = sorted({float(change.detail(quantities, n).get("ratio", 0)) for n in names})
            kinds_of = [kind for kind in (FIRST, SECOND) if change.seen(*kind)]  # ranks hold both kinds of moments
            both = all(change.hit(kind, "ratio") for kind in kinds_of)
            if names and (quantities is not MOMENTS or (both and all(map(_of_ranks, factors)))):
                words = f"they are {', '.join(f'{one:.3g}' for one in factors[:3])} times the old values"
                strength = 0.98 if quantities is MOMENTS else 0.95
                one_factor = math.isclose(factors[0], factors[-1], rel_tol=ONE_FACTOR)
                most = len(names) >= NEARLY_ALL * len(every)  # in small ones, a factor cannot be proved
                reasons = case.against(("A2 G6 F4", words))
                of_ranks = quantities is MOMENTS or all(map(_of_ranks, factors))
                yield Match(
                    change.leg,
                    strength,
                    frozenset(every) if most else names,
                    False,
                    SCALED if one_factor and (not of_ranks or all(map(adapter_of, names))) else "",
                    reasons,
                    title="" if of_ranks else "Weights were multiplied by a factor.",
                    remedy="" if of_ranks else "if this was not intended, load them as they are stored",
                )


def _of_ranks(factor: float) -> bool:
    """Return whether a factor is a number of ranks, or one over it."""
    for one in filter(math.isfinite, (factor, 1 / factor if factor else 0.0)):
        count = round(one)
        while count and count % 2 == 0:
            count //= 2
        if abs(one - round(one)) < 1e-3 and round(one) > 1 and count in (1, 3):  # nodes have 4, 6, 8 … devices
            return True
    return False


# ---- F: copies, averages, adapters, vocabulary -----------------------------------------------------------------------


def replicas(case: Case) -> Iterator[Match]:
    if signs := case.fired("S12"):
        yield Match(case.resumed, 0.7, named_in(signs), signs=tuple(signs))


def untied(case: Case) -> Iterator[Match]:
    for match in _moved("F2")(case):  # an untied head that holds the embedding's values, or the reverse
        title = "The head and the embedding, which are two tensors, hold the same values."
        remedy = "load each from its own tensor; tie them only if they were tied before"
        yield replace(match, title=title, remedy=remedy, losses=RECOVERS)
    new = [
        one
        for one in case.fired("R01", "P02", "N3", "S13", "R15")
        if one.rule in ("S13", "R15")
        or (
            one.evidence.get("kind") in ("are new", "appeared")
            and one.tensors
            and kinds(one.tensors) <= OUTER
            and "param" in str(one.evidence.get("roles", "param"))
        )
    ]
    gone = [
        one
        for one in case.fired("R01", "P02")
        if one.evidence.get("kind") in ("are gone", "vanished")
        and one.tensors
        and kinds(one.tensors) <= {"head"}
        and "param" in str(one.evidence.get("roles", "param"))
    ]
    tables = [name for state in (case.evidence.before, case.later) for name in state.params]
    if "embed" not in kinds(tables):
        return  # nothing that a head could be tied to
    if new or gone:
        names = named_in((*new, *gone))
        leg = case.leg
        copied = leg == "load" and not case.change(leg).hit(WEIGHTS) & names
        held = case.trains_more or not names & case.later.unheld  # of numbered state, the owners may be unknown
        trained = leg == "train" and bool(case.later.facts.states) and held
        apart = bool(new) and all(one.rule == "R15" for one in new) and not gone
        question = "were they untied on purpose?" if apart and (copied or trained) else ""
        yield Match(leg, 1.0, names, question=question, signs=(*new, *gone))


SAVER = "check which layers the saver wrote"
ASTRAY = "The weights are not where the updates lead, as if averaged weights or those of another step were loaded."
OF_ANOTHER = "Averaged weights, or weights of another step, were loaded."
FARTHER = "Some weights moved farther than updates with the stored settings of the optimizer would."
OF_ONE_SAVE = "load weights and optimizer state from one save, and the weights themselves, not an average"
DIFFER = "The averaged weights differ from the stored ones."
AVERAGES_ONLY = "the training loss does not show it; evaluations of the averaged weights do"
RENEWED = "A copy that is not trained, such as a reference model, holds the trained weights."
FROM_ITS_OWN = "load the copy from where it is stored; do not fill it from the trained weights"
NO_ADAPTERS, MERGED_IN = "The adapters are gone.", "were they merged into the weights on purpose?"
MERGED = "does the trainer merge the adapters into the weights as it goes on, and begin new ones?"
WAS_RENEWED = "was the copy renewed on purpose?"
RESTORE = "load the averages and their counter from the checkpoint that the weights are from"
LED = "The weights are those of the network that follows them, such as a teacher or an average."
FOLLOWS = "A network that follows another one holds that one's weights."
TARGETS = "what is computed from that network, such as targets, jumps once"
MADE_ANEW = "was it made anew from the weights on purpose?"
TAKEN = "does the trainer take them over on purpose, as from an average or another member?"
AVERAGE = "was training meant to go on from the averaged weights?"


def averaged(case: Case) -> Iterator[Match]:
    of_copy = Match("", 0.0, title=FOLLOWS, question=MADE_ANEW, remedy=FROM_ITS_OWN, losses=TARGETS)
    for match in _moved("F4")(case):
        change = case.change(match.leg)
        if change.hit(change.weights, "moved.led"):
            names = match.names | change.hit(change.weights)
            yield replace(match, names=names, exact=False, title=LED, question=AVERAGE, remedy=OF_ONE_SAVE)
            continue
        # its other weights, which updates may have changed since, and its statistics
        beside = {name for name in change.hit((*change.weights, "buffer")) if is_follower(name)}
        yield replace(
            of_copy, leg=match.leg, strength=match.strength, names=match.names | beside, reasons=match.reasons
        )
    copied = [one for one in case.fired("P35") if one.tensors and all(map(is_follower, one.tensors))]
    if copied and not all(is_reference(name) for one in copied for name in one.tensors):
        yield replace(of_copy, leg="train", strength=0.9, names=named_in(copied), signs=tuple(copied))
    if replaced := [one for one in case.fired("P35") if one.evidence.get("kind") == "taken"]:
        title = "The weights are others that the earlier checkpoint stored beside them."
        names = named_in(replaced)
        yield Match("train", 1.0, names, question=TAKEN, signs=tuple(replaced), title=title, remedy=OF_ONE_SAVE)
    of_average = partial(Match, remedy=RESTORE, losses=AVERAGES_ONLY)
    if stored := [one for one in case.fired("R16") if any(word in one.tensors[0].lower() for word in OF_AVERAGES)]:
        yield of_average("load", 0.95, named_in(stored), signs=tuple(stored), title=DIFFER)
    if signs := case.fired("P22", "P23"):
        question = "" if case.fired("P22") else "were the averages restarted from the weights on purpose?"
        title = "The averaged weights did not continue from the stored ones."
        yield of_average("train", 0.9, named_in(signs), signs=tuple(signs), question=question, title=title)
    if signs := [one for one in case.fired("P24") if "F4" in one.causes[:1]]:
        yield of_average("train", 0.9, signs=tuple(signs), title="The averaged weights restarted.")
    if signs := case.fired("P28"):
        title = "The averaged weights are not updated."
        question = "the averaged weights do not change: are they updated less often?"
        yield of_average("train", 0.9, named_in(signs), signs=tuple(signs), question=question, title=title)
    gone = [one for one in case.fired("P29", "R11") if one.evidence.get("part") == "average"]
    if gone := [one for one in gone if one.evidence.get("kind") == "unstored"]:
        of_size = [one for one in case.fired("N3") if {*one.evidence["bytes"]} <= {*AVERAGES}]
        of_names = [one for one in case.fired("R01", "P02") if one.evidence.get("kind") in ("are gone", "vanished")]
        of_names = [one for one in of_names if str(one.evidence.get("roles")).split()[1:] in [[a] for a in AVERAGES]]
        title, question = "The averaged weights are no longer stored.", "were they left out on purpose?"
        remedy, signs = "save and load them, if the run still uses them", [*gone, *of_size, *of_names]
        yield of_average(case.resumed, 0.95, signs=tuple(signs), question=question, title=title, remedy=remedy)
    for change in case.changes:
        count = case.traits.get("averaged") if change.leg == "load" else None
        if count:
            names = frozenset(change.hit((*change.weights, *MASTERS)))
            words = f"{plural(count, 'weight', 'equal')} the stored average bit for bit"
            yield Match("load", 1.0, names, question=AVERAGE, reasons=case.against(("A2 G6 G7 D2", words)))
            continue
        ema = frozenset(change.hit(AVERAGES) - (change.hit(AVERAGES, "absent") if gone else set()))
        if ema and not change.hit((*change.weights, *MASTERS)) & ema:
            fell = [one for one in case.fired("R17") if one.evidence["kind"] == "average" and one.evidence["fell"]]
            anew = bool(case.fired("N21", where=case.resumed) or (fell and change.leg == "load"))
            question = "the averages begin at the weights: were they started anew on purpose?" if anew else ""
            yield of_average(change.leg, 0.95, ema, question=question, title=DIFFER)
        taken = frozenset(change.hit((*change.weights, *MASTERS), "average"))
        if taken:
            off = frozenset(change.hit((*change.weights, *MASTERS)))
            if 2 * len(taken) < len(off):
                continue  # an average holds all of them
            of = plural(len(off), "weight")
            words = f"{len(taken):,} of {of} are closer to the stored average than to their old values"
            yield Match(change.leg, 0.97, off, False, AVERAGE, case.against(("A1 A2 D2 G6", words)))
            continue
        near = frozenset(change.hit(change.weights, "near", "slight", "other", "fill"))
        tables = {name for name in change.hit(change.weights, "part") if kinds([name]) <= OUTER}
        if len(tables) < len(near):
            near |= tables  # rows that are not trained are in an average as they were
        if not near or change.hit(change.weights, "moved.") or change.moments(near):
            continue
        whole = change.whole(change.weights, near, 0.9 if change.exact else NEARLY_ALL)  # bounds of updates are loose
        kept = case.equal(change, MOMENTS, "moments", near)
        mean = case.cosine(change, near)  # a few numbers about 0, as in biases, may turn far
        masters = change.leg == "load" and bool(change.seen(*MASTERS) & near) and not change.hit(MASTERS) & near
        if masters or (change.leg == "train" and case.mastered):
            continue
        if mean > RELATED and (whole or not change.exact):  # an average covers everything that is trained
            words = f"their mean cosine similarity to the old values is {mean:.3f}"
            reasons = case.against(("A1 A2", words), ("G7 B1", kept))
            if change.leg == "load" and near <= change.hit(MASTERS, "absent") and _widened(case, near):
                gone = [one for one in case.fired("R01") if str(one.evidence.get("roles")).split()[1:] == ["master"]]
                question = "was training continued in the precision of the masters on purpose?"
                title = "The weights have other values in a wider type, and the masters are gone."
                yield Match("load", 1.0, near, question=question, signs=tuple(gone), title=title)
                continue
            if change.exact and whole:
                near |= change.hit(("buffer",), "near", "other", "part")  # those of that step
            later = change.leg == "train"  # noise, pruning and clipping by the trainer leave the same traces
            few = case.far < FEW_FAR or any(not one.evidence.get("even") for one in case.fired("P11"))
            title, remedy = (FARTHER, ELSE) if few else (ASTRAY, OF_ONE_SAVE)
            title, remedy, question = (title, remedy, OUTSIDE) if later else (OF_ANOTHER, "", "")
            strength = 0.9 if whole else 0.4
            yield Match(change.leg, strength, near, False, question, reasons, title=title, remedy=remedy)
    rows = [one for one in case.stale_rows if one.evidence.get("even")]
    if rows and not case.mastered:
        yield Match("train", 0.75, named_in(rows), signs=tuple(rows), title=ASTRAY, remedy=OF_ONE_SAVE)
    if signs := case.fired("N21"):
        names = named_in(signs)
        change = case.change("train")
        right = change.seen(*change.weights) and not change.hit(change.weights)  # it is the average that is not
        title = "The averaged weights are the weights themselves." if right else ""
        remedy = "restore the average, as a copy: one that shares the weights' memory is always equal" if right else ""
        yield Match(case.resumed, 0.7, names, signs=tuple(signs), title=title, remedy=remedy)


def _widened(case: Case, names: Iterable[str]) -> bool:
    """Return whether weights of 16 bits are float32 now."""
    before, later = case.evidence.before, case.later
    types = {(before.dtype(one), later.dtype(two)) for one, two in case.both(names)}
    return bool(types) and types <= {("bfloat16", "float32"), ("float16", "float32")}


def _stem(fqn: str) -> str:
    return fqn.removesuffix(".weight").removesuffix(".base_layer")


def merged(case: Case) -> Iterator[Match]:
    for change in case.changes:
        if any(map(adapter_of, change.hit(WEIGHTS, "absent"))):
            touched = frozenset(change.hit((*WEIGHTS, *MASTERS, *MOMENTS)))
            yield Match(change.leg, 1.0, touched, title=NO_ADAPTERS, question=MERGED_IN)
            return
    gone = [
        one
        for one in case.fired("R01", "P02")
        if one.evidence.get("kind") in ("are gone", "vanished")
        and "lora_" in f"{one.evidence.get('roles', '')} {' '.join(one.tensors)}"
    ]
    if gone:
        leg = case.leg
        all_names = case.change(leg).hit((*WEIGHTS, *MASTERS, *MOMENTS)) | named_in(gone)
        yield Match(leg, 1.0, frozenset(all_names), signs=tuple(gone), title=NO_ADAPTERS, question=MERGED_IN)
        return
    if anew := _begun_anew(case):
        yield anew
        return
    for change in case.changes:
        names = frozenset(change.hit((*change.weights, *MASTERS)))
        adapters = frozenset(name for name in names if "lora" in name.lower() or "adapter" in name.lower())
        rank = case.traits.get("rank") if change.leg == "load" else None
        held = case.evidence.before.params
        stems = {_stem(fqn.partition(".lora_A")[0]) for fqn in held if ".lora_A" in fqn}
        bases = {_stem(fqn) for fqn in names - adapters}
        adapted = bool(bases) and bases <= stems and not change.hit(MOMENTS) & (names - adapters)
        adapted = adapted and not _unmerged(case, change)
        if rank is not None or adapted:
            words = (
                f"the change has rank {rank}"
                if rank is not None
                else f"only weights that have adapters changed: {len(bases):,}"
            )
            # a few rows that changed have a low rank too
            exact = rank is not None and adapted
            question = MERGED if change.leg == "train" and not _continued(case) else ""  # as ReLoRA does
            reasons = case.against(("A2 F4 G6", words))
            title = "" if stems else "The weights changed as by a merged adapter, but no file holds one."
            begun = names if question else names - adapters  # the adapters began anew with the merged weights
            yield Match(change.leg, 1.0, begun, exact, question, reasons, title=title)
        elif adapters and adapters == names:
            title = "The adapters are not those that were saved."
            question = MERGED if change.leg == "train" and case.fired("P27") else ""
            yield Match(change.leg, 0.97, adapters, False, question, title=title)
    if signs := case.fired("N22"):
        yield Match(case.resumed, 0.9, named_in(signs), signs=tuple(signs))


def _unmerged(case: Case, change: LedgerLeg) -> bool:
    """Return whether weights with adapters changed in more directions than these have."""
    if change.leg == "load":
        return bool(case.traits.get("unmerged"))
    bases = case.fired("P27")
    return bool(bases) and all(one.evidence.get("unmerged") for one in bases) and not change.hit(MOMENTS)


def _continued(case: Case) -> bool:
    """Return whether the adapters are still those of before, which merged ones that began anew are not."""
    sums = {name: one for name, one in case.pairs.get("before → after", {}).items() if adapter_of(name) == "lora_B"}
    cosines = [one.cosine for one in sums.values()]
    return bool(cosines) and all(one is not None and one > ALIKE for one in cosines)


def _begun_anew(case: Case) -> Match | None:
    """Return a match if only weights with adapters changed beside these, and the adapters' own state began anew."""
    bases = [one for one in case.fired("P27") if one.evidence["kind"] == "adapted"]
    train = case.change("train")
    lost = train.hit(MOMENTS)
    if not bases or not lost or not all(adapter_of(name) or is_numbered(name) for name in lost):
        return None
    return Match(
        "train",
        1.0,
        frozenset(lost | train.hit((*WEIGHTS, *MASTERS)) | named_in(bases)),
        signs=tuple(case.fired("N22")),  # zero if the later checkpoint was saved right then
        title="Adapters were merged into the weights, and began anew.",
        question="does the trainer do so now and then, as ReLoRA does?",
        remedy="if this was not intended, load base, adapters and their optimizer state from one save",
    )


def other_base(case: Case) -> Iterator[Match]:
    """Match if weights under unchanged adapters changed, and not as by merging them."""
    for change in case.changes:
        if change.hit(WEIGHTS, "moved.reference"):
            names = frozenset(name for name in change.hit(WEIGHTS) if is_reference(name))
            yield Match(change.leg, 1.0, names, title=RENEWED, remedy=FROM_ITS_OWN, question=WAS_RENEWED)
            continue
        adapters = {name for name in change.seen(*WEIGHTS) if adapter_of(name)}
        forms = ("near", "other", "fill") if change.exact else ("near",)
        base, names = change.seen(*WEIGHTS) - adapters, frozenset(change.hit(WEIGHTS, *forms))
        stems = {_stem(fqn.partition(".lora_A")[0]) for fqn in case.evidence.before.params if ".lora_A" in fqn}
        apart = names == change.hit((*WEIGHTS, *MASTERS, *MOMENTS)) and not names & adapters
        whole = change.whole(WEIGHTS, names | adapters, SOME)
        others = not set(map(_stem, names)) <= stems or (bool(names) and _unmerged(case, change))
        if adapters and apart and (whole or change.exact) and others:
            words = f"{len(names):,} of {plural(len(base), 'weight')} under the adapters changed; the adapters did not"
            yield Match(change.leg, 0.97 if whole else 0.9, names, reasons=case.against(("A2 F5 G6", words)))
    train = case.change("train")
    adapters = {name for name in train.seen(*WEIGHTS) if adapter_of(name)}
    anew = bool(train.hit(WEIGHTS, "other") & adapters)  # then the adapters were not loaded either
    if (signs := case.fired("P27")) and not anew and _unmerged(case, train):
        yield Match("train", 0.97, named_in(signs))
    if signs := [one for one in case.fired("P35") if one.tensors and all(map(is_reference, one.tensors))]:
        names = named_in(signs)
        yield Match("train", 0.9, names, signs=tuple(signs), title=RENEWED, remedy=FROM_ITS_OWN, question=WAS_RENEWED)


def vocabulary(case: Case) -> Iterator[Match]:
    yield from _moved("F7")(case)
    for change in case.changes:
        patch = frozenset(change.hit((*change.weights, *MOMENTS), "patch") - change.hit(change.weights, "part"))
        if len(patch) > 1 and kinds(patch) <= OUTER:
            yield Match(change.leg, 0.99, patch, False)
        # divided by second moments that are too small, steps of single rows are too long
        long = change.hit(MOMENTS) & named_in(case.fired("S04", where="after"))
        part = frozenset(change.hit(change.weights, "part", "zeros") - long)
        alone = len(change.hit(change.weights) - part) <= len(part)  # in an average, untrained rows stay
        if part and alone and kinds(part) <= OUTER and not case.traits.get("confined"):
            rows = change.detail(change.weights, min(part))
            words = f"only some rows changed ({rows['rows']:,} of {rows['of']:,})" if "rows" in rows else ""
            numbered = {name for name in change.hit(MOMENTS) if is_numbered(name)}
            part |= numbered if len(numbered) <= len(part) else set()  # as many as belong to those weights
            reasons = case.against(("A2 G6 F4", words))
            title = "Rows of the vocabulary have other values."
            remedy = "check that every shard of the table was read; with another tokenizer, map rows by token"
            yield Match(change.leg, 0.96, part, False, reasons=reasons, title=title, remedy=remedy)
    if shaped := case.tables:
        table = kinds(name for one in shaped for name in one.tensors if not is_numbered(name)) != {"head"}
        names, ask = named_in(shaped), "was it changed on purpose?"
        if moved := case.fired("R18"):
            names = named_in(moved)
            title = "Rows of a table with another size are at other places."
            weights = any("param" in one.evidence["roles"] for one in moved)
            title = title if weights else "The optimizer state of a table with another size belongs to other rows."
            yield Match("load", 0.97, names, signs=(*moved, *shaped), title=title, remedy=BY_TOKEN)
            return
        yield Match(
            case.leg,
            0.95,
            names,
            signs=tuple(shaped),
            question=ask if table else "was it exchanged on purpose?",
            title="The vocabulary has a different size." if table else "The head has a different number of outputs.",
        )


# ---- the catalogue ---------------------------------------------------------------------------------------------------

LAYOUTS = (
    made("E1", "Blocks of rows or columns are in a different order, or along a different axis.",
         "shards of tensor-parallel ranks were joined by file order or along another axis; gates were reordered",
         "up to the loss of a new model",
         "join by the offsets stored in the checkpoint; check the rank order and the axis of each tensor", ECHO,
         "catalogue E1", megatron="convert with the tool of the saving version; mp_rank_TT is the tensor rank",
         deepspeed="universal checkpoint: check the patterns for row- and column-parallel tensors",
         explains=OF_ELEMENTS,
         expects=OF_PLACES,
         losses=RECOVERS,
         pattern=_moved("E1")),
    made("E2", "The [gate; up] blocks of several ranks were joined as if they were one.",
         "each rank holds its own [gate; up]; a plain concatenation interleaves them", "a jump of 1 to 4 nats",
         "split every rank's part into gate and up first, then join each", ECHO,
         "ROCm Megatron 63, Megatron-LM 2769, bigscience 338",
         megatron="with --swiglu resharding must use the chunk order [0, 2, 4, …, 1, 3, 5, …]",
         explains=OF_ELEMENTS,
         expects=OF_PLACES,
         losses=RECOVERS,
         pattern=_moved("E2")),
    made("E3", "gate and up were swapped.", "a fused tensor has the two in the other order", "a jump of 1.5 to 3 nats",
         "swap them in the conversion; codebases differ in which of the two comes first", ECHO,
         "catalogue E3",
         explains=OF_ELEMENTS,
         expects=OF_PLACES,
         losses=RECOVERS,
         pattern=_moved("E3")),
    made("E4", "Fused QKV was read in a different layout.",
         "a grouped layout (q q k v per group) was read as contiguous [Q; K; V]",
         "a jump of about 3 nats", "convert with the number of query groups and the head size of the model", ECHO,
         "catalogue E4", megatron="linear_qkv is ordered by query group; pass --num-query-groups as in training",
         explains=OF_ELEMENTS,
         expects=OF_PLACES,
         losses=RECOVERS,
         pattern=_moved("E4")),
    made("E5", "Rows of q and k are in the order of a different rotary embedding.",
         "half-split rows were read as interleaved ones, or the reverse", "fluent garbage; a jump of 1 to 3 nats",
         "permute the rows of q and k within each head, in weights and optimizer state, or switch the RoPE style", ECHO,
         "TinyLlama 24, transformers 25199",
         megatron="--rotary-interleaved must be as in training",
         explains=OF_ELEMENTS,
         expects=OF_PLACES,
         losses=RECOVERS,
         pattern=_moved("E5")),
    made("E6", "Query heads are in the wrong key groups.", "heads were permuted without their groups",
         "a jump of 1 to 3 nats", "permute q, k, v and the output projection by the same order of heads", ECHO,
         "catalogue E6",
         explains=OF_ELEMENTS,
         expects=OF_PLACES,
         losses=RECOVERS,
         pattern=_moved("E6")),
    made("E7", "Flat partitions are shifted relative to the parameters.",
         "alignment padding or a different wrap policy was not taken into account", "garbage from one tensor on",
         "re-partition with the padding of the run that saved", ECHO, "catalogue E7",
         deepspeed="resume with the same world size, or convert with ds_to_universal.py",
         explains="P03 P04 P05 P06 P08 P11 P12 P13 P17 P32 P18 R02 R04 R05 R09 R13 N5 N17 S19 N28 N20 S01 S02 S03 "
                  "S04 S05 S08 S14 S15 R03 R08 N29",
         losses="the first loss is right if only the state is shifted",
         pattern=partition("E7")),
    made("E8", "An uneven shard was read incorrectly.", "the vocabulary or rows are not divisible by the ranks",
         "a small gap", "check the sizes of the last rank's shard; save and load with the same padding", ECHO,
         "torchtitan 1136",
         explains=OF_ELEMENTS,
         losses=RECOVERS,
         pattern=uneven),
    made("E9", "Layers are duplicated, swapped or shifted.", "pipeline stages map to the wrong layers",
         "a jump of 1 to 3 nats", "check the offset of each pipeline (and virtual) stage", ECHO,
         "Megatron-LM 1584, transformers 24381",
         megatron="resume with the --num-layers-per-virtual-pipeline-stage of the save, or from a dist checkpoint",
         explains="P03 P04 P05 P06 P08 P11 P12 P13 P17 P32 P18 R02 R04 R05 R09 R13 N5 N17 S14 N19 S08 S19 N29 N28",
         losses=RECOVERS,
         pattern=layers),
    made("E10", "Experts were permuted or duplicated, but the router was left as it was.",
         "the placement of experts on ranks changed, or every rank loaded the same ones",
         "a moderate jump",
         "load each expert from its own place; move router rows, expert biases and optimizer state with it", ECHO,
         "catalogue E10",
         explains=OF_ELEMENTS,
         expects=OF_PLACES,
         losses=RECOVERS,
         pattern=_moved("E10")),
    made("E11", "Trained rows are in the padding of the vocabulary.",
         "the table was padded rank by rank, or at another end",
         "loss at rare tokens, NaN in the logits", "remove the padding before resharding, and pad again", ECHO,
         "catalogue E11", megatron="--make-vocab-size-divisible-by as in training",
         explains="P03 P04 P05 P06 P08 P11 P12 P13 P17 P32 P18 R02 R04 R05 R09 R13 N5 N17 N20",
         losses=RECOVERS,
         pattern=_moved("E11")),
    made("E12", "Replicas were averaged or summed instead of taking one of them.",
         "a replicated tensor was merged like a sharded one", "weights scaled by 1/n",
         "mark the tensor as replicated in the conversion", ECHO, "catalogue E12",
         deepspeed="universal checkpoint: list the tensor in the patterns for replicated or averaged parameters",
         explains="P03 P04 P05 P06 P08 P11 P12 P13 P17 P25 P32 P33 P18 R09 S04 S15 S19",
         losses=RECOVERS,
         pattern=scaled),
    made("E13", "The optimizer's state was resharded with a different map than the weights.",
         "the flat partitions use another order of parameters", "right at first, slow damage",
         "reshard weights and optimizer state with the same map", ECHO, "catalogue E13",
         deepspeed="keep the partition order of the save; ds_to_universal.py scrambles that of round_robin_gradients",
         explains="P03 P04 P05 P06 P08 P11 P12 P13 P17 P32 P18 R02 R04 R05 R09 R13 N5 N17 N28 S19 S04 S05 S08 S14 "
                  "S15 R03 N29",
         expects="P17 P32 R02 R04 R09 R13",
         losses="the first loss is right, then a slow bump",
         pattern=partition("E13"), damage=wrong_steps),
)  # fmt: skip

COPIES = (
    made("F1", "Replicas of one tensor drifted apart.",
         "gradients of replicated parameters are not reduced across ranks",
         "slow; a spike when a reshard chooses one replica", "reduce their gradients; copy rank 0's replica to all",
         "the earlier checkpoints, which show whether the gap has grown",
         "TransformerEngine 441, Megatron-LM 474, apex 1686",
         explains="S08 S12",
         expects="S12",
         pattern=replicas),
    made("F2", "Embedding and head are no longer one tensor.", "the head was untied, copied or recreated",
         "a fresh head: a spike; a copy: invisible, but it drifts", "tie the weights before creating the optimizer",
         ECHO,
         "catalogue F2", hf="call model.tie_weights() after the load and before creating the optimizer",
         megatron="do not pass --untie-embeddings-and-output-weights",
         explains="R01 R02 S19 V05 R12 P01 P02 P05 P06 P08 P11 P12 P17 R10 S06 S07 S13 S14 N29 N3",
         expects="R01 P02 S13",
         losses="with a fresh head, the first losses are wrong; with a copy, none is",
         pattern=untied),
    made("F3", "Embedding and head of the first and last stage diverge.", "their gradients are not reduced together",
         "slow", "reduce the gradients of both stages", "the files of both stages", "catalogue F3",
         explains="S13"),
    made("F4", "Averaged weights were loaded as the weights.", "the average was saved or loaded in their place",
         "better at first, then a bump", "load the raw weights; store the average and its counter separately", ECHO,
         "schnetpack 785, YOLOX 1318, lightly 892",
         explains="P24 P28 P22 P23 P05 P06 P08 P11 P12 P13 P17 P32 P18 N21 R09 R02 R13 R03",
         losses="the first losses differ: better if the average is recent, worse if it is old",
         pattern=averaged),
    made("F5", "An adapter was not loaded, or was merged twice.",
         "wrapped twice, merged but still active, or scaled differently", "the loss of the start, or a jump",
         "load base and adapter once each; merge at most once", ECHO,
         "lerobot 3459, alpaca-lora 322, peft 859",
         explains="P03 P04 P05 P06 P08 P11 P12 P13 P17 P27 P32 P18 N22 R01 R09 P02 S04 S05 S06",
         pattern=merged),
    made("F6", "The base model is a different revision.", "adapters were trained on other weights", "a small jump",
         "pin the base model's revision", "the base model's hash at training", "catalogue F6",
         explains="P05 P08 P12 P17 P18 P27 P35 R02 R09 R13 N3", pattern=other_base),
    made("F7", "Rows of the vocabulary were shifted or added.", "the tokenizer changed",
         "a jump of 1.5 to 5 nats", "map rows by token, not by number; resize with the tokenizer of the run", ECHO,
         "unsloth-zoo 923, swiss-ai 115, Megatron-Bridge 469",
         explains="R01 P02 N3 P03 P04 P05 P06 P08 P11 P12 P13 P17 P32 P18 R02 R04 R05 R09 R13 N5 N17 N20",
         losses="the first losses are wrong",
         pattern=vocabulary),
)  # fmt: skip
