"""Find the smallest set of causes that explains the signs, best supported first.

::

    patterns    B2 {52 parameters} 1.0    C9 {52} 0.6        what the ledger holds (`Match`)
    signs       R10 of 52   S07   P01                        each explained by some causes
                       │
    best first  B2: strength × what it explains  ──► those signs are done; the rest goes to others or to its own rule

A sign is explained parameter by parameter: if it names ten and a cause affects four of them, six remain unexplained.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from workbench.doctor.causes.case import Case, Match, asked, leg_of, matches, where_of
from workbench.doctor.causes.table import CAUSES
from workbench.doctor.facts.evidence import is_numbered
from workbench.doctor.facts.schedule import sets_rates
from workbench.doctor.ledger.sign import RULES, Sign
from workbench.doctor.passes.updates import passed

UNNAMED = 0.3  #: strength of a cause that only a rule names
CHANGED = ("R09", "P02", "R16", "R17", "P34", "P52")  #: rules whose signs name a change that no pattern explains
#: Where a sign was observed → how a sentence about it begins.
PLACES = {"before → echo": "In the load", "before → after": "Between the checkpoints", "echo → after": "After the load"}
SILENT = 0.5  #: factor if a rule that should have fired did not
REST = 0.2  #: share of a sign's names that may remain unexplained
SIDE = 0.25  #: weight of a sign that may follow from a cause, relative to one that proves it
LATER = 0.5  #: factor for what a later checkpoint shows, if an echo shows what the load did
#: Rules for faults that spread from one parameter to all within a few updates.
SPREADING = frozenset({"S01", "S02", "S19", "N16", "N28", "P06", "P09", "N5", "N17", "N20", "N29", "S03", "S04"})
OF_DECAY = ("H1", "B7", "C5")  #: causes of another weight decay
OF_SETTINGS = ("N12", "P16", "R12")
OF_VALUES = ("P03", "P04", "P05", "P08", "P11", "P12")  #: rules on what updates do to weights and moments
#: Arguments of the data, of gradients, and of what is saved; and weight decay, which a sign of its own is about.
HARMLESS = re.compile(
    r"batch|accum|clip|grad_norm|steps|epoch|decay|wd|save|log|eval|seed|worker|rank|world|path|dir|name"
)
OF_RATES = frozenset({"N6", "P13", "P15", "P19", "P37", "S16"})
LASTING = frozenset({"S07", "S13", "S14", "S17"})  #: rules that detect a bad load in a later checkpoint too
_GRAVE = {"error": 1.0, "warn": 0.3, "info": 0.02}


@dataclass
class CauseExplanation:
    """A cause, and the signs that it explains.

    Attributes:
        match: what its pattern found; ``None`` if only a rule names it.
        proof: signs that show the cause itself.
        follows: signs that are consequences of it.
        score: support for this cause.
        rival: the best score of any other cause on the same proof.
        second: the id of that other cause.
    """

    cause: str
    match: Match | None = None
    proof: list[Sign] = field(default_factory=list)
    follows: list[Sign] = field(default_factory=list)
    score: float = 0.0
    rival: float = 0.0
    second: str = ""


def weight(sign: Sign) -> float:
    """Return the weight of a sign.

    Equality in a load > an exact law > what files state > a statistic; an error > a warning > a remark.
    """
    rule = RULES.get(sign.rule)
    if rule is None or rule.severity != "error":
        return 1.0 if sign.severity == "warn" else _GRAVE[sign.severity]
    return (8.0 if rule.needs == "echo" else 4.0) * _GRAVE[sign.severity]


def cover(case: Case) -> list[CauseExplanation]:
    """Return causes, best first, until no warning or error is unexplained."""
    every = matches(case, CAUSES)
    signs = [sign for sign in case.signs if sign.severity != "info"]
    left: dict[int, set[str]] = {id(sign): set(sign.tensors) or {""} for sign in signs}
    found: list[CauseExplanation] = []
    while open_ := [sign for sign in signs if left[id(sign)]]:
        scored = sorted(
            ((_score(case, cause, match, open_, left), cause, match) for cause, match in every), key=lambda one: -one[0]
        )
        stuck = max(open_, key=weight)
        if scored and scored[0][0] > 0:
            score, cause, match = scored[0]
            one = CauseExplanation(cause, match, score=score)
            one.rival, one.second = _rival(case, cause, match, every, open_, left)
        else:
            one = _named(case, stuck)
        if not _take(case, one, open_, left):
            left[id(stuck)] = set()
        if one.proof or one.follows:
            _join(found, one)
    _remarks(case, found, every)
    return found


def _named(case: Case, sign: Sign) -> CauseExplanation:
    """Return a cause that a sign's own rule names."""
    causes = [cause for cause in sign.causes or RULES[sign.rule].causes if _possible(case, cause)]
    causes = causes or list(sign.causes or RULES[sign.rule].causes)
    match = Match(leg_of(sign), UNNAMED, frozenset(sign.tensors), signs=(sign,))
    if sign.evidence.get("kind") == "unstored":
        remedy = "save it and load it, if the run still uses it"
        match = replace(match, title=_sentence(sign), question="was it left out on purpose?", remedy=remedy)
    elif sign.rule in CHANGED:  # what changed is known, why is not
        match = replace(match, title=_sentence(sign), remedy=RULES[sign.rule].remedy)
    question = asked(case, causes[0], match)
    second = causes[1] if len(causes) > 1 else ""
    named = replace(match, question=question) if question or match.title else None
    return CauseExplanation(causes[0], named, [], [], UNNAMED * weight(sign), 0.0, second)


