"""Rules that need only facts and structure: counters, schedules, data positions, arguments, the set of tensors.

::

    state ── facts_one ──▶  S06 S07 S16 S17 S18 N6 N9 N11                one checkpoint
    pair  ── facts_two ──▶  R01 R10 R11 R12 N1 N10                       a checkpoint and its echo
                            P01 P02 P15 P16 R12 S18 N1 N3 N4 N10 N12     some steps apart

No payload is read except scalars. A declared change (an argument that differs) is reported, but never counts as a
fault.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from workbench.doctor.facts.counted import accumulated, per_step, stated
from workbench.doctor.facts.evidence import Evidence, Pair, State, is_numbered
from workbench.doctor.facts.schedule import sets_rates
from workbench.doctor.facts.state import NAME
from workbench.doctor.ledger.sign import RULES, Outcome, Sign
from workbench.doctor.rules import continued as facts_two
from workbench.doctor.rules import stated as facts_one
from workbench.doctor.rules.leaves import settings_stay, values_kept
from workbench.doctor.rules.stated import OFTEN, reset_meant, scaled

_ONE: Mapping[str, Callable[[State], list[Sign] | str]] = facts_one.CHECKS
_ECHO: Mapping[str, Callable[[Pair], list[Sign] | str]] = facts_two.ECHO
_PAIR: Mapping[str, Callable[[Pair], list[Sign] | str]] = facts_two.PAIR


def check_facts(evidence: Evidence) -> Outcome:
    """Apply every rule of facts; the ``evidence["in"]`` of a sign names the checkpoint or pair it is about."""
    found = Outcome()
    for which in ("before", "echo", "after"):
        if getattr(evidence, which) is not None:
            ran = _explained(_run(_ONE, evidence.state(which), which), evidence, which)
            ran.signs = [_counted(_unfrozen(sign, evidence, which), evidence, which) for sign in ran.signs]
            found.add(ran)
    _never(found, evidence)
    if evidence.echo is not None:
        pair = evidence.pair("before", "echo")
        ran = _run(_ECHO, pair, "before → echo")
        ran.add(_run({"R17": lambda pair: values_kept(pair, ran.signs)}, pair, "before → echo"))
        found.add(_declared(ran))
    if evidence.after is not None:
        pair = evidence.pair("before", "after")
        later = _run(_PAIR, pair, "before → after")
        later.add(_run({"P52": lambda pair: settings_stay(pair, later.signs)}, pair, "before → after"))
        found.add(_declared(later))
    return found


def _declared(found: Outcome) -> Outcome:
    """Reduce settings that changed with an argument to remarks."""
    changed = {
        name
        for sign in found.signs
        if sign.rule == "R12" and sign.evidence.get("kind") == "declared"
        for name in sign.evidence["changed"]
    }
    if changed:
        rates = any(map(sets_rates, changed))
        found.signs = [replace(sign, severity="info") if _set(sign, rates) else sign for sign in found.signs]
    return found


def _set(sign: Sign, rates: bool) -> bool:
    """Return whether a sign is about settings that arguments change; ``rates``: whether these set learning rates."""
    kind = sign.evidence.get("kind")
    decays = sign.rule == "R17" and all(re.search(r"wd|weight_decay", path) for path in sign.evidence["changed"])
    if not decays and ((sign.rule in ("R14", "P19") and kind == "lr") or (sign.rule == "R17" and kind == "schedule")):
        return rates
    if sign.rule == "R14" and kind == "groups":
        return False  # no argument makes groups exchange their values
    return sign.rule in ("R14", "P19") or (sign.rule == "R17" and kind in ("groups", "schedule"))


def _never(found: Outcome, evidence: Evidence) -> None:
    """Raise the sign to a warning if no file has an optimizer, because every resume then starts a fresh one."""
    given = [which for which in ("before", "echo", "after") if getattr(evidence, which) is not None]
    never = {sign.evidence["in"] for sign in found.signs if sign.evidence.get("kind") == "never"}
    if len(given) > 1 and never == set(given):
        at = next(n for n, sign in enumerate(found.signs) if sign.evidence.get("kind") == "never")
        found.signs[at] = replace(found.signs[at], severity="warn")


def _explained(found: Outcome, evidence: Evidence, which: str) -> Outcome:
    """Reduce a sample count to a remark if the batch size changed, in between or earlier in the run."""
    later = (evidence.after or evidence.echo) if which == "before" else evidence.state(which)
    if later is None:
        return found
    a, b = evidence.before.facts, later.facts
    one, two = (facts.value("global_batch") for facts in (a, b))
    counts = [facts.value("consumed_samples") for facts in (a, b)]
    words = f"the batch was {one} before" if one and two and one != two and which != "before" else ""
    if one and one == two and None not in (*counts, a.step, b.step):
        alike = counts[1] - counts[0] == (b.step - a.step) * two  # type: ignore[operator]
        words = "in between, they agree: was the batch smaller at first?" if alike else ""
    if words:
        found.signs = [
            replace(sign, severity="info", message=f"{sign.message}; {words}")
            if sign.rule == "S18" and sign.evidence["kind"] == "samples" and sign.evidence["consumed"]
            else sign
            for sign in found.signs
        ]
    return found


def _counted(sign: Sign, evidence: Evidence, which: str) -> Sign:
    """Reduce a step mismatch to a remark if both files have it; if only the later one has it, it is a reset."""
    if sign.rule != "S07" or sign.evidence.get("kind") != "trainer":
        return sign
    a, b = evidence.before.facts, evidence.state(which).facts
    new = evidence.state(which).has_adapters and not evidence.before.has_adapters
    if new and None not in (a.step, b.step) and b.steps.usual == b.step - a.step:  # type: ignore[operator]
        return replace(sign, severity="info", message=f"{sign.message}; before has no adapters: they are new")
    held, kept = a.steps.by_name, b.steps.by_name
    since = {kept[name] for name in kept.keys() - held.keys()}
    if held and held.items() <= kept.items() and None not in (a.step, b.step) and since == {b.step - a.step}:  # type: ignore[operator]
        words = "these counters are as before, and those of new state count the updates since"
        return replace(sign, severity="info", message=f"{sign.message}; {words}")
    if which == "echo":
        fewer = len(kept) < len(held) and evidence.before.facts.step == evidence.state(which).facts.step
        if kept and fewer and kept.items() <= held.items():
            return replace(sign, severity="info", message=f"{sign.message}; these counters are as before")
    if evidence.after is None:
        return sign
    before, after, facts = evidence.before.facts, evidence.after.facts, evidence.state(which).facts
    if None not in (before.step, after.step, before.steps.usual, after.steps.usual):
        behind = before.step - before.steps.usual, after.step - after.steps.usual  # type: ignore[operator]
        if 0 < behind[0] <= behind[1] and after.steps.usual >= before.steps.usual:  # type: ignore[operator]
            words = (
                f"it was the same before ({behind[0]:,.0f} updates fewer than steps): skipped updates are not counted"
            )
            return replace(sign, severity="info", message=f"{sign.message}; {words}")
        if behind[0] == 0 < behind[1] and which == "after" and sign.severity == "info":
            if scaled(after) or reset_meant(after):
                return sign
            return replace(sign, severity="warn", message=f"{sign.message}; before the resume they agreed")
    ratio = per_step(before, after)
    if ratio is not None and facts.steps.usual is not None and facts.step is not None:
        if abs(facts.steps.usual - facts.step * ratio) <= 1:
            words = f"one step of the trainer is {ratio} updates before and after"
            return replace(sign, severity="info", message=f"{sign.message}; {words}")
        return sign
    likely = (stated(facts) or accumulated(facts)) and not reset_meant(facts) and not scaled(facts)
    known = before.steps.usual is not None and None not in (before.step, after.step) and before.step != after.step
    if which == "before" or not likely or not known or facts.source("step") == NAME:
        return sign
    if before.steps.usual == before.step:  # no micro-batches were counted then
        words = f"before the resume they agreed, at {before.step:,}"
        return replace(sign, severity="error", message=f"{sign.message.replace(OFTEN, '')}; {words}")
    words = f"before, they were at {before.steps.usual:,.0f} and {before.step:,}"
    return replace(sign, severity="error", message=f"{sign.message}; {words}")


def _unfrozen(sign: Sign, evidence: Evidence, which: str) -> Sign:
    """Reduce young counters to a remark if their parameters were new or frozen before."""
    if sign.rule not in ("S06", "S07") or sign.evidence.get("kind") not in ("among", "fresh"):
        return sign
    held, now = evidence.before.facts.steps.by_name, evidence.state(which).facts.steps.by_name
    new = now.keys() - evidence.before.params.keys()
    added = len(new) - len(held.keys() - now.keys())  # state that has numbers in one file and names in the other
    if which == "after" and new and all(map(is_numbered, new)) and added <= 0:
        return sign
    if new and now.keys() - new <= held.keys() and len({now[name] - held[name] for name in now.keys() - new}) == 1:
        later = {fqn for fqn, roles in evidence.state(which).params.items() if "param" in roles}
        if all(map(is_numbered, new)) and later <= evidence.before.params.keys():
            words = f"{added:,} of these parameters had no state before: unfrozen since"
            return replace(sign, severity="info", causes=("H1",), message=f"{sign.message}; {words}")
        words = f"{len(new):,} of these parameters are new, and the others advanced alike"
        return replace(sign, severity="info", message=f"{sign.message}; {words}")
    if which != "before" and sign.tensors and not set(sign.tensors) & evidence.before.params.keys():
        words = "before has no such parameters: they are new"
        return replace(sign, severity="info", message=f"{sign.message}; {words}")
    if which == "after" and sign.tensors and set(sign.tensors) <= evidence.pair("before", "after").newly_trained:
        words = "they had no state before: unfrozen since"
        return replace(sign, severity="info", causes=("H1",), message=f"{sign.message}; {words}")
    if sign.rule != "S07" or evidence.after is None:
        return sign
    if which == "echo" and evidence.state(which).facts.steps.by_name != evidence.before.facts.steps.by_name:
        return sign
    before, facts = evidence.before, evidence.after.facts
    first, last = before.facts.steps.usual, facts.steps.usual
    held = before.facts.steps.by_name
    off = {name: step for name, step in facts.steps.by_name.items() if step != last}
    unnamed = sum(facts.steps.counts.values()) != len(facts.steps.by_name)
    if first is None or last is None or facts.steps.split or unnamed:
        return sign
    k = last - first
    known = {name: step for name, step in off.items() if name in held}
    if k < 0 or not all(name in before.params and step <= k for name, step in off.items() if name not in known):
        return sign
    if known and all(0 <= step - held[name] <= k for name, step in known.items()):
        words = "a counter advances only by the updates in which its parameter has a gradient"
        return replace(sign, severity="info", message=f"{sign.message}; {words}")
    if known:
        return sign
    words = "they had no state before: unfrozen since"
    return replace(sign, severity="info", causes=("H1",), message=f"{sign.message}; {words}")


def _run(checks: Mapping[str, Callable[[Any], list[Sign] | str]], subject: Any, where: str) -> Outcome:
    found = Outcome()
    for rule, check in checks.items():
        result = check(subject)
        if isinstance(result, str):
            found.not_checked[rule] = result
            continue
        found.checked[rule] = where
        for sign in result:
            assert sign.rule in RULES
            found.signs.append(replace(sign, evidence={"in": where, **sign.evidence}))
    return found
