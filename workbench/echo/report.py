"""The result of an echo: findings with numbers, and what to run next."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any

from workbench.analysis.echo_file import Echo
from workbench.analysis.report import Finding, Report
from workbench.core.words import plural, some_of
from workbench.doctor.facts.evidence import Evidence, Pair, State
from workbench.doctor.ledger.sign import RULES, Inapplicable
from workbench.doctor.rules.facts import check_facts
from workbench.doctor.rules.prints import ComparedPrints
from workbench.errors import EchoError

LISTED = 50  #: names in the evidence
NAMED = 3  #: … and in a sentence
_HOLDS = {
    "zeros": "are all zeros",
    "ones": "are all ones",
    "other": "contain what is stored for another tensor",
    "unknown": "differ bitwise from the checkpoint",
}
_CAUSE = {
    ("zeros", "moments"): "the moments were not restored: load the optimizer after its state was initialised",
    ("zeros", "weights"): "the weights still have their initial values: list the keys that the load did not use",
    ("ones", "weights"): "the weights still have their initial values: list the keys that the load did not use",
    ("other", "moments"): "the optimizer's state went to other parameters: load it by name, not by position",
    ("other", "weights"): "weights went to other parameters: check the mapping of names, layers or stages",
}
_MOMENTS = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum", "step"}


@dataclass(frozen=True, eq=False, repr=False)
class EchoReport(Report):
    """The result of :func:`workbench.echo`: a report, equal on every rank.

    Attributes:
        echo: names, fingerprints and objects of the trainer's state.
        path: the path to which it was written, or ``None``.
    """

    echo: Echo | None = None
    path: str | None = None

    def _about(self, echo: Echo, path: str | None) -> EchoReport:
        """Return the same report with the echo's path, and what to run next in the first hint."""
        found = self._found
        if found and self.worst != "info" and self.subject != path:
            words = f"run `workbench doctor {self.subject} --echo {path or 'PATH'}`: it reports cause and remedy"
            words = words if path else f"write the echo (path=PATH) and {words}"
            hint = "; ".join(one for one in (found[0].hint, words) if one)
            found = (replace(found[0], hint=hint), *found[1:])
        return replace(self, _found=found, echo=echo, path=path)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON: the fields of a report, and ``path``."""
        return {**super().to_dict(), "path": self.path}

    def raise_for_errors(self) -> EchoReport:
        """Return the report itself if no finding is an error.

        Raises:
            EchoError: the first error, and the number of errors.
        """
        errors = [one for one in self if one.severity == "error"]
        if not errors:
            return self
        first = f"{errors[0].where}: {errors[0].message}" if errors[0].where else errors[0].message
        more = f" (and {len(errors) - 1:,} more)" if len(errors) > 1 else ""
        raise EchoError(f"the trainer's state differs from {self.subject!r}: {first}{more}; {errors[0].hint}")


def own(echo: Echo, before: State | None) -> list[Finding]:
    """Return findings that follow from the trainer alone."""
    found = []
    trained, held = echo.counts.get("trained", 0), echo.counts.get("with_state", 0)
    stored = before is not None and any(role in _MOMENTS for role in before.ckpt.roles)
    if trained and held < trained and (stored or before is None):
        later = any((_step(one) or 0) > 0 for one in (echo, before) if one is not None)
        severity = "error" if stored and held == 0 else "warn" if stored or later else "info"
        message = f"optimizer has no state: {held:,} of {trained:,} parameters have any"
        hint = "load the optimizer, or initialise its state before dcp.load fills it; without a load this is expected"
        found.append(
            Finding("echo.state", severity, "optimizer", message, {"with_state": held, "trained": trained}, hint)
        )
    strangers = echo.counts.get("strangers", 0)
    if strangers:
        message = f"{strangers:,} of the optimizer's tensors are not parameters of this model"
        hint = "create the optimizer after the model is wrapped, moved and loaded; or a framework uses flat buffers"
        found.append(Finding("echo.strangers", "warn", "optimizer", message, {"strangers": strangers}, hint))
    if echo.copies:
        names = sorted(echo.copies)
        message = (
            f"{plural(len(names), 'tensor', 'differ')} between ranks that hold full copies: {some_of(names, NAMED)}"
        )
        hint = "broadcast them from one rank; or they are shards of tensors that should be DTensors"
        found.append(Finding("echo.copies", "warn", names[0], message, {"tensors": names[:LISTED]}, hint))
    return found


def differences(found: ComparedPrints, *, state: bool) -> list[Finding]:
    """Return the differences that fingerprints show, one finding per role and kind.

    Args:
        state: whether the optimizer has any state; if not, that is already reported, and moments are not listed as
            missing.
    """
    role = found.role
    made = []
    by_kind: dict[tuple[str, str], list[Any]] = defaultdict(list)
    for one in found.differing:
        by_kind[one.role, one.holds].append(one)
    of: dict[str, int] = defaultdict(int)
    for key in [*found.equal, *(one.key for one in found.differing)]:
        of[role[key]] += 1
    for (what, holds), some in by_kind.items():
        first = some[0]
        kind = "moments" if what in _MOMENTS else "weights"
        instead = f" ({first.key!r} contains {first.other!r})" if first.other else ""
        evidence = {"role": what, "holds": holds, "of": of[what], "tensors": [one.key for one in some[:LISTED]]}
        evidence |= {"others": [one.other for one in some[:LISTED]]} if holds == "other" else {}
        names = some_of([one.key for one in some], NAMED)
        message = f"{len(some):,} of {of[what]:,} {what} tensors {_HOLDS[holds]}{instead}: {names}"
        made.append(Finding("echo.values", "error", first.key, message, evidence, _CAUSE.get((holds, kind), "")))
    for rule, words, keys in (
        ("echo.missing", "are stored, but not here", list(found.missing)),
        ("echo.extra", "are here, but not stored", list(found.extra)),
        ("echo.type", "have another type or shape than stored", list(found.unlike)),
    ):
        for what in sorted({role.get(key, "other") for key in keys}):
            some = [key for key in keys if role.get(key, "other") == what]
            if rule == "echo.missing" and what in _MOMENTS and not state:
                continue
            severity = "info" if what == "other" or (rule == "echo.extra" and what == "buffer") else "error"
            severity = "warn" if rule == "echo.type" and severity == "error" else severity
            example = f" ({found.unlike[some[0]]})" if rule == "echo.type" else ""
            message = f"{len(some):,} {what} tensors {words}{example}: {some_of(some, NAMED)}"
            made.append(Finding(rule, severity, some[0], message, {"role": what, "tensors": some[:LISTED]}))
    return made


def facts(before: State, after: State, pair: Pair) -> tuple[list[Finding], dict[str, str], dict[str, str]]:
    """Apply the doctor's rules on counters, schedules and arguments to the load: findings, checked, not checked."""
    evidence = Evidence(before, None, after)
    evidence._pairs["before", "echo"] = pair
    outcome = check_facts(evidence)
    known = {(one.rule, one.message) for one in outcome.signs if one.evidence["in"] == "before"}
    made = []
    for sign in outcome.signs:
        if sign.evidence["in"] != "before" and (sign.rule, sign.message) not in known:
            where = sign.tensors[0] if sign.tensors else ""
            made.append(
                Finding(sign.rule, sign.severity, where, sign.message, dict(sign.evidence), RULES[sign.rule].remedy)
            )
    lrs = before.facts.lr, after.facts.lr
    remedy = "load the scheduler's state after the optimizer's; a deliberate change also gives this warning"
    if None not in lrs and lrs[0] != lrs[1]:
        message = f"the optimizer's lr is {lrs[1]:.6g}, but {lrs[0]:.6g} ({before.facts.source('lr')}) is stored"
        made.append(Finding("echo.lr", "warn", "optimizer", message, {"lr": lrs[1], "stored": lrs[0]}, remedy))
    decays = [
        name
        for group in after.facts.groups
        for name in group.params or ()
        if (one := before.facts.group_of(name)) is not None
        and None not in (one.weight_decay, group.weight_decay)
        and one.weight_decay != group.weight_decay
    ]
    if decays:
        message = f"weight decay differs for {plural(len(decays), 'parameter')}: {some_of(decays, NAMED)}"
        made.append(Finding("echo.decay", "warn", decays[0], message, {"tensors": decays[:LISTED]}))
    checked = {rule: f"whether {RULES[rule].law}" for rule, where in outcome.checked.items() if "echo" in where}
    missed = {rule: why for rule, why in outcome.not_checked.items() if not isinstance(why, Inapplicable)}
    return made, checked, missed


def _step(one: Echo | State) -> int | None:
    if isinstance(one, State):
        return one.facts.step
    state = one.objects.get("train_state")
    step = state.get("step") if isinstance(state, dict) else None
    return step if isinstance(step, int) else None