def _sentence(sign: Sign) -> str:
    """Return what a sign reports as a title."""
    place = PLACES.get(where_of(sign), "")
    return f"{place}, {sign.message}." if place else f"{sign.message[0].upper()}{sign.message[1:]}."


def _possible(case: Case, cause: str) -> bool:
    """Return whether the checkpoints have what a cause is about: masters, Adam's moments, counters that restarted."""
    counters = case.counters("train")
    if cause == "B1" and counters.kept and counters.kept == counters.known:
        return False
    return (case.mastered or cause not in ("D1", "D2", "D3")) and (case.adam or cause not in ("B3", "B4", "B5", "B6"))


def _join(found: list[CauseExplanation], one: CauseExplanation) -> None:
    """Add a cause, or merge it into its existing entry; a question about one change does not ask about another."""
    same = next((other for other in found if other.cause == one.cause and _title(other) == _title(one)), None)
    if same is None:
        found.append(one)
        return
    same.proof += [sign for sign in one.proof if sign not in same.proof]
    same.follows += [sign for sign in one.follows if sign not in same.follows and sign not in same.proof]


def _title(one: CauseExplanation) -> str:
    return one.match.title if one.match is not None and one.match.question else ""


def _consists(cause: str, match: Match | None, sign: Sign) -> bool:
    """Return whether a sign is part of the proof of a match rather than a consequence."""
    if match is None:
        return cause in (sign.causes or RULES[sign.rule].causes)
    if any(sign is one for one in match.signs):
        return True
    if match.signs and not match.names:
        return False
    if _moment(leg_of(sign)) != _moment(match.leg):
        return False
    known = sign.rule in CAUSES[cause].explains or cause in (sign.causes or RULES[sign.rule].causes)
    return known and (not sign.tensors or not match.names or bool(match.names & set(sign.tensors)))


