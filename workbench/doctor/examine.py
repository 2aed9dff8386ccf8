"""`wb.doctor`: examine everything that was given and report why the loss jumped.

::

    paths ── choose ──► Evidence ──► facts of each and of pairs       no payload
                                     alone: before, echo, after       ┐
                                     echo: before beside echo         ├ every byte, in one progress
                                     pair: before → after, echo → after ┘
                                     ──► Scene ──► diagnose ──► Diagnosis
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from workbench.analysis.echo_file import Echo
from workbench.analysis.report import Finding
from workbench.core.executors import using
from workbench.core.remote.url import with_options
from workbench.core.scan import Progress, part_of
from workbench.core.source import needs_descriptors
from workbench.doctor.causes.case import Case
from workbench.doctor.facts.evidence import Evidence, State
from workbench.doctor.facts.state import TrainingState
from workbench.doctor.given import Given, Source, choose
from workbench.doctor.ledger.roles import MOMENTS, quantity
from workbench.doctor.ledger.rows import Ledger
from workbench.doctor.ledger.sign import RULES, SAVED, Inapplicable, Outcome, Sign, looked_at
from workbench.doctor.passes.updates import passed
from workbench.doctor.reasoning.diagnose import diagnose
from workbench.doctor.reasoning.diagnosis import Diagnosis, Subject
from workbench.doctor.reasoning.verdict import coverage
from workbench.doctor.rules.alone import check_alone
from workbench.doctor.rules.carried import check_carried
from workbench.doctor.rules.continuity import check_continuity
from workbench.doctor.rules.elsewhere import check_rows, turned_weights
from workbench.doctor.rules.facts import check_facts
from workbench.doctor.rules.files import check_files
from workbench.doctor.rules.load import check_echo
from workbench.doctor.rules.measured import counter_rows, load_rows, print_rows, state_rows, train_rows
from workbench.doctor.rules.one import narrowed
from workbench.doctor.rules.prints import paired
from workbench.doctor.rules.prints_signs import check_prints
from workbench.doctor.rules.settings import setting_rows
from workbench.doctor.rules.shards import check_shards
from workbench.doctor.rules.twins import check_twins
from workbench.doctor.rules.values import PassValues, check_pair
from workbench.errors import WorkbenchError, WorkerError

FACTS = 0.0625  #: share of the progress in which the checkpoints are opened and their facts gathered
LOADED, PAIRED, TRAINED = "before → echo", "before → after", "echo → after"
#: Rules on the values of a pair; where the values of their parameters came from is then examined.
OF_PAIRS = frozenset({"P03", "P04", "P05", "P06", "P08", "P12"})
#: Name of a law in a pass → the rule that checks it.
LAWS = {"floor": "P03", "transition": "P04", "reach": "P05", "replay": "P12", "ruler": "P11"}


@needs_descriptors()
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
    progress: Progress | None = None,
    storage_options: Mapping[str, Any] | None = None,
    executor: Executor | None = None,
) -> Diagnosis:
    """Diagnose why the loss jumped after a resume.

    Args:
        before: the checkpoint that was resumed from, or the folder of a run, or a folder with two checkpoints.
        after: a later checkpoint of the resumed run, as soon after the resume as possible.
        echo: ``before`` saved again right after the load, before any update. If ``after`` is from the same step, it
            is used as the echo.
        betas, lr, weight_decay: the optimizer's settings, if no file stores them; they take precedence over the files.
        deep: read weights and moments; otherwise use only files, names and the trainer's state.
        format: a reader's name, to skip detection.
        threads: largest number of threads; by default one per core.
        progress: called with the fraction done; raise to cancel.
        storage_options: for those of ``before``, ``after`` and ``echo`` that are URLs, as in ``wb.open``.
        executor: a ``concurrent.futures.Executor`` whose workers do the reading: a process pool with the start method
            ``spawn``, or ``distributed.Client(…).get_executor()``. The search for where changed values came from runs
            in this process. The result is the same, bit for bit.

    Returns:
        The causes with their proof, best supported first; what was ruled out; what was not checked. ``exit_code`` is 0
        if nothing was found, 1 for warnings, 2 for errors.

    Raises:
        OpenError: ``before`` cannot be opened, or no step of the run; ``after`` or ``echo`` does not exist, or is in an
            unknown format.
        UsageError: a folder of several checkpoints without steps; betas outside 0 <= β1 < 1 and 0 < β2 < 1.
        WorkerError: the executor lost its workers or its scheduler.
    """
    given = {"betas": betas, "lr": lr, "weight_decay": weight_decay}
    with using(executor), with_options(storage_options, before, after, echo):
        opened = part_of(progress, 0.0, FACTS)
        chosen = choose(before, after, echo, format, given, lambda a, b: _glance(a, b, deep, threads), opened)
        return examine(chosen, deep=deep, threads=threads, progress=part_of(progress, FACTS, 1 - FACTS))


def examine(
    given: Given, *, deep: bool = True, threads: int | None = None, progress: Progress | None = None
) -> Diagnosis:
    """Diagnose the opened checkpoints."""
    evidence = given.evidence
    if progress is not None:
        progress(0.0)
    work = _Passes(evidence, check_facts(evidence), threads, progress, given.prints)
    outcome = work.outcome
    for which, why in given.broken.items():
        name = "it" if which in ("echo", "after") else repr(which)  # a step of the run
        outcome.signs.append(RULES["V01"].sign(f"{name} cannot be opened: {why}", {"in": which}, causes=("G4", "G8")))
        outcome.not_checked[which] = why
    for which, why in given.strange.items():
        outcome.not_checked[which] = why
    pictured: dict[str, Any] = {"evidence": evidence}  # pictures sample it
    if deep:
        with ExitStack() as held:  # hundreds of small parts of each file are read
            for which in _given(evidence):
                held.enter_context(evidence.state(which).ckpt.payloads.pool.keeping())
            work.run(pictured)
    else:
        outcome.not_checked["values"] = "weights and moments were not read: deep=False"
    work.settings()
    outcome.signs[:] = _as_before(outcome.signs, _given(evidence))
    case = Case(evidence, outcome, work.ledger, work.alone, work.pairs, work.traits)
    causes, words = diagnose(case)
    if given.strange:  # one line, and no cause
        words = " ".join(f"{why[0].upper()}{why[1:]}." for why in given.strange.values())
        causes = ()
        case.signs.append(RULES["N30"].sign(words, {"in": next(iter(given.strange))}))
    found = sorted(map(_finding, case.signs), key=lambda one: ("error", "warn", "info").index(one.severity))
    absent = {rule: str(why) for rule, why in outcome.not_checked.items() if isinstance(why, Inapplicable)}
    missed = {rule: why for rule, why in outcome.not_checked.items() if rule not in absent}
    notes = (*given.notes, *_right_save(outcome))
    return Diagnosis(
        given.paths.get("before", evidence.before.ckpt.path),
        tuple(found),
        dict(outcome.checked),
        missed,
        _subjects(evidence),
        words + "".join(f" ({note})" for note in notes),
        causes,
        tuple(outcome.cleared),
        {which: _facts(evidence.state(which).facts) for which in _given(evidence)},
        pictured,
        absent,
        coverage(case),
        work.ledger,
        notes,
    )


def _as_before(signs: Sequence[Sign], given: Sequence[str]) -> list[Sign]:
    """Lower what is not finite in buffers only, and in the same ones of every checkpoint: the resume changed nothing.

    A buffer may hold NaN for what was not set yet. If weights or moments are not finite, buffers may show why.
    """
    broken = [one for one in signs if one.rule in ("S01", "P09")]
    if len(given) < 2 or not broken or not all(one.evidence.get("buffers") for one in broken):
        return list(signs)
    each = [
        [(one.evidence["buffers"], one.evidence["count"]) for one in broken if one.evidence["in"] == which]
        for which in given
    ]
    if any(one != each[0] for one in each):
        return list(signs)
    return [replace(one, severity="info") if one in broken else one for one in signs]


def _right_save(outcome: Outcome) -> list[str]:
    """Return a note that a fault came with the load, if the manifest shows that the save is right."""
    wrong = any(sign.severity != "info" and sign.evidence.get("in") == LOADED for sign in outcome.signs)
    before = f"{SAVED} (before)"
    return [
        f"the save is right; the load caused the differences: {one.message}"
        for one in outcome.cleared
        if wrong and one.what == before
    ]


def _glance(a: State, b: State, deep: bool, threads: int | None) -> int:
    """Return the severity of faults between two neighbours of a run, by facts and the laws of updates only."""
    try:
        evidence = Evidence(a, b)
        signs = list(check_facts(evidence).signs)
        if deep:
            signs += check_pair(evidence.pair("before", "after"), threads=threads).signs
    except WorkerError:
        raise
    except WorkbenchError:
        return 0  # the diagnosis of that pair reports what cannot be read
    grave = [sign.severity for sign in signs if str(sign.evidence.get("in", "→")).find("→") >= 0]
    return 2 if "error" in grave else 1 if "warn" in grave else 0


#: Forms of moments that began at zero in the load.
BEGAN = ("zero", "zeros", "absent")


class _Passes:
    """The passes over bytes, run one after the other under one progress; measurements go into the ledger."""

    def __init__(
        self, evidence: Evidence, outcome: Outcome, threads: int | None, progress: Progress | None, prints: Echo | None
    ) -> None:
        self.evidence, self.outcome, self.prints = evidence, outcome, prints
        self.threads, self.progress = threads, progress
        self.ledger = Ledger()
        self.alone: dict[str, Mapping[str, Any]] = {}
        self.pairs: dict[str, Mapping[str, Any]] = {}
        self.traits: dict[str, Any] = {}
        self.start = "before"  #: where the updates begin
        self.done, self.total = 0.0, 1.0

    def run(self, pictured: dict[str, Any]) -> None:
        evidence = self.evidence
        size = {which: _bytes(evidence, which) for which in _given(evidence)}
        before, echo, after = (size.get(which) for which in ("before", "echo", "after"))
        assert before is not None
        self.total = 2.0 * sum(size.values()) + (before + echo if echo is not None else 0)
        self.total += 2 * (before + after) if after is not None else 0
        self._alone("before", 2 * before)
        if self.prints is not None:
            assert echo is not None
            pair = paired(evidence.before, self.prints)
            found = self._part(before + echo, check_prints, pair, self.prints)
            self._take(found, LOADED)
            self.ledger.add(*print_rows(found.compared))
        elif echo is not None:
            self._load(before, echo, pictured)
        if after is not None:
            self._alone("after", 2 * after)
            self._train(self.start, size[self.start] + after, pictured)
        pictured["one"] = self.alone
        if self.progress is not None:
            self.progress(1.0)

    def _load(self, before: int, echo: int, pictured: dict[str, Any]) -> None:
        pair = self.evidence.pair("before", "echo")
        found = self._part(before + echo, check_echo, pair)
        self._take(found, LOADED)
        self.ledger.add(*load_rows(pair, found.status, found.geometry))
        self.traits |= found.traits
        pictured["echo"] = found.status
        counts = [state.facts.steps.counts for state in (pair.a, pair.b)]
        held = pair.a.params
        apart = any(  # of another shape
            quantity(role) is not None and role in held.get(fqn, {}) and (fqn, role) not in found.status
            for fqn, roles in pair.b.params.items()
            for role in roles
        )
        same = bool(found.status) and not apart and all(one.status == "equal" for one in found.status.values())
        if same and counts[0] == counts[1] and not pair.mapped:
            self.alone["echo"] = self.alone["before"]  # the same values, but its files may differ
            numbers = [sign for sign in self.outcome.signs if sign.evidence.get("in") == "before" and sign.tensors]
            self._take(Outcome([replace(sign, evidence={**sign.evidence, "in": "echo"}) for sign in numbers]), "echo")
            self._take(self._part(2 * echo, check_files, self.evidence.state("echo")), "echo")
            return
        self._alone("echo", 2 * echo)
        self.start = "echo"

    def _train(self, start: str, size: int, pictured: dict[str, Any]) -> None:
        pair, where = self.evidence.pair(start, "after"), TRAINED if start == "echo" else PAIRED
        values: PassValues = self._part(size, check_pair, pair)
        self._take(_outcome(values, where), where)
        self.pairs[where] = values.states
        pictured["pair"] = values
        carried = check_carried(pair, values.updates, values.states)
        self._take(carried, where)
        moved = {key for key, form in carried.forms.items() if form.startswith("moved.")}
        kept = check_continuity(pair, values.updates, values.states, moved)
        known = {name for one in carried.signs if one.rule == "P24" for name in one.tensors}
        kept.signs = [one for one in kept.signs if one.rule != "P24" or not known.issuperset(one.tensors)]
        self._take(kept, where)
        self._take(check_twins(pair), where)
        self._take(narrowed(self.alone[start], self.alone["after"]), where)
        signs = list(values.signs)
        suspects = list(dict.fromkeys(name for sign in values.signs if sign.rule in OF_PAIRS for name in sign.tensors))
        turned = turned_weights(values.states)
        turned += [name for one in carried.signs if one.rule == "P25" for name in one.tensors]
        if suspects or turned:
            rows = check_rows(pair, suspects, turned)
            self._take(rows, where)
            signs += rows.signs
        forms = carried.forms | {key: form for key, form in kept.forms.items() if form or key not in carried.forms}
        self.ledger.add(*train_rows(pair, values.updates, values.states, [*carried.signs, *kept.signs, *signs], forms))
        if start == "before":
            self._take(self._part(size, check_shards, pair), where)

    def settings(self) -> None:
        """Add rows for counters and settings on both legs."""
        evidence = self.evidence
        if evidence.echo is not None:
            pair = evidence.pair("before", "echo")
            self.ledger.add(*counter_rows(pair, "load", 0), *setting_rows(pair, "load"))
        if evidence.after is not None:
            pair = evidence.pair(self.start, "after")
            k, train = passed(pair.a.facts, pair.b.facts), self.ledger.change("train")
            broken, zeros = train.hit(MOMENTS), train.hit(MOMENTS, *BEGAN)
            self.ledger.add(*counter_rows(pair, "train", k, broken, zeros), *setting_rows(pair, "train"))

    def _alone(self, which: str, size: float) -> None:
        earlier = () if which == "before" else (self.evidence.before,)
        made = self._part(size, check_alone, self.evidence.state(which), *earlier)
        made.checked |= looked_at("one", made.states, which)
        self._take(made, which)
        for sums in made.states.values():
            sums.profile = None  # no longer needed; profiles of three large checkpoints take many megabytes
        self.alone[which] = made.states
        self.ledger.add(*state_rows(self.evidence.state(which), which, made.states))

    def _part(self, size: float, check: Callable[..., Any], *given: Any) -> Any:
        progress = part_of(self.progress, self.done / max(self.total, 1), size / max(self.total, 1))
        made = check(*given, threads=self.threads, progress=progress)
        self.done += size
        return made

    def _take(self, outcome: Outcome, where: str) -> None:
        """Add an outcome, with its place in every sign."""
        resumed = "echo" if self.evidence.echo is not None else "after" if self.evidence.after is not None else "before"
        signs = [replace(sign, evidence={"in": where, **sign.evidence}) for sign in outcome.signs]
        cleared = outcome.cleared
        if where == "after" or (where == "before" and resumed != "before"):
            # healthy files before the load, or healthy numbers a few updates after it, exclude nothing
            cleared = [replace(one, what=f"{one.what} ({where})", causes=()) for one in cleared]
        self.outcome.add(Outcome(signs, dict(outcome.checked), dict(outcome.not_checked), cleared))


def _outcome(values: PassValues, where: str) -> Outcome:
    """Return an outcome that uses rule ids instead of the laws' names."""
    missed = {LAWS.get(name, name): why for name, why in values.not_checked.items()}
    return Outcome(list(values.signs), {**values.checked, **looked_at("pair", values.states, where)}, missed)


def _given(evidence: Evidence) -> list[str]:
    return [which for which in ("before", "echo", "after") if getattr(evidence, which) is not None]


def _bytes(evidence: Evidence, which: str) -> int:
    return int(evidence.state(which).ckpt.catalog.tensor_nbytes.sum())


def _subjects(evidence: Evidence) -> tuple[Subject, ...]:
    states = {which: evidence.state(which) for which in _given(evidence)}
    return tuple(Subject(w, s.ckpt.path, s.ckpt.format, s.facts.step) for w, s in states.items())


def _facts(facts: TrainingState) -> Mapping[str, tuple[Any, str]]:
    return {fact: (held[0].value, held[0].source) for fact, held in facts.statements.items() if held}


def _finding(sign: Sign) -> Finding:
    where = str(sign.evidence.get("in", ""))
    if sign.tensors:
        where += f": {sign.tensors[0]!r}"
        where += f" and {sign.hit - 1:,} more" if sign.hit > 1 and len(sign.tensors) > 1 else ""
    return Finding(sign.rule, sign.severity, where, sign.message, sign.evidence, RULES[sign.rule].remedy)
