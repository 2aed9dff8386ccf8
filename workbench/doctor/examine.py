"""`wb.doctor`: look at everything that was given, reason about it, and say why the loss jumped.

::

    paths ── choose ──► Evidence ──► facts of each and of pairs       no payload
                                     alone: before, echo, after       ┐
                                     echo: before beside echo         ├ every byte, in one progress
                                     pair: before → after, echo → after ┘
                                     ──► Scene ──► diagnose ──► Diagnosis
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from workbench.analysis.report import Finding
from workbench.core.scan import Tick
from workbench.doctor.alone import check_alone
from workbench.doctor.diagnose import diagnose
from workbench.doctor.diagnose_scene import LOADED, PAIRED, TRAINED, Scene
from workbench.doctor.diagnose_values import OF_PAIRS
from workbench.doctor.diagnosis import Diagnosis, Subject
from workbench.doctor.echo import check_echo
from workbench.doctor.evidence import Evidence
from workbench.doctor.examine_given import Given, Source, choose
from workbench.doctor.examine_ran import ran_alone, ran_pair
from workbench.doctor.facts import TrainingState
from workbench.doctor.rows_pair import check_rows
from workbench.doctor.rules_facts import check_facts
from workbench.doctor.rules_shards import check_shards
from workbench.doctor.rules_values import Values, check_pair
from workbench.doctor.sign import RULES, Outcome, Sign

__all__ = ["doctor", "examine"]

#: A pass's name of a law → the rule that is on it.
LAWS = {"floor": "P03", "transition": "P04", "reach": "P05", "replay": "P12", "ruler": "P11"}


def doctor(
    before: Source,
    after: Source | None = None,
    *,
    echo: Source | None = None,
    betas: Sequence[float] | None = None,
    lr: float | None = None,
    weight_decay: float | None = None,
    deep: bool = True,
    format: str | None = None,
    threads: int | None = None,
    tick: Tick | None = None,
) -> Diagnosis:
    """Why the loss jumped after a resume.

    Args:
        before: the checkpoint that was resumed from; or a run's folder, or one with two checkpoints.
        after: a later one of the resumed run, best from soon after the resume.
        echo: ``before`` saved again right after the load, before any update; ``after`` of the same step is taken for
            one.
        betas, lr, weight_decay: of the optimizer, where no file states them; they are trusted more than the files.
        deep: read weights and moments; else only what files, names and the trainer's state tell.
        format: a reader's name, when detection should be skipped.
        threads: at most; by default a core each. tick: told the share that is done; stops by raising.

    Returns:
        causes with their proof, best supported first; what is ruled out; what was not checked. ``exit_code``: 0 where
        nothing was found, 1 for warnings, 2 for errors.

    Raises:
        OpenError: ``before`` cannot be opened. UsageError: a folder of several checkpoints without steps.
    """
    given = {"betas": betas, "lr": lr, "weight_decay": weight_decay}
    chosen = choose(before, after, echo, format, given)
    return examine(chosen, deep=deep, threads=threads, tick=tick)


def examine(given: Given, *, deep: bool = True, threads: int | None = None, tick: Tick | None = None) -> Diagnosis:
    """A diagnosis of what was opened."""
    evidence = given.evidence
    scene = Scene(evidence, check_facts(evidence))
    for which, why in given.broken.items():
        sign = RULES["V01"].sign(f"it cannot be opened: {why}", {"in": which}, causes=("G4", "G8"))
        scene.outcome.signs.append(sign)
        scene.outcome.not_checked[which] = why
    pictured: dict[str, Any] = {"evidence": evidence}  # pictures sample it
    if deep:
        _Passes(scene, threads, tick).run(pictured)
    else:
        scene.outcome.not_checked["values"] = "weights and moments were not read: deep=False"
    causes, verdict = diagnose(scene)
    found = sorted(map(_finding, scene.signs), key=lambda one: ("error", "warn", "info").index(one.severity))
    notes = "".join(f" ({note})" for note in given.notes)
    return Diagnosis(
        given.paths.get("before", evidence.before.ckpt.path), tuple(found), dict(scene.outcome.checked),
        dict(scene.outcome.not_checked), _subjects(evidence), verdict + notes, causes, tuple(scene.outcome.cleared),
        {which: _facts(evidence.state(which).facts) for which in _given(evidence)}, pictured,
    )  # fmt: skip


@dataclass
class _Passes:
    """The passes over bytes, one after the other under one progress."""

    scene: Scene
    threads: int | None
    tick: Tick | None
    done: float = 0.0
    total: float = field(default=1.0, init=False)

    def run(self, pictured: dict[str, Any]) -> None:
        evidence, scene = self.scene.evidence, self.scene
        size = {which: _bytes(evidence, which) for which in _given(evidence)}
        after, echo = evidence.after is not None, evidence.echo is not None
        self.total = 2 * sum(size.values()) + echo * (size["before"] + size.get("echo", 0))
        self.total += after * (size["before"] + size.get("after", 0)) * 2
        self.total += (after and echo) * (size.get("echo", 0) + size.get("after", 0))
        one: dict[str, Any] = {}
        alone: dict[str, Any] = {}
        pairs: dict[str, Any] = {}
        object.__setattr__(scene, "alone", alone)
        object.__setattr__(scene, "pairs", pairs)
        for which in _given(evidence):
            earlier = None if which == "before" else evidence.before
            made = self._part(
                2 * size[which], lambda t, w=which, e=earlier: check_alone(  # type: ignore[misc]
                    evidence.state(w), e, threads=self.threads, tick=t
                )
            )  # fmt: skip
            made.checked |= ran_alone(made.states, which)
            self._take(made, which)
            alone[which] = one[which] = made.states
        same = False
        if echo:
            round_trip = evidence.pair("before", "echo")
            found = self._part(
                size["before"] + size["echo"], lambda t: check_echo(round_trip, threads=self.threads, tick=t)
            )  # fmt: skip
            self._take(found, LOADED)
            pictured["echo"] = found.status
            same = bool(found.status) and all(one.status == "equal" for one in found.status.values())
        if after:
            pair = evidence.pair("before", "after")
            values = self._part(
                size["before"] + size["after"], lambda t: check_pair(pair, threads=self.threads, tick=t)
            )  # fmt: skip
            self._take(_outcome(values, PAIRED), PAIRED)
            pairs[PAIRED], pictured["pair"] = values.states, values
            if not echo:
                suspects = _suspects(values.signs)
                self._take(check_rows(pair, suspects) if suspects else Outcome(), PAIRED)
            stored = self._part(
                size["before"] + size["after"], lambda t: check_shards(pair, threads=self.threads, tick=t)
            )  # fmt: skip
            self._take(stored, PAIRED)
        if after and echo and not same:  # equal states have the same later ones
            pair = evidence.pair("echo", "after")
            values = self._part(
                size["echo"] + size["after"], lambda t: check_pair(pair, threads=self.threads, tick=t)
            )  # fmt: skip
            self._take(_outcome(values, TRAINED), TRAINED)
            pairs[TRAINED] = values.states
        pictured["one"] = one

    def _part(self, size: float, run: Callable[[Tick | None], Any]) -> Any:
        start, share = self.done / max(self.total, 1), size / max(self.total, 1)
        made = run(None if self.tick is None else lambda part: self.tick(min(1.0, start + part * share)))  # type: ignore[misc]
        self.done += size
        return made

    def _take(self, outcome: Outcome, where: str) -> None:
        """Put an outcome in, with where it was found in every sign."""
        signs = [replace(sign, evidence={"in": where, **sign.evidence}) for sign in outcome.signs]
        cleared = outcome.cleared
        if where == "after" or (where == "before" and self.scene.resumed != "before"):
            # healthy files before the load, or healthy numbers some updates after it, exclude nothing
            cleared = [replace(one, what=f"{one.what} ({where})", causes=()) for one in cleared]
        self.scene.outcome.add(Outcome(signs, dict(outcome.checked), dict(outcome.not_checked), cleared))


def _outcome(values: Values, where: str) -> Outcome:
    """What was not looked at under the rules' ids instead of the laws' names."""
    missed = {LAWS.get(name, name): why for name, why in values.not_checked.items()}
    return Outcome(list(values.signs), {**values.checked, **ran_pair(values.states, where)}, missed)


def _suspects(signs: Sequence[Sign]) -> list[str]:
    """Parameters whose origin is worth looking for."""
    return list(dict.fromkeys(name for sign in signs if sign.rule in OF_PAIRS for name in sign.tensors))


def _given(evidence: Evidence) -> list[str]:
    return [which for which in ("before", "echo", "after") if getattr(evidence, which) is not None]


def _bytes(evidence: Evidence, which: str) -> int:
    return int(evidence.state(which).ckpt.catalog.tensor_nbytes.sum())


def _subjects(evidence: Evidence) -> tuple[Subject, ...]:
    states = {which: evidence.state(which) for which in _given(evidence)}
    return tuple(Subject(w, s.ckpt.path, s.ckpt.format, s.facts.step) for w, s in states.items())


def _facts(facts: TrainingState) -> Mapping[str, tuple[Any, str]]:
    return {fact: (told[0].value, told[0].source) for fact, told in facts.told.items() if told}


def _finding(sign: Sign) -> Finding:
    where = str(sign.evidence.get("in", ""))
    if sign.tensors:
        where += f": {sign.tensors[0]!r}"
        where += f" and {sign.hit - 1:,} more" if sign.hit > 1 and len(sign.tensors) > 1 else ""
    return Finding(sign.rule, sign.severity, where, sign.message, sign.evidence, RULES[sign.rule].remedy)
