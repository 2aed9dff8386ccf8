"""From signs to causes: what happened, what proves it, what speaks against the rest, what to expect and to do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from workbench.analysis.report import SEVERITIES
from workbench.doctor.causes.damage import expected
from workbench.doctor.causes.table import CAUSES
from workbench.doctor.diagnose.cover import Found, claims, cover, silent
from workbench.doctor.diagnose.links import SPEAKS, strength
from workbench.doctor.diagnose.scene import PAIRED, Claim, Scene, where_of
from workbench.doctor.diagnose.verdict import verdict
from workbench.doctor.diagnosis import Suspect
from workbench.doctor.sign import RULES, Sign

__all__ = ["diagnose"]

LIST = 100  #: tensors that a suspect names
CLOSE = 0.8  #: of its score: a rival above that leaves doubt


def diagnose(scene: Scene) -> tuple[tuple[Suspect, ...], str]:
    """The suspects, best supported first, and the verdict in a sentence or two."""
    _standing(scene)
    excluded = {cause: one.message for one in scene.outcome.cleared for cause in one.causes}
    found = cover(scene, claims(scene, excluded))
    suspects = [_suspect(one, scene, excluded) for one in found]
    order = sorted(range(len(found)), key=lambda n: (_meant(suspects[n]), _rank(suspects[n]), -found[n].score))
    ranked = tuple(suspects[number] for number in order)
    return ranked, verdict(ranked, scene)


def _standing(scene: Scene) -> None:
    """A warning that is the same before and after the resume did not come with it: a remark."""
    signs = scene.outcome.signs
    seen = {(sign.rule, where_of(sign)): set(sign.tensors) for sign in signs if sign.severity == "warn"}
    places = {"before": scene.resumed, "echo": "before", "after": "before"}
    for number, sign in enumerate(signs):
        names = seen.get((sign.rule, places.get(where_of(sign), "")))
        if names is None or scene.resumed == "before" or sign.severity != "warn" or not sign.tensors:
            continue
        new = set(sign.tensors) - names
        if not new or (where_of(sign) == "before" and len(new) < len(sign.tensors)):
            signs[number] = replace(sign, severity="info", message=f"{sign.message}; so it was before the resume")


def _meant(one: Suspect) -> bool:
    return one.cause == "H1"


def _rank(one: Suspect) -> int:
    return SEVERITIES.index(one.severity)


def _suspect(one: Found, scene: Scene, excluded: Mapping[str, str]) -> Suspect:
    cause = CAUSES[one.cause]
    signs = _signs(one)
    names = _tensors(one)
    share = _share(names, scene) if not any(claim.cut for claim in one.named) else None
    facts = scene.state(scene.resumed).facts
    known = facts if facts.betas is not None else scene.evidence.before.facts
    severity = min((sign.severity for sign in signs[: len(one.named)]), key=SEVERITIES.index, default="info")
    certainty = _certainty(one, severity)
    remedy = cause.remedy(scene.state(scene.resumed).ckpt.format)
    return Suspect(
        one.cause, _title(one, cause.title), severity, certainty, tuple(signs), _excludes(one, scene, excluded),
        _since(signs, scene), tuple(names[:LIST]), _affected(one, names), share, expected(one.cause, known, share),
        remedy, "" if certainty == "certain" else cause.settles,
    )  # fmt: skip


def _signs(one: Found) -> list[Sign]:
    """Those that name it first, the strongest first in each half; each once."""
    parts = []
    for claims_ in (one.named, one.explained):
        parts += sorted(dict.fromkeys(id(c.sign) for c in claims_), key=lambda at: -_of(claims_, at))
    every = {id(claim.sign): claim.sign for claim in (*one.named, *one.explained)}
    return [every[at] for at in dict.fromkeys(parts)]


def _of(claims_: Iterable[Claim], at: int) -> float:
    return next(strength(claim.sign) for claim in claims_ if id(claim.sign) == at)


def _tensors(one: Found) -> list[str]:
    strong = [claim for claim in one.named if claim.causes[0] == one.cause] or one.named
    return list(dict.fromkeys(name for claim in strong for name in claim.sign.tensors if name in claim.tensors))


def _affected(one: Found, names: list[str]) -> int:
    return max([len(names), *(claim.sign.hit for claim in one.named if claim.cut)])


def _certainty(one: Found, severity: str) -> str:
    if severity != "error":
        return "possible" if severity == "info" or one.cause == "H1" or one.score < 1.5 else "likely"
    proved = any(claim.sure and claim.sign.severity == "error" and claim.causes[0] == one.cause for claim in one.named)
    return "certain" if proved and one.rival < CLOSE * one.score else "likely"


def _excludes(one: Found, scene: Scene, excluded: Mapping[str, str]) -> dict[str, str]:
    """Other causes that the same signs might have meant, with what speaks against them."""
    others = dict.fromkeys(
        cause for claim in one.named for cause in (*claim.causes, *RULES[claim.sign.rule].causes) if cause != one.cause
    )  # fmt: skip
    told = {}
    sure = any(claim.sure and claim.sign.severity == "error" for claim in one.named)
    for cause in others:
        if cause in excluded:
            told[cause] = excluded[cause]
        elif sure and (one.cause, cause) in SPEAKS:
            told[cause] = SPEAKS[one.cause, cause]
        elif rule := silent(cause, scene):
            told[cause] = f"{rule} was looked at and found nothing"
    return told


def _title(one: Found, title: str) -> str:
    kinds = {claim.sign.evidence.get("kind") for claim in one.named if claim.sign.rule in ("S18", "R11")}
    if one.cause == "H1" and kinds & {"samples", "loader", "consumed_samples"}:
        return "Data was skipped: on purpose?"
    return title


def _since(signs: list[Sign], scene: Scene) -> int | None:
    places = {where_of(sign) for sign in signs if sign.severity != "info"} or {where_of(sign) for sign in signs}
    if "before" in places:
        return scene.evidence.before.facts.step
    if "echo" in places or any(place.endswith("echo") for place in places):
        return scene.evidence.before.facts.step
    if places & {"after", PAIRED} and scene.evidence.after is not None:
        return scene.evidence.after.facts.step
    return scene.state(scene.resumed).facts.step


def _share(names: list[str], scene: Scene) -> float | None:
    """Of the weights' elements, those of these parameters."""
    state = scene.state(scene.resumed)
    sizes = {fqn: roles.get("param", roles.get("master")) for fqn, roles in state.params.items()}
    numel = {fqn: int(state.ckpt.catalog.numel[at]) for fqn, at in sizes.items() if at is not None}
    total, part = sum(numel.values()), sum(numel.get(name, 0) for name in names)
    return part / total if total and part else None
