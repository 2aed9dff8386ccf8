"""The smallest set of causes that explains what was found.

::

    claims      R04 {q, k}: E5 E4    P03 {q, k, v}: B1 B5    P05 {q, k}: D2 E1    S15 {norms}: A3
                        │
    best first  E5: 8·1 + what it explains, P03 and P05 of {q, k} ──► those are spoken for; P03 of {v} is not
    then        A3, B1 for what is left

A claim is spoken for parameter by parameter. What was shown to be healthy takes its causes out beforehand.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from workbench.doctor.diagnose.facts import OF_FACTS
from workbench.doctor.diagnose.links import EVERYWHERE, EXPECTS, explains, strength
from workbench.doctor.diagnose.places import block_of, layer_of
from workbench.doctor.diagnose.scene import PAIRED, TRAINED, Claim, Scene, where_of
from workbench.doctor.diagnose.values import OF_PAIRS, OF_VALUES, adapted, split
from workbench.doctor.sign import RULES

__all__ = ["Found", "claims", "cover"]

PLACES = (1.0, 0.5, 0.3, 0.2)  #: weight of a cause by its place among a claim's
LAST = 0.1
SIDE = 0.1  #: weight of what a cause would explain without being named
#: Rules on what spreads from one parameter to all in some updates; causes from which numbers explode.
SPREADING = frozenset({"S01", "S02", "S19", "N16", "N28", "P06", "P09", "N5", "N17", "N20"})
EXPLODING = frozenset({"G1", "G3", "B4", "D9", "G5"})
LASTING = frozenset({"S07", "S13", "S14", "S17"})  #: rules that see the load in a later checkpoint too
OF_MOMENTS = frozenset({"B3", "B4", "B5", "B6"})  #: nothing can be wrong with moments that no file holds
FAIR, NAMED = 0.2, 0.5  #: of the best one's score: a cause that answers for all errors is taken instead
SILENT = 0.25  #: where a rule that would have fired did not
OPEN = frozenset({"P11", "P13", "S08", "S04", "S16"})  #: rules that prove a fault, and leave open which
SEEN = 0.1  #: weight of a later pair's laws on what the echo shows directly
SMALL = 20  #: names in a sign of facts, 100 in one of values: beyond that they are cut


@dataclass
class Found:
    """A cause with the claims that it answers.

    Attributes:
        named: claims that name it; explained: those that follow from it.
        score, rival: its own, and that of the next best cause on the same claims; second: which that is.
    """

    cause: str
    named: list[Claim] = field(default_factory=list)
    explained: list[Claim] = field(default_factory=list)
    score: float = 0.0
    rival: float = 0.0
    second: str = ""


def claims(scene: Scene, excluded: Mapping[str, str]) -> list[Claim]:
    """Every sign as claims, without the causes that are excluded; a claim that would have none left keeps them."""
    made = []
    never = frozenset() if scene.adam else OF_MOMENTS
    for sign in scene.signs:
        if sign.causes and sign.rule != "S12":  # copies alone do not see what else that rank wrote
            causes = sign.causes
            if sign.rule == "R09" and adapted(sign, scene):
                causes = ("F5", *(cause for cause in causes if cause != "F5"))
            found: Iterable[Claim] = [Claim(sign, frozenset(sign.tensors), causes, sure=True)]
        elif sign.rule in OF_PAIRS:
            found = split(sign, scene)
        else:
            narrow = OF_FACTS.get(sign.rule) or OF_VALUES.get(sign.rule)
            rule = RULES.get(sign.rule)
            causes = narrow(sign, scene) if narrow else rule.causes if rule else ()
            found = [Claim(sign, frozenset(sign.tensors), causes, sure=sign.rule not in OPEN)]
        for claim in found:
            causes = tuple(cause for cause in claim.causes if cause not in never) or claim.causes
            left = tuple(cause for cause in causes if cause not in excluded)
            cut = len(claim.tensors) >= SMALL and claim.sign.hit > len(claim.tensors)
            better = TRAINED in scene.pairs or bool(claim.tensors & scene.echoed)
            weight = SEEN if sign.rule in OF_PAIRS and where_of(sign) == PAIRED and better else 1.0
            made.append(replace(claim, causes=left or causes, cut=cut, weight=weight))
    return made


def cover(scene: Scene, made: Sequence[Claim]) -> list[Found]:
    """Causes, best first, until no warning or error is left; remarks go to those that name them."""
    open_ = {number: set(claim.tensors) or {""} for number, claim in enumerate(made) if claim.sign.severity != "info"}
    whole = {number: set(names) for number, names in open_.items()}
    found: list[Found] = []
    while open_:
        scores = {cause: _score(cause, scene, made, open_) for cause in _candidates(made, open_)}
        if not scores:
            break
        best = _simplest(max(scores, key=lambda cause: scores[cause]), scores, scene, made, open_)
        one = Found(best, score=scores[best])
        scope = _scope(best, made, open_)
        grave = any(best in made[number].causes and made[number].sign.severity == "error" for number in open_)
        for number in list(open_):
            claim = made[number]
            names, spreads = best in claim.causes, grave and _spreads(best, claim)
            if not (names or spreads or _follows(best, scene, claim)):
                continue
            left = set() if spreads else _beyond(open_[number], scope, scene)
            if left == open_[number]:
                continue
            (one.named if names else one.explained).append(claim)
            open_[number] = left
            if not left:
                del open_[number]
        _rival(one, scores, scene, made, whole)
        found.append(one)
    _remarks(found, made)
    return found


def _simplest(
    best: str, scores: Mapping[str, float], scene: Scene, made: Sequence[Claim], open_: Mapping[int, set[str]]
) -> str:  # fmt: skip
    """One cause for all errors rather than two: one that all of them name, or, where none says by itself which it is,
    one that all may follow from.
    """
    errors = [number for number in open_ if made[number].sign.severity == "error"]
    certain = any(made[number].sure for number in errors)

    def answers(cause: str) -> bool:
        scope = _scope(cause, made, open_)
        return all(
            (cause in made[number].causes or (not made[number].sure and _follows(cause, scene, made[number])))
            and not _beyond(open_[number], scope, scene)
            for number in errors
        )

    if not errors or answers(best):
        return best
    least = (NAMED if certain else FAIR) * scores[best]
    others = [cause for cause in scores if scores[cause] >= least and answers(cause)]
    return max(others, key=lambda cause: scores[cause], default=best)


def _candidates(made: Sequence[Claim], open_: Mapping[int, set[str]]) -> Iterator[str]:
    return iter(dict.fromkeys(cause for number in open_ for cause in made[number].causes))


def _score(cause: str, scene: Scene, made: Sequence[Claim], open_: Mapping[int, set[str]]) -> float:
    score, scope = 0.0, _scope(cause, made, open_)
    for number, names in open_.items():
        claim = made[number]
        if cause in claim.causes:
            at = claim.causes.index(cause)
            score += strength(claim.sign) * claim.weight * (PLACES[at] if at < len(PLACES) else LAST)
        elif _follows(cause, scene, claim) and _beyond(names, scope, scene) != names:
            score += strength(claim.sign) * claim.weight * SIDE
    return score * (SILENT if silent(cause, scene) else 1.0)


def silent(cause: str, scene: Scene) -> str:
    """The rule that would have fired for that cause, was looked at, and did not; empty if none.

    What one checkpoint shows is gone some updates later, but for its counters.
    """
    rules = EXPECTS.get(cause, ())
    if scene.resumed == "after":
        rules = tuple(rule for rule in rules if RULES[rule].needs != "one" or rule in LASTING)
    checked = scene.outcome.checked
    ran = [rule for rule in rules if scene.resumed in checked.get(rule, "") or RULES[rule].needs != "one"]
    ran = [rule for rule in ran if rule in checked]
    return ran[0] if ran and not scene.fired(*rules) else ""


def _scope(cause: str, made: Sequence[Claim], open_: Mapping[int, set[str]]) -> set[str] | None:
    """The parameters that a cause is about; ``None``: all."""
    naming = [made[number] for number in open_ if cause in made[number].causes]
    first = [claim for claim in naming if claim.causes[0] == cause] or naming
    if cause in EVERYWHERE or any(claim.cut for claim in first):
        return None
    return {name for claim in first for name in claim.tensors} | {""}


def _beyond(names: set[str], scope: set[str] | None, scene: Scene) -> set[str]:
    """The names that a scope leaves out; between two formats names are compared by layer and block."""
    if scope is None:
        return set()
    left = names - scope
    if left and _renamed(scene):
        places = {(layer_of(name), block_of(name)) for name in scope if name}
        left = {name for name in left if not name or (layer_of(name), block_of(name)) not in places}
    return left


def _renamed(scene: Scene) -> bool:
    evidence = scene.evidence
    return len({one.ckpt.format for one in (evidence.before, evidence.echo, evidence.after) if one is not None}) > 1


def _follows(cause: str, scene: Scene, claim: Claim) -> bool:
    """Whether a sign can be a consequence; from a spoilt load on, whatever the later pair says is one."""
    if explains(cause, claim.sign.rule):
        return True
    return scene.trained_well and where_of(claim.sign) == PAIRED and claim.sign.rule in OF_PAIRS


def _spreads(cause: str, claim: Claim) -> bool:
    """Whether a sign of any parameter can follow: what is no number soon is none anywhere, large gradients likewise."""
    later = where_of(claim.sign) in ("after", PAIRED, TRAINED)
    return later and claim.sign.rule in SPREADING and (cause in EXPLODING or claim.sign.severity == "warn")


def _rival(
    one: Found, scores: Mapping[str, float], scene: Scene, made: Sequence[Claim], whole: Mapping[int, set[str]]
) -> None:
    """The next best cause on what this one answers."""
    answered = {number: whole[number] for number in whole if made[number] in one.named}
    others = {cause: _score(cause, scene, made, answered) for cause in scores if cause != one.cause}
    if others:
        one.second = max(others, key=lambda cause: others[cause])
        one.rival = others[one.second]


def _remarks(found: list[Found], made: Sequence[Claim]) -> None:
    for claim in made:
        if claim.sign.severity != "info" or not claim.causes:
            continue
        home = next((one for one in found if one.cause in claim.causes), None)
        if home is None and claim.sign.rule == "R12":
            home = Found("H1")
            found.append(home)
        if home is not None:
            home.named.append(claim)
