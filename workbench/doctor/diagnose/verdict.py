"""The sentence that is read first."""

from __future__ import annotations

from workbench.doctor.diagnose.scene import PAIRED, Scene
from workbench.doctor.diagnosis import Suspect

__all__ = ["enough", "verdict"]

#: Rules on what files state.
STATED = frozenset({"S16", "S17", "S18", "N6", "N10", "N27", "P15", "P16", "R11", "R12", "S07", "P01", "R10", "S06"})
FORGOTTEN = 0.05  #: β2^k below which a later checkpoint no longer remembers the load


def verdict(suspects: tuple[Suspect, ...], scene: Scene) -> str:
    """What happened; or that nothing was found, and whether that says much."""
    real = [one for one in suspects if one.severity == "error"] or [
        one for one in suspects if one.severity == "warn" and one.cause != "H1"
    ]
    meant = [one for one in suspects if one.cause == "H1" and one not in real]
    if real:
        first = real[0]
        said = f"{first.title} ({_why(first)})"
        if others := [one for one in real[1:] if one.severity == first.severity]:
            said += " Also: " + " ".join(one.title for one in others[:2])
        return said
    lacking = enough(scene)
    if lacking:
        said = f"Nothing wrong was found, and the evidence is not enough to tell: {lacking}."
    else:
        said = "The files are healthy: look at the data's order, or at how the loss is logged."
    return f"{said} {meant[0].title}" if meant else said


def enough(scene: Scene) -> str:
    """What is lacking for 'healthy' to mean something; empty if nothing is."""
    evidence = scene.evidence
    if evidence.echo is not None and any(rule.startswith("R0") for rule in scene.outcome.checked):
        return ""
    if evidence.after is None:
        return "save an echo right after the load, or give a checkpoint from soon after the resume"
    states = scene.pairs.get(PAIRED, {})
    looked = [sums for sums in states.values() if sums.transition.of]
    betas = evidence.after.facts.betas or evidence.before.facts.betas
    if not looked or betas is None:
        return "no moments could be compared (give --betas if no file states them); save an echo right after the load"
    sides = (evidence.before.facts, evidence.after.facts)
    counters = [facts.steps.usual for facts in sides]
    first, second = counters if None not in counters else [facts.step for facts in sides]
    if first is None or second is None:
        return "how many updates lie between is not known, as no step is stored; save an echo right after the load"
    if betas[1] ** max(second - first, 0) < FORGOTTEN:
        return "too many updates lie between; save an echo right after the load"
    return ""


def _why(one: Suspect) -> str:
    exact = {sign.rule for sign in one.signs if sign.severity == "error"}
    if exact:
        return f"{one.certainty}: {len(exact)} independent exact test{'s' if len(exact) != 1 else ''}"
    stated = any(sign.rule in STATED and sign.severity == "warn" for sign in one.signs)
    return f"{one.certainty}: {'the files state it' if stated else 'statistics alone'}"
