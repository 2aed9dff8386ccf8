"""The result of ``doctor``: causes with their proof, best supported first, for people and programs.

::

    signs ──► suspects   B1  certain   proved by S06 P01 P03 · since step 240 · damage · remedy
              ruled out  weights: 291 of 291 equal bit for bit (no A1 A2 E1 … E10)
              checked · not checked · does not apply
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from workbench.analysis.report import Report
from workbench.core.jsonable import finite
from workbench.doctor.ledger.rows import Ledger
from workbench.doctor.ledger.sign import Cleared, Sign

#: Of :meth:`Diagnosis.to_dict`.
SCHEMA = "workbench.doctor/1"
#: How certain a suspect is.
CERTAINTIES = {
    "certain": "an equality or exact law proves it, which no other known cause and no deliberate change breaks",
    "likely": "it fits the measurements best; another cause could leave the same traces",
    "possible": "it is based on a statistic, or the change may be intended",
}


@dataclass(frozen=True)
class Subject:
    """One of the checkpoints that were examined.

    Attributes:
        which: ``before``, ``echo`` or ``after``.
        step: the trainer's step; ``None`` if not stored.
    """

    which: str
    path: str
    format: str
    step: int | None


@dataclass(frozen=True)
class Suspect:
    """A cause and the evidence for it.

    Attributes:
        cause: its id in ``doctor.causes``: ``B1``.
        title: what happened, in one short sentence.
        severity: that of its most severe sign.
        certainty: a key of :data:`CERTAINTIES`.
        signs: the signs that it explains, the strongest first.
        excludes: other causes that these signs speak against, each with the reason.
        since: step of the first checkpoint that shows it; ``None`` if unknown.
        tensors: fqns of the affected parameters, up to a hundred; ``affected`` counts all of them.
        share: their share of the elements of the stored weights, if known.
        damage: what to expect of the run, with its numbers, one sentence each.
        remedy: what to do, in the user's framework if it is known.
        settle: the further file or fact that would settle doubts; empty if there are none.
        question: asks whether the change was intended, in which case nothing is wrong; such a cause is at most a
            warning.
        runner_up: title of the next best cause, if this one is not certain.
    """

    cause: str
    title: str
    severity: str
    certainty: str
    signs: tuple[Sign, ...]
    excludes: Mapping[str, str] = field(default_factory=dict)
    since: int | None = None
    tensors: tuple[str, ...] = ()
    affected: int = 0
    share: float | None = None
    damage: tuple[str, ...] = ()
    remedy: str = ""
    settle: str = ""
    question: str = ""
    runner_up: str = ""


@dataclass(frozen=True, eq=False, repr=False)
class Diagnosis(Report):
    """A report whose findings are grouped into causes.

    Attributes:
        subjects: the checkpoints, in the order before, echo, after.
        verdict: one sentence.
        causes: best supported first.
        ruled_out: what was shown to be healthy.
        facts: the trainer facts of each subject and where they are stored: which → fact → ``(value, source)``.
        pictured: the data that pictures are drawn from, by name; not part of the JSON.
        not_applicable: rules that had nothing to check, with the reason: no fp8 state, no adapters, only one file.
        coverage: what was compared and what was not, in one line.
        ledger: every measurement: leg, quantity, status, form, parameters.
        notes: which checkpoints were chosen or exchanged, one sentence each.
    """

    subjects: tuple[Subject, ...] = ()
    verdict: str = ""
    causes: tuple[Suspect, ...] = ()
    ruled_out: tuple[Cleared, ...] = ()
    facts: Mapping[str, Mapping[str, tuple[Any, str]]] = field(default_factory=dict)
    pictured: Mapping[str, Any] = field(default_factory=dict)
    not_applicable: Mapping[str, str] = field(default_factory=dict)
    coverage: str = ""
    ledger: Ledger = field(default_factory=Ledger)
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON: the fields of a report, and ``schema verdict exit_code subjects causes ruled_out
        not_applicable coverage notes ledger facts``.

        ``schema`` is :data:`SCHEMA`. Under one schema number, fields may be added but are never changed or removed. A
        cause has the fields of :class:`Suspect`; its ``signs`` have ``rule severity message evidence tensors hit of``.
        """
        plain: dict[str, Any] = _plain(
            {
                "schema": SCHEMA,
                "verdict": self.verdict,
                "exit_code": self.exit_code,
                "subjects": [vars(one) for one in self.subjects],
                "causes": [_suspect(one) for one in self.causes],
                "ruled_out": [vars(one) for one in self.ruled_out],
                "not_applicable": self.not_applicable,
                "coverage": self.coverage,
                "notes": list(self.notes),
                "ledger": self.ledger.to_dict(),
                "facts": {
                    which: {fact: {"value": value, "source": source} for fact, (value, source) in known.items()}
                    for which, known in self.facts.items()
                },
                **super().to_dict(),
            }
        )
        return plain


def _suspect(one: Suspect) -> dict[str, Any]:
    fields = {name: getattr(one, name) for name in Suspect.__dataclass_fields__ if name != "signs"}
    names = [name for name in Sign.__dataclass_fields__ if name != "causes"]
    return fields | {"signs": [{name: getattr(sign, name) for name in names} for sign in one.signs]}


def _plain(value: Any) -> Any:
    """Return ``value`` in JSON's types; any other value becomes its text."""
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(one) for one in value]
    if isinstance(value, float):
        return finite(value)
    return value if value is None or isinstance(value, (str, bool, int, float)) else str(value)
