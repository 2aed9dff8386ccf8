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
from dataclasses import dataclass, replace
from typing import Any

from workbench.analysis.echo_file import Echo
from workbench.analysis.report import Finding
from workbench.core.scan import Tick
from workbench.doctor.diagnose.scene import LOADED, PAIRED, TRAINED, Scene
from workbench.doctor.diagnose.suspects import diagnose
from workbench.doctor.diagnose.values import OF_PAIRS
from workbench.doctor.diagnosis import Diagnosis, Subject
from workbench.doctor.echo.check import check_echo
from workbench.doctor.echo.prints import paired
from workbench.doctor.echo.prints_signs import check_prints
from workbench.doctor.evidence import Evidence, Pair
from workbench.doctor.facts.rules import check_facts
from workbench.doctor.facts.state import TrainingState
from workbench.doctor.given import Given, Source, choose
from workbench.doctor.ran import ran_alone, ran_pair
from workbench.doctor.rows.pair import check_rows
from workbench.doctor.rules.alone import check_alone
from workbench.doctor.rules.shards import check_shards
from workbench.doctor.rules.values import Values, check_pair
from workbench.doctor.sign import RULES, Inapplicable, Outcome, Sign

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
        OpenError: ``before`` cannot be opened. UsageError: a folder of several checkpoints without steps; betas
            that are not 0 <= β1 < 1 and 0 < β2 < 1.
    """
    given = {"betas": betas, "lr": lr, "weight_decay": weight_decay}
    chosen = choose(before, after, echo, format, given)
    return examine(chosen, deep=deep, threads=threads, tick=tick)


def examine(given: Given, *, deep: bool = True, threads: int | None = None, tick: Tick | None = None) -> Diagnosis:
    """A diagnosis of what was opened."""
    evidence = given.evidence
    alone: dict[str, Mapping[str, Any]] = {}
    pairs: dict[str, Mapping[str, Any]] = {}
    scene = Scene(evidence, check_facts(evidence), alone, pairs)
    for which, why in given.broken.items():
        sign = RULES["V01"].sign(f"it cannot be opened: {why}", {"in": which}, causes=("G4", "G8"))
        scene.outcome.signs.append(sign)
        scene.outcome.not_checked[which] = why
    pictured: dict[str, Any] = {"evidence": evidence}  # pictures sample it
    if deep:
        _Passes(scene, alone, pairs, threads, tick, given.prints).run(pictured)
    else:
        scene.outcome.not_checked["values"] = "weights and moments were not read: deep=False"
    causes, verdict = diagnose(scene)
    found = sorted(map(_finding, scene.signs), key=lambda one: ("error", "warn", "info").index(one.severity))
    absent = {rule: str(why) for rule, why in scene.outcome.not_checked.items() if isinstance(why, Inapplicable)}
    missed = {rule: why for rule, why in scene.outcome.not_checked.items() if rule not in absent}
    notes = "".join(f" ({note})" for note in given.notes)
    return Diagnosis(
        given.paths.get("before", evidence.before.ckpt.path), tuple(found), dict(scene.outcome.checked),
        missed, _subjects(evidence), verdict + notes, causes, tuple(scene.outcome.cleared),
        {which: _facts(evidence.state(which).facts) for which in _given(evidence)}, pictured, absent,
    )  # fmt: skip


@dataclass
class _Passes:
    """The passes over bytes, one after the other under one progress."""

    scene: Scene
    alone: dict[str, Mapping[str, Any]]
    pairs: dict[str, Mapping[str, Any]]
    threads: int | None
    tick: Tick | None
    prints: Echo | None = None
    done: float = 0.0
    total: float = 1.0

    def run(self, pictured: dict[str, Any]) -> None:
        evidence = self.scene.evidence
        size = {which: _bytes(evidence, which) for which in _given(evidence)}
        before, echo, after = (size.get(which) for which in ("before", "echo", "after"))
        assert before is not None
        self.total = 2.0 * sum(size.values()) + (before + echo if echo is not None else 0)
        if after is not None:
            self.total += 2 * (before + after) + (echo + after if echo is not None else 0)
        for which in size:
            if which != "echo" or self.prints is None:
                self._alone(which, 2 * size[which])
        pictured["one"] = self.alone
        same = self.prints is not None  # no bytes to look at
        if self.prints is not None:
            assert echo is not None
            pair = paired(evidence.before, self.prints)
            self._take(self._part(before + echo, check_prints, pair, self.prints), LOADED)
        elif echo is not None:
            found = self._part(before + echo, check_echo, evidence.pair("before", "echo"))
            self._take(found, LOADED)
            pictured["echo"] = found.status
            same = bool(found.status) and all(one.status == "equal" for one in found.status.values())
        if after is not None:
            pair = evidence.pair("before", "after")
            values = self._pair(before + after, pair, PAIRED)
            pictured["pair"] = values
            if echo is None and (suspects := _suspects(values.signs)):
                self._take(check_rows(pair, suspects), PAIRED)
            self._take(self._part(before + after, check_shards, pair), PAIRED)
        if after is not None and echo is not None and not same:  # equal states have the same later ones
            self._pair(echo + after, evidence.pair("echo", "after"), TRAINED)
        if self.tick is not None:
            self.tick(1.0)

    def _alone(self, which: str, size: float) -> None:
        earlier = () if which == "before" else (self.scene.evidence.before,)
        made = self._part(size, check_alone, self.scene.evidence.state(which), *earlier)
        made.checked |= ran_alone(made.states, which)
        self._take(made, which)
        for sums in made.states.values():
            sums.profile = None  # judged; those of three checkpoints of a large model are many megabytes
        self.alone[which] = made.states

    def _pair(self, size: float, pair: Pair, where: str) -> Values:
        values: Values = self._part(size, check_pair, pair)
        self._take(_outcome(values, where), where)
        self.pairs[where] = values.states
        return values

    def _part(self, size: float, check: Callable[..., Any], *given: Any) -> Any:
        start, share = self.done / max(self.total, 1), size / max(self.total, 1)
        told = self.tick

        def tick(part: float) -> None:
            assert told is not None
            told(min(1.0, start + part * share))

        made = check(*given, threads=self.threads, tick=None if told is None else tick)
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