def _explained(case: Case, cause: str, match: Match | None, sign: Sign) -> set[str] | None:
    """Return the names of a sign that a cause explains, or ``None``."""
    if (cause[0] == "B" and _beside_optimizer(sign)) or (cause == "H1" and (_of_position(sign) or _unstored(sign))):
        return None
    if sign.rule == "P12" and "old" in sign.evidence and cause not in OF_DECAY:
        return None
    if cause == "D8" and sign.rule == "P01" and sign.evidence.get("kind") == "still":
        return None  # a skipped update is one of all parameters
    if cause == "H1" and _of_rates(sign) and (match is None or not _sets_rates(match)):
        return None
    if cause == "H1" and match is not None and match.title and sign.rule in (*OF_SETTINGS, *OF_VALUES):
        if any(sign is one for one in match.signs):
            return {*sign.tensors, ""}
        return set(sign.tensors) & match.names or None  # the match is about others
    of_values = cause == "H1" and sign.rule in OF_VALUES and "old" not in sign.evidence
    if of_values and (2 * sign.hit < sign.of or not _acts(case, sign)):  # settings are for all parameters
        return None
    if _consists(cause, match, sign):
        names = match.names if match is not None and match.names and not any(sign is s for s in match.signs) else None
        return set(sign.tensors) | {""} if names is None else (set(sign.tensors) & names) | {""}
    rules = CAUSES[cause].explains
    follows = sign.rule in rules or cause in (sign.causes or RULES[sign.rule].causes)
    if sign.rule in ("P20", "P34") and sign.causes:  # which count it is says why it restarted
        follows = cause in sign.causes
    later = _order(leg_of(sign)) > _order(match.leg) if match is not None else False
    if match is not None and match.leg == "load" and leg_of(sign) == "echo":
        later = False  # no update in between
        # odd values of parameters that the load changed; another shape alone makes no impossible ones
        names = match.names - (case.reshaped if sign.severity == "error" else frozenset())
        follows |= bool(names & set(sign.tensors))
    spread = later and sign.rule in SPREADING and match is not None and match.strength >= 0.5
    if not follows and not spread:
        return None
    if match is not None and not match.names:
        return set(sign.tensors) - case.replaced | {""}  # no setting replaces elements
    if match is None or CAUSES[cause].everywhere or spread:
        return set(sign.tensors) | {""}
    unknown = match.names - case.reshaped  # the owner of state with another shape is a weight with another shape
    if any(map(is_numbered, unknown)) and not any(map(is_numbered, sign.tensors)):
        return set(sign.tensors) | {""}  # the owner of the state is unknown
    return (set(sign.tensors) & match.names) | {""}


def _beside_optimizer(sign: Sign) -> bool:
    """Return whether a sign is about buffers, or weights that are new or reshaped, which no optimizer does."""
    roles, kind = sign.evidence.get("roles"), sign.evidence.get("kind")
    if sign.rule == "N3" and any(before < after for before, after in sign.evidence["bytes"].values()):
        return True  # state that was lost makes nothing larger
    changed = kind in ("are new", "have another shape") and "param" in str(roles)
    return roles == ["buffer"] or kind == "appeared" or changed


def _acts(case: Case, sign: Sign) -> bool:
    """Return whether settings changed that can break a law of updates, which those of the data and of gradients do not.

    Learning rates do so only if they were higher in between, and decay only in weights that no gradient reached.
    """
    found = [one.evidence.get("changed") or () for one in case.signs if one.rule in ("P16", "R12")]
    changed = {name for names in found for name in names}
    changed |= {str(one.evidence["field"]) for one in case.signs if one.rule == "R14" and "field" in one.evidence}
    if any(not (sets_rates(name) or HARMLESS.search(name.lower())) for name in changed):
        return True
    ratios = [one.evidence["ratio"] for one in case.signs if one.rule == "P15" and "ratio" in one.evidence]
    several = passed(case.evidence.before.facts, case.later.facts) != 1
    return sign.rule in ("P05", "P08") and several and any(map(sets_rates, changed)) and max(ratios, default=2.0) > 1


def _unstored(sign: Sign) -> bool:
    """Return whether a sign is about a part of the trainer's state that is gone, which no setting removes."""
    return sign.rule in ("R11", "P29") and sign.evidence.get("kind") == "unstored"


def _of_position(sign: Sign) -> bool:
    """Return whether a sign is about the position of a schedule, or of the data, that no setting moves back."""
    found = sign.evidence
    if sign.rule == "P20" and found.get("kind") == "loader":
        return bool(found.get("before") is not None and found["loader"] < found["before"])
    return found.get("kind") == "jump" if sign.rule == "P15" else sign.rule == "S17" and found.get("unit", 1) == 1


def _of_rates(sign: Sign) -> bool:
    """Return whether a sign is about learning rates, or about what a schedule makes of them."""
    return sign.rule in OF_RATES or (sign.rule == "R14" and sign.evidence.get("kind") == "lr")


def _sets_rates(match: Match) -> bool:
    """Return whether the settings of a match, or some of them, set learning rates."""
    changed = {name for one in match.signs for name in one.evidence.get("changed") or ()}
    return any(map(_of_rates, match.signs)) or any(sets_rates(name) for name in changed)


def _moment(leg: str) -> str:
    """Return the leg that shows the same event: an echo also shows the load, a later checkpoint also the updates."""
    return {"echo": "load", "after": "train"}.get(leg, leg)


def _order(leg: str) -> int:
    """Return how late something was seen; what is wrong in the load shows in everything later."""
    return {"before": 0, "load": 1, "echo": 2, "train": 3, "after": 4}.get(leg, 2)


