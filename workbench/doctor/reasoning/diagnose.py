"""From measurements to causes: each with its proof, its certainty and the evidence against the other causes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from workbench.analysis.report import SEVERITIES
from workbench.doctor.causes.case import ALONE, RESHAPED, RESTARTED, Case, Match, leg_of, where_of
from workbench.doctor.causes.cause import Cause
from workbench.doctor.causes.table import CAUSES
from workbench.doctor.facts.counted import of_epochs
from workbench.doctor.facts.evidence import is_numbered
from workbench.doctor.facts.state import TrainingState
from workbench.doctor.ledger.roles import AVERAGES
from workbench.doctor.ledger.sign import RULES, Sign
from workbench.doctor.reasoning.cover import CauseExplanation, cover, places, weight
from workbench.doctor.reasoning.diagnosis import Suspect
from workbench.doctor.reasoning.verdict import verdict

LIST = 100  #: tensors that a suspect names
DOUBT = 0.3  #: share of a cause's score above which a rival is named
CLOSE = 0.8  #: share of a cause's score above which a rival leaves doubt
SURE = 0.9  #: strength of a pattern from which a cause may be certain
FIRM = 0.2  #: share of the best score from which a cause that needs no question goes first
ANEW = ("B1", "C1")  #: an optimizer or a schedule begins anew on purpose more often than weights do
PAIRED = "before → after"


def diagnose(case: Case) -> tuple[tuple[Suspect, ...], str]:
    """Return the suspects, best supported first, and the verdict."""
    _standing(case)
    found = cover(case)
    _questions(case, found)
    suspects = [_suspect(one, case) for one in found]
    top = max((one.score for one in found), default=0.0) or 1.0
    # new tensors, and those of another size, explain no restarted schedule, and no state of others that is gone
    anew = any(one.cause == "B1" and one.question in (RESHAPED, RESTARTED) for one in suspects)
    defined = ("H2",) if anew else ("H2", "F7", "A4")
    order = sorted(
        range(len(found)), key=lambda n: (*_order(suspects[n], found[n].score / top, defined), -found[n].score)
    )
    ranked = _together(tuple(suspects[number] for number in order))
    return ranked, verdict(ranked, case)


def _together(suspects: tuple[Suspect, ...]) -> tuple[Suspect, ...]:
    """Return the suspects, none of them certain if several causes are errors: one other cause may explain them all."""
    errors = [one for one in suspects if one.severity == "error"]
    if len(errors) < 2:
        return suspects
    return tuple(
        replace(one, certainty="likely", runner_up="") if one.certainty == "certain" else one for one in suspects
    )


def _standing(case: Case) -> None:
    """Reduce a warning to a remark if it was the same before the resume."""
    signs = case.outcome.signs
    before, after = case.evidence.before, case.evidence.after
    if after is not None and of_epochs(before.facts, after.facts):
        words = "it is stepped once in a fixed number of updates, before the resume and after it"
        for number, sign in enumerate(signs):
            if sign.rule == "S17":
                signs[number] = replace(sign, severity="info", message=f"{sign.message}; {words}")
    seen = {_trait(sign, where_of(sign)): set(sign.tensors) for sign in signs if sign.severity != "info"}
    sides = {"before": case.resumed, "echo": "before", "after": "before"}
    for number, sign in enumerate(signs):
        names = seen.get(_trait(sign, sides.get(where_of(sign), "")))
        if names is None or case.resumed == "before" or sign.severity == "info":
            continue
        if sign.severity == "error" and sign.rule not in LASTING_TRAITS:
            continue
        # which counters are not the usual ones may change while all of them advance as they should
        advanced = sign.evidence.get("kind") == "among" and not case.fired("P01")
        new = set() if advanced else set(sign.tensors) - names
        if not new or (where_of(sign) == "before" and len(new) < len(sign.tensors)):
            signs[number] = replace(sign, severity="info", message=f"{sign.message}; it was the same before the resume")
    case.__dict__.pop("_by_rule", None)


def _trait(sign: Sign, where: str) -> tuple[object, ...]:
    """Return what makes two signs the same; for a difference without tensors, its size."""
    found = sign.evidence
    gap = found["trainer"] - found["optimizer"] if {"trainer", "optimizer"} <= found.keys() else None
    return sign.rule, where, found.get("kind"), gap, bool(sign.tensors) or sign.message


#: Rules whose errors, if the checkpoint that was resumed from shows the same, reflect how a run trains and not what
#: a resume did: other laws of moments, shared layers, counters of parameters that get no gradient.
LASTING_TRAITS = frozenset({"S04", "S07", "S08", "S09", "S13", "S14", "S15", "S06", "S05"})


def _questions(case: Case, found: Sequence[CauseExplanation]) -> None:
    """Reduce errors of possibly intended changes to warnings, unless they also prove another cause."""
    firm = {id(sign) for one in found if not (one.match and one.match.question) for sign in (*one.proof, *one.follows)}
    milder: dict[int, Sign] = {}
    for one in found:
        if one.match is None or not one.match.question:
            continue
        for sign in (*one.proof, *one.follows):
            if sign.severity == "error" and id(sign) not in firm:
                milder[id(sign)] = replace(sign, severity="warn")
    for one in found:
        one.proof = [milder.get(id(sign), sign) for sign in one.proof]
        one.follows = [milder.get(id(sign), sign) for sign in one.follows]
    case.outcome.signs[:] = [milder.get(id(sign), sign) for sign in case.outcome.signs]


def _order(one: Suspect, share: float, defined: Collection[str]) -> tuple[int, int, bool, bool, bool]:
    """Return keys by which causes are ordered before their scores: what may have been meant comes after faults.

    Settings and definitions come after all of these, and remarks last.

    Args:
        share: its score, relative to the best.
        defined: causes that are definitions of the model if they ask a question.
    """
    meant = 2 * (one.severity == "info") + (one.cause == "H1" or (one.cause in defined and bool(one.question)))
    firm = not one.question and one.certainty != "possible" and one.affected > 0 and share >= FIRM
    anew = bool(one.question) and one.cause in ANEW
    return meant, SEVERITIES.index(one.severity), not firm, one.certainty == "possible", anew


def _suspect(one: CauseExplanation, case: Case) -> Suspect:
    cause, match = CAUSES[one.cause], one.match
    signs = _ordered(one)
    names = _tensors(one)
    share = _share(names, case)
    severity = min((sign.severity for sign in one.proof), key=SEVERITIES.index, default="info")
    if severity == "info" and any(sign.severity != "info" for sign in one.follows):
        severity = "warn"
    if severity == "error" and match is not None and match.question:  # its proof is also that of another cause
        severity = "warn"
    certainty = _certainty(one, severity)
    title = match.title if match is not None and match.title else cause.title
    settings = [sign.message for sign in signs if sign.rule not in ("P30", "S19")]
    if one.cause == "H1" and title == cause.title and settings:
        words = settings[0]
        title = f"{title.removesuffix('.')}: {words.partition(' changed: ')[2] or words}."
    own = match.remedy if match is not None else ""
    bits = {one.cause, one.second} <= {"G1", "G2", "G3"}  # one accident
    close = bool(one.second) and one.rival > DOUBT * one.score and certainty != "certain" and not bits
    close = close and not (one.second == "H1" and severity == "error")  # no setting breaks these laws
    runner = CAUSES[one.second].title if close else ""
    return Suspect(
        one.cause,
        title,
        severity,
        certainty,
        tuple(signs),
        dict(match.reasons) if match is not None else {},
        _since(one, case),
        tuple(names[:LIST]),
        len(names),
        share,
        _expected(cause, match, names, case),
        own or cause.remedy(case.later.ckpt.format),
        "" if certainty == "certain" or ("echo" in cause.settles and case.evidence.echo is not None) else cause.settles,
        match.question if match is not None else "",
        runner,
    )


def _expected(cause: Cause, match: Match | None, names: Sequence[str], case: Case) -> tuple[str, ...]:
    """Return what to expect of the run; the size of updates only of parameters that Adam updates."""
    if match is not None and match.remedy:
        return (match.losses,) if match.losses else ()
    facts = case.later.facts if case.later.facts.betas is not None else case.evidence.before.facts
    adam = {name for name in case.by_adam if not names or name in names}
    losses = match.losses if match is not None else ""
    if case.exchanged or (case.later.facts.optimizer.stored and case.later.facts.betas is None):
        adam = set()  # another optimizer took over
    if match is not None and match.title and not losses and cause.losses == CAUSES["H1"].losses:
        return ()  # it is about a setting, which the title is not
    load = case.change("load")
    if names and not losses and cause.losses.startswith(("damaged weights", "the first losses are wrong")):
        changed = load.hit((*load.weights, "buffer"))
        right = load.seen(*load.weights) and not changed & ({*names} if not any(map(is_numbered, names)) else changed)
        losses = "the first loss is right; the later ones show it" if right else ""
    if names and cause.losses == CAUSES["G1"].losses and all(_is_beside(name, case) for name in names):
        losses = "no loss shows averages and buffers that only an evaluation reads"
    return cause.expected(facts if adam else TrainingState(), losses)


def _is_beside(name: str, case: Case) -> bool:
    """Return whether a name is of an average or of another tensor that is trained by no optimizer."""
    roles = case.later.params.get(name, {}).keys() | case.evidence.before.params.get(name, {}).keys()
    hit = {role for change in case.changes for role in roles if name in change.hit((role,))}
    return (hit or roles) <= {*AVERAGES, "other"}


def _ordered(one: CauseExplanation) -> list[Sign]:
    """Return the signs, proof before consequences, the strongest first, then in the order of the pattern or rules."""
    rank = {id(sign): number for number, sign in enumerate(one.match.signs)} if one.match is not None else {}

    def closeness(sign: Sign) -> tuple[float, int, int]:
        causes = () if leg_of(sign) == "load" else sign.causes or RULES[sign.rule].causes
        named = causes.index(one.cause) if one.cause in causes else len(CAUSES)
        return -weight(sign), rank.get(id(sign), len(rank)), named

    return [
        *sorted(one.proof, key=closeness),
        *sorted(one.follows, key=lambda sign: -weight(sign)),
    ]


def _tensors(one: CauseExplanation) -> list[str]:
    if one.match is not None and one.match.names:
        names = sorted(name for name in one.match.names if name)
        named = [name for name in names if not is_numbered(name)]
        return named if 2 * len(named) >= len(names) else names  # as many numbers are those of the named ones
    if one.cause == "H1" and any(not sign.tensors for sign in one.proof):
        return []  # a setting is for all of them
    return list(dict.fromkeys(name for sign in one.proof for name in sign.tensors))


def _certainty(one: CauseExplanation, severity: str) -> str:
    """Return the certainty of a cause.

    It is certain for an exact form that no other known cause and no deliberate change leaves, without a close rival.
    """
    if severity != "error":
        return "possible" if severity == "info" or one.cause == "H1" or one.score < 1.0 else "likely"
    match = one.match
    # in a load nothing follows from anything else
    alone = one.rival < CLOSE * one.score and not any(leg_of(sign) == "load" for sign in one.follows)
    sure = match is not None and match.exact and match.strength >= SURE and not match.question
    return "certain" if sure and alone else "likely"


def _since(one: CauseExplanation, case: Case) -> int | None:
    seen = places(one)
    opened = {which for which in ALONE if getattr(case.evidence, which) is not None}
    if seen and not any(not place or "→" in place or place in opened for place in seen):
        return None  # its step is unknown, because it cannot be opened
    if any(place == "before" or place.endswith("echo") for place in seen) or (one.match and one.match.leg == "load"):
        return case.evidence.before.facts.step
    if seen & {"after", PAIRED} and case.evidence.after is not None:
        return case.evidence.after.facts.step
    return case.later.facts.step


def _share(names: list[str], case: Case) -> float | None:
    """Return the share of these parameters in the elements of all weights."""
    state = case.later
    if any(map(is_numbered, names)):
        return None
    sizes = {fqn: roles.get("param", roles.get("master")) for fqn, roles in state.params.items()}
    numel = {fqn: int(state.ckpt.catalog.numel[at]) for fqn, at in sizes.items() if at is not None}
    total, part = sum(numel.values()), sum(numel.get(name, 0) for name in names)
    return part / total if total and part else None