def _score(case: Case, cause: str, match: Match, open_: Sequence[Sign], left: dict[int, set[str]]) -> float:
    score = 0.0
    for sign in open_:
        names = _explained(case, cause, match, sign)
        if names is None:
            continue
        part = len(names & left[id(sign)]) / max(len(sign.tensors), 1)  # a small rest counts little
        own = _consists(cause, match, sign)
        score += weight(sign) * part * (1.0 if own else SIDE)
    score *= match.strength * (LATER if match.leg == "train" and case.resumed == "echo" else 1.0)
    # a silent rule is not evidence against an exact match
    return score * (SILENT if not match.exact and silent(cause, case) else 1.0)


def _rival(
    case: Case,
    cause: str,
    match: Match,
    every: Sequence[tuple[str, Match]],
    open_: Sequence[Sign],
    left: dict[int, set[str]],
) -> tuple[float, str]:
    """Return the score and id of the next best cause on the proof of this one."""
    own = [sign for sign in open_ if _consists(cause, match, sign)]
    others = [
        (_score(case, name, other, own, left), name)
        for name, other in every
        if name != cause and (not match.names or not other.names or match.names & other.names)
    ]
    return max(others, default=(0.0, ""))


def _take(case: Case, one: CauseExplanation, open_: Sequence[Sign], left: dict[int, set[str]]) -> bool:
    """Mark the signs that a cause explains; return whether there were any."""
    taken = False
    for sign in open_:
        names = _explained(case, one.cause, one.match, sign)
        if names is None or not names & left[id(sign)]:
            continue
        taken = True
        (one.proof if _consists(one.cause, one.match, sign) else one.follows).append(sign)
        left[id(sign)] -= names
        if len(left[id(sign)]) <= REST * max(len(sign.tensors), 1):
            left[id(sign)] = set()
    return taken


def silent(cause: str, case: Case) -> str:
    """Return a rule that was checked and should have fired for that cause but did not; empty if none.

    What a single checkpoint shows is gone a few updates later, except for its counters.
    """
    rules: tuple[str, ...] = CAUSES[cause].expects
    if case.resumed == "after":
        rules = tuple(rule for rule in rules if RULES[rule].needs != "one" or rule in LASTING)
    checked = case.outcome.checked
    ran = [rule for rule in rules if case.resumed in checked.get(rule, "") or RULES[rule].needs != "one"]
    ran = [rule for rule in ran if rule in checked]
    return ran[0] if ran and not case.fired(*rules) else ""


def _remarks(case: Case, found: list[CauseExplanation], every: Sequence[tuple[str, Match]]) -> None:
    """Assign remarks to the causes that name them.

    Settings that were declared, parameters that were unfrozen, and what the load changed are reported even without
    consequences.
    """
    for sign in case.signs:
        if sign.severity != "info":
            continue
        causes = sign.causes or RULES[sign.rule].causes
        home = next((one for one in found if one.cause in causes), None)
        if home is None and (sign.rule == "R12" or (sign.rule in ("S06", "S07") and "H1" in sign.causes)):
            of_settings = [match for cause, match in every if cause == "H1"]
            match = next((one for one in of_settings if sign in one.signs), None)
            home = CauseExplanation("H1", match or next(iter(of_settings), None))
            found.append(home)
        known = sign.evidence.get("kind") not in ("groups", "schedule")  # which arguments declare
        alone = sign.rule in ("R11", "R17", "P34", "P52") or sign.evidence.get("wider")
        if home is None and alone and known:
            remedy = RULES[sign.rule].remedy
            match = Match(leg_of(sign), UNNAMED, signs=(sign,), title=_sentence(sign), remedy=remedy)
            home = CauseExplanation(causes[0], match)
            found.append(home)
        if home is None and sign.rule == "N10":
            question = "was the seed of the data changed on purpose?"
            home = CauseExplanation(causes[0], Match(leg_of(sign), UNNAMED, signs=(sign,), question=question))
            found.append(home)
        if home is not None and sign not in home.proof:
            home.proof.append(sign)


def places(one: CauseExplanation) -> set[str]:
    """Return the checkpoints and pairs in which a cause was seen."""
    signs = [sign for sign in one.proof if sign.severity != "info"] or one.proof
    return {where_of(sign) for sign in signs}
